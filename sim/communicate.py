"""Seconds of a collective on the machine's real links.

``collective_s`` chooses as the library would, lays the phases of the algorithm over the
links that the members' messages really take, all groups at once, and adds up what the
phases take: latency of the steps, bytes at the rate of the fullest link, the fill of the
pipeline of pieces, and the adding where that is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..topology.routing import Hops, Routes, join, ring_orders
from .calibration import NetworkFigures, Protocol
from .collectives import GroupShape, Phase
from .collectives.choice import Choice, choose, fill_s, latency_s, pipelined_s

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MESSAGES = ("send", "sendrecv", "exchange")


@dataclass(frozen=True)
class CollectiveTime:
    """What one call takes, and how it was run.

    Attributes:
        seconds: From the first byte to the last, when all groups start together.
        algorithm: Name in the table.
        protocol: ``simple``, or the library's quicker way.
        latency_s: Part of it that no bandwidth would shorten.
        choice: Why this algorithm, and what the others were reckoned at.
    """

    seconds: float
    algorithm: str
    protocol: str
    latency_s: float
    choice: Choice | None = None


def collective_s(
    op: str,
    size_bytes: float,
    groups: npt.ArrayLike,
    routes: Routes,
    figures: NetworkFigures,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> CollectiveTime:
    """Seconds of a collective that several groups run at the same time, and nobody else.

    Args:
        op: As `choose` takes it.
        size_bytes: The whole buffer: what each rank holds before an all-reduce or a reduce-scatter,
            what it holds after an all-gather, what it has for all others in an all-to-all.
        groups: Devices, one row a group, first member first. A device may stand several times in a
            row: so many processes share it.
        routes: Links of the job.
        figures: What the library achieves on them.
        algorithm: In place of the library's choice.
        protocol: Likewise.

    Raises:
        InputError: If a name is unknown or does not fit the group.
    """
    members = in_order(np.atleast_2d(np.asarray(groups, dtype=np.int64)), op, routes)
    if members.shape[1] == 1:
        return CollectiveTime(0.0, algorithm or "none", "simple", 0.0)
    group = group_shape(members, routes, figures)
    choice = choose(op, size_bytes, group, figures, algorithm=algorithm, protocol=protocol)
    phases = choice.collective.phases(size_bytes, group)
    seconds = latency = start_s(op, phases, figures)
    for phase in phases:
        hops = phase_hops(phase, members, group, routes, figures)
        time = phase_time(phase, hops.rate(routes.capacity), members, group, routes, figures, choice.protocol)
        seconds += time.whole_s * phase.repeat
        latency += time.latency_s * phase.repeat
    return CollectiveTime(seconds, choice.algorithm, choice.protocol_name, latency, choice)


def ring_bytes(op: str, size_bytes: float, ranks: int) -> float:
    """What a ring has each rank send for a buffer.

    >>> ring_bytes("all_reduce", 8.0, 4), ring_bytes("all_gather", 8.0, 4)
    (12.0, 6.0)
    """
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * size_bytes


def in_order(members: Ints, op: str, routes: Routes) -> Ints:
    """Groups with the members of a node side by side, as libraries order them; a message keeps its ends."""
    if op in _MESSAGES:
        return members
    order = np.argsort(members // routes.node.devices, axis=1, kind="stable")
    return np.take_along_axis(members, order, axis=1)


def start_s(op: str, phases: tuple[Phase, ...], figures: NetworkFigures) -> float:
    """What a call costs before its first step; a message starts with its own step."""
    if op in _MESSAGES:
        return 0.0
    gated = any(phase.gate_steps for phase in phases)
    return figures.gates.base.value if gated and figures.gates else figures.base.value


def group_shape(members: Ints, routes: Routes, figures: NetworkFigures) -> GroupShape:
    """What an algorithm may know of groups: those of a call are taken to be like the first."""
    per_node = routes.node.devices
    node = members[0] // per_node
    _, held = np.unique(node, return_counts=True)
    nodes, even = len(held), bool((held == held[0]).all())
    machine = routes.machine
    torus = None
    if machine.fabric.kind == "torus" and per_node == 1 and nodes == routes.nodes and even:
        in_order = np.repeat(np.arange(nodes), held[0])
        torus = tuple(routes.torus_shape) if bool((node == in_order).all()) else None
    nic = machine.node.nic_bandwidth.value
    injection = len(routes.node.nic_out) * nic if even and held[0] > 1 else nic
    inside = math.inf
    if held.max() > 1 and per_node > 1:
        rings = ring_hops(routes, members[:1, node == node[0]])
        inside = weighed(rings, reached_shares(figures, message=False), routes).rate(routes.capacity)
    switch = machine.node.switch_bandwidth
    return GroupShape(
        ranks=members.shape[1],
        nodes=nodes,
        members_per_node=int(held[0]) if even else 0,
        torus=torus,
        switched=machine.node.kind == "switched" and len(np.unique(members[0])) == members.shape[1],
        inside_bytes_per_s=inside,
        across_bytes_per_s=injection * figures.fabric_ring.value,
        switch_bytes_per_s=switch.value if switch else math.inf,
    )


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one round of a phase.

    Attributes:
        moving_s: Its bytes at their rate.
        whole_s: All of it.
        latency_s: The part that no bandwidth would shorten.
    """

    moving_s: float
    whole_s: float
    latency_s: float


def phase_time(
    phase: Phase,
    rate: float,
    members: Ints,
    group: GroupShape,
    routes: Routes,
    figures: NetworkFigures,
    protocol: Protocol | None,
) -> PhaseTime:
    """Seconds of one round of a phase whose edges move at a rate that the links allow."""
    if figures.lanes and phase.message and not phase.segment_bytes and not isinstance(phase.edges, str):
        # Messages of one process queue at the interfaces that it drives.
        share_out = np.ones(len(phase.edges)) if phase.share is None else phase.share
        across = members[0][phase.edges[:, 0]] != members[0][phase.edges[:, 1]]
        if across.any():
            busiest = float(np.bincount(phase.edges[across, 0], weights=share_out[across]).max())
            lane = routes.machine.node.nic_bandwidth.value * figures.fabric_point_to_point.value
            rate = min(rate, figures.lanes.value * lane / busiest)
    share = protocol.share.value if protocol else 1.0
    moving = 0.0 if math.isinf(rate) else phase.edge_bytes / (rate * share)
    latency = _latency_s(phase, figures, protocol, rate)
    fill = fill_s(figures, protocol, across=group.nodes > 1)
    moved = pipelined_s(moving, fill)
    rule = figures.reduce
    if rule is None or not phase.reduce_bytes:
        return PhaseTime(moving, latency + moved, latency)
    if phase.segment_bytes:
        # The pieces are added while others travel: the slower of both sets the pace, and each step fills with one.
        one = rule.segment.value + phase.segment_bytes / rule.rate.value
        adding = phase.reduce_bytes / phase.segment_bytes * one
        return PhaseTime(moving, latency + phase.across_steps / 2 * one + max(moved, adding), latency)
    adding = phase.reduce_bytes / rule.rate.value
    return PhaseTime(moving, latency + (max(moved, adding) if phase.overlapped else moved + adding), latency)


def _latency_s(phase: Phase, figures: NetworkFigures, protocol: Protocol | None, rate: float) -> float:
    fixed = latency_s(phase, figures, protocol)
    eager = figures.eager
    if eager is None or not phase.step_bytes or not phase.across_steps:
        return fixed
    if phase.step_bytes > eager.most.value + eager.more_per_hop.value:
        hop = figures.fabric_hop.value
    else:
        alone = 0.0 if math.isinf(rate) else phase.step_bytes / rate
        hop = eager.start.value + pipelined_s(alone, eager.fill.value) - alone
    if phase.segment_bytes and not math.isinf(rate):
        hop += phase.segment_bytes / rate
    return fixed + phase.across_steps * (hop - figures.fabric_hop.value)


def reached_shares(figures: NetworkFigures, *, message: bool) -> npt.NDArray[np.float64]:
    """Share of the links that is reached in the node, at its NICs, and beyond, where nothing is lost."""
    if message:
        return np.array([figures.node_point_to_point.value, figures.fabric_point_to_point.value, 1.0])
    inside = figures.node_ring_plain or figures.node_ring
    return np.array([inside.value, figures.fabric_ring.value, 1.0])


@dataclass(frozen=True)
class PhaseHops:
    """Links that a phase of several groups uses: one entry a group, edge and link.

    Attributes:
        row: The group.
        link: The link.
        share: Of an edge's bytes.
        weight: Of the link's rate that an edge's rate takes, more where the library does not reach the link's.
    """

    row: Ints
    link: Ints
    share: Floats
    weight: Floats

    def rate(self, capacity: Floats) -> float:
        """Bytes/s of one edge when all edges move together at one rate."""
        load = np.bincount(self.link, self.weight, minlength=len(capacity))
        used = load > 0
        return float((capacity[used] / load[used]).min()) if used.any() else math.inf


def weighed(hops: Hops, reached: Floats, routes: Routes) -> PhaseHops:
    """Hops with the rate of each link that they take, given the share that is reached of links at each place."""
    return PhaseHops(hops.message, hops.link, hops.share, hops.share / reached[routes.place[hops.link]])


def phase_hops(phase: Phase, members: Ints, group: GroupShape, routes: Routes, figures: NetworkFigures) -> PhaseHops:
    """Links of a phase, for all groups."""
    reached = reached_shares(figures, message=phase.message)
    if isinstance(phase.edges, str):
        rows, each = members, 1
        if phase.edges != "ring":
            cut = members.reshape(len(members), group.nodes, group.members_per_node)
            rail = phase.edges == "rail_rings"
            rows = (np.swapaxes(cut, 1, 2) if rail else cut).reshape(-1, group.nodes if rail else cut.shape[2])
            each = len(rows) // len(members)
        hops = ring_hops(routes, rows)
        return weighed(hops._replace(message=hops.message // each), reached, routes)
    source, target = phase.edges[:, 0], phase.edges[:, 1]
    share = np.ones(len(source)) if phase.share is None else phase.share
    plain = (source < group.ranks) & (target < group.ranks)
    spread = group.members_per_node > 1 and routes.node.devices > 1 and not phase.message
    ends = members[:, source[plain]].reshape(-1), members[:, target[plain]].reshape(-1)
    hops = routes.route(*ends, spread=spread)
    carried = hops.share * np.tile(share[plain], len(members))[hops.message]
    row = hops.message // max(int(plain.sum()), 1)
    found = weighed(Hops(row, hops.link, carried), reached, routes)
    if plain.all():
        return found
    hops = _switch_hops(source[~plain], target[~plain], share[~plain], members, routes)
    lost = figures.switch.share.value if figures.switch else reached[0]
    row = hops.message // int((~plain).sum())
    return PhaseHops(
        np.concatenate([found.row, row]),
        np.concatenate([found.link, hops.link]),
        np.concatenate([found.share, hops.share]),
        np.concatenate([found.weight, hops.share / lost]),
    )


def _switch_hops(source: Ints, target: Ints, share: npt.NDArray[np.float64], members: Ints, routes: Routes) -> Hops:
    """Links between devices and the switch of their node; the message number counts groups and, within, edges."""
    node = routes.node
    up = np.array([node.path[a][(a + 1) % node.devices][0] for a in range(node.devices)])
    down = np.array([node.path[(a + 1) % node.devices][a][-1] for a in range(node.devices)])
    # A switch is numbered after the members, so the member of an edge is the lower of its ends.
    rising = source < target
    device = members[:, np.where(rising, source, target)]
    local = device % node.devices
    link = device // node.devices * len(node.capacity) + np.where(rising, up[local], down[local])
    return Hops(np.arange(link.size, dtype=np.int64), link.reshape(-1), np.tile(share, len(members)))


def ring_hops(routes: Routes, groups: Ints) -> Hops:
    """Links that rings over groups of devices use; the message number is the group's.

    A ring inside a node follows the library's own rings, both ways round. A ring over
    several nodes visits its members in rank order; where a node holds several of them,
    what leaves the node spreads over all its NICs, as the library's channels do.

    Args:
        routes: Links of the job.
        groups: Devices, shape (groups, members), at least two members.
    """
    per_node = routes.node.devices
    nodes, local = groups // per_node, groups % per_node
    inside = (nodes == nodes[:, :1]).all(axis=1)
    index = np.arange(len(groups), dtype=np.int64)
    parts: list[Hops] = []
    for pattern in np.unique(local[inside], axis=0):
        chosen = index[inside & (local == pattern).all(axis=1)]
        orders = ring_orders(routes.machine, tuple(int(device) for device in pattern))
        first = nodes[chosen, 0] * per_node
        for order in orders:
            for here, there in zip(order, (*order[1:], order[0]), strict=True):
                for a, b in ((here, there), (there, here)):
                    hops = routes.route(first + a, first + b)
                    parts.append(Hops(chosen[hops.message], hops.link, hops.share / (2 * len(orders))))
    outside = index[~inside]
    if len(outside):
        shared = len(np.unique(nodes[outside[0]])) < groups.shape[1]
        members = groups[outside]
        hops = routes.route(members.reshape(-1), np.roll(members, -1, axis=1).reshape(-1), spread=shared)
        parts.append(Hops(outside[hops.message // groups.shape[1]], hops.link, hops.share))
    return join(parts)


@dataclass(frozen=True)
class Plan:
    """How a collective of several groups runs, for several sizes of its buffer.

    Attributes:
        choice: The algorithm, chosen for the largest size.
        hops: Of each phase the links, for all groups.
        edge_bytes: Of each size and phase, what an edge carries.
        extra_s: Of each size and phase, the seconds beside those that the bytes take at their rate.
    """

    choice: Choice
    hops: tuple[PhaseHops, ...]
    edge_bytes: tuple[tuple[float, ...], ...]
    extra_s: tuple[tuple[float, ...], ...]


def plan_collective(
    op: str,
    sizes: Sequence[float],
    groups: Ints,
    routes: Routes,
    figures: NetworkFigures,
    algorithm: str | None = None,
    rings: dict[str, PhaseHops] | None = None,
) -> Plan:
    """Choose an algorithm and lay it over the links, to be played beside other traffic.

    Args:
        op: As `choose` takes it.
        sizes: Buffers that the same algorithm is to carry.
        groups: Devices, one row a group, at least two members.
        routes: Links of the job.
        figures: What the library achieves on them.
        algorithm: In place of the library's choice.
        rings: Links of the rings over these groups, kept from one call to the next.

    Raises:
        InputError: If the algorithm is unknown or does not fit the group.
    """
    members = in_order(groups, op, routes)
    group = group_shape(members, routes, figures)
    choice = choose(op, max(sizes), group, figures, algorithm=algorithm)
    protocol = choice.protocol
    first = choice.collective.phases(max(sizes), group)
    kept = {} if rings is None else rings
    found = []
    for phase in first:
        name = phase.edges if isinstance(phase.edges, str) else None
        hops = kept.get(name) if name else None
        if hops is None:
            hops = phase_hops(phase, members, group, routes, figures)
        if name:
            kept[name] = hops
        found.append(hops)
    rates = [hops.rate(routes.capacity) for hops in found]
    edge_bytes, extra_s = [], []
    for size in sizes:
        phases = choice.collective.phases(size, group) if size > 0 else ()
        times = [
            phase_time(phase, rate, members, group, routes, figures, protocol)
            for phase, rate in zip(phases, rates, strict=False)
        ]
        begin = start_s(op, phases, figures)
        edge_bytes.append(tuple(phase.edge_bytes * phase.repeat for phase in phases))
        extra_s.append(
            tuple(
                (time.whole_s - time.moving_s) * phase.repeat + (begin if number == 0 else 0.0)
                for number, (phase, time) in enumerate(zip(phases, times, strict=True))
            )
        )
    if protocol is not None:
        found = [replace(hops, weight=hops.weight / protocol.share.value) for hops in found]
    return Plan(choice, tuple(found), tuple(edge_bytes), tuple(extra_s))
