"""Which vLLM this adapter was written for, and everything in which those differ.

vLLM's offloading interfaces change with every minor release. What 0.33 has and 0.32 lacks is asked for here, in one
place; a keyword that only 0.33 passes (`submit_load(expedited=...)`) has a default, and a hook that only 0.33 calls
(`on_reset_flushed`) is simply there.
"""

import logging
import re
from typing import TYPE_CHECKING, Any

import vllm

from kvdisk.vllm import SUPPORTED

if TYPE_CHECKING:  # this module has to import on any vLLM, to say which it wants
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger("kvdisk")


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM whose interfaces are not known; an unreadable (development) version gets a warning.

    Args:
        version: vLLM's, by default the installed one's.

    Raises:
        ImportError: with both versions and the remedy.
    """
    version = str(getattr(vllm, "__version__", "")) if version is None else version
    found = re.match(r"(\d+)\.(\d+)", version)
    names = " and ".join(".".join(map(str, pair)) for pair in SUPPORTED)
    if found is None or (int(found[1]), int(found[2])) == (0, 0) or "dev" in version:
        logger.warning("kvdisk knows vLLM %s; this is %r, and its interfaces may differ", names, version)
    elif (int(found[1]), int(found[2])) not in SUPPORTED:
        raise ImportError(
            f"kvdisk works with vLLM {names}, not {version}: install one of them, or a kvdisk release for {version}"
        )


def windows_in_chunks(config: "OffloadingConfig") -> dict[int, int] | None:
    """Groups that are looked up from the tail, and how many chunks of each a hit needs; None: this vLLM does not say.

    0.33 says so in its config; before, the layers do, on the workers alone.
    """
    groups = config.groups
    if not all(hasattr(group, "sliding_window_size_in_chunks") for group in groups):
        return None
    sizes = {group.group_id: group.sliding_window_size_in_chunks for group in groups}
    return {group_id: int(chunks) for group_id, chunks in sizes.items() if chunks is not None}


def quiet_event() -> dict[str, Any]:
    """Arguments of an event that keeps vLLM's own books and is nobody's news; 0.32 has no such thing."""
    from vllm.v1.kv_offload.base import OffloadingEvent

    return {"metadata_only": True} if hasattr(OffloadingEvent, "metadata_only") else {}
