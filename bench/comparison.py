"""What a comparison's samples say of the bars: ratios of one round's passes, medians, CPU. Pure."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bars import Bar, at_least, at_most, quoted, reported
from contestants import MIB, Case, Sample

Samples = dict[str, dict[str, list[Sample]]]  # contestant -> "store" or "load" -> one a round
KVDISK, BARE, FS = "kvdisk", "kvdisk no checksums", "vLLM fs tier"
FIO, WIDE = "fio best", "fio, much memory"
HASH_READS_MAX = 1.2  # of plain reads of the same bytes, for checksums
SMALL = 128 << 10
OPS = ("store", "load")


class Measured(NamedTuple):
    """One case. memory_read_s: CPU seconds to read a GiB of memory, measured in each of its rounds."""

    case: Case
    samples: Samples
    memory_read_s: list[float]


class Pair(NamedTuple):
    """kvdisk against itself: samples of two cases whose passes alternated. what: "one over the other"."""

    what: str
    cases: tuple[Case, Case]
    samples: tuple[dict[str, list[Sample]], dict[str, list[Sample]]]


def ratios(mine: Sequence[Sample], theirs: Sequence[Sample]) -> list[float]:
    """Bandwidth of one over the other's, in each round that both ran, sorted."""
    return sorted(a.mb_per_s / b.mb_per_s for a, b in zip(mine, theirs, strict=False))


def cpu_ratios(mine: Sequence[Sample], theirs: Sequence[Sample]) -> list[float]:
    """CPU of one over the other's; a pass too short for the clock counts as one tick."""
    return sorted(a.cpu_s_per_gib / max(b.cpu_s_per_gib, 1e-3) for a, b in zip(mine, theirs, strict=False))


def cpu(samples: Sequence[Sample]) -> list[float]:
    """CPU s/GiB of each round."""
    return [sample.cpu_s_per_gib for sample in samples]


def median_cpu(samples: Sequence[Sample]) -> float:
    """Median CPU s/GiB."""
    return statistics.median(cpu(samples))


def verdicts(measured: Sequence[Measured], pairs: Sequence[Pair] = ()) -> Iterator[Bar]:
    """Every bar, for every case that shows it."""
    for one in measured:
        if one.case.pages == "huge":
            yield from _against_fio(one.case, one.samples)
            yield from _cpu_bars(one)
            yield from _against_fs_tier(one.case, one.samples)
        yield from _against_others(one.case, one.samples)
        yield from _checksums(one.case, one.samples)
    for pair in pairs:
        yield from _against_itself(pair)


def _both(samples: Samples, mine: str, other: str, op: str) -> tuple[list[Sample], list[Sample]] | None:
    mine_found, theirs = samples.get(mine, {}).get(op), samples.get(other, {}).get(op)
    return (mine_found, theirs) if mine_found and theirs else None


def _against_fio(case: Case, samples: Samples) -> Iterator[Bar]:
    for op, bar in (("load", 0.97), ("store", 0.95)):
        for name in (KVDISK, BARE):
            if found := _both(samples, name, FIO, op):
                yield at_least(op, f"{op}, {name} over fio", case, bar, ratios(*found))
            if found := _both(samples, name, WIDE, op):
                yield at_least(f"{op} wide", f"{op}, {name} over fio with as much memory", case, bar, ratios(*found))


def _cpu_bars(one: Measured) -> Iterator[Bar]:
    if one.case.fresh or one.case.requests != 1:
        return
    bar = 0.03 if one.case.bs >= MIB else 0.06
    for op, found in one.samples.get(BARE, {}).items():
        yield at_most("cpu", f"{op}, CPU without checksums", one.case, bar, cpu(found), "s/GiB")
    read = statistics.median(one.memory_read_s)
    for op, found in one.samples.get(KVDISK, {}).items():
        rule = f"{op}, CPU with checksums"
        yield at_most("cpu checksums", rule, one.case, bar + HASH_READS_MAX * read, cpu(found), "s/GiB")


def _against_fs_tier(case: Case, samples: Samples) -> Iterator[Bar]:
    small = case.bs == SMALL
    name = BARE if small else KVDISK
    for op in OPS:
        found = _both(samples, name, FS, op)
        if found is None:
            continue
        bar = 1.0 if not small or (op == "store" and case.fresh) else 1.3
        yield at_least("fs tier", f"{op}, {name} over the fs tier", case, bar, ratios(*found))
        if small:
            yield at_most("fs tier cpu", f"{op}, CPU over the fs tier, neither hashing", case, 0.2,
                          cpu_ratios(*found), "x")  # fmt: skip


def _against_others(case: Case, samples: Samples) -> Iterator[Bar]:
    for other in samples:
        if other in (KVDISK, BARE, FIO, WIDE, FS):
            continue
        for op in OPS:
            if found := _both(samples, KVDISK, other, op):
                yield at_least("peers", f"{op} over {other}", case, 1.0, ratios(*found))
            if found := _both(samples, BARE, other, op):
                yield at_most("peers cpu", f"{op}, CPU over {other}, neither hashing", case, 1.0,
                              cpu_ratios(*found), "x")  # fmt: skip


def _checksums(case: Case, samples: Samples) -> Iterator[Bar]:
    for op in OPS:
        if found := _both(samples, KVDISK, BARE, op):
            yield at_least("checksums", f"{op}, checksums on over off", case, 0.95, ratios(*found))


def _against_itself(pair: Pair) -> Iterator[Bar]:
    one, other = pair.cases
    for op in OPS:
        mine, theirs = (samples.get(op, []) for samples in pair.samples)
        if not mine or not theirs:
            continue
        found = ratios(mine, theirs)
        if (one.bs, other.bs) == (SMALL, 8 * MIB):
            yield at_least("small chunks", f"{op}, {pair.what}", "", 0.9, found)
        else:
            yield reported("load" if op == "load" else "store", f"{op}, {pair.what}", str(one), f"{quoted(found)} x")
