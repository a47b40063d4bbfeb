"""The live bytes of packed KV caches: what a group's layers use of each block, instead of the whole block.

Where vLLM interleaves all layers in each block (DeepSeek-V4), it registers one tensor whose row is the whole block
stride, and every group refers to all of it: a chunk of the smallest group would be stored at the size of the largest. A
block belongs to one group at a time, so what the group's layers do not reach in it is dead. Which bytes they reach is
seen on the worker: every layer's cache tensors are views into that storage.

Safe by construction: the reached range of a view runs from its first to its last byte within a block, gaps included;
all tensors of a layer that lie in the storage count, not only those it calls its cache; and a layer that cannot be
seen, or looks otherwise than expected, means whole blocks for everybody. Storing too much is always right.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

logger = logging.getLogger("kvdisk")

Range = tuple[int, int]


class _UnknownLayoutError(Exception):
    """Why the live bytes cannot be told."""


def live_kv_caches(
    kv_caches: CanonicalKVCaches, layers: Mapping[str, Any], layer_names: Sequence[Sequence[str]]
) -> CanonicalKVCaches:
    """`kv_caches` with one view for each live range of a block, if they are packed; else, or if unsure, unchanged.

    Args:
        kv_caches: as vLLM registers them.
        layers: vLLM's `static_forward_context`, layer name to module.
        layer_names: the layers of each group, in the order of the groups.

    Returns:
        Views of the same storage; a group's ranges are in ascending order and do not touch each other.
    """
    if not _is_packed(kv_caches):
        return kv_caches
    packed = kv_caches.tensors[0].tensor
    try:
        ranges = [_live_ranges(packed, layers, names) for names in layer_names]
    except _UnknownLayoutError as error:
        logger.warning("the KV cache is packed and %s: whole blocks are stored, which takes more space", error)
        return kv_caches
    unique = sorted({one for group in ranges for one in group})
    tensors = []
    for start, end in unique:
        view = packed.as_strided((packed.shape[0], end - start), (packed.stride(0), 1), packed.storage_offset() + start)
        tensors.append(CanonicalKVCacheTensor(view, end - start))
    refs = [[CanonicalKVCacheRef(unique.index(one), one[1] - one[0]) for one in group] for group in ranges]
    return CanonicalKVCaches(tensors, refs)


def _is_packed(kv_caches: CanonicalKVCaches) -> bool:
    """One tensor, and all groups refer to whole rows of it. One layer over all of its block looks the same; no harm."""
    if len(kv_caches.tensors) != 1:
        return False
    row = kv_caches.tensors[0].tensor.shape[1]
    return all(
        len(refs) == 1 and (refs[0].tensor_idx, refs[0].page_size_bytes) == (0, row)
        for refs in kv_caches.group_data_refs
    )


def _live_ranges(packed: torch.Tensor, layers: Mapping[str, Any], names: Sequence[str]) -> list[Range]:
    """The merged ranges that a group's layers reach, in bytes from the start of a block."""
    ranges: list[Range] = []
    for name in names:
        views = [view for view in _tensors_of(layers.get(name)) if _same_storage(view, packed)]
        if not views:
            raise _UnknownLayoutError(f"layer {name} shows no view of it")
        ranges += [_range_in_block(name, view, packed) for view in views]
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _range_in_block(name: str, view: torch.Tensor, packed: torch.Tensor) -> Range:
    size = view.element_size()
    block_dims = [
        dim
        for dim in range(view.ndim)
        if view.shape[dim] == packed.shape[0] and view.stride(dim) * size == packed.stride(0)
    ]
    if len(block_dims) != 1:
        raise _UnknownLayoutError(f"layer {name} has a view of shape {tuple(view.shape)}, strides {view.stride()}")
    start = view.storage_offset() * size - packed.storage_offset()
    last = sum((view.shape[dim] - 1) * view.stride(dim) for dim in range(view.ndim) if dim != block_dims[0])
    end = start + (last + 1) * size
    if not (0 <= start < end <= packed.shape[1]) or view.numel() == 0:
        raise _UnknownLayoutError(f"layer {name} reaches bytes {start} to {end} of blocks of {packed.shape[1]}")
    return start, end


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Tensors that a layer or its attention implementation holds directly (also in lists and tuples)."""
    for holder in (layer, getattr(layer, "impl", None)):
        for value in list(getattr(holder, "__dict__", {}).values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one


def _same_storage(view: torch.Tensor, packed: torch.Tensor) -> bool:
    if view.device != packed.device or view.layout != torch.strided:
        return False
    return bool(view.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr())
