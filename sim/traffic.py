"""Every kind of transfer that a layout makes on a machine, as coflows over real links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..scenarios.scenario import Scenario
from ..topology.placement import Placement
from ..topology.routing import Hops, Routes, join, ring_orders
from .calibration import Calibration, NetworkFigures
from .collectives import COLLECTIVES
from .network import TrafficClasses, traffic_classes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """The classes of a job: first the forward messages of each pipeline boundary, then the
    backward ones, then the data-parallel ring of each stage, then the ring that joins the
    two copies of a tied embedding.

    Attributes:
        classes: The classes over constraint rows.
        stages: Pipeline stages, p.
        message_latency_s: Latency of one message, a boundary.
        data_ring: Latency of a data-parallel ring.
        embedding_ring: Latency of the ring between first and last stage.
        tensor_rate: Bytes/s over each edge of a tensor-parallel ring while all groups run theirs.
        tensor_ring: Latency of a tensor-parallel ring.
    """

    classes: TrafficClasses
    stages: int
    message_latency_s: tuple[float, ...]
    data_ring: RingLatency
    embedding_ring: RingLatency
    tensor_rate: float
    tensor_ring: RingLatency

    def forward(self, stage: int) -> int:
        """Class of the messages from a stage to the next."""
        return stage

    def backward(self, stage: int) -> int:
        """Class of the messages from a stage to the one before it."""
        return self.stages - 1 + stage - 1

    def data(self, stage: int) -> int:
        """Class of a stage's data-parallel ring."""
        return 2 * (self.stages - 1) + stage

    @property
    def embedding(self) -> int:
        """Class of the ring between first and last stage."""
        return 3 * self.stages - 2


@dataclass(frozen=True)
class RingLatency:
    """What the steps of a ring cost beside its bytes.

    Of the ring's ``p`` steps a round, those that cross a node border wait for the
    fabric; a ring over N nodes crosses N of them (NCCL, src/graph/tuning.cc, counts alike).
    """

    base_s: float
    inside_s: float
    across_s: float
    ranks: int
    nodes: int

    def seconds(self, steps: int) -> float:
        """Latency of so many steps; 0 for a ring of one."""
        if steps == 0:
            return 0.0
        crossing = steps * self.nodes / self.ranks if self.nodes > 1 else 0.0
        return self.base_s + (steps - crossing) * self.inside_s + crossing * self.across_s


def build_traffic(scenario: Scenario, calibration: Calibration) -> Traffic:
    """The traffic of a scenario: routes for every rank, folded to the rows that can bind."""
    layout = scenario.layout
    placement = placement_of(scenario)
    routes = Routes(scenario.machine, placement.nodes)
    figures = calibration.network
    grid = placement.grid()
    pp = layout.pp
    parts: list[tuple[Ints, Hops, str]] = []
    latency: list[float] = []
    if pp > 1:
        source, target = grid[:-1].reshape(-1), grid[1:].reshape(-1)
        boundary = np.repeat(np.arange(pp - 1), placement.dp * placement.tp)
        parts.append((boundary, routes.route(source, target), "point_to_point"))
        parts.append((boundary + pp - 1, routes.route(target, source), "point_to_point"))
        latency = _message_latency(routes, source, target, boundary, figures)
        ends = np.stack([grid[0].reshape(-1), grid[-1].reshape(-1)], axis=1)
        parts.append((np.full(len(ends), 3 * pp - 2), ring_hops(routes, ends), "ring"))
    if placement.dp > 1:
        groups = np.swapaxes(grid, 1, 2).reshape(-1, placement.dp)
        stage = np.repeat(np.arange(pp), placement.tp)
        parts.append((2 * (pp - 1) + stage, ring_hops(routes, groups), "ring"))
    per_node = placement.devices_per_node
    return Traffic(
        classes=_classes(3 * pp - 1, parts, routes, figures),
        stages=pp,
        message_latency_s=tuple(latency),
        data_ring=_ring_latency(np.swapaxes(grid, 1, 2).reshape(-1, placement.dp), per_node, figures),
        embedding_ring=_ring_latency(grid[[0, -1]].reshape(2, -1).T, per_node, figures),
        tensor_rate=_tensor_rate(placement, routes, figures),
        tensor_ring=_ring_latency(placement.tensor_groups(), per_node, figures),
    )


def placement_of(scenario: Scenario) -> Placement:
    """The placement of a scenario's ranks."""
    layout = scenario.layout
    assert layout.dp is not None
    return Placement(layout.tp, layout.dp, layout.pp, scenario.machine.devices_per_node)


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


def _classes(
    count: int, parts: list[tuple[Ints, Hops, str]], routes: Routes, figures: NetworkFigures
) -> TrafficClasses:
    # What a library does not reach is lost at the ends, in the node and at its NICs; links beyond carry what was sent.
    reached = {
        "ring": np.array([figures.node_ring.value, figures.fabric_ring.value, 1.0]),
        "point_to_point": np.array([figures.node_point_to_point.value, figures.fabric_point_to_point.value, 1.0]),
    }
    class_of, link, weight = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
    for classes, hops, kind in parts:
        class_of.append(classes[hops.message])
        link.append(hops.link)
        weight.append(hops.share / reached[kind][routes.place[hops.link]])
    return traffic_classes(
        count, np.concatenate(class_of), np.concatenate(link), np.concatenate(weight), routes.capacity
    )


def _tensor_rate(placement: Placement, routes: Routes, figures: NetworkFigures) -> float:
    """Rate of a tensor-parallel ring while every group of the job runs one."""
    if placement.tp == 1:
        return float("inf")
    groups = placement.tensor_groups()
    if not placement.tensor_group_crosses_nodes():
        groups = groups[: max(placement.devices_per_node // placement.tp, 1)]  # every node is alike
    hops = ring_hops(routes, groups)
    one = np.zeros(len(groups), dtype=np.int64)
    return _classes(1, [(one, hops, "ring")], routes, figures).solo[0]


def _ring_latency(groups: Ints, per_node: int, figures: NetworkFigures) -> RingLatency:
    nodes = np.sort(groups // per_node, axis=1)
    most = int((np.diff(nodes, axis=1) != 0).sum(axis=1).max()) + 1  # nodes of the ring that spans most
    return RingLatency(
        base_s=figures.base.value,
        inside_s=figures.node_hop.value,
        across_s=figures.fabric_hop.value,
        ranks=groups.shape[1],
        nodes=most,
    )


def _message_latency(
    routes: Routes, source: Ints, target: Ints, boundary: Ints, figures: NetworkFigures
) -> list[float]:
    per_node = routes.node.devices
    across = source // per_node != target // per_node
    latency = np.where(across, figures.fabric_hop.value, figures.node_hop.value)
    worst = np.zeros(int(boundary[-1]) + 1)
    np.maximum.at(worst, boundary, latency)
    return [float(value) for value in worst]


def ring_s(op: str, size_bytes: float, ranks: int, rate: float, latency: RingLatency) -> float:
    """Seconds of a ring collective that is alone on its links.

    Args:
        op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        size_bytes: The whole buffer.
        ranks: Members; one sends nothing and takes 0 s.
        rate: Bytes/s over each edge.
        latency: Of its steps.
    """
    if ranks == 1:
        return 0.0
    shape = COLLECTIVES[op, "ring"].shape(size_bytes, ranks)
    return shape.edge_bytes / rate + latency.seconds(shape.steps)
