"""Seconds of one pass of one micro-batch on one rank, by what they are spent on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class CommUse:
    """Collectives of one kind within a pass.

    Attributes:
        group: Who takes part: tp, cp, ep, dp, edp, shard or hybrid.
        op: The collective.
        bytes: What this rank sends for them.
        count: How many there are.
        busy_s: How long they last.
        exposed_s: How long nothing else goes on meanwhile.
    """

    group: str
    op: str
    bytes: float
    count: float
    busy_s: float
    exposed_s: float

    def __add__(self, other: CommUse) -> CommUse:
        """Both, which are of the same kind."""
        return replace(
            self,
            bytes=self.bytes + other.bytes,
            count=self.count + other.count,
            busy_s=self.busy_s + other.busy_s,
            exposed_s=self.exposed_s + other.exposed_s,
        )

    def times(self, count: float) -> CommUse:
        """So many of it."""
        return replace(
            self,
            bytes=count * self.bytes,
            count=count * self.count,
            busy_s=count * self.busy_s,
            exposed_s=count * self.exposed_s,
        )


def merged(uses: Iterable[CommUse]) -> tuple[CommUse, ...]:
    """One entry for each group and operation, in the order in which they came first."""
    found: dict[tuple[str, str], CommUse] = {}
    for use in uses:
        key = use.group, use.op
        found[key] = found[key] + use if key in found else use
    return tuple(found.values())


@dataclass(frozen=True)
class PassCost:
    """One forward or backward of one micro-batch on one rank; all seconds are exposed ones.

    Attributes:
        compute_s: The device's own work.
        recompute_s: Its work done a second time.
        tp_comm_s: Tensor-parallel collectives.
        cp_comm_s: Context-parallel ones.
        ep_comm_s: Tokens on their way to and from experts.
        dp_comm_s: Weights being gathered and gradients being reduced over replicas.
        gather_s: Gathering a message that came in pieces, one from each tensor rank.
        uses: All collectives of the pass.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0
    ep_comm_s: float = 0.0
    dp_comm_s: float = 0.0
    gather_s: float = 0.0
    uses: tuple[CommUse, ...] = ()

    @property
    def total_s(self) -> float:
        """The pass from start to end."""
        return float(sum(getattr(self, name) for name in _SECONDS))

    def __add__(self, other: PassCost) -> PassCost:
        seconds = {name: getattr(self, name) + getattr(other, name) for name in _SECONDS}
        return PassCost(**seconds, uses=merged((*self.uses, *other.uses)))

    def times(self, count: float) -> PassCost:
        """The pass of so many equal layers."""
        seconds = {name: count * getattr(self, name) for name in _SECONDS}
        return PassCost(**seconds, uses=tuple(use.times(count) for use in self.uses))


_SECONDS = tuple(field.name for field in fields(PassCost) if field.name != "uses")
