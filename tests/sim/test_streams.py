"""Two streams of a device: computing, and communicating ahead of it and behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.streams import UnitWork, play_streams

SECONDS = st.floats(0, 10)
UNITS = st.lists(
    st.builds(UnitWork, run_s=SECONDS, gather_s=SECONDS, reduce_s=SECONDS, copy_s=SECONDS), min_size=1, max_size=12
)


@pytest.mark.parametrize(("run", "gather"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (1.0, 0.0)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_units_show_the_first_gather_and_what_a_gather_takes_longer_than_a_unit(run, gather, count):
    end = play_streams([UnitWork(run, gather)] * count, ahead=1).end_s
    assert end == pytest.approx(gather + (count - 1) * max(run, gather) + run)


def test_without_prefetch_nothing_is_hidden():
    units = [UnitWork(2.0, 1.0, 0.5)] * 4
    assert play_streams(units, ahead=0).end_s == pytest.approx(4 * (2.0 + 1.0 + 0.5))


def test_a_backward_hides_all_but_its_first_gather_and_its_last_reduction():
    """While a layer computes, the gradients of the one before are reduced and the weights of the next are gathered."""
    assert play_streams([UnitWork(4.0, 1.0, 2.0)] * 6, ahead=1).end_s == pytest.approx(1.0 + 6 * 4.0 + 2.0)


def test_a_backward_bound_by_its_links_moves_everything_one_after_another():
    assert play_streams([UnitWork(1.0, 2.0, 2.0)] * 8, ahead=1).end_s == pytest.approx(8 * 4.0, abs=2.0)


def test_copies_are_summed_over_other_links_beside_the_next_reductions():
    """Shards are summed over their copies while the next layers reduce: only the last sum is seen."""
    units = [UnitWork(4.0, 0.0, 2.0, 3.0)] * 5
    assert play_streams(units, ahead=1).end_s == pytest.approx(5 * 4.0 + 2.0 + 3.0)


def test_computing_beside_communication_takes_longer():
    """A gather of 2 s runs beside the first unit of 4 s: 2 s of it are worth 1.6 s of work at 1.25 times the time."""
    times = play_streams([UnitWork(4.0), UnitWork(4.0, gather_s=2.0)], ahead=1, slowdown=1.25)
    assert times.end_s == pytest.approx(2.0 + 2.4 + 4.0)
    assert times.stretched_s == pytest.approx(0.4)


def test_a_units_own_collectives_are_not_slowed():
    units = [UnitWork(4.0, slowed=0.0), UnitWork(4.0, gather_s=2.0)]
    assert play_streams(units, ahead=1, slowdown=2.0).stretched_s == 0.0


@given(UNITS, st.integers(0, 4), st.floats(1, 2))
def test_a_pass_is_no_shorter_than_either_stream_and_no_longer_than_both(units, ahead, slowdown):
    times = play_streams(units, ahead, slowdown)
    run = sum(unit.run_s for unit in units)
    sent = sum(unit.gather_s + unit.reduce_s for unit in units)
    copied = sum(unit.copy_s for unit in units)
    assert times.end_s >= max(run + times.stretched_s, sent) - 1e-9
    assert times.end_s <= run * slowdown + sent + copied + 1e-9
    assert -1e-9 <= times.stretched_s <= run * (slowdown - 1.0) + 1e-9


@given(UNITS, st.integers(0, 4))
def test_one_more_unit_gathered_ahead_never_hurts_where_nothing_is_reduced(units, ahead):
    forward = [UnitWork(unit.run_s, unit.gather_s) for unit in units]
    assert play_streams(forward, ahead + 1).end_s <= play_streams(forward, ahead).end_s + 1e-9
