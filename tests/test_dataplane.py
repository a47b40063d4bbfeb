"""The data plane: who waits for whom when hashes take long."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from kvdisk.hash_threads import HashThreads
from kvdisk.io.simdisk import SimDisk
from tests.simstore import InlineExecutor, SimStore, run, value

KIB = 1 << 10


class Stuck(Executor):
    """Threads that are busy with something else for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return Future()


async def opened() -> SimStore:
    return await SimStore.open(SimDisk(), segment_bytes=8192 * KIB, unit_count=2048)


async def reopened(sizes: dict[bytes, int]) -> SimStore:
    """A store with these chunks on disk and none in memory."""
    sim = await opened()
    for key, size in sizes.items():
        assert await sim.put(key, value(key, 0, size))
    await sim.flush()
    return await SimStore.open(sim.disk, segment_bytes=8192 * KIB, unit_count=2048, epochs=sim.epochs)


@pytest.mark.parametrize("size", [100 * KIB, 600 * KIB, 1024 * KIB, 1500 * KIB])
def test_what_is_read_is_not_verified_behind_packs(size: int) -> None:
    async def work() -> None:
        sim = await reopened({b"key": size})
        sim.plane.threads = HashThreads(Stuck(), InlineExecutor(), InlineExecutor())
        assert await sim.put(b"other", value(b"other", 0, 1800 * KIB))
        assert await sim.get(b"key") == value(b"key", 0, size)

    run(work())


@pytest.mark.parametrize("size", [100 * KIB, 600 * KIB, 1024 * KIB])
def test_a_short_read_is_not_verified_behind_long_ones(size: int) -> None:
    async def work() -> None:
        sim = await reopened({b"long": 1500 * KIB, b"short": size})
        sim.plane.threads = HashThreads(Stuck(), Stuck(), InlineExecutor())
        assert sim.store.promote(b"long") is not None
        sim.pump()
        assert await sim.get(b"short") == value(b"short", 0, size)

    run(work())


@pytest.mark.parametrize(("is_alone", "yields"), [(True, 3), (False, 0)])
def test_who_hashes_lets_others_run_after_each_chunk_where_that_costs_no_wait_for_the_gil(
    is_alone: bool, yields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        sim = await opened()
        sim.plane._is_alone = is_alone
        yielded: list[None] = []
        monkeypatch.setattr("kvdisk.dataplane.os.sched_yield", lambda: yielded.append(None))
        for key in (b"a", b"b", b"c"):
            assert await sim.put(key, value(key, 0, 600 * KIB))
        await sim.flush()
        assert len(yielded) == yields

    run(work())
