"""Certification: what vLLM registered for a group covers, block for block, what the group's layers reach.

vLLM derives the registered views from its specs; the layers have views of their own, over the same memory, which the
kernels write through. Where the two disagree a chunk would lack bytes that the model reads, and nothing later could
tell: the checksum of half a block is right. So each layer's own view is compared with the registered pages before first
use, and a layout in which it reaches beyond them is refused.

What can fail: nothing but the refusal. A layer that shows no view, or one in which blocks cannot be told (their number
fits several dimensions), is taken at vLLM's word.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches

logger = logging.getLogger("kvdisk")


class _Reach(NamedTuple):
    """What a view reaches in every block: bytes [start, end) of its storage for block 0, and `stride` apart."""

    storage: int
    start: int
    end: int
    stride: int


def certify(
    kv_caches: CanonicalKVCaches, layers: Mapping[str, Any], groups: Sequence[tuple[int, Sequence[str]]]
) -> None:
    """Check that no layer reaches beyond its group's pages.

    Args:
        kv_caches: what will be stored, in the groups' order.
        layers: vLLM's `static_forward_context`, layer name to module.
        groups: (id, layer names) of each group.

    Raises:
        ValueError: naming group, layer and the numbers.
    """
    if not kv_caches.tensors:
        return
    num_blocks = int(kv_caches.tensors[0].tensor.shape[0])
    for (group_id, names), refs in zip(groups, kv_caches.group_data_refs, strict=True):
        pages = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            start = tensor.storage_offset()
            storage = tensor.untyped_storage().data_ptr()
            pages.append(_Reach(storage, start, start + ref.page_size_bytes, tensor.stride(0)))
        for name in names:
            for view in _caches_of(layers.get(name)):
                reach = _reach(view, num_blocks, {page.stride for page in pages})
                if reach is None:
                    logger.debug("layer %s: blocks cannot be told in a view of %s", name, tuple(view.shape))
                elif not any(_covers(page, reach, num_blocks) for page in pages):
                    raise ValueError(_refusal(group_id, name, reach, pages))


def _caches_of(layer: Any) -> Iterator[torch.Tensor]:
    """A layer's cache: a tensor, or several (the states of Mamba); none before it is bound."""
    cache = getattr(layer, "kv_cache", None)
    for view in cache if isinstance(cache, (list, tuple)) else (cache,):
        if isinstance(view, torch.Tensor) and view.layout == torch.strided and view.numel():
            yield view


def _reach(view: torch.Tensor, num_blocks: int, strides: set[int]) -> _Reach | None:
    """None if it cannot be told which dimension counts blocks.

    A block may be split into k kernel blocks, which then follow each other. Where their number fits several dimensions,
    the one counts in which blocks lie as far apart as they were registered.
    """
    size = view.element_size()
    candidates = [dim for dim in range(view.ndim) if view.shape[dim] % num_blocks == 0]
    apart = {dim: view.stride(dim) * (view.shape[dim] // num_blocks) * size for dim in candidates}
    if len(candidates) > 1 or num_blocks == 1:
        candidates = [dim for dim in candidates if apart[dim] in strides][:1]
    if not candidates:
        return None
    (block_dim,) = candidates
    others = sum((view.shape[dim] - 1) * view.stride(dim) for dim in range(view.ndim) if dim != block_dim)
    kernel_blocks = (view.shape[block_dim] // num_blocks - 1) * view.stride(block_dim)
    start = view.storage_offset() * size
    end = start + (others + kernel_blocks + 1) * size
    return _Reach(view.untyped_storage().data_ptr(), start, end, apart[block_dim])


def _covers(page: _Reach, reach: _Reach, num_blocks: int) -> bool:
    is_aligned = page.storage == reach.storage and (page.stride == reach.stride or num_blocks == 1)
    return is_aligned and page.start <= reach.start and reach.end <= page.end


def _refusal(group_id: int, name: str, reach: _Reach, pages: Sequence[_Reach]) -> str:
    shown = [
        f"{page.start} to {page.end} every {page.stride}" + ("" if page.storage == reach.storage else " elsewhere")
        for page in pages[:4]
    ] + ["..."] * (len(pages) > 4)
    return (
        f"KV cache group {group_id}, layer {name}: it reaches bytes {reach.start} to {reach.end} of its memory, every "
        f"{reach.stride}, but vLLM registered {', '.join(shown) or 'nothing'}. Chunks would lack bytes, so this model "
        f"cannot be offloaded with this KV cache layout"
    )
