"""The network against SimGrid, which shares links by a solver and a clock of its own.

Both are given the same links, routes and flows, and no latency; both divide links max-min fairly. SimGrid is a
development dependency: Debian's ``python3-simgrid`` 3.32, run by the system's Python as a program of its own.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from exatwin.sim.collectives import COLLECTIVES
from exatwin.sim.communicate import ring_hops
from exatwin.sim.network import traffic_classes
from exatwin.topology.machine import load_machine
from exatwin.topology.routing import Routes

from ..transfers import ends_in_ours

PYTHON = "/usr/bin/python3"
PROGRAM = Path(__file__).with_name("simgrid_flows.py")
RESIDUE = 1e-9  # relative, of every end; the worst seen is 4e-15


@cache
def what_is_missing():
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON}"
    found = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, text=True, check=False, timeout=60)
    return (found.stderr.strip().splitlines() or ["it fails"])[-1] if found.returncode else ""


needs_simgrid = pytest.mark.skipif(
    bool(what_is_missing()), reason=f"SimGrid is not there (apt install python3-simgrid): {what_is_missing()}"
)


def ends_in_simgrid(capacity, flows):
    """Ends of flows ``(seconds, bytes, links, flows before)``."""
    question = json.dumps({"links": list(capacity), "flows": flows})
    done = subprocess.run(
        [PYTHON, str(PROGRAM)], input=question, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# Links that flows use


class Links:
    """The links of some hops, numbered without gaps, for both sides.

    SimGrid weighs every flow on a link alike. Where all flows that use one put the same share on it, as they do where
    a message is split over two ways, a link that is wider by that share stands for it.
    """

    def __init__(self, routes, hops):
        self.hops = hops
        used, place = np.unique(hops.link, return_inverse=True)
        share = np.full(len(used), np.nan)
        share[place] = hops.share
        assert hops.share == pytest.approx(share[place], rel=1e-12)
        self.ours = routes.capacity
        self.capacity = (routes.capacity[used] / share).tolist()
        self.ways = [[] for _ in range(int(hops.message.max()) + 1)]
        for message, link in zip(hops.message.tolist(), place.tolist(), strict=True):
            self.ways[message].append(link)

    def classes(self, class_of):
        """Traffic classes, given that of each message."""
        count = int(max(class_of)) + 1
        return traffic_classes(count, np.array(class_of)[self.hops.message], self.hops.link, self.hops.share, self.ours)


def random_messages(routes, count, generator):
    """Messages between devices of different nodes, a few receivers more wanted than others."""
    devices = routes.nodes * routes.machine.devices_per_node
    source = generator.integers(0, devices, count)
    target = generator.integers(0, devices, count)
    target[: count // 3] = generator.choice(target[: max(count // 40, 1)], count // 3)
    apart = source // routes.machine.devices_per_node != target // routes.machine.devices_per_node
    return source[apart], target[apart]


CASES = {
    "dragonfly, one group": ("frontier", {"nodes": 100}),
    "dragonfly, ten groups": ("frontier", {"nodes": 1280, "non_minimal": 0.0}),
    "dragonfly, part by a third group": ("frontier", {"nodes": 1280, "non_minimal": 0.3}),
    "torus": ("fugaku", {"nodes": 384}),
    "torus of odd shape": ("fugaku", {"nodes": 420, "shape": (4, 7, 15)}),
    "fat tree": ("selene", {"nodes": 240}),
}


@needs_simgrid
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_flows_that_start_when_they_like_end_when_simgrid_says(case, seed):
    """Sizes over two decades, starts over the time that one takes: rates change at every start and end."""
    machine, how = CASES[case]
    routes = Routes(load_machine(machine), **how)
    generator = np.random.default_rng(seed)
    source, target = random_messages(routes, 240, generator)
    links = Links(routes, routes.route(source, target))
    size = np.round(10.0 ** generator.uniform(11, 13, len(source)))
    start = np.round(generator.uniform(0, 60, len(source)), 3)
    start[: len(source) // 4] = 0.0  # some together
    theirs = ends_in_simgrid(
        links.capacity,
        [[at, amount, way, []] for at, amount, way in zip(start.tolist(), size.tolist(), links.ways, strict=True)],
    )
    flows = list(zip(start.tolist(), range(len(source)), size.tolist(), strict=True))
    ours, network = ends_in_ours(links.classes(range(len(source))), flows)
    assert network.solves > 20  # they do meet
    assert ours == pytest.approx(theirs, rel=RESIDUE)


RINGS = {
    # Two GCDs share a NIC, so two rings do.
    "dragonfly, two rings": ("frontier", {"nodes": 32}, (0, 1)),
    "dragonfly, two rings over eight groups": ("frontier", {"node_ids": tuple(range(0, 1024, 32))}, (0, 1)),
    "torus": ("fugaku", {"nodes": 32}, (0,)),
    "fat tree, two rings on rails of their own": ("selene", {"nodes": 32}, (0, 4)),
}


@needs_simgrid
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("case", RINGS)
def test_a_ring_sent_step_by_step_in_simgrid_ends_with_its_coflow(case, op):
    """A member sends on what it has received, and waits for nothing else; the coflow knows one rate for the ring."""
    machine, how, locals_ = RINGS[case]
    members = 32
    routes = Routes(load_machine(machine), **({"nodes": members} | how))
    per_node = routes.machine.devices_per_node
    groups = np.arange(members)[None, :] * per_node + np.array(locals_)[:, None]
    steps = {"all_reduce": 2, "all_gather": 1}[op] * (members - 1)
    buffers = [members * 10.0**10 * (1 + ring) for ring in range(len(locals_))]  # the smaller ends, the other speeds up
    hops = ring_hops(routes, groups)
    edges = routes.route(groups.reshape(-1), np.roll(groups, -1, axis=1).reshape(-1))
    links = Links(routes, edges)
    flows = []
    for step in range(steps):
        for ring in range(len(locals_)):
            for member in range(members):
                earlier = len(flows) - len(locals_) * members  # the same edge, a step before
                ahead = earlier - 1 if member else earlier + members - 1
                before = [earlier, ahead] if step else []
                flows.append([0.0, buffers[ring] / members, links.ways[ring * members + member], before])
    theirs = ends_in_simgrid(links.capacity, flows)
    classes = traffic_classes(len(locals_), hops.message, hops.link, hops.share, routes.capacity)
    sizes = [COLLECTIVES[op, "ring"].shape(buffer, members).edge_bytes for buffer in buffers]
    ours, _ = ends_in_ours(classes, [(0.0, ring, size) for ring, size in enumerate(sizes)])
    for ring, end in enumerate(ours):
        last = theirs[len(theirs) - (len(locals_) - ring) * members :][:members]
        assert end == pytest.approx(max(last), rel=RESIDUE)
