"""The vLLM adapter, for vLLM 0.32 and 0.33: name it with `spec_name` and `spec_module_path: kvdisk.vllm`."""

from kvdisk.vllm.spec import KVDiskOffloadingSpec

__all__ = ["KVDiskOffloadingSpec"]
