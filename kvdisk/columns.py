"""Columns of integers that grow in place, in memory of their own from the system.

Arrays that grow in the heap leave holes where they were: a sixth of all that an index of a million chunks took. What a
column has room for and does not use yet takes no memory.
"""

import contextlib
import mmap
from typing import Literal, cast

_Code = Literal["H", "I", "i", "Q"]
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not shared: that memory cannot grow
_BYTES: dict[_Code, int] = {"H": 2, "I": 4, "i": 4, "Q": 8}


def new_column(code: _Code, rows: int) -> "memoryview[int]":
    """Integers of the type `code`, see array.array, all 0."""
    return memoryview(mmap.mmap(-1, rows * _BYTES[code], _FLAGS)).cast(code)


def grown(column: "memoryview[int]", rows: int) -> "memoryview[int]":
    """The same with room for `rows`, new ones 0; or as it was, if the system has no more memory. `column` itself is
    released, and must be the only view."""
    memory, code = column.obj, cast(_Code, column.format)
    assert isinstance(memory, mmap.mmap)
    column.release()
    with contextlib.suppress(OSError):
        memory.resize(rows * _BYTES[code])
    return memoryview(memory).cast(code)
