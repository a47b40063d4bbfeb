"""Real vLLM on CPU: time to first token from a cold disk, and what offloading costs a decode step and a prefill step.

    python bench/vllm_ttft.py --root DIR [--rounds 3] [--full]

Three arms, an engine each, in processes of their own that live side by side and are asked in turn: no offloading
(recomputes), kvdisk, and vLLM's TieringOffloadingSpec with its fs tier, of which only the device copy is replaced
(cpu_tiering.py). The model is a small llama with random weights, its KV 4 KiB a token.

1. TTFT and total time of prompts of 1k to 16k tokens, stored before. Host memory is cold: before each request what was
   stored has reached the disk, the arenas are emptied, the engine's own cache is dropped, files leave the page cache.
2. Decode: four sequences at once, offloading of prompts and generated tokens on, against off; passes alternate. What a
   step takes longer is vLLM's connector and kvdisk: the fs tier's arm and the time in kvdisk's calls tell them apart.
3. Steps of a prefill with stores against the same steps without; and the time that kvdisk copied in each.

A CPU computes attention some thousand times slower than a GPU, and reads its disk as fast: how much sooner than
recomputing a token comes says little about a GPU. How the arms that load compare with each other does.

Without `--full` prompts from 8k tokens on are recomputed in one round only. Results: bench/results/vllm_ttft.json, .md
and .png.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bars
from bars import Bar, at_most, quoted, reported
from table import plotter
from talk import Talker

from kvdisk.cli import tiny_models
from kvdisk.cli.machine import file_system, summary

HERE = Path(__file__).parent
OFF, KVDISK, FS = "recompute", "kvdisk", "vLLM fs tier"
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
LONG = 8192  # from here on recomputing takes seconds to minutes
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32_768,
}
KV_BYTES_A_TOKEN = 4 * 4 * 64 * 2 * 2
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 4
TOTAL_TOKENS = 16  # generated, for the total time
SEQUENCES, DECODED = 4, 128
STEP_TOKENS = 1024
DECODE_PASSES, STORE_PASSES = 10, 8  # a round: a pass of either arm differs from the last by 10 to 20 % here
DECODE_CHANGE_MAX = 2.0  # percent

Samples = dict[str, dict[int, list[tuple[float, float]]]]  # arm -> prompt tokens -> (TTFT s, total s) of each round


def connector(arm: str, root: Path) -> dict[str, Any] | None:
    """`kv_transfer_config` of an arm."""
    if arm == OFF:
        return None
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": 256 << 20,
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "offload_prompt_only": False,
    }
    if arm == KVDISK:
        extra |= {
            "spec_name": "KVDiskOffloadingSpec",
            "spec_module_path": "kvdisk.vllm",
            "root_dir": str(root),
            "disk_bytes_to_use": "4GiB",
        }
    else:
        tier = {"type": "fs", "root_dir": str(root)}
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def engine_arguments(arm: str, models: Path, root: Path) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    arguments: dict[str, Any] = {
        "model": str(models / "llama"),
        "load_format": tiny_models.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": LENGTHS[-1] + 512,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": STEP_TOKENS,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": False,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 2 * LENGTHS[-1] * KV_BYTES_A_TOKEN,
    }
    config = connector(arm, root)
    return arguments if config is None else {**arguments, "kv_transfer_config": config}


@contextmanager
def arms(work: Path) -> Iterator[dict[str, Talker]]:
    """The engines, started together."""
    models = work / "models"
    tiny_models.write(models, **MODEL)
    with ExitStack() as ends:
        talkers = {}
        for arm in (OFF, KVDISK, FS):
            root = work / arm.replace(" ", "-")
            root.mkdir(mode=0o700)
            plan = work / f"{root.name}.json"
            plan.write_text(json.dumps(engine_arguments(arm, models, root)))
            environment = {
                **tiny_models.environment(models),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "PYTHONPATH": os.pathsep.join([str(models), str(HERE)]),
            }
            words = [sys.executable, str(HERE / "ttft_engine.py"), str(plan)]
            talkers[arm] = Talker(arm, words, work / f"{root.name}.log", environment)
            ends.callback(talkers[arm].close)
        for talker in talkers.values():
            talker.wait_until_ready()
        yield talkers


def tokens(count: int, seed: int) -> list[int]:
    """A prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, tiny_models.VOCABULARY) for _ in range(count)]


def drop_page_cache(root: Path) -> None:
    """Of the files below `root`. They are read directly, so this is for a file system that refuses that."""
    for folder, _, names in os.walk(root):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def first_tokens(talkers: dict[str, Talker], work: Path, rounds: int, full: bool) -> Samples:
    """Part 1. Prompts are heads of one long prompt, and a token more: that one is always computed."""
    long = tokens(LENGTHS[-1] + 1, seed=1)
    for arm, talker in talkers.items():
        talker.ask(op="generate", prompts=[tokens(300, seed=2)], max_tokens=2)  # pays for what only the first pays for
        if arm != OFF:
            talker.ask(op="generate", prompts=[long], max_tokens=1)
    found: Samples = {arm: {} for arm in talkers}
    for round_ in range(rounds):
        for length in LENGTHS:
            for arm in talkers if round_ % 2 == 0 else reversed(talkers):
                if arm == OFF and length >= LONG and round_ and not full:
                    continue
                talkers[arm].ask(op="forget")
                drop_page_cache(work / arm.replace(" ", "-"))
                prompt = [*long[:length], 3 + round_]
                answer = talkers[arm].ask(op="generate", prompts=[prompt], max_tokens=TOTAL_TOKENS)
                expected = 0 if arm == OFF else length
                assert answer["cached"] == [expected], f"{arm} had {answer['cached']} of {expected} tokens"
                found[arm].setdefault(length, []).append((answer["ttft_s"][0], answer["total_s"]))
    return found


def decode(talkers: dict[str, Talker], rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Part 2: mean ms of a step in which all sequences decode, by arm, a value a round; and of it in kvdisk's calls."""
    found: dict[str, list[float]] = {}
    mine: list[float] = []
    for round_ in range(rounds):
        prompts = [tokens(200, seed=1000 + round_ * SEQUENCES + i) for i in range(SEQUENCES)]
        for arm in talkers if round_ % 2 == 0 else reversed(talkers):
            answer = talkers[arm].ask(op="generate", prompts=prompts, max_tokens=DECODED)
            steps = [step for step in answer["steps"] if step[1] == SEQUENCES]
            assert len(steps) > DECODED // 2, f"{arm} decoded together in {len(steps)} steps only"
            found.setdefault(arm, []).append(statistics.fmean(ms for ms, *_ in steps))
            if arm == KVDISK:
                mine.append(statistics.fmean(copy + rest for _, _, copy, rest in steps))
            talkers[arm].ask(op="forget")
    return found, mine


def store_steps(talkers: dict[str, Talker], rounds: int) -> list[dict[str, float]]:
    """Part 3: of each step that copies, ms with and without stores, of copying, and of kvdisk's other calls."""
    found = []
    for round_ in range(rounds):
        prompt = tokens(4 * STEP_TOKENS, seed=5000 + round_)
        answers = {}
        for arm in (OFF, KVDISK) if round_ % 2 == 0 else (KVDISK, OFF):
            answers[arm] = talkers[arm].ask(op="generate", prompts=[prompt], max_tokens=8)["steps"]
            talkers[arm].ask(op="forget")
        computing = [step for step in answers[KVDISK] if step[1]]
        without = [step for step in answers[OFF] if step[1]]
        for mine, theirs in zip(computing, without, strict=False):
            if mine[2]:
                found.append({"with": mine[0], "without": theirs[0], "copy": mine[2], "rest": mine[3]})
    assert found, "no step stored anything"
    return found


def verdicts(
    first: Samples, decoded: dict[str, list[float]], mine: Sequence[float], stores: Sequence[dict[str, float]]
) -> list[Bar]:
    """Every bar, and what has none."""
    found = []
    for length in LENGTHS:
        mine = [ttft for ttft, _ in first[KVDISK][length]]
        for other, name in ((FS, "the fs tier's"), (OFF, "recomputing")):
            theirs = [ttft for ttft, _ in first[other][length]]
            ratios = [theirs[min(i, len(theirs) - 1)] / own for i, own in enumerate(mine)]
            case = f"{length // 1024}k tokens"
            found.append(reported("ttft", f"TTFT: {name} over kvdisk's", f"{case}, {name} over kvdisk's",
                                  f"{quoted(ratios)} x"))  # fmt: skip
    change, theirs = (
        [(on / off - 1) * 100 for on, off in zip(decoded[arm], decoded[OFF], strict=True)] for arm in (KVDISK, FS)
    )
    case = f"{SEQUENCES} sequences, {len(change)} passes each"
    found += [
        at_most("decode", "time per output token", case, DECODE_CHANGE_MAX, change, "%", 1),
        reported("decode", "the same with the fs tier", case, f"{quoted(theirs, 1)} %"),
        reported("decode", "a step without offloading", case, f"{quoted(decoded[OFF])} ms"),
        reported("decode", "kvdisk's own calls in a step", case, f"{quoted(mine, 3)} ms"),
    ]
    copy = [one["copy"] for one in stores]
    slower = [one["with"] - one["without"] for one in stores]
    noise = statistics.median(one["without"] for one in stores) * DECODE_CHANGE_MAX / 100
    beyond = [late - copied for late, copied in zip(slower, copy, strict=True)]
    case = f"{len(stores)} steps of up to {STEP_TOKENS} tokens"
    found += [
        at_most("store delay", "a step with stores, less one without, less the copy", case, noise, beyond, "ms", 2),
        reported("store delay", "the copy into the arena", case, f"{quoted(copy)} ms"),
        reported("store delay", "kvdisk's other calls", case, f"{quoted([one['rest'] for one in stores])} ms"),
        reported("store delay", "a step without stores", case, f"{quoted([one['without'] for one in stores])} ms"),
    ]
    return found


def seconds_table(first: Samples) -> list[str]:
    """TTFT and total time of each arm and length, as Markdown."""
    lines = ["| tokens | KV MiB | " + " | ".join(f"{arm}: TTFT, s | total, s" for arm in first) + " |",
             "| ---: | ---: |" + " ---: |" * (2 * len(first))]  # fmt: skip
    for length in LENGTHS:
        cells = []
        for by_length in first.values():
            ttft, total = zip(*by_length[length], strict=True)
            cells += [quoted(ttft, 3), quoted(total, 3)]
        lines.append(f"| {length:,} | {length * KV_BYTES_A_TOKEN >> 20} | {' | '.join(cells)} |")
    return lines


def plot(path: Path, first: Samples) -> None:
    """TTFT by prompt length, a line an arm."""
    pyplot = plotter()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 5), constrained_layout=True)
    for arm, by_length in first.items():
        axes.plot(LENGTHS, [statistics.median(t for t, _ in by_length[n]) for n in LENGTHS], marker="o", label=arm)
    axes.set(xlabel="prompt tokens", ylabel="s", xscale="log", yscale="log", title="time to first token, cold memory")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="recompute in each round; three times the decode passes")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is given back
    head = {
        "machine": summary(),
        "file system": file_system(arguments.root),
        "model": f"llama, {MODEL['num_hidden_layers']} layers, {KV_BYTES_A_TOKEN} bytes of KV a token, chunks of "
        f"{BLOCK_TOKENS * BLOCKS_PER_CHUNK * KV_BYTES_A_TOKEN >> 10} KiB",
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }
    for name, value in head.items():
        print(f"{name:>20}: {value}", flush=True)
    work = arguments.root / f"kvdisk-ttft-{os.getpid()}"
    work.mkdir(mode=0o700)
    try:
        with arms(work) as talkers:
            first = first_tokens(talkers, work, arguments.rounds, arguments.full)
            print("\n".join(["", *seconds_table(first), ""]), flush=True)
            decoded, mine = decode(talkers, DECODE_PASSES * arguments.rounds * (3 if arguments.full else 1))
            stores = store_steps(talkers, STORE_PASSES * arguments.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    head["load average after"] = f"{os.getloadavg()[0]:.2f}"
    found = verdicts(first, decoded, mine, stores)
    bars.show(found)
    report = {
        "environment": head,
        "bars": [bar._asdict() for bar in found],
        "TTFT and total, s": first,
        "decode step, ms": decoded,
        "kvdisk's calls in a decode step, ms": mine,
        "prefill steps with stores": stores,
    }
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "vllm_ttft.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["# vLLM on CPU, from a cold disk", "", "Written by `bench/vllm_ttft.py`.", ""]
    lines += [*(f"- {name}: {value}" for name, value in head.items()), "", *seconds_table(first), "", "## Bars", ""]
    (arguments.results / "vllm_ttft.md").write_text("\n".join([*lines, *bars.markdown(found)]) + "\n")
    plot(arguments.results / "vllm_ttft.png", first)


if __name__ == "__main__":
    main()
