"""Work and communication at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.overlap import beside, ring_backward, ring_forward

seconds = st.floats(0.0, 1e3)
slowdowns = st.floats(1.0, 3.0)
steps = st.integers(2, 64)


@given(seconds, seconds, slowdowns)
def test_the_later_of_both_ends_last_and_one_after_the_other_would_take_longer(work, comm, slowdown):
    both = beside(work, comm, slowdown)
    assert both.total_s >= max(work, comm) * (1 - 1e-12)
    assert both.total_s <= work * slowdown + comm * (1 + 1e-12) + 1e-12
    assert both.work_s >= work


@given(seconds, seconds)
def test_without_a_slowdown_the_longer_of_both_is_what_it_takes(work, comm):
    assert beside(work, comm).total_s == pytest.approx(max(work, comm))


@given(seconds, seconds, steps)
def test_a_ring_takes_its_blocks_and_waits_for_hops_that_are_longer(block, hop, count):
    assert ring_forward(block, hop, count).total_s == pytest.approx((count - 1) * max(block, hop) + block)


@given(seconds, seconds, steps)
def test_a_backward_ring_brings_the_last_gradients_home_beside_the_last_block(block, hop, count):
    both = ring_backward(block, hop, 2 * hop, count)
    closed = 2 * max(block, hop) + (count - 2) * max(block, 2 * hop)
    assert both.total_s == pytest.approx(closed)
    assert both.work_s == pytest.approx(count * block)
