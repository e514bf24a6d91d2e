"""Every kind of transfer that a layout makes on a machine, as coflows over real links.

Replicas that send over like links and compute at like speed are one lane. Each lane
has a class of messages for each boundary between stages and direction, and one for the
ring between the two copies of a tied embedding; each stage has one for its data-parallel
rings. With nothing folded, every rank's messages are classes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..scenarios.scenario import Scenario
from ..topology.errors import told_as
from ..topology.machine import Machine
from ..topology.placement import Placement, build_placement
from ..topology.routing import Routes
from . import shards
from .calibration import Calibration, NetworkFigures
from .communicate import PhaseHops, Plan, plan_collective, reached_shares, ring_hops, weighed
from .network import TrafficClasses, traffic_classes
from .perturb import Damage, damage_of
from .timeline import Collective, Exchange

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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
        embedding: The reduction between the two copies of a tied embedding; empty where there is one copy.
        speed: Of the slowest device of a stage, of the others' speed.
        tensor_rate: Bytes/s over each edge of the tensor-parallel rings of a stage.
    """

    replicas: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    embedding: Collective
    speed: tuple[float, ...]
    tensor_rate: tuple[float, ...]


@dataclass(frozen=True)
class Traffic:
    """The traffic of a job.

    Attributes:
        classes: All classes over constraint rows.
        lanes: Replicas that behave alike.
        reduce: The reduction of the gradients over the replicas, a stage.
        gather: The gathering of the parameters with ZeRO-1, a stage.
        algorithms: How each collective runs, by group and operation.
        message_latency_s: Latency of one message, a boundary.
        tensor_rate: Bytes/s over each edge of an undisturbed tensor-parallel ring while all groups run theirs.
        use: Who uses which link.
        routes: The links.
    """

    classes: TrafficClasses
    lanes: tuple[LaneTraffic, ...]
    reduce: tuple[Collective, ...]
    gather: tuple[Collective, ...]
    algorithms: dict[tuple[str, str], str]
    message_latency_s: tuple[float, ...]
    tensor_rate: float
    use: LinkUse
    routes: Routes

    def message_rate(self, boundary: int, *, back: bool = False) -> float:
        """Solo rate of the messages between a stage and the next, in the slowest lane."""
        solo = self.classes.solo
        return min(solo[flow] for lane in self.lanes for flow in (lane.down if back else lane.up)[boundary])

    def data_rate(self, stage: int) -> float:
        """Solo rate over each edge of a stage's reduction, its slowest phase."""
        flows = [flow for exchange in self.reduce[stage] for flow in exchange.flows]
        return min((self.classes.solo[flow] for flow in flows), default=math.inf)

    @property
    def embedding_rate(self) -> float:
        """Solo rate over each edge between the two copies of a tied embedding, in the slowest lane."""
        exchanges = [exchange for lane in self.lanes for exchange in lane.embedding]
        return min((self.classes.solo[flow] for exchange in exchanges for flow in exchange.flows), default=math.inf)

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
            names |= {flow: f"embedding{of}" for exchange in lane.embedding for flow in exchange.flows}
        for stage, collectives in enumerate(zip(self.reduce, self.gather, strict=True)):
            for exchange in (exchange for collective in collectives for exchange in collective):
                names |= dict.fromkeys(exchange.flows, f"dp of stage {stage}")
        return names


class _Classes:
    """Classes being numbered, and the links that their transfers use.

    Args:
        routes: The links: first those of nodes, then those of the fabric.
    """

    def __init__(self, routes: Routes) -> None:
        self.count = 0
        self._routes = routes
        self._uses: list[tuple[LinkUse, Floats]] = []
        self._numbered: dict[int, tuple[PhaseHops, Ints]] = {}

    def number(self, class_of_row: Ints, hops: PhaseHops) -> Ints:
        """New classes for the rows of a phase or of messages.

        Args:
            class_of_row: Which rows share a class: numbers from 0 on.
            hops: The links of each row.

        Returns:
            The class of each row.
        """
        if id(hops) in self._numbered:  # the same transfers again, such as the rings of two operations
            return self._numbered[id(hops)][1]
        numbers = self.count + class_of_row
        class_of, link, share, weight = self._summed(class_of_row[hops.row], hops)
        self._uses.append((LinkUse(self.count + class_of, link, share), weight))
        self.count += int(class_of_row.max()) + 1
        self._numbered[id(hops)] = hops, numbers
        return numbers

    def _summed(self, class_of: Ints, hops: PhaseHops) -> tuple[Ints, Ints, Floats, Floats]:
        """The uses, those of a fabric's few links summed by class: most of a dragonfly's uses are of its pools."""
        first = self._routes.nodes * len(self._routes.node.capacity)
        width = len(self._routes.capacity) - first
        size = (int(class_of.max(initial=0)) + 1) * width
        near = int(np.count_nonzero(hops.link < first))
        # Routes list the fabric's links last; where parts were joined they may not, and nothing is summed.
        if size > 4 * len(class_of) or not (hops.link[near:] >= first).all():
            return class_of, hops.link, hops.share, hops.weight
        key = class_of[near:] * width + hops.link[near:] - first
        share = np.bincount(key, hops.share[near:], minlength=size)
        weight = np.bincount(key, hops.weight[near:], minlength=size)
        used = np.flatnonzero(share)
        return (
            np.concatenate([class_of[:near], used // width]),
            np.concatenate([hops.link[:near], first + used % width]),
            np.concatenate([hops.share[:near], share[used]]),
            np.concatenate([hops.weight[:near], weight[used]]),
        )

    def fold(self, capacity: Floats) -> tuple[TrafficClasses, LinkUse]:
        """All classes over constraint rows, and who uses which link."""
        uses = [use for use, _ in self._uses]
        class_of = np.concatenate([np.empty(0, np.int64), *(use.class_of for use in uses)])
        link = np.concatenate([np.empty(0, np.int64), *(use.link for use in uses)])
        share = np.concatenate([np.empty(0), *(use.share for use in uses)])
        weight = np.concatenate([np.empty(0), *(weight for _, weight in self._uses)])
        return traffic_classes(self.count, class_of, link, weight, capacity), LinkUse(class_of, link, share)


def build_traffic(scenario: Scenario, calibration: Calibration, *, fold: bool = True) -> Traffic:
    """The traffic of a scenario: routes for every rank, folded to the rows that can bind.

    Args:
        scenario: What is asked.
        calibration: Achieved shares and latencies.
        fold: Whether replicas that behave alike, and the ranks of a tensor group, share classes.

    Raises:
        InputError: If a perturbation names nothing of the job, or a named algorithm cannot run.
    """
    figures = calibration.network
    placement = placement_of(scenario)
    sound = placement.routes(scenario.machine)
    grid = placement.grid()
    damage = damage_of(scenario, placement, sound)
    routes = damage.routes
    pp, dp, tp = grid.shape
    messages = _pipeline_hops(grid, routes, figures)
    tensor_rate = tensor_ring_rate(placement, scenario.machine, figures)
    disturbed = _disturbed_tensor_rates(placement, damage, figures, tensor_rate)
    lanes = _find_lanes(placement, damage, messages, disturbed, fold=fold and not scenario.perturb.jitter)
    lane_of = np.empty(dp, dtype=np.int64)
    for number, replicas in enumerate(lanes):
        lane_of[list(replicas)] = number

    classes = _Classes(routes)
    algorithms: dict[tuple[str, str], str] = {}
    tensor = np.zeros(tp, dtype=np.int64) if fold else np.arange(tp)
    width = int(tensor[-1]) + 1
    # Rows of messages count boundary, replica, tensor rank; rows of the embedding replica and tensor rank.
    boundary = np.arange(pp - 1)[:, None, None]
    message_class = ((lane_of[None, :, None] * (pp - 1) + boundary) * width + tensor).reshape(-1)
    up, down = (
        _by_lane(classes.number(message_class, hops), lane_of, (pp - 1, dp, tp), len(lanes))
        if pp > 1
        else [()] * len(lanes)
        for hops in messages
    )
    embedding: list[Collective] = [()] * len(lanes)
    size = shards.embedding_bytes(scenario)
    if size > 0:
        ends = np.stack([grid[0].reshape(-1), grid[-1].reshape(-1)], axis=1)
        named = scenario.algorithm("embedding", "all_reduce")
        with told_as(f"scenario {scenario.name}", collective="collectives.embedding.all_reduce"):
            plan = plan_collective("all_reduce", [size], ends, routes, figures, named)
        algorithms["embedding", "all_reduce"] = plan.choice.algorithm
        rows = (lane_of[:, None] * width + tensor).reshape(-1)
        numbered = [classes.number(rows, hops) for hops in plan.hops]
        for number in range(len(lanes)):
            own = (lane_of[:, None] == number) & np.ones(tp, dtype=bool)
            embedding[number] = _collective(plan, 0, [numbers[own.reshape(-1)] for numbers in numbered])
    groups = placement.data_groups()
    rows = (np.arange(pp)[:, None] * width + tensor).reshape(-1)
    over_replicas: list[tuple[Collective, ...]] = []
    rings: dict[str, PhaseHops] = {}
    for op, sizes in (
        (shards.reduce_op(scenario), [size for b in shards.after_backward(scenario) for size in b.bytes]),
        ("all_gather", [size for b in shards.after_optimizer(scenario) for size in b.bytes]),
    ):
        if not sizes:
            over_replicas.append(((),) * pp)
            continue
        with told_as(f"scenario {scenario.name}", collective=f"collectives.dp.{op}"):
            plan = plan_collective(op, sizes, groups, routes, figures, scenario.algorithm("dp", op), rings)
        algorithms["dp", op] = plan.choice.algorithm
        numbered = [classes.number(rows, hops).reshape(pp, tp) for hops in plan.hops]
        over_replicas.append(
            tuple(_collective(plan, stage, [numbers[stage] for numbers in numbered]) for stage in range(pp))
        )
    folded, use = classes.fold(damage.capacity)
    return Traffic(
        classes=folded,
        lanes=tuple(
            LaneTraffic(
                replicas=replicas,
                up=up[number],
                down=down[number],
                embedding=embedding[number],
                speed=tuple(float(damage.speed[grid[s, list(replicas)]].min()) for s in range(pp)),
                tensor_rate=tuple(float(disturbed[s, list(replicas)].min()) for s in range(pp)),
            )
            for number, replicas in enumerate(lanes)
        ),
        reduce=over_replicas[0],
        gather=over_replicas[1],
        algorithms=algorithms,
        message_latency_s=_message_latency(grid, placement.devices_per_node, figures),
        tensor_rate=tensor_rate,
        use=use,
        routes=routes,
    )


def _pipeline_hops(grid: Ints, routes: Routes, figures: NetworkFigures) -> tuple[PhaseHops, PhaseHops]:
    """Links of the messages to the next stage, and of those back."""
    # What a library does not reach is lost at the ends, in the node and at its NICs; links beyond carry what was sent.
    reached = reached_shares(figures, message=True)
    source, target = grid[:-1].reshape(-1), grid[1:].reshape(-1)
    together = np.repeat(np.arange(len(grid) - 1), grid[0].size)
    return (
        weighed(routes.route(source, target, together=together), reached, routes),
        weighed(routes.route(target, source, together=together), reached, routes),
    )


def _by_lane(
    classes: Ints, lane_of: Ints, shape: tuple[int, int, int], lanes: int
) -> list[tuple[tuple[int, ...], ...]]:
    """Of each lane and boundary its classes, from those of all messages."""
    by_message = classes.reshape(shape)
    return [tuple(tuple(np.unique(row[lane_of == lane]).tolist()) for row in by_message) for lane in range(lanes)]


def _collective(plan: Plan, size: int, classes: list[Ints]) -> Collective:
    """One buffer's phases as exchanges of these classes."""
    return tuple(
        Exchange(tuple(np.unique(numbers).tolist()), edge_bytes, extra_s)
        for numbers, edge_bytes, extra_s in zip(classes, plan.edge_bytes[size], plan.extra_s[size], strict=True)
    )


def placement_of(scenario: Scenario) -> Placement:
    """The placement of a scenario's ranks; its replicas are dp x cp."""
    layout = scenario.layout
    return build_placement(scenario.placement, scenario.machine, layout.tp, scenario.dp * layout.cp, layout.pp)


def _find_lanes(
    placement: Placement, damage: Damage, hops: Sequence[PhaseHops], tensor_rates: Floats, *, fold: bool
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
        for row, link in zip(part.row[touched].tolist(), part.link[touched].tolist(), strict=True):
            boundary, replica = divmod(row // tp, dp)
            marks[replica].add(("link", direction, boundary, link))
    by_mark: dict[frozenset[tuple[object, ...]], list[int]] = {}
    for replica, found in enumerate(marks):
        by_mark.setdefault(frozenset(found), []).append(replica)
    return tuple(tuple(replicas) for replicas in by_mark.values())


def tensor_ring_rate(placement: Placement, machine: Machine, figures: NetworkFigures) -> float:
    """Rate of a tensor-parallel ring while every group of the job runs one, on undamaged links."""
    if placement.tp == 1:
        return float("inf")
    groups, routes = tensor_groups_together(placement, machine)
    return weighed(ring_hops(routes, groups), _ring_reach(figures), routes).rate(routes.capacity)


def _disturbed_tensor_rates(placement: Placement, damage: Damage, figures: NetworkFigures, rate: float) -> Floats:
    """Rate of the tensor-parallel rings of each stage and replica, shape (pp, dp)."""
    rates = np.full((placement.pp, placement.dp), rate)
    if placement.tp == 1 or not (len(damage.nodes) or len(damage.links)):
        return rates
    groups = placement.tensor_groups()
    hops = weighed(ring_hops(damage.routes, groups), _ring_reach(figures), damage.routes)
    load = np.bincount(hops.link, hops.weight, minlength=len(damage.capacity))
    # A ring keeps the pace of its tightest link while every other group runs its own.
    pace = np.full(len(groups), np.inf)
    np.minimum.at(pace, hops.row, damage.capacity[hops.link] / load[hops.link])
    undisturbed = np.isclose(pace, rate, rtol=1e-9)
    return np.where(undisturbed, rate, np.minimum(pace, rate)).reshape(placement.pp, placement.dp)


def _ring_reach(figures: NetworkFigures) -> Floats:
    """Share of a link that a ring reaches, by the link's place."""
    return np.array([figures.node_ring.value, figures.fabric_ring.value, 1.0])


def tensor_groups_together(placement: Placement, machine: Machine) -> tuple[Ints, Routes]:
    """Tensor-parallel groups that stand for all, and their links: those of one node, where no group leaves its own."""
    groups = placement.tensor_groups()
    if placement.tensor_group_crosses_nodes():
        return groups, placement.routes(machine)
    return groups[groups[:, 0] // placement.devices_per_node == 0], Routes(machine, 1)  # every node is alike


def _message_latency(grid: Ints, per_node: int, figures: NetworkFigures) -> tuple[float, ...]:
    """Latency of one message, the slowest of each boundary."""
    across = (grid[:-1] // per_node != grid[1:] // per_node).any(axis=(1, 2))
    return tuple(np.where(across, figures.fabric_hop.value, figures.node_hop.value).tolist())
