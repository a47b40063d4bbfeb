"""The connector's configuration as a user writes it; light, so that tests which start engines need not import vLLM."""

from pathlib import Path
from typing import Any


def connector(root_dir: Path | str, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of a small cache in `root_dir`, which is made; `extra` adds or replaces keys of the spec."""
    Path(root_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVDiskOffloadingSpec",
            "spec_module_path": "kvdisk.vllm",
            "root_dir": str(root_dir),
            "disk_bytes_to_use": "256MiB",
            "cpu_bytes_to_use": "64MiB",
            "segment_bytes": "8MiB",
            "blocks_per_chunk": 4,
            **extra,
        },
    }
