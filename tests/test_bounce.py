"""Scratch memory: pooled, but not for ever, and never given out while the kernel may use it."""

import asyncio
import contextlib
import weakref

import pytest

from kvdisk.bounce import BouncePool
from kvdisk.io.protocol import Memory
from kvdisk.io.transfer import TransferLateError
from kvdisk.units import MIB
from tests.simstore import _memory


class Machine:
    """What a pool allocates, and how much of it is still held; small slabs are not counted."""

    def __init__(self) -> None:
        self.live: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self.count = 0

    def allocate(self, size: int) -> Memory:
        self.count += 1
        memory = _memory(size)
        self.live[self.count] = memory.view
        return memory

    @property
    def held_bytes(self) -> int:
        return sum(len(view) for view in self.live.values())


@pytest.mark.parametrize("size", [65 * MIB, 218 * MIB])
def test_what_was_needed_once_and_is_very_large_goes_back_to_the_system(size: int) -> None:
    machine = Machine()
    pool = BouncePool(machine.allocate)
    before = machine.held_bytes
    with pool.take(size) as memory:
        assert size <= memory.size < size + 2 * MIB, "not rounded to a power of two"
        del memory
    assert machine.held_bytes == before


def test_many_large_buffers_at_once_leave_a_bounded_rest() -> None:
    machine = Machine()
    pool = BouncePool(machine.allocate)
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(pool.take(20 * MIB))
        assert machine.held_bytes == 512 * MIB
    assert machine.held_bytes <= 256 * MIB
    with contextlib.ExitStack() as stack:  # what was kept is counted once, and given out before anything new
        count = machine.count
        for _ in range(8):
            stack.enter_context(pool.take(32 * MIB))
        assert machine.count == count
    assert machine.held_bytes > 200 * MIB


def test_buffers_in_steady_use_are_allocated_once() -> None:
    machine = Machine()
    pool = BouncePool(machine.allocate)
    for size in (1, 64 << 10, 2 * MIB, 32 * MIB):
        with pool.take(size):
            pass
        count = machine.count
        for _ in range(5):
            with pool.take(size) as memory:
                assert memory.size >= size
        assert machine.count == count


@pytest.mark.parametrize("size", [4096, 32 * MIB])
def test_a_buffer_of_a_late_transfer_is_not_given_out_before_that_settles(size: int) -> None:
    machine = Machine()
    pool = BouncePool(machine.allocate)

    async def main() -> None:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(TransferLateError), pool.take(size) as late:
            raise TransferLateError("late", settled)
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(pool.take(size)) for _ in range(40 if size < MIB else 2)]
            assert late not in others
        settled.set_result(None)
        await asyncio.sleep(0)
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(pool.take(size)) for _ in range(80 if size < MIB else 3)]
            assert late in others

    asyncio.run(main())
