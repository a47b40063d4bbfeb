"""gsm8k-shaped check through vLLM's OpenAI server: are answers the same with offloading and without?

    python bench/gsm8k.py --root DIR [--headers 12] [--questions 20]        a tiny model, on this machine's CPU
    python bench/gsm8k.py --root DIR --lm-eval MODEL [--limit N]           lm_eval's gsm8k on MODEL, on your GPU

A few hundred few-shot prompts; many questions share a header of worked problems. Each is asked twice: greedily, and
sampled with a seed of its own. Four passes over them, and their answers compared one by one:

    off          no offloading, a new server
    off again    the same server: now its own prefix cache hits. What differs here is not offloading's doing
    on           kvdisk, a new server, an empty directory. Headers do not all fit into the server's own cache
    restarted    another server over the same directory: headers come from disk

In float32, since in bfloat16 the last bits depend on how a prompt was split into steps, and so on where a hit ended.
The tiny model's weights are random: its answers are gibberish, which depends on every byte of the cache.

With --lm-eval the passes off, on and restarted are `lm_eval --model local-completions --tasks gsm8k` against
`vllm serve MODEL`, and the scores are compared; needs `pip install 'lm_eval[api]'`. Arguments after `--` go to
`vllm serve`.

Exit status 1: answers differ more than the server without offloading differs from itself, or nothing was a hit.
Results: bench/results/gsm8k.json and gsm8k.md.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gsm8k_prompts import Prompt, prompts, write_tokenizer

from kvdisk.cli import tiny_models
from kvdisk.cli.machine import summary

HERE = Path(__file__).parent
MODEL = "llama"
SHOTS = 12
MAX_TOKENS = 24
AT_ONCE = 4
SEED = 1
START_TIMEOUT_S = 600
GREEDY, SAMPLED = "greedy", "sampled"
OFF, OFF_AGAIN, ON, RESTARTED = PASSES = ("off", "off again", "on", "restarted")
DIFFERENT_MAX = 0.005  # of answers: two logits may lie as close as float32 rounds
TINY_SERVER = {
    "load-format": tiny_models.LOAD_FORMAT,
    "dtype": "float32",
    "max-model-len": 2048,
    "max-num-seqs": AT_ONCE,
    "max-num-batched-tokens": 8192,  # whole prompts: vLLM 0.32 on CPU fails where a seeded request's takes two steps
    "num-gpu-blocks-override": 60,  # of 128 tokens: seven prompts, so that headers are dropped before they come again
    "seed": 0,
}
SUM = ("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total")


@dataclass
class Pass:
    """One pass over all prompts.

    answers: mode -> the generated text of each prompt. seconds: for all of them. tokens: of prompts; hit_tokens: of
    those, loaded by kvdisk; gpu_hit_tokens: found in the server's own prefix cache.
    """

    name: str
    answers: dict[str, list[str]]
    seconds: float
    tokens: int
    hit_tokens: int
    gpu_hit_tokens: int


def connector(root: Path, disk_bytes: str, cpu_bytes: str, blocks_per_chunk: int) -> list[str]:
    """vLLM's option that turns kvdisk on."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVDiskOffloadingSpec",
            "spec_module_path": "kvdisk.vllm",
            "root_dir": str(root),
            "disk_bytes_to_use": disk_bytes,
            "cpu_bytes_to_use": cpu_bytes,
            "blocks_per_chunk": blocks_per_chunk,
        },
    }
    return ["--kv-transfer-config", json.dumps(config)]


def serve_command() -> list[str]:
    """`vllm serve`; vLLM's CPU build has another name, under which that command does not find its own version."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [shutil.which("vllm") or "vllm", "serve"]


@contextmanager
def server(model: str, options: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[str]:
    """A server of vLLM's; its address. Ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*serve_command(), model, "--port", str(port), "--host", "127.0.0.1", *options]
    address = f"http://127.0.0.1:{port}"
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
        try:
            _wait_until_ready(address, process, log)
            yield address
        except urllib.error.URLError as error:
            raise SystemExit(f"the server failed: {error}\n{_tail(log)}") from None
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    """The end of a log, which goes with its directory."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


def metrics(address: str) -> dict[str, float]:
    """The server's counters, summed over labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    totals: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#") and " " in line:
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def ask(address: str, model: str, prompt: Prompt, mode: str, number: int) -> str:
    """One completion."""
    request = {"model": model, "prompt": prompt.text, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
    if mode == SAMPLED:
        request |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
    body = json.dumps(request).encode()
    post = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=300) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def run_pass(name: str, address: str, model: str, asked: Sequence[Prompt]) -> Pass:
    """All prompts, in both modes, a few at a time."""
    before, started = metrics(address), time.monotonic()
    answers = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mode in (GREEDY, SAMPLED):
            jobs = [pool.submit(ask, address, model, prompt, mode, number) for number, prompt in enumerate(asked)]
            answers[mode] = [job.result() for job in jobs]
    seconds, after = time.monotonic() - started, metrics(address)
    hits, gpu_hits, tokens = (int(after.get(key, 0) - before.get(key, 0)) for key in SUM)
    print(
        f"{name}: {seconds:.0f} s, {tokens:,} prompt tokens, {gpu_hits:,} from the GPU's cache, {hits:,} loaded",
        flush=True,
    )
    return Pass(name, answers, seconds, tokens, hits, gpu_hits)


def drained(address: str, model: str) -> None:
    """Return when all that was stored is on disk; counters come with requests' outputs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ask(address, model, Prompt("Question:", 0), GREEDY, 0)
        now = metrics(address)
        if now.get("vllm:kvdisk_chunks_flushed_total", 0) >= now.get("vllm:kvdisk_chunks_stored_total", 0):
            return
    raise SystemExit("not everything was flushed within a minute")


def tiny(root: Path, asked: Sequence[Prompt], work: Path) -> list[Pass]:
    """All passes with the tiny model."""
    models = work / "models"
    tiny_models.write(models)
    model = models / MODEL
    write_tokenizer(model, [prompt.text for prompt in asked], tiny_models.VOCABULARY)
    environment = {**tiny_models.environment(models), "VLLM_LOGGING_LEVEL": "WARNING"}
    off = ["--enforce-eager", *(f"--{name}={value}" for name, value in TINY_SERVER.items())]
    on = [*off, *connector(root, "1GiB", "64MiB", 1)]
    passes = []
    with server(str(model), off, work / "off.log", environment) as address:
        passes += [run_pass(name, address, str(model), asked) for name in (OFF, OFF_AGAIN)]
    with server(str(model), on, work / "on.log", environment) as address:
        passes.append(run_pass(ON, address, str(model), asked))
        drained(address, str(model))
    with server(str(model), on, work / "restarted.log", environment) as address:
        passes.append(run_pass(RESTARTED, address, str(model), asked))
    return passes


def different(one: Pass, other: Pass) -> dict[str, int]:
    """How many answers differ, by mode."""
    return {
        mode: sum(mine != theirs for mine, theirs in zip(answers, other.answers[mode], strict=True))
        for mode, answers in one.answers.items()
    }


def right(one: Pass, asked: Sequence[Prompt]) -> dict[str, int]:
    """Answers that have the right number, by mode; with random weights, none but by chance."""
    return {
        mode: sum(str(prompt.answer) in answer.split() for answer, prompt in zip(answers, asked, strict=True))
        for mode, answers in one.answers.items()
    }


def verdict(passes: Sequence[Pass], asked: Sequence[Prompt]) -> tuple[list[str], bool]:
    """A Markdown table, and whether all is well."""
    off, again, *with_kvdisk = passes
    allowed = max(sum(different(off, again).values()), int(DIFFERENT_MAX * 2 * len(asked)))
    lines = [
        "| pass | greedy, unlike off | sampled, unlike off | prompt tokens | in GPU cache | loaded by kvdisk | s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in passes:
        unlike = different(off, one)
        counts = " | ".join(f"{unlike[mode]} of {len(asked)}" for mode in (GREEDY, SAMPLED))
        tokens = " | ".join(f"{count:,}" for count in (one.tokens, one.gpu_hit_tokens, one.hit_tokens))
        lines.append(f"| {one.name} | {counts} | {tokens} | {one.seconds:.0f} |")
    fine = all(sum(different(off, one).values()) <= allowed and one.hit_tokens > 0 for one in with_kvdisk)
    return lines, fine


def report(passes: Sequence[Pass], asked: Sequence[Prompt], arguments: argparse.Namespace) -> bool:
    """Print, and write bench/results/gsm8k.*; whether all is well."""
    lines, fine = verdict(passes, asked)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    shape = f"{arguments.headers} headers of {SHOTS} worked problems, {arguments.questions} questions each"
    text = [
        "# gsm8k-shaped prompts through the OpenAI server",
        "",
        f"{shape}; {MAX_TOKENS} tokens an answer, {AT_ONCE} requests at once.",
        "",
        *lines,
        "",
    ]
    text += ["Answers are the same." if fine else "ANSWERS DIFFER, or nothing was loaded."]
    (results / "gsm8k.md").write_text("\n".join(text) + "\n")
    plain = {
        "machine": summary(),
        "shape": shape,
        "same": fine,
        "passes": [asdict(one) for one in passes],
    }
    for one, entry in zip(passes, plain["passes"], strict=True):
        entry["different"], entry["right"] = different(passes[0], one), right(one, asked)
    (results / "gsm8k.json").write_text(json.dumps(plain, indent=1) + "\n")
    print("\n".join(text[2:]))
    return fine


def lm_eval(arguments: argparse.Namespace, root: Path, work: Path) -> bool:
    """lm_eval's gsm8k on a real model: off, on, restarted; whether the scores agree within their error."""
    if shutil.which("lm_eval") is None:
        raise SystemExit("lm_eval is not installed: pip install 'lm_eval[api]'")
    on = connector(root, arguments.disk_bytes, arguments.cpu_bytes, arguments.blocks_per_chunk)
    scores: dict[str, tuple[float, float]] = {}
    for name, options in ((OFF, []), (ON, on), (RESTARTED, on)):
        with server(arguments.lm_eval, [*arguments.serve, *options], work / f"{name}.log", {}) as address:
            scores[name] = _score(arguments, address, work / name)
            loaded = int(metrics(address).get(SUM[0], 0))
        print(
            f"{name}: exact match {scores[name][0]:.4f} +- {scores[name][1]:.4f}, {loaded:,} prompt tokens loaded",
            flush=True,
        )
    score, error = scores[OFF]
    return all(abs(other - score) <= 2 * max(error, 1e-9) for other, _ in scores.values())


def _score(arguments: argparse.Namespace, address: str, output: Path) -> tuple[float, float]:
    place = f"model={arguments.lm_eval},base_url={address}/v1/completions,num_concurrent=32,tokenized_requests=False"
    command = [
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        place,
        "--tasks",
        "gsm8k",
        "--num_fewshot",
        "5",
    ]
    command += ["--output_path", str(output)]
    if arguments.limit:
        command += ["--limit", str(arguments.limit)]
    subprocess.run(command, check=True)
    (found,) = output.rglob("results_*.json")
    figures: dict[str, Any] = json.loads(found.read_text())["results"]["gsm8k"]
    return figures["exact_match,flexible-extract"], figures["exact_match_stderr,flexible-extract"]


def main() -> int:
    """The command line; 0 where answers agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="a directory on the disk to use; its content is kept")
    parser.add_argument("--headers", type=int, default=12)
    parser.add_argument("--questions", type=int, default=20, help="for each header")
    parser.add_argument("--lm-eval", metavar="MODEL", help="run lm_eval's gsm8k on this model instead")
    parser.add_argument("--limit", type=int, help="lm_eval: so many questions only")
    parser.add_argument("--disk-bytes", default="100GiB", help="lm_eval: disk_bytes_to_use")
    parser.add_argument("--cpu-bytes", default="16GiB", help="lm_eval: cpu_bytes_to_use")
    parser.add_argument("--blocks-per-chunk", type=int, default=4, help="lm_eval; 1 for models with recurrent states")
    parser.add_argument("serve", nargs="*", help="lm_eval: options of `vllm serve`, after --")
    arguments = parser.parse_args()
    arguments.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gsm8k-", dir=arguments.root) as directory:
        work = Path(directory)
        root = work / "kv"
        root.mkdir(mode=0o700)
        if arguments.lm_eval:
            return 0 if lm_eval(arguments, root, work) else 1
        asked = prompts(arguments.headers, arguments.questions, SHOTS, SEED)
        return 0 if report(tiny(root, asked, work), asked, arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
