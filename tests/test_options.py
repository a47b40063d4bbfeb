"""Options: complete and right before anything touches a disk."""

from pathlib import Path
from typing import Any

import pytest

from kvdisk.layout import ALIGNMENT_MIN
from kvdisk.options import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, default_segment_bytes, parse_options

MIB = 1 << 20
GOOD = {"root_dir": "/mnt/kv", "disk_bytes_to_use": "800GiB", "cpu_bytes_to_use": "16GiB"}


def test_sizes_text_and_defaults() -> None:
    options = parse_options(GOOD)
    assert options.disk_bytes_to_use == 800 << 30
    assert options.segment_bytes == 256 * MIB
    assert options.root_dir == ("/mnt/kv",)
    assert (options.engine, options.io_timeout_s, options.namespace, options.allow_shared_root) == (
        "auto",
        30.0,
        "",
        False,
    )


def test_roots_are_one_or_several_paths_each_once(tmp_path: Path) -> None:
    assert parse_options({**GOOD, "root_dir": [tmp_path / "a", str(tmp_path / "b")]}).root_dir == (
        str(tmp_path.resolve() / "a"),
        str(tmp_path.resolve() / "b"),
    )
    (tmp_path / "link").symlink_to(tmp_path)
    for roots in (["/a", "/a/"], [str(tmp_path), str(tmp_path / "link")]):
        with pytest.raises(ValueError, match="twice"):
            parse_options({**GOOD, "root_dir": roots})


@pytest.mark.parametrize("missing", list(GOOD))
def test_what_is_required_is_asked_for_with_an_example(missing: str) -> None:
    for value in (None, ""):
        with pytest.raises(ValueError, match=f"{missing} is required.*'"):
            parse_options({**GOOD, missing: value})
    with pytest.raises(ValueError, match=f"{missing} is required"):
        parse_options({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize("name, value", [
    ("root_dir", 7), ("root_dir", ["/a", ""]), ("root_dir", [None]), ("disk_bytes_to_use", "much"),
    ("disk_bytes_to_use", -5), ("cpu_bytes_to_use", 1000), ("cpu_bytes_to_use", True),

    ("segment_bytes", SEGMENT_BYTES_MIN - 1),
    ("segment_bytes", SEGMENT_BYTES_MAX + 1), ("engine", "libaio"), ("engine", None.__class__), ("io_timeout_s", 0),
    ("io_timeout_s", float("nan")), ("io_timeout_s", float("inf")), ("io_timeout_s", "30"), ("io_timeout_s", True),
    ("namespace", "../x"), ("namespace", "/x"), ("namespace", "a\nb"), ("namespace", "x" * 257), ("namespace", 3),
    ("allow_shared_root", "perhaps"), ("allow_shared_root", 1),
], ids=repr)  # fmt: skip
def test_an_impossible_value_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=") as caught:
        parse_options({**GOOD, name: value})
    assert repr(value) in str(caught.value)


def test_an_unknown_option_is_refused_with_the_nearest_and_all_valid_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"'disk_byte'.*did you mean disk_bytes_to_use.*cpu_bytes_to_use, data_plane, disk_bytes_to_use",
    ):
        parse_options({**GOOD, "disk_byte": 1})


@pytest.mark.parametrize("root_bytes", [0, 3 * MIB, 100 * MIB, 1 << 30, 1 << 40])
def test_default_segments_are_a_small_share_of_a_small_root(root_bytes: int) -> None:
    size = default_segment_bytes(root_bytes)
    assert size % ALIGNMENT_MIN == 0
    assert MIB <= size <= 256 * MIB
    assert size <= max(MIB, root_bytes // 20)


def test_a_segment_size_is_rounded_to_alignments_of_up_to_64_kib() -> None:
    assert parse_options({**GOOD, "segment_bytes": MIB + 1}).segment_bytes == MIB + 65536
