"""Rules of `kvdisk.vllm.facts`: what decides bytes is in, memory size and launcher are not, and nothing raises."""

import os
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvdisk.geometry import INFO_FACT, RANK_FACT, GroupGeometry, Page
from kvdisk.vllm import facts as facts_module
from kvdisk.vllm.facts import UNKNOWN, build_geometry, collect_facts, weights_fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Config(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


class Layer:
    def __init__(self, kv_cache):
        self.kv_cache = kv_cache
        self.impl = SimpleNamespace()


def offloading_config(rank=0, world_size=1, name="org/model"):
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0", "l1"), 0), OffloadingGroupConfig(32, ("l2",), 3)),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig(name, "bfloat16"),
        cache=OffloadingCacheConfig(16, 4),
        parallel=OffloadingParallelConfig(rank, world_size, world_size, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBHNC",
    )


def kv_caches(num_blocks=6):
    tensors = [torch.zeros(num_blocks, n, dtype=torch.int8) for n in (512, 256)]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(0, 512), CanonicalKVCacheRef(1, 200)], [CanonicalKVCacheRef(0, 300)]],
    )


def vllm_config(**changes):
    model = SimpleNamespace(
        model="org/model",
        model_weights="",
        revision="main",
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        hf_overrides={},
        hf_config=Config(hidden_size=64, _name_or_path="org/model", transformers_version="5"),
        model_impl="auto",
        model_class_overrides={},
        disable_sliding_window=False,
        max_model_len=1000,
        seed=0,
    )
    caches = kv_caches()
    layers = {
        name: Layer(caches.tensors[i].tensor.view(torch.bfloat16).unflatten(1, (16, -1)))
        for name, i in {"l0": 0, "l1": 1, "l2": 0}.items()
    }
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="fp8",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            mamba_cache_mode="none",
        ),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto"),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", nnodes_within_dp=1),
        speculative_config=None,
        lora_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        use_v2_model_runner=False,
    )
    for path, value in changes.items():
        *way, last = path.split("__")
        thing = config
        for name in way:
            thing = getattr(thing, name)
        setattr(thing, last, value)
    return config


@pytest.fixture
def fingerprint(monkeypatch):
    def compute(config=None, blocks=6, offloading=None, **changes):
        monkeypatch.setattr(facts_module, "get_current_vllm_config_or_none", lambda: config or vllm_config(**changes))
        offloading = offloading or offloading_config()
        caches = kv_caches(blocks)
        return build_geometry(offloading, caches, collect_facts(offloading, caches)).fingerprint()

    return compute


def test_what_decides_the_bytes_changes_the_fingerprint(fingerprint, tmp_path):
    draft = SimpleNamespace(
        method="eagle", model="draft", draft_model_config=SimpleNamespace(model="draft", revision="a", model_weights="")
    )
    other_draft = SimpleNamespace(
        method="eagle", model="draft", draft_model_config=SimpleNamespace(model="draft", revision="b", model_weights="")
    )
    (tmp_path / "m.safetensors").write_bytes(b"x")
    changes = [
        {"model_config__revision": "v2"},
        {"model_config__hf_config": Config(hidden_size=64, _commit_hash=COMMIT)},
        {"model_config__hf_config": Config(hidden_size=65)},
        {"model_config__model": str(tmp_path)},
        {"model_config__hf_overrides": {"rope_theta": 1e6}},
        {"model_config__hf_overrides": lambda config: config},
        {"model_config__dtype": torch.float16},
        {"model_config__quantization": "fp8"},
        {"cache_config__cache_dtype": "fp8_ds_mla"},
        {"cache_config__mamba_ssm_cache_dtype": "float32"},
        {"speculative_config": draft},
        {"speculative_config": other_draft},
        {"use_v2_model_runner": True},
        {"load_config__load_format": "dummy"},
        {"load_config__load_format": "dummy", "model_config__seed": 1},
    ]
    assert len({fingerprint()} | {fingerprint(**change) for change in changes}) == len(changes) + 1


def test_how_it_is_launched_and_how_much_memory_there_is_do_not(fingerprint):
    same = [
        {"parallel_config__distributed_executor_backend": "uni"},
        {"lora_config": SimpleNamespace(max_loras=4)},
        {"model_config__seed": 7},
        {"model_config__max_model_len": 5},
        {"model_config__hf_config": Config(hidden_size=64, _name_or_path="/elsewhere", transformers_version="6")},
    ]
    assert {fingerprint(**change) for change in same} == {fingerprint()}


def test_the_longest_sequence_counts_where_rotary_factors_are_chosen_by_it(fingerprint):
    long_rope = {"model_config__hf_config": Config(rope_scaling={"rope_type": "longrope"})}
    assert fingerprint(**long_rope) != fingerprint(**long_rope, model_config__max_model_len=5)


def views(num_blocks, kernel_ratio=1):
    """Two layers in one storage, laid out one after the other, as a KV cache of `num_blocks` blocks."""
    page = 2048
    raw = torch.zeros(2 * num_blocks * page // 2, dtype=torch.bfloat16)
    return {
        f"l{i}": Layer(
            torch.as_strided(
                raw,
                (num_blocks * kernel_ratio, 2, 16 // kernel_ratio, 32),
                (1024 // kernel_ratio, 512 // kernel_ratio, 32, 1),
                i * num_blocks * 1024,
            )
        )
        for i in range(2)
    }


def layer_facts(monkeypatch, layers, blocks):
    config = vllm_config(compilation_config__static_forward_context=layers)
    monkeypatch.setattr(facts_module, "get_current_vllm_config_or_none", lambda: config)
    return collect_facts(offloading_config(), kv_caches(blocks))[RANK_FACT + "layers"]


def test_the_layout_does_not_depend_on_the_number_of_blocks(monkeypatch):
    assert layer_facts(monkeypatch, views(37), 37) == layer_facts(monkeypatch, views(901), 901)


def test_layouts_of_equal_size_differ(monkeypatch):
    def permuted(layers, *order):
        return {name: Layer(layer.kv_cache.permute(order)) for name, layer in layers.items()}

    seen = {
        layer_facts(monkeypatch, layers, 37)
        for layers in (
            views(37),
            views(37, kernel_ratio=2),
            permuted(views(37), 0, 2, 1, 3),
            {name: Layer(layer.kv_cache.view(torch.float16)) for name, layer in views(37).items()},
            {"l0": views(37)["l1"]},
            {},
        )
    }
    assert len(seen) == 6


def test_a_mamba_layers_states_are_all_described(monkeypatch):
    raw = torch.zeros(37, 100)
    layer = Layer([raw[:, :30], raw[:, 30:]])
    text = layer_facts(monkeypatch, {"l0": layer}, 37)
    assert "(B, 30) (100, 1) +0; torch.float32 (B, 70) (100, 1) +30" in text


def test_nothing_raises_whatever_vllm_lacks(monkeypatch):
    class Hostile:
        def __getattr__(self, name):
            raise RuntimeError(name)

    circular: dict = {}
    circular["self"] = circular
    for config in (None, SimpleNamespace(), Hostile(), vllm_config(model_config__hf_overrides=circular)):
        monkeypatch.setattr(facts_module, "get_current_vllm_config_or_none", lambda config=config: config)
        facts = collect_facts(offloading_config(), kv_caches())
        build_geometry(offloading_config(), kv_caches(), facts)
    assert facts["hf_overrides"] == UNKNOWN
    assert facts["dtype"] == "torch.bfloat16"


def test_an_unknown_revision_is_no_known_one(fingerprint):
    assert fingerprint(SimpleNamespace()) != fingerprint()


def test_the_commit_is_read_from_a_snapshot_path(monkeypatch, tmp_path):
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    config = vllm_config(model_config__model=str(snapshot))
    monkeypatch.setattr(facts_module, "get_current_vllm_config_or_none", lambda: config)
    assert collect_facts(offloading_config(), kv_caches())["revision"] == COMMIT


def test_local_weights_are_told_apart_by_name_size_and_mtime(tmp_path):
    shard, config = tmp_path / "a.safetensors", tmp_path / "config.json"
    for path in (shard, config):
        path.write_bytes(b"12345678")
    first = weights_fingerprint(str(tmp_path))
    config.write_bytes(b"in by its content, elsewhere")
    assert weights_fingerprint(str(tmp_path)) == first
    os.utime(shard, ns=(1, 1))
    second = weights_fingerprint(str(tmp_path))
    os.truncate(shard, 7)
    os.utime(shard, ns=(1, 1))
    third = weights_fingerprint(str(tmp_path))
    assert weights_fingerprint(str(shard)) == third, "a model that is one file"
    shard.rename(tmp_path / "b.safetensors")
    fourth = weights_fingerprint(str(tmp_path))
    assert len({first, second, third, fourth}) == 4
    assert weights_fingerprint("org/model") == "remote"


def test_geometry_follows_the_references_in_their_order(monkeypatch):
    config = offloading_config(rank=1, world_size=2)
    geometry = build_geometry(config, kv_caches(), {INFO_FACT + "x": 1})
    assert geometry.groups == (
        GroupGeometry(0, 16, (Page(0, 512), Page(1, 200))),
        GroupGeometry(3, 32, (Page(0, 300),)),
    )
    assert (geometry.rank, geometry.world_size, geometry.blocks_per_chunk) == (1, 2, 4)


def test_layers_of_a_group_that_share_a_page_are_stored_once():
    caches = kv_caches()
    shared = [[CanonicalKVCacheRef(0, 500), CanonicalKVCacheRef(1, 200), CanonicalKVCacheRef(0, 512)]]
    caches = CanonicalKVCaches(caches.tensors, shared + caches.group_data_refs[1:])
    assert build_geometry(offloading_config(), caches, {}).groups[0].pages == (Page(0, 512), Page(1, 200))


def test_groups_that_were_not_registered_are_refused():
    caches = kv_caches()
    with pytest.raises(ValueError, match="1 groups of KV caches were registered, the config has 2"):
        build_geometry(offloading_config(), CanonicalKVCaches(caches.tensors, caches.group_data_refs[:1]), {})
