"""Bars and verdicts: what a figure was held against, in one form for every script here, which keeps them in its JSON.

`REQUIREMENTS` are the rows of the table that `make bench` ends with (bench/summary.py). A row gathers the bars of its
name, whichever script they came from; the worst of them is what the row shows. Pure.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MET, MISSED, REPORTED = "met", "missed", "reported"


class Bar(NamedTuple):
    """One verdict: what was tried in which case, the bar, and what was measured.

    requirement: name of a row of REQUIREMENTS. verdict: MET, MISSED, or REPORTED where there is no bar. margin: of the
    measured value to the bar, 1 at the bar and more beyond it, whichever the direction; for finding the worst.
    """

    requirement: str
    rule: str
    case: str
    bar: str
    measured: str
    verdict: str
    margin: float = 1.0


class Requirement(NamedTuple):
    """A row of the final table. script: whose JSON has its bars."""

    name: str
    what: str
    bar: str
    script: str


REQUIREMENTS = (
    Requirement("load", "load bandwidth, one request and many", ">= 0.97 x fio at its best", "compare"),
    Requirement("load wide", "the same with as much memory for fio", ">= 0.97 x fio", "compare"),
    Requirement("store", "store bandwidth, fresh and recycled", ">= 0.95 x fio at its best", "compare"),
    Requirement("store wide", "the same with as much memory for fio", ">= 0.95 x fio", "compare"),
    Requirement("small chunks", "bandwidth at 128 KiB chunks", ">= 0.9 x that at 8 MiB", "compare"),
    Requirement("cpu", "CPU on huge pages, no checksums", "<= 0.03 s/GiB, 0.06 at 128 KiB", "compare"),
    Requirement("cpu checksums", "CPU with checksums", "+ 1.2 plain reads of the bytes", "compare"),
    Requirement("checksums", "bandwidth with checksums", ">= 0.95 x that without", "compare"),
    Requirement("fs tier", "bandwidth over vLLM's fs tier", ">= 1; 128 KiB: 1.3, store fresh 1.0", "compare"),
    Requirement("fs tier cpu", "CPU over vLLM's fs tier, 128 KiB", "<= 1/5, neither hashing", "compare"),
    Requirement("peers", "bandwidth over LMCache's and NIXL's clients", ">= 1", "compare"),
    Requirement("peers cpu", "CPU over LMCache's and NIXL's clients", "<= 1, neither hashing", "compare"),
    Requirement("busy owner", "bandwidth beside a scheduler that holds the GIL", ">= 0.9 x idle", "interference"),
    Requirement("owner speed", "that scheduler's own speed", ">= 0.95 x without kvdisk", "interference"),
    Requirement("read p99", "read p99 beside writes at full rate", "<= 1.5 x idle", "interference"),
    Requirement("lookup", "lookup of a key, hit or miss", "< 1 us", "scale"),
    Requirement("deferred", "32 deferred requests of 3,600 keys, a step", "<= 1 ms more", "scale"),
    Requirement("prefix", "prefix of twice the arena loads", ">= 80 % of the arena", "scale"),
    Requirement("overhead", "sealed packs' bytes / live bytes, 1 MiB and larger", "<= 1.02", "scale"),
    Requirement("recovery", "index of 1 TB at 1 MiB chunks", "< 2 s", "scale"),
    Requirement("linear", "recovery, memory and costs at 10^4 to 10^7 chunks", "linear or better", "scale"),
    Requirement("index memory", "index memory a chunk", "<= 200 bytes", "scale"),
    Requirement("ttft", "time to first token from a cold disk", "no bar", "vllm_ttft"),
    Requirement("decode", "time per output token, offloading on over off", "<= 2 % change", "vllm_ttft"),
    Requirement("store delay", "what stores add to a step", "<= the copy into the arena", "vllm_ttft"),
    Requirement("compression", "compression: break-even disk bandwidth", "no bar", "compression"),
    Requirement("faults", "crashes, torn writes, errnos: wrong bytes, dead engines", "0", "make test"),
)


def quoted(values: Sequence[float], digits: int = 2) -> str:
    """A median with its spread."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


def at_least(requirement: str, rule: str, case: object, bar: float, values: Sequence[float], unit: str = "x") -> Bar:
    """Whether the median of `values` reaches `bar`."""
    median = statistics.median(values)
    verdict = MET if median >= bar else MISSED
    return Bar(requirement, rule, str(case), f">= {bar:.2f} {unit}", quoted(values), verdict, median / bar)


def at_most(
    requirement: str, rule: str, case: object, bar: float, values: Sequence[float], unit: str, digits: int = 3
) -> Bar:
    """Whether the median of `values` stays within `bar`."""
    median = statistics.median(values)
    verdict = MET if median <= bar else MISSED
    measured = f"{quoted(values, digits)} {unit}" if len(values) > 1 else f"{median:.{digits}f} {unit}"
    return Bar(requirement, rule, str(case), f"<= {bar:.{digits}f} {unit}", measured, verdict, bar / max(median, 1e-9))


def reported(requirement: str, rule: str, case: object, measured: str) -> Bar:
    """A figure that has no bar."""
    return Bar(requirement, rule, str(case), "-", measured, REPORTED)


def by_rule(bars: Iterable[Bar]) -> Iterator[tuple[str, list[Bar]]]:
    """The bars of each rule, in the order in which rules first came."""
    rules: dict[str, list[Bar]] = {}
    for bar in bars:
        rules.setdefault(bar.rule, []).append(bar)
    yield from rules.items()


def show(bars: Sequence[Bar]) -> None:
    """A line a rule, and one for each case that missed it."""
    for rule, found in by_rule(bars):
        missed = [bar for bar in found if bar.verdict == MISSED]
        if found[0].verdict == REPORTED:
            print(f"{'':>7}  {rule}")
            for bar in found:
                print(f"{'':>11}{bar.measured}, {bar.case}")
            continue
        print(f"{MISSED if missed else MET:>7}  {rule}: {len(found) - len(missed)} of {len(found)} cases")
        for bar in missed or found[:1]:
            print(f"{'':>11}{bar.measured} (bar {bar.bar}), {bar.case}", flush=True)


def markdown(bars: Sequence[Bar]) -> list[str]:
    """Every bar as a line of a Markdown table."""
    head = ["| verdict | rule | case | bar | measured |", "| --- | --- | --- | --- | --- |"]
    return head + [f"| {b.verdict} | {b.rule} | {b.case} | {b.bar} | {b.measured} |" for b in bars]
