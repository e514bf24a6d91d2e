"""The kinds of value that the fields of a scenario take.

A whole number is a whole number: not ``8.0``, ``"8"`` or ``true``, which stand
for a slip more often than for 8 or 1.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StringConstraints, WithJsonSchema

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]

MOST_DEGREE = 1_000_000
Count = Annotated[int, Field(strict=True, ge=1, le=MOST_DEGREE)]
Extent = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Derived = Annotated[
    Extent,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 100_000_000}, {"type": "null"}]}),
]  # may be left out, and is a number once read
Flag = StrictBool
Text = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1, max_length=4000)]

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SCALED = re.compile(r"([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([KMBT]?)", re.ASCII)
_PLAIN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def parse_tokens(value: Any) -> float:
    """A number of tokens from a number or from text.

    >>> parse_tokens("20T"), parse_tokens("380 B"), parse_tokens("20e12")
    (20000000000000.0, 380000000000.0, 20000000000000.0)

    Raises:
        ValueError: If it is no positive, finite number of at most 1e18.
    """
    asked = "write it like 20e12, '20T' or '380B'"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a number of tokens; {asked}")
    scale = 1.0
    if isinstance(value, str):
        match = _SCALED.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{_short(value)} is not a number of tokens; {asked}")
        value, scale = re.sub("[_,]", "", match[1]), _SCALES[match[2]]
    elif isinstance(value, int) and value > 10**18:
        value = math.inf  # too big for a float, maybe; over the bound in any case
    tokens = float(value) * scale
    if not (math.isfinite(tokens) and 1 <= tokens <= 1e18):
        raise ValueError(f"tokens must be between 1 and 1e18, but it is {tokens:g}")
    return tokens


def parse_number(value: Any) -> float:
    """A number, also where YAML reads one as text (``1e-3`` without a point).

    >>> parse_number("1e-3")
    0.001

    Raises:
        ValueError: If it is no number.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{_short(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused by the bound, with its own message


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, bool, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


Tokens = Annotated[
    float,
    BeforeValidator(parse_tokens),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 1, "maximum": 1e18},
                {"type": "string", "pattern": r"^\s*[0-9][0-9_,.]*([eE][+-]?[0-9]+)?\s*[KMBT]?\s*$"},
            ],
            "description": "tokens of the whole training run: 20e12, '20T' or '380B'",
        }
    ),
]
Probability = Annotated[
    float,
    Field(ge=0.0, lt=1.0, allow_inf_nan=False),
    BeforeValidator(parse_number),
    WithJsonSchema({"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
]
Factor = Annotated[
    float,
    Field(ge=1.0, le=1000.0, allow_inf_nan=False),
    BeforeValidator(parse_number),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": 1000}),
]
Natural = Annotated[int, Field(strict=True, ge=0, le=MOST_DEGREE)]
BytesMoved = Annotated[float, Field(ge=0.0, le=1024.0, allow_inf_nan=False, strict=True)]
BytesEach = Annotated[float, Field(ge=0.0, le=64.0, allow_inf_nan=False, strict=True)]
