"""What grows with the number of chunks, and how: memory, lookups, stores, evictions, recovery, waiting requests.

    python bench/scale.py --root DIR [--full]

Sizes are 10^4 to 10^6 chunks, with `--full` (some minutes more) 10^7. Totals have to grow linearly or better, costs of
one chunk not at all but for what a CPU's caches no longer hold; the exponents are fitted and judged. Each size of the
metadata plane runs in a process of its own (scale_planes.py), recovery opens real segment files whose payloads are
holes (scale_recovery.py), and what concerns vLLM's scheduler runs in it (scale_vllm.py; left out without vLLM).

Results go to bench/results/scale.json, scale.md and scale.png.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bars
from bars import Bar, at_least, at_most, quoted, reported
from table import plotter

from kvdisk.cli.machine import file_system, summary
from kvdisk.units import KIB, MIB

HERE = Path(__file__).parent
SIZES = (10_000, 100_000, 1_000_000)
FULL_SIZES = (*SIZES, 10_000_000)
SLOTS = 4096
TERABYTE_CHUNKS = 1 << 20  # of 1 MiB
RECOVERED_SIZES = (10_000, 100_000, TERABYTE_CHUNKS)
RECOVERED_SEGMENTS = (16 * MIB, 64 * MIB, 1024 * MIB)
"""Of 100,000 chunks, beside 256 MiB: what a segment costs, apart from its chunks."""

ROUNDS = 3
TOTAL_EXPONENT_MAX = 1.1
COST_EXPONENT_MAX = 0.3
"""Of what one chunk costs: a tenfold index no longer fits into a cache, which may double it and no more."""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a least squares line through the logarithms: 1 is linear."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def median(found: Any) -> float:
    """Of the rounds, or the figure itself."""
    return float(statistics.median(found) if isinstance(found, list) else found)


def child(script: str, *words: object) -> dict[str, Any]:
    """The JSON that a script of this folder prints last."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(map(str, words))} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


class Scale:
    """What was measured.

    Attributes:
        index, store: chunks -> figures of scale_planes.py. arenas: slots -> the same. overhead: bytes of a chunk ->
            bytes of packs over live ones.
        recovery: (chunks, segments, [seconds], [CPU seconds]), the terabyte's growth first.
        vllm: figures of scale_vllm.py, or empty.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.index: dict[int, dict[str, Any]] = {}
        self.store: dict[int, dict[str, Any]] = {}
        self.arenas: dict[int, dict[str, Any]] = {}
        self.overhead: dict[int, float] = {}
        self.recovery: list[tuple[int, int, list[float], list[float]]] = []
        self.vllm: dict[str, Any] = {}

    def measure(self, root: Path) -> None:
        """Everything, a line each."""
        for size in self.sizes:
            self.index[size] = found = child("scale_planes.py", "index", size)
            hit, miss = median(found["hit, us"]), median(found["miss, us"])
            memory = f"{found['bytes a chunk']:.0f} bytes a chunk"
            print(f"index of {size:>10,}: {memory}, hit {hit:.2f} us, miss {miss:.2f} us", flush=True)
        for size in self.sizes:
            self.store[size] = found = child("scale_planes.py", "store", size, SLOTS)
            self._say(f"store of {size:>10,}", found)
        for slots in (512, 32_768):
            self.arenas[slots] = found = child("scale_planes.py", "store", SIZES[1], slots)
            self._say(f"arena of {slots:>10,} slots", found)
        self.overhead = {int(size): ratio for size, ratio in child("scale_planes.py", "overhead").items()}
        self._recover(root)
        if importlib.util.find_spec("vllm") is not None:
            self.vllm = child("scale_vllm.py", "--root", root)

    @staticmethod
    def _say(what: str, found: Mapping[str, Any]) -> None:
        costs = ", ".join(f"{name[:-4]} {median(found[name]):.1f}" for name in COSTS)
        print(f"{what}: us a chunk: {costs}", flush=True)

    def _recover(self, root: Path) -> None:
        from scale_recovery import openings

        cases = [(size, 256 * MIB) for size in RECOVERED_SIZES]
        cases += [(size, 256 * MIB) for size in self.sizes if size > TERABYTE_CHUNKS]
        cases += [(RECOVERED_SIZES[1], segment) for segment in RECOVERED_SEGMENTS]
        for size, segment in cases:
            found = openings(root, size, MIB, segment, ROUNDS)
            assert found[0].chunk_count == size, f"{found[0].chunk_count} of {size} chunks were found"
            seconds, cpu = [one.seconds for one in found], [one.cpu_s for one in found]
            self.recovery.append((size, found[0].segment_count, seconds, cpu))
            print(f"opening {size:>10,} chunks in {found[0].segment_count:>6,} segments: {quoted(seconds)} s, "
                  f"{median(cpu):.2f} s of CPU", flush=True)  # fmt: skip

    @property
    def growth(self) -> list[tuple[int, int, list[float], list[float]]]:
        """Recovery by chunks, in segments of one size."""
        return self.recovery[: len(self.recovery) - len(RECOVERED_SEGMENTS)]


COSTS = ("store, us", "store and evict, us", "promote, us")


def verdicts(scale: Scale) -> list[Bar]:
    """Every bar."""
    found: list[Bar] = []
    for size, figures in scale.index.items():
        case = f"{size:,} chunks"
        found += [
            at_most("index memory", "index memory, keys and allocator included", case, 200, [figures["bytes a chunk"]],
                    "bytes", 0),
            at_most("lookup", "store, hit along a prefix", case, 1.0, figures["hit, us"], "us", 2),
            at_most("lookup", "store, miss", case, 1.0, figures["miss, us"], "us", 2),
            at_most("lookup", "store, hit anywhere", case, 1.0, figures["hit anywhere, us"], "us", 2),
        ]  # fmt: skip
    found += _growth(scale)
    terabyte = next(one for one in scale.recovery if one[0] == TERABYTE_CHUNKS)
    found.append(at_most("recovery", "opening a store", f"{terabyte[0]:,} chunks, {terabyte[1]:,} segments", 2.0,
                         terabyte[2], "s", 2))  # fmt: skip
    for size, ratio in scale.overhead.items():
        case = f"chunks of {size / MIB:g} MiB" if size >= MIB else f"chunks of {size / KIB:g} KiB"
        if size >= MIB:
            found.append(at_most("overhead", "bytes of packs over live ones", case, 1.02, [ratio], "x", 4))
        else:
            found.append(reported("overhead", "bytes of packs over live ones", case, f"{ratio:.4f} x"))
    return found + (_vllm_verdicts(scale.vllm) if scale.vllm else [])


def _growth(scale: Scale) -> list[Bar]:
    sizes = list(scale.sizes)
    totals = {"index memory": (sizes, [size * scale.index[size]["bytes a chunk"] for size in sizes])}
    opened = [one for one in scale.growth if one[0] >= SIZES[1]]  # below, what a start costs anyway hides the slope
    totals["recovery, by chunks"] = ([one[0] for one in opened], [median(one[3]) for one in opened])
    many = sorted(one[1:4:2] for one in scale.recovery if one[0] == RECOVERED_SIZES[1])
    totals["recovery of 100,000 chunks, by segments"] = ([one[0] for one in many], [median(one[1]) for one in many])
    found = [
        at_most("linear", f"{name}: exponent", "", TOTAL_EXPONENT_MAX, [exponent(*curve)], "", 2)
        for name, curve in totals.items()
    ]
    costs = {f"{name[:-4]}, by chunks": (sizes, [median(scale.store[n][name]) for n in sizes]) for name in COSTS}
    arenas = {**scale.arenas, SLOTS: scale.store[SIZES[1]]}
    slots = sorted(arenas)
    costs |= {f"{name[:-4]}, by slots": (slots, [median(arenas[n][name]) for n in slots]) for name in COSTS}
    for name in ("hit, us", "miss, us"):
        costs[f"lookup, {name[:-4]}"] = (sizes, [median(scale.index[size][name]) for size in sizes])
    for name, curve in costs.items():
        bar = at_most("linear", f"cost of one {name}: exponent", "", COST_EXPONENT_MAX, [exponent(*curve)], "", 2)
        found.append(bar._replace(margin=max(0.1, 1 + COST_EXPONENT_MAX - exponent(*curve))))
    # Of keys of which nothing is in a CPU cache, which a few thousand chunks always are: it grows with the share of
    # memory that the caches cannot hold, up to the cost of a few accesses to memory. Its bar is the microsecond.
    anywhere = exponent(sizes, [median(scale.index[size]["hit anywhere, us"]) for size in sizes])
    found.append(reported("linear", "cost of one lookup, hit anywhere: exponent", "", f"{anywhere:.2f}"))
    return found


def _vllm_verdicts(figures: Mapping[str, Any]) -> list[Bar]:
    waiting, asked = figures["deferred"], figures["lookups"]
    case = "32 requests of 3,600 keys"
    added = [a - b for a, b in zip(waiting["kvdisk"], waiting["shortest"], strict=True)]
    found = [
        at_most("deferred", "a step with kvdisk, less one with the shortest answers", case, 1.0, added, "ms", 2),
        reported("deferred", "the step with kvdisk", case, f"{quoted(waiting['kvdisk'])} ms"),
        reported("deferred", "vLLM's own part, shortest answers", case, f"{quoted(waiting['shortest'])} ms"),
        reported("deferred", "vLLM's own part, each key pending", case, f"{quoted(waiting['every key pending'])} ms"),
        reported("deferred", "kvdisk's first scan of all keys", case, f"{waiting['kvdisk, first scan'][0]:.0f} ms"),
    ]
    found += [at_most("lookup", f"manager, {name}", "", 1.0, asked[name], "us", 2) for name in
              ("miss", "hit again", "first hit")]  # fmt: skip
    found += [at_least("prefix", "loaded over the arena", model, 0.8, [ratio]) for model, ratio in
              figures["prefixes"].items()]  # fmt: skip
    return found


def markdown(head: Mapping[str, str], scale: Scale, found: Sequence[Bar]) -> str:
    """The whole report."""
    lines = ["# What grows with the number of chunks", "", "Written by `bench/scale.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in head.items()]
    lines += ["", "| chunks | bytes a chunk | hit, us | miss, us | hit anywhere, us | longest pause of 96 stores, ms |",
              "| ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for size, one in scale.index.items():
        cells = " | ".join(f"{median(one[name]):.2f}" for name in ("hit, us", "miss, us", "hit anywhere, us"))
        lines.append(f"| {size:,} | {one['bytes a chunk']:.0f} | {cells} | {one['longest pause, ms']:.1f} |")
    lines += ["", "| chunks, slots | segments | store | store and evict | promote, us a chunk |",
              "| ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    rows = {f"{size:,}, {SLOTS:,}": one for size, one in scale.store.items()}
    rows |= {f"{SIZES[1]:,}, {slots:,}": one for slots, one in scale.arenas.items()}
    for name, one in rows.items():
        lines.append(f"| {name} | {one['segments']:,} | {' | '.join(f'{median(one[cost]):.1f}' for cost in COSTS)} |")
    lines += ["", "| chunks opened | segments | s | CPU s |", "| ---: | ---: | ---: | ---: |"]
    lines += [f"| {n:,} | {count:,} | {quoted(wall)} | {median(cpu):.2f} |" for n, count, wall, cpu in scale.recovery]
    return "\n".join([*lines, "", "## Bars", "", *bars.markdown(found)]) + "\n"


def plot(path: Path, scale: Scale) -> None:
    """Memory, lookups, costs and recovery against the number of chunks."""
    pyplot = plotter()
    if pyplot is None:
        return
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    sizes = list(scale.sizes)
    grid[0][0].plot(sizes, [scale.index[n]["bytes a chunk"] for n in sizes], marker="o")
    grid[0][0].axhline(200, color="grey", linestyle=":")
    grid[0][0].set(title="index memory", ylabel="bytes a chunk", ylim=(0, None))
    for name in ("hit, us", "miss, us", "hit anywhere, us"):
        grid[0][1].plot(sizes, [median(scale.index[n][name]) for n in sizes], marker="o", label=name[:-4])
    grid[0][1].axhline(1, color="grey", linestyle=":")
    grid[0][1].set(title="lookup", ylabel="us", ylim=(0, None))
    for name in COSTS:
        grid[1][0].plot(sizes, [median(scale.store[n][name]) for n in sizes], marker="o", label=name[:-4])
    grid[1][0].set(title="metadata plane alone", ylabel="us a chunk", ylim=(0, None))
    opened = [one[0] for one in scale.growth]
    grid[1][1].plot(opened, [median(one[2]) for one in scale.growth], marker="o", label="wall")
    grid[1][1].plot(opened, [median(one[3]) for one in scale.growth], marker="o", label="CPU")
    last = scale.growth[-1]
    grid[1][1].plot(
        opened, [median(last[2]) * n / last[0] for n in opened], color="grey", linestyle=":", label="linear"
    )
    grid[1][1].set(title="opening a store", ylabel="s", yscale="log")
    for axes in grid.flat:
        axes.set(xlabel="chunks", xscale="log")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--full", action="store_true", help="up to 10^7 chunks")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is given back
    head = {
        "machine": summary(),
        "file system": file_system(arguments.root),
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }
    for name, value in head.items():
        print(f"{name:>20}: {value}")
    scale = Scale(FULL_SIZES if arguments.full else SIZES)
    scale.measure(arguments.root)
    head["load average after"] = f"{os.getloadavg()[0]:.2f}"
    found = verdicts(scale)
    print()
    bars.show(found)
    report = {
        "environment": head,
        "not measured": [] if scale.vllm else ["vLLM is not installed"],
        "bars": [bar._asdict() for bar in found],
        **vars(scale),
    }
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "scale.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.results / "scale.md").write_text(markdown(head, scale, found))
    plot(arguments.results / "scale.png", scale)


if __name__ == "__main__":
    main()
