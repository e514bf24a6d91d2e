"""What many rows say together, on rows that are made up."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.twin.bounds import bounded, bounds_for, breaches
from exatwin.twin.validation_rows import ValidationRow
from exatwin.twin.validation_sums import kendall_tau, quantile, rankings, scalings, summaries, suspects

orders = st.permutations(range(8))


def row(name, measured, predicted, **changes):
    """A step time of an unseen row on one machine."""
    fields = {
        "quantity": "step",
        "series": "a-series",
        "source": "a-source",
        "machine": "m",
        "device": "d",
        "devices": 8,
        "use": "unseen",
        "tokens": 1000,
    }
    error = predicted / measured - 1
    return ValidationRow(id=name, measured=measured, predicted=predicted, error=error, **fields | changes)


@given(orders)
def test_tau_is_one_with_itself_and_minus_one_with_its_reverse(order):
    assert kendall_tau(order, order) == 1.0
    assert kendall_tau(order, [-value for value in order]) == -1.0


@given(orders, orders)
def test_tau_is_symmetric_and_counts_pairs(left, right):
    tau = kendall_tau(left, right)
    assert tau == kendall_tau(right, left)
    pairs = [(i, j) for i in range(8) for j in range(i)]
    alike = sum((left[i] < left[j]) == (right[i] < right[j]) for i, j in pairs)
    assert tau == pytest.approx(2 * alike / len(pairs) - 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_lies_within_and_grows_with_its_share(values, share):
    ordered = sorted(values)
    assert ordered[0] <= quantile(ordered, share) <= ordered[-1] * (1 + 1e-12)
    assert quantile(ordered, share / 2) <= quantile(ordered, share) * (1 + 1e-12)


def test_fitted_rows_and_unseen_rows_are_never_summed_together():
    rows = [row("a", 1.0, 1.1), row("b", 1.0, 1.5, use="fit"), row("c", 1.0, 0.9)]
    unseen, fit = summaries(rows, "all")
    assert (unseen.use, unseen.rows, fit.use, fit.rows) == ("unseen", 2, "fit", 1)
    assert unseen.median == pytest.approx(0.1)
    assert unseen.bias == pytest.approx(0.0)


def test_the_layout_predicted_best_is_charged_with_what_it_lost():
    rows = [
        row("a", 10.0, 9.0, group="g"),
        row("b", 8.0, 9.5, group="g"),
        row("c", 12.0, 11.0, group="g"),
        row("alone", 1.0, 1.0, group="h"),
    ]
    (ranking,) = rankings(rows)
    assert ranking.rows == 3
    assert ranking.tau == pytest.approx(1 / 3)
    assert ranking.regret == pytest.approx(0.25)  # a ran 10 s, b 8 s


def test_efficiency_is_tokens_a_second_of_a_device_on_most_over_fewest():
    rows = [
        row("small", 8.0, 8.0, devices=8, strong="s"),
        row("large", 1.25, 1.0, devices=64, strong="s"),
        row("other", 1.0, 1.0, devices=64, strong="t"),
    ]
    (scaling,) = scalings(rows)
    assert (scaling.first, scaling.last, scaling.kind) == ("small", "large", "strong")
    assert scaling.measured == pytest.approx(0.8)
    assert scaling.predicted == pytest.approx(1.0)


def test_the_suspect_is_the_part_that_a_row_has_most_of_beyond_good_rows():
    good = [row(f"good-{i}", 1.0, 1.01, parts={"compute": 0.9, "bubble": 0.1}) for i in range(4)]
    bad = row("bad", 1.0, 2.0, parts={"compute": 1.0, "tp_comm": 0.9, "bubble": 0.1})
    first, *_ = suspects([*good, bad], 1)
    assert (first.row.id, first.part, first.usual) == ("bad", "tp_comm", 0.0)
    assert first.share == pytest.approx(0.45)


def test_a_row_without_peers_has_no_suspect():
    (only,) = suspects([row("alone", 1.0, 2.0, parts={"compute": 2.0})])
    assert only.part == ""


def test_bounds_that_rows_are_given_are_kept_by_them(monkeypatch):
    rows = [row(f"r{i}", 1.0, 1.0 + i / 100) for i in range(1, 20)]
    stated = {"series": bounds_for(rows), "each": {}, "rows": {}}
    monkeypatch.setattr("exatwin.twin.bounds.stated_bounds", lambda: stated)
    assert breaches(rows) == ()
    assert all(bounded(one).within and bounded(one).bound is not None for one in rows)
    grown = [dataclasses.replace(one, error=one.error * 1.5) for one in rows]
    assert {item.figure for item in breaches(grown)} == {"median", "p90"}
    assert not bounded(grown[-1]).within
