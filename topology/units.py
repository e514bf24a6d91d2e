"""Text with a unit in, SI floats out, and back again for people.

Inside the project every quantity is a plain float in seconds, bytes, FLOP or
their rates. Text comes in here, and a number without its unit is refused, so
that nobody mistakes bits for bytes.
"""

from __future__ import annotations

import math
import re
import reprlib
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BANDWIDTH = (
    {f"{prefix}B/s": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
    | {f"{prefix}b/s": factor / 8 for prefix, factor in _DECIMAL.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()}
)
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FLOP_RATE = {f"{prefix}{flop}": f for prefix, f in _DECIMAL.items() for flop in ("FLOP/s", "FLOPS", "flop/s")}
_POWER = {f"{prefix}W": factor for prefix, factor in _DECIMAL.items()}

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")


_MOST_CHARACTERS = 100


def _parse(what: str, text: Any, units: dict[str, float], example: str) -> float:
    if not isinstance(text, str):
        raise ValueError(f"{what} {reprlib.repr(text)} has no unit; write it like {example}")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{what} of {len(text)} characters is not a number with a unit; write it like {example}")
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{what} {text!r} is not a number with a unit; write it like {example}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{what} {text!r} has no unit; write it like {example}")
    if unit not in units:
        raise ValueError(f"{what} {text!r} has an unknown unit {unit!r}; write it like {example}")
    value = float(number.replace("_", "")) * units[unit]
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what} {text!r} must be finite and not negative")
    return value


def size(text: Any) -> float:
    """Bytes from text.

    >>> size("64 GiB")
    68719476736.0
    """
    return _parse("size", text, _BYTES, "'64 GiB' or '64 GB'")


def bandwidth(text: Any) -> float:
    """Bytes per second, one direction, from text.

    >>> bandwidth("200 Gb/s")
    25000000000.0
    >>> bandwidth("200")
    Traceback (most recent call last):
    ValueError: bandwidth '200' has no unit; write it like '200 Gb/s' or '25 GB/s'
    """
    return _parse("bandwidth", text, _BANDWIDTH, "'200 Gb/s' or '25 GB/s'")


def duration(text: Any) -> float:
    """Seconds from text.

    >>> duration("2.5 ms")
    0.0025
    """
    return _parse("duration", text, _TIME, "'2 us' or '12 h'")


def flop_rate(text: Any) -> float:
    """FLOP per second from text.

    >>> flop_rate("191.5 TFLOP/s")
    191500000000000.0
    """
    return _parse("rate", text, _FLOP_RATE, "'191.5 TFLOP/s'")


def power(text: Any) -> float:
    """Watts from text.

    >>> power("2.73 kW")
    2730.0
    """
    return _parse("power", text, _POWER, "'560 W'")


def _text_schema(pattern_example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "description": f"a number with its unit, such as {pattern_example}"})


Bytes = Annotated[float, BeforeValidator(size), _text_schema("64 GiB")]
BytesPerSecond = Annotated[float, BeforeValidator(bandwidth), _text_schema("200 Gb/s")]
Seconds = Annotated[float, BeforeValidator(duration), _text_schema("2 us")]
FlopPerSecond = Annotated[float, BeforeValidator(flop_rate), _text_schema("191.5 TFLOP/s")]
Watts = Annotated[float, BeforeValidator(power), _text_schema("560 W")]


def _scaled(value: float, steps: list[tuple[float, str]], digits: int) -> str:
    if not math.isfinite(value):
        return str(value)
    for factor, unit in steps:
        if abs(value) >= factor:
            return f"{value / factor:,.{digits}f} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:,.{digits}f} {unit}"


def format_bytes(value: float, digits: int = 1) -> str:
    """Bytes for people.

    >>> format_bytes(48803 * 2**20)
    '47.7 GiB'
    """
    steps = [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")]
    return _scaled(value, steps, digits)


def format_duration(value: float, digits: int = 2) -> str:
    """Seconds for people.

    >>> format_duration(0.00129)
    '1.29 ms'
    >>> format_duration(854.2)
    '854.20 s'
    """
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")], digits)


def format_bandwidth(value: float, digits: int = 1) -> str:
    """Bytes per second for people.

    >>> format_bandwidth(25e9)
    '25.0 GB/s'
    """
    return _scaled(value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")], digits)


def format_flop_rate(value: float, digits: int = 1) -> str:
    """FLOP per second for people.

    >>> format_flop_rate(61.2e12)
    '61.2 TFLOP/s'
    """
    steps = [(1e18, "EFLOP/s"), (1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")]
    return _scaled(value, steps, digits)


def plural(word: str) -> str:
    """Several of what a word names.

    >>> plural("GPU"), plural("process")
    ('GPUs', 'processes')
    """
    return word + ("es" if word.endswith("s") else "s")
