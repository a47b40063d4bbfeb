"""Which segment is given up, and what never is."""

from kvdisk import layout
from kvdisk.commands import SegmentFile
from kvdisk.layout import SegmentHeader
from kvdisk.segments import Root, Segment, SegmentState, SegmentTable

ALIGNMENT = 4096


def table(*counts: int) -> SegmentTable:
    """A table with that many sealed segments a root, used in the order of their numbers."""
    made = SegmentTable(tuple(10 for _ in counts))
    number = 0
    for root, count in enumerate(counts):
        for _ in range(count):
            header = SegmentHeader(ALIGNMENT, 1 << 20, number + 100, 0, 0, bytes(32))
            segment = Segment(SegmentFile(root, number), SegmentState.SEALED, header, payload_bytes=100)
            segment.on_disk = header.sequence
            made.adopt(segment)
            made.touch(number)
            number += 1
    return made


def victim(made: SegmentTable, root: int = 0, live: dict[int, int] | None = None) -> int | None:
    found = made.victim(made.roots[root], dict.fromkeys(range(10), 100) if live is None else live)
    return None if found is None else found.file.number


def test_the_least_recently_used_goes_first() -> None:
    made = table(4)
    assert victim(made) == 0
    made.touch(0)
    assert victim(made) == 1


def test_dead_bytes_age_a_segment_and_one_without_live_ones_goes_first() -> None:
    made = table(4)
    assert victim(made, live={0: 100, 1: 100, 2: 5, 3: 100}) in (0, 2)
    assert victim(made, live={0: 100, 1: 100, 3: 100}) == 2
    made[0].last_used = made[1].last_used = 3
    assert victim(made, live={0: 10, 1: 100, 2: 100, 3: 100}) == 0


def test_many_segments_are_ranked_together_and_go_in_that_order() -> None:
    class Counting(dict[int, int]):
        looked_at = 0

        def get(self, *arguments: int) -> int:
            self.looked_at += 1
            return super().get(*arguments)

    made, live = table(320), Counting(dict.fromkeys(range(320), 100))
    gone = []
    for _ in range(20):
        found = made.victim(made.roots[0], live)
        assert found is not None
        found.state = SegmentState.OPENING
        gone.append(found.file.number)
    assert gone == list(range(20))
    assert live.looked_at == 320


def test_what_is_used_after_it_was_ranked_is_passed_over() -> None:
    made = table(64)
    live = dict.fromkeys(range(64), 100)
    assert victim(made, live=live) == 0
    made.touch(1)
    made[2].readers = 1
    assert victim(made, live=live) == 3


def test_a_segment_with_a_reader_or_writer_or_still_open_is_never_taken() -> None:
    made = table(4)
    made[0].readers = 1
    made[1].writers = 1
    made[2].state = SegmentState.OPEN
    assert victim(made) == 3
    made[3].state = SegmentState.LOST
    assert victim(made) is None


def test_older_versions_go_before_newer_ones_whatever_their_age() -> None:
    made = table(3)
    made[0].older.add(made[2].use)
    assert victim(made) == 2
    made[2].older.add(made[1].use)
    assert victim(made) == 1
    made[1].readers = 1
    assert victim(made) is None, "neither may go before it"
    made[1].readers = 0
    made[1].on_disk = 999  # recycled: its new header is on disk
    assert victim(made) == 2


def test_a_segment_about_to_be_recycled_still_holds_older_versions_until_its_header_is_written() -> None:
    made = table(3)
    made[0].older.add(made[1].use)
    use = made[1].use
    made[1].state = SegmentState.OPENING
    made[1].writers = 1
    made[1].header = SegmentHeader(ALIGNMENT, 1 << 20, 500, 0, 0, bytes(32))
    assert made.is_on_disk(use)
    assert victim(made) == 2
    made[1].on_disk = 500
    assert not made.is_on_disk(use)
    assert victim(made) == 0


def test_an_older_version_in_another_root_is_named_first() -> None:
    made = table(2, 2)
    made[0].older.add(made[3].use)
    assert victim(made) == 3


def test_segments_wait_for_older_ones_only_so_never_for_each_other() -> None:
    made = table(3)
    older, middle, newer = (made[n] for n in range(3))
    assert made.may_replace(newer, older.use)
    assert made.may_replace(middle, middle.use), "the later pack in it is the newer"
    assert not made.may_replace(older, newer.use)
    assert made.may_replace(older, None)
    newer.on_disk = 999  # recycled since
    assert made.may_replace(older, newer.use), "what is off the disk comes back nowhere"


def test_a_loop_found_on_a_disk_ends_all_the_same() -> None:
    made = table(2)
    made[0].older.add(made[1].use)
    made[1].older.add(made[0].use)
    assert victim(made) is not None


def test_numbers_are_never_used_twice_and_files_that_are_gone_are_forgotten() -> None:
    made = SegmentTable((3,))
    root: Root = made.roots[0]
    first, second = made.new_file(root), made.new_file(root)
    made.remove(second)
    assert made.new_file(root).file.number == 2
    assert [s.file.number for s in made] == [0, 2]
    assert len(made) == len(root.segments) == 2
    made.adopt(Segment(SegmentFile(0, 77), SegmentState.EMPTY))
    assert made.new_file(root).file.number == 78
    assert first.state is SegmentState.EMPTY


def test_packs_and_the_footer_they_will_need_always_fit() -> None:
    header = SegmentHeader(ALIGNMENT, 1 << 18, 1, 0, 0, bytes(32))
    segment = Segment(SegmentFile(0, 0), SegmentState.OPEN, header, tail=ALIGNMENT)
    while segment.room(layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES) >= 2 * ALIGNMENT:
        segment.tail += 2 * ALIGNMENT
        segment.raw_header_bytes += layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES
    assert segment.tail + layout.footer_bytes(segment.raw_header_bytes, ALIGNMENT) <= header.segment_bytes
