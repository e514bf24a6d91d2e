"""What every collective of the table keeps, whatever its algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.collectives import COLLECTIVES
from exatwin.sim.traffic import RingLatency, ring_s

every_collective = pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=map("-".join, COLLECTIVES))
sizes = st.floats(0, 1e13)

# Bytes that some member has to send, of a buffer of one byte (Chan et al. 2007, doi 10.1002/cpe.1206, table 1).
LEAST_SENT = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "send": lambda ranks: 1.0,
}


def test_the_table_names_its_members_as_they_do():
    assert list(COLLECTIVES) == [(collective.op, collective.name) for collective in COLLECTIVES.values()]


@every_collective
@given(size=sizes)
def test_one_rank_alone_sends_nothing(collective, size):
    shape = collective.shape(size, 1)
    assert (shape.edge_bytes, shape.steps) == (0, 0)


@every_collective
@given(size=sizes, ranks=st.integers(2, 5000))
def test_no_algorithm_sends_less_than_it_must(collective, size, ranks):
    shape = collective.shape(size, ranks)
    assert shape.edge_bytes >= LEAST_SENT[collective.op](ranks) * size * (1 - 1e-12)
    assert shape.steps >= 1


@every_collective
@given(size=sizes, more=st.floats(1, 10), ranks=st.integers(1, 5000))
def test_a_larger_buffer_never_sends_less(collective, size, more, ranks):
    small, large = collective.shape(size, ranks), collective.shape(more * size, ranks)
    assert large.edge_bytes >= small.edge_bytes
    assert large.steps >= small.steps


@given(size=sizes, ranks=st.integers(1, 5000))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size, ranks):
    whole = COLLECTIVES["all_reduce", "ring"].shape(size, ranks)
    halves = [COLLECTIVES[op, "ring"].shape(size, ranks) for op in ("reduce_scatter", "all_gather")]
    assert whole.edge_bytes == pytest.approx(sum(half.edge_bytes for half in halves))
    assert whole.steps == sum(half.steps for half in halves)


@pytest.mark.parametrize("op", [op for op, name in COLLECTIVES if name == "ring"])
@given(size=sizes, ranks=st.integers(1, 5000), rate=st.floats(1e6, 1e12))
def test_a_ring_takes_its_bytes_and_a_latency_for_each_step(op, size, ranks, rate):
    latency = RingLatency(base_s=5e-6, inside_s=1e-6, across_s=9e-6, ranks=ranks, nodes=1)
    shape = COLLECTIVES[op, "ring"].shape(size, ranks)
    expected = shape.edge_bytes / rate + 5e-6 + shape.steps * 1e-6 if ranks > 1 else 0.0
    assert ring_s(op, size, ranks, rate, latency) == pytest.approx(expected)


def test_a_ring_over_two_nodes_waits_twice_a_round_for_the_fabric():
    latency = RingLatency(base_s=10e-6, inside_s=1e-6, across_s=20e-6, ranks=8, nodes=2)
    assert latency.seconds(7) == pytest.approx(10e-6 + 7 * (6 * 1e-6 + 2 * 20e-6) / 8)
    assert latency.seconds(0) == 0.0
