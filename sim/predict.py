"""From a scenario to a prediction: a pure function of scenario, machine and calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from ..scenarios.result import (
    Breakdown,
    Campaign,
    CommRecord,
    Engine,
    FlopRates,
    Interval,
    LinkLoad,
    Prediction,
    StageTime,
)
from ..scenarios.scenario import Scenario, scenario_warnings
from ..topology.errors import input_error, nearest
from . import engine, recurrence, screen
from .assemble import build_step
from .calibration import Calibration, default_calibration, load_calibration
from .costs import JobCost, StageCost, job_cost
from .link_loads import busiest_links, tensor_use
from .memory import memory_of
from .network import TrafficClasses
from .ops import Shapes
from .shards import reduce_op
from .step_flop import step_flop
from .timeline import Collective, Lane, Played, Step
from .traffic import Traffic, build_traffic

NetworkMode = Literal["shared", "solo"]

_PLAYERS: dict[str, Callable[[Step, TrafficClasses], Played]] = {
    "screen": screen.play,
    "recurrence": recurrence.play,
    "des": engine.play,
    "des-exact": engine.play_exact,
    "des-per-rank": engine.play_exact,
}
FIDELITIES = tuple(_PLAYERS)
FOLDED = FIDELITIES[:-1]  # those that play replicas and ranks which behave alike once
NETWORK_MODES: tuple[NetworkMode, ...] = ("shared", "solo")
INTERVAL_LEVEL = 0.8
MOST_UNFOLDED = 1_000_000  # ranks times micro-batches that des-per-rank plays, about a minute
_DAY_S = 86400.0
_HOUR_S = 3600.0


def predict(
    scenario: Scenario,
    calibration: Calibration | None = None,
    fidelity: str = "des",
    network: NetworkMode = "shared",
) -> Prediction:
    """Predict one step of a scenario, its memory, and the campaign it belongs to.

    Args:
        scenario: What is asked.
        calibration: Achieved figures; the scenario's own or the machine's default where left out.
        fidelity: One of `FIDELITIES`.
        network: ``solo`` lets every kind of transfer run as if it were alone, so that contention's cost can be seen.

    Raises:
        InputError: If the fidelity or mode is unknown, no calibration fits, a perturbation names
            nothing, or the step is too long to play.
    """
    began = time.perf_counter()
    if fidelity not in _PLAYERS:
        raise input_error(f"{fidelity!r} is unknown{nearest(fidelity, FIDELITIES)}", field="fidelity")
    if network not in NETWORK_MODES:
        raise input_error(f"{network!r} is unknown{nearest(network, NETWORK_MODES)}", field="network")
    unfolded = scenario.devices * scenario.micro_batches
    if fidelity == "des-per-rank" and unfolded > MOST_UNFOLDED:
        message = (
            f"des-per-rank plays every rank, at most {MOST_UNFOLDED} times a micro-batch,"
            f" not {scenario.devices} x {scenario.micro_batches}; use des-exact"
        )
        raise input_error(message, field="fidelity")
    if calibration is None:
        calibration = choose_calibration(scenario)
    traffic = build_traffic(scenario, calibration, fold=fidelity != "des-per-rank")
    cost = job_cost(scenario, calibration, traffic)
    step = build_step(scenario, calibration, cost, traffic)
    classes = traffic.classes
    if network == "solo":
        classes = replace(classes, weights=({},) * len(classes.weights))
    played = _PLAYERS[fidelity](step, classes)
    return _Answer(scenario, calibration, traffic, cost, step, played).prediction(fidelity, network, began)


def choose_calibration(scenario: Scenario) -> Calibration:
    """The calibration a scenario names, or its machine's default."""
    if scenario.calibration is not None:
        return load_calibration(scenario.calibration)
    return default_calibration(scenario.machine)


class _Answer:
    """A played step, read for people."""

    def __init__(
        self,
        scenario: Scenario,
        calibration: Calibration,
        traffic: Traffic,
        cost: JobCost,
        step: Step,
        played: Played,
    ) -> None:
        self.scenario = scenario
        self.calibration = calibration
        self.traffic = traffic
        self.cost = cost
        self.step = step
        self.played = played
        self.step_s = played.tail.step_s
        # The lane that ends last is the one that the others wait for.
        ends = [max(timeline.free) for timeline in played.timelines]
        self.lane_number = ends.index(max(ends))
        self.lane: Lane = step.lanes[self.lane_number]
        self.timeline = played.timelines[self.lane_number]
        self.costs: tuple[StageCost, ...] = cost.of_lane(traffic.lanes[self.lane_number])

    def prediction(self, fidelity: str, network: str, began: float) -> Prediction:
        scenario, step_s = self.scenario, self.step_s
        layout = scenario.layout
        shapes = Shapes(scenario.model, scenario.training, layout)
        flop = step_flop(shapes, layout.recompute_by_stage(), layout.layers_by_stage(scenario.model.layers))
        rates = FlopRates(flop.model / step_s / scenario.devices, flop.hardware / step_s / scenario.devices)
        peak = scenario.machine.device.peak_flop_per_s(scenario.training.precision)
        stages = self._stage_times()
        slowest = max(stages, key=lambda stage: (stage.busy_s, stage.stage)).stage
        return Prediction(
            scenario=scenario.document(),
            step_s=step_s,
            samples_per_s=scenario.training.global_batch / step_s,
            tokens_per_s=scenario.tokens_per_step / step_s,
            tflops_per_device=rates,
            mfu=rates.model / peak,
            hfu=rates.hardware / peak,
            breakdown_s=self._breakdown(slowest),
            slowest_stage=slowest,
            comm=self._comm(slowest),
            links=self._links(),
            stages=stages,
            memory=memory_of(scenario, self.calibration, self.cost, self.lane.program, self.timeline),
            interval=_interval(self.calibration, step_s),
            campaign=_campaign(scenario, step_s),
            calibration=self.calibration.name,
            fidelity=fidelity,
            network=network,
            engine=Engine(
                events=self.played.events,
                ops=self.step.ops,
                solves=self.played.solves,
                lanes=len(self.step.lanes),
                wall_s=time.perf_counter() - began,
            ),
            warnings=scenario_warnings(scenario),
        )

    def _stage_times(self) -> tuple[StageTime, ...]:
        times = []
        layers = self.scenario.layout.layers_by_stage(self.scenario.model.layers)
        program = self.lane.program
        for stage, cost in enumerate(self.costs):
            busy = sum(float(program.passes(stage, kind).sum()) for kind in (0, 1)) + self.timeline.held_s[stage]
            starts = self.timeline.start[stage]
            end_s = self.timeline.free[stage]
            if starts:
                end_s = starts[-1] + program.duration(stage, program.table[stage][-1])
            times.append(StageTime(stage, layers[stage], cost.forward.total_s, cost.backward.total_s, busy, end_s))
        return tuple(times)

    def _breakdown(self, stage: int) -> Breakdown:
        both = (self.costs[stage].forward + self.costs[stage].backward).times(self.scenario.micro_batches)
        tail, ends = self.step.tail, self.played.tail
        parts = {
            "compute": both.compute_s,
            "recompute": both.recompute_s,
            "tp_comm": both.tp_comm_s,
            "pp_comm": both.gather_s + self.timeline.held_s[stage],
            "dp_comm": ends.embedding_s[self.lane_number][stage] + ends.reduce_s[stage] + ends.gather_s[stage],
            "optimizer": tail.optimizer_s[stage],
            "other": tail.overhead_s,
        }
        return Breakdown(**parts, bubble=max(self.step_s - sum(parts.values()), 0.0))

    def _comm(self, stage: int) -> tuple[CommRecord, ...]:
        scenario, cost = self.scenario, self.cost
        layout, count = scenario.layout, scenario.micro_batches
        both = (self.costs[stage].forward + self.costs[stage].backward).times(count)
        records = []
        if layout.tp > 1:
            seconds = both.tp_comm_s
            algorithm = cost.algorithms["tp", "all_reduce"]
            records.append(CommRecord("tp", "all_reduce", algorithm, both.tp_bytes, both.tp_count, seconds, seconds))
        if layout.pp > 1:
            program, held = self.lane.program, self.timeline.held_s[stage]
            messages = count * ((stage < layout.pp - 1) + (stage > 0))
            busy = count * (program.sends(stage, 0) + program.sends(stage, 1))
            sent = messages * cost.message_bytes
            records.append(CommRecord("pp", "send", "direct", sent, messages, max(busy, held), held))
            if both.gather_s > 0:
                seconds, algorithm = both.gather_s, cost.algorithms["tp", "all_gather"]
                records.append(CommRecord("pp", "all_gather", algorithm, both.gather_bytes, messages, seconds, seconds))
        tail, times = self.step.tail, self.played.tail
        for group, op, collective, seconds in (
            ("dp", reduce_op(scenario), tail.reduce[stage], times.reduce_s[stage]),
            ("dp", "all_gather", tail.gather[stage], times.gather_s[stage]),
            ("embedding", "all_reduce", tail.embedding[self.lane_number], times.embedding_s[self.lane_number][stage]),
        ):
            if collective and seconds > 0:
                sent = sum(exchange.edge_bytes for exchange in collective)
                algorithm = self.traffic.algorithms[group, op]
                records.append(CommRecord(group, op, algorithm, sent, 1, seconds, seconds))
        return tuple(records)

    def _links(self) -> tuple[LinkLoad, ...]:
        """The busiest links."""
        moved = np.zeros(len(self.traffic.classes.solo))
        for lane in self.step.lanes:
            for flows in (*lane.up, *lane.down):
                moved[list(flows)] += self.scenario.micro_batches * self.cost.message_bytes
        tail = self.step.tail
        collectives: tuple[Collective, ...] = (*tail.embedding, *tail.reduce, *tail.gather)
        for exchange in (exchange for collective in collectives for exchange in collective):
            moved[list(exchange.flows)] += exchange.edge_bytes
        passes = [cost.forward + cost.backward for cost in self.costs]
        tensor = tensor_use(
            self.scenario,
            self.calibration.network,
            self.traffic.routes,
            self.cost.algorithms,
            [self.scenario.micro_batches * (both.tp_bytes + both.gather_bytes) for both in passes],
        )
        return busiest_links(self.traffic, moved, tensor, self.step_s)


def _interval(calibration: Calibration, step_s: float) -> Interval:
    spread = calibration.relative_spread()
    if calibration.fit is None:
        return Interval(INTERVAL_LEVEL, None, f"calibration {calibration.name} has no fitted runs, so no interval")
    rows, figures = len(calibration.fit.residuals), len(calibration.fit.parameters)
    if spread is None:
        basis = f"calibration {calibration.name} fitted {figures} figures on {rows} runs: nothing is left over"
        return Interval(INTERVAL_LEVEL, None, basis)
    basis = f"what the fit of calibration {calibration.name} left over on {rows} runs"
    return Interval(INTERVAL_LEVEL, (step_s * (1 - min(spread, 1.0)), step_s * (1 + spread)), basis)


def _campaign(scenario: Scenario, step_s: float) -> Campaign | None:
    tokens = scenario.training.tokens
    if tokens is None:
        return None
    steps = -(-int(tokens) // scenario.tokens_per_step)
    seconds = steps * step_s
    return Campaign(
        steps=steps,
        days=seconds / _DAY_S,
        node_hours=scenario.nodes * seconds / _HOUR_S,
        device_hours=scenario.devices * seconds / _HOUR_S,
    )
