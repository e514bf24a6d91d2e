"""What a run tells of itself, from timelines made by hand."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

pytest.importorskip("torch")

from exatwin.scenarios.result import MemoryParts
from exatwin.scenarios.schedules import SCHEDULES, schedule_table
from exatwin.trainer.clock import Clock
from exatwin.trainer.comm import Call
from exatwin.trainer.loop import StepRecord, Trainer
from exatwin.trainer.measure import (
    RankReport,
    RankStep,
    Traffic,
    measurement,
    noise_scale,
    pipeline_waits,
    read_step,
    spread_of,
    warm_up,
)
from exatwin.trainer.parallel.pipeline import Done

from .ranks import batch_of, grid_of, on_ranks, quiet_ranks, scenario_of  # noqa: F401


def step_of(actions=(), *, began_s=0.0, step_s=None, number=0, **more):
    """A step of these passes; it ends with the last of them unless said otherwise."""
    actions = tuple(actions)
    end = max((action[4] for action in actions), default=began_s)
    parts = {
        "loss": 1.0,
        "norm": 1.0,
        "skipped": False,
        "data_s": 0.0,
        "compute_s": sum(ended - began for *_, began, ended in actions),
        "recompute_s": 0.0,
        "optimizer_s": 0.0,
        "passes_s": end - began_s,
        "comm": {},
        "waits": {},
    }
    whole = end - began_s if step_s is None else step_s
    return RankStep(number, began_s=began_s, step_s=whole, actions=actions, **(parts | more))


def report_of(steps, rank=0, place=(0, 0, 0, 0), **more):
    memory = MemoryParts(parameters=10.0, gradients=20.0, optimizer=30.0, activations=40.0)
    parts = {"disturbed": frozenset(), "profiled": frozenset(), "memory": memory}
    return RankReport(
        rank=rank,
        place=place,
        host="here",
        parameters=7,
        steps=tuple(steps),
        peak_bytes=100.0,
        reserved_bytes=120.0,
        **(parts | more),
    )


# --- warm-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ([], 0),
        ([5.0], 0),
        ([1.0] * 10, 1),  # the first never counts
        ([9.0] + [1.0] * 9, 1),
        ([9.0, 3.0, 2.0] + [1.0] * 9, 2),  # the median of 2, 1 and 1 is 1
        ([9.0, 3.0, 2.0, 1.5] + [1.0] * 12, 3),
        ([1.0, 1.0, 1.0, 7.0] + [1.0] * 12, 1),  # one slow step later is no warm-up
        ([2.0, 1.8, 1.6, 1.4, 1.2] + [1.0] * 15, 4),
        ([2.0, 1.0], 1),
    ],
)
def test_warm_up_ends_where_the_running_median_is_steady(seconds, first):
    assert warm_up(seconds) == first


def test_warm_up_of_noise_alone_is_short():
    generator = np.random.default_rng(1)
    assert all(warm_up(1 + 0.02 * generator.standard_normal(40)) <= 2 for _ in range(50))


# --- spread -----------------------------------------------------------------------------------------------------------


def test_spread_is_median_percentiles_and_variation():
    spread = spread_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (spread.median, spread.p10, spread.p90) == pytest.approx((6.0, 2.0, 10.0))
    assert spread.cv == pytest.approx(math.sqrt(10) / 6)
    alone = spread_of([3.0])
    assert (alone.median, alone.p10, alone.p90, alone.cv) == (3.0, 3.0, 3.0, 0.0)


# --- pipeline ---------------------------------------------------------------------------------------------------------


def test_waiting_for_a_stage_is_bubble_and_what_comes_after_is_the_message():
    """Two stages, one micro-batch: passes of 2 and 3 s, messages of 0.5 s.

    Stage 1 waits 2 s for the forward and 0.5 s for its message; stage 0 then from 2 to 7.5 for the backward, and
    0.5 s for its message.
    """
    steps = {
        0: step_of([("F", 0, 0, 0.0, 2.0), ("B", 0, 0, 8.0, 11.0)]),
        1: step_of([("F", 1, 0, 2.5, 4.5), ("B", 1, 0, 4.5, 7.5)]),
    }
    assert pipeline_waits(steps) == {0: pytest.approx((5.5, 0.5)), 1: pytest.approx((2.0, 0.5))}


def test_what_was_made_long_ago_is_no_bubble():
    """A wait for something that lies ready is the message's."""
    steps = {
        0: step_of([("F", 0, 0, 0.0, 1.0), ("F", 0, 1, 1.0, 2.0)]),
        1: step_of([("F", 1, 0, 1.0, 5.0), ("F", 1, 1, 5.75, 9.75)]),
    }
    assert pipeline_waits(steps)[1] == pytest.approx((1.0, 0.75))


def test_a_wait_that_needs_no_other_stage_is_the_messages():
    """As of the first stage between two forwards, while torch waits for its sends."""
    assert pipeline_waits({0: step_of([("F", 0, 0, 0.0, 1.0), ("F", 0, 1, 1.25, 2.0)])}) == {0: (0.0, 0.25)}


def test_what_a_rank_waited_for_other_groups_is_not_counted_again():
    """Of the 3 s before stage 1's forward it gathered weights for one; stage 0's forward was under way for two."""
    steps = {
        0: step_of([("F", 0, 0, 0.0, 2.0)]),
        1: step_of([("F", 1, 0, 3.0, 4.0)], between_s=(1.0,)),
    }
    assert pipeline_waits(steps)[1] == (2.0, 0.0)


def test_halves_of_a_backward_wait_for_the_input_gradient_alone():
    """The first stage's I needs what the last stage's I made, whatever became of its W."""
    steps = {
        0: step_of([("F", 0, 0, 0.0, 1.0), ("I", 0, 0, 3.0, 4.0), ("W", 0, 0, 4.0, 5.0)]),
        1: step_of([("F", 1, 0, 1.0, 2.0), ("I", 1, 0, 2.0, 3.0), ("W", 1, 0, 3.0, 9.0)]),
    }
    assert pipeline_waits(steps) == {0: (2.0, 0.0), 1: (1.0, 0.0)}


def test_a_step_that_begins_late_waits_less():
    steps = {
        0: step_of([("F", 0, 0, 10.0, 12.0)], began_s=10.0),
        1: step_of([("F", 1, 0, 12.0, 14.0)], began_s=11.5),
    }
    assert pipeline_waits(steps)[1] == (0.5, 0.0)


def played(name, ranks, micro_batches, forward_s=1.0, backward_s=2.0):
    """The steps of a schedule whose messages are free, each action as early as what it needs."""
    schedule = SCHEDULES[name]
    table = schedule_table(schedule, ranks, micro_batches)
    last = ranks * schedule.least_chunks - 1
    seconds = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    ended, actions, at = {}, [[] for _ in table], [0.0] * ranks
    while any(len(done) < len(row) for done, row in zip(actions, table, strict=True)):
        for rank, row in enumerate(table):
            if len(actions[rank]) == len(row):
                continue
            action = row[len(actions[rank])]
            kind, stage, number = action.kind, action.stage, action.micro_batch
            needs = [("F", stage - 1, number)] if kind == "F" and stage else []
            needs += [("B", stage + 1, number)] if kind in "BI" and stage < last else []
            if any(need not in ended for need in needs):
                continue
            begin = max([at[rank], *(ended[need] for need in needs)])
            at[rank] = begin + seconds[kind]
            ended["B" if kind == "I" else kind, stage, number] = at[rank]
            actions[rank].append((kind, stage, number, begin, at[rank]))
    return {rank: step_of(done) for rank, done in enumerate(actions)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
def test_with_free_messages_all_waiting_is_bubble(name, ranks, micro_batches):
    """Of every schedule: bubble and work sum to a rank's last action."""
    steps = played(name, ranks, micro_batches)
    for rank, (bubble, message) in pipeline_waits(steps).items():
        assert message == pytest.approx(0.0, abs=1e-9)
        assert bubble + steps[rank].compute_s == pytest.approx(max(action[4] for action in steps[rank].actions))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 4)])
def test_the_bubble_of_1f1b_is_its_closed_form(ranks, micro_batches):
    """The first stage works m (f + b) and waits (p - 1) (f + b)."""
    bubble, _ = pipeline_waits(played("1f1b", ranks, micro_batches))[0]
    assert bubble == pytest.approx((ranks - 1) * 3.0)


# --- one rank's step --------------------------------------------------------------------------------------------------


def test_a_step_is_read_from_its_points_in_time():
    """Two passes from 1 to 7, a quarter apart; the second runs something again. Adam works from 8 to 9."""
    calls = (
        Call("tp", "all_reduce", 64.0, 1.5, 2.5, [(1.5, 2.5)]),
        Call("tp", "all_reduce", 64.0, 5.0, 5.5, [(5.0, 5.5)]),  # within the second run
        Call("dp", "all_reduce", 256.0, 7.0, 8.0, [(7.0, 8.0)]),
        Call("world", "all_reduce", 8.0, 8.0, 8.25, [(8.0, 8.25)]),
        Call("shard", "all_gather", 32.0, 3.0, 6.0, [(3.25, 3.5)]),  # beside the passes, all but a quarter
        Call("shard", "all_gather", 32.0, 4.0, 4.25, [(4.0, 4.25)]),  # between them
    )
    record = StepRecord(
        step=3,
        loss=2.0,
        norm=0.5,
        skipped=False,
        began=1.0,
        passed=7.0,
        reduced=8.0,
        updated=9.0,
        ended=9.5,
        done=(Done("F", 0, 0, 1.0, 4.0), Done("B", 0, 0, 4.25, 7.0)),
        calls=calls,
        second_runs=((4.5, 5.5),),
    )
    step = read_step(record, Clock(), data_s=0.25)
    assert (step.step, step.loss, step.norm, step.data_s) == (3, 2.0, 0.5, 0.25)
    assert (step.began_s, step.step_s, step.passes_s) == (1.0, 8.5, 6.0)
    assert step.recompute_s == pytest.approx(1.0 - 0.5)
    assert step.compute_s == pytest.approx(5.75 - 1.0 - 0.5 - 0.25 - step.recompute_s)
    assert step.optimizer_s == pytest.approx(0.75)
    assert step.waits == pytest.approx({"tp": 1.5, "dp": 1.0, "world": 0.25, "shard": 0.5})
    assert step.comm["tp", "all_reduce"] == Traffic(bytes=128.0, count=2, busy_s=1.5, exposed_s=1.5)
    assert step.comm["shard", "all_gather"] == Traffic(bytes=64.0, count=2, busy_s=3.25, exposed_s=0.5)
    assert step.actions == (("F", 0, 0, 1.0, 4.0), ("B", 0, 0, 4.25, 7.0))
    assert step.between_s == (0.0, 0.25)


# --- the noise scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "each"), [(2, 4), (8, 1), (4, 16)])
def test_the_noise_scale_is_that_of_gradients_with_known_noise(replicas, each):
    """Gradients of sequences scatter around G with variance s^2 in each of D directions: tr / |G|^2 = D s^2 / |G|^2."""
    generator = np.random.default_rng(7)
    directions, spread = 50, 0.8
    mean = generator.standard_normal(directions)
    true = directions * spread**2 / (mean @ mean)
    steps = []
    for number in range(400):
        gradients = mean + spread * generator.standard_normal((replicas, each, directions))
        alone = gradients.mean(1)
        noise = (float((alone**2).sum(1).mean()), float((alone.mean(0) ** 2).sum()))
        steps.append(step_of(number=number, noise=noise))
    scenario = scenario_of(f"dp={replicas} micro_batch=1 training.global_batch={replicas * each}")
    found = noise_scale(scenario, report_of(steps), range(len(steps)))
    assert found == pytest.approx(true, rel=0.1)


def test_exact_norms_give_the_exact_noise_scale():
    """|G|^2 = 2 and tr = 12: with 2 and 8 sequences the norms are 8 and 3.5."""
    scenario = scenario_of("dp=4 training.global_batch=8")
    assert noise_scale(scenario, report_of([step_of(noise=(8.0, 3.5))]), [0]) == pytest.approx(6.0)


def stepped(rank, scenario, steps):
    """This rank's records of some steps, and its place."""
    grid = grid_of(scenario, rank)
    trainer = Trainer(scenario, grid, seed=1)
    begin, count = trainer.rows
    records = [trainer.step(step, batch_of(scenario, step)[begin : begin + count]) for step in range(steps)]
    place = grid.place.pp, grid.place.dp, grid.place.cp, grid.place.tp
    return place, [read_step(record, Clock(), 0.0) for record in records]


@pytest.mark.parametrize("changes", ["dp=2", "dp=2 zero=1", "dp=2 tp=2", "dp=2 pp=2 model.tied=false"])
def test_norms_for_the_noise_scale_are_those_of_each_replica_and_of_all(changes):
    """As one process finds them on either half of the batch, and on all of it."""
    scenario = scenario_of(changes)
    batch = batch_of(scenario, 0)
    model = "model.tied=false" if "tied" in changes else ""

    def norm(rows):
        alone = scenario_of(f"training.global_batch={len(rows)} {model}")
        return Trainer(alone, grid_of(alone, 0), seed=1).step(0, rows).norm

    expected = (norm(batch[:4]) ** 2 + norm(batch[4:]) ** 2) / 2, norm(batch) ** 2
    for _, (step,) in on_ranks(scenario.devices, stepped, scenario, 1):
        assert step.noise == pytest.approx(expected, rel=1e-5)


def test_the_noise_scale_is_unknown_where_nothing_tells_it():
    known = report_of([step_of(noise=(8.0, 3.5))])
    assert noise_scale(scenario_of("dp=1"), known, [0]) is None  # one batch size alone
    assert noise_scale(scenario_of("dp=4"), report_of([step_of()]), [0]) is None
    assert noise_scale(scenario_of("dp=4"), report_of([step_of(noise=(1.0, 2.0))]), [0]) is None  # chance


# --- the whole --------------------------------------------------------------------------------------------------------


def reports_of(scenario, times=(3.0, 1.0, 1.0, 1.1, 0.9, 1.0)):
    """Two pipeline ranks, some steps: rank 1 works longer; each waits for tensor and data ranks as well."""
    reports = []
    for rank, share in enumerate((0.5, 0.7)):
        steps = []
        at = 0.0
        for number, seconds in enumerate(times):
            begin = at + 0.1 * rank * seconds
            busy = share * seconds / 4
            actions = [("F", rank, n, begin + n * busy, begin + (n + 1) * busy) for n in range(4)]
            steps.append(
                replace(
                    step_of(actions, began_s=at, step_s=seconds - 0.02, number=number),
                    data_s=0.02,
                    recompute_s=0.05 * seconds,
                    compute_s=share * seconds * 0.7,
                    optimizer_s=0.03 * seconds,
                    waits={"tp": 0.04 * seconds, "dp": 0.06 * seconds, "world": 0.01 * seconds},
                    comm={
                        ("tp", "all_reduce"): Traffic(100.0, 4, 0.04 * seconds, 0.04 * seconds),
                        ("dp", "all_reduce"): Traffic(50.0, 1, 0.08 * seconds, 0.06 * seconds),
                        ("world", "all_reduce"): Traffic(8.0, 2, 0.01 * seconds, 0.01 * seconds),
                    },
                    loss=5.0 - number,
                )
            )
            at += seconds
        reports.append(report_of(steps, rank, (rank, 0, 0, 0)))
    return reports


def test_a_breakdown_sums_to_the_step():
    scenario = scenario_of("pp=2")
    found = measurement(scenario, reports_of(scenario))
    assert found.breakdown_s.total == pytest.approx(found.step_s)
    assert found.step_s == pytest.approx(1.0)
    for rank in found.ranks:
        assert rank.breakdown_s.total == pytest.approx(1.0)
        assert rank.breakdown_s.tp_comm == pytest.approx(0.04, rel=0.01)
        assert rank.breakdown_s.dp_comm == pytest.approx(0.06, rel=0.01)
        assert rank.breakdown_s.optimizer == pytest.approx(0.03, rel=0.01)
        assert rank.breakdown_s.recompute == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "dp=2",
        "tp=2 pp=2",
        "pp=2 vpp=2 schedule=zb-v",
        "dp=2 zero=3 recompute=full",
        "pp=2 dp=2 zero=3",
        "pp=2 dp=2 zero=1",
        "cp=2",
    ],
)
def test_a_breakdown_of_a_real_run_sums_to_the_step_with_no_part_below_zero(changes):
    """Nothing is counted twice, so that what is left over is time as well."""
    scenario = scenario_of(changes)
    ranks = on_ranks(scenario.devices, stepped, scenario, 4)
    found = measurement(scenario, [report_of(steps, rank, place) for rank, (place, steps) in enumerate(ranks)])
    for parts in [found.breakdown_s, *(rank.breakdown_s for rank in found.ranks)]:
        assert min(asdict(parts).values()) >= -1e-6  # sums of many points in time
    assert found.breakdown_s.total == pytest.approx(found.step_s)
    assert found.breakdown_s.compute > 0
    assert (found.breakdown_s.recompute > 0) == ("recompute" in changes)


def test_the_loss_is_a_part_of_the_last_stages_forward():
    """It sums over the tensor ranks; with no weights to be gathered none of that lies between the passes."""
    scenario = scenario_of("tp=2 pp=2")
    for place, steps in on_ranks(4, stepped, scenario, 2):
        for step in steps:
            assert len(step.between_s) == 2 * scenario.micro_batches
            assert not any(step.between_s), place


def test_a_measurement_counts_steady_steps():
    """The first of six does not count; rates are those of the median."""
    scenario = scenario_of("pp=2")
    found = measurement(scenario, reversed(reports_of(scenario)))
    assert found.warmup_steps == 1
    assert [step.counted for step in found.steps] == [False, True, True, True, True, True]
    assert [step.loss for step in found.steps] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert found.samples_per_s == pytest.approx(8 / found.step_s)
    assert found.tokens_per_s == pytest.approx(8 * 32 / found.step_s)
    assert found.data_s == pytest.approx(0.02)
    assert (found.spread_s.p10, found.spread_s.p90) == found.interval.step_s
    assert [rank.rank for rank in found.ranks] == [0, 1]


def test_the_slowest_rank_is_the_one_that_works_longest():
    scenario = scenario_of("pp=2")
    found = measurement(scenario, reports_of(scenario))
    assert found.slowest_stage == 1
    assert {(record.group, record.op): record.bytes for record in found.comm} == {
        ("tp", "all_reduce"): 100.0,
        ("dp", "all_reduce"): 50.0,
    }


def test_disturbed_steps_do_not_count():
    """Beside a checkpoint, or watched by a profiler, whose cost is told."""
    scenario = scenario_of("pp=2")
    first, second = reports_of(scenario, (3.0, 1.0, 1.0, 8.0, 1.0, 1.5))
    first = replace(first, disturbed=frozenset({3, 5}), profiled=frozenset({5}))
    found = measurement(scenario, [first, second])
    assert [step.step for step in found.steps if step.counted] == [1, 2, 4]
    assert found.step_s == pytest.approx(1.0)
    assert found.profiler_overhead == pytest.approx(0.5)


def test_a_run_of_one_step_is_measured():
    scenario = scenario_of("pp=2")
    found = measurement(scenario, reports_of(scenario, (2.0,)))
    assert (found.step_s, found.warmup_steps) == (pytest.approx(2.0), 0)
    assert found.breakdown_s.total == pytest.approx(2.0)


def test_a_run_without_a_step_has_no_measurement():
    with pytest.raises(ValueError, match="without a step"):
        measurement(scenario_of(), [report_of([])])


def test_a_norm_that_is_no_number_is_left_out():
    steps = [step_of([("F", 0, 0, 0.0, 1.0)], norm=math.inf, skipped=True), step_of([("F", 0, 0, 0.0, 1.0)], number=1)]
    found = measurement(scenario_of(), [report_of(steps)])
    assert [(step.gradient_norm, step.skipped) for step in found.steps] == [(None, True), (1.0, False)]
