"""What kind of machine and file system this is, for the head of a report. Facts that cannot be had are "unknown"."""

import os
import platform
from pathlib import Path


def file_system(path: Path) -> str:
    """Type and mount point of the file system that holds `path`, such as "ext4 on /"."""
    target = os.path.realpath(path)
    best = ("", "unknown")
    try:
        mounts = Path("/proc/self/mounts").read_text()
    except OSError:
        return "unknown"
    for line in mounts.splitlines():
        _, mount_point, kind, *_ = line.split(" ")
        mount_point = mount_point.replace("\\040", " ")
        is_above = os.path.commonpath([target, mount_point]) == mount_point
        if is_above and len(mount_point) >= len(best[0]):
            best = (mount_point, f"{kind} on {mount_point}")  # of two mounts on one point the later one counts
    return best[1]


def summary() -> str:
    """Usable cores and kernel."""
    return f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"
