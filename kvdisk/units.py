"""Sizes in bytes, as operators write them: integers, or text such as "8GiB", "1.5 TB", "4096".

Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (kB, MB, GB, TB) of 1000, as in IEC 80000-13. A bare
letter (K, M, G, T) means the binary unit, as in fio.
"""

import re
from decimal import Decimal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

UNIT_BYTES = 4096
"""Unit of the arena: the alignment that direct I/O wants on almost every disk (statx's dio fields say 512 or 4096)."""

_UNITS = {
    "": 1,
    "b": 1,
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([a-zA-Z]{0,3})\s*")


def parse_size(value: object, name: str = "size") -> int:
    """Bytes of `value`, an integer or text with a unit.

    Args:
        value: a non-negative int, or text such as "8GiB". A bool is not a size.
        name: the option's name, for the message.

    Raises:
        ValueError: it does not parse, is negative, or is not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{name}={value} is negative; give a size in bytes or text such as '8GiB'")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{name}={value!r} is not a size; give bytes or text such as '512MiB', '8GiB', '1.5TB'")
    size = Decimal(match[1]) * factor
    if size != size.to_integral_value():
        raise ValueError(f"{name}={value!r} is not a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """`size` bytes with a binary unit and at most one decimal, for messages: "1.5 GiB"."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
