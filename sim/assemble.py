"""The step of a scenario, put together from its costs and its traffic."""

from __future__ import annotations

from collections.abc import Sequence

from ..scenarios.scenario import Scenario
from ..scenarios.schedules import SCHEDULES, code_table
from ..topology.errors import input_error
from .calibration import Calibration
from .costs import JobCost
from .perturb import jitter_of
from .timeline import Lane, Program, Step, Tail
from .traffic import LaneTraffic, Traffic

MOST_ACTIONS = 20_000_000  # of one step over all stages and lanes: about 10 s by recurrence and 1 GB of times


def build_step(scenario: Scenario, calibration: Calibration, cost: JobCost, traffic: Traffic) -> Step:
    """Every lane's program, and what follows it.

    Raises:
        InputError: If a step has more actions than can be held.
    """
    lanes = len(traffic.lanes)
    actions = 2 * scenario.layout.pp * scenario.micro_batches * lanes
    if actions > MOST_ACTIONS:
        raise input_error(
            f"{scenario.micro_batches} micro-batches on {scenario.layout.pp} stages and {lanes} kinds of replicas are"
            f" {actions} actions; at most {MOST_ACTIONS} can be played; lower training.global_batch or raise"
            f" layout.micro_batch",
            field="training.global_batch",
        )
    table = code_table(SCHEDULES[scenario.layout.schedule], scenario.layout.pp, scenario.micro_batches)
    return Step(
        lanes=tuple(_lane(scenario, cost, traffic, lane, table) for lane in traffic.lanes),
        tail=_tail(scenario, calibration, cost, traffic),
    )


def _lane(
    scenario: Scenario, cost: JobCost, traffic: Traffic, lane: LaneTraffic, table: Sequence[Sequence[int]]
) -> Lane:
    solo = traffic.classes.solo
    stages = cost.of_lane(lane)
    program = Program(
        table=table,
        forward_s=tuple(stage.forward.total_s for stage in stages),
        backward_s=tuple(stage.backward.total_s for stage in stages),
        up_s=tuple(cost.message_bytes / min(solo[flow] for flow in flows) for flows in lane.up),
        down_s=tuple(cost.message_bytes / min(solo[flow] for flow in flows) for flows in lane.down),
        latency_s=traffic.message_latency_s,
        send_blocks=scenario.framework.pipeline.send_blocks,
        micro_batches=scenario.micro_batches,
        schedule=scenario.layout.schedule,
        jitter=jitter_of(scenario.perturb, lane.replicas[0], scenario.layout.pp, scenario.micro_batches),
    )
    return Lane(lane.replicas, program, lane.up, lane.down)


def _tail(scenario: Scenario, calibration: Calibration, cost: JobCost, traffic: Traffic) -> Tail:
    figures, step = calibration.network, calibration.step
    ranks = scenario.layout.tp * scenario.layout.pp
    slowest = [min(lane.speed[stage] for lane in traffic.lanes) for stage in range(len(cost.stages))]
    return Tail(
        embedding=tuple(lane.embedding for lane in traffic.lanes),
        reduce=traffic.reduce,
        gather=traffic.gather,
        # One number over the model-parallel ranks: a ring would take 2 (n - 1) steps, a tree 2 log2 n.
        barrier_s=figures.base.value + 2 * (ranks - 1).bit_length() * figures.fabric_hop.value if ranks > 1 else 0.0,
        optimizer_s=tuple(stage.optimizer_s / speed for stage, speed in zip(cost.stages, slowest, strict=True)),
        overhead_s=step.overhead.value + (scenario.layout.pp - 1) * step.hop_overhead.value,
    )
