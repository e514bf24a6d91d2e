"""Text with a unit in, SI floats out; what has no unit, or no sense, is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.topology.units import (
    bandwidth,
    duration,
    flop_rate,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_flop_rate,
    power,
    size,
)

PARSERS = {"size": size, "bandwidth": bandwidth, "duration": duration, "rate": flop_rate, "power": power}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (size, "64 GB", 64e9),
        (size, "64GiB", 64 * 2**30),
        (size, " 30739333120 B ", 30_739_333_120),
        (size, "1_000 kB", 1e6),
        (size, "0 B", 0),
        (bandwidth, "200 Gb/s", 25e9),
        (bandwidth, "25 GB/s", 25e9),
        (bandwidth, "1.6 TB/s", 1.6e12),
        (bandwidth, "8 bit/s", 1),
        (duration, "2.5 us", 2.5e-6),
        (duration, "2 µs", 2e-6),
        (duration, "12 h", 43_200),
        (flop_rate, "191.5 TFLOP/s", 191.5e12),
        (flop_rate, "1.102 EFLOPS", 1.102e18),
        (power, "2.73 kW", 2730),
    ],
)
def test_a_number_with_its_unit_becomes_si(parse, text, value):
    assert parse(text) == pytest.approx(value)


def test_bits_are_an_eighth_of_bytes_and_gibi_is_more_than_giga():
    assert bandwidth("8 Gb/s") == bandwidth("1 GB/s")
    assert size("1 GiB") / size("1 GB") == pytest.approx(1.0737, abs=1e-4)


@pytest.mark.parametrize("what", PARSERS)
@pytest.mark.parametrize("bare", ["200", "1e9", 200, 64.0, True, None, ["200 GB"], {"value": 1}])
def test_a_bare_number_is_refused_with_an_example(what, bare):
    with pytest.raises(ValueError, match="write it like '"):
        PARSERS[what](bare)


@pytest.mark.parametrize("what", PARSERS)
@pytest.mark.parametrize(
    "text", ["", " ", "GB", "nan GB", "inf s", "64 64 GB", "64 parsecs", "1..5 GB", "0x10 B", "--1 s"]
)
def test_what_is_no_quantity_is_refused(what, text):
    with pytest.raises(ValueError, match=what):
        PARSERS[what](text)


@pytest.mark.parametrize("text", ["-1 GB", "1e400 GB", f"{'9' * 95} EB"[:99], "1e308 GB"])
def test_a_negative_or_boundless_quantity_is_refused(text):
    if text.startswith("9"):
        assert math.isfinite(size(text))  # long, but a number
    else:
        with pytest.raises(ValueError, match="must be finite and not negative"):
            size(text)


def test_a_very_long_text_is_refused_at_once_and_not_repeated():
    with pytest.raises(ValueError, match="of 2000002 characters") as caught:
        size("1" + " " * 2_000_000 + "x")
    assert len(str(caught.value)) < 200


def test_a_unit_of_another_kind_is_unknown():
    with pytest.raises(ValueError, match=r"unknown unit 'GB'; write it like '200 Gb/s'"):
        bandwidth("25 GB")


@given(st.text(max_size=120))
def test_any_text_gives_a_finite_quantity_or_a_value_error(text):
    for parse in PARSERS.values():
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.floats(min_value=1, max_value=2**52))
def test_bytes_survive_being_written_and_read(value):
    assert size(format_bytes(value, digits=12).replace(",", "")) == pytest.approx(value, rel=1e-9)


def test_people_see_the_largest_unit_that_fits():
    assert format_bytes(0) == "0.0 B"
    assert format_bytes(64 * 2**30) == "64.0 GiB"
    assert format_duration(1.5e-6) == "1.50 us"
    assert format_bandwidth(12.5e9) == "12.5 GB/s"
    assert format_flop_rate(1.102e18) == "1.1 EFLOP/s"
    assert format_bytes(math.inf) == "inf"
