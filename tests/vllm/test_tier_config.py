"""Rules of a `KVDiskTier`'s configuration and identity: mistakes are refused by name, and whose data it is decides."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.config import OffloadingGroupConfig, OffloadingModelConfig

from kvdisk.vllm import KVDiskTier
from kvdisk.vllm.metrics import PREFIX
from kvdisk.vllm.tier_config import STORE_KEYS, TIER_KEYS, describe_groups, parse_tier_config
from kvdisk.vllm.tier_identity import tenancy_of
from tests.vllm.tiering import ROW_BYTES, Region, Tiers, keys_of, make_tier, offloading_config, tier_config

OPTIONS = {"root_dir": "/tmp", "disk_bytes_to_use": "1GiB"}


def test_a_root_and_a_cap_are_all_it_needs() -> None:
    config = parse_tier_config(OPTIONS, ROW_BYTES)
    assert not config.reset_keeps_disk, "stale KV is served only to who asks for it"
    assert config.locality is Locality.LOCAL
    assert config.options.cpu_bytes_to_use == 512 << 20
    large = parse_tier_config({**OPTIONS, "segment_bytes": "1GiB"}, 64 << 20)
    assert large.options.cpu_bytes_to_use == 1 << 30, "16 rows"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_read_threads": 16}, "secondary_tiers, KVDiskTier: unknown option 'n_read_threads'"),
        ({"root_dir": ""}, "root_dir is required"),
        ({"disk_bytes_to_use": None}, "disk_bytes_to_use is required"),
        ({"locality": "NEAR"}, "locality='NEAR' is none of LOCAL, REMOTE"),
        ({"reset_keeps_disk": 3}, "reset_keeps_disk=3 is not true or false"),
        ({"cpu_bytes_to_use": "4MiB"}, "set the tier's cpu_bytes_to_use to at least 8 MiB, or lower blocks_per_chunk"),
        ({"segment_bytes": "2MiB"}, "set segment_bytes to at least 4 MiB, or lower blocks_per_chunk"),
    ],
)
def test_a_mistake_is_refused_by_name_with_the_remedy(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        parse_tier_config({**OPTIONS, **changes}, 1 << 20)


def test_a_root_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    region = Region(4, ROW_BYTES)
    with pytest.raises(ValueError, match="missing"):
        make_tier(region, {**tier_config(tmp_path), "root_dir": str(tmp_path / "missing")}, offloading_config())
    with pytest.raises(ValueError, match="raise disk_bytes_to_use"):
        make_tier(region, {**tier_config(tmp_path), "disk_bytes_to_use": "3MiB"}, offloading_config())


def test_memory_that_is_no_rows_of_bytes_is_refused(tmp_path: Path) -> None:
    region = Region(4, ROW_BYTES)
    region.rows = region.rows[:, ::2]
    with pytest.raises(ValueError, match="expected writable, contiguous rows"):
        make_tier(region, tier_config(tmp_path), offloading_config())


def test_every_key_is_documented_and_nothing_else() -> None:
    document = Path(__file__).parents[2] / "docs" / "configuration.md"
    body = document.read_text().split("`secondary_tiers`\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert documented == {*STORE_KEYS, *TIER_KEYS}


def test_vllms_metric_definitions_are_kvdisks() -> None:
    assert PREFIX + "chunks_promoted" in KVDiskTier.build_metric_definitions(dict(OPTIONS))


# ---- parents


def test_one_group_is_a_chain_and_of_several_0_32_does_not_say() -> None:
    options = parse_tier_config(OPTIONS, ROW_BYTES).options
    one = describe_groups(offloading_config(), ROW_BYTES, options)
    several = describe_groups(offloading_config(groups=(0, 1)), ROW_BYTES, options)
    first, second = keys_of(2)
    assert one.parent_of(second, 0, 32, {(0, 16): first}) == first
    if not hasattr(OffloadingGroupConfig, "sliding_window_size_in_chunks"):
        assert several.parent_of(second, 0, 32, {(0, 16): first}) == b""
    else:
        assert several.parent_of(second, 0, 32, {(0, 16): first}) == first


# ---- whose data


def identity(offloading: Any, row_bytes: int = ROW_BYTES, namespace: str = "", **spec: Any) -> Any:
    return dict(tenancy_of(SimpleNamespace(config=offloading, **spec), row_bytes, namespace).identity)


@pytest.mark.parametrize(
    "other",
    [
        identity(offloading_config(model=OffloadingModelConfig("org/other", "bfloat16"))),
        identity(offloading_config(model=OffloadingModelConfig("org/model", "fp8"))),
        identity(offloading_config(groups=(0, 1))),
        identity(offloading_config(kv_cache_layout="LBHNC")),
        identity(offloading_config(replicated_layout=True)),
        identity(offloading_config(canonical_layout=True)),
        identity(offloading_config(worker_kv_bytes_per_block=4096)),
        identity(offloading_config(), row_bytes=2 * ROW_BYTES),
        identity(offloading_config(), cpu_page_size_per_worker=4096),
        identity(offloading_config(), namespace="green"),
    ],
    ids=["model", "dtype", "groups", "layout", "replicated", "canonical", "block", "row", "rank's part", "namespace"],
)
def test_what_decides_the_bytes_is_in_the_identity(other: Any) -> None:
    assert other != identity(offloading_config())


def test_engine_and_size_of_memory_are_not_in_the_identity() -> None:
    assert identity(offloading_config(engine_id="another")) == identity(offloading_config())


def test_the_root_of_the_block_hashes_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    before = identity(offloading_config())
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another root", raising=False)
    assert identity(offloading_config()) != before


def test_rows_of_another_layout_are_never_served(tmp_path: Path) -> None:
    """Same keys, same root: another model, and another size of rows."""
    keys = keys_of(5)
    first = Tiers(tmp_path)
    first.write(keys)
    first.settle()
    first.close()
    for changes in (
        {"offloading": offloading_config(model=OffloadingModelConfig("org/other", "bfloat16"))},
        {"row_bytes": ROW_BYTES * 2},
    ):
        other = Tiers(tmp_path, **changes)
        assert other.read(keys) == [False] * 5
        other.close()
    again = Tiers(tmp_path)
    assert again.read(keys) == [True] * 5
    again.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_events_say_what_is_on_disk_if_they_are_asked_for(tmp_path: Path, enabled: bool) -> None:
    tiers = Tiers(tmp_path, events=enabled, enable_kv_events=True)
    keys = keys_of(3)
    tiers.write(keys)
    tiers.settle()
    seen = [
        (event.medium.value, event.removed, list(event.keys), event.ownership) for event in tiers.tier.take_events()
    ]
    assert seen == ([("STORAGE", False, keys, "KVDiskTier")] if enabled else [])
    tiers.close()
    again = Tiers(tmp_path, events=enabled, enable_kv_events=True)
    again.request()
    found = [key for event in again.tier.take_events() for key in event.keys]
    assert sorted(found) == (sorted(keys) if enabled else []), "what a restart finds is news"
    again.close()


def test_stats_reach_vllm(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.write(keys_of(3))
    tiers.settle()
    stats = tiers.manager.get_stats()
    assert sum(stats.data["data"][PREFIX + "chunks_stored"].values()) == 3
    assert tiers.tier.get_stats() is None, "nothing moved since"
    tiers.close()
