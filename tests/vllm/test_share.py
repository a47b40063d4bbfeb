"""Rules of `kvdisk.vllm.share`: what an attacher sees, what it refuses, and when memory goes."""

import fcntl
import json
import os

import numpy as np
import pytest

from kvdisk.geometry import Geometry, GroupGeometry, Page
from kvdisk.processes import process_start
from kvdisk.vllm.share import _HEADER, POISONED, TICKETS, UNIT_BYTES, Share

GEOMETRY = Geometry(0, 1, 4, (GroupGeometry(0, 16, (Page(0, 100),)),), {"model": "x" * 10_000})


def memfd(content: bytes, size: int = 0) -> int:
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    os.ftruncate(fd, max(-(-max(size, len(content)) // (2 << 20)) * (2 << 20), 2 << 20))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def header(
    geometry_bytes: int | None = None,
    unit_count=1,
    version=1,
    tickets=TICKETS,
    unit_bytes=UNIT_BYTES,
    magic=b"KVDSHARE",
):
    text = GEOMETRY.to_json().encode()
    if geometry_bytes is None:
        geometry_bytes = len(text)
    return _HEADER.pack(magic, version, 0, geometry_bytes, unit_count, tickets, unit_bytes, 1, 1) + text


def test_what_one_side_writes_the_other_reads():
    mine = Share.create(GEOMETRY, 8, shared=True)
    theirs = Share.attach(mine.fd)
    assert theirs.geometry == GEOMETRY
    assert (theirs.creator_pid, theirs.creator_start) == (os.getpid(), process_start(os.getpid()))
    assert theirs.fd not in (None, mine.fd), "its own, to be handed on to a data plane"
    mine.units[:] = 7
    mine.blocks_written[3] = POISONED
    mine.mark_ended(70_000)
    assert (theirs.units == 7).all()
    assert theirs.blocks_written.tolist() == [0, 0, 0, POISONED, 0, 0, 0, 0]
    assert theirs.has_ended(70_000)
    theirs.blocks_written[3] = 0
    assert not mine.blocks_written.any()


def test_tables_and_units_do_not_overlap():
    share = Share.create(GEOMETRY, 5, shared=False)
    parts = (share.ended, share.blocks_written, share.units)
    for mark, part in enumerate(parts, 1):
        part[:] = mark
    assert [np.unique(part).tolist() for part in parts] == [[1], [2], [3]]
    memory, start = share.memory_units
    assert start % (2 << 20) == 0
    assert share.units_address == memory.address + start == share.units.ctypes.data
    assert bytes(memory.view[start : start + 4]) == b"\x03" * 4
    assert Geometry.from_json(bytes(memory.view[_HEADER.size : _HEADER.size + len(GEOMETRY.to_json())])) == GEOMETRY


def test_a_ticket_has_ended_only_when_it_or_its_successor_in_the_ring_has():
    share = Share.create(GEOMETRY, 0, shared=False)
    assert not share.has_ended(0)
    share.mark_ended(0)
    assert share.has_ended(0)
    assert not share.has_ended(1)
    assert not share.has_ended(TICKETS)
    share.mark_ended(TICKETS)
    assert share.has_ended(TICKETS)
    assert share.has_ended(0)


def test_a_share_without_units_has_tickets_only():
    share = Share.create(GEOMETRY, 0, shared=True)
    theirs = Share.attach(share.fd)
    assert theirs.units.size == theirs.blocks_written.size == 0
    share.mark_ended(5)
    assert theirs.has_ended(5)


def test_closing_keeps_the_memory_while_someone_holds_it():
    share = Share.create(GEOMETRY, 2, shared=True)
    units, fd = share.units, share.fd
    share.close()
    share.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    del share
    units[:] = 9
    assert int(units.sum()) == 9 * 2 * UNIT_BYTES


@pytest.mark.parametrize("unit_count", [-1, (1 << 31) + 1])
def test_an_impossible_unit_count_is_the_callers_mistake(unit_count):
    with pytest.raises(ValueError, match="unit_count"):
        Share.create(GEOMETRY, unit_count, shared=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a share"),
        (header(magic=b"12345678"), "not a share"),
        (header(version=2), "same kvdisk"),
        (header(tickets=1), "same kvdisk"),
        (header(unit_bytes=512), "same kvdisk"),
        (header(unit_count=1 << 20), "its header needs"),
        (header(unit_count=1 << 40), "units"),
        (header(geometry_bytes=1 << 20), "geometry"),
        (header(geometry_bytes=1 << 60), "geometry"),
        (header(geometry_bytes=0), "not JSON"),
        (header(geometry_bytes=len(GEOMETRY.to_json()) - 1), "not JSON"),
        (_HEADER.pack(b"KVDSHARE", 1, 0, 2, 1, TICKETS, UNIT_BYTES, 1, 1) + b"{}", "must have the fields"),
    ],
)
def test_a_strangers_memory_is_refused(content, message):
    fd = memfd(content, 6 << 20)
    try:
        with pytest.raises(ValueError, match=message):
            Share.attach(fd)
    finally:
        os.close(fd)


def test_memory_shorter_than_a_header_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"KVDSHARE")
    with path.open("rb") as file, pytest.raises(ValueError, match="shorter than its header"):
        Share.attach(file.fileno())


def test_a_process_is_named_by_pid_and_start():
    assert process_start(os.getpid()) == process_start(os.getpid())
    assert process_start(1 << 30) is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process_start(child) is None, "a zombie is gone"
    os.waitpid(child, 0)


def test_the_geometry_is_readable_as_json():
    """For a person with a debugger: the text follows the header."""
    share = Share.create(GEOMETRY, 0, shared=False)
    memory, _ = share.memory_units
    length = _HEADER.unpack_from(memory.view)[3]
    assert json.loads(bytes(memory.view[_HEADER.size : _HEADER.size + length]))["blocks_per_chunk"] == 4
