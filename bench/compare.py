"""kvdisk against fio and against other caches' disk paths: same disk, same bytes, same kind of memory, in one run.

    python bench/compare.py --root DIR [--size 1GiB] [--bs 128KiB,1MiB,8MiB] [--rounds 5] [--only NAME,...] [--full]

kvdisk has to be importable (installed, or PYTHONPATH=.). Each case is measured `--rounds` times, in alternating order
of the contestants; medians are shown with the least and the most, and ratios are those of the passes of one round. The
bars of docs/performance.md that this covers are printed with a verdict. Results go to bench/results/compare.json,
compare.md and compare.png. `--full` adds the chunk sizes between and every combination of requests, state and pages;
without it the whole takes about ten minutes.

What differs in kind, and is left as each does it: one-file-a-chunk peers make new files for every store, so their
"recycled" is fresh; fio neither packs nor hashes nor knows where anything is; the others keep no index on disk.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bars import by_rule, verdicts
from contestants import Case, Contestant, Fio, ProcessContestant, Sample, huge_page_pool
from environments import PEERS, AbsentError, command
from table import markdown, plot

from kvdisk.cli.bench_report import device
from kvdisk.cli.machine import file_system, summary
from kvdisk.units import GIB, KIB, MIB, format_size, parse_size

HERE = Path(__file__).parent
FULL_SIZES = (128 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 8 * MIB, 16 * MIB)

SLOW_S = 5.0
"""Who needs longer for a pass is measured in one round of a case, so that the others get their five in time."""

Samples = dict[str, dict[str, list[Sample]]]  # contestant -> "store" or "load" -> one a round


def cases(arguments: argparse.Namespace) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """What is compared, and in which directions."""
    total = parse_size(arguments.size, "--size")
    both = ("store", "load")
    for bs in FULL_SIZES if arguments.full else [parse_size(word, "--bs") for word in arguments.bs.split(",")]:
        if arguments.full:
            for pages in ("huge", "4k"):
                for requests in (1, 32):
                    for fresh in (False, True):
                        yield Case(bs, total, requests, pages, fresh), both
            continue
        yield Case(bs, total), both
        yield Case(bs, total, fresh=True), ("store",)
        yield Case(bs, total, requests=32), both
        if bs == MIB:
            yield Case(bs, total, pages="4k"), both


def gather(arguments: argparse.Namespace) -> tuple[list[Contestant], dict[str, str]]:
    """Those that could be had, and why the others could not."""
    only = set(filter(None, arguments.only.split(",")))
    found: list[Contestant] = []
    absent: dict[str, str] = {}
    logs = arguments.env_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for spec in PEERS:
        name = spec.name
        if only and name not in only and not name.startswith("kvdisk"):
            continue
        try:
            if spec.script:
                words = command(spec, arguments.env_dir, arguments.vllm_python)
                found.append(ProcessContestant(name, words, logs / f"{name.replace(' ', '-')}.log"))
            else:
                found.append(Fio())
        except AbsentError as error:
            absent[name] = str(error)
        print(f"  {name}: {absent.get(name, 'ready')}", flush=True)
    return found, absent


def run_case(
    case: Case, ops: tuple[str, ...], contestants: list[Contestant], root: Path, rounds: int, failed: dict[str, str]
) -> Samples:
    """All rounds of one case. Who fails is out of the whole comparison."""
    samples: Samples = {}
    slow: set[str] = set()
    names = f"{case.bs}-{case.requests}-{case.pages}-{case.fresh}"

    def attempt(one: Contestant, what: str) -> Sample | None:
        try:
            if what == "prepare":
                one.prepare(case, root / names / one.name.replace(" ", "-").replace(",", ""))
            elif what == "finish":
                one.finish()
            else:
                return one.measure(what)
        except RuntimeError as error:
            failed[one.name] = f"{case}: {error}"
            print(f"  {one.name} failed: {error}", flush=True)
        return None

    for one in contestants:
        attempt(one, "prepare")
    for round_ in range(rounds):
        running = [one for one in contestants if one.name not in failed and one.name not in slow]
        for op in ("store", "load") if "load" in ops else ops:
            os.sync()
            for one in running if round_ % 2 == 0 else reversed(running):
                sample = attempt(one, op) if one.name not in failed else None
                if sample is None:
                    continue
                if case.total / sample.mb_per_s / 1e6 > SLOW_S:
                    slow.add(one.name)
                if op in ops:
                    samples.setdefault(one.name, {}).setdefault(op, []).append(sample)
    for one in contestants:
        if one.name not in failed:
            attempt(one, "finish")
    return samples


def show(case: Case, samples: Samples) -> None:
    """One line a contestant."""
    print(f"\n{case}")
    for name, by_op in samples.items():
        words = []
        for op, found in by_op.items():
            speeds = [sample.mb_per_s for sample in found]
            cpu = statistics.median(sample.cpu_s_per_gib for sample in found)
            spread = f"[{min(speeds):.0f}..{max(speeds):.0f}]"
            words.append(f"{op} {statistics.median(speeds):6.0f} MB/s {spread:>13} {cpu:5.3f} s/GiB")
        print(f"  {name:24} " + "   ".join(words), flush=True)


def memory_read_s_per_gib() -> float:
    """CPU seconds that one core takes to read a GiB of memory: what a checksum cannot be cheaper than."""
    import numpy as np

    words = np.ones(256 * MIB // 8, np.uint64)
    times = []
    for _ in range(5):
        start = time.process_time()
        int(words.max())
        times.append(time.process_time() - start)
    return statistics.median(times) * GIB / words.nbytes


def environment(root: Path) -> dict[str, str]:
    """What the figures depend on."""
    fio = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip() \
        if shutil.which("fio") else "absent"  # fmt: skip
    return {
        "machine": summary(),
        "file system": file_system(root),
        "device": device(root),
        "free": format_size(shutil.disk_usage(root).free),
        "python": platform.python_version(),
        "fio": fio,
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--size", default="1GiB", help="bytes a pass")
    parser.add_argument("--bs", default="128KiB,1MiB,8MiB", help="chunk sizes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="peers to run, by name; kvdisk always takes part")
    parser.add_argument("--full", action="store_true", help="every chunk size and combination (an hour)")
    parser.add_argument("--env-dir", type=Path, default=Path.home() / ".cache" / "kvdisk-bench")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vLLM, instead of building one")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser.parse_args(words)


def main() -> None:
    """See the module's docstring."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is given back
    root = arguments.root / f"kvdisk-compare-{os.getpid()}"
    root.mkdir(mode=0o700)
    head = environment(root)
    for name, value in head.items():
        print(f"{name:>20}: {value}")
    failed: dict[str, str] = {}
    measured: list[tuple[Case, Samples]] = []
    fio: Fio | None = None
    contestants: list[Contestant] = []
    try:
        with huge_page_pool(512 * MIB) as pool:
            print(f"{'huge pages':>20}: {pool}")
            contestants, absent = gather(arguments)
            fio = next((one for one in contestants if isinstance(one, Fio)), None)
            for case, ops in cases(arguments):
                taking_part = [one for one in contestants if one.name not in failed]
                samples = run_case(case, ops, taking_part, root, arguments.rounds, failed)
                show(case, samples)
                measured.append((case, samples))
    finally:
        for one in contestants:
            one.close()
        shutil.rmtree(root, ignore_errors=True)
    head["load average after"] = f"{os.getloadavg()[0]:.2f}"
    head["huge pages for fio"] = pool
    memory_read = memory_read_s_per_gib()
    bars = list(verdicts(measured, memory_read))
    print()
    for rule, found in by_rule(bars):
        missed = [bar for bar in found if bar.verdict == "missed"]
        print(f"{'missed' if missed else 'met':>7}  {rule}: {len(found) - len(missed)} of {len(found)} cases")
        for bar in missed or found[:1]:
            print(f"{'':>11}{bar.measured} (bar {bar.bar}), {bar.case}")
    arguments.results.mkdir(exist_ok=True)
    report: dict[str, Any] = {
        "environment": head,
        "absent": absent,
        "failed": failed,
        "fio settings": fio.settings() if fio else {},
        "memory read, CPU s/GiB": memory_read,
        "bars": [bar._asdict() for bar in bars],
        "cases": [
            {
                "case": vars(case),
                "samples": {n: {op: [vars(s) for s in found] for op, found in by.items()} for n, by in samples.items()},
            }
            for case, samples in measured
        ],
    }
    (arguments.results / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.results / "compare.md").write_text(markdown(report, measured, bars))
    plot(arguments.results / "compare.png", measured)


if __name__ == "__main__":
    main()
