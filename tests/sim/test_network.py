"""Shared links: rates are max-min fair, and a transfer ends when its bytes have passed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from exatwin.sim.collectives import COLLECTIVES
from exatwin.sim.network import Network, TrafficClasses, max_min_rates, traffic_classes

from ..transfers import ends_in_ours

GB = 1e9

weights = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 1 / 0.39, 8.0])
capacities = st.lists(st.floats(0.01, 100), min_size=1, max_size=7)


@st.composite
def problems(draw):
    capacity = draw(capacities)
    links = st.integers(0, len(capacity) - 1)
    coflows = draw(st.lists(st.dictionaries(links, weights, min_size=1, max_size=4), min_size=1, max_size=9))
    return coflows, capacity


def filled(coflows, capacity):
    """Progressive filling as the textbook has it: raise all open rates, close what meets a full link, repeat."""
    weight = np.array([[coflow.get(link, 0.0) for coflow in coflows] for link in range(len(capacity))])
    capacity = np.array(capacity)
    rates, growing = np.zeros(len(coflows)), np.ones(len(coflows), bool)
    while growing.any():
        speed = weight[:, growing].sum(axis=1)
        room = capacity - weight @ rates
        used = speed > 0
        rise = (room[used] / speed[used]).min()
        rates[growing] += rise
        full = used & (room - rise * speed <= 1e-9 * capacity)
        growing &= ~(weight[full] > 0).any(axis=0)
    return rates


@given(problems())
def test_no_link_carries_more_than_it_can(problem):
    coflows, capacity = problem
    rates = max_min_rates(coflows, capacity)
    for link, limit in enumerate(capacity):
        carried = sum(rate * coflow.get(link, 0.0) for rate, coflow in zip(rates, coflows, strict=True))
        assert carried <= limit * (1 + 1e-9)


@given(problems())
def test_every_coflow_meets_a_full_link_on_which_none_is_faster(problem):
    """The certificate of max-min fairness: nobody could rise but at the cost of one who has no more."""
    coflows, capacity = problem
    rates = max_min_rates(coflows, capacity)
    load = [sum(r * c.get(link, 0.0) for r, c in zip(rates, coflows, strict=True)) for link in range(len(capacity))]
    for rate, coflow in zip(rates, coflows, strict=True):
        assert any(
            load[link] >= capacity[link] * (1 - 1e-9)
            and rate >= max(r for r, other in zip(rates, coflows, strict=True) if link in other) * (1 - 1e-9)
            for link in coflow
        )


@given(problems())
def test_rates_are_those_of_textbook_filling(problem):
    assert max_min_rates(*problem) == pytest.approx(filled(*problem), rel=1e-9)


@given(problems(), st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_of_coflows_or_links(problem, random):
    coflows, capacity = problem
    order = random.sample(range(len(coflows)), len(coflows))
    name = random.sample(range(100), len(capacity))
    renamed = [dict(random.sample([(name[k], w) for k, w in coflows[i].items()], len(coflows[i]))) for i in order]
    rates = max_min_rates(coflows, capacity)
    shuffled = max_min_rates(renamed, dict(zip(name, capacity, strict=True)))
    assert shuffled == pytest.approx([rates[i] for i in order], rel=1e-9)


@given(problems(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_rates_scale_with_the_links(problem, factor):
    coflows, capacity = problem
    scaled = max_min_rates(coflows, [factor * limit for limit in capacity])
    assert scaled == pytest.approx([factor * rate for rate in max_min_rates(coflows, capacity)], rel=1e-9)


@given(problems())
def test_a_coflow_that_leaves_never_makes_the_slowest_slower(problem):
    coflows, capacity = problem
    rest = max_min_rates(coflows[1:], capacity)
    assert min(rest, default=math.inf) >= min(max_min_rates(coflows, capacity)) * (1 - 1e-9)


def test_a_coflow_that_crosses_no_link_is_not_held_up():
    assert max_min_rates([{}, {0: 2.0}], [1.0]) == [math.inf, 0.5]


# The arbiter


def classes(coflows, capacity):
    """Classes whose rows are all kept, each with the rate it has alone."""
    solo = tuple(min(capacity[row] / w for row, w in rows.items()) for rows in coflows)
    return TrafficClasses(tuple(coflows), tuple(capacity), solo, links=len(capacity))


def ends(coflows, capacity, starts):
    """When transfers end: ``starts`` holds (seconds, class, bytes)."""
    known = coflows if isinstance(coflows, TrafficClasses) else classes(coflows, capacity)
    return ends_in_ours(known, starts)[0]


# Worked by hand, and the same in SimGrid 3.32 and 4.1 with latencies of zero.
@pytest.mark.parametrize(
    ("coflows", "capacity", "starts", "expected"),
    [
        pytest.param([{0: 1.0}], [GB], [(0, 0, GB)], [1.0], id="one flow alone"),
        pytest.param([{0: 1.0}] * 2, [GB], [(0, 0, GB), (0, 1, GB)], [2.0, 2.0], id="two halve the link"),
        pytest.param([{0: 1.0}] * 2, [GB], [(0, 0, GB), (0, 1, GB / 2)], [1.5, 1.0], id="the longer speeds up"),
        pytest.param([{0: 1.0}] * 2, [GB], [(0, 0, GB), (0.5, 1, GB)], [1.5, 2.0], id="the later slows the first"),
        pytest.param(
            [{0: 1.0, 1: 1.0}, {0: 1.0}, {1: 1.0}],
            [GB, 2 * GB],
            [(0, 0, GB), (0, 1, GB), (0, 2, 2 * GB)],
            [2.0, 2.0, 4 / 3],
            id="parking lot",
        ),
        pytest.param([{0: 3.0}], [GB], [(0, 0, GB)], [3.0], id="three transfers in one coflow"),
        pytest.param([{0: 3.0}, {0: 1.0}], [GB], [(0, 0, GB), (0, 1, GB)], [4.0, 4.0], id="three beside one"),
        pytest.param([{0: 1.0}, {1: 1.0}], [GB, GB], [(0, 0, GB), (0, 1, GB)], [1.0, 1.0], id="links apart"),
        pytest.param([{0: 1.0}], [GB], [(0, 0, GB), (0, 0, GB)], [2.0, 2.0], id="twice the same class"),
        pytest.param([{0: 1.0}], [GB], [(0, 0, 0.0)], [0.0], id="nothing to send"),
    ],
)
def test_transfers_end_as_worked_by_hand(coflows, capacity, starts, expected):
    assert ends(coflows, capacity, starts) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 12), st.integers(0, 4), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_coflow_is_as_many_transfers_as_its_weight_says(width, others, size, other_size):
    """Folded into one coflow or played one by one, transfers of the same links end together."""
    crowd = [{0: 1.0}] * others
    folded = ends([{0: float(width)}, *crowd], [1.0], [(0, i, other_size if i else size) for i in range(others + 1)])
    apart = [(0, i, size if i < width else other_size) for i in range(width + others)]
    single = ends([{0: 1.0}] * (width + others), [1.0], apart)
    assert single[:width] == pytest.approx([folded[0]] * width)
    assert single[width:] == pytest.approx(folded[1:])


@pytest.mark.parametrize("members", [2, 3, 8, 32])
def test_a_ring_played_step_by_step_takes_as_long_as_its_coflow(members):
    """2 (n - 1) steps, in each of which every member sends an n-th of the buffer on, and all wait for all."""
    env = simpy.Environment()
    network = Network(env, classes([{link: 1.0} for link in range(members)], [1.0] * members))

    def ring():
        for _ in range(2 * (members - 1)):
            yield env.all_of([network.start(link, 6.0 / members) for link in range(members)])

    env.run(env.process(ring()))
    coflow = COLLECTIVES["all_reduce", "ring"].shape(6.0, members).edge_bytes
    assert ends([dict.fromkeys(range(members), 1.0)], [1.0] * members, [(0, 0, coflow)]) == pytest.approx([env.now])


arrivals = st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), min_size=1, max_size=8)


@given(arrivals)
def test_a_link_sends_every_byte_and_rests_only_when_nothing_waits(arrivals):
    """However it is shared, a busy link ends its work when its bytes over its rate say."""
    starts = [(at, i, size) for i, (at, size) in enumerate(arrivals)]
    end = ends([{0: 1.0}] * len(starts), [1.0], starts)
    idle_from = 0.0
    for at, size in sorted(arrivals):
        idle_from = max(idle_from, at) + size
    assert max(end) == pytest.approx(idle_from)
    assert all(e >= at + size - 1e-9 for e, (at, size) in zip(end, arrivals, strict=True))


@settings(max_examples=50)
@given(problems(), st.data())
def test_a_transfer_is_never_faster_than_alone_and_never_slower_than_in_a_row(problem, data):
    coflows, capacity = problem
    starts = [(data.draw(st.floats(0, 3)), kind, data.draw(st.floats(0.1, 5))) for kind in range(len(coflows))]
    alone = [size / solo for (_, _, size), solo in zip(starts, classes(*problem).solo, strict=True)]
    end = ends(coflows, capacity, starts)
    for (at, _, _), finish, least in zip(starts, end, alone, strict=True):
        assert finish >= (at + least) * (1 - 1e-9)
    assert max(end) <= (max(at for at, _, _ in starts) + sum(alone)) * (1 + 1e-9)
    assert ends(coflows, capacity, starts) == end  # to the bit


# Folding

uses = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), weights), min_size=1, max_size=40)


def unfolded(uses, count):
    coflows = [{} for _ in range(count)]
    for kind, link, weight in uses:
        coflows[kind][link] = coflows[kind].get(link, 0.0) + weight
    return coflows


def folded(uses, count, capacity):
    kinds, links, weight = (np.array(column) for column in zip(*uses, strict=True))
    return traffic_classes(count, kinds, links, weight.astype(float), np.array(capacity))


@given(uses, st.lists(st.floats(0.1, 10), min_size=10, max_size=10), st.sets(st.integers(0, 4)))
def test_folding_links_into_rows_changes_no_rate(uses, capacity, active):
    """The rows that are left give each class its rate alone, and any set of classes the rates on all links."""
    raw, few = unfolded(uses, 5), folded(uses, 5, capacity)
    assert few.solo == pytest.approx([max_min_rates([rows], capacity)[0] for rows in raw])
    active = sorted(kind for kind in active if raw[kind])
    own = {-1 - kind: few.solo[kind] for kind in active}  # what a dropped row allowed, each class still keeps to
    rates = max_min_rates(
        [{**few.weights[kind], -1 - kind: 1.0} for kind in active], dict(enumerate(few.capacity)) | own
    )
    assert rates == pytest.approx(max_min_rates([raw[kind] for kind in active], capacity), rel=1e-9)
    assert len(few.capacity) <= few.links == len({link for _, link, _ in uses})


def test_links_that_look_alike_become_one_row_as_thin_as_the_thinnest():
    classes = folded([(kind, link, 1.0) for kind in (0, 1) for link in range(6)], 2, [5, 4, 3, 2, 6, 7])
    assert classes.capacity == (2.0,)
    assert classes.weights == ({0: 1.0}, {0: 1.0})
    assert classes.links == 6


def test_a_link_that_cannot_fill_up_needs_no_row():
    classes = folded([(0, 0, 1.0), (1, 1, 1.0), (0, 2, 1.0), (1, 2, 1.0)], 2, [1.0, 1.0, 2.0])
    assert classes.weights == ({}, {})
    assert classes.solo == (1.0, 1.0)


def test_no_traffic_needs_no_row():
    none = np.empty(0, np.int64)
    assert traffic_classes(2, none, none, np.empty(0), np.ones(3)).solo == (math.inf, math.inf)
