"""kvdisk against fio and against other caches' disk paths: same disk, same bytes, same kind of memory, in one run.

    python bench/compare.py --root DIR [--size 1GiB] [--rounds 5] [--only NAME,...] [--full]

kvdisk has to be importable (installed, or PYTHONPATH=.). Each case is measured `--rounds` times, in alternating order
of the contestants; medians are shown with the least and the most, and ratios are those of the passes of one round. The
bars that this covers are printed with a verdict. Results go to bench/results/compare.json, compare.md and compare.png.

Without `--full`, which takes hours, it is what `make bench` has time for, six minutes: chunks of 128 KiB, 1 and 8 MiB,
one request over written blocks beside everybody; fresh files and 32 requests beside fio and vLLM's fs tier only.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import bars
from comparison import BARE, FIO, FS, KVDISK, OPS, WIDE, Measured, Pair, Samples, verdicts
from contestants import Case, Contestant, Fio, ProcessContestant, Sample, huge_page_pool
from environments import PEERS, AbsentError, PeerSpec, command
from table import markdown, plot

from kvdisk.cli.bench_report import device
from kvdisk.cli.machine import file_system, summary
from kvdisk.units import GIB, KIB, MIB, format_size, parse_size

HERE = Path(__file__).parent
SIZES = (128 * KIB, MIB, 8 * MIB)
FULL_SIZES = (128 * KIB, 512 * KIB, MIB, 2 * MIB, 8 * MIB, 16 * MIB)
NEAREST = frozenset({FIO, WIDE, KVDISK, BARE, FS})
BUFFER_BYTES = 512 * MIB
"""Of every contestant's memory but fio's at its best; see BUFFER_BYTES in peers/peer.py."""

SLOW_S = 2.5
"""Who needs longer for a pass is measured in one round of a case, so that the others get their five in time."""

DISK_PASSES = 32
"""Passes' bytes that lie on the disk at once, at most: peers with a file a chunk keep all rounds of a case."""


class Plan(NamedTuple):
    """A case, the directions, and who takes part (None: everybody)."""

    case: Case
    ops: tuple[str, ...] = OPS
    names: frozenset[str] | None = None


def plans(total: int, full: bool) -> Iterator[Plan]:
    """What is compared."""
    if full:
        for bs in FULL_SIZES:
            for pages in ("huge", "4k"):
                for requests in (1, 32):
                    for fresh in (False, True):
                        yield Plan(Case(bs, total, requests, pages, fresh))
        return
    for bs in SIZES:
        yield Plan(Case(bs, total))
    for bs in SIZES[:2]:
        yield Plan(Case(bs, total, fresh=True), ("store",), NEAREST)
        yield Plan(Case(bs, total, requests=32), OPS, NEAREST - {FS})


def pair_plans(total: int) -> Iterator[tuple[str, Case, Case]]:
    """kvdisk against itself."""
    yield "128 KiB chunks over 8 MiB ones", Case(SIZES[0], total), Case(SIZES[2], total)
    yield "32 requests over one alone", Case(MIB, total, requests=32), Case(MIB, total)
    yield "4 KiB pages over huge ones", Case(MIB, total, pages="4k"), Case(MIB, total)


class Comparison:
    """One run: who takes part, and what was measured so far.

    Attributes:
        absent, failed: name -> why.
        measured, pairs: results.
    """

    def __init__(self, arguments: argparse.Namespace, root: Path) -> None:
        self.arguments = arguments
        self.root = root
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.measured: list[Measured] = []
        self.pairs: list[Pair] = []
        self._contestants: list[Contestant] = []
        self._words = _words()

    @property
    def fio_settings(self) -> dict[str, str]:
        """What was found best."""
        found: dict[str, str] = {}
        for one in self._contestants:
            if isinstance(one, Fio):
                found |= {f"{one.name}, {what}": settings for what, settings in one.settings().items()}
        return found

    def run(self) -> None:
        """Everything."""
        arguments = self.arguments
        total = parse_size(arguments.size, "--size")
        with ExitStack() as ends:
            self._gather(ends)
            for plan in plans(total, arguments.full):
                samples, reads = self._run_case(plan)
                self.measured.append(Measured(plan.case, samples, reads))
                show(plan.case, samples)
            self._run_pairs(total, ends)

    def _gather(self, ends: ExitStack) -> None:
        only = set(filter(None, self.arguments.only.split(",")))
        for spec in PEERS:
            if only and spec.name not in only and not spec.name.startswith(KVDISK):
                continue
            try:
                self._contestants.append(self._start(spec, ends))
            except AbsentError as error:
                self.absent[spec.name] = str(error)
            print(f"  {spec.name}: {self.absent.get(spec.name, 'ready')}", flush=True)

    def _start(self, spec: PeerSpec, ends: ExitStack, name: str = "") -> Contestant:
        if not spec.script:
            return Fio(spec.name, BUFFER_BYTES if spec.name == WIDE else 0)
        logs = self.arguments.env_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        words = command(spec, self.arguments.env_dir, self.arguments.vllm_python)
        one = ProcessContestant(name or spec.name, words, logs / f"{spec.name.replace(' ', '-')}.log")
        ends.callback(one.close)
        return one

    def _run_case(self, plan: Plan) -> tuple[Samples, list[float]]:
        """All rounds of one case, and a memory read in each. Who fails is out of the whole comparison."""
        case, samples, reads = plan.case, Samples(), []
        slow: set[str] = set()
        running = [one for one in self._contestants
                   if one.name not in self.failed and (plan.names is None or one.name in plan.names)]  # fmt: skip
        for one in running:
            self._attempt(one, case, "prepare")
        for round_ in range(self.arguments.rounds):
            reads.append(memory_read_s_per_gib(self._words))
            for op in OPS if "load" in plan.ops else plan.ops:
                os.sync()
                for one in running if round_ % 2 == 0 else reversed(running):
                    if one.name in self.failed or one.name in slow:
                        continue
                    sample = self._attempt(one, case, op)
                    if sample is None:
                        continue
                    if case.total / sample.mb_per_s / 1e6 > SLOW_S:
                        slow.add(one.name)
                    samples.setdefault(one.name, {}).setdefault(op, []).append(sample)
        for one in running:
            if one.name not in self.failed:
                self._attempt(one, case, "finish")
        return samples, reads

    def _attempt(self, one: Contestant, case: Case, what: str) -> Sample | None:
        try:
            if what == "prepare":
                one.prepare(case, self.root / f"{one.name}-{case}".replace(" ", "-").replace(",", ""))
            elif what == "finish":
                one.finish()
            else:
                return one.measure(what)
        except RuntimeError as error:
            self.failed[one.name] = f"{case}: {error}"
            print(f"  {one.name} failed: {error}", flush=True)
        return None

    def _run_pairs(self, total: int, ends: ExitStack) -> None:
        """Two processes, one a case, pass by pass in turn."""
        spec = next(spec for spec in PEERS if spec.name == KVDISK)
        one, other = (self._start(spec, ends, f"kvdisk {letter}") for letter in "ab")
        print("\nkvdisk against itself")
        for what, *cases in pair_plans(total):
            found: tuple[dict[str, list[Sample]], dict[str, list[Sample]]] = ({}, {})
            sides = list(zip((one, other), cases, found, strict=True))
            for peer, case, _ in sides:
                self._attempt(peer, case, "prepare")
            for round_ in range(self.arguments.rounds):
                for op in OPS:
                    for peer, case, samples in sides if round_ % 2 == 0 else reversed(sides):
                        sample = None if peer.name in self.failed else self._attempt(peer, case, op)
                        if sample is not None:
                            samples.setdefault(op, []).append(sample)
            for peer, case, _ in sides:
                if peer.name not in self.failed:
                    self._attempt(peer, case, "finish")
            pair = Pair(what, (cases[0], cases[1]), found)
            self.pairs.append(pair)
            for bar in verdicts((), (pair,)):
                print(f"  {bar.rule}: {bar.measured}", flush=True)


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


def _words() -> Any:
    import numpy as np

    return np.ones(256 * MIB // 8, np.uint64)


def memory_read_s_per_gib(words: Any) -> float:
    """CPU seconds that one core takes to read a GiB of memory: what a checksum cannot be cheaper than."""
    start = time.process_time()
    int(words.max())
    return float((time.process_time() - start) * GIB / words.nbytes)


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="contestants beside kvdisk, with commas; default: all")
    parser.add_argument("--full", action="store_true", help="every chunk size and combination; hours")
    parser.add_argument("--env-dir", type=Path, default=Path.home() / ".cache" / "kvdisk-bench", help="peers' packages")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vLLM; default: this, or a new one")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args(words)
    needed = DISK_PASSES * parse_size(arguments.size, "--size")
    free = shutil.disk_usage(arguments.root).free
    if free < needed:
        parser.error(
            f"{arguments.root} has {format_size(free)} free and this takes {format_size(needed)}: lower --size"
        )
    return arguments


def write(run: Comparison, head: dict[str, str], found: Sequence[bars.Bar]) -> None:
    """The results' files."""
    results: Path = run.arguments.results
    results.mkdir(exist_ok=True)
    report: dict[str, Any] = {
        "environment": head,
        "absent": run.absent,
        "failed": run.failed,
        "not measured": [f"{name} is absent: {why}" for name, why in {**run.absent, **run.failed}.items()],
        "fio settings": run.fio_settings,
        "bars": [bar._asdict() for bar in found],
        "cases": [
            {
                "case": vars(one.case),
                "memory read, CPU s/GiB": one.memory_read_s,
                "samples": {name: _plain(by_op) for name, by_op in one.samples.items()},
            }
            for one in run.measured
        ],
        "pairs": [
            {"what": pair.what, "cases": list(map(vars, pair.cases)), "samples": list(map(_plain, pair.samples))}
            for pair in run.pairs
        ],
    }
    (results / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    (results / "compare.md").write_text(markdown(report, run.measured, run.pairs, found))
    plot(results / "compare.png", run.measured)


def _plain(by_op: dict[str, list[Sample]]) -> dict[str, list[dict[str, float]]]:
    return {op: [vars(sample) for sample in found] for op, found in by_op.items()}


def main() -> None:
    """See the module's docstring."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is given back
    root = arguments.root / f"kvdisk-compare-{os.getpid()}"
    root.mkdir(mode=0o700)
    head = environment(root)
    for name, value in head.items():
        print(f"{name:>20}: {value}")
    run = Comparison(arguments, root)
    try:
        with huge_page_pool(BUFFER_BYTES + 64 * MIB) as pool:
            print(f"{'huge pages':>20}: {pool}")
            run.run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    head["load average after"] = f"{os.getloadavg()[0]:.2f}"
    head["huge pages for fio"] = pool
    found = list(verdicts(run.measured, run.pairs))
    print()
    bars.show(found)
    write(run, head, found)


if __name__ == "__main__":
    main()
