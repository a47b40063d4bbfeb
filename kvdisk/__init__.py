"""kvdisk: keeps vLLM's KV cache on the host and on local NVMe.

`kvdisk.open` is the store without vLLM; `kvdisk.vllm` holds the adapter that vLLM loads by `spec_module_path`.
"""

from typing import TYPE_CHECKING, Any

from kvdisk.errors import DirectoryInUseError, EngineUnavailableError, KVDiskError, StoreClosedError

if TYPE_CHECKING:
    from kvdisk.api import AsyncStore, open

__all__ = ["AsyncStore", "DirectoryInUseError", "EngineUnavailableError", "KVDiskError", "StoreClosedError", "open"]


def __getattr__(name: str) -> Any:
    """The store, once somebody asks for it: a data plane's process, which starts anew with each engine, does not."""
    if name in ("AsyncStore", "open"):
        from kvdisk import api

        return getattr(api, name)
    raise AttributeError(f"module 'kvdisk' has no attribute {name!r}")
