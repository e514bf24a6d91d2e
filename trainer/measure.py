"""What a run tells of itself: each rank's steps by part, put together into a `Measurement`.

A rank knows when its passes ran and what it waited for; only together do the ranks of a pipeline tell waiting for a
stage that still works (the bubble) from waiting for a message that is under way.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..scenarios.flop import Asked, count_flop
from ..scenarios.result import (
    Breakdown,
    CommRecord,
    FlopRates,
    Interval,
    MeasuredStep,
    Measurement,
    Memory,
    MemoryParts,
    RankMeasurement,
    Spread,
    StageMemory,
    StageTime,
)
from ..scenarios.scenario import Scenario
from .clock import Clock
from .comm import Call
from .loop import StepRecord

STEADY = 1.05  # a step is steady once the running median is within this of what follows; measured on a quiet host
WINDOW = 3  # steps of that median
PARTS = {  # which part of the breakdown a group's waiting belongs to
    "tp": "tp_comm",
    "etp": "tp_comm",
    "cp": "cp_comm",
    "ep": "ep_comm",
    "dp": "dp_comm",
    "edp": "dp_comm",
    "shard": "dp_comm",
    "hybrid": "dp_comm",
    "embedding": "dp_comm",
}
_BREAKDOWN = tuple(Breakdown.__dataclass_fields__)
BOOKKEEPING = "world"  # the loss to be shown and the norm of all gradients: no layout's own communication


@dataclass(frozen=True)
class Traffic:
    """Calls of one operation by one group in one step."""

    bytes: float
    count: int
    busy_s: float
    exposed_s: float


@dataclass(frozen=True)
class RankStep:
    """One step as one rank saw it, in seconds of its host's clock.

    Attributes:
        step: Its number.
        loss: Of the global batch.
        norm: Of all gradients.
        skipped: Whether nothing was updated.
        began_s: When it began, waiting for data not counted.
        step_s: Seconds from there to its end.
        data_s: Seconds that it waited for data before.
        compute_s: Passes, less what they waited for and ran a second time.
        recompute_s: What they ran a second time, less its waiting.
        optimizer_s: Clipping and Adam, less waiting.
        passes_s: From the step's begin to its last backward's end.
        actions: (kind, stage, micro-batch, began, ended) of each pass.
        comm: By group and operation.
        waits: Seconds exposed, by group.
        noise: Squared norms of a replica's gradients and of all, where both are known.
        between_s: Seconds exposed right before each action and behind the one before, as of weights gathered for it.
    """

    step: int
    loss: float
    norm: float
    skipped: bool
    began_s: float
    step_s: float
    data_s: float
    compute_s: float
    recompute_s: float
    optimizer_s: float
    passes_s: float
    actions: tuple[tuple[str, int, int, float, float], ...]
    comm: dict[tuple[str, str], Traffic]
    waits: dict[str, float]
    noise: tuple[float, float] | None = None
    between_s: tuple[float, ...] = ()


def read_step(record: StepRecord, clock: Clock, data_s: float) -> RankStep:
    """A step's points in time as seconds; the device must have passed them all."""
    at = clock.at
    waited = {
        name: [(at(begin), at(end)) for call in calls for begin, end in call.exposed]
        for name, calls in _by_group(record.calls).items()
    }
    blocked = sorted(span for spans in waited.values() for span in spans)
    actions = tuple((d.kind, d.stage, d.micro_batch, at(d.began), at(d.ended)) for d in record.done)
    spans = [(began, ended) for *_, began, ended in actions]
    second = [(at(begin), at(end)) for begin, end in record.second_runs]
    recompute_s = _length(second) - _overlap(second, blocked)
    compute_s = _length(spans) - _overlap(spans, blocked) - recompute_s
    tail = [(at(record.reduced), at(record.updated))]
    began, ended = at(record.began), at(record.ended)
    gaps = zip([began, *(end for _, end in spans)], (begin for begin, _ in spans), strict=False)
    return RankStep(
        step=record.step,
        loss=record.loss,
        norm=record.norm,
        skipped=record.skipped,
        began_s=began,
        step_s=ended - began,
        data_s=data_s,
        compute_s=compute_s,
        recompute_s=recompute_s,
        optimizer_s=_length(tail) - _overlap(tail, blocked),
        passes_s=at(record.passed) - began,
        actions=actions,
        comm={key: _traffic(calls, clock) for key, calls in _by_op(record.calls).items()},
        waits={name: _length(spans) for name, spans in waited.items()},
        noise=record.noise,
        between_s=tuple(_overlap([gap], blocked) for gap in gaps),
    )


def _by_group(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.group].append(call)
    return found


def _by_op(calls: Iterable[Call]) -> dict[tuple[str, str], list[Call]]:
    found: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.group, call.op].append(call)
    return found


def _traffic(calls: Sequence[Call], clock: Clock) -> Traffic:
    return Traffic(
        bytes=sum(call.bytes for call in calls),
        count=len(calls),
        busy_s=sum(clock.seconds(call.began, call.ended) for call in calls),
        exposed_s=sum(clock.seconds(begin, end) for call in calls for begin, end in call.exposed),
    )


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both; neither list's own spans overlap.

    >>> _overlap([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)])
    2.0
    """
    return float(sum(max(min(end, stop) - max(begin, start), 0.0) for begin, end in spans for start, stop in others))


# --- over the ranks of a pipeline -------------------------------------------------------------------------------------


def pipeline_waits(steps: Mapping[int, RankStep]) -> dict[int, tuple[float, float]]:
    """Seconds that each rank of a pipeline stood in the bubble, and waited for messages, in one step.

    Before an action a rank waits for what another makes: as long as that is not made it is the bubble, from then on
    the message. Sends that torch waits for at the end count as messages; ranks that others outlast stand in the bubble.
    What it waited there for other groups is known already, and counts as neither.

    Args:
        steps: The step of each pipeline rank; their clocks agree.
    """
    made: dict[tuple[str, int, int], float] = {}
    last = 0
    for step in steps.values():
        for kind, stage, micro_batch, _, ended in step.actions:
            last = max(last, stage)
            made["F" if kind == "F" else "W" if kind == "W" else "B", stage, micro_batch] = ended
    found = {}
    for rank, step in steps.items():
        bubble = message = 0.0
        before = step.began_s
        between_s = step.between_s or (0.0,) * len(step.actions)
        for (kind, stage, micro_batch, began, ended), known in zip(step.actions, between_s, strict=True):
            needs = None
            if kind == "F" and stage > 0:
                needs = made.get(("F", stage - 1, micro_batch))
            elif kind in "BI" and stage < last:
                needs = made.get(("B", stage + 1, micro_batch))
            wait = max(began - before - known, 0.0)
            idle = wait if needs is None else min(max(needs - before, 0.0), wait)
            idle = 0.0 if needs is None else idle
            bubble, message = bubble + idle, message + wait - idle
            before = ended
        found[rank] = bubble, message
    return found


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """What a rank hands in at the end of a run.

    Attributes:
        place: Its numbers along pp, dp, cp and tp.
        host: Its host's name.
        parameters: Parameters that it holds before ZeRO shards them.
        steps: Every step.
        disturbed: Steps beside which a checkpoint was written, or that a profiler watched.
        profiled: Steps that a profiler watched.
        memory: Bytes at the peak, by part.
        peak_bytes: The peak.
        reserved_bytes: What the allocator held.
        environment: Versions, devices and load.
    """

    rank: int
    place: tuple[int, int, int, int]
    host: str
    parameters: int
    steps: tuple[RankStep, ...]
    disturbed: frozenset[int]
    profiled: frozenset[int]
    memory: MemoryParts
    peak_bytes: float
    reserved_bytes: float
    environment: dict[str, Any] = field(default_factory=dict)


def warm_up(seconds: Sequence[float]) -> int:
    """Steps before a run is steady: until the running median comes within 5 % of the median of the second half.

    The first step, which makes buffers and connections, never counts where there are others.

    >>> warm_up([9.0, 2.0, 1.0, 1.0, 1.01, 1.0, 0.99, 1.0])
    1
    >>> warm_up([9.0, 9.0, 9.0, 1.0, 1.01, 1.0, 0.99, 1.0])
    2
    """
    if len(seconds) < 2:
        return 0
    steady = statistics.median(seconds[len(seconds) // 2 :])
    for first in range(1, len(seconds)):
        if statistics.median(seconds[first : first + WINDOW]) <= STEADY * steady:
            return first
    return len(seconds) - 1


def measurement(scenario: Scenario, reports: Sequence[RankReport], warnings: Sequence[str] = ()) -> Measurement:
    """The whole run, from what its ranks hand in.

    Raises:
        ValueError: If there is no step.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    steps = _steps(reports)
    if not steps:
        raise ValueError("a run without a step has no measurement")
    counted = [number for number, step in enumerate(steps) if step.counted]
    times = [steps[number].step_s for number in counted]
    spread = spread_of(times)
    ranks = tuple(_rank(scenario, reports, index, counted) for index in range(len(reports)))
    busy = [rank.breakdown_s.compute + rank.breakdown_s.recompute for rank in ranks]
    slowest = ranks[max(range(len(ranks)), key=lambda index: (busy[index], ranks[index].pp))]
    asked = Asked.of(scenario.model, scenario.training, scenario.layout)
    step_s, devices = spread.median, scenario.devices
    rates = FlopRates(*(count_flop(way, asked) / step_s / devices for way in ("model", "hardware")))
    peak = scenario.machine.device.peak.get(scenario.training.precision)
    peak_rate = (
        scenario.machine.device.peak_flop_per_s(scenario.training.precision) if peak is not None else float("inf")
    )
    return Measurement(
        scenario=scenario.document(),
        step_s=step_s,
        samples_per_s=scenario.training.global_batch / step_s,
        tokens_per_s=scenario.tokens_per_step / step_s,
        tflops_per_device=rates,
        mfu=rates.model / peak_rate,
        hfu=rates.hardware / peak_rate,
        breakdown_s=_to_step(slowest.breakdown_s, step_s),
        slowest_stage=slowest.pp,
        comm=slowest.comm,
        stages=_stages(scenario, reports, counted),
        memory=_memory(scenario, ranks),
        interval=Interval(0.8, (spread.p10, spread.p90), f"the middle 80 % of {len(times)} steps"),
        spread_s=spread,
        steps=tuple(steps),
        warmup_steps=counted[0],
        data_s=statistics.median(steps[number].data_s for number in counted),
        noise_scale=noise_scale(scenario, reports[0], counted),
        profiler_overhead=_overhead(reports, steps, spread.median),
        ranks=ranks,
        environment=_environment(reports),
        warnings=tuple(warnings),
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Median, tenth and ninetieth percentile, and the coefficient of variation.

    >>> spread_of([1.0, 1.0, 4.0]).median
    1.0
    """
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    mean = float(np.mean(values))
    return Spread(median, p10, p90, float(np.std(values)) / mean if mean else 0.0)


def _steps(reports: Sequence[RankReport]) -> list[MeasuredStep]:
    together = list(zip(*(report.steps for report in reports), strict=False))
    seconds = [max(step.step_s + step.data_s for step in ranks) for ranks in together]
    disturbed = frozenset(number for report in reports for number in report.disturbed)
    free = [number for number, ranks in enumerate(together) if ranks[0].step not in disturbed]
    first = free[min(warm_up([seconds[number] for number in free]), len(free) - 1)] if free else len(together)
    counted = {number for number in free if number >= first} or set(range(len(together)))
    return [
        MeasuredStep(
            step=ranks[0].step,
            loss=ranks[0].loss,
            gradient_norm=ranks[0].norm if np.isfinite(ranks[0].norm) else None,
            step_s=seconds[number],
            data_s=max(step.data_s for step in ranks),
            skipped=ranks[0].skipped,
            counted=number in counted,
        )
        for number, ranks in enumerate(together)
    ]


def _rank(scenario: Scenario, reports: Sequence[RankReport], index: int, counted: Sequence[int]) -> RankMeasurement:
    report = reports[index]
    pp, dp, cp, tp = report.place
    pipeline = {other.place[0]: other for other in reports if other.place[1:] == report.place[1:]}
    found = []
    for number in counted:
        step = report.steps[number]
        bubble, message = pipeline_waits({rank: other.steps[number] for rank, other in pipeline.items()})[pp]
        parts: dict[str, float] = defaultdict(float)
        for group, seconds in step.waits.items():
            parts[PARTS.get(group, "bubble")] += seconds
        if scenario.layout.pp == 1:
            bubble = message = 0.0
        parts["bubble"] += bubble
        parts["pp_comm"] += message
        parts |= {"compute": step.compute_s, "recompute": step.recompute_s, "optimizer": step.optimizer_s}
        whole = step.step_s + step.data_s
        found.append(Breakdown(**parts, other=whole - sum(parts.values())))
    # Medians of parts do not sum to the median of the whole; means do, so they are scaled to it.
    means = Breakdown(**{name: statistics.fmean(getattr(one, name) for one in found) for name in _BREAKDOWN})
    breakdown = _to_step(means, statistics.median(one.total for one in found))
    return RankMeasurement(
        rank=report.rank,
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        host=report.host,
        parameters=report.parameters,
        breakdown_s=breakdown,
        comm=_comm(report, counted, breakdown.pp_comm),
        memory=report.memory,
        peak_bytes=report.peak_bytes,
        reserved_bytes=report.reserved_bytes,
    )


def _to_step(parts: Breakdown, step_s: float) -> Breakdown:
    """The same shares of another step time."""
    factor = step_s / parts.total if parts.total else 1.0
    return Breakdown(**{name: factor * getattr(parts, name) for name in _BREAKDOWN})


def _comm(report: RankReport, counted: Sequence[int], messages_s: float) -> tuple[CommRecord, ...]:
    keys = dict.fromkeys(key for number in counted for key in report.steps[number].comm)
    records = []
    for group, op in keys:
        if group == BOOKKEEPING:
            continue
        calls = [report.steps[number].comm[group, op] for number in counted if (group, op) in report.steps[number].comm]
        exposed_s = statistics.median(call.exposed_s for call in calls)
        if group == "pp":
            exposed_s = messages_s
        busy_s = max(statistics.median(call.busy_s for call in calls), exposed_s)
        sent = statistics.median(call.bytes for call in calls)
        records.append(
            CommRecord(group, op, "as run", sent, int(statistics.median(c.count for c in calls)), busy_s, exposed_s)
        )
    return tuple(records)


def _stages(scenario: Scenario, reports: Sequence[RankReport], counted: Sequence[int]) -> tuple[StageTime, ...]:
    layers = scenario.layout.layers_by_stage(scenario.model.layers)
    found = []
    for stage in range(scenario.layout.pp):
        mine = [report for report in reports if report.place[0] == stage]
        steps = [report.steps[number] for report in mine for number in counted]
        count = scenario.micro_batches

        def each(kinds: str, steps: list[RankStep] = steps) -> float:
            return statistics.median(
                _length((b, e) for kind, _, _, b, e in step.actions if kind in kinds) for step in steps
            )

        ends = [max((a[4] for a in step.actions), default=step.began_s) - step.began_s for step in steps]
        forward_s, backward_s = each("F"), each("BIW")
        found.append(
            StageTime(
                stage=stage,
                layers=layers[stage],
                forward_s=forward_s / count,
                backward_s=backward_s / count,
                busy_s=forward_s + backward_s,
                end_s=statistics.median(ends),
            )
        )
    return tuple(found)


def _memory(scenario: Scenario, ranks: Sequence[RankMeasurement]) -> Memory:
    stages = []
    for stage in range(scenario.layout.pp):
        worst = max((rank for rank in ranks if rank.pp == stage), key=lambda rank: rank.peak_bytes)
        stages.append(
            StageMemory(
                stage=stage,
                peak_bytes=worst.peak_bytes,
                reserved_bytes=worst.reserved_bytes,
                device_bytes=worst.reserved_bytes,
                peak_s=0.0,
                peak_during="the run",
                parts=worst.memory,
                between_steps_bytes=worst.memory.parameters + worst.memory.gradients + worst.memory.optimizer,
            )
        )
    return Memory("fits", scenario.machine.device.memory_bytes, 0.0, 0.0, tuple(stages))


def noise_scale(scenario: Scenario, report: RankReport, counted: Sequence[int]) -> float | None:
    """The simple noise scale tr(Sigma) / |G|^2 in sequences, from squared norms at two batch sizes.

    With the gradient of one replica (b sequences) and of all (B), the norms' expectations are |G|^2 + tr(Sigma) / b
    and |G|^2 + tr(Sigma) / B; both are averaged over the steps before they are solved for.

    Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
    """
    known = [report.steps[number].noise for number in counted if report.steps[number].noise is not None]
    replicas = scenario.dp
    if not known or replicas == 1:
        return None
    small, big = (float(np.mean([pair[index] for pair in known if pair])) for index in (0, 1))
    batch = scenario.training.global_batch
    few = batch / replicas
    signal = (batch * big - few * small) / (batch - few)
    noise = (small - big) / (1.0 / few - 1.0 / batch)
    return noise / signal if signal > 0 and noise > 0 else None


def _overhead(reports: Sequence[RankReport], steps: Sequence[MeasuredStep], median_s: float) -> float | None:
    watched = [step.step_s for step in steps if step.step in reports[0].profiled]
    if not watched or any(step.counted and step.step in reports[0].profiled for step in steps):
        return None  # without a step that nobody watched there is nothing to compare with
    return statistics.median(watched) / median_s - 1.0


def _environment(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Of rank 0, with every host's load."""
    hosts = {report.host: report.environment.get("load") for report in reports}
    return {**reports[0].environment, "hosts": hosts}
