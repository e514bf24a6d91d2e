"""Choosing published runs and predicting them."""

from __future__ import annotations

from typing import get_args

import pytest

from exatwin.topology.errors import InputError
from exatwin.twin.validate import FAST_ROWS, all_tasks, fast_tasks, validate
from exatwin.twin.validation_rows import KINDS, Quantity
from exatwin.twin.validation_tasks import Task, answer_task


def test_every_quantity_is_of_a_kind():
    assert set(get_args(Quantity)) == set(KINDS)


def test_one_process_and_two_give_the_same_rows():
    one, two = validate("deepspeed-fugaku", fast=True, jobs=1), validate("deepspeed-fugaku", fast=True, jobs=2)
    assert one.rows
    assert one == two


def test_progress_counts_every_run():
    told = []
    validate("mt-nlg", jobs=1, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2, 2)


def test_the_fast_subset_is_a_few_of_each_series_in_order():
    tasks = all_tasks()
    chosen = fast_tasks(tasks)
    assert [task for task in tasks if task in set(chosen)] == chosen
    assert {task.series for task in chosen} == {task.series for task in tasks}
    assert len(chosen) <= FAST_ROWS * len({(task.kind, task.series) for task in tasks})


def test_a_kind_leaves_only_its_rows():
    rows = validate("mt-nlg", kind="verdict", jobs=1).rows
    assert {row.kind for row in rows} == {"verdict"}
    assert all(row.error == 0 for row in rows)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"source": "narayanan"}, "did you mean narayanan-2021"),
        ({"kind": "tim"}, "did you mean time"),
        ({"device": "A1000"}, "no bundled device is called 'A1000'"),
    ],
)
def test_what_is_unknown_names_the_nearest(asked, message):
    with pytest.raises(InputError, match=message):
        validate(**asked, jobs=1)


def test_a_prediction_that_fails_is_counted_and_fails_the_whole(monkeypatch):
    def broken(scenario):
        raise KeyError("a fault")

    monkeypatch.setattr("exatwin.twin.validation_tasks.predict", broken)
    (answer,) = answer_task(Task("public", "mt-nlg", "mtnlg-002"))
    assert answer.fault
    assert "KeyError" in answer.reason
    assert not validate("mt-nlg", jobs=1).within
