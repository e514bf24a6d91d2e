"""What a scenario's perturbations do to the devices and links of its job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..scenarios.perturb import Background, LinkFault, Perturbations, SlowDevice
from ..scenarios.scenario import Scenario
from ..topology.errors import InputError, Problem, nearest_numbers, told_as
from ..topology.fabrics import Dragonfly
from ..topology.faults import Fault
from ..topology.placement import Placement
from ..topology.routing import Routes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FAIR_HALF = 0.5  # a stream of another job takes no more of a link than a fair half


@dataclass(frozen=True)
class Damage:
    """The state of the job's devices and links.

    Attributes:
        routes: The links with their faults; failed ones are gone round.
        capacity: Of each link, less what other jobs take.
        speed: Of each device, of the others' speed.
        nodes: Nodes of the job in which a link or a NIC is not sound.
        links: Links beyond or between nodes that carry less than they could.
    """

    routes: Routes
    capacity: Floats
    speed: Floats
    nodes: Ints
    links: Ints


def damage_of(scenario: Scenario, placement: Placement, sound: Routes) -> Damage:
    """What the perturbations leave of a job.

    Args:
        scenario: What is asked.
        placement: Its ranks.
        sound: Its links as they should be.

    Raises:
        InputError: If a perturbation names nothing of the job.
    """
    perturb = scenario.perturb
    problems = list(_problems(perturb, placement, sound))
    if problems:
        raise InputError(f"scenario {scenario.name}", problems)
    named = dict(_faults(perturb, sound))
    problems = [problem for field, fault in named.items() for problem in _unfound(field, fault, sound)]
    if problems:
        raise InputError(f"scenario {scenario.name}", problems)
    faults = tuple(named.values())
    routes = replace(sound, faults=faults) if faults else sound
    capacity = routes.capacity.copy()
    for stream in perturb.background:
        _take(stream, routes, capacity)
    width = sound.nodes * len(sound.node.capacity)
    changed = np.flatnonzero(capacity != sound.capacity)
    nodes = [nic.node for nic in perturb.nics if nic.rate < 1]
    nodes += [link.node for link in perturb.links if link.node is not None and link.rate < 1]
    return Damage(
        routes=routes,
        capacity=capacity,
        speed=_speeds(perturb.devices, placement),
        nodes=np.unique(np.array(nodes, dtype=np.int64)),
        links=changed[(changed >= width) | (sound.place[changed] != 0)],
    )


def _problems(perturb: Perturbations, placement: Placement, routes: Routes) -> Iterator[Problem]:
    for index, slow in enumerate(perturb.devices):
        field = f"perturb.devices.{index}"
        if (slow.rank is None) == (slow.node is None):
            yield Problem(field, "needs a rank or a node, and not both")
        elif slow.rank is not None and slow.rank >= placement.ranks:
            message = f"there is no rank {slow.rank}; the job has ranks 0 to {placement.ranks - 1}"
            yield Problem(f"{field}.rank", message)
        elif slow.node is not None:
            yield from _node(f"{field}.node", slow.node, placement.nodes)
    for index, nic in enumerate(perturb.nics):
        yield from _node(f"perturb.nics.{index}.node", nic.node, placement.nodes)
    for index, link in enumerate(perturb.links):
        field = f"perturb.links.{index}"
        inside = link.node is not None and link.between is not None
        if (link.node is None) != (link.between is None) or [inside, bool(link.groups), bool(link.ends)].count(
            True
        ) != 1:
            yield Problem(field, "needs node and between, or groups, or ends, and one of these alone")
        elif link.node is not None:
            yield from _node(f"{field}.node", link.node, placement.nodes)
        elif link.groups is not None:
            yield from _groups(f"{field}.groups", link.groups, routes)
    for index, stream in enumerate(perturb.background):
        yield from _node(f"perturb.background.{index}.source", stream.source, placement.nodes)
        yield from _node(f"perturb.background.{index}.target", stream.target, placement.nodes)
        if stream.source == stream.target:
            yield Problem(f"perturb.background.{index}", "starts and ends at the same node, so it crosses no link")


def _node(field: str, node: int, nodes: int) -> Iterator[Problem]:
    if node >= nodes:
        yield Problem(field, f"there is no node {node}; the job has nodes 0 to {nodes - 1}")


def _groups(field: str, pair: tuple[int, int], routes: Routes) -> Iterator[Problem]:
    fabric = routes.machine.fabric
    if not isinstance(fabric, Dragonfly):
        yield Problem(field, f"are of a dragonfly; the fabric of {routes.machine.name} is of kind {fabric.kind}")
        return
    used = np.unique(fabric.groups_of(routes.numbers)).tolist()
    wrong = [group for group in pair if group >= fabric.groups.value]
    if wrong:
        near = nearest_numbers(wrong[0], range(fabric.groups.value), 3)
        yield Problem(
            field, f"there is no group {wrong[0]}: the groups are 0 to {fabric.groups.value - 1}; nearest: {near}"
        )
    elif pair[0] == pair[1]:
        yield Problem(field, f"has to name two groups, but both are {pair[0]}")
    elif not set(pair) & set(used):
        near = nearest_numbers(pair[0], used, 5)
        yield Problem(field, f"the job has no node in group {pair[0]} or {pair[1]}; nearest groups of the job: {near}")


def _unfound(field: str, fault: Fault, sound: Routes) -> tuple[Problem, ...]:
    """Why a fault is not there; nothing where it is."""
    try:
        with told_as("", perturb=field):
            _ = replace(sound, faults=(fault,)).capacity
    except InputError as error:
        return error.problems
    return ()


def _faults(perturb: Perturbations, routes: Routes) -> Iterator[tuple[str, Fault]]:
    """Every fault by its field."""
    for index, nic in enumerate(perturb.nics):
        fault = Fault("nic", nic.rate, node=int(routes.numbers[nic.node]), name=nic.nic)
        yield f"perturb.nics.{index}", fault
    for index, link in enumerate(perturb.links):
        yield f"perturb.links.{index}", _link_fault(link, routes)


def _link_fault(link: LinkFault, routes: Routes) -> Fault:
    if link.node is not None:
        return Fault("link", link.rate, node=int(routes.numbers[link.node]), ends=link.between)
    return Fault("fabric", link.rate, ends=link.groups or link.ends)


def _speeds(slow_devices: tuple[SlowDevice, ...], placement: Placement) -> Floats:
    speed = np.ones(placement.nodes * placement.devices_per_node)
    by_rank = placement.grid().reshape(-1)
    for slow in slow_devices:
        if slow.rank is not None:
            speed[by_rank[slow.rank]] *= slow.speed
        elif slow.node is not None:
            first = slow.node * placement.devices_per_node
            speed[first : first + placement.devices_per_node] *= slow.speed
    return speed


def _take(stream: Background, routes: Routes, capacity: Floats) -> None:
    """What a steady stream leaves of the links it crosses."""
    per_node = routes.node.devices
    ends = np.array([stream.source * per_node]), np.array([stream.target * per_node])
    hops = routes.route(*ends, spread=True)
    for link, share in zip(hops.link.tolist(), hops.share.tolist(), strict=True):
        capacity[link] -= min(stream.rate * share, FAIR_HALF * capacity[link])


def jitter_of(perturb: Perturbations, replica: int, stages: int, micro_batches: int) -> Floats | None:
    """Factors on the seconds of every action of a replica, log-normal with mean 1; None without jitter.

    Shape (stages, micro-batches, 2): forward and backward. Each replica draws from a stream of its own,
    so that the same seed gives the same times however replicas are grouped.
    """
    if perturb.jitter is None:
        return None
    sigma = np.sqrt(np.log1p(perturb.jitter.spread**2))
    generator = np.random.default_rng([perturb.jitter.seed, replica])
    factors: Floats = generator.lognormal(-(sigma**2) / 2, sigma, size=(stages, micro_batches, 2))
    return factors
