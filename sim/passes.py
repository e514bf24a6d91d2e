"""What one forward or backward takes, by what it is spent on, and what it sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..scenarios.model import RankParameters


@dataclass(frozen=True, slots=True)
class CommUse:
    """Calls of one operation by one kind of group.

    Attributes:
        group: The kind of group; ``pp`` where pieces of a message are gathered.
        op: The operation.
        bytes: What a ring has a rank send for them.
        count: Calls.
        busy_s: Seconds that they run.
        exposed_s: The part in which the device waits.
    """

    group: str
    op: str
    bytes: float
    count: int
    busy_s: float
    exposed_s: float

    def times(self, count: int) -> CommUse:
        """The calls of so many equal passes."""
        return CommUse(
            self.group,
            self.op,
            count * self.bytes,
            count * self.count,
            count * self.busy_s,
            count * self.exposed_s,
        )


def merged(uses: Iterable[CommUse]) -> tuple[CommUse, ...]:
    """Calls added up by group and operation, in the order in which they first come.

    >>> merged([CommUse("tp", "all_reduce", 8.0, 1, 2.0, 1.0), CommUse("tp", "all_reduce", 8.0, 1, 2.0, 2.0)])
    (CommUse(group='tp', op='all_reduce', bytes=16.0, count=2, busy_s=4.0, exposed_s=3.0),)
    """
    found: dict[tuple[str, str], CommUse] = {}
    for use in uses:
        key = use.group, use.op
        known = found.get(key)
        found[key] = use if known is None else _sum(known, use)
    return tuple(found.values())


def _sum(one: CommUse, other: CommUse) -> CommUse:
    return CommUse(
        one.group,
        one.op,
        one.bytes + other.bytes,
        one.count + other.count,
        one.busy_s + other.busy_s,
        one.exposed_s + other.exposed_s,
    )


@dataclass(frozen=True)
class PassCost:
    """One forward or backward of one micro-batch on one rank; communication as far as the device waits for it.

    Attributes:
        compute_s: The device's own work.
        recompute_s: Its work done a second time.
        tp_comm_s: Tensor-parallel collectives.
        cp_comm_s: Context-parallel ones.
        ep_comm_s: Expert-parallel ones.
        dp_comm_s: Gathers of weights and reductions of gradients within the pass.
        gather_s: Gathering a message that came in pieces, one from each tensor rank.
        host_s: What the host takes to hand the pass to the device, kernel by kernel; it runs ahead of the device
            as far as it can, so only what exceeds the device's own time delays the pass.
        uses: All calls, one entry a kind of group and operation.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0
    ep_comm_s: float = 0.0
    dp_comm_s: float = 0.0
    gather_s: float = 0.0
    host_s: float = 0.0
    uses: tuple[CommUse, ...] = ()

    @property
    def total_s(self) -> float:
        """The pass from start to end."""
        return max(self.device_s, self.host_s)

    @property
    def device_s(self) -> float:
        """The pass on a device that never waits for its host."""
        return self.compute_s + self.recompute_s + self.comm_s + self.gather_s

    @property
    def host_wait_s(self) -> float:
        """What the device waits for its host."""
        return max(self.host_s - self.device_s, 0.0)

    @property
    def comm_s(self) -> float:
        """Collectives that the device waits for."""
        return self.tp_comm_s + self.cp_comm_s + self.ep_comm_s + self.dp_comm_s

    @property
    def tp_bytes(self) -> float:
        """Bytes this rank sends for tensor-parallel collectives."""
        return self._bytes("tp")

    @property
    def gather_bytes(self) -> float:
        """Bytes this rank sends to gather messages that came in pieces."""
        return self._bytes("pp")

    def _bytes(self, group: str) -> float:
        return sum(use.bytes for use in self.uses if use.group == group)

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.compute_s + other.compute_s,
            self.recompute_s + other.recompute_s,
            self.tp_comm_s + other.tp_comm_s,
            self.cp_comm_s + other.cp_comm_s,
            self.ep_comm_s + other.ep_comm_s,
            self.dp_comm_s + other.dp_comm_s,
            self.gather_s + other.gather_s,
            self.host_s + other.host_s,
            merged((*self.uses, *other.uses)),
        )

    def times(self, count: int) -> PassCost:
        """The pass of so many equal layers."""
        return PassCost(
            count * self.compute_s,
            count * self.recompute_s,
            count * self.tp_comm_s,
            count * self.cp_comm_s,
            count * self.ep_comm_s,
            count * self.dp_comm_s,
            count * self.gather_s,
            count * self.host_s,
            tuple(use.times(count) for use in self.uses) if count else (),
        )

    def disturbed(self, speed: float, sound_rate: float, rate: float) -> PassCost:
        """The pass on a device of another speed, over a tensor-parallel ring of another rate."""
        if speed == 1.0 and rate == sound_rate:
            return self
        later = 1 / rate - 1 / sound_rate
        return replace(
            self,
            compute_s=self.compute_s / speed,
            recompute_s=self.recompute_s / speed,
            tp_comm_s=self.tp_comm_s + self.tp_bytes * later,
            gather_s=self.gather_s + self.gather_bytes * later,
            uses=tuple(_later(use, later) for use in self.uses),
        )


def _later(use: CommUse, later: float) -> CommUse:
    if use.group not in ("tp", "pp"):
        return use
    return replace(use, busy_s=use.busy_s + use.bytes * later, exposed_s=use.exposed_s + use.bytes * later)


def added(passes: Iterable[PassCost]) -> PassCost:
    """Passes one after another."""
    whole = PassCost()
    for one in passes:
        whole += one
    return whole


@dataclass(frozen=True)
class StageCost:
    """What one virtual stage costs: each micro-batch's passes, and the end of the step.

    Attributes:
        forward: Forward of one micro-batch.
        backward: Backward of one, recomputation in it.
        weight: The part of the backward that only makes the gradients of weights.
        parameters: Parameters of one rank of the stage.
        optimizer_s: Clipping and optimizer of a rank.
    """

    forward: PassCost
    backward: PassCost
    weight: PassCost
    parameters: RankParameters
    optimizer_s: float
