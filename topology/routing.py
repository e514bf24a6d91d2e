"""Routes: which links a message between two devices takes.

Every link of the job has a number. The links of a node come first, node by
node in one fixed layout, then those of the fabric:

- between devices: the node's own links, one number a direction (point to
  point), or one up and one down link a device (switched);
- one outgoing and one incoming link for each network interface (NIC);
- the fabric's, as `exatwin.topology.ways` numbers them: bundles and pools of a
  dragonfly, pools of a fat tree, each link of a torus or of a user's graph.

Routes come for whole arrays of messages at once, as triples (message, link,
share): a message that spreads over several links uses a share of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .errors import input_error, nearest, nearest_numbers
from .fabrics import Torus
from .fabrics.torus import near_cube
from .faults import Fault
from .hops import Floats, Hops, Ints, Lanes, hops, join, run_starts
from .machine import Machine
from .node_routes import SWITCH, NodeRoutes, node_routes, ring_orders
from .ways import Ways, fabric_ways
from .ways.torus import TorusWays

IN_NODE, AT_NIC, IN_FABRIC = 0, 1, 2

__all__ = [
    "AT_NIC",
    "IN_FABRIC",
    "IN_NODE",
    "Fault",
    "Hops",
    "NodeRoutes",
    "Routes",
    "join",
    "near_cube",
    "node_routes",
    "ring_orders",
]


@dataclass(frozen=True)
class Routes:
    """Links and routes of a job.

    Attributes:
        machine: The machine.
        nodes: Nodes of the job.
        node_ids: Machine node of each of them; the first ones where not said.
        shape: The job's own torus, on a machine that is one. Where only ``node_ids`` are given, the job has none,
            and its messages cross the machine's.
        faults: Links that carry less, or nothing.
        non_minimal: Share of the messages between dragonfly groups that goes by a third group; None splits
            them so that the busiest link is as little busy as can be.
    """

    machine: Machine
    nodes: int
    node_ids: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    faults: tuple[Fault, ...] = ()
    non_minimal: float | None = None

    def __post_init__(self) -> None:
        if self.non_minimal is not None and not 0 <= self.non_minimal <= 1:
            raise input_error(f"the non-minimal share is between 0 and 1, not {self.non_minimal:g}")
        for fault in self.faults:
            if not 0 <= fault.factor <= 1:
                raise input_error(f"{fault}: the factor is between 0 and 1, not {fault.factor:g}", field="perturb")

    @cached_property
    def node(self) -> NodeRoutes:
        """Routes inside a node without faults, the same for each."""
        return node_routes(self.machine)

    @cached_property
    def numbers(self) -> Ints:
        """Machine node of each node of the job."""
        if self.node_ids is not None:
            return np.array(self.node_ids, dtype=np.int64)
        fabric = self.machine.fabric
        if isinstance(fabric, Torus) and fabric.shape_problem(self._own_shape or (), self.nodes) is None:
            return fabric.job_nodes(self._own_shape or ())
        return np.arange(self.nodes, dtype=np.int64)

    @cached_property
    def _own_shape(self) -> tuple[int, ...] | None:
        """The job's own torus, where it has one."""
        fabric = self.machine.fabric
        if self.shape is not None or not isinstance(fabric, Torus) or self.node_ids is not None:
            return self.shape
        return fabric.job_shape(self.nodes)

    @property
    def torus_shape(self) -> tuple[int, ...]:
        """The job's own torus; its nodes in a row where it has none."""
        return self._own_shape or (self.nodes, 1, 1)

    @cached_property
    def ways(self) -> Ways:
        """Links and ways of the fabric."""
        beyond = [fault for fault in self.faults if fault.kind == "fabric"]
        return fabric_ways(self.machine, self.numbers, self._own_shape, beyond, self.non_minimal)

    @cached_property
    def capacity(self) -> Floats:
        """Bytes/s of each link, one direction."""
        inside = np.tile(np.array(self.node.capacity), self.nodes)
        for link, factor in self._lowered:
            inside[link] *= factor
        return np.concatenate([inside, self.ways.capacity])

    @cached_property
    def place(self) -> npt.NDArray[np.int8]:
        """Where each link is: `IN_NODE`, `AT_NIC` or `IN_FABRIC`."""
        local = np.full(len(self.node.capacity), IN_NODE, dtype=np.int8)
        local[list(self.node.nic_out + self.node.nic_in)] = AT_NIC
        inside = np.tile(local, self.nodes)
        return np.concatenate([inside, np.full(len(self.ways.capacity), IN_FABRIC, dtype=np.int8)])

    def name(self, link: int) -> str:
        """A link as people call it, nodes by the machine's numbers.

        >>> from .machine import load_machine
        >>> routes = Routes(load_machine("frontier"), nodes=2)
        >>> routes.name(0), routes.name(25), routes.name(64 + 5)
        ('node 0 GCD 0 -> GCD 1', 'node 0 hsn0 in', 'group 0 -> group 5')
        """
        if not 0 <= link < len(self.capacity):
            raise input_error(f"there is no link {link}; the job has 0 to {len(self.capacity) - 1}")
        node, local = divmod(link, len(self.node.capacity))
        if node < self.nodes:
            return f"node {self.numbers[node]} {self.node.names[local]}"
        return self.ways.name(link - self.nodes * len(self.node.capacity))

    @cached_property
    def _lowered(self) -> list[tuple[int, float]]:
        """Links of nodes that carry less, with what is left of them."""
        return [found for fault in self.faults if fault.kind != "fabric" for found in self._links_of(fault)]

    def _links_of(self, fault: Fault) -> Iterator[tuple[int, float]]:
        nodes = np.flatnonzero(self.numbers == fault.node) if fault.node is not None else np.empty(0, np.int64)
        if not len(nodes):
            near = nearest_numbers(fault.node or 0, self.numbers.tolist(), 5)
            raise input_error(
                f"{fault} is not there: the job has no node {fault.node}; nearest: {near}", field="perturb"
            )
        local = self._nic_links(fault) if fault.kind == "nic" else self._device_links(fault)
        for link in local:
            yield int(nodes[0]) * len(self.node.capacity) + link, fault.factor

    def _nic_links(self, fault: Fault) -> tuple[int, ...]:
        names = [nic.name for nic in self.machine.node.nics]
        if fault.name not in names:
            known = nearest(str(fault.name), names)
            raise input_error(f"{fault} is not there: a node has no nic {fault.name}{known}", field="perturb")
        number = names.index(fault.name)
        return self.node.nic_out[number], self.node.nic_in[number]

    def _device_links(self, fault: Fault) -> tuple[int, ...]:
        ends = tuple(SWITCH if end == "switch" else end for end in fault.ends or ())
        joined = self.node.between
        pair = ends if len(ends) == 2 else (None, None)
        if pair not in joined:
            named = {-1: "switch"}
            beside = [str(named.get(b, b)) for a, b in joined if ends and a == ends[0]]
            shown = f"; device {ends[0]} is joined to {', '.join(beside)}" if beside else ""
            raise input_error(f"{fault} is not there{shown}", field="perturb")
        a, b = pair
        assert isinstance(a, int) and isinstance(b, int)
        return joined[a, b], joined[b, a]

    @cached_property
    def _variants(self) -> tuple[list[NodeRoutes], Ints]:
        """Routes inside nodes: first those of whole nodes, then of each with failed links; and which a node has."""
        width = len(self.node.capacity)
        failed: dict[int, set[int]] = {}
        left: dict[int, float] = {}
        for link, factor in self._lowered:
            left[link] = left.get(link, 1.0) * factor
            if left[link] <= 0:
                failed.setdefault(link // width, set()).add(link % width)
        kinds = [self.node]
        of = np.zeros(self.nodes, dtype=np.int64)
        for node, links in sorted(failed.items()):
            of[node] = len(kinds)
            kinds.append(node_routes(self.machine, frozenset(links)))
        return kinds, of

    def route(self, source: Ints, target: Ints, *, spread: bool = False, together: Ints | None = None) -> Hops:
        """Links of messages between devices.

        Args:
            source: Device of each sender.
            target: Device of each receiver, same shape.
            spread: Whether a message that leaves its node spreads over all NICs,
                as the channels of a ring with several members a node do.
            together: Number of the set of messages that each one is under way with; adaptive routing
                balances the links within each set. All of them where not said.

        Returns:
            One triple a message and link.

        Raises:
            InputError: If links that have failed leave no way.
        """
        per_node = self.node.devices
        width = len(self.node.capacity)
        source_node, source_local = source // per_node, source % per_node
        target_node, target_local = target // per_node, target % per_node
        index = np.arange(len(source), dtype=np.int64)
        kinds, of = self._variants
        parts: list[Hops] = []
        inside = (source_node == target_node) & (source_local != target_local)
        for number, kind in enumerate(kinds) if inside.any() else ():
            here = inside & (of[source_node] == number) if len(kinds) > 1 else inside
            pairs = source_local * per_node + target_local
            for pair in np.unique(pairs[here]).tolist():
                chosen = index[here & (pairs == pair)]
                a, b = divmod(pair, per_node)
                if not kind.path[a][b]:
                    self._no_way(source_node[chosen[0]], f"from device {a} to device {b}")
                parts += [hops(chosen, source_node[chosen] * width + link) for link in kind.path[a][b]]
        across = index[source_node != target_node]
        if len(across):
            lanes = self._lanes(across, source_node, source_local, target_node, target_local, spread)
            ports = self._ports(lanes, source_node, target_node)
            parts += ports
            if not spread:
                parts += self._to_ports(across, source_node, source_local, target_node, target_local)
            sets = np.zeros(len(source), dtype=np.int64) if together is None else together
            floor_s = self._floor_s(join(ports), sets)
            beyond = self.ways.cross(across, source_node, target_node, lanes, sets, floor_s)
            parts.append(Hops(beyond.message, beyond.link + self.nodes * width, beyond.share))
        return join(parts)

    def _no_way(self, node: int, what: str) -> None:
        raise input_error(f"node {self.numbers[node]} has no way {what}: its links have failed", field="perturb")

    def _lanes(
        self, messages: Ints, source_node: Ints, source_local: Ints, target_node: Ints, target_local: Ints, spread: bool
    ) -> Lanes:
        """The ports that messages use at both ends."""
        kinds, of = self._variants
        if isinstance(self.ways, TorusWays) and self.machine.node.kind == "single":
            # One message uses one interface; neighbours in different directions use different ones.
            direction = self.ways.first_direction(source_node[messages], target_node[messages])
            out, into = (
                self._turned(direction % self.machine.node.nic_count, nodes[messages])
                for nodes in (source_node, target_node)
            )
            return Lanes(messages, out, into, np.ones(len(messages)))
        if not spread:
            ports = np.array([kind.exit_nic for kind in kinds], dtype=np.int64)
            out = ports[of[source_node[messages]], source_local[messages]]
            into = ports[of[target_node[messages]], target_local[messages]]
            for nodes, nics in ((source_node, out), (target_node, into)):
                if (nics < 0).any():
                    self._no_way(nodes[messages][nics < 0][0], "out: no NIC is left")
            return Lanes(messages, out, into, np.ones(len(messages)))
        parts = []
        for a, b in itertools.product(range(len(kinds)), repeat=2):
            chosen = messages[(of[source_node[messages]] == a) & (of[target_node[messages]] == b)]
            if not len(chosen):
                continue
            for nodes, kind in ((source_node, kinds[a]), (target_node, kinds[b])):
                if not kind.nics:
                    self._no_way(nodes[chosen[0]], "out: no NIC is left")
            for out_nic, in_nic, share in _rails(kinds[a].nics, kinds[b].nics):
                full = np.full(len(chosen), out_nic), np.full(len(chosen), in_nic)
                parts.append(Lanes(chosen, *full, np.full(len(chosen), share)))
        return Lanes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _turned(self, nic: Ints, node: Ints) -> Ints:
        """The ports meant, or the next ones that work."""
        kinds, of = self._variants
        if len(kinds) == 1:
            return nic
        count = self.machine.node.nic_count
        table = np.zeros((len(kinds), count), dtype=np.int64)
        for number, kind in enumerate(kinds):
            for meant in range(count):
                table[number, meant] = min(kind.nics, key=lambda k: (k - meant) % count, default=-1)
        turned: Ints = table[of[node], nic]
        if (turned < 0).any():
            self._no_way(int(node[turned < 0][0]), "out: no NIC is left")
        return turned

    def _ports(self, lanes: Lanes, source_node: Ints, target_node: Ints) -> list[Hops]:
        """Hops through the ports themselves."""
        width = len(self.node.capacity)
        out, into = np.array(self.node.nic_out), np.array(self.node.nic_in)
        return [
            hops(lanes.message, source_node[lanes.message] * width + out[lanes.out_nic], lanes.share),
            hops(lanes.message, target_node[lanes.message] * width + into[lanes.in_nic], lanes.share),
        ]

    def _to_ports(
        self, messages: Ints, source_node: Ints, source_local: Ints, target_node: Ints, target_local: Ints
    ) -> Iterator[Hops]:
        """Hops inside nodes, from a device to the one its port hangs on, and likewise at the other end."""
        kinds, of = self._variants
        width = len(self.node.capacity)
        for nodes, locals_, leaving in ((source_node, source_local, True), (target_node, target_local, False)):
            for number, kind in enumerate(kinds):
                for local in range(kind.devices):
                    links = kind.exit[local][:-1] if leaving else kind.entry[local][1:]
                    if not links:
                        continue
                    at = (locals_[messages] == local) & (of[nodes[messages]] == number)
                    chosen = messages[at]
                    for link in links:
                        yield hops(chosen, nodes[chosen] * width + link)

    def _floor_s(self, ports: Hops, sets: Ints) -> Floats:
        """Seconds a byte of the busiest port, for each set: adaptive routing cannot do better."""
        count = int(sets.max(initial=0)) + 1
        if self.machine.fabric.kind != "dragonfly" or self.non_minimal is not None:
            return np.zeros(count)
        links = len(self.capacity)
        if count == 1:
            return np.array([(np.bincount(ports.link, ports.share, links) / np.maximum(self.capacity, 1e-300)).max()])
        # Messages come in long ordered runs, which a merging sort joins quickly.
        of_use = sets[ports.message] * links + ports.link
        order = np.argsort(of_use, kind="stable")
        opens = run_starts(of_use[order])
        key = of_use[order[opens]]
        level = np.add.reduceat(ports.share[order], opens) / np.maximum(self.capacity[key % links], 1e-300)
        worst = np.zeros(count)
        np.maximum.at(worst, key // links, level)
        return worst

    def fabric_hops(self, source: Ints, target: Ints) -> Ints:
        """Switch-to-switch or node-to-node hops of each message; 0 inside a node or below one switch.

        >>> from .machine import load_machine
        >>> Routes(load_machine("frontier"), nodes=200).fabric_hops(np.zeros(3, int), np.array([4, 800, 1500])).tolist()
        [0, 1, 2]
        """
        per_node = self.node.devices
        a, b = source // per_node, target // per_node
        ports = np.maximum(np.array(self.node.exit_nic, dtype=np.int64), 0)
        return self.ways.distance(a, b, ports[source % per_node], ports[target % per_node])


def _rails(out: tuple[int, ...], into: tuple[int, ...]) -> Iterator[tuple[int, int, float]]:
    """How a spread message goes from ports to ports: each to its like, or to all where that one has failed."""
    for nic in out:
        if nic in into:
            yield nic, nic, 1.0 / len(out)
        else:
            yield from ((nic, other, 1.0 / len(out) / len(into)) for other in into)
