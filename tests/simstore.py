"""A store on a simulated machine: Store, DataPlane, Scanner and Transfer as they are, over the simulated engine.

Everything runs on one event loop whose clock is virtual and without threads, so a run is decided by its seeds alone:
when nothing is ready the clock jumps to the next timer, and a timeout of 30 s costs nothing.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np

from kvdisk.bounce import BouncePool
from kvdisk.commands import Command, Completion, SegmentFile
from kvdisk.dataplane import DataPlane, Units
from kvdisk.hash_threads import HashThreads
from kvdisk.io.protocol import Memory
from kvdisk.io.sim import Fault, SimDisk, SimEngine
from kvdisk.io.transfer import Transfer
from kvdisk.resident import Resident
from kvdisk.scan import Scanner
from kvdisk.store import Presence, Store
from kvdisk.store_config import StoreConfig
from kvdisk.units import UNIT_BYTES, round_up

T = TypeVar("T")

ALIGNMENT = 4096
FINGERPRINT = bytes(range(32))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            self._virtual_s = max(self._virtual_s, min(timers, default=0.0))
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


async def call_inline(
    work: Callable[[], Any], timeout_s: float, what: str, discard: Callable[[Any], object] | None = None
) -> Any:
    """In place of `call_in_thread`: the simulated disk is not to be entered from several threads."""
    return work()


class SimDirectory:
    """What the data plane needs of a claimed root, on a simulated disk. The epoch is written whole or not at all."""

    def __init__(self, disk: SimDisk, root: int, epochs: dict[int, int]) -> None:
        self._disk = disk
        self._root = root
        self._epochs = epochs

    def segment_path(self, number: int) -> str:
        return f"/root{self._root}/{number:08d}.seg"

    def create_segment(self, number: int, cost_bytes: int, create: Callable[[str], int]) -> int:
        return create(self.segment_path(number))

    def write_epoch(self, epoch: int) -> None:
        self._disk.event()
        self._epochs[self._root] = epoch

    def files(self) -> list[tuple[SegmentFile, str]]:
        prefix = f"/root{self._root}/"
        names = sorted(path for path in self._disk.files if path.startswith(prefix))
        return [(SegmentFile(self._root, int(name[len(prefix) : -4])), name) for name in names]


class SimStore:
    """An opened store. `close` is not needed: a simulated machine can simply be forgotten."""

    def __init__(
        self, disk: SimDisk, engine: SimEngine, config: StoreConfig, epochs: dict[int, int], seed: int
    ) -> None:
        self.disk = disk
        self.engine = engine
        self.epochs = epochs
        self.memory = _memory(config.unit_count * UNIT_BYTES)
        self.store = Store(config, random.Random(seed))
        self.transfer = Transfer(engine, alignment=ALIGNMENT, piece_bytes=64 << 10, inflight_bytes_max=1 << 20)
        roots = range(len(config.segments_max))
        self.directories = [SimDirectory(disk, root, epochs) for root in roots]
        self.plane = DataPlane(
            self.directories,  # type: ignore[arg-type]
            [Units(self.memory, 0)],
            config.alignment,
            engine,
            self.transfer,
            self._report,
            call=call_inline,
        )
        self.plane.threads.close()
        self.plane.threads = HashThreads(InlineExecutor(), InlineExecutor(), InlineExecutor())
        self.plane.compression.close()
        self.plane.compression.pack_threads = self.plane.compression.verify_threads = InlineExecutor()
        self.plane.bounce = BouncePool(_memory)
        self.commands: list[Command] = []  # all that were issued, for tests that count
        self._completions: list[Completion] = []
        self._came = asyncio.Event()

    @classmethod
    async def open(
        cls,
        disk: SimDisk,
        *,
        faults: Sequence[Fault] = (),
        reorder: bool = False,
        segments_max: tuple[int, ...] = (4,),
        segment_bytes: int = 256 << 10,
        unit_count: int = 64,
        epochs: dict[int, int] | None = None,
        seed: int = 0,
        compress: bool = False,
    ) -> "SimStore":
        config = StoreConfig(FINGERPRINT, segment_bytes, ALIGNMENT, segments_max, unit_count, compress=compress)
        engine = SimEngine(disk, faults=faults, reorder=reorder)
        self = cls(disk, engine, config, {} if epochs is None else epochs, seed)
        engine.start([self.memory])
        scanner = Scanner(
            self.plane.files,
            self.transfer,
            self.plane.bounce,
            fingerprint=FINGERPRINT,
            segment_bytes=segment_bytes,
            alignment=ALIGNMENT,
        )
        scans = await scanner.scan([file for directory in self.directories for file in directory.files()])
        epoch = max([0, *self.epochs.values(), *(scan.header.epoch for scan in scans if scan.header)])
        self.store.recover(scans, epoch)
        return self

    # ---- what a user does

    async def put(self, key: bytes, data: bytes, *, parent: bytes = b"", position: int = 0, patience: int = 40) -> bool:
        """Store `data`, as the library does; False: refused."""
        for _ in range(patience):
            if self.store.replace(key):
                resident = self.store.reserve(key, 0, (len(data),), position, parent)
                if resident is not None:
                    slot = self.slot(resident)
                    slot[: len(data)] = data
                    slot[len(data) :] = bytes(len(slot) - len(data))
                    self.store.commit([resident])
                    self.pump()
                    return True
            if not await self.wait():
                return False
        return False

    async def get(self, key: bytes, patience: int = 40) -> bytes | None:
        """The bytes of a hit, or None."""
        for _ in range(patience):
            presence = self.store.presence(key)
            if presence is Presence.READY:
                resident = self.store.resident(key)
                assert resident is not None
                self.store.touch(key)
                return bytes(self.slot(resident)[: resident.live_bytes])
            if presence is Presence.ABSENT:
                return None
            if presence is Presence.ON_DISK:
                self.store.promote(key)
            if not await self.wait():
                return None
        return None

    async def flush(self) -> None:
        """Wait until nothing is in flight, or nothing more happens."""
        self.pump()
        while self.store.busy and await self.wait():
            pass

    def slot(self, resident: Resident) -> memoryview:
        start = resident.run.start * UNIT_BYTES
        return self.memory.view[start : start + round_up(resident.live_bytes, ALIGNMENT)]

    # ---- the machinery

    def pump(self) -> None:
        now = asyncio.get_running_loop().time()
        completions, self._completions = self._completions, []
        for completion in completions:
            self.store.complete(completion, now)
        commands = self.store.take_commands(now)
        self.commands += commands
        self.plane.start(commands)

    async def wait(self, timeout_s: float = 100.0) -> bool:
        """Let the machine work until something completes; False if nothing does."""
        self.pump()
        self._came.clear()
        try:
            await asyncio.wait_for(self._came.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        self.pump()
        return True

    def _report(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._came.set()


def _memory(size: int) -> Memory:
    """Aligned memory like `private_memory`'s, but no more than is asked for."""
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return Memory(memoryview(raw)[start : start + size], raw.ctypes.data + start, "4 KiB")


def value(key: bytes, version: int, size: int) -> bytes:
    """The bytes of a version of a key: nothing else has to be remembered about them."""
    return random.Random(f"{key!r} {version}").randbytes(size)


Workload = Callable[[SimStore], Awaitable[None]]
