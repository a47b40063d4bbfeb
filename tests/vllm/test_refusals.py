"""Rules of layouts at start: what cannot be stored whole is refused by name; groups without prefixes are left out."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvdisk.vllm.spec import KVDiskOffloadingSpec
from tests.vllm import models
from tests.vllm.config import connector
from tests.vllm.harness import Harness


@pytest.fixture
def harness(tmp_path):
    one = Harness(models.layers(models.full(), models.full()), connector(tmp_path / "root"), tmp_path / "models")
    yield one
    one.close()


def registered(harness):
    """The caches that the running worker was given, to be given again."""
    worker = harness.connector.connector_worker.worker
    tensors = [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in worker._tensors]
    (group,) = worker._geometry.groups
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(page.tensor, page.page_bytes) for page in group.pages]])


def test_a_worker_is_never_built_without_vllms_config(harness):
    spec = harness.connector.connector_worker.spec
    with pytest.raises(RuntimeError, match="nobody can tell whose KV this is"):
        spec.get_worker(registered(harness))


def test_the_same_caches_may_be_registered_again_and_others_not(harness):
    spec, caches = harness.connector.connector_worker.spec, registered(harness)
    with set_current_vllm_config(harness.config):
        again = spec.get_worker(caches)
        harness.connector.connector_worker.worker = again
        fewer = CanonicalKVCaches(caches.tensors, [caches.group_data_refs[0][:1]])
        harness.config.compilation_config.static_forward_context.pop("layers.1")  # or certification refuses it
        with pytest.raises(RuntimeError, match="laid out anew"):
            spec.get_worker(fewer)


def test_pages_that_share_bytes_are_refused_at_registration(harness):
    spec, caches = harness.connector.connector_worker.spec, registered(harness)
    tensor = caches.tensors[0].tensor
    late = tensor.as_strided((tensor.shape[0] - 1, tensor.shape[1]), tensor.stride(), tensor.shape[1] // 2)
    caches = CanonicalKVCaches(
        [*caches.tensors, CanonicalKVCacheTensor(late, late.shape[1])],
        [[*caches.group_data_refs[0], CanonicalKVCacheRef(len(caches.tensors), late.shape[1])]],
    )
    spec._worker = None  # as in a new process
    with set_current_vllm_config(harness.config), pytest.raises(ValueError, match=r"KV cache group 0, .*overlap"):
        spec.get_worker(caches)


def test_a_group_without_bytes_on_any_rank_is_refused():
    spec = SimpleNamespace(_adapter=SimpleNamespace(options=None), blocks_per_chunk=4)
    with pytest.raises(ValueError, match="KV cache group 3 has no bytes on any rank"):
        KVDiskOffloadingSpec._check_sizes(spec, {3: (0, 0)}, 1000)


@pytest.mark.parametrize(("parts", "needed"), [((4096,), 1), ((5 << 20, 1 << 20), 80), ((1 << 20, 3 << 20), 48)])
def test_the_arena_that_is_asked_for_holds_eight_chunks_on_every_rank(parts, needed):
    options = SimpleNamespace(segment_bytes=1 << 30)
    spec = SimpleNamespace(_adapter=SimpleNamespace(options=options), blocks_per_chunk=1)
    with pytest.raises(ValueError, match=f"cpu_bytes_to_use to at least {needed}MiB"):
        KVDiskOffloadingSpec._check_sizes(spec, {0: parts}, 1)
    KVDiskOffloadingSpec._check_sizes(spec, {0: parts}, (needed << 20) // len(parts) // 4096)


def test_a_group_whose_blocks_are_no_prefix_is_left_out_and_the_others_keep_their_ids(tmp_path):
    """DeepSeek-V4.1's windows are replayed, not cached: vLLM offers the other groups only, so ids have a gap."""
    latent = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "max_tp_shards": 1}
    window = SlidingWindowMLASpec(block_size=64, sliding_window=128, bounded_replay=True, **latent)
    specs = models.layers(window, MLAAttentionSpec(block_size=64, **latent), window)
    rng = random.Random(1)
    prompt = [rng.randrange(3, 500) for _ in range(600)]
    one = Harness(specs, connector(tmp_path / "root", blocks_per_chunk=2), tmp_path / "models")
    try:
        geometry = one.connector.connector_worker.worker._geometry
        cacheable = one.kv_cache_config.prefix_cacheable_group_ids
        assert len(cacheable) < len(one.kv_cache_config.kv_cache_groups)
        assert tuple(group.group_id for group in geometry.groups) == cacheable
        (outcome,) = one.serve([prompt])
        assert outcome.pages_wrong == 0 < outcome.pages_right
        assert {resident.group for resident in one.manager._service.store.arena.owners()} == set(cacheable)
    finally:
        one.close()
