"""Which vLLM this adapter was written for. Its offloading interfaces change with every minor release."""

import logging
import re

import vllm

from kvdisk.vllm import SUPPORTED

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
