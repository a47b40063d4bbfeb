"""Rules of `kvdisk.vllm.live`: of a packed block exactly what the group's layers reach, and all of it when in doubt."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvdisk.vllm.live import live_kv_caches

NUM_BLOCKS, STRIDE = 5, 1024


def packed(groups=2):
    tensor = torch.zeros(NUM_BLOCKS * STRIDE, dtype=torch.int8).view(NUM_BLOCKS, STRIDE)
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, STRIDE)], [[CanonicalKVCacheRef(0, STRIDE)] for _ in range(groups)]
    )


def layer(caches, offset, shape, dtype=torch.uint8, **attributes):
    """A layer whose cache is `shape` per block, from byte `offset`."""
    raw = caches.tensors[0].tensor.view(-1).view(dtype)
    size = raw.element_size()
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    view = torch.as_strided(raw, (NUM_BLOCKS, *shape), (STRIDE // size, *strides), offset // size)
    return SimpleNamespace(kv_cache=view, impl=None, **attributes)


def described(caches):
    return [
        [(caches.tensors[ref.tensor_idx].tensor.storage_offset(), ref.page_size_bytes) for ref in refs]
        for refs in caches.group_data_refs
    ]


def test_a_group_keeps_only_what_its_layers_reach():
    caches = packed()
    layers = {
        "a": layer(caches, 0, (4, 16)),
        "b": layer(caches, 512, (10,), torch.float32),
        "c": layer(caches, 128, (32,)),
    }
    live = live_kv_caches(caches, layers, [["a", "b"], ["c"]])
    assert described(live) == [[(0, 64), (512, 40)], [(128, 32)]]
    for tensor in live.tensors:
        assert tensor.tensor.shape == (NUM_BLOCKS, tensor.page_size_bytes)
        assert tensor.tensor.stride() == (STRIDE, 1)
        assert tensor.tensor.dtype == torch.int8
        assert tensor.tensor.untyped_storage().data_ptr() == caches.tensors[0].tensor.untyped_storage().data_ptr()


def test_ranges_that_touch_or_overlap_become_one():
    caches = packed(1)
    layers = {"a": layer(caches, 64, (64,)), "b": layer(caches, 0, (64,)), "c": layer(caches, 100, (64,))}
    assert described(live_kv_caches(caches, layers, [["a", "b", "c"]])) == [[(0, 164)]]


def test_a_view_with_gaps_counts_from_its_first_to_its_last_byte():
    caches = packed(1)
    one = layer(caches, 32, (4, 16))
    one.kv_cache = one.kv_cache[:, ::2, :8]
    assert described(live_kv_caches(caches, {"a": one}, [["a"]])) == [[(32, 2 * 16 + 8)]]


def test_other_tensors_of_a_layer_in_that_storage_count_too():
    caches = packed(1)
    one, scales = layer(caches, 0, (64,)), layer(caches, 64, (4,), torch.float32)
    one.impl = SimpleNamespace(_k_scale_cache=scales.kv_cache)
    one.elsewhere = torch.zeros(3)
    assert described(live_kv_caches(caches, {"a": one}, [["a"]])) == [[(0, 80)]]
    states = SimpleNamespace(kv_cache=[layer(caches, 0, (8,)).kv_cache, layer(caches, 16, (8,)).kv_cache])
    assert described(live_kv_caches(caches, {"a": states}, [["a"]])) == [[(0, 8), (16, 8)]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda caches, layers: layers.pop("a"),
        lambda caches, layers: setattr(layers["a"], "kv_cache", torch.zeros(NUM_BLOCKS, 64)),
        lambda caches, layers: setattr(layers["a"], "kv_cache", torch.tensor([])),
        lambda caches, layers: setattr(layers["a"], "kv_cache", layers["a"].kv_cache[1:]),
        lambda caches, layers: setattr(layers["a"], "kv_cache", caches.tensors[0].tensor.view(-1)),
        lambda caches, layers: setattr(layers["a"], "kv_cache", layers["a"].kv_cache[:, :0]),
        lambda caches, layers: layers.update(a=SimpleNamespace()),
    ],
    ids=[
        "no such layer",
        "another storage",
        "not bound yet",
        "other blocks",
        "no block dimension",
        "empty",
        "no cache",
    ],
)
def test_when_in_doubt_whole_blocks_are_stored_and_it_is_said(spoil, caplog):
    caches = packed()
    layers = {"a": layer(caches, 0, (64,)), "b": layer(caches, 64, (64,))}
    spoil(caches, layers)
    assert live_kv_caches(caches, layers, [["a"], ["b"]]) is caches
    assert "layer a" in caplog.text
    assert "whole blocks" in caplog.text


def test_caches_that_are_not_packed_are_left_alone():
    tensors = [CanonicalKVCacheTensor(torch.zeros(4, n, dtype=torch.int8), n) for n in (64, 32)]
    for caches in (
        CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(1, 32)]]),
        CanonicalKVCaches(tensors[:1], [[CanonicalKVCacheRef(0, 60)]]),  # un-padded already
        CanonicalKVCaches(tensors[:1], [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(0, 32)]]),
    ):
        assert live_kv_caches(caches, {}, [["a"], ["b"]]) is caches


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 900), st.integers(1, 124)), min_size=1, max_size=5), min_size=1, max_size=4
    )
)
def test_the_ranges_cover_exactly_what_is_reached(groups):
    caches = packed(len(groups))
    layers = {f"{g}.{i}": layer(caches, o, (n,)) for g, group in enumerate(groups) for i, (o, n) in enumerate(group)}
    live = live_kv_caches(caches, layers, [[f"{g}.{i}" for i in range(len(group))] for g, group in enumerate(groups)])
    for group, ranges in zip(groups, described(live), strict=True):
        covered = [b for start, size in ranges for b in range(start, start + size)]
        assert covered == sorted({b for o, n in group for b in range(o, o + n)})
