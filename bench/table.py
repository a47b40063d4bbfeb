"""A comparison as a Markdown table and as a plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bars import KVDISK, Bar, Samples, cpu, quoted, ratios
from contestants import Case


def markdown(report: dict[str, Any], measured: Sequence[tuple[Case, Samples]], bars: Sequence[Bar]) -> str:
    """The whole report: environment, a table a case, the bars."""
    lines = ["# kvdisk beside its peers", "", "Written by `bench/compare.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += [f"- absent: {name} ({why})" for name, why in report["absent"].items()]
    lines += [f"- failed: {name} ({why})" for name, why in report["failed"].items()]
    lines += [f"- fio's best, {what}: `{settings}`" for what, settings in report["fio settings"].items()]
    lines += ["", "MB/s: median [least..most] of the rounds. CPU: s/GiB, whole process. Ratio: kvdisk over the peer, "
              "round by round.", ""]  # fmt: skip
    for case, samples in measured:
        ops = [op for op in ("store", "load") if any(op in by_op for by_op in samples.values())]
        lines += [f"## {case}", ""]
        lines.append("| | " + " | ".join(f"{op} MB/s | CPU | ratio" for op in ops) + " |")
        lines.append("| --- |" + " ---: |" * (3 * len(ops)))
        lines += [f"| {name} | " + " | ".join(_cells(samples, name, op) for op in ops) + " |" for name in samples]
        lines.append("")
    lines += ["## Bars", "", "| verdict | rule | case | bar | measured |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {bar.verdict} | {bar.rule} | {bar.case} | {bar.bar} | {bar.measured} |" for bar in bars]
    return "\n".join(lines) + "\n"


def _cells(samples: Samples, name: str, op: str) -> str:
    found = samples[name].get(op)
    if not found:
        return "- | - | -"
    speeds = sorted(sample.mb_per_s for sample in found)
    mine = samples.get(KVDISK, {}).get(op)
    ratio = quoted(ratios(mine, found)) if mine and name != KVDISK else "-"
    return f"{statistics.median(speeds):.0f} [{speeds[0]:.0f}..{speeds[-1]:.0f}] | {cpu(found):.3f} | {ratio}"


def plot(path: Path, measured: Sequence[tuple[Case, Samples]]) -> None:
    """Median bandwidth and CPU by chunk size, a line a contestant; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed (pip install 'kvdisk[bench]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = {case.bs: samples for case, samples in measured
              if case.requests == 1 and case.pages == "huge" and not case.fresh}  # fmt: skip
    figure, grid = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True, sharex=True)
    names = list(dict.fromkeys(name for samples in chosen.values() for name in samples))
    for column, op in enumerate(("store", "load")):
        for name in names:
            sizes = sorted(bs for bs, samples in chosen.items() if op in samples.get(name, {}))
            found = [chosen[bs][name][op] for bs in sizes]
            style = {"linewidth": 2.5 if name.startswith("kvdisk") else 1.2, "marker": "o", "label": name}
            kib = [bs / 1024 for bs in sizes]
            grid[0][column].plot(kib, [statistics.median(s.mb_per_s for s in one) for one in found], **style)
            grid[1][column].plot(kib, [cpu(one) for one in found], **style)
        grid[0][column].set(title=f"{op}, one request alone, recycled, huge pages", ylabel="MB/s", ylim=(0, None))
        grid[1][column].set(xlabel="chunk, KiB", ylabel="CPU s/GiB", xscale="log", yscale="log")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
