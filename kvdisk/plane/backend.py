"""What runs on a data plane's event loop, whoever owns the loop: engine, scan, commands.

Order of calls: `start`, then `open` or (after another backend of the same store) `resume`, then `run` as often as
wanted, then `stop`. All on the loop's thread.
"""

import logging
from collections.abc import Callable, Sequence

from kvdisk import layout
from kvdisk.commands import Command, Completion, FoundSegment, SegmentFile
from kvdisk.dataplane import DataPlane, Units
from kvdisk.instance import Instance
from kvdisk.io.probe import choose_engine, prove_directory
from kvdisk.io.protocol import Engine, EngineInfo
from kvdisk.io.transfer import Transfer
from kvdisk.options import Options
from kvdisk.plane import Counts
from kvdisk.scan import Scanner, Take, collector_paused
from kvdisk.store_config import StoreConfig

logger = logging.getLogger("kvdisk")


class Backend:
    """See the module's docstring.

    Args:
        options: of the store.
        units: see DataPlane.
        report: called on the loop with every completion.
        checksums, is_alone: see DataPlane.

    Attributes:
        engine, plane: once started, and once opened.
    """

    def __init__(
        self,
        options: Options,
        units: Sequence[Units],
        report: Callable[[Completion], None],
        *,
        checksums: bool = True,
        is_alone: bool = False,
    ) -> None:
        self._options = options
        self._units = units
        self._report = report
        self._checksums = checksums
        self._is_alone = is_alone
        self.engine: Engine | None = None
        self.plane: DataPlane | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        assert self.engine is not None
        return self.engine.info

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        if self.plane is None:
            return Counts()
        counts = self._transfer.counts
        return Counts(
            self.plane.bytes_read, counts.ops, counts.short_results, counts.retries, counts.errors, counts.late
        )

    async def start(self) -> int:
        """See Plane.start."""
        options = self._options
        memories = [unit.memory for unit in self._units]
        first, *others = options.root_dir
        self.engine, found = await choose_engine(first, options.engine, memories)
        alignments = [found, *[await prove_directory(self.engine, path) for path in others]]
        alignment = max(layout.ALIGNMENT_MIN, *(a.unit for a in alignments))
        self._transfer = Transfer(self.engine, alignment=alignment, timeout_s=options.io_timeout_s)
        return alignment

    def resume(self, instances: Sequence[Instance], config: StoreConfig) -> None:
        """Begin to work on what is known already."""
        assert self.engine is not None
        self.plane = DataPlane(
            instances,
            self._units,
            config.alignment,
            self.engine,
            self._transfer,
            self._report,
            timeout_s=self._options.io_timeout_s,
            checksums=self._checksums,
            is_alone=self._is_alone,
        )

    async def open(self, instances: Sequence[Instance], config: StoreConfig, take: Take) -> int:
        """Hand what the instances hold to `take`, at most as many segments as each may have; the epoch."""
        self.resume(instances, config)
        found: list[FoundSegment] = []
        numbers: set[int] = set()
        with collector_paused():
            for root, instance in enumerate(instances):
                files = [SegmentFile(root, number) for number in instance.make_unique(numbers)]
                numbers.update(file.number for file in files)
                found += await self._scan(files, instance, config, take)
                instance.trim_to_cap()
        return _begin_epoch(instances, found)

    async def _scan(
        self, files: Sequence[SegmentFile], instance: Instance, config: StoreConfig, take: Take
    ) -> list[FoundSegment]:
        """The segments of one root that stay; the others are removed."""
        assert self.plane is not None
        scanner = Scanner(
            self.plane.files,
            self._transfer,
            self.plane.bounce,
            fingerprint=config.fingerprint,
            segment_bytes=config.segment_bytes,
            alignment=config.alignment,
        )
        kept: list[FoundSegment] = []
        room = config.segments_max[files[0].root] if files else 0

        async def keep(one: FoundSegment) -> None:
            # segment_bytes was changed: there is nothing in it, and it cannot be recycled
            if one.header is None and instance.segment_size(one.file.number) != config.segment_bytes:
                self._remove(one, instance)
            elif len(files) <= room:  # nothing has to go, so who takes them need not wait for the last
                kept.append(one._replace(packs=[]))  # a terabyte's are a quarter of a gigabyte
                await take(one)
            else:
                kept.append(one)

        await scanner.find([(file, instance.segment_path(file.number)) for file in files], keep)
        if len(files) > room:  # the cap was lowered: the oldest go
            kept.sort(key=lambda one: one.header.sequence if one.header else 0, reverse=True)
            for one in kept[room:]:
                self._remove(one, instance)
            del kept[room:]
            for one in kept:
                await take(one)
        return kept

    def _remove(self, one: FoundSegment, instance: Instance) -> None:
        assert self.engine is not None and self.plane is not None
        self.plane.files.close_one(one.file)
        self.engine.remove_file(instance.segment_path(one.file.number))

    def run(self, commands: Sequence[Command]) -> None:
        """Begin `commands`."""
        assert self.plane is not None
        self.plane.start(commands)

    async def stop(self, timeout_s: float) -> bool:
        """End what is in progress and close the engine; False, and nothing closed, if something hangs."""
        if self.plane is not None and not await self.plane.stop(timeout_s):
            return False
        if self.engine is not None:
            self.engine.close()
        return True


def _begin_epoch(instances: Sequence[Instance], found: Sequence[FoundSegment]) -> int:
    """The epoch from here on, durable on every root."""
    records = [instance.read_epoch() for instance in instances]
    known = [record for record in records if record is not None]
    # A segment of a later epoch proves a reset whose record did not reach the disk; what is older is stale.
    epochs = [record.epoch for record in known]
    epoch = max([0, *epochs, *(one.header.epoch for one in found if one.header)])
    if len(known) < len(records):  # a damaged record: what is on disk may be stale, so none of it counts
        logger.warning("epoch of %s is damaged; its chunks are not used", instances[0].namespace_path)
        epoch += 1
    elif any(record.after_reset for record in known) or epoch > max(epochs):
        # Since that reset the server may have had other weights than the model's files, which name the namespace.
        logger.info("kvdisk: the cache was reset while the server ran; what it stored since is not used")
        epoch += 1
    for instance in instances:
        instance.write_epoch(epoch, after_reset=False)
    return epoch
