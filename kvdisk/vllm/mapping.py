"""Which GPU block belongs to which place in which slot: vLLM's transfer specs, read exactly as vLLM builds them.

A `GPULoadStoreSpec` lists the blocks of all groups, group after group: `group_sizes[g]` of them, and
`block_indices[g]`, the index within the request of the group's first block. A group's blocks are consecutive from
there, so with `skip = block_indices[g] % blocks_per_chunk`, its j-th block is block `(skip + j) % blocks_per_chunk` of
its chunk number `(skip + j) // blocks_per_chunk`, and K chunks are involved.

- Load: the first chunk may be entered late (a sliding window, Mamba) and the last one left early:
  `(K - 1) * blocks_per_chunk < skip + n <= K * blocks_per_chunk`. Anything else would put bytes into wrong blocks.
- Store: chunks are whole, except that vLLM *drops null blocks from the list without a trace*, also in the middle of a
  chunk, and chunks need not follow each other. What it reports is `skip`, the first chunk's leading nulls. Hence the
  mapping is certain iff `skip + n == K * blocks_per_chunk`: then no other block can be missing. A store that is not
  certain is *poisoned*: nothing of that group is copied and none of its slots may ever be read.

Pure numpy, 64-bit throughout. What can fail: ids out of range, or a load that does not add up: `MappingError`. Neither
has an innocent cause (it is a bug, ours or vLLM's), and going on would be silent corruption.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.units import UNIT_BYTES, round_up

Int64s = npt.NDArray[np.int64]


class MappingError(RuntimeError):
    """A transfer that cannot be carried out without touching wrong bytes."""


class GpuSide(Protocol):
    """vLLM's `GPULoadStoreSpec`, as far as it is read here."""

    block_ids: npt.NDArray[np.int32]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


class SlotSide(Protocol):
    """Our `SlotsSpec`, as far as it is read here."""

    units: list[int]
    slots_per_group: list[int]


class GroupTransfer(NamedTuple):
    """The part of a transfer that belongs to one group.

    Attributes:
        group_index: its place in `Geometry.groups`.
        group: its geometry.
        blocks: int64[n], GPU block ids.
        units: int64[K], first unit of each slot.
        skip: blocks of the first slot before `blocks[0]`, less than `blocks_per_chunk`.
        certain: False for a store that cannot be mapped: poison `units`, copy nothing.
    """

    group_index: int
    group: GroupGeometry
    blocks: Int64s
    units: Int64s
    skip: int
    certain: bool

    def block_starts(self, blocks_per_chunk: int) -> Int64s:
        """int64[n]: byte offset, from unit 0, of each block's place in its slot."""
        place = self.skip + np.arange(len(self.blocks), dtype=np.int64)
        first_unit = self.units[place // blocks_per_chunk]
        return first_unit * UNIT_BYTES + place % blocks_per_chunk * self.group.block_bytes


def map_store(
    geometry: Geometry, gpu: GpuSide, slots: SlotSide, num_blocks: int, unit_count: int
) -> list[GroupTransfer]:
    """Split a store into its groups; those without slots are left out.

    Args:
        geometry: this rank's.
        gpu, slots: the two sides, same groups in the same order.
        num_blocks: GPU blocks there are; ids lie in [0, num_blocks).
        unit_count: units there are in the share.

    Raises:
        MappingError: an id or a unit out of range, or sides that contradict each other.
    """
    transfers = []
    for part in _split(geometry, gpu, slots, num_blocks, unit_count):
        certain = part.skip + len(part.blocks) == len(part.units) * geometry.blocks_per_chunk
        if len(part.units):
            transfers.append(part._replace(certain=certain))
        elif len(part.blocks):
            raise MappingError(
                f"store of {len(part.blocks)} blocks of KV cache group {part.group.group_id} into no slot"
            )
    return transfers


def map_load(
    geometry: Geometry, gpu: GpuSide, slots: SlotSide, num_blocks: int, unit_count: int
) -> list[GroupTransfer]:
    """Split a load into its groups; arguments and errors as for `map_store`.

    Raises:
        MappingError: also if blocks and slots do not add up.
    """
    transfers = _split(geometry, gpu, slots, num_blocks, unit_count)
    for part in transfers:
        end = part.skip + len(part.blocks) if len(part.blocks) else 0
        chunks = -(-end // geometry.blocks_per_chunk)
        if chunks != len(part.units):
            raise MappingError(
                f"load of {len(part.blocks)} blocks of KV cache group {part.group.group_id}, {part.skip} blocks into a "
                f"chunk of {geometry.blocks_per_chunk}, spans {chunks} chunks, but {len(part.units)} slots were given"
            )
    return [part for part in transfers if len(part.blocks)]


def _split(geometry: Geometry, gpu: GpuSide, slots: SlotSide, num_blocks: int, unit_count: int) -> list[GroupTransfer]:
    sizes, indices, counts = gpu.group_sizes, gpu.block_indices, slots.slots_per_group
    blocks = np.asarray(gpu.block_ids, np.int64)
    units = np.asarray(slots.units, np.int64)
    if not len(sizes) == len(indices) == len(counts) == len(geometry.groups):
        raise MappingError(
            f"transfer of {len(sizes)} groups ({len(indices)} block indices) into slots of {len(counts)} groups; "
            f"{len(geometry.groups)} are registered"
        )
    if sum(sizes) != len(blocks) or sum(counts) != len(units) or min(*sizes, *counts, *indices) < 0:
        raise MappingError(
            f"{len(blocks)} blocks in groups of {list(sizes)} from {list(indices)}, "
            f"{len(units)} slots in groups of {counts}"
        )
    transfers, block_end, unit_end = [], 0, 0
    for group_index, (group, size, index, count) in enumerate(
        zip(geometry.groups, sizes, indices, counts, strict=True)
    ):
        part = GroupTransfer(
            group_index,
            group,
            blocks[block_end : block_end + size],
            units[unit_end : unit_end + count],
            index % geometry.blocks_per_chunk,
            certain=True,
        )
        slot_units = max(1, round_up(geometry.chunk_bytes(group_index), UNIT_BYTES) // UNIT_BYTES)
        _check_range(part.blocks, num_blocks, f"block id of KV cache group {group.group_id}")
        _check_range(part.units, unit_count - slot_units + 1, f"slot of KV cache group {group.group_id}, first unit")
        transfers.append(part)
        block_end += size
        unit_end += count
    return transfers


def _check_range(values: Int64s, end: int, what: str) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < end):
        wrong = values[(values < 0) | (values >= end)]
        raise MappingError(f"{what} {int(wrong[0])} is outside [0, {end})")
