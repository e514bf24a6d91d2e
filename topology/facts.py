"""A figure and where it was read: no figure of a machine stands without its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .units import Bytes, BytesPerSecond, FlopPerSecond, Seconds, Watts

ASSUMED = "assumed"
"""The source of a guess; its note says what the guess rests on."""

ValueT = TypeVar("ValueT")

Count = Annotated[int, Field(strict=True, gt=0, le=10**9)]


class Entry(BaseModel):
    """What every part of a machine file is: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(Entry, Generic[ValueT]):
    """One figure with its source.

    >>> SizeFact.model_validate({"value": "64 GiB", "source": "rocm-gpu-specs"}).value
    68719476736.0
    """

    value: ValueT
    source: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="a key of docs/sources.md, or 'assumed'")
    at: str | None = Field(default=None, description="where in the source: a section, a table, a figure")
    note: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_not_bare(cls, data: Any) -> Any:
        if not isinstance(data, (Mapping, Fact)):
            raise ValueError("a figure needs its source; write it like {value: 64 GB, source: olcf-frontier-guide}")
        return data

    @model_validator(mode="after")
    def _says_why_it_is_assumed(self) -> Fact[ValueT]:
        if self.assumed and not self.note:
            raise ValueError("an assumed figure needs a note that says what it rests on")
        return self

    @property
    def assumed(self) -> bool:
        """Whether this is a guess rather than something read."""
        return self.source == ASSUMED


# The kinds of fact have names of their own because a JSON Schema shows them.


class CountFact(Fact[Count]):
    """How many there are."""


class SizeFact(Fact[Annotated[Bytes, Field(gt=0)]]):
    """Bytes of memory."""


class BandwidthFact(Fact[Annotated[BytesPerSecond, Field(gt=0)]]):
    """Bytes per second, one direction."""


class PeakFact(Fact[Annotated[FlopPerSecond, Field(gt=0)]]):
    """Most FLOP per second."""


class PowerFact(Fact[Annotated[Watts, Field(gt=0)]]):
    """Electrical power."""


class LatencyFact(Fact[Seconds]):
    """Seconds that a message takes however small it is."""


class RatioFact(Fact[Annotated[float, Field(ge=1, le=1000)]]):
    """How many times one thing is another."""


class FlagFact(Fact[Annotated[bool, Field(strict=True)]]):
    """Whether something is so."""


def facts_in(part: Any, path: str = "") -> Iterator[tuple[str, Fact[Any]]]:
    """Every fact below a part of a machine, with its dotted path, in the order of the file."""
    if isinstance(part, Fact):
        yield path, part
    elif isinstance(part, BaseModel):
        for name, field in type(part).model_fields.items():
            key = field.alias or name
            yield from facts_in(getattr(part, name), f"{path}.{key}" if path else key)
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from facts_in(value, f"{path}.{key}")
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for index, value in enumerate(part):
            yield from facts_in(value, f"{path}.{index}")
