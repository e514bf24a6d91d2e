"""From a scenario to a prediction: a pure function of scenario, machine and calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from ..scenarios.flop import Asked, count_flop
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
from .comm_records import message_record, pass_records, tail_records
from .costs import JobCost, PassCost, StageCost, job_cost
from .link_loads import busiest_links, pass_uses
from .memory import memory_of
from .network import TrafficClasses
from .tail import Collective
from .timeline import Lane, Played, Step
from .traffic import Traffic, build_traffic
from .virtual_stages import messages_of

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
        self.sums = cost.sums_of_lane(traffic.lanes[self.lane_number])

    def prediction(self, fidelity: str, network: str, began: float) -> Prediction:
        scenario, step_s = self.scenario, self.step_s
        asked = Asked.of(scenario.model, scenario.training, scenario.layout)
        rates = FlopRates(*(count_flop(way, asked) / step_s / scenario.devices for way in ("model", "hardware")))
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
        program, timeline = self.lane.program, self.timeline
        for rank, stages in enumerate(self.traffic.placed):
            costs = [self.costs[stage] for stage in stages]
            end_s = timeline.free[rank]
            if timeline.start[rank]:
                end_s = timeline.end(program, rank, len(timeline.start[rank]) - 1)
            times.append(
                StageTime(
                    stage=rank,
                    layers=layers[rank],
                    forward_s=sum(cost.forward.total_s for cost in costs),
                    backward_s=sum(cost.backward.total_s for cost in costs),
                    busy_s=program.worked(rank) + timeline.held_s[rank],
                    end_s=end_s,
                )
            )
        return tuple(times)

    def _passes(self, rank: int) -> PassCost:
        """All passes of a step on a pipeline rank, and what its tensor group sums after them."""
        whole = PassCost()
        for stage in self.traffic.placed[rank]:
            whole += self.costs[stage].forward + self.costs[stage].backward
        return whole.times(self.scenario.micro_batches) + self.sums[rank]

    def _host_wait_s(self, rank: int) -> float:
        """Seconds of a step in which a rank's passes wait for the host to hand them to the device."""
        costs = (self.costs[stage] for stage in self.traffic.placed[rank])
        each = sum(cost.forward.host_wait_s + cost.backward.host_wait_s for cost in costs)
        return self.scenario.micro_batches * each

    def _breakdown(self, rank: int) -> Breakdown:
        passes, program = self._passes(rank), self.lane.program
        tail, ends = self.step.tail, self.played.tail
        over_replicas = ends.embedding_s[self.lane_number][rank] + ends.exposed_reduce_s(rank)
        over_replicas += ends.gather_s[rank] if tail.gathers_late else self.timeline.late(rank)
        parts = {
            "compute": passes.compute_s + program.extra(rank),
            "recompute": passes.recompute_s,
            "tp_comm": passes.tp_comm_s,
            "cp_comm": passes.cp_comm_s,
            "ep_comm": passes.ep_comm_s,
            "pp_comm": passes.gather_s + self.timeline.held_s[rank],
            "dp_comm": passes.dp_comm_s + over_replicas,
            "optimizer": tail.optimizer_s[rank],
            "other": tail.overhead_s + self._host_wait_s(rank),
        }
        return Breakdown(**parts, bubble=max(self.step_s - sum(parts.values()), 0.0))

    def _comm(self, rank: int) -> tuple[CommRecord, ...]:
        program, traffic = self.lane.program, self.traffic
        message = message_record(program, self.timeline, rank, self.cost.message_bytes)
        in_passes = list(pass_records(self._passes(rank).uses, self.cost.algorithms))
        records = [record for record in in_passes if record.group != "pp"]
        records += [message] if message else []
        records += [record for record in in_passes if record.group == "pp"]
        tail, times = self.step.tail, self.played.tail
        embedding_s = times.embedding_s[self.lane_number][rank]
        gather_s = times.gather_s[rank]
        for collective, busy_s, exposed_s in (
            (tail.reduce[rank], times.reduce_s[rank], times.exposed_reduce_s(rank)),
            (tail.gather[rank], gather_s, gather_s if tail.gathers_late else self.timeline.late(rank)),
            (tail.embedding[self.lane_number], embedding_s, embedding_s),
        ):
            records += tail_records(collective, busy_s, exposed_s, traffic.algorithms, traffic.classes)
        return tuple(records)

    def _links(self) -> tuple[LinkLoad, ...]:
        """The busiest links."""
        moved = np.zeros(len(self.traffic.classes.solo))
        each = self.scenario.micro_batches * self.cost.message_bytes
        for lane in self.step.lanes:
            for (source, target), count in messages_of(self.traffic.placed).items():
                if count:
                    moved[list(lane.flows(source, target))] += each * count
        tail = self.step.tail
        collectives: tuple[Collective, ...] = (*tail.embedding, *tail.reduce, *tail.gather)
        for exchange in (exchange for collective in collectives for exchange in collective):
            moved[list(exchange.flows)] += exchange.edge_bytes
        passes = [self._passes(rank) for rank in range(self.step.ranks)]
        figures, algorithms = self.calibration.network, self.cost.algorithms
        uses = pass_uses(self.scenario, figures, self.traffic.routes, algorithms, passes)
        return busiest_links(self.traffic, moved, uses, self.step_s)


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
