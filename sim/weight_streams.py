"""Passes that gather their weights and reduce their gradients as they go: ZeRO-3, FSDP, and ZeRO-2 by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from . import shards
from .calibration import Calibration
from .compute import device_rates, op_s
from .group_collectives import GroupCollectives
from .ops import ELEMENT_BYTES, Elementwise
from .passes import CommUse, PassCost, merged
from .shards import ReplicaGroup
from .streams import UnitWork, play_streams
from .traffic import placement_of

_SECONDARY = "secondary"  # the ranks of layout.secondary_shards: groups like those of a hybrid shard, of another size


@dataclass(frozen=True)
class _Call:
    """One collective for one unit."""

    group: str
    op: str
    sent: float
    seconds: float


class WeightStreams:
    """The passes of a stage whose replicas hold weights and gradients in shards.

    The units of a stage are given in the order in which they run: embedding, each layer, head
    in the forward, the other way round in the backward; a tied embedding on a single stage is given with what the
    head has of its own, and the head with nothing. Where nothing is sharded, or there is one
    replica, a pass is the sum of its units.

    The two passes differ: a backward whose weights were given up gathers them again, from the ranks of
    ``layout.secondary_shards`` where there is a second copy; it reduces gradients where each micro-batch does so.
    Gradients are copied into the buffer that travels and their shard is added up, in place of adding up
    whole gradients; some frameworks copy gathered weights too. Both are the device's own work.
    Without `layout.overlap_grad_reduce`, in a framework that does not overlap of itself, the
    reduction comes after the pass.

    Sources: arXiv 1910.02054 (ZeRO), 2304.11277 (FSDP, hybrid shard), 2306.10209 (secondary shards).

    Args:
        scenario: What is asked.
        calibration: What the collective library achieves, and how communication slows computing.
    """

    def __init__(self, scenario: Scenario, calibration: Calibration) -> None:
        self._scenario = scenario
        self._figures = calibration.network
        self._placement = placement_of(scenario)
        self._groups: dict[str, GroupCollectives] = {}
        self._rates = device_rates(scenario.machine, calibration, scenario.training.precision)
        layout, framework = scenario.layout, scenario.framework
        several = shards.replicas(scenario) > 1 or shards.expert_replicas(scenario) > 1
        self._gathers = several and shards.gathers_in_pass(scenario)
        self._sums = shards.reduces_in_pass(scenario)
        self._reduces = several and self._sums
        self._regathers = self._gathers and shards.reshards(scenario)
        self._overlaps = layout.overlap_grad_reduce or layout.zero in framework.reduce.overlapped
        # The last unit of a forward is the first of the backward that follows at once, where there is no pipeline.
        self._keeps_last = framework.sharding.keeps_last and layout.pp == 1
        self._one_end = shards.embedding_with_head(scenario)
        slowdown = getattr(calibration.compute, "overlap_slowdown", None)
        self._slowdown: float = slowdown.value if slowdown is not None else 1.0

    @property
    def active(self) -> bool:
        """Whether a pass gathers or reduces anything."""
        return self._gathers or self._sums

    def forward(self, units: Sequence[PassCost], parameters: Sequence[RankParameters]) -> PassCost:
        """A forward of one micro-batch.

        Args:
            units: Embedding, layers and head of the stage, as far as it has them.
            parameters: Those of each unit on one rank, before sharding.
        """
        gathers = [self._gather(held) if self._gathers else () for held in parameters]
        return self._played(self._with_copies(units, parameters, gathers), gathers, [()] * len(units))

    def backward(self, units: Sequence[PassCost], parameters: Sequence[RankParameters]) -> PassCost:
        """A backward of one micro-batch, its units the other way round: head, layers, embedding.

        With a tied embedding it is that which stayed gathered since the forward, for the head needs it first.
        """
        kept = None if not self._keeps_last else len(parameters) - 1 if self._one_end else 0
        gathers = [
            self._gather(held, again=True) if self._regathers and index != kept else ()
            for index, held in enumerate(parameters)
        ]
        reduces = [self._reduce(held) if self._reduces else () for held in parameters]
        return self._played(self._with_copies(units, parameters, gathers, back=True), gathers, reduces)

    def algorithms(self) -> dict[tuple[str, str], str]:
        """How the largest call of each operation ran, by group and operation."""
        return {key: found for group in self._groups.values() for key, found in group.algorithms().items()}

    def _with_copies(
        self,
        units: Sequence[PassCost],
        parameters: Sequence[RankParameters],
        gathers: Sequence[Sequence[_Call]],
        *,
        back: bool = False,
    ) -> list[PassCost]:
        """Units with the copies out of and into the buffers that travel, and the adding up of a shard."""
        scenario, found = self._scenario, []
        states = shards.state_bytes(scenario)
        element = ELEMENT_BYTES[scenario.training.precision]
        for unit, held, gather in zip(units, parameters, gathers, strict=True):
            moved = 0.0
            if gather and scenario.framework.sharding.copies_out:
                moved += 2 * shards.weight_bytes(scenario) * held.total  # read and written
            if back and self._sums:
                moved += self._way_out(element, shards.wire_bytes(scenario)) * held.total
                moved += 3 * (states.accumulation or states.gradient) * shards.owned(scenario, held)
            copies_s = op_s(Elementwise("shard_copies", moved), self._rates) if moved else 0.0
            found.append(replace(unit, compute_s=unit.compute_s + copies_s) if moved else unit)
        return found

    def _way_out(self, element: float, wire: float) -> float:
        """Bytes a parameter that a gradient moves on its way into the buffer that travels.

        A copy in what travels; or with one flat tensor a unit its gradient put together (read, write), cast where
        that differs, and divided before the sum (read, write).

        Source: pytorch, torch/distributed/fsdp/_runtime_utils.py, ``_post_backward_hook``, ``_reduce_grad``, and
        _flat_param.py, ``_get_unflat_views_unaligned``: views by ``torch.split``, whose backward concatenates.
        """
        if not self._scenario.framework.sharding.flat:
            return element + wire
        return 2 * element + (element + wire if element != wire else 0.0) + 2 * wire

    def _played(
        self,
        units: Sequence[PassCost],
        gathers: Sequence[Sequence[_Call]],
        reduces: Sequence[Sequence[_Call]],
    ) -> PassCost:
        total = sum(units, PassCost())
        calls = [call for unit in (*gathers, *reduces) for call in unit]
        if not calls:
            return total
        late = 0.0 if self._overlaps else sum(call.seconds for unit in reduces for call in unit)
        work = [
            UnitWork(
                run_s=unit.total_s,
                gather_s=_seconds(gather),
                reduce_s=_seconds(reduce) if self._overlaps else 0.0,
                copy_s=_seconds(reduce, copies=True) if self._overlaps else 0.0,
                slowed=(unit.compute_s + unit.recompute_s) / unit.total_s if unit.total_s > 0 else 0.0,
            )
            for unit, gather, reduce in zip(units, gathers, reduces, strict=True)
        ]
        times = play_streams(work, self._scenario.layout.prefetch, self._slowdown)
        waited = sum(unit.host_wait_s for unit in units)  # unit by unit, as they were played
        exposed = max(times.end_s - times.stretched_s - total.device_s - waited, 0.0) + late
        busy = sum(call.seconds for call in calls)
        uses = [
            CommUse(call.group, call.op, call.sent, 1, call.seconds, exposed * call.seconds / busy if busy else 0.0)
            for call in calls
        ]
        return replace(
            total,
            compute_s=total.compute_s + times.stretched_s,
            dp_comm_s=total.dp_comm_s + exposed,
            host_s=total.device_s + times.stretched_s + exposed + waited if waited else total.host_s,
            uses=merged((*total.uses, *uses)),
        )

    def _gather(self, held: RankParameters, *, again: bool = False) -> tuple[_Call, ...]:
        """The weights of a unit, from all that share a copy, or for a backward from those of the second copy."""
        scenario, each = self._scenario, shards.weight_bytes(self._scenario)
        group = "shard" if shards.shard_copies(scenario) > 1 else "dp"
        if again and scenario.layout.secondary_shards:
            group = _SECONDARY
        return self._calls((group, "all_gather", each * held.dense), ("edp", "all_gather", each * held.expert))

    def _reduce(self, held: RankParameters) -> tuple[_Call, ...]:
        """The gradients of a unit, over a shard group and then over the copies of the shards."""
        scenario, op, each = self._scenario, shards.reduce_op(self._scenario), shards.wire_bytes(self._scenario)
        dense, expert = each * held.dense, ("edp", op, each * held.expert)
        if op == "reduce_scatter" and shards.shard_copies(scenario) > 1:
            copied = ("hybrid", "all_reduce", dense / shards.shard_members(scenario))
            return self._calls(("shard", op, dense), expert, copied)
        return self._calls(("dp", op, dense), expert)

    def _calls(self, *asked: tuple[str, str, float]) -> tuple[_Call, ...]:
        found = []
        for group, op, size in asked:
            if size > 0 and (collectives := self._collectives(group)).size > 1:
                seconds, sent = collectives.seconds(op, size)
                found.append(_Call(group, op, sent, seconds))
        return tuple(found)

    def _collectives(self, group: str) -> GroupCollectives:
        if group not in self._groups:
            scenario, placement = self._scenario, self._placement
            secondary = scenario.layout.secondary_shards
            if group == _SECONDARY and secondary:
                devices = placement.replica_groups(secondary)
            else:
                kind: ReplicaGroup = group  # type: ignore[assignment]
                devices = shards.replica_groups_of(placement, scenario, kind)
            self._groups[group] = GroupCollectives(scenario, self._figures, group, placement, devices)
        return self._groups[group]


def _seconds(calls: Sequence[_Call], *, copies: bool = False) -> float:
    """Of a unit's calls those over the copies of the shards, or the others."""
    return sum(call.seconds for call in calls if (call.group == "hybrid") == copies)
