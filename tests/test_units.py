"""Sizes as operators write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.units import format_size, parse_size, round_up


@pytest.mark.parametrize("text, size", [
    ("4096", 4096), (" 8GiB ", 8 << 30), ("8 GiB", 8 << 30), ("1.5TB", 1_500_000_000_000), ("0.5KiB", 512),
    ("3k", 3072), ("2M", 2 << 20), ("1gb", 10**9), ("1T", 1 << 40), ("7b", 7), (0, 0), (123, 123), ("0", 0),
])  # fmt: skip
def test_sizes_mean_what_fio_and_iec_say(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", [
    "", "GiB", "-1", -1, "8 gallons", "1.2.3", "8GiBs", "1.0001KiB", "0x10", None, 1.5, True, [1], "1e9", "NaN", "8\n9",
    "9" * 21,
])  # fmt: skip
def test_what_is_no_size_is_refused_with_name_and_value(text: object) -> None:
    with pytest.raises(ValueError, match="disk_bytes_to_use=") as caught:
        parse_size(text, "disk_bytes_to_use")
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 60))
def test_formatted_sizes_parse_to_about_the_same(size: int) -> None:
    text = format_size(size)
    value, unit = text.split()
    assert abs(float(value) * parse_size(f"1{unit}") - size) <= size * 0.06


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 50, "1024 TiB")]
)
def test_formatted_sizes_are_short(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_rounding_up_is_the_smallest_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple
