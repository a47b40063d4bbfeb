"""kvdisk: keeps vLLM's KV cache on the host and on local NVMe.

`kvdisk.open` is the store without vLLM; `kvdisk.vllm` holds the adapter that vLLM loads by `spec_module_path`.
"""

from kvdisk.api import AsyncStore, open
from kvdisk.errors import DirectoryInUseError, EngineUnavailableError, KVDiskError, StoreClosedError

__all__ = ["AsyncStore", "DirectoryInUseError", "EngineUnavailableError", "KVDiskError", "StoreClosedError", "open"]
