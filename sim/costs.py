"""Seconds of each pass of each virtual stage, by what they are spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from . import host, shards
from .calibration import Calibration
from .compute import DeviceRates, device_rates
from .layers import (
    ahead_backward,
    ahead_forward,
    embedding_backward,
    embedding_forward,
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
    recomputed,
    weight_part,
)
from .ops import Collective, Op, Shapes
from .passes import CommUse, PassCost, StageCost, added
from .pricing import Pricer, collectives_of
from .traffic import LaneTraffic, Traffic, placement_of
from .virtual_stages import in_pieces
from .weight_streams import WeightStreams

__all__ = ["CommUse", "JobCost", "PassCost", "StageCost", "job_cost"]


@dataclass(frozen=True)
class JobCost:
    """The costs of all virtual stages, and of what passes between them.

    Attributes:
        stages: One entry a virtual stage, of a lane that nothing disturbs.
        home: The pipeline rank of each.
        message_bytes: What one rank sends to its neighbour stage for one micro-batch.
        tensor_rate: Bytes/s over each edge of an undisturbed tensor-parallel ring.
        algorithms: How the collectives of the passes run, by group and operation.
        sums: What the tensor group of each pipeline rank sums once a step, after its last backward.
    """

    stages: tuple[StageCost, ...]
    home: tuple[int, ...]
    message_bytes: float
    tensor_rate: float
    algorithms: dict[tuple[str, str], str]
    sums: tuple[PassCost, ...]

    def of_lane(self, lane: LaneTraffic) -> tuple[StageCost, ...]:
        """The stages as a lane's devices and links run them."""
        found = []
        for stage, rank in zip(self.stages, self.home, strict=True):
            speed, ring = lane.speed[rank], lane.tensor_rate[rank]
            parts = {
                name: getattr(stage, name).disturbed(speed, self.tensor_rate, ring)
                for name in ("forward", "backward", "weight")
            }
            found.append(replace(stage, **parts, optimizer_s=stage.optimizer_s / speed))
        return tuple(found)

    def sums_of_lane(self, lane: LaneTraffic) -> tuple[PassCost, ...]:
        """What a lane's tensor groups sum once a step, over its links."""
        return tuple(
            one.disturbed(1.0, self.tensor_rate, ring) for one, ring in zip(self.sums, lane.tensor_rate, strict=True)
        )


def job_cost(scenario: Scenario, calibration: Calibration, traffic: Traffic) -> JobCost:
    """Cost every virtual stage of a scenario."""
    costs = _Costs(scenario, calibration)
    stages = tuple(costs.stage(stage) for stage in range(len(costs.layers)))
    sums = costs.sums()
    algorithms: dict[tuple[str, str], str] = {}
    for group in costs.pricer.groups.values():
        algorithms |= group.algorithms()
    algorithms |= costs.streams.algorithms()
    return JobCost(
        stages=stages,
        home=costs.home,
        message_bytes=costs.message_bytes if scenario.layout.pp > 1 else 0.0,
        tensor_rate=traffic.tensor_rate,
        algorithms=algorithms,
        sums=sums,
    )


@dataclass(frozen=True)
class _Unit:
    """A part of a stage that runs as one: the embedding, a layer, what follows it, or the head."""

    forward: PassCost
    backward: PassCost
    weight: PassCost
    parameters: RankParameters


class _Costs:
    """The units of a job, each priced once, and the stages that they make."""

    def __init__(self, scenario: Scenario, calibration: Calibration) -> None:
        self.scenario = scenario
        self.calibration = calibration
        self.shapes = Shapes(scenario.model, scenario.training, scenario.layout, scenario.framework.memory)
        self.split = scenario.schedule.splits_backward
        self.layers = scenario.layout.layers_by_virtual_stage(scenario.model.layers)
        self.home = tuple(scenario.home_rank(stage) for stage in range(len(self.layers)))
        placement = placement_of(scenario)
        slowdown = calibration.compute.overlap_slowdown
        self.pricer = Pricer(
            device_rates(scenario.machine, calibration, scenario.training.precision),
            collectives_of(scenario, calibration, placement),
            slowdown.value if slowdown else 1.0,
            calibration.step.dispatch.value if calibration.step.dispatch else 0.0,
            calibration.step.expert_pass.value if calibration.step.expert_pass else 0.0,
            scenario.layout,
        )
        states = {**scenario.framework.states, scenario.training.precision: shards.state_bytes(scenario)}
        self.framework = scenario.framework.model_copy(update={"states": states, "unit_states": None})
        self.streams = WeightStreams(scenario, calibration)
        self._kinds: dict[tuple[bool, str], _Unit] = {}

    @property
    def message_bytes(self) -> float:
        """One rank's part of a hidden state on its way to the next stage."""
        layout, shapes = self.scenario.layout, self.shapes
        pieces = layout.tp if layout.sequence_parallel or in_pieces(self.scenario) else 1
        return shapes.tokens * self.scenario.model.hidden * shapes.element / pieces

    @cached_property
    def _message_gather(self) -> PassCost:
        if not in_pieces(self.scenario):
            return PassCost()
        whole = float(self.shapes.tokens * self.scenario.model.hidden * self.shapes.element)
        seconds, sent = self.pricer.groups["tp"].seconds("all_gather", whole)
        return PassCost(gather_s=seconds, uses=(CommUse("pp", "all_gather", sent, 1, seconds, seconds),))

    def stage(self, stage: int) -> StageCost:
        """One virtual stage."""
        units = self._units(stage)
        forward, backward = self._passes([unit for unit, _ in units], [count for _, count in units])
        last = len(self.layers) - 1
        if stage > 0 and self.home[stage - 1] != self.home[stage]:
            forward += self._message_gather
        if stage < last and self.home[stage + 1] != self.home[stage]:
            backward += self._message_gather
        parameters = shards.rank_parameters(self.scenario, stage)
        return StageCost(
            forward=forward,
            backward=backward,
            weight=added(unit.weight.times(count) for unit, count in units),
            parameters=parameters,
            optimizer_s=_optimizer_s(self.scenario, parameters, self.pricer.rates),
        )

    def sums(self) -> tuple[PassCost, ...]:
        """What the tensor group of each pipeline rank sums once a step; its host is done by then."""
        return tuple(
            replace(self.pricer.price([Collective("tensor_sums", "all_reduce", size)] if size else []), host_s=0.0)
            for size in shards.tensor_sums(self.scenario)
        )

    def _passes(self, units: Sequence[_Unit], counts: Sequence[int]) -> tuple[PassCost, PassCost]:
        """Forward and backward of units, each so many times, one after another."""
        if not self.streams.active:
            plan = list(zip(units, counts, strict=True))
            return added(u.forward.times(n) for u, n in plan), added(u.backward.times(n) for u, n in plan)
        each = [unit for unit, count in zip(units, counts, strict=True) for _ in range(count)]
        forward = self.streams.forward([unit.forward for unit in each], [unit.parameters for unit in each])
        each.reverse()
        return forward, self.streams.backward([unit.backward for unit in each], [unit.parameters for unit in each])

    def _units(self, stage: int) -> list[tuple[_Unit, int]]:
        """The units of a virtual stage with how often each comes, in the order of a forward."""
        model, layout = self.scenario.model, self.scenario.layout
        first, count = sum(self.layers[:stage]), self.layers[stage]
        mode = layout.recompute_by_stage()[self.home[stage]]
        again = layout.recomputed_layers(count)
        units: list[tuple[_Unit, int]] = [(self._embedding, 1)] if stage == 0 else []
        for layer in range(first, first + count):
            unit = self._layer(model.has_experts(layer), mode if again[layer - first] else "none")
            if units and units[-1][0] is unit:
                units[-1] = (unit, units[-1][1] + 1)
            else:
                units.append((unit, 1))
        if stage == len(self.layers) - 1:
            if model.mtp_layers:
                units.append((self._ahead(mode), model.mtp_layers))
            units.append((self._head, 1))
        return units

    def _unit(self, forward: list[Op], backward: list[Op], parameters: RankParameters) -> _Unit:
        price = self.pricer.price
        weight = price(weight_part(backward)) if self.split else PassCost()
        return _Unit(price(forward), price(backward), weight, parameters)

    def _layer(self, moe: bool, mode: str) -> _Unit:
        if (moe, mode) not in self._kinds:
            shapes, framework = self.shapes, self.framework
            plain = self._kinds.get((moe, "none")) or self._unit(
                layer_forward(shapes, moe),
                layer_backward(shapes, framework, moe, self.split),
                shapes.layer_parameters(moe),
            )
            again = self.pricer.price(recomputed(shapes, mode, moe), recompute=True)
            self._kinds[moe, mode] = replace(plain, backward=plain.backward + again)
        return self._kinds[moe, mode]

    @cached_property
    def _embedding(self) -> _Unit:
        model, layout, framework = self.scenario.model, self.scenario.layout, self.framework
        held = model.rank_embedding_parameters(layout.tp, self.scenario.training.seq_len)
        if shards.embedding_with_head(self.scenario):
            held += model.rank_final_norm_parameters()
        return self._unit(
            embedding_forward(self.shapes), embedding_backward(self.shapes, framework), RankParameters(held)
        )

    @cached_property
    def _head(self) -> _Unit:
        shapes, framework = self.shapes, self.framework
        held = self.scenario.model.rank_final_norm_parameters() + shards.head_parameters(self.scenario)
        held = 0 if shards.embedding_with_head(self.scenario) else held
        return self._unit(head_forward(shapes), head_backward(shapes, framework, self.split), RankParameters(held))

    def _ahead(self, mode: str) -> _Unit:
        """A layer that predicts a further token: its own merging of two streams, a layer as the last, the head again.

        Its embedding and head share their weights with the model's.
        """
        model, layout = self.scenario.model, self.scenario.layout
        layer = self._layer(model.has_experts(model.layers - 1), mode)
        own = self._unit(ahead_forward(self.shapes), ahead_backward(self.shapes, self.framework), RankParameters(0))
        parts = (own, layer, self._head)
        held = model.mtp_share(layout.tp, layout.ep, layout.etp)
        count = model.mtp_layers
        return _Unit(
            added(part.forward for part in parts),
            added(part.backward for part in parts),
            added(part.weight for part in parts),
            RankParameters(held.dense // count, held.expert // count),
        )


def _optimizer_s(scenario: Scenario, parameters: RankParameters, rates: DeviceRates) -> float:
    """Norm, clipping and Adam of one rank, all of them bound by memory.

    Where the framework does not say what its optimizer moves, Adam reads gradient, master weight and
    two moments in fp32, and writes the last three and the weight; the norm reads every gradient once,
    clipping reads and writes the rank's own. With the optimizer on the host all of it is done there.
    """
    training = scenario.training
    owned = shards.owned(scenario, parameters)
    if scenario.layout.offload_optimizer:
        return host.host_optimizer_s(scenario, owned)
    weight = 2 if training.precision != "fp32" else 0  # with fp32 the master weight is the weight
    states = shards.state_bytes(scenario)
    update = scenario.framework.update_bytes
    moved = owned * (16 + 12 + weight if update is None else update)
    if training.gradient_clipping:
        moved += shards.summed(scenario, parameters) * (states.accumulation or states.gradient) + owned * 8
    return moved / rates.memory_bytes_per_s
