"""Whatever the disk does, a get is a miss or the exact bytes: crashes at any point, torn and lost writes, all errnos.

A workload runs on a simulated machine (tests/simstore.py) which dies, or misbehaves, at the point a parameter names.
What is left is opened again by a new store, and every key is asked for. Seeds are part of each failure's text.
"""

import errno
import random
from dataclasses import dataclass, field

import pytest

from kvdisk.io.sim import Fault, SimDisk
from kvdisk.store import Presence
from tests.simstore import SimStore, run, value

KEYS = [b"key%02d" % number for number in range(24)]
ROOTS = pytest.mark.parametrize("segments_max", [(4,), (3, 3)], ids=["one root", "two roots"])


@dataclass
class Model:
    """What may be found: all versions of each key ever put, and the newest that was flushed before the crash."""

    seed: int
    versions: dict[bytes, list[bytes]] = field(default_factory=dict)
    stored: dict[bytes, int] = field(default_factory=dict)  # key -> index of the newest version that was not refused
    flushed: dict[bytes, int] = field(default_factory=dict)
    put_here: set[bytes] = field(default_factory=set)  # by the process that is at work now

    def put(self, key: bytes, data: bytes) -> None:
        self.versions.setdefault(key, []).append(data)
        self.put_here.add(key)

    def flush(self) -> None:
        self.flushed.update(self.stored)

    def check_live(self, key: bytes, found: bytes | None) -> None:
        """In the process that wrote, only the newest version is right."""
        versions = self.versions.get(key, [])
        right = versions[-1:] if key in self.put_here else versions
        assert found is None or found in right, f"seed {self.seed}: wrong bytes under {key!r}"

    def check_after_crash(self, key: bytes, found: bytes | None, *, completed_writes_survive: bool) -> None:
        """An older version than the newest flushed one is only excused by a disk that lost completed writes."""
        versions = self.versions.get(key, [])
        oldest = self.flushed.get(key, 0) if completed_writes_survive else 0
        assert found is None or found in versions[oldest:], f"seed {self.seed}: wrong bytes under {key!r}"


async def workload(sim: SimStore, model: Model, steps: int = 150) -> None:
    """Puts, overwrites, gets and flushes, three times what the disk and the arena hold."""
    chance = random.Random(model.seed)
    for _ in range(steps):
        if sim.disk.crashed:
            return
        key = chance.choice(KEYS)
        action = chance.random()
        if action < 0.65:
            data = value(key, len(model.versions.get(key, ())), chance.choice((12, 4096, 9000, 20_000, 30_000)))
            model.put(key, data)  # first: it may reach the disk and be found although the put is cut off
            if await sim.put(key, data):
                model.stored[key] = len(model.versions[key]) - 1
            else:
                model.check_live(key, await sim.get(key))
        elif action < 0.9:
            model.check_live(key, await sim.get(key))
        else:
            before = sim.store.writer.stats.chunks_not_flushed
            await sim.flush()
            if not sim.disk.crashed and sim.store.writer.stats.chunks_not_flushed == before:
                model.flush()
    await sim.flush()


async def reopen_and_check(
    disk: SimDisk, model: Model, segments_max: tuple[int, ...], *, completed_writes_survive: bool
) -> int:
    """Every key is a miss or right, and the store goes on working; how many hit."""
    sim = await SimStore.open(disk, segments_max=segments_max, seed=model.seed + 1)
    hits = 0
    model.put_here.clear()
    model.stored.clear()
    for key in KEYS:
        found = await sim.get(key)
        hits += found is not None
        model.check_after_crash(key, found, completed_writes_survive=completed_writes_survive)
        if found is not None:
            model.flushed[key] = model.versions[key].index(found)  # no two versions are equal
    for key in KEYS[:8]:
        data = value(key, len(model.versions.get(key, ())), 9_000)
        model.put(key, data)
        assert await sim.put(key, data), f"seed {model.seed}: refused after recovery"
        model.stored[key] = model.flushed[key] = len(model.versions[key]) - 1
    await sim.flush()
    for key in KEYS[:8]:
        assert await sim.get(key) == model.versions[key][-1], f"seed {model.seed}"
    return hits


def events_of(segments_max: tuple[int, ...], seed: int) -> int:
    """Points at which the workload can crash."""
    disk = SimDisk(seed)

    async def main() -> None:
        await workload(await SimStore.open(disk, segments_max=segments_max), Model(seed))

    run(main())
    return disk.events


@ROOTS
@pytest.mark.parametrize("completed_writes_survive", [True, False], ids=["killed", "power lost"])
def test_a_crash_at_any_write_yields_no_wrong_bytes(
    segments_max: tuple[int, ...], completed_writes_survive: bool
) -> None:
    seed = 7
    hits = 0
    for crash_at in range(events_of(segments_max, seed)):
        disk = SimDisk(seed, crash_at=crash_at, lose_completed=not completed_writes_survive)
        model = Model(seed)

        async def main(disk: SimDisk = disk, model: Model = model) -> int:
            await workload(await SimStore.open(disk, segments_max=segments_max, reorder=True), model)
            return await reopen_and_check(
                disk.after_crash(), model, segments_max, completed_writes_survive=completed_writes_survive
            )

        try:
            hits += run(main())
        except AssertionError as error:
            raise AssertionError(f"crash at event {crash_at}, seed {seed}: {error}") from error
    assert hits > 0, "a test in which nothing ever hits proves nothing"


@pytest.mark.parametrize("seed", range(100))
def test_crashes_of_random_workloads_yield_no_wrong_bytes(seed: int) -> None:
    chance = random.Random(seed)
    segments_max = chance.choice([(3,), (4,), (6,), (3, 3), (16,)])
    survive = chance.random() < 0.7
    disk = SimDisk(seed, crash_at=chance.randrange(20, 80), lose_completed=not survive)
    model = Model(seed)

    async def main() -> None:
        nonlocal disk
        for _ in range(3):  # crash, and crash again
            sim = await SimStore.open(disk, segments_max=segments_max, reorder=chance.random() < 0.7, seed=seed)
            await workload(sim, model, chance.randrange(20, 120))
            disk = disk.after_crash()
            disk.lose_completed = not survive
            await reopen_and_check(disk, model, segments_max, completed_writes_survive=survive)
            model.put_here.clear()
            model.stored.clear()
            disk = disk.after_crash()
            disk.crash_at, disk.lose_completed = chance.randrange(10, 80), not survive

    run(main())


ERRNOS = [
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EINVAL,
    errno.EBADF, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.EACCES, errno.EMFILE, errno.ENOENT,
]  # fmt: skip


@pytest.mark.parametrize("what", ["read", "write", "create_file", "open_file", "file_bytes"])
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_no_errno_of_any_operation_yields_wrong_bytes_or_stops_the_store(what: str, code: int) -> None:
    for nth, count in ((0, 1), (1, 2), (3, 9)):
        disk = SimDisk(seed=code)
        model = Model(code)
        faults = [Fault(what, nth=nth, errno=code, count=count)]

        async def main(disk: SimDisk = disk, model: Model = model, faults: list[Fault] = faults) -> None:
            sim = await SimStore.open(disk, faults=faults)
            await workload(sim, model)
            assert not sim.store.busy
            for key in KEYS:
                model.check_live(key, await sim.get(key))
            # The fault is over and so are all back-offs: the store works as ever.
            sim.engine.faults = ()
            await sim.wait(200.0)
            for key in KEYS[:4]:
                data = value(key, len(model.versions.get(key, ())), 9_000)
                model.put(key, data)
                assert await sim.put(key, data)
            await sim.flush()
            assert all(sim.store.presence(key) is Presence.READY for key in KEYS[:4])
            assert all(key in sim.store.index for key in KEYS[:4]), "not on disk although the disk works again"
            await reopen_and_check(disk.after_crash(), model, (4,), completed_writes_survive=False)

        run(main())


@pytest.mark.parametrize("fault", [
    Fault("write", nth=2, torn=True, count=3),
    Fault("read", nth=0, torn=True, count=3),
    Fault("write", nth=1, short_by=4096, count=4),
    Fault("read", nth=0, short_by=4096, count=4),
    Fault("write", nth=2, delay_turns=60, count=4),
    Fault("read", nth=0, delay_turns=60, count=4),
    Fault("write", nth=0, never=True),
    Fault("write", nth=3, never=True, count=2),
    Fault("read", nth=1, never=True, count=3),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_torn_short_delayed_and_lost_operations_yield_no_wrong_bytes(fault: Fault, seed: int) -> None:
    disk, model = SimDisk(seed), Model(seed)

    async def main() -> None:
        sim = await SimStore.open(disk, faults=[fault], reorder=True)
        await workload(sim, model, 80)
        for key in KEYS:
            model.check_live(key, await sim.get(key))
        sim.engine.release()  # what was late lands now, and must not hit slots or segments used by others since
        await sim.wait(60.0)
        for key in KEYS:
            model.check_live(key, await sim.get(key))
        await workload(sim, model, 40)
        await reopen_and_check(disk.after_crash(), model, (4,), completed_writes_survive=False)

    run(main())


@pytest.mark.parametrize("preallocates", [True, False])
@pytest.mark.parametrize("capacity_segments", [0, 1, 2, 3])
def test_a_disk_smaller_than_the_cap_is_never_overrun_and_still_serves(
    preallocates: bool, capacity_segments: int
) -> None:
    capacity = (capacity_segments * 256 + 64) << 10
    disk = SimDisk(3, capacity_bytes=capacity, preallocates=preallocates)
    model = Model(3)

    async def main() -> None:
        sim = await SimStore.open(disk, segments_max=(8,))
        for _ in range(4):
            await workload(sim, model, 60)
            assert disk.allocated_bytes() <= capacity
        for key in KEYS:
            model.check_live(key, await sim.get(key))
        assert len(sim.commands) < 1000, "a full disk must not be asked in a loop"

    run(main())
