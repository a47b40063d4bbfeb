"""The bars that a comparison covers (docs/performance.md), as verdicts on what was measured. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from contestants import MIB, Case, Sample

Samples = dict[str, dict[str, list[Sample]]]
KVDISK, BARE, FIO, FS = "kvdisk", "kvdisk no checksums", "fio best", "vLLM fs tier"
HASH_READS_MAX = 1.2  # of plain reads of the same bytes, for checksums
SMALL = 128 << 10


class Bar(NamedTuple):
    """One verdict, "met" or "missed": a rule, the case it was tried in, the bar and what was measured."""

    rule: str
    case: str
    bar: str
    measured: str
    verdict: str


def ratios(mine: Sequence[Sample], theirs: Sequence[Sample]) -> list[float]:
    """Bandwidth of one over the other's, in each round that both ran, sorted."""
    return sorted(a.mb_per_s / b.mb_per_s for a, b in zip(mine, theirs, strict=False))


def quoted(values: Sequence[float]) -> str:
    """A median with its spread."""
    return f"{statistics.median(values):.2f} [{values[0]:.2f}..{values[-1]:.2f}]"


def cpu(samples: Sequence[Sample]) -> float:
    """Median CPU s/GiB."""
    return statistics.median(sample.cpu_s_per_gib for sample in samples)


def verdicts(measured: Sequence[tuple[Case, Samples]], memory_read_s: float) -> Iterator[Bar]:
    """Every bar, for every case that shows it."""
    for case, samples in measured:
        yield from _against_fio(case, samples)
        yield from _cpu_bars(case, samples, memory_read_s)
        yield from _against_fs_tier(case, samples)
        yield from _against_others(case, samples)
        yield from _checksums(case, samples)
    yield from _small_chunks(measured)


def by_rule(bars: Iterable[Bar]) -> Iterator[tuple[str, list[Bar]]]:
    """The bars of each rule, in the order in which rules first came."""
    rules: dict[str, list[Bar]] = {}
    for bar in bars:
        rules.setdefault(bar.rule, []).append(bar)
    yield from rules.items()


def _at_least(rule: str, case: Case, bar: float, values: Sequence[float]) -> Bar:
    met = statistics.median(values) >= bar
    return Bar(rule, str(case), f">= {bar:.2f} x", quoted(values), "met" if met else "missed")


def _at_most(rule: str, case: Case, bar: float, value: float, unit: str) -> Bar:
    verdict = "met" if value <= bar else "missed"
    return Bar(rule, str(case), f"<= {bar:.3f} {unit}", f"{value:.3f} {unit}", verdict)


def _pair(samples: Samples, mine: str, other: str, op: str) -> list[float] | None:
    if op in samples.get(mine, {}) and op in samples.get(other, {}):
        return ratios(samples[mine][op], samples[other][op])
    return None


def _against_fio(case: Case, samples: Samples) -> Iterator[Bar]:
    if case.pages != "huge":
        return
    for op, bar in (("load", 0.97), ("store", 0.95)):
        for name in (KVDISK, BARE):
            found = _pair(samples, name, FIO, op)
            if found:
                yield _at_least(f"{op}, {name} over fio", case, bar, found)


def _cpu_bars(case: Case, samples: Samples, memory_read_s: float) -> Iterator[Bar]:
    if case.pages != "huge" or case.fresh or case.requests != 1:
        return
    bar = 0.03 if case.bs >= MIB else 0.06
    for op, found in samples.get(BARE, {}).items():
        yield _at_most(f"{op}, CPU without checksums", case, bar, cpu(found), "s/GiB")
    for op, found in samples.get(KVDISK, {}).items():
        allowed = bar + HASH_READS_MAX * memory_read_s
        yield _at_most(f"{op}, CPU with checksums", case, allowed, cpu(found), "s/GiB")


def _against_fs_tier(case: Case, samples: Samples) -> Iterator[Bar]:
    if case.pages != "huge":
        return
    for op in ("store", "load"):
        small = case.bs == SMALL
        bar = (1.0 if case.fresh or not small else 1.3) if op == "store" else (1.3 if small else 1.0)
        name = BARE if small else KVDISK
        found = _pair(samples, name, FS, op)
        if found:
            yield _at_least(f"{op}, {name} over the fs tier", case, bar, found)
            if small:
                share = cpu(samples[name][op]) / cpu(samples[FS][op])
                yield _at_most(f"{op}, CPU over the fs tier, neither hashing", case, 0.2, share, "x")


def _against_others(case: Case, samples: Samples) -> Iterator[Bar]:
    for other in samples:
        if other in (KVDISK, BARE, FIO, FS):
            continue
        for op in ("store", "load"):
            found = _pair(samples, KVDISK, other, op)
            if found and op in samples.get(BARE, {}):
                yield _at_least(f"{op} over {other}", case, 1.0, found)
                share = cpu(samples[BARE][op]) / cpu(samples[other][op])
                yield _at_most(f"{op}, CPU over {other}, neither hashing", case, 1.0, share, "x")


def _checksums(case: Case, samples: Samples) -> Iterator[Bar]:
    for op in ("store", "load"):
        found = _pair(samples, KVDISK, BARE, op)
        if found:
            yield _at_least(f"{op}, checksums on over off", case, 0.95, found)


def _small_chunks(measured: Sequence[tuple[Case, Samples]]) -> Iterator[Bar]:
    """128 KiB chunks against 8 MiB ones, in otherwise equal cases; of different times, so medians only."""
    by_case = dict(measured)
    for case, samples in measured:
        large = by_case.get(Case(8 * MIB, case.total, case.requests, case.pages, case.fresh))
        if case.bs != SMALL or large is None:
            continue
        for op in ("store", "load"):
            if op in samples.get(KVDISK, {}) and op in large.get(KVDISK, {}):
                speeds = [statistics.median(s.mb_per_s for s in one[KVDISK][op]) for one in (samples, large)]
                yield _at_least(f"{op}, 128 KiB chunks over 8 MiB ones", case, 0.9, [speeds[0] / speeds[1]])
