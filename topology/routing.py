"""Routes by arithmetic: which links a message between two devices takes.

Every link of the job has a number. The links of a node come first, node by
node in one fixed layout, then those of the fabric:

- between devices: the node's own links, one number a direction (point to
  point), or one up and one down link a device (switched);
- one outgoing and one incoming link for each network interface (NIC);
- the fabric: dragonfly, the outgoing and the incoming global links of a group,
  taken as one pool each, since adaptive routing spreads traffic over minimal
  and non-minimal paths; fat tree, the uplinks and downlinks of a leaf, pooled
  likewise; torus, one link a direction of each axis of the job's own torus.

Routes come for whole arrays of messages at once, as triples (message, link,
share): a message that spreads over several links uses a share of each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .machine import Machine

IN_NODE, AT_NIC, IN_FABRIC = 0, 1, 2

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Hops(NamedTuple):
    """Which message uses which link, and how much of it: three arrays of one length."""

    message: Ints
    link: Ints
    share: Floats


def join(parts: list[Hops]) -> Hops:
    """All the hops of several lists."""
    if not parts:
        return Hops(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Hops(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _hops(message: Ints, link: Ints, share: float = 1.0) -> Hops:
    return Hops(message, link, np.full(len(message), share))


@dataclass(frozen=True)
class NodeRoutes:
    """The links inside one node, and the ways between its devices.

    Attributes:
        devices: Devices of the node.
        capacity: Bytes/s of each link of the node, in its own numbering, NICs included.
        path: ``path[a][b]`` are the link numbers from device a to device b.
        exit: ``exit[a]`` are the links from device a into the fabric, its NIC last.
        entry: ``entry[a]`` are the links from the fabric to device a, its NIC first.
        nic_out: Outgoing link of each NIC.
        nic_in: Incoming link of each NIC.
    """

    devices: int
    capacity: tuple[float, ...]
    path: tuple[tuple[tuple[int, ...], ...], ...]
    exit: tuple[tuple[int, ...], ...]
    entry: tuple[tuple[int, ...], ...]
    nic_out: tuple[int, ...]
    nic_in: tuple[int, ...]


def node_routes(machine: Machine) -> NodeRoutes:
    """The links and the shortest ways of one node of a machine.

    Between devices without a direct link the way with the fewest hops is taken,
    and among those the one whose thinnest link is widest.
    """
    node = machine.node
    count = node.devices
    capacity: list[float] = []
    path: list[list[tuple[int, ...]]] = [[() for _ in range(count)] for _ in range(count)]
    if node.kind == "switched":
        assert node.switch_bandwidth is not None
        capacity += [node.switch_bandwidth.value] * (2 * count)  # up 2a, down 2a + 1
        for a, b in itertools.permutations(range(count), 2):
            path[a][b] = (2 * a, 2 * b + 1)
    elif node.kind == "point_to_point":
        assert node.link_bandwidth is not None
        number: dict[tuple[int, int], int] = {}
        for link in node.links:
            a, b = link.between
            for ends in ((a, b), (b, a)):
                number[ends] = len(capacity)
                capacity.append(link.count * node.link_bandwidth.value)
        for a in range(count):
            path[a] = _widest_shortest(a, count, number, capacity)
    nics = node.nics
    nic_out, nic_in = [], []
    for _ in nics:
        nic_out.append(len(capacity))
        nic_in.append(len(capacity) + 1)
        capacity += [node.nic_bandwidth.value] * 2
    exits, entries = [], []
    for a in range(count):
        # A device uses the NIC with the shortest way to it; the lower number where two are as near.
        nic = min(range(len(nics)), key=lambda k: (len(path[a][nics[k].device]), k))
        beside = nics[nic].device
        inside_out = path[a][beside] if node.kind == "point_to_point" else ()
        inside_in = path[beside][a] if node.kind == "point_to_point" else ()
        exits.append((*inside_out, nic_out[nic]))
        entries.append((nic_in[nic], *inside_in))
    return NodeRoutes(
        devices=count,
        capacity=tuple(capacity),
        path=tuple(tuple(row) for row in path),
        exit=tuple(exits),
        entry=tuple(entries),
        nic_out=tuple(nic_out),
        nic_in=tuple(nic_in),
    )


def _widest_shortest(
    start: int, count: int, number: dict[tuple[int, int], int], capacity: list[float]
) -> list[tuple[int, ...]]:
    best: dict[int, tuple[int, ...]] = {start: ()}
    frontier = [start]
    while frontier:
        reached: dict[int, tuple[int, ...]] = {}
        for here in frontier:
            for there in range(count):
                if (here, there) not in number or there in best:
                    continue
                way = (*best[here], number[here, there])
                width = min(capacity[link] for link in way)
                if there not in reached or width > min(capacity[link] for link in reached[there]):
                    reached[there] = way
        best |= reached
        frontier = sorted(reached)
    return [best.get(device, ()) for device in range(count)]


@dataclass(frozen=True)
class Routes:
    """Links and routes of a job on the first ``nodes`` nodes it was given.

    Attributes:
        machine: The machine.
        nodes: Nodes of the job.
    """

    machine: Machine
    nodes: int

    @cached_property
    def node(self) -> NodeRoutes:
        """Routes inside a node, the same for each."""
        return node_routes(self.machine)

    @cached_property
    def torus_shape(self) -> tuple[int, int, int]:
        """The job's own three-dimensional torus, as near to a cube as its node count allows."""
        return near_cube(self.nodes)

    @cached_property
    def capacity(self) -> Floats:
        """Bytes/s of each link, one direction."""
        inside = np.tile(np.array(self.node.capacity), self.nodes)
        return np.concatenate([inside, self._fabric_capacity()])

    @cached_property
    def place(self) -> npt.NDArray[np.int8]:
        """Where each link is: `IN_NODE`, `AT_NIC` or `IN_FABRIC`."""
        local = np.full(len(self.node.capacity), IN_NODE, dtype=np.int8)
        local[list(self.node.nic_out + self.node.nic_in)] = AT_NIC
        inside = np.tile(local, self.nodes)
        return np.concatenate([inside, np.full(len(self.capacity) - len(inside), IN_FABRIC, dtype=np.int8)])

    def _fabric_capacity(self) -> Floats:
        fabric = self.machine.fabric
        if fabric.kind == "dragonfly":
            return np.full(2 * self._pools, fabric.global_bytes_per_s())
        if fabric.kind == "fat_tree":
            down = fabric.nodes_per_leaf.value * self.machine.node.injection_bytes_per_s
            return np.full(2 * self._pools, down / fabric.oversubscription.value)
        if fabric.kind == "torus":
            return np.full(6 * self.nodes, fabric.link_bandwidth.value)
        raise AssertionError(f"fabric kind {fabric.kind!r} has no routes")

    @cached_property
    def _pool_nodes(self) -> int:
        """Nodes behind one pool of fabric links: a dragonfly group, a leaf."""
        fabric = self.machine.fabric
        if fabric.kind == "dragonfly":
            return fabric.group_nodes.value
        if fabric.kind == "fat_tree":
            return fabric.nodes_per_leaf.value
        return max(self.nodes, 1)

    def _pool(self, node: Ints) -> Ints:
        """The group or leaf of each node; a dragonfly's last group takes the nodes that are left over."""
        fabric = self.machine.fabric
        pool = node // self._pool_nodes
        return np.minimum(pool, fabric.groups.value - 1) if fabric.kind == "dragonfly" else pool

    @cached_property
    def _pools(self) -> int:
        return int(self._pool(np.array([max(self.nodes - 1, 0)]))[0]) + 1

    def route(self, source: Ints, target: Ints, *, spread: bool = False) -> Hops:
        """Links of messages between devices.

        Args:
            source: Device of each sender.
            target: Device of each receiver, same shape.
            spread: Whether a message that leaves its node spreads over all NICs,
                as the channels of a ring with several members a node do.

        Returns:
            One triple a message and link.
        """
        per_node = self.node.devices
        width = len(self.node.capacity)
        source_node, source_local = source // per_node, source % per_node
        target_node, target_local = target // per_node, target % per_node
        index = np.arange(len(source), dtype=np.int64)
        parts: list[Hops] = []
        inside = (source_node == target_node) & (source_local != target_local)
        for a, b in itertools.permutations(range(per_node), 2) if inside.any() else ():
            chosen = index[inside & (source_local == a) & (target_local == b)]
            if len(chosen):
                parts += [_hops(chosen, source_node[chosen] * width + link) for link in self.node.path[a][b]]
        across = source_node != target_node
        if across.any():
            parts += self._leave(index[across], source_node, source_local, target_node, target_local, spread)
            parts += self._cross(index[across], source_node, target_node)
        return join(parts)

    def _leave(
        self, messages: Ints, source_node: Ints, source_local: Ints, target_node: Ints, target_local: Ints, spread: bool
    ) -> list[Hops]:
        node = self.node
        width = len(node.capacity)
        parts: list[Hops] = []
        if self.machine.fabric.kind == "torus" and self.machine.node.kind == "single":
            # One message uses one interface; neighbours in different directions use different ones.
            direction = self._first_direction(source_node[messages], target_node[messages])
            lane = direction % len(node.nic_out)
            parts.append(_hops(messages, source_node[messages] * width + np.array(node.nic_out)[lane]))
            parts.append(_hops(messages, target_node[messages] * width + np.array(node.nic_in)[lane]))
            return parts
        if spread:
            share = 1.0 / len(node.nic_out)
            for out, into in zip(node.nic_out, node.nic_in, strict=True):
                parts.append(_hops(messages, source_node[messages] * width + out, share))
                parts.append(_hops(messages, target_node[messages] * width + into, share))
            return parts
        for local in range(node.devices):
            leaving = messages[source_local[messages] == local]
            parts += [_hops(leaving, source_node[leaving] * width + link) for link in node.exit[local]]
            arriving = messages[target_local[messages] == local]
            parts += [_hops(arriving, target_node[arriving] * width + link) for link in node.entry[local]]
        return parts

    def _cross(self, messages: Ints, source_node: Ints, target_node: Ints) -> list[Hops]:
        base = self.nodes * len(self.node.capacity)
        if self.machine.fabric.kind == "torus":
            return self._torus_hops(messages, source_node, target_node, base)
        source_pool, target_pool = self._pool(source_node[messages]), self._pool(target_node[messages])
        far = source_pool != target_pool
        return [
            _hops(messages[far], base + 2 * source_pool[far]),
            _hops(messages[far], base + 2 * target_pool[far] + 1),
        ]

    def _coordinates(self, node: Ints) -> list[Ints]:
        x, y, _ = self.torus_shape
        return [node % x, node // x % y, node // (x * y)]

    def _first_direction(self, source_node: Ints, target_node: Ints) -> Ints:
        """Number 0..5 of the direction a dimension-ordered route takes first."""
        direction = np.zeros(len(source_node), dtype=np.int64)
        undecided = np.ones(len(source_node), dtype=bool)
        ends = zip(self._coordinates(source_node), self._coordinates(target_node), self.torus_shape, strict=True)
        for axis, (here, there, extent) in enumerate(ends):
            steps = (there - here) % extent
            moves = undecided & (steps != 0)
            direction[moves] = 2 * axis + np.where(steps <= extent - steps, 0, 1)[moves]
            undecided &= ~moves
        return direction

    def _torus_hops(self, messages: Ints, source_node: Ints, target_node: Ints, base: int) -> list[Hops]:
        """Dimension order, the shorter way round each ring."""
        shape = self.torus_shape
        stride = (1, shape[0], shape[0] * shape[1])
        here = self._coordinates(source_node[messages])
        there = self._coordinates(target_node[messages])
        parts: list[Hops] = []
        for axis, extent in enumerate(shape):
            steps = (there[axis] - here[axis]) % extent
            forward = steps <= extent - steps
            left = np.where(forward, steps, extent - steps)
            while (left > 0).any():
                moving = left > 0
                node = sum(c * s for c, s in zip(here, stride, strict=True))
                number = base + 6 * node + 2 * axis + np.where(forward, 0, 1)
                parts.append(_hops(messages[moving], number[moving]))
                here[axis] = np.where(moving, (here[axis] + np.where(forward, 1, -1)) % extent, here[axis])
                left = left - 1
        return parts

    def fabric_hops(self, source: Ints, target: Ints) -> Ints:
        """Switch-to-switch or node-to-node hops of each message; 0 inside a node."""
        per_node = self.node.devices
        a, b = source // per_node, target // per_node
        if self.machine.fabric.kind == "torus":
            hops = np.zeros(len(a), dtype=np.int64)
            for here, there, extent in zip(
                self._coordinates(a), self._coordinates(b), self.torus_shape, strict=True
            ):
                steps = (there - here) % extent
                hops += np.minimum(steps, extent - steps)
            return hops
        far = self._pool(a) != self._pool(b)
        return np.where(a == b, 0, np.where(far, 3, 1))


def near_cube(nodes: int) -> tuple[int, int, int]:
    """Three factors of a node count, as equal as can be, largest first.

    >>> near_cube(6144)
    (24, 16, 16)
    """
    best = (nodes, 1, 1)
    for z in range(1, round(nodes ** (1 / 3)) + 2):
        if nodes % z:
            continue
        rest = nodes // z
        for y in range(z, int(rest**0.5) + 1):
            if rest % y == 0:
                best = min(best, (rest // y, y, z))
    return best


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

    def narrowest(order: tuple[int, ...]) -> tuple[float, int]:
        ways = [routes.path[a][b] for a, b in itertools.pairwise((*order, order[0]))]
        return min(routes.capacity[link] / len(way) for way in ways for link in way), -sum(map(len, ways))

    first, *rest = devices
    orders = [(first, *order) for order in itertools.permutations(rest) if order[0] <= order[-1]]
    return (max(orders, key=narrowest),)
