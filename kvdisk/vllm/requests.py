"""What the manager remembers of one request, and how much of the arena a request may hold.

A request pins every slot it was told is a hit (or will be one), so that a later key of the same prefix cannot push out
an earlier one; and it may pin only its budget, so that a prefix larger than the arena still loads its head, and a
group that is looked up from the tail (sliding window, Mamba) finds room after the full-attention groups took theirs.
"""

from collections.abc import Collection, Mapping

from kvdisk.resident import Resident

ARENA_SHARE = 0.9
"""Of the arena, that waiting requests may pin, together and each: the rest lets stores go on."""

WINDOW_SHARE_MAX = 0.5
"""Of that, for the groups that are looked up from the tail, where full-attention groups want the rest."""

WINDOW_SPARE_CHUNKS = 2
"""Beyond its window vLLM asks for one chunk if the last is partial, and for one more of a draft model's group."""

NEVER = -1
"""No step."""


class Request:
    """See the module's docstring.

    Attributes:
        pins: slots that wait for `prepare_load`, by key. window_pins: those of windowed groups, by group.
        waits: keys that were being loaded when last looked at; while there are some, scans are cut short.
        pinned_units: by group id.
        step: of the last lookup since it began to wait. cutting: this step's scan is being cut short. scanned:
            group -> position of its first key in this step, while cutting.
        has_run: it was scheduled before. at_head: its last scan began with the first chunk. held_back: its last scan
            was cut short because it may have run until then.
        scanned_during: the load of its first chunk that was under way in its last whole scan.
        starved_step: step of the last lookup that found no slot. units_wanted: of that slot. gave_up: it has waited
            for slots long enough, what it finds no slot for is a miss.
        cut: stores end before this position; None: nothing was refused yet. refusals: steps in a row in which
            an offer was put off. refused_step: the last of them.
        chain: (group, position) -> key, of all keys that were loaded or offered: for the parents of new chunks.
        counted: offered keys that were counted against `store_threshold`.
        from_disk: keys that were promoted for this request.
    """

    __slots__ = (
        "at_head",
        "chain",
        "counted",
        "cut",
        "cutting",
        "from_disk",
        "gave_up",
        "has_run",
        "held_back",
        "pinned_units",
        "pins",
        "refusals",
        "refused_step",
        "req_id",
        "scanned",
        "scanned_during",
        "starved_step",
        "step",
        "units_wanted",
        "waits",
        "window_pins",
    )

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.pins: dict[bytes, Resident] = {}
        self.window_pins: dict[int, dict[bytes, Resident]] = {}
        self.waits: dict[bytes, Resident] = {}
        self.pinned_units: dict[int, int] = {}
        self.step = NEVER
        self.cutting = False
        self.scanned: dict[int, int] = {}
        self.scanned_during: int | None = None
        self.has_run = False
        self.at_head = False
        self.held_back = False
        self.starved_step = NEVER
        self.units_wanted = 0
        self.gave_up = False
        self.cut: int | None = None
        self.refusals = 0
        self.refused_step = NEVER
        self.chain: dict[tuple[int, int], bytes] = {}
        self.counted: set[bytes] = set()
        self.from_disk: set[bytes] = set()


class Groups:
    """The KV cache groups as the manager needs them.

    Args:
        tokens_per_chunk: by group id, in vLLM's order.
        units: of a chunk's slot, by group id.
        windows: group id -> chunks that a hit needs at its end (1 for Mamba), of the groups that are looked up from
            the tail. The others reach back without a bound and are looked up from the head.
        arena_units: of the arena.

    Attributes:
        full: ids of those others, in vLLM's order.
        budget: units that one request may pin, by group id. held_max: that all waiting requests may pin together.
        limits: by group id, units, budget, and whether it is one of `windows`: for lookups, of which there are many.
    """

    def __init__(
        self,
        tokens_per_chunk: Mapping[int, int],
        units: Mapping[int, int],
        windows: Mapping[int, int],
        arena_units: int,
    ) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.units = units
        self.windows = windows
        self.full = tuple(group for group in units if group not in windows)
        self.held_max = int(arena_units * ARENA_SHARE)
        needed = {group: (chunks + WINDOW_SPARE_CHUNKS) * units[group] for group, chunks in windows.items()}
        bound = int(self.held_max * (WINDOW_SHARE_MAX if self.full else 1))
        total = sum(needed.values())
        scale = min(1.0, bound / total) if total else 1.0
        self.budget = {group: max(units[group], int(wanted * scale)) for group, wanted in needed.items()}
        self.starved_windows = tuple(
            group for group, chunks in windows.items() if self.budget[group] < chunks * units[group]
        )
        self.budget.update(self._split(self.held_max - sum(self.budget.values())))
        self.limits = {group: (units[group], self.budget[group], group in windows) for group in units}

    def window_tokens(self, group: int) -> int:
        """How far from a key of a windowed group others of the same window can be."""
        return (self.windows[group] + WINDOW_SPARE_CHUNKS) * self.tokens_per_chunk[group]

    def units_of(self, groups: Collection[int]) -> int:
        """Units of one slot in each of these groups; a group may be named again."""
        return sum(self.units[group] for group in groups)

    def parent_position(self, group: int, position: int) -> list[tuple[int, int]]:
        """Where a chunk's parent is looked for, best first: (group, position) pairs.

        A full-attention chunk follows the one before it; a chunk of another group is useless without the
        full-attention chunk that covers its end, or, if that is not complete yet, the one before.
        """
        if group in self.full:
            return [(group, position - self.tokens_per_chunk[group])]
        if not self.full:
            return []
        head, covering = self.full[0], self.end_of(group, position)
        return [(head, covering), (head, covering - self.tokens_per_chunk[head])]

    def end_of(self, group: int, position: int) -> int:
        """How long a prefix has to be stored for a chunk to be of use: to the end of the full-attention chunk that
        covers it."""
        if group in self.full or not self.full:
            return position
        step = self.tokens_per_chunk[self.full[0]]
        return -(-position // step) * step

    def parent_of(self, key: bytes, group: int, position: int, chain: Mapping[tuple[int, int], bytes]) -> bytes:
        """The chunk without which `key` can never be hit, as far as it is known; b"" if none is.

        A Mamba state is offered before the full-attention chunk of the same step that ends with it. Their keys differ
        in the group only.

        Args:
            chain: (group, position) -> key, of the chunks of its request.
        """
        for head, end in self.parent_position(group, position):
            if end == position and head != group:
                return key[:-4] + head.to_bytes(4, "big")
            if parent := chain.get((head, end)):
                return parent if parent != key else b""
        return b""

    def _split(self, total: int) -> dict[int, int]:
        """`total` units over the full groups by units a token, so that they hold the same prefix; a chunk at least."""
        weights = {group: self.units[group] / self.tokens_per_chunk[group] for group in self.full}
        whole = sum(weights.values()) or 1.0
        return {group: max(self.units[group], int(total * weight / whole)) for group, weight in weights.items()}
