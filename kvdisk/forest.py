"""Trees of rows, in columns of integers that grow in place.

What must hold:
- A row has at most one parent and is in its list of children exactly once.
- Nearly all rows are an only child: they take 8 bytes. Those that have, or had, siblings take 12 more, elsewhere.
- Attaching and detaching pass no siblings, however many there are.
Links are whatever was attached, and may form a loop. Knows nothing of keys.
"""

from array import array

import numpy as np

from kvdisk.columns import grown, new_column

NONE = -1


class Forest:
    """See the module's docstring. Rows are numbered by the caller, who calls `add` before anything else of a new one.

    Attributes:
        child: of each row its first child, or NONE; to be read only.
    """

    def __init__(self, rows: int) -> None:
        self.child = new_column("i", rows)
        self._parent = new_column("i", rows)  # a row, NONE, or below that: the place of what follows for this row
        self._parent_at = array("i")
        self._next_at = array("i")
        self._previous_at = array("i")
        self._free: list[int] = []

    def grow(self, rows: int) -> int:
        """Make room for rows below `rows`; for how many there is some now, which is less if there is no memory."""
        self.child = grown(self.child, rows)
        self._parent = grown(self._parent, rows)
        return min(len(self.child), len(self._parent))

    def add(self, row: int) -> None:
        """A row without parent and children."""
        self._parent[row] = self.child[row] = NONE

    def parent(self, row: int) -> int:
        """The parent, or NONE."""
        parent = self._parent[row]
        return parent if parent >= NONE else self._parent_at[_place(parent)]

    def next(self, row: int) -> int:
        """The next child of the same parent, or NONE."""
        parent = self._parent[row]
        return NONE if parent >= NONE else self._next_at[_place(parent)]

    def attach(self, row: int, parent: int) -> None:
        """Make `row`, which has no parent, the first child of `parent`."""
        first = self.child[parent]
        self.child[parent] = row
        self._parent[row] = parent
        if first != NONE:
            self._next_at[self._place_of(row)] = first
            self._previous_at[self._place_of(first)] = row

    def detach(self, row: int) -> int:
        """Take `row` from its parent; which that was, or NONE."""
        parent = self._parent[row]
        self._parent[row] = NONE
        if parent >= 0:
            self.child[parent] = NONE
        elif parent != NONE:
            place = _place(parent)
            self._free.append(place)
            parent, following, previous = self._parent_at[place], self._next_at[place], self._previous_at[place]
            if previous != NONE:
                self._next_at[_place(self._parent[previous])] = following
            else:
                self.child[parent] = following
            if following != NONE:
                self._previous_at[_place(self._parent[following])] = previous
        return parent

    def forget(self, row: int) -> None:
        """As `add`, for one whose parent and siblings are about to go as well, or that has none."""
        parent = self._parent[row]
        if parent < NONE:
            self._free.append(_place(parent))
        self.add(row)

    def chain(self, count: int) -> None:
        """Make the first `count` rows, all new, one chain: each the only child of the one before."""
        np.asarray(self._parent)[:count] = np.arange(-1, count - 1)
        np.asarray(self.child)[:count] = np.arange(1, count + 1)
        self.child[count - 1] = NONE

    def _place_of(self, row: int) -> int:
        parent = self._parent[row]
        if parent < NONE:
            return _place(parent)
        if self._free:
            place = self._free.pop()
            self._parent_at[place], self._next_at[place], self._previous_at[place] = parent, NONE, NONE
        else:
            place = len(self._parent_at)
            self._parent_at.append(parent)
            self._next_at.append(NONE)
            self._previous_at.append(NONE)
        self._parent[row] = NONE - 1 - place
        return place


def _place(parent: int) -> int:
    return NONE - 1 - parent
