"""From a scenario to a prediction: a pure function of scenario, machine and calibration."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..scenarios.result import (
    Breakdown,
    Campaign,
    CommRecord,
    Engine,
    FlopRates,
    Interval,
    Prediction,
    StageTime,
)
from ..scenarios.scenario import Scenario, scenario_warnings
from ..scenarios.schedules import SCHEDULES, code_table
from ..topology.errors import input_error, nearest
from . import engine, recurrence, screen
from .calibration import Calibration, default_calibration, load_calibration
from .collectives import COLLECTIVES
from .costs import JobCost, job_cost
from .memory import memory_of
from .ops import Shapes, step_flop
from .timeline import Played, Program, Tail
from .traffic import Traffic, build_traffic

_PLAYERS: dict[str, Callable[[Program, Tail, Traffic], Played]] = {
    "screen": screen.play,
    "recurrence": recurrence.play,
    "des": engine.play,
    "des-exact": engine.play_exact,
}
FIDELITIES = tuple(_PLAYERS)
INTERVAL_LEVEL = 0.8
MOST_ACTIONS = 20_000_000  # of one step over all stages: about 10 s by recurrence and 10 GB of times
_DAY_S = 86400.0
_HOUR_S = 3600.0


def predict(scenario: Scenario, calibration: Calibration | None = None, fidelity: str = "des") -> Prediction:
    """Predict one step of a scenario, its memory, and the campaign it belongs to.

    Args:
        scenario: What is asked.
        calibration: Achieved figures; the scenario's own or the machine's default where left out.
        fidelity: One of `FIDELITIES`.

    Raises:
        InputError: If the fidelity is unknown, no calibration fits, or the step is too long to play.
    """
    began = time.perf_counter()
    if fidelity not in _PLAYERS:
        raise input_error(f"{fidelity!r} is unknown{nearest(fidelity, FIDELITIES)}", field="fidelity")
    if calibration is None:
        calibration = choose_calibration(scenario)
    traffic = build_traffic(scenario, calibration)
    cost = job_cost(scenario, calibration, traffic)
    program = build_program(scenario, cost, traffic)
    tail = build_tail(scenario, calibration, cost, traffic)
    played = _PLAYERS[fidelity](program, tail, traffic)
    return _answer(scenario, calibration, fidelity, traffic, cost, program, tail, played, began)


def choose_calibration(scenario: Scenario) -> Calibration:
    """The calibration a scenario names, or its machine's default."""
    if scenario.calibration is not None:
        return load_calibration(scenario.calibration)
    return default_calibration(scenario.machine)


def build_program(scenario: Scenario, cost: JobCost, traffic: Traffic) -> Program:
    """The schedule with its durations.

    Raises:
        InputError: If a step has more actions than can be held.
    """
    layout = scenario.layout
    actions = 2 * layout.pp * scenario.micro_batches
    if actions > MOST_ACTIONS:
        raise input_error(
            f"{scenario.micro_batches} micro-batches on {layout.pp} stages are {actions} actions;"
            f" at most {MOST_ACTIONS} can be played; lower training.global_batch or raise layout.micro_batch",
            field="training.global_batch",
        )
    solo = traffic.classes.solo
    boundaries = range(layout.pp - 1)
    return Program(
        table=code_table(SCHEDULES[layout.schedule], layout.pp, scenario.micro_batches),
        forward_s=tuple(stage.forward.total_s for stage in cost.stages),
        backward_s=tuple(stage.backward.total_s for stage in cost.stages),
        up_s=tuple(cost.message_bytes / solo[traffic.forward(b)] for b in boundaries),
        down_s=tuple(cost.message_bytes / solo[traffic.backward(b + 1)] for b in boundaries),
        latency_s=traffic.message_latency_s,
        send_blocks=scenario.framework.pipeline.send_blocks,
        micro_batches=scenario.micro_batches,
        schedule=layout.schedule,
    )


def build_tail(scenario: Scenario, calibration: Calibration, cost: JobCost, traffic: Traffic) -> Tail:
    """What follows the pipeline."""
    dp = scenario.layout.dp
    assert dp is not None
    op = reduce_op(scenario)
    reduce = [COLLECTIVES[op, "ring"].shape(stage.reduce_bytes, dp) for stage in cost.stages]
    gather = [COLLECTIVES["all_gather", "ring"].shape(stage.gather_bytes, dp) for stage in cost.stages]
    embedding = COLLECTIVES["all_reduce", "ring"].shape(cost.embedding_bytes, 2)
    ranks = scenario.layout.tp * scenario.layout.pp
    figures = calibration.network
    return Tail(
        embedding_bytes=embedding.edge_bytes,
        reduce_bytes=tuple(shape.edge_bytes for shape in reduce),
        gather_bytes=tuple(shape.edge_bytes for shape in gather),
        embedding_latency_s=traffic.embedding_ring.seconds(embedding.steps) if cost.embedding_bytes else 0.0,
        reduce_latency_s=traffic.data_ring.seconds(reduce[0].steps),
        gather_latency_s=traffic.data_ring.seconds(gather[0].steps),
        # One number over the model-parallel ranks: a ring would take 2 (n - 1) steps, a tree 2 log2 n.
        barrier_s=figures.base.value + 2 * (ranks - 1).bit_length() * figures.fabric_hop.value if ranks > 1 else 0.0,
        optimizer_s=tuple(stage.optimizer_s for stage in cost.stages),
        overhead_s=calibration.step.overhead.value + (scenario.layout.pp - 1) * calibration.step.hop_overhead.value,
    )


def reduce_op(scenario: Scenario) -> str:
    """How gradients are reduced over the replicas: with ZeRO-1 a framework may scatter the sum."""
    if scenario.layout.zero >= 1 and scenario.framework.reduce.collective == "reduce_scatter":
        return "reduce_scatter"
    return "all_reduce"


def _answer(
    scenario: Scenario,
    calibration: Calibration,
    fidelity: str,
    traffic: Traffic,
    cost: JobCost,
    program: Program,
    tail: Tail,
    played: Played,
    began: float,
) -> Prediction:
    step_s = played.tail.step_s
    shapes = Shapes(scenario.model, scenario.training, scenario.layout)
    layout = scenario.layout
    flop = step_flop(shapes, layout.recompute_by_stage(), layout.layers_by_stage(scenario.model.layers))
    rates = FlopRates(flop.model / step_s / scenario.devices, flop.hardware / step_s / scenario.devices)
    peak = scenario.machine.device.peak_flop_per_s(scenario.training.precision)
    stages = _stage_times(scenario, cost, program, played)
    slowest = max(stages, key=lambda stage: (stage.busy_s, stage.stage)).stage
    return Prediction(
        scenario=scenario.document(),
        step_s=step_s,
        samples_per_s=scenario.training.global_batch / step_s,
        tokens_per_s=scenario.tokens_per_step / step_s,
        tflops_per_device=rates,
        mfu=rates.model / peak,
        hfu=rates.hardware / peak,
        breakdown_s=_breakdown(scenario, cost, tail, played, slowest),
        slowest_stage=slowest,
        comm=_comm(scenario, traffic, cost, played, slowest),
        stages=stages,
        memory=memory_of(scenario, calibration, cost, program, played.timeline),
        interval=_interval(calibration, step_s),
        campaign=_campaign(scenario, step_s),
        calibration=calibration.name,
        fidelity=fidelity,
        engine=Engine(
            events=played.events,
            ops=sum(len(actions) for actions in program.table),
            solves=played.solves,
            wall_s=time.perf_counter() - began,
        ),
        warnings=scenario_warnings(scenario),
    )


def _stage_times(scenario: Scenario, cost: JobCost, program: Program, played: Played) -> tuple[StageTime, ...]:
    times = []
    layers = scenario.layout.layers_by_stage(scenario.model.layers)
    for stage, stage_cost in enumerate(cost.stages):
        forward_s, backward_s = stage_cost.forward.total_s, stage_cost.backward.total_s
        busy = scenario.micro_batches * (forward_s + backward_s) + played.timeline.held_s[stage]
        starts = played.timeline.start[stage]
        end_s = starts[-1] + backward_s if starts else played.timeline.free[stage]
        times.append(StageTime(stage, layers[stage], forward_s, backward_s, busy, end_s))
    return tuple(times)


def _breakdown(scenario: Scenario, cost: JobCost, tail: Tail, played: Played, stage: int) -> Breakdown:
    count = scenario.micro_batches
    both = (cost.stages[stage].forward + cost.stages[stage].backward).times(count)
    ends = played.tail
    parts = {
        "compute": both.compute_s,
        "recompute": both.recompute_s,
        "tp_comm": both.tp_comm_s,
        "pp_comm": both.gather_s + played.timeline.held_s[stage],
        "dp_comm": ends.embedding_s[stage] + ends.reduce_s[stage] + ends.gather_s[stage],
        "optimizer": tail.optimizer_s[stage],
        "other": tail.overhead_s,
    }
    return Breakdown(**parts, bubble=max(ends.step_s - sum(parts.values()), 0.0))


def _comm(scenario: Scenario, traffic: Traffic, cost: JobCost, played: Played, stage: int) -> tuple[CommRecord, ...]:
    layout, count = scenario.layout, scenario.micro_batches
    assert layout.dp is not None
    both = (cost.stages[stage].forward + cost.stages[stage].backward).times(count)
    records = []
    if layout.tp > 1:
        seconds = both.tp_comm_s
        records.append(CommRecord("tp", "all_reduce", "ring", both.tp_bytes, both.tp_count, seconds, seconds))
    if layout.pp > 1:
        messages = count * ((stage < layout.pp - 1) + (stage > 0))
        solo = traffic.classes.solo
        busy = count * sum(
            cost.message_bytes / solo[kind]
            for kind in (
                ([traffic.forward(stage)] if stage < layout.pp - 1 else [])
                + ([traffic.backward(stage)] if stage > 0 else [])
            )
        )
        held = played.timeline.held_s[stage]
        records.append(
            CommRecord("pp", "send", "direct", messages * cost.message_bytes, messages, max(busy, held), held)
        )
        if both.gather_s > 0:
            gathered = messages * (layout.tp - 1) * cost.message_bytes
            records.append(CommRecord("pp", "all_gather", "ring", gathered, messages, both.gather_s, both.gather_s))
    if layout.dp > 1:
        op = reduce_op(scenario)
        for name, size, seconds in (
            (op, cost.stages[stage].reduce_bytes, played.tail.reduce_s[stage]),
            ("all_gather", cost.stages[stage].gather_bytes, played.tail.gather_s[stage]),
        ):
            if size > 0:
                sent = COLLECTIVES[name, "ring"].shape(size, layout.dp).edge_bytes
                records.append(CommRecord("dp", name, "ring", sent, 1, seconds, seconds))
    seconds = played.tail.embedding_s[stage]
    if cost.embedding_bytes > 0 and seconds > 0:
        records.append(CommRecord("embedding", "all_reduce", "ring", cost.embedding_bytes, 1, seconds, seconds))
    return tuple(records)


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
