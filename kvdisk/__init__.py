"""kvdisk: keeps vLLM's KV cache on the host and on local NVMe."""
