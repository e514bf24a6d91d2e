"""Every kind of transfer that a layout makes on a machine, as coflows over real links.

Replicas that send over like links and compute at like speed are one lane. Each lane
has a class of messages for each boundary between stages and direction, and one for the
ring between the two copies of a tied embedding; each stage has one for its data-parallel
rings. With nothing folded, every rank's messages are classes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..scenarios.result import LinkLoad
from ..scenarios.scenario import Scenario
from ..topology.placement import Placement, build_placement
from ..topology.routing import Hops, Routes, join, ring_orders
from .calibration import Calibration, NetworkFigures
from .collectives import COLLECTIVES
from .network import TrafficClasses, traffic_classes
from .perturb import Damage, damage_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class LinkUse:
    """Who uses which link: one entry a class and link, with how many of the class's transfers cross it."""

    class_of: Ints
    link: Ints
    share: Floats


@dataclass(frozen=True)
class LaneTraffic:
    """The classes of one lane, and what its devices do otherwise than others.

    Attributes:
        replicas: Their numbers.
        up: Classes of the forward messages, a boundary.
        down: Classes of the backward messages, a boundary.
        embedding: Classes of the ring between the two copies of a tied embedding; none without a pipeline.
        speed: Of the slowest device of a stage, of the others' speed.
        tensor_rate: Bytes/s over each edge of the tensor-parallel rings of a stage.
    """

    replicas: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    embedding: tuple[int, ...]
    speed: tuple[float, ...]
    tensor_rate: tuple[float, ...]


@dataclass(frozen=True)
class Traffic:
    """The traffic of a job.

    Attributes:
        classes: All classes over constraint rows.
        lanes: Replicas that behave alike.
        data: Classes of the data-parallel rings, a stage.
        message_latency_s: Latency of one message, a boundary.
        data_ring: Latency of a data-parallel ring.
        embedding_ring: Latency of the ring between first and last stage.
        tensor_rate: Bytes/s over each edge of an undisturbed tensor-parallel ring while all groups run theirs.
        tensor_ring: Latency of a tensor-parallel ring.
        use: Who uses which link.
        routes: The links.
    """

    classes: TrafficClasses
    lanes: tuple[LaneTraffic, ...]
    data: tuple[tuple[int, ...], ...]
    message_latency_s: tuple[float, ...]
    data_ring: RingLatency
    embedding_ring: RingLatency
    tensor_rate: float
    tensor_ring: RingLatency
    use: LinkUse
    routes: Routes

    def message_rate(self, boundary: int, *, back: bool = False) -> float:
        """Solo rate of the messages between a stage and the next, in the slowest lane."""
        solo = self.classes.solo
        return min(solo[flow] for lane in self.lanes for flow in (lane.down if back else lane.up)[boundary])

    def data_rate(self, stage: int) -> float:
        """Solo rate over each edge of a stage's data-parallel rings."""
        return min(self.classes.solo[flow] for flow in self.data[stage])

    @property
    def embedding_rate(self) -> float:
        """Solo rate over each edge of the rings between the two copies of a tied embedding, in the slowest lane."""
        return min(self.classes.solo[flow] for lane in self.lanes for flow in lane.embedding)

    @cached_property
    def names(self) -> dict[int, str]:
        """What each class is, for people."""
        names: dict[int, str] = {}
        several = len(self.lanes) > 1
        for number, lane in enumerate(self.lanes):
            of = f" of lane {number}" if several else ""
            for boundary, (up, down) in enumerate(zip(lane.up, lane.down, strict=True)):
                names |= dict.fromkeys(up, f"pp {boundary} to {boundary + 1}{of}")
                names |= dict.fromkeys(down, f"pp {boundary + 1} to {boundary}{of}")
            names |= dict.fromkeys(lane.embedding, f"embedding{of}")
        for stage, flows in enumerate(self.data):
            names |= dict.fromkeys(flows, f"dp of stage {stage}")
        return names


@dataclass
class _Classes:
    """Classes being numbered, and the links each of their transfers uses."""

    count: int = 0

    def __post_init__(self) -> None:
        self.class_of: list[Ints] = []
        self.link: list[Ints] = []
        self.share: list[Floats] = []
        self.weight: list[Floats] = []

    def add(self, class_of: Ints, hops: Hops, reached: Floats, routes: Routes) -> None:
        """Count the hops of messages, each of the class given for it."""
        self.class_of.append(class_of[hops.message])
        self.link.append(hops.link)
        self.share.append(hops.share)
        self.weight.append(hops.share / reached[routes.place[hops.link]])


def build_traffic(scenario: Scenario, calibration: Calibration, *, fold: bool = True) -> Traffic:
    """The traffic of a scenario: routes for every rank, folded to the rows that can bind.

    Args:
        scenario: What is asked.
        calibration: Achieved shares and latencies.
        fold: Whether replicas that behave alike, and the ranks of a tensor group, share classes.
    """
    figures = calibration.network
    placement = placement_of(scenario)
    sound = placement.routes(scenario.machine)
    grid = placement.grid()
    damage = damage_of(scenario, placement, sound)
    routes = damage.routes
    pp, dp, tp = grid.shape
    # What a library does not reach is lost at the ends, in the node and at its NICs; links beyond carry what was sent.
    ring = _ring_reach(figures)
    direct = np.array([figures.node_point_to_point.value, figures.fabric_point_to_point.value, 1.0])
    source, target = grid[:-1].reshape(-1), grid[1:].reshape(-1)
    together = np.repeat(np.arange(pp - 1), dp * tp)
    up_hops = routes.route(source, target, together=together)
    down_hops = routes.route(target, source, together=together)
    tensor_rate = tensor_ring_rate(placement, sound, figures)
    disturbed = _disturbed_tensor_rates(placement, damage, figures, tensor_rate)
    lanes = _find_lanes(placement, damage, (up_hops, down_hops), disturbed, fold=fold and not scenario.perturb.jitter)
    lane_of = np.empty(dp, dtype=np.int64)
    for number, replicas in enumerate(lanes):
        lane_of[list(replicas)] = number

    classes = _Classes()
    width = 1 if fold else tp
    tensor = np.arange(tp) if not fold else np.zeros(tp, dtype=np.int64)
    parts: list[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[int, ...]]] = []
    per_lane = (2 * (pp - 1) + 1) * width if pp > 1 else 0
    if pp > 1:
        # Class of the message of (boundary, replica, tensor rank): lane by lane, up, then down, then the embedding.
        boundary = np.arange(pp - 1)[:, None, None]
        base = (lane_of * per_lane)[None, :, None] + tensor[None, None, :]
        shape = (pp - 1, dp, tp)
        up = np.broadcast_to(base + boundary * width, shape).reshape(-1)
        classes.add(up, up_hops, direct, routes)
        classes.add(up + (pp - 1) * width, down_hops, direct, routes)
        ends = np.stack([grid[0].reshape(-1), grid[-1].reshape(-1)], axis=1)
        copies = np.broadcast_to(base[0] + 2 * (pp - 1) * width, (dp, tp)).reshape(-1)
        classes.add(copies, ring_hops(routes, ends), ring, routes)
    for number in range(len(lanes)):
        at = number * per_lane
        parts.append(
            (
                tuple(tuple(range(at + b * width, at + (b + 1) * width)) for b in range(pp - 1)),
                tuple(tuple(range(at + (pp - 1 + b) * width, at + (pp + b) * width)) for b in range(pp - 1)),
                tuple(range(at + 2 * (pp - 1) * width, at + per_lane)) if pp > 1 else (),
            )
        )
    at = len(lanes) * per_lane
    data = tuple(tuple(range(at + s * width, at + (s + 1) * width)) for s in range(pp))
    if dp > 1:
        groups = np.swapaxes(grid, 1, 2).reshape(-1, dp)
        stage_class = (at + np.arange(pp)[:, None] * width + tensor[None, :]).reshape(-1)
        classes.add(stage_class, ring_hops(routes, groups), ring, routes)
    folded, use = _fold(at + pp * width, classes, damage.capacity)
    per_node = placement.devices_per_node
    return Traffic(
        classes=folded,
        lanes=tuple(
            LaneTraffic(
                replicas=replicas,
                up=lane_up,
                down=lane_down,
                embedding=copies_of,
                speed=tuple(float(damage.speed[grid[s, list(replicas)]].min()) for s in range(pp)),
                tensor_rate=tuple(float(disturbed[s, list(replicas)].min()) for s in range(pp)),
            )
            for replicas, (lane_up, lane_down, copies_of) in zip(lanes, parts, strict=True)
        ),
        data=data,
        message_latency_s=_message_latency(per_node, source, target, pp, figures),
        data_ring=_ring_latency(np.swapaxes(grid, 1, 2).reshape(-1, placement.dp), per_node, figures),
        embedding_ring=_ring_latency(grid[[0, -1]].reshape(2, -1).T, per_node, figures),
        tensor_rate=tensor_rate,
        tensor_ring=_ring_latency(placement.tensor_groups(), per_node, figures),
        use=use,
        routes=routes,
    )


def placement_of(scenario: Scenario) -> Placement:
    """The placement of a scenario's ranks."""
    layout = scenario.layout
    return build_placement(scenario.placement, scenario.machine, layout.tp, scenario.dp, layout.pp)


def _find_lanes(
    placement: Placement, damage: Damage, hops: Sequence[Hops], tensor_rates: Floats, *, fold: bool
) -> tuple[tuple[int, ...], ...]:
    """Replicas whose devices and links are disturbed alike; all of them in one lane where nothing is."""
    grid = placement.grid()
    dp, tp = grid.shape[1:]
    if not fold:
        return tuple((replica,) for replica in range(dp))
    marks: list[set[tuple[object, ...]]] = [set() for _ in range(dp)]
    for stage, replica in zip(*np.nonzero((damage.speed[grid] != 1.0).any(axis=2)), strict=True):
        marks[int(replica)].add(("speed", int(stage), float(damage.speed[grid[stage, replica]].min())))
    on_hit_nodes = np.isin(grid // placement.devices_per_node, damage.nodes).any(axis=2)
    for stage, replica in zip(*np.nonzero(on_hit_nodes), strict=True):
        nodes = grid[stage, replica] // placement.devices_per_node
        marks[int(replica)].add(("node", int(stage), tuple(np.intersect1d(nodes, damage.nodes).tolist())))
    if tensor_rates.size:
        for stage, replica in zip(*np.nonzero(tensor_rates != tensor_rates.max()), strict=True):
            marks[int(replica)].add(("tensor", int(stage), float(tensor_rates[stage, replica])))
    for direction, part in enumerate(hops):
        touched = np.isin(part.link, damage.links)
        for message, link in zip(part.message[touched].tolist(), part.link[touched].tolist(), strict=True):
            boundary, replica = divmod(message // tp, dp)
            marks[replica].add(("link", direction, boundary, link))
    by_mark: dict[frozenset[tuple[object, ...]], list[int]] = {}
    for replica, found in enumerate(marks):
        by_mark.setdefault(frozenset(found), []).append(replica)
    return tuple(tuple(replicas) for replicas in by_mark.values())


def _fold(count: int, classes: _Classes, capacity: Floats) -> tuple[TrafficClasses, LinkUse]:
    class_of = np.concatenate([np.empty(0, np.int64), *classes.class_of])
    link = np.concatenate([np.empty(0, np.int64), *classes.link])
    share = np.concatenate([np.empty(0), *classes.share])
    weight = np.concatenate([np.empty(0), *classes.weight])
    return traffic_classes(count, class_of, link, weight, capacity), LinkUse(class_of, link, share)


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


def tensor_ring_rate(placement: Placement, routes: Routes, figures: NetworkFigures) -> float:
    """Rate of a tensor-parallel ring while every group of the job runs one, on undamaged links."""
    if placement.tp == 1:
        return float("inf")
    groups = placement.tensor_groups()
    if not placement.tensor_group_crosses_nodes():
        groups = groups[: max(placement.devices_per_node // placement.tp, 1)]  # every node is alike
    hops = ring_hops(routes, groups)
    weight = hops.share / _ring_reach(figures)[routes.place[hops.link]]
    return traffic_classes(1, np.zeros(len(hops.link), np.int64), hops.link, weight, routes.capacity).solo[0]


def _disturbed_tensor_rates(
    placement: Placement, damage: Damage, figures: NetworkFigures, rate: float
) -> Floats:
    """Rate of the tensor-parallel rings of each stage and replica, shape (pp, dp)."""
    rates = np.full((placement.pp, placement.dp), rate)
    if placement.tp == 1 or not (len(damage.nodes) or len(damage.links)):
        return rates
    groups = placement.tensor_groups()
    hops = ring_hops(damage.routes, groups)
    weight = hops.share / _ring_reach(figures)[damage.routes.place[hops.link]]
    load = np.bincount(hops.link, weight, minlength=len(damage.capacity))
    # A ring keeps the pace of its tightest link while every other group runs its own.
    pace = np.full(len(groups), np.inf)
    np.minimum.at(pace, hops.message, damage.capacity[hops.link] / load[hops.link])
    undisturbed = np.isclose(pace, rate, rtol=1e-9)
    return np.where(undisturbed, rate, np.minimum(pace, rate)).reshape(placement.pp, placement.dp)


def _ring_reach(figures: NetworkFigures) -> Floats:
    """Share of a link that a ring reaches, by the link's place."""
    return np.array([figures.node_ring.value, figures.fabric_ring.value, 1.0])


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
    per_node: int, source: Ints, target: Ints, stages: int, figures: NetworkFigures
) -> tuple[float, ...]:
    """Latency of one message, the slowest of each boundary."""
    if stages == 1:
        return ()
    across = (source // per_node != target // per_node).reshape(stages - 1, -1).any(axis=1)
    return tuple(np.where(across, figures.fabric_hop.value, figures.node_hop.value).tolist())


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


def busiest_links(traffic: Traffic, class_bytes: Floats, step_s: float, most: int = 8) -> tuple[LinkLoad, ...]:
    """The links that carried most for what they can; links loaded alike by alike classes are one entry.

    Args:
        traffic: Who uses which link.
        class_bytes: Bytes that one transfer of each class moved in the step.
        step_s: The step.
        most: Entries at most.
    """
    use = traffic.use
    if not len(use.link):
        return ()
    capacity = traffic.routes.capacity
    by_use = use.share * class_bytes[use.class_of]
    carried = np.bincount(use.link, by_use, minlength=len(capacity))
    busy = np.divide(carried, capacity * step_s, out=np.zeros_like(carried), where=capacity > 0)
    place = traffic.routes.place
    level = np.round(busy, 12)
    loads: list[LinkLoad] = []
    for value in np.unique(level[level > 0])[::-1][:most]:
        for where in np.unique(place[level == value]):
            links = np.flatnonzero((level == value) & (place == where))
            mine = use.link == links[0]
            total = np.bincount(use.class_of[mine], by_use[mine])
            users = [traffic.names[int(c)] for c in np.argsort(-total, kind="stable") if total[c] > 0]
            name = traffic.routes.name(int(links[0]))
            loads.append(LinkLoad(name, len(links), float(carried[links[0]]), float(busy[links[0]]), tuple(users[:4])))
    return tuple(loads[:most])
