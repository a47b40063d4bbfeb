"""What vLLM finds of kvdisk by itself: the spec by its name, and an explanation where vLLM has none."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

import kvdisk.vllm
from kvdisk.vllm import plugin
from kvdisk.vllm.version import check_version


def sizes(*block_sizes: int) -> Any:
    specs = [SimpleNamespace(block_size=size, prefix_cacheable=True) for size in block_sizes]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def user(**extra: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_spec_name_alone_finds_the_spec() -> None:
    plugin.register()
    plugin.register()  # vLLM may load a plugin more than once in a process
    found = OffloadingSpecFactory.get_spec_cls({"spec_name": plugin.NAME})
    assert found is kvdisk.vllm.KVDiskOffloadingSpec


def test_block_size_with_unequal_groups_names_the_sizes_and_the_way_out() -> None:
    plugin.register()
    KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")
    module = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"]
    with pytest.raises(ValueError, match=r"group 0: 256, group 1: 64.*blocks_per_chunk"):
        module.build_offloading_config(user(spec_name=plugin.NAME, block_size=512), sizes(256, 64))


def test_other_specs_are_left_to_vllm() -> None:
    seen: list[Any] = []
    build = plugin._checked(lambda *arguments: seen.append(arguments))
    build(user(spec_name="CPUOffloadingSpec", block_size=512), sizes(256, 64))
    build(user(spec_name=plugin.NAME, blocks_per_chunk=4), sizes(256, 64))
    build(user(spec_name=plugin.NAME, block_size=512), sizes(64, 64))
    assert len(seen) == 3


def test_loading_the_plugin_imports_neither_the_adapter_nor_the_connector() -> None:
    code = (
        "import sys, kvdisk.vllm.plugin as plugin; plugin.register();"
        "print([name for name in sys.modules if name in ('kvdisk.vllm.spec', 'kvdisk.vllm.manager')"
        " or name.endswith('v1.offloading_connector')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0"])
def test_an_unknown_vllm_is_refused_with_both_versions_and_the_remedy(version: str) -> None:
    with pytest.raises(ImportError, match=rf"0\.32 and 0\.33, not {version}.*install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.34.dev3", ""])
def test_known_and_unreadable_versions_are_let_through(version: str) -> None:
    check_version(version)
