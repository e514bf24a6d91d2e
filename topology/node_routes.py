"""The links inside one node, the ways between its devices, and the rings a library runs over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .machine import Machine, Node

Failed = frozenset[int]
NOTHING: Failed = frozenset()
MOST_TRIED = 8  # devices whose every order is tried for a ring; more are searched for


@dataclass(frozen=True)
class NodeRoutes:
    """The links inside one node, and the ways between its devices.

    Attributes:
        devices: Devices of the node.
        capacity: Bytes/s of each link of the node, in its own numbering, NICs included.
        names: What people call each link.
        path: ``path[a][b]`` are the link numbers from device a to device b; none where no way is left.
        nics: Ports that work.
        exit_nic: The port that device a sends by; -1 where none works.
        exit: ``exit[a]`` are the links from device a into the fabric, its NIC last.
        entry: ``entry[a]`` are the links from the fabric to device a, its NIC first.
        nic_out: Outgoing link of each NIC.
        nic_in: Incoming link of each NIC.
        between: The link from one device to another, or to and from the ``-1`` of a switch.
    """

    devices: int
    capacity: tuple[float, ...]
    names: tuple[str, ...]
    path: tuple[tuple[tuple[int, ...], ...], ...]
    nics: tuple[int, ...]
    exit_nic: tuple[int, ...]
    exit: tuple[tuple[int, ...], ...]
    entry: tuple[tuple[int, ...], ...]
    nic_out: tuple[int, ...]
    nic_in: tuple[int, ...]
    between: dict[tuple[int, int], int]


SWITCH = -1


def node_routes(machine: Machine, failed: Failed = NOTHING) -> NodeRoutes:
    """The links and the shortest ways of one node of a machine.

    Between devices without a direct link the way with the fewest hops is taken,
    and among those the one whose thinnest link is widest.

    Args:
        machine: The machine.
        failed: Numbers of links that carry nothing; ways lead around them.
    """
    node = machine.node
    count = node.devices
    word = machine.device.word
    capacity: list[float] = []
    names: list[str] = []
    number: dict[tuple[int, int], int] = {}
    if node.kind == "switched":
        assert node.switch_bandwidth is not None
        for a in range(count):
            number[a, SWITCH], number[SWITCH, a] = 2 * a, 2 * a + 1
            names += [f"{word} {a} -> switch", f"switch -> {word} {a}"]
        capacity += [node.switch_bandwidth.value] * (2 * count)
    elif node.kind == "point_to_point":
        for link in node.links:
            a, b = link.between
            for ends in ((a, b), (b, a)):
                number[ends] = len(capacity)
                capacity.append(node.pair_bytes_per_s(a, b))
                names.append(f"{word} {ends[0]} -> {word} {ends[1]}")
    works = {ends: link for ends, link in number.items() if link not in failed}
    path = [_widest_shortest(a, count, works, capacity) for a in range(count)]
    nic_out, nic_in = [], []
    for nic in node.nics:
        nic_out.append(len(capacity))
        nic_in.append(len(capacity) + 1)
        capacity += [node.nic_bandwidth.value] * 2
        names += [f"{nic.name} out", f"{nic.name} in"]
    alive = [k for k in range(len(node.nics)) if nic_out[k] not in failed]
    exit_nic: list[int] = []
    exits: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    for a in range(count):
        # A device uses the NIC with the shortest way to it; the lower number where two are as near. On a switched
        # node all are as near by that measure: devices in a row share the port of the first, as those below one
        # PCIe switch do.
        near = [k for k in alive if node.nics[k].device == a or node.kind != "point_to_point" or path[a][_at(node, k)]]
        if not near:
            exit_nic.append(-1)
            exits.append(())
            entries.append(())
            continue
        apart = {k: (a - _at(node, k)) % count if node.kind == "switched" else len(path[a][_at(node, k)]) for k in near}
        best = min(near, key=lambda k: (apart[k], k))
        beside = _at(node, best)
        # On a switched node a port hangs on the host's side: its messages take no link between devices.
        exit_nic.append(best)
        exits.append((*(path[a][beside] if node.kind == "point_to_point" else ()), nic_out[best]))
        entries.append((nic_in[best], *(path[beside][a] if node.kind == "point_to_point" else ())))
    return NodeRoutes(
        devices=count,
        capacity=tuple(capacity),
        names=tuple(names),
        path=tuple(tuple(row) for row in path),
        nics=tuple(alive),
        exit_nic=tuple(exit_nic),
        exit=tuple(exits),
        entry=tuple(entries),
        nic_out=tuple(nic_out),
        nic_in=tuple(nic_in),
        between=number,
    )


def _at(node: Node, nic: int) -> int:
    return node.nics[nic].device


def _widest_shortest(
    start: int, count: int, number: dict[tuple[int, int], int], capacity: list[float]
) -> list[tuple[int, ...]]:
    best: dict[int, tuple[int, ...]] = {start: ()}
    frontier = [start]
    places = [*range(count), SWITCH]
    while frontier:
        reached: dict[int, tuple[int, ...]] = {}
        for here in frontier:
            for there in places:
                if (here, there) not in number or there in best:
                    continue
                way = (*best[here], number[here, there])
                width = min(capacity[link] for link in way)
                if there not in reached or width > min(capacity[link] for link in reached[there]):
                    reached[there] = way
        best |= reached
        frontier = sorted(reached)
    return [best.get(device, ()) for device in range(count)]


def ring_orders(machine: Machine, devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The rings that a collective library runs over devices of one node.

    The machine's documented rings where the group is the whole node, otherwise the
    order whose thinnest direct link is widest; each is run both ways round.

    Args:
        machine: The machine.
        devices: Local device numbers of the group, at least two.

    >>> from .machine import load_machine
    >>> ring_orders(load_machine("frontier"), (0, 1, 2, 3))
    ((0, 1, 3, 2),)
    """
    node = machine.node
    whole = tuple(range(machine.devices_per_node))
    if node.kind != "point_to_point" or len(devices) <= 2:
        return (devices,)
    if tuple(sorted(devices)) == whole and node.rings:
        return tuple(ring.order for ring in node.rings)
    routes = node_routes(machine)
    if len(devices) > MOST_TRIED:
        return (_searched_ring(routes, devices),)

    def narrowest(order: tuple[int, ...]) -> tuple[float, int]:
        ways = [routes.path[a][b] for a, b in itertools.pairwise((*order, order[0]))]
        return min(routes.capacity[link] / len(way) for way in ways for link in way), -sum(map(len, ways))

    first, *rest = devices
    orders = [(first, *order) for order in itertools.permutations(rest) if order[0] <= order[-1]]
    return (max(orders, key=narrowest),)


def _searched_ring(routes: NodeRoutes, devices: tuple[int, ...]) -> tuple[int, ...]:
    """A ring over direct links only, the thinnest as wide as can be; the given order where there is none."""
    width = {(a, b): routes.capacity[link] for (a, b), link in routes.between.items() if a in devices and b in devices}
    for least in sorted(set(width.values()), reverse=True):
        beside = {a: [b for b in devices if width.get((a, b), 0.0) >= least] for a in devices}
        found = next(_closed_walks((devices[0],), beside, len(devices), itertools.count()), None)
        if found:
            return found
    return devices


def _closed_walks(
    walk: tuple[int, ...], beside: dict[int, list[int]], length: int, tries: Iterator[int]
) -> Iterator[tuple[int, ...]]:
    if next(tries) > 100_000:  # a node is small; a map this tangled falls back to the given order
        return
    if len(walk) == length:
        if walk[0] in beside[walk[-1]]:
            yield walk
        return
    # The device with the fewest ways on comes first: one left for later may be cut off.
    ahead = [b for b in beside[walk[-1]] if b not in walk]
    for b in sorted(ahead, key=lambda b: (sum(c not in walk for c in beside[b]), b)):
        yield from _closed_walks((*walk, b), beside, length, tries)
