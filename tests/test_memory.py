"""Host memory: aligned, present, bounded in lifetime, and shared only as sealed."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdisk import memory as memory_module
from kvdisk.memory import map_shared_memory, private_memory, shared_memory
from tests.machine import collapses_shared_pages

HUGE = 2 << 20


def mapped_bytes(address: int, size: int) -> int:
    """Bytes of [address, address + size) that this process has mapped."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            total += max(0, min(high, address + size) - max(low, address))
    return total


@pytest.mark.parametrize("size", [1, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE])
def test_private_memory_is_aligned_and_at_least_as_large_as_asked(size):
    memory = private_memory(size)
    assert memory.address % HUGE == 0
    assert memory.size >= size
    assert memory.size % HUGE == 0
    assert len(memory.view) == memory.size
    assert np.frombuffer(memory.view, np.uint8).ctypes.data == memory.address


def test_private_memory_is_zero_and_writable_to_its_last_byte():
    memory = private_memory(3 * HUGE)
    assert not np.frombuffer(memory.view, np.uint8).any()
    memory.view[memory.size - 1] = 7
    assert memory.view[-1] == 7


def resident_bytes(memory) -> int:
    rows = Path("/proc/self/smaps").read_text().split("\n")
    rss = overlap = 0
    for row in rows:
        head = row.split(" ")[0]
        if head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            overlap = min(high, memory.address + memory.size) - max(low, memory.address)
        elif overlap > 0 and head in ("Rss:", "Shared_Hugetlb:", "Private_Hugetlb:"):  # a pool's pages are not in Rss
            rss += int(row.split()[1]) << 10
    return rss


@pytest.mark.parametrize("make", [private_memory, lambda size: shared_memory(size)[0]], ids=["private", "shared"])
def test_memory_is_present_before_it_is_first_used(make):
    memory = make(4 * HUGE)
    assert resident_bytes(memory) >= memory.size


def test_pages_are_called_huge_only_when_most_of_them_are():
    memory = private_memory(8 * HUGE)
    huge = memory_module._huge_bytes(memory)
    assert memory.pages == ("huge (THP)" if huge * 2 > memory.size else "4 KiB")
    memory_module._advise(memory, mmap.MADV_DONTNEED)  # gives the pages back
    assert memory_module._huge_bytes(memory) == 0


def test_memory_stays_mapped_as_long_as_a_view_of_it_lives():
    memory = private_memory(HUGE)
    address, tail = memory.address, memory.view[HUGE - 16 :]
    del memory
    assert mapped_bytes(address, HUGE) == HUGE
    tail[0] = 1
    del tail
    assert mapped_bytes(address, HUGE) == 0


def test_nothing_but_the_memory_itself_stays_mapped():
    def address_space() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * mmap.PAGESIZE

    private_memory(64 * HUGE)  # what the allocator takes for itself is taken now
    before = address_space()
    memory = private_memory(64 * HUGE)
    assert address_space() - before < memory.size + HUGE


def test_a_forked_child_does_not_inherit_private_memory():
    code = (
        "import os, sys; from kvdisk.memory import private_memory\n"
        "m = private_memory(1)\n"
        "if os.fork() == 0:\n"
        "    held = any(int(l.split('-')[0], 16) <= m.address < int(l.split()[0].split('-')[1], 16)"
        " for l in list(open('/proc/self/maps')))\n"
        "    os._exit(1 if held else 0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("make", [private_memory, shared_memory])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_positive_is_the_callers_mistake(make, size):
    with pytest.raises(ValueError, match=str(size)):
        make(size)


@pytest.mark.parametrize("make", [private_memory, shared_memory])
def test_more_memory_than_there_is_is_refused_before_the_kernel_kills_for_it(make, monkeypatch):
    """The kernel promises a memfd of any size, and sends the OOM killer when it is touched."""
    monkeypatch.setattr(memory_module, "_prefault", lambda *_, **__: pytest.fail("touched"))
    size = 1 << 46
    with pytest.raises(MemoryError, match=rf"{size} bytes.*are available.*Ask for less"):
        make(size)


@pytest.mark.parametrize("controllers", [pytest.param("", id="cgroup v2"), pytest.param("memory", id="cgroup v1")])
def test_a_containers_limit_counts_as_available_memory(controllers, monkeypatch):
    values = {
        "/proc/self/cgroup": f"5:cpu:/other\n4:{controllers}:/box",
        "memory.max": "1000",
        "memory.current": "700",
        "memory.limit_in_bytes": "1000",
        "memory.usage_in_bytes": "700",
        "memory.stat": "inactive_file 50\ntotal_inactive_file 50",
    }

    def read_lines(path):
        name = Path(path).name if "box" in str(path) else str(path)
        return values.get(name, "").splitlines()

    monkeypatch.setattr(memory_module, "_read_lines", read_lines)
    assert memory_module.available_bytes() == 350


@pytest.mark.parametrize("make", [private_memory, shared_memory])
def test_a_failed_attempt_leaves_neither_descriptor_nor_mapping(make, monkeypatch):
    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    monkeypatch.setattr(memory_module, "_populate", lambda *_: errno.ENOMEM)
    before = os.listdir("/proc/self/fd"), address_space()
    with pytest.raises(MemoryError, match=rf"{64 * HUGE} bytes.*Ask for less"):
        make(64 * HUGE)
    assert os.listdir("/proc/self/fd") == before[0]
    assert address_space() - before[1] < 64 * HUGE


def test_shared_memory_is_the_same_bytes_in_another_mapping():
    mine, fd = shared_memory(HUGE + 1)
    theirs = map_shared_memory(fd, HUGE + 1)
    os.close(fd)
    mine.view[HUGE] = 9
    theirs.view[0] = 5
    assert (theirs.view[HUGE], mine.view[0]) == (9, 5)
    assert theirs.size == mine.size
    assert theirs.address % HUGE == 0
    assert theirs.pages == mine.pages


def test_shared_memory_is_on_huge_pages_where_the_kernel_can_collapse():
    if not collapses_shared_pages():
        pytest.skip("this kernel has neither MADV_COLLAPSE nor shared huge pages")
    memory, fd = shared_memory(16 * HUGE)
    theirs = map_shared_memory(fd, memory.size)
    os.close(fd)
    for one in (memory, theirs):
        assert memory_module._residency(one)[1] * 2 > one.size or one.pages == "huge (hugetlb)"
        assert one.pages.endswith("huge") or one.pages == "huge (hugetlb)"


def test_what_cannot_be_collapsed_is_left_on_small_pages_and_is_present(monkeypatch):
    monkeypatch.setattr(memory_module, "_MADV_COLLAPSE", 9999)  # as on kernels before 6.1
    memory, fd = shared_memory(8 * HUGE)
    os.close(fd)
    huge = memory_module._residency(memory)[1] * 2 > memory.size
    assert memory.pages == ("shared huge" if huge else "shared 4 KiB") or memory.pages == "huge (hugetlb)"
    assert not np.frombuffer(memory.view, np.uint8).any()
    assert resident_bytes(memory) >= memory.size


def test_a_range_that_cannot_be_collapsed_does_not_cost_the_others_theirs(monkeypatch):
    """As when no huge page is free just now."""
    tried, collapse = [], memory_module._collapse_range

    def fails_once(address: int, size: int) -> int:
        tried.append(address)
        return errno.ENOMEM if len(tried) == 1 else collapse(address, size)

    monkeypatch.setattr(memory_module, "_collapse_range", fails_once)
    memory, fd = shared_memory(4 * HUGE)
    os.close(fd)
    assert memory.pages == "huge (hugetlb)" or len(tried) > 1
    assert resident_bytes(memory) >= memory.size


def test_shared_memory_reaches_another_process():
    memory, fd = shared_memory(1)
    code = "import sys; from kvdisk.memory import map_shared_memory as m; m(int(sys.argv[1]), 1).view[3] = 42"
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True)
    assert memory.view[3] == 42


def test_mapping_shared_memory_again_keeps_what_is_in_it():
    memory, fd = shared_memory(HUGE)
    memory.view[:4] = b"kept"
    map_shared_memory(fd, HUGE)
    assert bytes(memory.view[:4]) == b"kept"


def test_shared_memory_can_neither_shrink_nor_grow():
    memory, fd = shared_memory(1)
    before = os.fstat(fd).st_size
    for size in (0, memory.size // 2, memory.size * 2):
        with pytest.raises(OSError):  # EPERM by the seals; on huge pages of a pool EINVAL for a size between them
            os.ftruncate(fd, size)
        assert os.fstat(fd).st_size == before
    assert not os.get_inheritable(fd)


def test_a_share_smaller_than_expected_is_refused_before_it_is_mapped():
    memory, fd = shared_memory(1)
    with pytest.raises(ValueError, match=rf"holds {memory.size} bytes, expected {memory.size + 1}"):
        map_shared_memory(fd, memory.size + 1)


def test_memory_that_could_still_be_resized_is_refused(tmp_path):
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, HUGE)
    with pytest.raises(ValueError, match="sealed"):
        map_shared_memory(unsealed, HUGE)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    assert map_shared_memory(unsealed, HUGE).size == HUGE
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(HUGE)
        with pytest.raises(ValueError, match="not a memfd"):
            map_shared_memory(file.fileno(), HUGE)


def test_without_populate_memory_is_touched_in(monkeypatch):
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", 9999)  # as on kernels before 5.14
    private = private_memory(2 * HUGE)
    assert not np.frombuffer(private.view, np.uint8).any()
    shared, fd = shared_memory(HUGE)
    shared.view[0] = 3
    assert map_shared_memory(fd, HUGE).view[0] == 3
