"""The contract of every schedule, and the table's text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.schedules import (
    SCHEDULES,
    Action,
    check_table,
    from_csv,
    in_flight,
    makespan,
    schedule_table,
    to_csv,
)
from exatwin.topology.errors import InputError

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
stages_and_micro_batches = given(stages=st.integers(1, 9), micro_batches=st.integers(1, 20))


@every_schedule
@stages_and_micro_batches
def test_every_stage_runs_each_micro_batch_forward_then_backward_once(schedule, stages, micro_batches):
    for stage, actions in enumerate(schedule_table(schedule, stages, micro_batches)):
        assert all(action.stage == stage for action in actions)
        position = {action: i for i, action in enumerate(actions)}
        assert len(actions) == len(position) == 2 * micro_batches
        for i in range(micro_batches):
            assert position[Action("F", stage, i)] < position[Action("B", stage, i)]


@every_schedule
@stages_and_micro_batches
def test_no_schedule_waits_for_ever_or_beats_its_work(schedule, stages, micro_batches):
    table = schedule_table(schedule, stages, micro_batches)
    check_table(table)
    assert makespan(table, 1.0, 2.0) >= (micro_batches + stages - 1) * 3.0


@every_schedule
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (4, 4), (8, 32), (4, 2)])
def test_pipeline_fills_and_drains_once(schedule, stages, micro_batches):
    """With free messages a step is (m + p - 1) slots of forward plus backward."""
    table = schedule_table(schedule, stages, micro_batches)
    assert makespan(table, 1.0, 2.0) == pytest.approx((micro_batches + stages - 1) * 3.0)


@stages_and_micro_batches
def test_a_stage_of_1f1b_holds_as_many_micro_batches_as_stages_follow(stages, micro_batches):
    table = schedule_table(SCHEDULES["1f1b"], stages, micro_batches)
    assert [in_flight(row) for row in table] == [min(micro_batches, stages - stage) for stage in range(stages)]


@stages_and_micro_batches
def test_a_stage_of_gpipe_holds_them_all(stages, micro_batches):
    table = schedule_table(SCHEDULES["gpipe"], stages, micro_batches)
    assert {in_flight(row) for row in table} == {micro_batches}


@every_schedule
@stages_and_micro_batches
def test_a_table_survives_its_text_form(schedule, stages, micro_batches):
    table = schedule_table(schedule, stages, micro_batches)
    assert from_csv(to_csv(table)) == table


def test_idle_slots_of_a_table_are_left_out():
    assert from_csv("0F0,,,0B0\n,1F0,1B0\n") == schedule_table(SCHEDULES["gpipe"], 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no action"),
        ("0F0\n", "1 are missing"),
        ("0F0,0B0,0B0\n", "0B0 stands twice"),
        ("0B0,0F0\n", "never ends"),
        ("0F0,0I0\n", "kind I"),
        ("0F0,hello\n", "is no action"),
        ("0F0,0B\n", "is no action"),
        ("0F0,0B99999999\n", "counts too far"),
        ('"0F0\n', "not CSV"),
        ("0F0,1B0\n1F0,0B0\n", "stage 1 lives on rank 0"),
    ],
)
def test_a_table_that_cannot_be_played_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        from_csv(text)


@given(st.text(alphabet='01FB,\n "x', max_size=60))
def test_any_text_is_a_table_or_is_refused(text):
    try:
        table = from_csv(text)
    except InputError:
        return
    assert from_csv(to_csv(table)) == table


def test_the_names_in_the_table_are_those_of_the_schedules():
    assert {name: schedule.name for name, schedule in SCHEDULES.items()} == {name: name for name in SCHEDULES}
