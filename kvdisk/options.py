"""Options of a store: parsed, checked and complete before anything touches a disk.

The names are vLLM's where vLLM has one (`cpu_bytes_to_use`), and fio's or the obvious ones elsewhere. What each means,
and when to change it, is in docs/configuration.md; a test compares that file with this one.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from kvdisk.units import GIB, MIB, UNIT_BYTES, format_size, parse_size, round_up

ENGINES = ("auto", "io_uring", "posix")
DATA_PLANES = ("process", "thread")
COMPRESSIONS = ("none", "zstd")
SEGMENT_BYTES_MIN = 1 * MIB
SEGMENT_BYTES_MAX = 16 * GIB
SEGMENT_BYTES_DEFAULT = 256 * MIB
ARENA_BYTES_MIN = 4 * MIB


@dataclass(frozen=True)
class Options:
    """What a store needs to know. Build it with `parse_options`.

    root_dir: one directory a disk. disk_bytes_to_use: hard cap over all of them. cpu_bytes_to_use: of the arena.
    segment_bytes: of one file. engine: see ENGINES. io_timeout_s: after which a command is given up. namespace: an
    operator's own word in the identity of the data. allow_shared_root: accept a root that others can write to.
    data_plane: see DATA_PLANES; a process needs an arena in shared memory.
    compression: see COMPRESSIONS.
    """

    root_dir: tuple[str, ...]
    disk_bytes_to_use: int
    cpu_bytes_to_use: int
    segment_bytes: int = SEGMENT_BYTES_DEFAULT
    engine: str = "auto"
    io_timeout_s: float = 30.0
    namespace: str = ""
    allow_shared_root: bool = False
    data_plane: str = "process"
    compression: str = "none"


def parse_options(values: Mapping[str, Any]) -> Options:
    """Options from a user's mapping.

    Raises:
        ValueError: an unknown, missing or impossible option, with the value and the remedy.
    """
    reject_unknown(values, [field.name for field in fields(Options)])
    for name in ("root_dir", "disk_bytes_to_use", "cpu_bytes_to_use"):
        if values.get(name) in (None, "", [], ()):
            raise ValueError(f"{name} is required{_EXAMPLES[name]}")
    parsed = {name: _PARSERS[name](value, name) for name, value in values.items() if value is not None}
    if "segment_bytes" not in parsed:
        parsed["segment_bytes"] = default_segment_bytes(parsed["disk_bytes_to_use"] // len(parsed["root_dir"]))
    return Options(**parsed)


def reject_unknown(values: Mapping[str, Any], valid: list[str]) -> None:
    """ValueError for keys that nobody knows, with the nearest and all valid ones."""
    for name in values:
        if name not in valid:
            near = difflib.get_close_matches(str(name), valid, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"unknown option {name!r}{hint}; valid ones: {', '.join(sorted(valid))}")


def default_segment_bytes(root_bytes: int) -> int:
    """256 MiB, or a twentieth of a small root: eviction gives up a segment at a time, so it should be a small share."""
    return max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_DEFAULT, root_bytes // 20 // MIB * MIB))


_EXAMPLES = {
    "root_dir": ": an empty directory on the disk to use, such as '/mnt/nvme/kv', or a list with one a disk",
    "disk_bytes_to_use": ": the most that kvdisk may take on disk, such as '800GiB'",
    "cpu_bytes_to_use": ": host memory for the arena, such as '16GiB'",
}


def _roots(value: object, name: str) -> tuple[str, ...]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    roots = [os.fsdecode(root) for root in listed if isinstance(root, (str, os.PathLike))]
    if not roots or len(roots) < len(listed) or "" in roots:
        raise ValueError(f"{name}={value!r} is not a path or a list of paths")
    paths = tuple(os.path.realpath(root) for root in roots)
    if len(set(paths)) < len(paths):
        raise ValueError(f"{name}={value!r} names a directory twice; one entry a disk")
    return paths


def _segment(value: object, name: str) -> int:
    size = parse_size(value, name)
    if not SEGMENT_BYTES_MIN <= size <= SEGMENT_BYTES_MAX:
        limits = f"{format_size(SEGMENT_BYTES_MIN)} and {format_size(SEGMENT_BYTES_MAX)}"
        raise ValueError(f"{name}={value!r} is not between {limits}; the default is right for most disks")
    return round_up(size, 16 * UNIT_BYTES)


def _arena(value: object, name: str) -> int:
    size = parse_size(value, name)
    if size < ARENA_BYTES_MIN:
        raise ValueError(f"{name}={value!r} is too small to move chunks through; give at least {ARENA_BYTES_MIN} bytes")
    return size


def _engine(value: object, name: str) -> str:
    return _choice(value, name, ENGINES)


def _compression(value: object, name: str) -> str:
    chosen = _choice(value, name, COMPRESSIONS)
    if chosen != "none" and find_spec("zstandard") is None:
        raise ValueError(f"{name}={value!r} needs the package zstandard: pip install 'kvdisk[zstd]'")
    return chosen


def _data_plane(value: object, name: str) -> str:
    return _choice(value, name, DATA_PLANES)


def _choice(value: object, name: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ValueError(f"{name}={value!r} is none of {', '.join(valid)}")
    return str(value)


def _seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} is not a positive number of seconds")
    return float(value)


def _word(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not text")
    if len(value) > 256 or not value.isprintable():
        raise ValueError(f"{name}={value!r} must be printable and at most 256 characters")
    if ".." in value or value.startswith("/"):
        raise ValueError(f"{name}={value!r} looks like a path; it is only a word in the identity of the data")
    return value


def parse_bool(value: object, name: str) -> bool:
    """A boolean, as JSON and command lines write it."""
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not true or false")
    return value


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "root_dir": _roots,
    "disk_bytes_to_use": parse_size,
    "cpu_bytes_to_use": _arena,
    "segment_bytes": _segment,
    "engine": _engine,
    "io_timeout_s": _seconds,
    "namespace": _word,
    "allow_shared_root": parse_bool,
    "data_plane": _data_plane,
    "compression": _compression,
}
