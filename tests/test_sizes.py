"""Amounts of memory as text and as bytes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mucudnn.errors import SizeError
from mucudnn.sizes import format_bytes, format_exactly, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0B", 0),
        ("0", 0),
        ("1B", 1),
        ("512KB", 512_000),
        ("512KiB", 524_288),
        ("64MiB", 67_108_864),
        ("1.5GiB", 1_610_612_736),
        ("2GB", 2_000_000_000),
        ("1TiB", 1_099_511_627_776),
        ("  64 mib ", 67_108_864),
        ("+3KB", 3_000),
    ],
)
def test_a_number_with_a_unit_is_read_in_that_unit(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


def test_numpys_int_is_a_number_of_bytes() -> None:
    assert type(parse_bytes(np.int64(1 << 24))) is int  # type: ignore[arg-type]
    assert parse_bytes(np.int64(1 << 24)) == 1 << 24  # type: ignore[arg-type]


def test_an_int_is_a_number_of_bytes() -> None:
    assert parse_bytes(64) == 64


def test_a_fraction_of_a_byte_is_rounded_down() -> None:
    assert parse_bytes("0.0019KB") == 1


def test_a_decimal_fraction_is_exact() -> None:
    assert parse_bytes("1.1TB") == 1_100_000_000_000


def test_a_bare_number_in_a_string_lists_the_units() -> None:
    with pytest.raises(SizeError, match=r"must name its unit \(B, KB, .*, TiB\), but got '64'.*'64MiB'"):
        parse_bytes("64")


@pytest.mark.parametrize(
    ("text", "meant"), [("16M", "16MiB"), ("+1.5 g", "1.5GiB"), ("3k", "3KiB"), ("1T", "1TiB")]
)
def test_half_a_unit_is_guessed(text: str, meant: str) -> None:
    with pytest.raises(SizeError, match=rf"A unit must be one of B, .*; did you mean '{meant}'\?$"):
        parse_bytes(text)


def test_an_unknown_unit_lists_the_units() -> None:
    with pytest.raises(
        SizeError, match=r"one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, but got 'MBit' in '64 MBit'\.$"
    ):
        parse_bytes("64 MBit")


@pytest.mark.parametrize("size", [-1, "-1B", "-0.5B"])
def test_a_negative_size_is_refused(size: int | str) -> None:
    with pytest.raises(SizeError, match="must not be negative"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [2**63, 10**400, f"{2**43}MiB", "9" * 5000 + "B"])
def test_more_than_any_machine_has_is_refused(size: int | str) -> None:
    with pytest.raises(SizeError, match="must be at most 9223372036854775807 bytes"):
        parse_bytes(size)


def test_the_largest_size_is_read() -> None:
    assert parse_bytes(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("text", ["", "MiB", "1e3MB", "64 Mi B", "nanMB", "1,5GiB", ".5GiB"])
def test_what_is_no_number_with_a_unit_is_refused(text: str) -> None:
    with pytest.raises(SizeError, match="must be a number with a unit"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [True, 1.5, None, b"64MiB"])
def test_what_is_neither_int_nor_string_is_refused(size: object) -> None:
    with pytest.raises(SizeError, match="must be an int of bytes or a string"):
        parse_bytes(size)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64 MiB"),
        (2**20 - 1, "1 MiB"),
        (2**20 - 100, "0.9999 MiB"),
        (1023 * 2**10, "1023 KiB"),
        (2**30 - 1, "1 GiB"),
        (-(2**30) + 1, "-1 GiB"),
        (10_000 * 2**40, "10000 TiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_fitting_unit(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes (0 MiB)"),
        (32, "32 bytes (< 0.0001 MiB)"),
        (64, "64 bytes (0.0001 MiB)"),
        (16_780_000, "16780000 bytes (16.0027 MiB)"),
        (16 * 2**30, "17179869184 bytes (16384 MiB)"),
    ],
)
def test_messages_tell_bytes_and_mib(n_bytes: int, text: str) -> None:
    assert format_exactly(n_bytes) == text


@given(st.integers(min_value=0, max_value=2**50))
@example(10_542)  # both roundings at once
def test_what_is_shown_can_be_read_to_four_digits(n_bytes: int) -> None:
    half_a_digit = n_bytes * 5e-4
    assert abs(parse_bytes(format_bytes(n_bytes)) - n_bytes) <= half_a_digit + 1  # read is rounded down
