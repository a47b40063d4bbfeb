"""What the manager remembers of one request: its pins, its budget, and whether it is waiting.

A request pins every slot it was told is a hit (or will be one), so that a later key of the same prefix cannot push out
an earlier one; and it may pin only its budget, so that a prefix larger than the arena still loads its head, and a
group that is looked up from the tail (sliding window, Mamba) finds room after the full-attention groups took theirs.
"""

from kvdisk.resident import Resident

ARENA_SHARE = 0.9
"""Of the arena, that one request may pin: the rest lets stores go on."""

WINDOW_SHARE = 0.1
"""Of a request's budget, for the groups that are not looked up from the head, where there are any."""


class Request:
    """See the module's docstring.

    Attributes:
        pins: slots that wait for `prepare_load`, by key.
        waits: keys that were being loaded when last looked at; while there are some, scans are cut short.
        pinned_units: by group id.
        step: of the last lookup. cutting: this step's scan is being cut short. scanned: group -> position of its first
            key in this step, while cutting.
        cut: stores end before this position; None: nothing was refused yet. refusals: in a row.
        chain: (group, position) -> key, of all keys that were loaded or offered: for the parents of new chunks.
        from_disk: keys that were promoted for this request.
    """

    __slots__ = (
        "chain",
        "cut",
        "cutting",
        "from_disk",
        "pinned_units",
        "pins",
        "refusals",
        "req_id",
        "scanned",
        "step",
        "waits",
    )

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.pins: dict[bytes, Resident] = {}
        self.waits: dict[bytes, Resident] = {}
        self.pinned_units: dict[int, int] = {}
        self.step = -1
        self.cutting = False
        self.scanned: dict[int, int] = {}
        self.cut: int | None = None
        self.refusals = 0
        self.chain: dict[tuple[int, int], bytes] = {}
        self.from_disk: set[bytes] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk it pinned is still on its way; forgets those that arrived or failed."""
        if self.waits:
            arrived = [key for key, resident in self.waits.items() if resident.is_hit or resident.forgotten]
            for key in arrived:
                del self.waits[key]
        return bool(self.waits)


class Groups:
    """The KV cache groups as the manager needs them.

    Args:
        tokens_per_chunk: by group id.
        units: of a chunk's slot, by group id.
        full: ids of the groups whose attention reaches back without a bound, in vLLM's order.
        arena_units: of the arena.
    """

    def __init__(
        self, tokens_per_chunk: dict[int, int], units: dict[int, int], full: tuple[int, ...], arena_units: int
    ) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.units = units
        self.full = full
        windows = [group for group in units if group not in full]
        total = int(arena_units * ARENA_SHARE)
        for_windows = int(total * WINDOW_SHARE) if windows and full else total if windows else 0
        self.budget = _split(total - for_windows, full, units, tokens_per_chunk)
        self.budget.update(_split(for_windows, windows, units, tokens_per_chunk))

    def parent_position(self, group: int, position: int) -> list[tuple[int, int]]:
        """Where a chunk's parent is looked for, best first: (group, position) pairs.

        A full-attention chunk follows the one before it; a chunk of another group is useless without the
        full-attention chunk that covers its end, or, if that is not complete yet, the one before.
        """
        if group in self.full:
            return [(group, position - self.tokens_per_chunk[group])]
        if not self.full:
            return []
        head = self.full[0]
        step = self.tokens_per_chunk[head]
        covering = -(-position // step) * step
        return [(head, covering), (head, covering - step)]


def _split(
    total: int, groups: "list[int] | tuple[int, ...]", units: dict[int, int], tokens: dict[int, int]
) -> dict[int, int]:
    """`total` units over `groups` by units a token, so that they hold the same prefix; at least one chunk each."""
    weights = {group: units[group] / tokens[group] for group in groups}
    whole = sum(weights.values()) or 1.0
    return {group: max(units[group], int(total * weight / whole)) for group, weight in weights.items()}
