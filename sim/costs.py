"""Seconds of each pass of each stage, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from ..topology.errors import told_as
from . import host, shards
from .calibration import Calibration
from .communicate import CollectiveTime, collective_s, ring_bytes
from .compute import DeviceRates, device_rates, op_s
from .ops import (
    Op,
    Shapes,
    TensorCollective,
    embedding_backward,
    embedding_forward,
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
    recomputed,
)
from .traffic import LaneTraffic, Traffic, placement_of, tensor_groups_together


@dataclass(frozen=True)
class PassCost:
    """One forward or backward of one micro-batch on one rank.

    Attributes:
        compute_s: The device's own work.
        recompute_s: Its work done a second time.
        tp_comm_s: Tensor-parallel collectives; nothing else goes on meanwhile.
        tp_bytes: Bytes this rank sends for them.
        tp_count: How many there are.
        gather_s: Gathering a message that came in pieces, one from each tensor rank.
        gather_bytes: Bytes this rank sends for that.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tp_comm_s: float = 0.0
    tp_bytes: float = 0.0
    tp_count: int = 0
    gather_s: float = 0.0
    gather_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """The pass from start to end."""
        return self.compute_s + self.recompute_s + self.tp_comm_s + self.gather_s

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.compute_s + other.compute_s,
            self.recompute_s + other.recompute_s,
            self.tp_comm_s + other.tp_comm_s,
            self.tp_bytes + other.tp_bytes,
            self.tp_count + other.tp_count,
            self.gather_s + other.gather_s,
            self.gather_bytes + other.gather_bytes,
        )

    def times(self, count: int) -> PassCost:
        """The pass of so many equal layers."""
        return PassCost(
            count * self.compute_s,
            count * self.recompute_s,
            count * self.tp_comm_s,
            count * self.tp_bytes,
            count * self.tp_count,
            count * self.gather_s,
            count * self.gather_bytes,
        )

    def disturbed(self, speed: float, sound_rate: float, rate: float) -> PassCost:
        """The pass on a device of another speed, over a ring of another rate."""
        if speed == 1.0 and rate == sound_rate:
            return self
        later = 1 / rate - 1 / sound_rate
        return replace(
            self,
            compute_s=self.compute_s / speed,
            recompute_s=self.recompute_s / speed,
            tp_comm_s=self.tp_comm_s + self.tp_bytes * later,
            gather_s=self.gather_s + self.gather_bytes * later,
        )


@dataclass(frozen=True)
class StageCost:
    """What one stage costs: each micro-batch's passes, and the end of the step.

    Attributes:
        forward: Forward of one micro-batch.
        backward: Backward of one, recomputation in it.
        parameters: Parameters of one rank of the stage.
        optimizer_s: Clipping and optimizer of a rank.
    """

    forward: PassCost
    backward: PassCost
    parameters: int
    optimizer_s: float


@dataclass(frozen=True)
class JobCost:
    """The costs of all stages, and of what passes between them.

    Attributes:
        stages: One entry a stage, of a lane that nothing disturbs.
        message_bytes: What one rank sends to its neighbour stage for one micro-batch.
        tensor_rate: Bytes/s over each edge of an undisturbed tensor-parallel ring.
        algorithms: How the tensor-parallel collectives run, by group and operation.
    """

    stages: tuple[StageCost, ...]
    message_bytes: float
    tensor_rate: float
    algorithms: dict[tuple[str, str], str]

    def of_lane(self, lane: LaneTraffic) -> tuple[StageCost, ...]:
        """The stages as a lane's devices and links run them."""
        return tuple(
            replace(
                stage,
                forward=stage.forward.disturbed(speed, self.tensor_rate, rate),
                backward=stage.backward.disturbed(speed, self.tensor_rate, rate),
                optimizer_s=stage.optimizer_s / speed,
            )
            for stage, speed, rate in zip(self.stages, lane.speed, lane.tensor_rate, strict=True)
        )


def job_cost(scenario: Scenario, calibration: Calibration, traffic: Traffic) -> JobCost:
    """Cost every stage of a scenario."""
    shapes = Shapes(scenario.model, scenario.training, scenario.layout)
    rates = device_rates(scenario.machine, calibration, scenario.training.precision)
    tensor = TensorCollectives(scenario, calibration)
    pricer = _Pricer(rates, tensor)
    layout, model, framework = scenario.layout, scenario.model, scenario.framework
    pp, tp = layout.pp, layout.tp
    whole = shapes.hidden_elements * shapes.element
    pieces = tp if framework.pipeline.partition_over_tp else 1
    gather_s, gather_bytes = tensor.seconds("all_gather", whole) if pieces > 1 else (0.0, 0.0)
    gather = PassCost(gather_s=gather_s, gather_bytes=gather_bytes)

    forward = pricer.price(layer_forward(shapes))
    backward = pricer.price(layer_backward(shapes, framework))
    again = {mode: pricer.price(recomputed(shapes, mode), recompute=True) for mode in set(layout.recompute_by_stage())}
    stages = []
    for stage, (layers, mode) in enumerate(
        zip(layout.layers_by_stage(model.layers), layout.recompute_by_stage(), strict=True)
    ):
        stage_forward = forward.times(layers)
        stage_backward = (backward + again[mode]).times(layers)
        if stage == 0:
            stage_forward += pricer.price(embedding_forward(shapes))
            stage_backward += pricer.price(embedding_backward(shapes, framework))
        else:
            stage_forward += gather
        if stage == pp - 1:
            stage_forward += pricer.price(head_forward(shapes))
            stage_backward += pricer.price(head_backward(shapes, framework))
        else:
            stage_backward += gather
        held = shards.rank_parameters(scenario, stage)
        parameters = held.total
        stages.append(
            StageCost(
                forward=stage_forward,
                backward=stage_backward,
                parameters=parameters,
                optimizer_s=_optimizer_s(scenario, held, rates),
            )
        )
    return JobCost(
        stages=tuple(stages),
        message_bytes=whole / pieces if pp > 1 else 0.0,
        tensor_rate=traffic.tensor_rate,
        algorithms=tensor.algorithms(),
    )


def _optimizer_s(scenario: Scenario, held: RankParameters, rates: DeviceRates) -> float:
    """Norm, clipping and Adam of one rank, all of them bound by memory.

    Adam reads gradient, master weight and two moments in fp32, writes the last three and
    the weight; the norm reads every gradient once, clipping reads and writes the rank's own.
    """
    layout, training = scenario.layout, scenario.training
    owned = shards.owned(scenario, held)
    if layout.offload_optimizer:
        return host.host_optimizer_s(scenario, owned)
    summed = shards.summed(scenario, held)
    weight = 2 if training.precision != "fp32" else 0  # with fp32 the master weight is the weight
    states = shards.state_bytes(scenario)
    moved = owned * (16 + 12 + weight)
    if training.gradient_clipping:
        moved += summed * (states.accumulation or states.gradient) + owned * 8
    return moved / rates.memory_bytes_per_s


class TensorCollectives:
    """Seconds of tensor-parallel collectives, every group of the job running its own at the same time."""

    def __init__(self, scenario: Scenario, calibration: Calibration) -> None:
        placement = placement_of(scenario)
        self.tp = scenario.layout.tp
        self._scenario = scenario
        self._figures = calibration.network
        self._groups, self._routes = tensor_groups_together(placement, scenario.machine)
        self._times: dict[tuple[str, float], CollectiveTime] = {}

    def time(self, op: str, size_bytes: float) -> CollectiveTime:
        """One call; each size is worked out once."""
        if (op, size_bytes) not in self._times:
            named = self._scenario.algorithm("tp", op)
            with told_as(f"scenario {self._scenario.name}", collective=f"collectives.tp.{op}"):
                found = collective_s(op, size_bytes, self._groups, self._routes, self._figures, named)
            self._times[op, size_bytes] = found
        return self._times[op, size_bytes]

    def seconds(self, op: str, size_bytes: float) -> tuple[float, float]:
        """Seconds of one call, and the bytes that a ring would have a rank send for it."""
        if self.tp == 1:
            return 0.0, 0.0
        return self.time(op, size_bytes).seconds, ring_bytes(op, size_bytes, self.tp)

    def algorithms(self) -> dict[tuple[str, str], str]:
        """How the largest call of each operation ran, by group and operation."""
        largest: dict[str, tuple[float, str]] = {}
        for (op, size), found in self._times.items():
            largest[op] = max(largest.get(op, (0.0, "")), (size, found.algorithm))
        return {("tp", op): algorithm for op, (_, algorithm) in largest.items()}


@dataclass(frozen=True)
class _Pricer:
    rates: DeviceRates
    tensor: TensorCollectives

    def price(self, ops: list[Op], *, recompute: bool = False) -> PassCost:
        """Seconds of a list of ops run one after another."""
        compute_s = comm_s = sent = 0.0
        count = 0
        for op in ops:
            if not isinstance(op, TensorCollective):
                compute_s += op_s(op, self.rates)
            elif self.tensor.tp > 1:
                seconds, edge = self.tensor.seconds(op.op, op.bytes)
                comm_s += seconds
                sent += edge
                count += 1
        if recompute:
            return PassCost(recompute_s=compute_s, tp_comm_s=comm_s, tp_bytes=sent, tp_count=count)
        return PassCost(compute_s=compute_s, tp_comm_s=comm_s, tp_bytes=sent, tp_count=count)
