"""The reports of scripts that judge nothing themselves, as bars: the GIL's and the compression's. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from bars import Bar, at_least, at_most, quoted, reported

OWNER_BANDWIDTH_MIN, OWNER_SPEED_MIN, READ_P99_MAX = 0.9, 0.95, 1.5
SHIPPED = "kvdisk"  # the candidate of bench/compression.py that is kvdisk's own


def interference(report: Mapping[str, Any]) -> Iterator[Bar]:
    """From the figures of bench/interference.py: {part: {"plane: figure": [a value a round]}}.

    Those of the data plane on a thread are reported and not judged where there are others: vLLM has the process.
    """
    figures = [
        (str(part), str(name), values)
        for part, found in report.items()
        if isinstance(found, Mapping)
        for name, values in found.items()
        if isinstance(values, list)
    ]
    has_process = any(name.startswith("process: ") for _, name, _ in figures)
    for part, name, values in figures:
        bar = _judged(part, name, values)
        if bar is not None and has_process and not name.startswith("process: "):
            bar = reported(bar.requirement, bar.rule, bar.case, bar.measured)
        if bar is not None:
            yield bar


def interference_markdown(report: Mapping[str, Any]) -> str:
    """The same figures as tables, a part each: bench/interference.py writes none."""
    environment = report.get("environment", {})
    lines = ["# Beside others in the process", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    for part, found in report.items():
        if part == "environment" or not isinstance(found, Mapping):
            continue
        lines += [f"## {part}", "", "| data plane: figure | median [least..most] |", "| --- | ---: |"]
        lines += [f"| {name} | {quoted(values)} |" for name, values in found.items() if isinstance(values, list)]
        lines.append("")
    return "\n".join(lines)


def _judged(part: str, name: str, values: list[float]) -> Bar | None:
    if "bandwidth, busy owner" in name:
        return at_least("busy owner", name, part, OWNER_BANDWIDTH_MIN, values)
    if "owner's speed" in name:
        return at_least("owner speed", name, part, OWNER_SPEED_MIN, values)
    if name.endswith("p99 ratio"):
        return at_most("read p99", name, part, READ_P99_MAX, values, "x", 2)
    return None


def compression(rows: list[Mapping[str, Any]]) -> Iterator[Bar]:
    """From the rows of bench/compression.py: below which disk kvdisk's own codec loads and stores faster."""
    for row in rows:
        if row["candidate"] != SHIPPED:
            continue
        ratio, pack, unpack = (float(row[name]) for name in ("ratio", "pack_mb_s", "unpack_mb_s"))
        measured = f"{ratio:.2f} x smaller, faster below {unpack:,.0f} MB/s (loads) and {pack:,.0f} MB/s (stores)"
        if ratio <= 1.005:
            measured = "does not shrink, is stored as it is"
        yield reported("compression", "break-even bandwidth", row["source"], measured)


def bars_of(script: str, report: Any) -> list[Bar]:
    """The bars of a report, whichever script wrote it."""
    if script == "compression":
        return list(compression(report["rows"] if isinstance(report, dict) else report))
    if isinstance(report, dict) and "bars" in report:
        return [Bar(**row) for row in report["bars"]]
    if script == "interference":
        return list(interference(report))
    raise KeyError("bars")
