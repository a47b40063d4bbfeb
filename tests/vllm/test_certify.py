"""Rules of `kvdisk.vllm.certify`: a layout in which a layer reaches bytes that would not be stored is refused."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvdisk.vllm.certify import certify
from tests.vllm import harness, models
from tests.vllm.config import connector

BLOCKS, PAGE = 7, 512


def caches(*pages, stride=PAGE, blocks=BLOCKS, size=1 << 16):
    """Pages as (offset, bytes) of one storage, one group."""
    storage = torch.zeros(size, dtype=torch.int8)
    tensors = [torch.as_strided(storage, (blocks, length), (stride, 1), offset) for offset, length in pages]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(i, length) for i, (_, length) in enumerate(pages)]],
    )


def layer(kv, shape, strides, offset=0, dtype=torch.int8):
    raw = kv.tensors[0].tensor
    whole = torch.tensor([], dtype=dtype).set_(raw.untyped_storage())
    return SimpleNamespace(kv_cache=torch.as_strided(whole, shape, strides, offset))


def check(kv, *layers):
    names = [f"layers.{i}" for i in range(len(layers))]
    certify(kv, dict(zip(names, layers, strict=True)), [(5, names)])


def test_a_layer_within_its_page_is_certified():
    kv = caches((0, PAGE), (4096, 300))
    check(
        kv,
        layer(kv, (BLOCKS, 2, 16, 16), (512, 256, 16, 1)),
        layer(kv, (BLOCKS, 1, 50, 3), (256, 150, 3, 1), offset=2048, dtype=torch.float16),
    )


def test_kernel_blocks_within_a_block_are_certified():
    kv = caches((0, PAGE))
    check(kv, layer(kv, (4 * BLOCKS, 2, 64), (128, 64, 1)))


def test_every_state_of_a_layer_counts():
    kv = caches((0, 400))
    conv, state = layer(kv, (BLOCKS, 100), (512, 1)), layer(kv, (BLOCKS, 300), (512, 1), offset=100)
    check(kv, SimpleNamespace(kv_cache=[conv.kv_cache, state.kv_cache]))
    longer = layer(kv, (BLOCKS, 301), (512, 1), offset=100)
    with pytest.raises(ValueError, match="reaches bytes 100 to 401"):
        check(kv, SimpleNamespace(kv_cache=(conv.kv_cache, longer.kv_cache)))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((BLOCKS, 2, 256), (512, 256, 1), 1),  # one byte late: ends in the next block
        ((BLOCKS, 301), (512, 1), 0),  # longer than the un-padded page
        ((BLOCKS, 100), (640, 1), 0),  # blocks are elsewhere
        ((2, BLOCKS, 256), (BLOCKS * 256, 256, 1), 0),  # keys of all blocks, then values of all blocks
        ((BLOCKS, 100), (512, 1), 8192),  # not registered at all
    ],
    ids=["shifted", "too long", "another stride", "heads outermost", "another place"],
)
def test_a_layer_that_reaches_beyond_its_pages_is_refused_by_group_layer_and_numbers(shape, strides, offset):
    kv = caches((0, 300))
    with pytest.raises(ValueError, match=r"KV cache group 5, layer layers\.0: it reaches bytes .* every .* 0 to 300"):
        check(kv, layer(kv, shape, strides, offset))


def test_a_layer_in_memory_that_was_not_registered_is_refused():
    kv = caches((0, PAGE))
    with pytest.raises(ValueError, match="elsewhere"):
        check(kv, SimpleNamespace(kv_cache=torch.zeros(BLOCKS, PAGE, dtype=torch.int8)))


@pytest.mark.parametrize(
    "one",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(kv_cache=None),
        SimpleNamespace(kv_cache=torch.tensor([])),
        SimpleNamespace(kv_cache=torch.zeros(3, 5)),
    ],
    ids=["no layer", "no cache", "none", "not bound", "no blocks in it"],
)
def test_what_cannot_be_seen_is_vllms_word(one):
    check(caches((0, PAGE)), one)


def test_where_the_number_of_blocks_fits_several_dimensions_the_registered_stride_decides():
    kv = caches((0, PAGE), blocks=2)
    check(kv, layer(kv, (2, 2, 256), (512, 256, 1)))
    check(kv, layer(kv, (2, 2, 256), (256, 512, 1)))
    check(kv, layer(kv, (2, 2, 256), (300, 700, 1)))  # cannot be told
    one = caches((0, PAGE), blocks=1)
    check(one, layer(one, (1, PAGE), (9999, 1)))


def test_an_engine_with_such_a_layer_does_not_start(tmp_path, monkeypatch):
    class Lying(harness._Layer):
        def __init__(self, spec, kv_cache):
            longer = kv_cache.shape[-1] + (kv_cache.storage_offset() == 0)
            super().__init__(spec, kv_cache.as_strided([*kv_cache.shape[:-1], longer], kv_cache.stride()))

    monkeypatch.setattr(harness, "_Layer", Lying)
    with pytest.raises(ValueError, match=r"KV cache group 0, layer layers\.0: it reaches"):
        harness.Harness(models.layers(models.full(), models.full()), connector(tmp_path / "root"), tmp_path / "models")
