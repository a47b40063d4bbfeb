"""A comparison as a Markdown table and as a plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bars
from bars import Bar, quoted
from comparison import KVDISK, OPS, Measured, Pair, Samples, median_cpu, ratios


def markdown(report: dict[str, Any], measured: Sequence[Measured], pairs: Sequence[Pair], found: Sequence[Bar]) -> str:
    """The whole report: environment, a table a case, kvdisk against itself, the bars."""
    lines = ["# kvdisk beside its peers", "", "Written by `bench/compare.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += [f"- absent: {name} ({why})" for name, why in report["absent"].items()]
    lines += [f"- failed: {name} ({why})" for name, why in report["failed"].items()]
    lines += [f"- {what}: `{settings}`" for what, settings in report["fio settings"].items()]
    lines += ["", "MB/s: median [least..most] of the rounds. CPU: s/GiB, whole process. Ratio: kvdisk over the peer, "
              "round by round.", ""]  # fmt: skip
    for one in measured:
        ops = [op for op in OPS if any(op in by_op for by_op in one.samples.values())]
        lines += [f"## {one.case}", "", f"A plain read of memory: {quoted(one.memory_read_s, 3)} s/GiB.", ""]
        lines.append("| | " + " | ".join(f"{op} MB/s | CPU | ratio" for op in ops) + " |")
        lines.append("| --- |" + " ---: |" * (3 * len(ops)))
        lines += [f"| {n} | " + " | ".join(_cells(one.samples, n, op) for op in ops) + " |" for n in one.samples]
        lines.append("")
    if pairs:
        lines += ["## kvdisk against itself", "", "| | store | load |", "| --- | ---: | ---: |"]
        lines += [f"| {pair.what} | {_ratio(pair, 'store')} | {_ratio(pair, 'load')} |" for pair in pairs]
        lines.append("")
    return "\n".join([*lines, "## Bars", "", *bars.markdown(found)]) + "\n"


def _cells(samples: Samples, name: str, op: str) -> str:
    found = samples[name].get(op)
    if not found:
        return "- | - | -"
    mine = samples.get(KVDISK, {}).get(op)
    ratio = quoted(ratios(mine, found)) if mine and name != KVDISK else "-"
    return f"{quoted([sample.mb_per_s for sample in found], 0)} | {median_cpu(found):.3f} | {ratio}"


def _ratio(pair: Pair, op: str) -> str:
    mine, theirs = (samples.get(op, []) for samples in pair.samples)
    return quoted(ratios(mine, theirs)) if mine and theirs else "-"


def plot(path: Path, measured: Sequence[Measured]) -> None:
    """Median bandwidth and CPU by chunk size, a line a contestant; nothing where matplotlib is missing."""
    pyplot = plotter()
    if pyplot is None:
        return
    chosen = {one.case.bs: one.samples for one in measured
              if one.case.requests == 1 and one.case.pages == "huge" and not one.case.fresh}  # fmt: skip
    figure, grid = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True, sharex=True)
    names = list(dict.fromkeys(name for samples in chosen.values() for name in samples))
    for column, op in enumerate(OPS):
        for name in names:
            sizes = sorted(bs for bs, samples in chosen.items() if op in samples.get(name, {}))
            found = [chosen[bs][name][op] for bs in sizes]
            style = {"linewidth": 2.5 if name.startswith("kvdisk") else 1.2, "marker": "o", "label": name}
            kib = [bs / 1024 for bs in sizes]
            grid[0][column].plot(kib, [statistics.median(s.mb_per_s for s in one) for one in found], **style)
            grid[1][column].plot(kib, [median_cpu(one) for one in found], **style)
        grid[0][column].set(title=f"{op}, one request alone, recycled, huge pages", ylabel="MB/s", ylim=(0, None))
        grid[1][column].set(xlabel="chunk, KiB", ylabel="CPU s/GiB", xscale="log", yscale="log")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plotter() -> Any | None:
    """pyplot, drawing into files; None, and a line that says so, where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed (pip install 'kvdisk[bench]')")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
