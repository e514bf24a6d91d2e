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
    all_to_all: Name | None = None
    sendrecv: Name | None = None


class Algorithms(BaseModel):
    """Algorithms by group.

    ``tp`` tensor, ``cp`` context, ``ep`` expert and ``dp`` data parallel; ``etp`` the tensor groups of
    experts and ``edp`` the ranks that hold the same experts; ``shard`` the ranks that share one copy of what
    is sharded and ``hybrid`` those that hold the same shard of several copies; ``embedding`` the two copies of a
    tied embedding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: GroupAlgorithms | None = None
    cp: GroupAlgorithms | None = None
    ep: GroupAlgorithms | None = None
    etp: GroupAlgorithms | None = None
    dp: GroupAlgorithms | None = None
    edp: GroupAlgorithms | None = None
    shard: GroupAlgorithms | None = None
    hybrid: GroupAlgorithms | None = None
    embedding: GroupAlgorithms | None = None

    def of(self, group: str, op: str) -> str | None:
        """The algorithm named for an operation of a group; None where none is."""
        algorithms = getattr(self, group, None)
        return getattr(algorithms, op, None)
