"""Which algorithm a collective runs, where the question names one."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]


class GroupAlgorithms(BaseModel):
    """Algorithms of one group's operations; the library chooses for those left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all_reduce: Name | None = None
    all_gather: Name | None = None
    reduce_scatter: Name | None = None


class Algorithms(BaseModel):
    """Algorithms by group: tensor parallel, data parallel, and the two copies of a tied embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: GroupAlgorithms | None = None
    dp: GroupAlgorithms | None = None
    embedding: GroupAlgorithms | None = None

    def of(self, group: str, op: str) -> str | None:
        """The algorithm named for an operation of a group; None where none is."""
        algorithms = getattr(self, group, None)
        return getattr(algorithms, op, None)
