"""What links carry in a step: the bytes of every rank, found on the links that it sends over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.calibration import default_calibration
from exatwin.sim.link_loads import group_use
from exatwin.sim.predict import predict
from exatwin.sim.traffic import build_traffic
from exatwin.topology.faults import Fault


def use_of(scenario, **changes):
    calibration = default_calibration(scenario.machine)
    routes = replace(build_traffic(scenario, calibration).routes, **changes)
    sent = np.linspace(1e9, 2e9, scenario.layout.pp)
    return group_use(scenario, calibration.network, routes, "tp", "all_reduce", "ring", sent), routes, sent


def test_a_ring_inside_a_node_sends_every_members_bytes_over_one_link_each_way_of_its_two_rings():
    use, routes, sent = use_of(load_scenario("frontier-175b", ["layout.tp=8", "layout.pp=8"]))
    carried = np.bincount(use.link, use.bytes, minlength=len(routes.capacity))
    stages = np.bincount(use.stage, use.bytes)
    assert carried.sum() == pytest.approx(8 * 16 * sent.sum())
    assert stages == pytest.approx(8 * 16 * sent)
    assert (routes.place[use.link] == 0).all()


@pytest.mark.parametrize("layout", ["tp=2", "tp=4", "tp=8"])
@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp"])
def test_nodes_that_are_alike_carry_what_each_would_if_looked_at_by_itself(layout, order):
    """A fault that takes nothing away makes every node be looked at."""
    scenario = load_scenario("frontier-175b", [f"layout.{layout}", f"placement.order={order}"])
    folded, routes, _ = use_of(scenario)
    single, _, _ = use_of(scenario, faults=(Fault("nic", 1.0, node=0, name="hsn0"),))
    width = len(routes.capacity)
    assert np.bincount(folded.link, folded.bytes, width) == pytest.approx(np.bincount(single.link, single.bytes, width))


def test_a_tensor_group_wider_than_a_node_loads_its_nics():
    use, routes, _ = use_of(load_scenario("frontier-1t", ["layout.tp=16", "layout.pp=32"]))
    assert set(routes.place[use.link].tolist()) >= {0, 1}


def test_the_busiest_links_stand_in_order_and_carry_no_more_than_they_can():
    for name in ("frontier-1t", "fugaku-30b", "h100-llama-3-8b", "lumi-7b"):
        links = predict(load_scenario(name)).links
        busy = [link.busy for link in links]
        assert busy == sorted(busy, reverse=True)
        assert all(0 < share <= 1 for share in busy)
        assert all(link.users for link in links)


def test_a_job_without_messages_still_has_its_tensor_rings():
    links = predict(load_scenario("frontier-22b", ["devices=8", "layout={tp: 8, pp: 1}"])).links
    assert {link.users for link in links} == {("tp of stage 0",)}
    assert predict(load_scenario("frontier-22b", ["devices=1", "layout={tp: 1, pp: 1}"])).links == ()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("cp", ["layout={tp: 2, cp: 2}", "framework=megatron-core"]),
        ("ep", ["model=mixtral-8x7b", "layout={tp: 1, ep: 8}", "framework=megatron-core"]),
        ("dp", ["layout={tp: 1, zero: 3}", "framework=fsdp2"]),
    ],
)
def test_what_passes_exchange_shows_on_links_whoever_talks(kind, options):
    answer = predict(load_scenario("h100-llama-3-8b", ["training.global_batch=64", *options]), fidelity="screen")
    assert any(user.startswith(f"{kind} of") for link in answer.links for user in link.users)
    assert all(0 < link.busy <= 1 for link in answer.links)
