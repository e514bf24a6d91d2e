"""Seconds of collectives on real links: against arithmetic, against measurements, and what a wrong name says."""

from __future__ import annotations

import numpy as np
import pytest

from exatwin.sim.calibration import load_calibration
from exatwin.sim.collectives import COLLECTIVES, GroupShape
from exatwin.sim.collectives.choice import choose
from exatwin.sim.communicate import collective_s
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine
from exatwin.topology.routing import Routes
from exatwin.twin.network_validation import validate_network

MIB = 2**20
MACHINES = {"selene": "a100-nccl", "dgx-h100": "h100-nccl", "lumi-g": "mi250x-rccl", "fugaku": "a64fx-tofud"}


def figures(machine):
    return load_calibration(MACHINES[machine]).network


def routes(machine, nodes):
    return Routes(load_machine(machine), nodes)


def test_a_long_ring_runs_at_the_achieved_share_of_its_links():
    own = figures("selene")
    size = 8 * 2**30
    time = collective_s("all_reduce", size, np.arange(8), routes("selene", 1), own, "ring", "simple")
    assert time.seconds - time.latency_s == pytest.approx(1.75 * size / (300e9 * own.node_ring.value))
    assert time.latency_s == pytest.approx(8.4e-6 + 14 * 3.4e-6)


def test_groups_that_share_links_slow_each_other():
    own = figures("lumi-g")
    ways = routes("lumi-g", 4)
    rails = np.arange(8)[:, np.newaxis] + 8 * np.arange(4)
    alone = collective_s("all_reduce", 2**30, rails[:1], ways, own)
    together = collective_s("all_reduce", 2**30, rails, ways, own)
    assert together.seconds > 1.9 * alone.seconds  # two devices a NIC


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("op", sorted({op for op, _ in COLLECTIVES}))
def test_every_operation_has_a_choice_everywhere_and_grows_with_size(machine, op):
    ways = routes(machine, 4)
    group = np.arange(4 * ways.node.devices) if op != "send" else np.array([0, ways.node.devices])
    times = [collective_s(op, size, group, ways, figures(machine)).seconds for size in (8, MIB, 2**30)]
    assert 0 < times[0] < times[1] < times[2]
    assert collective_s(op, MIB, group[:1], ways, figures(machine)).seconds == 0


def test_nccl_chooses_quick_protocols_for_small_and_the_switch_for_large_messages():
    ways = routes("dgx-h100", 2)
    small = collective_s("all_reduce", 1024, np.arange(8), ways, figures("dgx-h100"))
    large = collective_s("all_reduce", 2**30, np.arange(8), ways, figures("dgx-h100"))
    wide = collective_s("all_reduce", 2**30, np.arange(16), ways, figures("dgx-h100"))
    assert (small.protocol, large.algorithm, wide.algorithm) == ("ll", "nvls", "nvls_tree")
    assert large.choice is not None
    reckoned = [candidate.seconds for candidate in large.choice.candidates]
    assert reckoned == sorted(reckoned)


def test_fujitsu_mpi_switches_where_its_decision_file_does():
    group = GroupShape(1536, 384, 4, torus=(8, 8, 6))
    own = figures("fugaku")
    names = [choose("all_reduce", size, group, own).algorithm for size in (8, 98_304, 98_305)]
    assert names == ["offload", "recursive_doubling", "torus"]
    assert choose("all_reduce", 2**20, GroupShape(6, 6), own).algorithm == "ring"


def test_gloo_runs_rings_whatever_the_size():
    own, group = load_calibration("local-gloo").network, GroupShape(4, 1, 4)
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    assert {choose(op, size, group, own).algorithm for op in ops for size in (8, 2**30)} == {"ring"}
    assert choose("send", 8, group, own).algorithm == "direct"


def test_the_bundled_figures_of_gloo_give_back_what_was_measured():
    """The largest and the smallest message of two processes on the host that they were measured on."""
    ways, pair, own = routes("local", 1), np.arange(2), load_calibration("local-gloo").network
    measured = {("all_reduce", 4096): 0.53e-3, ("all_reduce", 64 * MIB): 46.7e-3}
    measured |= {("send", 4096): 0.11e-3, ("send", 64 * MIB): 18.9e-3}
    for (op, size), seconds in measured.items():
        assert collective_s(op, size, pair, ways, own).seconds == pytest.approx(seconds, rel=0.02)


def test_a_message_changes_to_rendezvous():
    ways = routes("fugaku", 8)
    pair = np.array([0, 1])
    times = [collective_s("send", size, pair, ways, figures("fugaku")).seconds for size in (38_896, 38_897)]
    assert 0 < times[1] - times[0] < 3e-6


def test_wrong_names_say_the_nearest():
    ways, own = routes("selene", 1), figures("selene")
    with pytest.raises(InputError, match="did you mean tree"):
        collective_s("all_reduce", MIB, np.arange(8), ways, own, "tre")
    with pytest.raises(InputError, match="did you mean all_reduce"):
        collective_s("allreduce", MIB, np.arange(8), ways, own)
    with pytest.raises(InputError, match="did you mean ll128"):
        collective_s("all_reduce", MIB, np.arange(8), ways, own, "ring", "ll12")
    with pytest.raises(InputError, match="torus cannot run here"):
        collective_s("all_reduce", MIB, np.arange(8), ways, own, "torus")


@pytest.mark.slow
def test_the_network_keeps_to_its_bounds_on_rows_that_no_fit_used():
    validation = validate_network()
    assert validation.within
    assert {"selene", "dgx-h100", "lumi-g", "fugaku"} <= {row.machine for row in validation.rows}
