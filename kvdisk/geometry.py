"""Which bytes make up a chunk on one rank: KV cache groups, their pages, and every other fact that decides the bytes.

A chunk is `blocks_per_chunk` blocks of one group, and its bytes are block-major: block p lies at `p * block_bytes`, and
within it the group's pages follow each other in order, un-padded. Nothing here knows where the chunk comes from (a GPU
tensor) or goes to (a slot, a file), so both ends can compute the same offsets.

What must hold: two chunks may be exchanged only if the fingerprints of the geometries they were written under are
equal. What can fail: a geometry that came from another process may be anything (`from_json` raises ValueError), and a
registered view may reach past its storage (`check_views` raises ValueError): vLLM builds views with `as_strided`, which
checks nothing, and a wrong stride there is silent corruption.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvdisk.errors import RendezvousError

Fact: TypeAlias = str | int | float | bool | None

RANK_FACT = "rank."  # prefix: decides bytes, may differ between the ranks of one engine (their layers do, under PP)
INFO_FACT = "info."  # prefix: for reports and decisions; decides no byte, so it is neither compared nor fingerprinted

JSON_BYTES_MAX = 16 << 20  # far above any real model (1,000 layers with their facts are 0.3 MB)
_GROUPS_MAX = 1 << 12
_PAGES_MAX = 1 << 16
_SIZE_MAX = 1 << 48  # bytes or counts; keeps every product below within 64 bits


@dataclass(frozen=True, slots=True)
class Page:
    """One view's part of a block: the first `page_bytes` (un-padded) of each row of tensor number `tensor`."""

    tensor: int
    page_bytes: int


@dataclass(frozen=True)
class GroupGeometry:
    """One KV cache group: `group_id` is vLLM's (ids may have gaps), `tokens_per_block` spans all workers."""

    group_id: int
    tokens_per_block: int
    pages: tuple[Page, ...]

    @cached_property
    def block_bytes(self) -> int:
        """Live bytes of one block of this group on this rank."""
        return sum(page.page_bytes for page in self.pages)

    @cached_property
    def page_offsets(self) -> tuple[int, ...]:
        """Where each page starts within a block, in bytes."""
        offsets, end = [], 0
        for page in self.pages:
            offsets.append(end)
            end += page.page_bytes
        return tuple(offsets)


@dataclass(frozen=True)
class Geometry:
    """One rank's layout. `groups` is in the order of vLLM's config: a *group index* counts in it, a group id need not.

    `facts` is flat: names to JSON scalars, with the prefixes `RANK_FACT` and `INFO_FACT` (see there).
    """

    rank: int
    world_size: int
    blocks_per_chunk: int
    groups: tuple[GroupGeometry, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_int("world_size", self.world_size, 1)
        _check_int("rank", self.rank, 0)
        _check_int("blocks_per_chunk", self.blocks_per_chunk, 1)
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        if not 1 <= len(self.groups) <= _GROUPS_MAX:
            raise ValueError(f"{len(self.groups)} KV cache groups; a geometry has 1 to {_GROUPS_MAX}")
        ids = [group.group_id for group in self.groups]
        if len(set(ids)) != len(ids):
            raise ValueError(f"group ids repeat: {ids}")
        for group in self.groups:
            _check_group(group, self.blocks_per_chunk)
        for name, fact in self.facts.items():
            if fact is not None and not isinstance(fact, (str, int, float, bool)):
                raise ValueError(f"fact {name!r} is {type(fact).__name__}; facts are names to JSON scalars")
            if isinstance(fact, float) and not math.isfinite(fact):
                raise ValueError(f"fact {name!r} is {fact}; JSON has no such number")

    def chunk_bytes(self, group_index: int) -> int:
        """Live bytes of one chunk of the group at `group_index` (its place in `groups`, not its id)."""
        return self.groups[group_index].block_bytes * self.blocks_per_chunk

    def to_json(self) -> str:
        """Canonical JSON: equal geometries give equal text."""
        return _canonical(self._plain(rank=True, facts=dict(self.facts)))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Geometry":
        """Read what `to_json` wrote, in another process.

        Raises:
            ValueError: not such a text; the message names the field.
        """
        if len(text) > JSON_BYTES_MAX:
            raise ValueError(f"geometry of {len(text)} bytes; at most {JSON_BYTES_MAX}")
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError and JSONDecodeError
            raise ValueError(f"geometry is not JSON: {error}") from None
        fields = _fields(plain, "geometry", {"rank", "world_size", "blocks_per_chunk", "groups", "facts"})
        if not isinstance(fields["groups"], list) or not isinstance(fields["facts"], dict):
            raise ValueError("geometry: groups must be a list and facts an object")
        groups = tuple(_group_from_plain(group) for group in fields["groups"])
        return cls(fields["rank"], fields["world_size"], fields["blocks_per_chunk"], groups, fields["facts"])

    def fingerprint(self) -> str:
        """SHA-256 (hex) over everything that decides the bytes: all but the rank and the `INFO_FACT`s."""
        facts = {name: fact for name, fact in self.facts.items() if not name.startswith(INFO_FACT)}
        return hashlib.sha256(_canonical(self._plain(rank=False, facts=facts)).encode()).hexdigest()

    def check_agrees(self, other: "Geometry") -> None:
        """Check that two ranks of one engine can hold the parts of the same chunks.

        They must agree on groups, `blocks_per_chunk`, world size and namespace; not on bytes, since under pipeline
        parallelism their layers differ.

        Raises:
            RendezvousError: naming both ranks, the field and both values.
        """
        for name, mine, theirs in self._compared(other):
            if mine != theirs:
                raise RendezvousError(
                    f"ranks {self.rank} and {other.rank} disagree on {name}: {mine!r} and {theirs!r}; all workers of "
                    f"an engine need the same model, vLLM and kvdisk settings"
                )

    def _compared(self, other: "Geometry") -> Iterator[tuple[str, object, object]]:
        yield "world_size", self.world_size, other.world_size
        yield "blocks_per_chunk", self.blocks_per_chunk, other.blocks_per_chunk
        mine, theirs = self.groups, other.groups
        yield "group ids", [group.group_id for group in mine], [group.group_id for group in theirs]
        yield (
            "tokens_per_block",
            [group.tokens_per_block for group in mine],
            [group.tokens_per_block for group in theirs],
        )
        for name in sorted({*self.facts, *other.facts}):
            if not name.startswith((RANK_FACT, INFO_FACT)):
                yield f"fact {name!r}", self.facts.get(name, "absent"), other.facts.get(name, "absent")

    def _plain(self, *, rank: bool, facts: dict[str, Fact]) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "world_size": self.world_size,
            "blocks_per_chunk": self.blocks_per_chunk,
            "groups": [
                {
                    "group_id": group.group_id,
                    "tokens_per_block": group.tokens_per_block,
                    "pages": [[page.tensor, page.page_bytes] for page in group.pages],
                }
                for group in self.groups
            ],
            "facts": facts,
        }
        return {"rank": self.rank, **plain} if rank else plain


class View(NamedTuple):
    """One registered tensor as bytes: row b is `row_bytes` at `offset_bytes + b * stride_bytes` of its storage.

    `storage` tells storages apart: an address, or any other number.
    """

    num_blocks: int
    row_bytes: int
    stride_bytes: int
    offset_bytes: int
    storage_bytes: int
    storage: int = 0


class _Placed(NamedTuple):
    """A page in a storage, and of which group."""

    view: View
    page_bytes: int
    group_index: int
    where: str

    @property
    def end_bytes(self) -> int:
        """Behind the last block's page."""
        return self.view.offset_bytes + (self.view.num_blocks - 1) * self.view.stride_bytes + self.page_bytes


def check_views(geometry: Geometry, views: Sequence[View], names: Sequence[Sequence[str]] = ()) -> None:
    """Check that every page lies within its view, every view within its storage, and no block within another block.

    Blocks are handed to groups one by one: the same block of two groups may share bytes, two blocks never, whichever
    groups they belong to; nor two pages of a group within a block, unless they are the same page.

    Args:
        geometry: pages index `views`. Several views may share storage (groups alias each other).
        views: one a tensor.
        names: for messages, the layer of each page: one sequence a group. Optional.

    Raises:
        ValueError: naming group, layer, tensor and the numbers.
    """
    storages: dict[int, list[_Placed]] = {}
    for group_index, group in enumerate(geometry.groups):
        layers = names[group_index] if group_index < len(names) else ()
        for page_index, page in enumerate(group.pages):
            layer = f", layer {layers[page_index]}" if len(layers) == len(group.pages) else ""
            where = f"KV cache group {group.group_id}{layer}, tensor {page.tensor}"
            if page.tensor >= len(views):
                raise ValueError(f"{where}: only {len(views)} tensors are registered")
            view = views[page.tensor]
            _check_view(where, page, view)
            storages.setdefault(view.storage, []).append(_Placed(view, page.page_bytes, group_index, where))
    for placed in storages.values():
        for region in _regions(placed):
            _check_overlaps(region)


def _regions(placed: list[_Placed]) -> Iterator[list[_Placed]]:
    """Pages whose places, over all blocks, touch each other's; layers that lie one behind the other do not."""
    region: list[_Placed] = []
    end = 0
    for one in sorted(placed, key=lambda one: one.view.offset_bytes):
        if region and one.view.offset_bytes >= end:
            yield region
            region = []
        region.append(one)
        end = max(end, one.end_bytes)
    if region:
        yield region


def _check_overlaps(region: list[_Placed]) -> None:
    """No two blocks share bytes. Exact, and linear in the number of pages for each page."""
    first = region[0]
    for one in region:
        if one.view.num_blocks > 1 and one.view.stride_bytes != first.view.stride_bytes:
            raise ValueError(
                f"{one.where}: blocks {one.view.stride_bytes} bytes apart share bytes with those of {first.where}, "
                f"{first.view.stride_bytes} apart: a block of one is not a block of the other"
            )
    # Layers and groups often share a place; each is looked at once.
    unique = list({(one.view.offset_bytes, one.page_bytes, one.group_index): one for one in region}.values())
    num_blocks = max(one.view.num_blocks for one in unique)
    stride = first.view.stride_bytes if num_blocks > 1 else _SIZE_MAX
    offsets = np.array([one.view.offset_bytes for one in unique], np.int64)
    sizes = np.array([one.page_bytes for one in unique], np.int64)
    groups = np.array([one.group_index for one in unique], np.int64)
    for index, one in enumerate(unique):
        # Block b of `one` meets block b + k of another for k from `low` to `high`.
        low = np.maximum((offsets[index] - offsets - sizes) // stride + 1, 1 - num_blocks)
        high = np.minimum(-((offsets - offsets[index] - sizes[index]) // stride) - 1, num_blocks - 1)
        wrong = (low < 0) & (low <= high) | (high > 0) & (low <= high)
        same_page = (offsets == offsets[index]) & (sizes == sizes[index])
        wrong |= (low <= 0) & (high >= 0) & (groups == groups[index]) & ~same_page
        if wrong.any():
            other = unique[int(np.argmax(wrong))]
            raise ValueError(
                f"{one.where}: pages of {one.page_bytes} bytes from offset {one.view.offset_bytes}, every {stride}, "
                f"overlap those of {other.where}, {other.page_bytes} from offset {other.view.offset_bytes}"
            )


def _check_view(where: str, page: Page, view: View) -> None:
    if view.num_blocks < 1 or view.offset_bytes < 0 or view.row_bytes < 1:
        raise ValueError(f"{where}: empty or negative view {view}")
    if page.page_bytes > view.row_bytes:
        raise ValueError(f"{where}: page of {page.page_bytes} bytes in rows of {view.row_bytes}")
    if view.num_blocks > 1 and view.stride_bytes < view.row_bytes:
        raise ValueError(f"{where}: rows of {view.row_bytes} bytes overlap, their stride is {view.stride_bytes}")
    end = view.offset_bytes + (view.num_blocks - 1) * view.stride_bytes + page.page_bytes
    if end > view.storage_bytes:
        raise ValueError(
            f"{where}: {view.num_blocks} blocks of {page.page_bytes} bytes, stride {view.stride_bytes}, from offset "
            f"{view.offset_bytes} end at {end}, past the storage's {view.storage_bytes} bytes"
        )


def _canonical(plain: dict[str, Any]) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _check_int(name: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value < _SIZE_MAX:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")


def _check_group(group: GroupGeometry, blocks_per_chunk: int) -> None:
    _check_int("group_id", group.group_id, 0)
    _check_int(f"tokens_per_block of group {group.group_id}", group.tokens_per_block, 1)
    # A rank may own no layer of a group (pipeline parallelism): its chunks are then empty here.
    if len(group.pages) > _PAGES_MAX:
        raise ValueError(f"group {group.group_id} has {len(group.pages)} pages; at most {_PAGES_MAX}")
    for page in group.pages:
        _check_int(f"tensor of group {group.group_id}", page.tensor, 0)
        _check_int(f"page_bytes of group {group.group_id}", page.page_bytes, 1)
    if group.block_bytes * blocks_per_chunk >= _SIZE_MAX:
        raise ValueError(f"a chunk of group {group.group_id} has {group.block_bytes * blocks_per_chunk} bytes")


def _fields(plain: object, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(plain, dict) or set(plain) != names:
        found = sorted(plain) if isinstance(plain, dict) else type(plain).__name__
        raise ValueError(f"{what} must have the fields {sorted(names)}, found {found}")
    return plain


def _group_from_plain(plain: object) -> GroupGeometry:
    fields = _fields(plain, "group", {"group_id", "tokens_per_block", "pages"})
    pages = fields["pages"]
    if not isinstance(pages, list) or not all(isinstance(page, list) and len(page) == 2 for page in pages):
        raise ValueError("group: pages must be a list of [tensor, page_bytes]")
    for page in pages:
        _check_int("page_bytes", page[1], 1)
    return GroupGeometry(fields["group_id"], fields["tokens_per_block"], tuple(Page(*page) for page in pages))
