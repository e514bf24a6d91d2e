"""The transfers of a job on a real machine: rates against hand counts of the links they cross."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.calibration import default_calibration
from exatwin.sim.communicate import ring_hops
from exatwin.sim.network import max_min_rates
from exatwin.sim.traffic import build_traffic, placement_of
from exatwin.topology.machine import load_machine
from exatwin.topology.routing import IN_NODE, Routes


@cache
def frontier():
    machine = load_machine("frontier")
    return machine, default_calibration(machine)


def scenario_of(machine="frontier", framework="megatron", heads=24, **layout):
    tp, pp, dp = (layout.setdefault(key, 1) for key in ("tp", "pp", "dp"))
    return load_scenario(
        "h100-llama-3-8b",
        [
            f"machine={machine}",
            f"devices={tp * pp * dp}",
            f"framework={framework}",
            f"training.global_batch={4 * dp}",
            f"model={{layers: {4 * pp}, hidden: {64 * heads}, heads: {heads}, vocab: 1000}}",
            *(f"layout.{key}={value}" for key, value in layout.items()),
            *(["training.precision=fp32"] if machine == "fugaku" else []),
        ],
    )


def traffic_of(**case):
    scenario = scenario_of(**case)
    return build_traffic(scenario, default_calibration(scenario.machine))


def solo_rate(traffic, flows):
    """Of the slowest of some flows, each alone."""
    return min((traffic.classes.solo[flow] for flow in flows), default=math.inf)


def message_rate(traffic, boundary, *, back=False):
    """Between a rank and the next, in the slowest lane."""
    return solo_rate(traffic, [flow for lane in traffic.lanes for flow in (lane.down if back else lane.up)[boundary]])


def data_rate(traffic, rank):
    """Over each edge of a rank's reduction, its slowest phase."""
    return solo_rate(traffic, [flow for exchange in traffic.reduce[rank] for flow in exchange.flows])


def embedding_rate(traffic):
    """Over each edge between the two copies of a tied embedding, in the slowest lane."""
    exchanges = [exchange for lane in traffic.lanes for exchange in lane.embedding]
    return solo_rate(traffic, [flow for exchange in exchanges for flow in exchange.flows])


def test_every_class_belongs_to_one_kind_of_transfer():
    traffic = traffic_of(tp=8, pp=4, dp=2)
    (lane,) = traffic.lanes
    messages = [flow for flows in (*lane.up, *lane.down) for flow in flows]
    embedding = {flow for exchange in lane.embedding for flow in exchange.flows}
    over_replicas = {
        flow for collective in (*traffic.reduce, *traffic.gather) for exchange in collective for flow in exchange.flows
    }
    assert len(messages) == len(set(messages)) == 6
    assert sorted([*messages, *embedding, *over_replicas]) == list(range(len(traffic.classes.weights)))
    assert all(0 < rate < math.inf for rate in traffic.classes.solo)
    assert len(traffic.message_latency_s) == 3


def test_a_job_of_one_device_sends_nothing():
    traffic = traffic_of()
    assert traffic.classes.solo == ()
    assert traffic.reduce == traffic.gather == ((),)
    assert traffic.tensor_rate == data_rate(traffic, 0) == embedding_rate(traffic) == math.inf


def test_a_tensor_ring_over_a_frontier_node_has_two_thin_cables_each_way_round():
    """The library's two rings never share a cable of one link, so each edge gets 2 x 2 x 50 GB/s."""
    _, calibration = frontier()
    assert traffic_of(tp=8, pp=2, dp=1).tensor_rate == pytest.approx(200e9 * calibration.network.node_ring.value)


@pytest.mark.parametrize(("tp", "bandwidth"), [(2, 200e9), (4, 100e9)])
def test_a_narrower_tensor_ring_has_the_cables_of_its_own_gcds(tp, bandwidth):
    """A module's two GCDs have four links; four GCDs in a ring have one link at the thinnest, run both ways round."""
    _, calibration = frontier()
    assert traffic_of(tp=tp, pp=8 // tp).tensor_rate == pytest.approx(bandwidth * calibration.network.node_ring.value)


def test_the_tensor_rings_of_a_node_share_it_however_the_ranks_are_ordered():
    rates = [
        build_traffic(scenario, default_calibration(scenario.machine)).tensor_rate
        for order in ("tp-dp-pp", "tp-pp-dp")
        for scenario in [load_scenario("lumi-33b", [f"placement.order={order}"])]
    ]
    assert rates[0] == rates[1] < math.inf


def test_a_data_ring_of_one_gcd_a_node_gets_half_a_nic():
    """All 8 GCDs of a node run one, and there are 4 NICs of 25 GB/s."""
    _, calibration = frontier()
    traffic = traffic_of(tp=8, pp=2, dp=4)
    expected = 25e9 / 2 * calibration.network.fabric_ring.value
    assert data_rate(traffic, 0) == pytest.approx(expected)


def test_a_message_between_nodes_gets_half_a_nic():
    _, calibration = frontier()
    traffic = traffic_of(tp=8, pp=4, dp=1)
    expected = 25e9 / 2 * calibration.network.fabric_point_to_point.value
    assert [message_rate(traffic, b) for b in range(3)] == pytest.approx([expected] * 3)
    assert [message_rate(traffic, b, back=True) for b in range(3)] == pytest.approx([expected] * 3)


def test_a_data_ring_with_whole_nodes_in_it_spreads_over_all_nics():
    """Eight members on each of two nodes: what leaves a node has 4 NICs, and the cables inside are wider."""
    _, calibration = frontier()
    traffic = traffic_of(dp=16)
    inside = 50e9 * calibration.network.node_ring.value
    assert data_rate(traffic, 0) <= 100e9 * calibration.network.fabric_ring.value
    assert data_rate(traffic, 0) >= min(inside, 100e9 * calibration.network.fabric_ring.value)


@pytest.mark.parametrize("machine", ["selene", "dgx-h100"])
def test_on_a_switched_node_each_gpu_has_its_port_and_its_nic(machine):
    traffic = traffic_of(machine=machine, tp=8, pp=2, dp=2)
    node, figures = load_machine(machine).node, default_calibration(load_machine(machine)).network
    assert traffic.tensor_rate == pytest.approx(node.switch_bandwidth.value * figures.node_ring.value)
    rings = node.nic_bandwidth.value * figures.fabric_ring.value
    shares = [1.0, *(protocol.share.value for protocol in figures.protocols)]
    assert any(data_rate(traffic, 0) == pytest.approx(rings * share) for share in shares)


def test_messages_inside_a_node_wait_less_than_those_between_nodes():
    figures = frontier()[1].network
    assert traffic_of(tp=2, pp=4).message_latency_s == (figures.node_hop.value,) * 3
    assert traffic_of(tp=8, pp=4).message_latency_s == (figures.fabric_hop.value,) * 3


@pytest.mark.parametrize("layout", [{"dp": 6, "pp": 4}, {"dp": 8, "pp": 3}, {"tp": 2, "dp": 6, "pp": 2}])
def test_a_ring_that_leaves_its_node_waits_for_the_fabric_whichever_stage_it_is(layout):
    """With 6 replicas stage 0 stays in its node of 8, and stage 1 does not; the reduction waits for the slowest."""
    traffic = traffic_of(**layout)
    figures = frontier()[1].network
    steps = 2 * (layout["dp"] - 1)
    for stage in range(layout["pp"]):
        waited = sum(exchange.latency_s for exchange in traffic.reduce[stage])
        assert waited >= figures.base.value + steps * figures.node_hop.value
        assert waited == pytest.approx(sum(exchange.latency_s for exchange in traffic.reduce[0]))
    assert sum(exchange.latency_s for exchange in traffic.reduce[0]) >= figures.fabric_hop.value


def flows(routes, messages, figures):
    """Each message by itself: the links it crosses, and the share of each that it keeps busy."""
    hops = routes.route(*np.array(messages).T)
    reached = np.array([figures.node_point_to_point.value, figures.fabric_point_to_point.value, 1.0])
    alone = [{} for _ in messages]
    for message, link, share in zip(*hops, strict=True):
        alone[message][int(link)] = share / reached[routes.place[link]]
    return alone


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "pp": 4, "dp": 2}, {"tp": 8, "pp": 4}, {"pp": 4, "dp": 4}, {"tp": 4, "pp": 4}]
)
@pytest.mark.parametrize("way", [1, -1])
def test_a_folded_boundary_is_as_fast_as_the_slowest_of_its_messages(layout, way):
    """All messages of one boundary at once, rank by rank on every link, against the one coflow they are folded into."""
    scenario = scenario_of(**layout)
    machine, calibration = frontier()
    traffic, grid = build_traffic(scenario, calibration), placement_of(scenario).grid()
    routes = Routes(machine, placement_of(scenario).nodes)
    for boundary in range(scenario.layout.pp - 1):
        ends = [grid[boundary].ravel(), grid[boundary + 1].ravel()][::way]
        rates = max_min_rates(flows(routes, list(zip(*ends, strict=True)), calibration.network), routes.capacity)
        assert message_rate(traffic, boundary, back=way != 1) == pytest.approx(min(rates))


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))])
def test_each_member_of_a_ring_in_a_node_sends_once_its_share_and_receives_it_once(members):
    """Half of it goes each way round, over cables between members alone."""
    routes = Routes(frontier()[0], 1)
    ends = {routes.node.path[a][b]: (a, b) for a in range(8) for b in range(8)}
    hops = ring_hops(routes, np.array([members]))
    assert (routes.place[hops.link] == IN_NODE).all()
    sent, received = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
    for link, share in zip(hops.link, hops.share, strict=True):
        a, b = ends[int(link),]
        sent[a] += share
        received[b] += share
    assert sent == received == pytest.approx(dict.fromkeys(members, 1.0))


def test_a_ring_over_nodes_visits_its_members_in_the_order_of_their_ranks():
    routes = Routes(frontier()[0], 3)
    hops = ring_hops(routes, np.array([[0, 8, 16]]))
    ways = [routes.route(np.array([a]), np.array([b])) for a, b in ((0, 8), (8, 16), (16, 0))]
    assert sorted(hops.link) == sorted(link for way in ways for link in way.link)
