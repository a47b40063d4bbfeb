"""Rules of `kvdisk inspect`: it shows what recovery would find, changes nothing, and survives whatever it reads."""

import asyncio
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvdisk
from kvdisk import layout
from kvdisk.layout import ENTRY_DTYPE, Pack, SegmentHeader

pytest.importorskip("click")
pytest.importorskip("rich")
from click.testing import CliRunner

from kvdisk.cli.app import app
from kvdisk.cli.inspect import bytes_of
from kvdisk.cli.inspect_report import Inspector, Report
from kvdisk.cli.inspect_segments import STATES

ALIGNMENT = 4096
SEGMENT_BYTES = 1 << 20
FINGERPRINT = bytes(range(32))
NAMESPACE = f"ns-{FINGERPRINT.hex()[:32]}"


class Chunk(NamedTuple):
    key: bytes
    group: int = 0
    live_bytes: int = 5000
    position: int = 64


def segment(
    packs: list[list[Chunk]], *, sealed: bool = True, sequence: int = 1, epoch: int = 0, first_pack: int = 1
) -> bytearray:
    """A segment file of these packs, as the writer would have written it; payloads are zeros."""
    header = SegmentHeader(ALIGNMENT, SEGMENT_BYTES, sequence, 77, epoch, FINGERPRINT)
    raw = bytearray(SEGMENT_BYTES)
    raw[:ALIGNMENT] = layout.encode_segment_header(header)
    offset, headers = ALIGNMENT, []
    for number, chunks in enumerate(packs):
        entries = np.zeros(len(chunks), ENTRY_DTYPE)
        at = header_bytes = layout.pack_header_bytes(len(chunks), ALIGNMENT)
        for entry, chunk in zip(entries, chunks, strict=True):
            stored = -(-chunk.live_bytes // ALIGNMENT) * ALIGNMENT
            entry["key"], entry["key_bytes"] = chunk.key.ljust(64, b"\0"), len(chunk.key)
            entry["group"], entry["position"] = chunk.group, chunk.position
            entry["offset"], entry["stored_bytes"], entry["live_bytes"] = at, stored, chunk.live_bytes
            at += stored
        pack = Pack(offset, header_bytes, at, first_pack + number, entries)
        headers.append(layout.encode_pack(pack, header))
        raw[offset : offset + len(headers[-1])] = headers[-1]
        offset += at
    if sealed:
        footer = layout.encode_footer(headers, header)
        raw[-len(footer) :] = footer
    return raw


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def place(root: Path, *segments: bytes | bytearray, instance: str = "dp0") -> Path:
    """An instance directory with these segment files."""
    directory = root / NAMESPACE / instance
    directory.mkdir(parents=True, exist_ok=True)
    for number, raw in enumerate(segments):
        (directory / f"{number:08d}.seg").write_bytes(raw)
    return directory


def look(path: Path) -> Report:
    return Inspector().inspect(str(path))


def command(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def only_instance(report: Report):
    return report.namespaces[0].instances[0]


def contents(root: Path) -> dict[str, object]:
    """Everything that could be changed: names, bytes, modes, times of change."""
    paths = [root, *sorted(root.rglob("*"))]
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_ctime_ns)
        + ((hashlib.sha256(path.read_bytes()).digest(),) if path.is_file() else ())
        for path in paths
    }


async def fill(root: Path, count: int = 40, size: int = 50_000) -> None:
    async with kvdisk.open(str(root), capacity="16MiB", arena_bytes="8MiB", segment_bytes="1MiB") as store:
        for number in range(count):
            await store.put(b"key %d" % number, os.urandom(size))
            await store.flush()


# ---- what it shows


def test_groups_and_bytes_are_those_that_were_written(root):
    place(
        root,
        segment([[Chunk(b"a", 0, 5000, 64), Chunk(b"b", 0, 5000, 128)], [Chunk(b"c", 7, 4096, 128)]]),
        segment([[Chunk(b"d", 7, 1, 256)]], sealed=False, sequence=2, first_pack=3),
    )
    instance = only_instance(look(root))
    rows = [
        (g.group, g.chunk_count, g.usable_count, g.live_bytes, g.stored_bytes, g.position_min, g.position_max)
        for g in instance.groups
    ]
    assert rows == [(0, 2, 2, 10_000, 16_384, 64, 128), (7, 2, 2, 4097, 8192, 128, 256)]
    assert [s.state for s in instance.segments] == ["sealed", "open"]
    sizes = bytes_of(instance)
    assert sizes == {
        "live": 14_097,
        "padding": 16_384 + 8192 - 14_097,
        "stale": 0,
        "headers": 4096 + 2 * 4096 + 4096 + 4096 + 4096,  # segment, packs, footer; segment, pack
        "gaps": 0,
        "tails": 2 * SEGMENT_BYTES - 16_384 - 8192 - 6 * 4096,
        "other": 0,
        "files": 2 * SEGMENT_BYTES,
    }
    exit_code, shown = command(root)
    assert exit_code == 0
    assert "1.6384" in shown
    assert "1 sealed, 1 open" in shown


def test_of_a_key_that_was_written_twice_one_chunk_is_usable(root):
    place(root, segment([[Chunk(b"a"), Chunk(b"b")]]), segment([[Chunk(b"a")]], sequence=2, first_pack=9))
    (group,) = only_instance(look(root)).groups
    assert (group.chunk_count, group.usable_count) == (3, 2)


def test_chunks_of_an_earlier_epoch_are_stale_bytes(root):
    place(root, segment([[Chunk(b"a")]]), segment([[Chunk(b"b")]], sequence=2, epoch=5))
    instance = only_instance(look(root))
    assert [g.chunk_count for g in instance.groups] == [1]
    assert bytes_of(instance)["stale"] == 8192


def test_an_open_segment_in_a_recycled_file_says_so(root):
    raw = segment([[Chunk(b"old")], [Chunk(b"older")]], sealed=False)
    raw[: 3 * ALIGNMENT + 4096] = segment([[Chunk(b"new", 0, 4096)]], sealed=False, sequence=8)[: 3 * ALIGNMENT + 4096]
    new = segment([[Chunk(b"new", 0, 8192)]], sealed=False, sequence=8)
    raw[: 4 * ALIGNMENT] = new[: 4 * ALIGNMENT]
    place(root, raw)
    one = only_instance(look(root)).segments[0]
    assert (one.state, one.sequence, one.has_remains) == ("open", 8, True)


def test_the_figures_are_those_of_a_store_that_opens_the_directory(root):
    asyncio.run(fill(root))
    instance = only_instance(look(root))

    async def found() -> int:
        async with kvdisk.open(str(root), capacity="16MiB", arena_bytes="8MiB", segment_bytes="1MiB") as store:
            return int(store.stats()["chunks_on_disk"])

    assert sum(g.usable_count for g in instance.groups) == asyncio.run(found()) > 0
    assert instance.groups[0].live_bytes == 50_000 * instance.groups[0].chunk_count


def test_a_namespace_and_an_instance_can_be_named_too(root):
    directory = place(root, segment([[Chunk(b"a")]]))
    place(root, segment([[Chunk(b"b")]]), instance="dp1")
    assert len(look(root).namespaces[0].instances) == 2
    assert len(look(root / NAMESPACE).namespaces[0].instances) == 2
    assert [i.path for i in look(directory).namespaces[0].instances] == [str(directory)]


def test_an_empty_root_is_no_damage(root):
    exit_code, shown = command(root)
    assert exit_code == 0
    assert "0 namespaces" in shown


def test_json_has_everything_that_is_shown(root):
    asyncio.run(fill(root, count=3))
    exit_code, shown = command(root, "--json")
    found = json.loads(shown)
    assert exit_code == 0
    assert found["kvdisk inspect"] == {"schema": 1}
    (namespace,) = found["namespaces"]
    assert namespace["identity"]["api"] == "library"
    assert namespace["identity_matches"] is True
    (instance,) = namespace["instances"]
    assert instance["owner"] == "closed"
    assert instance["groups"][0]["stored_over_live"] == pytest.approx(53_248 / 50_000)
    assert instance["bytes"]["files"] == sum(s["file_bytes"] for s in instance["segments"])
    assert sum(instance["segment_states"].values()) == len(instance["segments"])


def test_the_document_names_exactly_the_fields_of_the_json(root):
    asyncio.run(fill(root, count=3))
    found = json.loads(command(root, "--json")[1])
    namespace = found["namespaces"][0]
    instance = namespace["instances"][0]
    objects = {
        "a namespace": namespace,
        "an instance": instance,
        "a group": instance["groups"][0],
        "a segment": instance["segments"][0],
    }
    document = (Path(__file__).parent.parent / "docs" / "inspect.md").read_text()
    for what, one in objects.items():
        fields = document.split(f"| {what} | ", 1)[1].split(" |\n", 1)[0]
        fields = re.sub(r"\(.*?\)", "", fields)
        assert set(re.findall(r"`([a-z_]+)`", fields)) == set(one), what
    for name in instance["bytes"]:
        assert name == "files" or f"| `{name}` |" in document
    for state in STATES:
        assert f"| `{state}` |" in document


def test_bytes_in_use_are_counted_by_blocks_as_the_cap_counts_them(root):
    asyncio.run(fill(root, count=3))
    paths = [root, *root.rglob("*")]
    assert look(root).used_bytes == sum(path.lstat().st_blocks * 512 for path in paths)


# ---- it only looks


def test_nothing_is_written_locked_or_created(root, monkeypatch):
    asyncio.run(fill(root, count=3))
    before = contents(root)
    real_open = os.open

    def checked(path, flags, *more, **named):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC), path
        return real_open(path, flags, *more, **named)

    def refused(*_):
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(os, "open", checked)
    monkeypatch.setattr(fcntl, "flock", refused)
    look(root)
    assert contents(root) == before


def test_beside_a_running_store_it_sees_the_owner_and_both_go_on(root):
    async def run() -> None:
        async with kvdisk.open(str(root), capacity="16MiB", arena_bytes="8MiB", segment_bytes="1MiB") as store:
            for number in range(60):
                await store.put(b"key %d" % number, os.urandom(50_000))
                if number % 10 == 9:
                    report = await asyncio.to_thread(look, root)
                    instance = only_instance(report)
                    assert (instance.owner, instance.pid) == ("alive", os.getpid())
                    assert instance.granted_bytes > 0
                    assert report.all_problems == []
            assert await store.flush()
            exit_code, shown = await asyncio.to_thread(command, root)
            assert exit_code == 0
            assert f"a server (pid {os.getpid()}) has it open" in shown

    asyncio.run(run())
    assert only_instance(look(root)).owner == "closed"


def test_a_killed_owner_is_told_from_one_that_closed(root):
    script = (
        "import asyncio, os, kvdisk\n"
        "async def main():\n"
        f"    async with kvdisk.open({str(root)!r}, capacity='16MiB', arena_bytes='8MiB', segment_bytes='1MiB'):\n"
        "        os._exit(0)\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert only_instance(look(root)).owner == "ended"


# ---- damage


def damaged_footer(raw: bytearray) -> bytearray:
    raw[-100] ^= 1
    return raw


def damaged_header(raw: bytearray) -> bytearray:
    raw[20] ^= 1
    return raw


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (damaged_footer, "footer"),
        (damaged_header, "no valid segment header"),
        (lambda raw: raw[:-4096], "cut off"),
        (lambda raw: raw[:100], "no valid segment header"),
        (lambda raw: raw[:4096], "cut off"),
    ],
    ids=["footer", "header", "end is missing", "a stump", "header only"],
)
def test_damage_is_named_and_the_exit_status_says_so(root, spoil, words):
    sealed = segment([[Chunk(b"a"), Chunk(b"b")]])
    if spoil(bytearray(sealed))[:100] == sealed[:100] and len(spoil(bytearray(sealed))) == 100:
        sealed[50] ^= 1  # a stump of a whole header is a whole header
    place(root, segment([[Chunk(b"c")]], sequence=2, first_pack=5), spoil(bytearray(sealed)))
    report = look(root)
    assert [s.state for s in only_instance(report).segments] == ["sealed", "damaged"]
    assert words in report.all_problems[0]
    assert "00000001.seg" in report.all_problems[0]
    exit_code, shown = command(root)
    assert exit_code == 1
    assert "damaged:" in shown
    assert "1 sealed, 1 damaged" in shown


def test_packs_before_a_damaged_footer_are_still_shown(root):
    place(root, damaged_footer(segment([[Chunk(b"a"), Chunk(b"b")]])))
    assert only_instance(look(root)).groups[0].usable_count == 2


def test_a_torn_tail_and_a_lost_write_are_no_damage(root):
    raw = segment([[Chunk(b"a")], [Chunk(b"b")], [Chunk(b"c")]], sealed=False)
    raw[4 * ALIGNMENT + 200] ^= 1  # the second of three packs never came
    place(root, raw)
    report = look(root)
    (one,) = only_instance(report).segments
    assert (one.state, one.pack_count, one.gap_bytes) == ("open", 2, 3 * ALIGNMENT)
    assert report.all_problems == []


def test_a_disk_that_does_not_read_is_unreadable_not_fatal(root, monkeypatch):
    place(root, segment([[Chunk(b"a")]]), segment([[Chunk(b"b")]], sequence=2))
    real = os.preadv

    def failing(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("00000001.seg"):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    report = look(root)
    assert [s.state for s in only_instance(report).segments] == ["sealed", "unreadable"]
    assert "Input/output error" in report.all_problems[0]


@pytest.mark.parametrize(
    "raw", [b"x", b"KVDepoc\n" + bytes(5000), layout.encode_epoch(layout.EpochRecord(3, 1)) + b"x"]
)
def test_a_damaged_epoch_is_damage(root, raw):
    place(root, segment([[Chunk(b"a")]]))
    (root / NAMESPACE / "epoch").write_bytes(raw)
    assert "epoch" in look(root).all_problems[0]
    assert command(root)[0] == 1


def test_a_segment_of_another_namespace_is_other_and_no_damage(root):
    place(root, segment([[Chunk(b"a")]]), bytes(SEGMENT_BYTES))
    (root / NAMESPACE).rename(root / "ns-00000000000000000000000000000000")
    report = look(root)
    assert [s.state for s in only_instance(report).segments] == ["other", "empty"]
    assert report.all_problems == []


# ---- strangers


def test_links_pipes_and_foreign_files_are_named_and_left_alone(root, tmp_path):
    directory = place(root, segment([[Chunk(b"a")]]))
    secret = tmp_path / "secret.seg"
    secret.write_bytes(segment([[Chunk(b"secret")]]))
    (directory / "00000005.seg").symlink_to(secret)
    os.mkfifo(directory / "00000006.seg")
    (directory / "00000007.seg").mkdir()
    (directory / "notes.txt").write_text("mine")
    (root / NAMESPACE / "namespace.json").symlink_to(secret)
    os.mkfifo(root / NAMESPACE / "epoch")
    os.mkfifo(root / "kvdisk.ledger")
    (root / "ns-00000000000000000000000000000001").symlink_to(root / NAMESPACE)
    (root / "README").write_text("hello")
    (directory / "lock").symlink_to(secret)
    report = look(root)
    instance = only_instance(report)
    assert instance.foreign == ["00000005.seg", "00000006.seg", "00000007.seg", "notes.txt"]
    assert report.foreign == ["README", "ns-00000000000000000000000000000001"]
    assert [g.chunk_count for g in instance.groups] == [1]
    assert instance.owner == "unknown"
    assert "not kvdisk's" in command(root)[1]


def test_what_strangers_wrote_cannot_control_the_terminal(root):
    directory = place(root, segment([[Chunk(b"a")]]))
    (directory / "evil\x1b[2Jname\n[bold]").write_text("")
    identity = {"facts": {"model": "x\x1b]0;owned\x07[red]y\u202e"}, "ranks": ["a"]}
    (root / NAMESPACE / "namespace.json").write_text(json.dumps(identity))
    os.mkdir(os.fsencode(root) + b"/\xff\xfe")
    _, shown = command(root)
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert "[red]y" in shown
    assert "evil\\x1b" in shown
    json.loads(command(root, "--json")[1])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 100_000, '{"a":' * 100_000, '{"facts": 5, "ranks": 7}', '{"model": NaN}', "\ud800"],
)
def test_a_strange_namespace_json_is_only_not_shown(root, text):
    place(root, segment([[Chunk(b"a")]]))
    (root / NAMESPACE / "namespace.json").write_text(text, errors="surrogatepass")
    assert command(root)[0] == 0


@pytest.mark.parametrize("text", ["x", "{}", '{"grants": 5}', '{"grants": {"ns-0/dp0": {"bytes": 1e999, "pid": 1}}}'])
def test_a_damaged_ledger_is_said(root, text):
    (root / "kvdisk.ledger").write_text(text)
    assert "kvdisk.ledger" in look(root).all_problems[0]


def test_an_impossible_grant_is_shown_bounded(root):
    place(root, segment([[Chunk(b"a")]]))
    grants = {"grants": {f"{NAMESPACE}/dp0": {"bytes": 10**400, "pid": 1}}}
    (root / "kvdisk.ledger").write_text(json.dumps(grants))
    assert command(root)[0] == 0


def sparse(root: Path, header: SegmentHeader, *patches: tuple[int, bytes]) -> None:
    directory = place(root)
    with (directory / "00000000.seg").open("wb") as file:
        file.truncate(header.segment_bytes)
        file.write(layout.encode_segment_header(header))
        for offset, raw in patches:
            file.seek(offset)
            file.write(raw)


def test_headers_with_huge_counts_cost_bounded_memory_and_time(root, monkeypatch):
    """A footer that claims most of the file, and block after block a pack header that claims a million chunks."""
    header = SegmentHeader(ALIGNMENT, 1 << 30, 1, 77, 0, FINGERPRINT)
    footer = layout._FOOTER.pack(b"KVDfoot\n", 1, 1 << 30, 15 << 26, 1, 77, 0)
    for count in (layout.ENTRY_COUNT_MAX, 15_000):
        pack = (b"KVDpack\n", 1, count, 1 << 28, 0, 1 << 29, 1, 1, 77, ALIGNMENT, FINGERPRINT, bytes(24), 0)
        claims = [(ALIGNMENT * (1 + i), layout._PACK.pack(*pack)) for i in range(1000)]
        sparse(root, header, *claims, (header.segment_bytes - len(footer), footer))
        real, read = os.preadv, []

        def counted(fd, buffers, offset, real=real, read=read):
            read.append(real(fd, buffers, offset))
            return read[-1]

        monkeypatch.setattr(os, "preadv", counted)
        report = look(root)
        monkeypatch.setattr(os, "preadv", real)
        assert only_instance(report).segments[0].state == "damaged"
        assert max(read) <= 1 << 26
        assert sum(read) <= 6 << 30


@pytest.mark.parametrize(
    "header",
    [
        SegmentHeader(ALIGNMENT, 1 << 47, 1, 77, 0, FINGERPRINT),
        SegmentHeader(1 << 31, 1 << 33, 1, 77, 0, FINGERPRINT),
    ],
)
def test_impossible_sizes_under_a_valid_checksum_are_damage(root, header):
    raw = layout.encode_segment_header(header._replace(alignment=4096))
    fields = layout._SEGMENT.unpack_from(raw)
    unsigned = (*fields[:2], header.alignment, *fields[3:-1])
    raw = layout._SEGMENT.pack(*unsigned, layout.checksum(layout._SEGMENT.pack(*unsigned, 0)))
    place(root, raw + bytes(8192))
    report = look(root)
    assert only_instance(report).segments[0].state == "damaged"
    assert "impossible sizes" in report.all_problems[0]


GOOD = bytes(segment([[Chunk(b"a"), Chunk(b"b", 3)], [Chunk(b"c")]]))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 4 * 1024 - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, SEGMENT_BYTES),
    st.sampled_from([0, ALIGNMENT, 4 * ALIGNMENT, SEGMENT_BYTES - 4096]),
)
def test_no_bytes_on_disk_make_it_fail(tmp_path, patches, length, where):
    root = tmp_path / "root"
    raw = bytearray(GOOD)
    for at, value in patches:
        raw[where + at] = value
    place(root, raw[:length], GOOD)
    exit_code, _ = command(root)
    instance = only_instance(look(root))
    assert exit_code == (1 if any(s.state in ("damaged", "unreadable") for s in instance.segments) else 0)
    sizes = bytes_of(instance)
    assert sum(size for name, size in sizes.items() if name != "files") == sizes["files"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=9000), st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=9000))
def test_random_files_in_the_places_of_ours_do_not_make_it_fail(tmp_path, raw, ledger, identity, epoch):
    root = tmp_path / "root"
    directory = place(root, raw)
    (root / "kvdisk.ledger").write_bytes(ledger)
    (root / NAMESPACE / "namespace.json").write_bytes(identity)
    (root / NAMESPACE / "epoch").write_bytes(epoch)
    (directory / "lock").write_bytes(ledger)
    assert command(root)[0] in (0, 1)
