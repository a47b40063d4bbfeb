"""The vLLM adapter, for vLLM 0.32 and 0.33.

`KVDiskOffloadingSpec` takes the place of vLLM's CPUOffloadingSpec; `KVDiskTier` is a secondary tier of vLLM's own
TieringOffloadingSpec, over the same store.

`spec_name: KVDiskOffloadingSpec` is all that vLLM needs to find it (plugin.py registers the name); where plugins are
switched off (VLLM_PLUGINS), `spec_module_path: kvdisk.vllm` does the same. Nothing of vLLM's or torch's is imported
before the class is asked for, so that other processes of vLLM pay nothing for an installed kvdisk.
"""

from typing import Any

SUPPORTED = ((0, 32), (0, 33))

__all__ = ["KVDiskOffloadingSpec", "KVDiskTier"]


def __getattr__(name: str) -> Any:
    if name == "KVDiskOffloadingSpec":
        from kvdisk.vllm.version import check_version

        check_version()
        from kvdisk.vllm.spec import KVDiskOffloadingSpec

        return KVDiskOffloadingSpec
    if name == "KVDiskTier":
        from kvdisk.vllm.version import check_version

        check_version()
        from kvdisk.vllm.tier import KVDiskTier

        return KVDiskTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
