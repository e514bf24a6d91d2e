"""What holds for every pipeline schedule, whatever the ranks, chunks and micro-batches."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.schedules import (
    KINDS,
    SCHEDULES,
    FileSchedule,
    check_table,
    code_table,
    from_csv,
    in_flight,
    makespan,
    misfits,
    most_held,
    schedule_table,
    split_code,
    to_csv,
)
from exatwin.topology.errors import InputError

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
sizes = given(ranks=st.integers(1, 9), more=st.integers(0, 24), chunks=st.integers(1, 4))


def sized(schedule, ranks, more, chunks):
    """Ranks, micro-batches and chunks that the schedule runs with."""
    allowed = schedule.chunks or range(schedule.least_chunks, 5)
    return ranks, schedule.least_micro_batches(ranks) + more, allowed[min(chunks, len(allowed)) - 1]


@every_schedule
@sizes
def test_every_stage_runs_each_micro_batch_forward_then_backward_once(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    for rank, row in enumerate(schedule_table(schedule, ranks, micro_batches, chunks)):
        assert {action.stage for action in row} == {schedule.stage_of(rank, c, ranks) for c in range(chunks)}
        runs = {}
        for action in row:
            runs.setdefault((action.stage, action.micro_batch), []).append(action.kind)
        assert len(runs) == chunks * micro_batches
        assert {"".join(kinds) for kinds in runs.values()} <= {"FB", "FIW"}
        assert schedule.splits_backward or all("I" not in kinds for kinds in runs.values())


@every_schedule
@sizes
def test_no_schedule_waits_for_ever(schedule, ranks, more, chunks):
    check_table(schedule_table(schedule, *sized(schedule, ranks, more, chunks)))


@every_schedule
@sizes
def test_a_step_takes_at_least_its_work_and_the_way_of_one_micro_batch(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    step_s = makespan(schedule_table(schedule, ranks, micro_batches, chunks), 1.0, 2.5, input_s=1.3)
    assert step_s >= micro_batches * chunks * 3.5 - 1e-9
    assert step_s >= ranks * chunks * 2.3 + 1.2 * (not schedule.splits_backward) - 1e-9


@every_schedule
@sizes
def test_a_rank_holds_as_many_passes_as_its_schedule_claims(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    table = schedule_table(schedule, ranks, micro_batches, chunks)
    codes = code_table(schedule, ranks, micro_batches, chunks)
    claimed = [schedule.most_in_flight(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    assert [in_flight(row) for row in table] == [most_held(row) for row in codes] == claimed


@every_schedule
@sizes
def test_a_stage_has_one_home(schedule, ranks, more, chunks):
    ranks, _, chunks = sized(schedule, ranks, more, chunks)
    homes = [schedule.home(stage, ranks, chunks) for stage in range(ranks * chunks)]
    assert sorted(homes) == [(rank, chunk) for rank in range(ranks) for chunk in range(chunks)]
    assert [schedule.stage_of(*home, ranks) for home in homes] == list(range(ranks * chunks))


@every_schedule
@sizes
def test_neighbouring_stages_are_on_neighbouring_ranks_or_on_one(schedule, ranks, more, chunks):
    ranks, _, chunks = sized(schedule, ranks, more, chunks)
    homes = [schedule.home(stage, ranks, chunks)[0] for stage in range(ranks * chunks)]
    assert {(b - a) % ranks for a, b in pairwise(homes)} <= {0, 1 % ranks, -1 % ranks}


@every_schedule
@sizes
def test_a_code_and_an_action_say_the_same(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    table = schedule_table(schedule, ranks, micro_batches, chunks)
    for row, codes in zip(table, code_table(schedule, ranks, micro_batches, chunks), strict=True):
        assert list(codes) == [
            action.code(schedule.home(action.stage, ranks, chunks)[1], micro_batches) for action in row
        ]
        assert all(
            code == KINDS * (c * micro_batches + i) + kind
            for code in codes
            for kind, c, i in [split_code(code, micro_batches)]
        )


@every_schedule
@sizes
def test_a_table_survives_its_text_form(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    table = schedule_table(schedule, ranks, micro_batches, chunks)
    assert from_csv(to_csv(table)) == table


@every_schedule
@sizes
def test_a_schedule_written_to_a_file_is_the_schedule(schedule, ranks, more, chunks):
    ranks, micro_batches, chunks = sized(schedule, ranks, more, chunks)
    read = FileSchedule("mine.csv", schedule_table(schedule, ranks, micro_batches, chunks))
    assert read.shape == (ranks, micro_batches)
    assert read.chunks == (chunks,)
    assert read.splits_backward == schedule.splits_backward
    assert code_table(read, ranks, micro_batches, chunks) == code_table(schedule, ranks, micro_batches, chunks)
    for rank in range(ranks):
        sizes = (rank, ranks, micro_batches, chunks)
        assert read.most_in_flight(*sizes) == schedule.most_in_flight(*sizes)
    assert [f.field for f in misfits(read, ranks + 1, chunks + 1)] == ["layout.pp", "layout.vpp"]
    assert [f.field for f in misfits(read, ranks, chunks, micro_batches + 1)] == ["training.global_batch"]


@every_schedule
def test_a_schedule_says_what_it_cannot_be_run_with(schedule):
    for chunks in range(1, 5):
        fits = chunks in schedule.chunks if schedule.chunks else chunks >= schedule.least_chunks
        found = misfits(schedule, 4, chunks, 16)
        assert [problem.field for problem in found] == ([] if fits else ["layout.vpp"])
    least = schedule.least_micro_batches(4)
    if least > 1:
        with pytest.raises(InputError, match=f"needs {least} on 4 ranks"):
            code_table(schedule, 4, least - 1)


@every_schedule
def test_the_table_of_a_large_step_takes_no_time(schedule):
    began = time.process_time()
    code_table(schedule, 64, 1600)
    assert time.process_time() - began < 0.5
