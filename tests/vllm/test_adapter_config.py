"""What a user can write in kv_connector_extra_config, what is refused, and what makes data another's."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config import set_current_vllm_config
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvdisk.geometry import INFO_FACT, RANK_FACT, Geometry, GroupGeometry, Page
from kvdisk.vllm import KVDiskOffloadingSpec
from kvdisk.vllm.config import check_block_size
from tests.vllm.harness import Harness
from tests.vllm.models import full, layers, state

Engine = Callable[..., Harness]
FULL = layers(full(), full())
REQUIRED = {"root_dir": "/tmp", "disk_bytes_to_use": "1GiB", "cpu_bytes_to_use": "64MiB"}


def spec(extra: dict[str, Any], parallel: dict[str, Any] | None = None, **changes: Any) -> KVDiskOffloadingSpec:
    sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    data_parallel = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 4),
        parallel=OffloadingParallelConfig(
            **{**sizes, **data_parallel, **(parallel or {})}, is_parallelism_agnostic=False
        ),
    )
    return KVDiskOffloadingSpec(replace(config, **changes))


# ---- keys

ACCEPTED = {
    "spec_name": "KVDiskOffloadingSpec",
    "spec_module_path": "kvdisk.vllm",
    "root_dir": ["/tmp", "/var/tmp"],
    "disk_bytes_to_use": 1 << 30,
    "cpu_bytes_to_use": "64MiB",
    "segment_bytes": "16MiB",
    "engine": "posix",
    "io_timeout_s": 5,
    "namespace": "generation 3",
    "allow_shared_root": "true",
    "blocks_per_chunk": 4,
    "offload_prompt_only": False,
    "self_describing_kv_events": True,
    "store_threshold": 2,
    "eviction_policy": "arc",
    "max_tracker_size": "1000",
    "reset_keeps_disk": True,
    "rendezvous_timeout_s": 10,
    "sync_load_budget_bytes": 0,
    "canonical_layout": False,
}


@pytest.mark.parametrize("key", ACCEPTED)
def test_every_key_is_accepted(key: str) -> None:
    spec({**REQUIRED, key: ACCEPTED[key]})


def test_all_keys_are_accepted_together() -> None:
    spec(ACCEPTED)


REFUSED = {
    "cpu_bytes_to_ues": ("1GiB", r"did you mean cpu_bytes_to_use\?.*valid ones: .*blocks_per_chunk.*store_threshold"),
    "canonical_layout": (True, "cannot be honoured"),
    "secondary_tiers": ([{"type": "fs"}], "cannot be honoured"),
    "cache_policy_module_path": ("x", "cannot be honoured"),
    "eviction_policy": ("mru", "'mru' is none of lru, arc"),
    "store_threshold": (-1, "store_threshold=-1"),
    "max_tracker_size": (True, "max_tracker_size=True"),
    "reset_keeps_disk": ("perhaps", "reset_keeps_disk='perhaps'"),
    "rendezvous_timeout_s": ("soon", "rendezvous_timeout_s='soon'"),
    "disk_bytes_to_use": ("lots", "disk_bytes_to_use"),
    "cpu_bytes_to_use": ("1KiB", "cpu_bytes_to_use"),
    "segment_bytes": ("1KiB", "segment_bytes"),
    "engine": ("libaio", "libaio"),
    "io_timeout_s": (0, "io_timeout_s"),
    "namespace": ("../x", "looks like a path"),
    "root_dir": ([], "root_dir is required"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_wrong_key_or_value_is_refused_when_the_engine_starts(key: str) -> None:
    value, message = REFUSED[key]
    with pytest.raises(ValueError, match=f"kv_connector_extra_config.*{message}"):
        spec({**REQUIRED, key: value})


@pytest.mark.parametrize("key", REQUIRED)
def test_what_is_required_is_asked_for(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is required.*such as|{key} is required: host memory"):
        spec({name: value for name, value in REQUIRED.items() if name != key})


def test_block_size_with_groups_of_different_block_sizes_names_each() -> None:
    with pytest.raises(
        ValueError, match=r"block_size=64 is in tokens.*group 0: 16, group 2: 32 tokens.*blocks_per_chunk"
    ):
        check_block_size({"block_size": 64}, {2: 32, 0: 16})
    check_block_size({"block_size": 64}, {0: 16, 1: 16})
    check_block_size({}, {2: 32, 0: 16})


# ---- sizes


def test_chunks_too_large_for_a_segment_are_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match=r"a chunk of KV cache group 0 has .*KiB \(32 blocks\); set segment_bytes to at l"
    ):
        engine(FULL, {"blocks_per_chunk": 32, "segment_bytes": "1MiB"})


def test_chunks_too_large_for_the_arena_are_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match=r"\(64 blocks\); set cpu_bytes_to_use to at least 8.*, or lower blocks_per_chun"
    ):
        engine(FULL, {"blocks_per_chunk": 64})


def test_a_root_that_others_can_write_to_is_refused_at_start(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)
    with pytest.raises(ValueError, match="root"):
        engine(FULL)


def test_states_with_several_blocks_a_chunk_are_warned_of(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvdisk"):
        engine(layers(full(), full(), state(8192), state(8192)), {"blocks_per_chunk": 2})
    assert "set blocks_per_chunk to 1" in caplog.text


# ---- identity


def geometry(facts: dict[str, Any], pages: tuple[Page, ...] = (Page(0, 100), Page(1, 50))) -> Geometry:
    return Geometry(0, 1, 4, (GroupGeometry(0, 16, pages),), facts)


def identity(one: Geometry, extra: dict[str, Any] | None = None) -> Any:
    return spec({**REQUIRED, **(extra or {})})._tenancy([one]).identity


FACTS = {"revision": "a", "dtype": "bfloat16", "kv_cache_layout": "NHD", "tp_size": 1, RANK_FACT + "layers": "x"}


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_about_bytes_makes_another_namespace(name: str) -> None:
    assert identity(geometry(FACTS)) != identity(geometry({**FACTS, name: "other"}))


def test_facts_that_decide_no_byte_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process or several: the same data."""
    uni = geometry({**FACTS, INFO_FACT + "executor_backend": "uni"})
    assert identity(uni) == identity(geometry({**FACTS, INFO_FACT + "executor_backend": "mp"}))


def test_order_and_size_of_pages_make_another_namespace() -> None:
    one = identity(geometry(FACTS))
    assert identity(geometry(FACTS, (Page(1, 50), Page(0, 100)))) != one
    assert identity(geometry(FACTS, (Page(0, 50), Page(1, 100)))) != one
    assert identity(replace(geometry(FACTS), blocks_per_chunk=2)) != one


def test_the_root_of_the_block_hashes_makes_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(geometry(FACTS))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"other", raising=False)
    assert identity(geometry(FACTS)) != before


def test_an_operators_word_makes_another_namespace() -> None:
    assert identity(geometry(FACTS), {"namespace": "b"}) != identity(geometry(FACTS))


def test_data_parallel_engines_have_instances_of_their_own_and_share_the_cap() -> None:
    one, two = (
        spec(REQUIRED, {"data_parallel_index": i, "data_parallel_size": 2})._tenancy([geometry(FACTS)]) for i in (0, 1)
    )
    assert one.identity == two.identity
    assert not set(one.instances) & set(two.instances)
    assert one.share == two.share == 2


def test_engines_of_a_dense_model_share_the_cap_although_vllm_tells_each_that_it_is_alone() -> None:
    facts = {**FACTS, "info.dp_size": 2}
    alone = {"data_parallel_index": 1, "data_parallel_size": 1}
    assert spec(REQUIRED, alone)._tenancy([geometry(facts)]).share == 2
    assert spec(REQUIRED, alone)._tenancy([geometry(facts)]).identity == identity(geometry(FACTS))


def namespaces(root: Path) -> set[str]:
    return {path.name for path in root.glob("root/ns-*")}


def test_the_executor_does_not_change_the_namespace_of_an_engine(engine: Engine, tmp_path: Path) -> None:
    for backend in ("uni", "mp"):
        harness = engine(FULL, distributed_executor_backend=backend)
        assert harness.serve([list(range(3, 300))])[0].cached_tokens == (0 if backend == "uni" else 256)
        harness.close()
    assert len(namespaces(tmp_path)) == 1


@pytest.mark.parametrize(
    "change", [{"extra": {"namespace": "b"}}, {"extra": {"blocks_per_chunk": 2}}, {"layout": "LBNHC"}, {"seed": 7}]
)
def test_another_engine_starts_with_an_empty_namespace(engine: Engine, tmp_path: Path, change: dict[str, Any]) -> None:
    first = engine(FULL)
    first.serve([list(range(3, 300))])
    first.close()
    second = engine(FULL, **change)
    assert second.serve([list(range(3, 300))])[0][::2] == (0, 0)
    assert len(namespaces(tmp_path)) == 2


def test_a_second_engine_on_a_root_gets_an_instance_of_its_own_or_a_clear_error(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = engine(FULL), engine(FULL)
    tokens = list(range(3, 300))
    for harness in (first, second, first, second):
        harness.drop_gpu_cache()
        assert harness.serve([tokens])[0].pages_wrong == 0
    paths = {tuple(h.manager._service.instance_paths) for h in (first, second) if h.manager._service is not None}
    assert len(paths) == 2 or "KV offloading is OFF until" in caplog.text


def test_a_store_that_another_server_still_holds_is_opened_when_it_ends(engine: Engine) -> None:
    """A rolling restart: the new server is up before the old one is gone, and the cap allows for one."""
    now = [0.0]
    old, new = engine(FULL), engine(FULL)
    new.manager._opening._clock = lambda: now[0]
    tokens = list(range(3, 300))
    old.serve([tokens])
    assert new.serve([tokens])[0].cached_tokens == 0
    assert new.manager._service is None
    old.close()
    new.drop_gpu_cache()
    assert new.serve([tokens])[0].cached_tokens == 0, "not before it is time to try again"
    now[0] += 31
    new.drop_gpu_cache()
    assert new.serve([tokens])[0].cached_tokens == 0, "nobody waits for it"
    new.manager._opening._running.join()
    new.drop_gpu_cache()
    assert new.serve([tokens])[0].cached_tokens == 256


def test_a_reset_before_the_store_was_opened_is_not_lost(engine: Engine) -> None:
    first = engine(FULL)
    tokens = list(range(3, 300))
    first.serve([tokens])
    first.close()
    second = engine(FULL)
    second.manager.reset_cache()
    assert second.serve([tokens])[0].cached_tokens == 0


def test_registering_the_caches_again_keeps_the_share_that_the_manager_knows(engine: Engine) -> None:
    harness = engine(FULL)
    tokens = list(range(3, 300))
    harness.serve([tokens])
    with set_current_vllm_config(harness.config):
        harness.connector.register_kv_caches(harness.kv_caches)
    harness.drop_gpu_cache()
    (outcome,) = harness.serve([tokens])
    assert (outcome.cached_tokens, outcome.pages_wrong) == (256, 0)
