"""Every kind of transfer that a layout makes on a machine, as coflows over real links.

Replicas that send over like links and compute at like speed are one lane. Each lane
has a class of messages for each pair of pipeline ranks that messages go between, and one for the
ring between the two copies of a tied embedding; each rank has one for each kind of group
that exchanges its gradients or weights. With nothing folded, every rank's messages are classes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..scenarios.scenario import Scenario
from ..topology.errors import told_as
from ..topology.placement import Placement, build_placement
from ..topology.routing import Routes
from . import shards
from .calibration import Calibration, NetworkFigures
from .communicate import PhaseHops, Plan, plan_collective, reached_shares, weighed
from .fold import Classes, LinkUse
from .lanes import disturbed_tensor_rates, find_lanes, tensor_ring_rate
from .network import TrafficClasses
from .perturb import Damage, damage_of
from .shards import ReplicaBuffer, after_backward, after_optimizer, replica_groups_of
from .tail import Collective, Exchange
from .timeline import Hop, flows_of
from .virtual_stages import StageTable, ends_of, hops_around, stage_table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SMALL = 64  # parts of a buffer, about as many as a rank has layers

__all__ = ["LaneTraffic", "Traffic", "build_traffic", "in_step", "placement_of"]


@dataclass(frozen=True)
class LaneTraffic:
    """The classes of one lane, and what its devices do otherwise than others.

    Attributes:
        replicas: Their numbers.
        up: Classes of the messages from a pipeline rank to the next, a boundary.
        down: Classes of the messages back, a boundary.
        embedding: The reduction between the two copies of a tied embedding; empty where there is one copy.
        speed: Of the slowest device of a pipeline rank, of the others' speed.
        tensor_rate: Bytes/s over each edge of the tensor-parallel rings of a pipeline rank.
        around: Classes of the messages between ranks that are not neighbours.
    """

    replicas: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    embedding: Collective
    speed: tuple[float, ...]
    tensor_rate: tuple[float, ...]
    around: Mapping[Hop, tuple[int, ...]] = field(default_factory=dict)

    def flows(self, source: int, target: int) -> tuple[int, ...]:
        """Classes of the messages from one pipeline rank to another."""
        return flows_of(self.up, self.down, self.around, source, target)


@dataclass(frozen=True)
class Traffic:
    """The traffic of a job.

    Attributes:
        classes: All classes over constraint rows.
        lanes: Replicas that behave alike.
        reduce: The reduction of the gradients over the replicas, a pipeline rank.
        gather: The gathering of the parameters that ZeRO's optimizer wrote, a rank.
        algorithms: How each collective runs, by group and operation.
        message_latency_s: Latency of one message, a boundary.
        tensor_rate: Bytes/s over each edge of an undisturbed tensor-parallel ring while all groups run theirs.
        use: Who uses which link.
        routes: The links.
        placed: Virtual stage of each rank's chunks.
        around_latency_s: Latency of one message between ranks that are not neighbours.
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
    placed: StageTable
    around_latency_s: Mapping[Hop, float] = field(default_factory=dict)

    def latency_s(self, source: int, target: int) -> float:
        """Latency of one message between two pipeline ranks, either way; 0 within one."""
        if source == target:
            return 0.0
        if abs(source - target) == 1:
            return self.message_latency_s[min(source, target)]
        return self.around_latency_s[source, target]

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
            for (source, target), flows in lane.around.items():
                names |= dict.fromkeys(flows, f"pp {source} to {target}{of}")
            names |= {flow: f"embedding{of}" for exchange in lane.embedding for flow in exchange.flows}
        for rank, collectives in enumerate(zip(self.reduce, self.gather, strict=True)):
            for exchange in (exchange for collective in collectives for exchange in collective):
                names |= dict.fromkeys(exchange.flows, f"{exchange.group} of stage {rank}")
        return names


def build_traffic(scenario: Scenario, calibration: Calibration, *, fold: bool = True) -> Traffic:
    """The traffic of a scenario: routes for every rank, folded to the rows that can bind.

    Args:
        scenario: What is asked.
        calibration: Achieved shares and latencies.
        fold: Whether replicas that behave alike, and the ranks of a tensor group, share classes.

    Raises:
        InputError: If a perturbation names nothing of the job, or a named algorithm cannot run.
    """
    return _Builder(scenario, calibration.network, fold).traffic()


class _Builder:
    """The pieces of a job's traffic, each of which numbers its classes in turn."""

    def __init__(self, scenario: Scenario, figures: NetworkFigures, fold: bool) -> None:
        self.scenario = scenario
        self.figures = figures
        self.fold = fold
        self.placement = placement_of(scenario)
        self.damage: Damage = damage_of(scenario, self.placement, self.placement.routes(scenario.machine))
        self.routes = self.damage.routes
        self.grid = self.placement.grid()
        self.placed = stage_table(scenario)
        self.classes = Classes(self.routes)
        self.algorithms: dict[tuple[str, str], str] = {}
        # Ranks of a tensor group and replicas that share their classes have the same number.
        tp = self.grid.shape[2]
        self.tensor = np.zeros(tp, dtype=np.int64) if fold else np.arange(tp)
        self.width = int(self.tensor[-1]) + 1

    def traffic(self) -> Traffic:
        """All of it."""
        scenario, placement, damage, grid = self.scenario, self.placement, self.damage, self.grid
        ranks = len(grid)
        next_to = [(rank, rank + 1) for rank in range(ranks - 1)]
        pairs = [next_to, [(target, source) for source, target in next_to], hops_around(self.placed)]
        hops = [self._messages(way) for way in pairs]
        sound_rate = tensor_ring_rate(placement, scenario.machine, self.figures)
        tensor_rates = disturbed_tensor_rates(placement, damage, self.figures, sound_rate)
        folds = self.fold and not scenario.perturb.jitter
        lanes = find_lanes(placement, damage, hops, pairs, tensor_rates, in_step(scenario), fold=folds)
        up, down, around = (self._message_classes(way, found, lanes) for way, found in zip(pairs, hops, strict=True))
        embedding = self._embedding(lanes)
        rings: dict[str, dict[str, PhaseHops]] = {}
        layout = scenario.layout
        reduce = self._over_replicas(after_backward(scenario), rings, pieces=layout.overlap_grad_reduce)
        gather = self._over_replicas(after_optimizer(scenario), rings, pieces=layout.overlap_param_gather)
        folded, use = self.classes.fold(damage.capacity)
        return Traffic(
            classes=folded,
            lanes=tuple(
                LaneTraffic(
                    replicas=replicas,
                    up=tuple(up[number].values()),
                    down=tuple(down[number].values()),
                    embedding=embedding[number],
                    speed=tuple(float(damage.speed[grid[rank, list(replicas)]].min()) for rank in range(ranks)),
                    tensor_rate=tuple(float(tensor_rates[rank, list(replicas)].min()) for rank in range(ranks)),
                    around=around[number],
                )
                for number, replicas in enumerate(lanes)
            ),
            reduce=reduce,
            gather=gather,
            algorithms=self.algorithms,
            message_latency_s=tuple(self._latencies(next_to)),
            tensor_rate=sound_rate,
            use=use,
            routes=self.routes,
            placed=self.placed,
            around_latency_s=dict(zip(pairs[2], self._latencies(pairs[2]), strict=True)),
        )

    def _messages(self, pairs: Sequence[Hop]) -> PhaseHops:
        """Links of the messages between pairs of pipeline ranks; rows count pair, replica, tensor rank."""
        # What a library does not reach is lost at the ends, in the node and at its NICs; links beyond carry what was
        # sent.
        reached = reached_shares(self.figures, message=True)
        ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        source, target = (self.grid[ends[:, side]].reshape(-1) for side in (0, 1))
        # Boundaries are numbered by their lower rank both ways.
        together = np.repeat(ends.min(axis=1), self.grid[0].size)
        return weighed(self.routes.route(source, target, together=together), reached, self.routes)

    def _message_classes(
        self, pairs: Sequence[Hop], hops: PhaseHops, lanes: Sequence[tuple[int, ...]]
    ) -> list[dict[Hop, tuple[int, ...]]]:
        """Of each lane and pair of ranks the classes of its messages."""
        if not pairs:
            return [{} for _ in lanes]
        part, _ = self._parts(lanes)
        way = np.arange(len(pairs))[:, None, None]
        rows = (part[None, :, None] * len(pairs) + way) * self.width + self.tensor
        numbered = self.classes.number(rows.reshape(-1), hops).reshape(rows.shape)
        return [
            {pair: tuple(np.unique(row[list(replicas)]).tolist()) for pair, row in zip(pairs, numbered, strict=True)}
            for replicas in lanes
        ]

    def _parts(self, lanes: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
        """Of each replica the number that its classes go by, and its lane."""
        lane_of = np.empty(self.grid.shape[1], dtype=np.int64)
        for number, replicas in enumerate(lanes):
            lane_of[list(replicas)] = number
        return (lane_of if self.fold else np.arange(len(lane_of))), lane_of

    def _embedding(self, lanes: Sequence[tuple[int, ...]]) -> list[Collective]:
        """The reduction between the two copies of a tied embedding, of each lane."""
        first, last = ends_of(self.placed)
        size = shards.embedding_bytes(self.scenario)
        if size <= 0 or first == last:
            return [()] * len(lanes)
        ends = np.stack([self.grid[first].reshape(-1), self.grid[last].reshape(-1)], axis=1)
        plan = self._plan("embedding", "all_reduce", [size], ends)
        part, lane_of = self._parts(lanes)
        rows = (part[:, None] * self.width + self.tensor).reshape(-1)
        numbered = [self.classes.number(rows, hops) for hops in plan.hops]
        own = np.repeat(lane_of, self.grid.shape[2])
        return [
            _collective(plan, 0, [numbers[own == number] for numbers in numbered], "embedding", "all_reduce")
            for number in range(len(lanes))
        ]

    def _over_replicas(
        self, buffers: Sequence[ReplicaBuffer], rings: dict[str, dict[str, PhaseHops]], *, pieces: bool
    ) -> tuple[Collective, ...]:
        """Of each pipeline rank what its replicas exchange, one buffer after the other, whole or in pieces."""
        found: list[Collective] = [()] * len(self.grid)
        for buffer in buffers:
            groups = replica_groups_of(self.placement, self.scenario, buffer.group)
            if groups.shape[1] == 1 or max(buffer.bytes) <= 0:
                continue
            kept = rings.setdefault(buffer.group, {})
            # Where pieces travel by themselves, what is fixed in a call is told from that of a small part.
            sizes = [*buffer.bytes, *(size / _SMALL for size in buffer.bytes)] if pieces else buffer.bytes
            plan = self._plan(buffer.group, buffer.op, sizes, groups, kept)
            each = len(groups) // len(self.grid)
            rows = np.arange(len(groups)) // (each if self.fold else 1)
            numbered = [self.classes.number(rows, hops).reshape(-1, each) for hops in plan.hops]
            for rank in range(len(self.grid)):
                classes = [numbers[rank] for numbers in numbered]
                whole = _collective(plan, rank, classes, buffer.group, buffer.op)
                found[rank] += _in_parts(whole, plan.extra_s[len(self.grid) + rank]) if pieces else whole
        return tuple(found)

    def _plan(
        self,
        group: str,
        op: str,
        sizes: Sequence[float],
        groups: Ints,
        rings: dict[str, PhaseHops] | None = None,
    ) -> Plan:
        """A collective over the links, by the algorithm that the scenario names or the library chooses."""
        named = self.scenario.algorithm(group, op)
        with told_as(f"scenario {self.scenario.name}", collective=f"collectives.{group}.{op}"):
            plan = plan_collective(op, sizes, groups, self.routes, self.figures, named, rings)
        self.algorithms[group, op] = plan.choice.algorithm
        return plan

    def _latencies(self, pairs: Sequence[Hop]) -> Iterator[float]:
        """Latency of one message, the slowest of each pair of ranks."""
        nodes = self.grid // self.placement.devices_per_node
        for source, target in pairs:
            across = bool((nodes[source] != nodes[target]).any())
            yield (self.figures.fabric_hop if across else self.figures.node_hop).value


def _collective(plan: Plan, size: int, classes: list[Ints], group: str, op: str) -> Collective:
    """One buffer's phases as exchanges of these classes."""
    return tuple(
        Exchange(tuple(np.unique(numbers).tolist()), edge_bytes, extra_s, group, op)
        for numbers, edge_bytes, extra_s in zip(classes, plan.edge_bytes[size], plan.extra_s[size], strict=False)
    )


def _in_parts(whole: Collective, small_s: Sequence[float]) -> Collective:
    """The collective with what of its latency is fixed, told from that of a small part."""
    if not whole:
        return whole
    return tuple(
        replace(exchange, fixed_s=max(0.0, part_s - (exchange.latency_s - part_s) / (_SMALL - 1)))
        for exchange, part_s in zip(whole, small_s, strict=False)
    )


def placement_of(scenario: Scenario) -> Placement:
    """The placement of a scenario's ranks; its replicas count context-parallel ranks too, which vary fastest."""
    layout = scenario.layout
    return build_placement(scenario.placement, scenario.machine, layout.tp, scenario.dp * layout.cp, layout.pp)


def in_step(scenario: Scenario) -> int:
    """Replicas in a row that wait for each other in every pass: for keys and values, experts, or sharded weights."""
    layout = scenario.layout
    replicas = scenario.dp * layout.cp
    shards_over = (layout.shard_group or replicas) if layout.zero == 3 else 1
    together = math.lcm(layout.cp, layout.ep, shards_over)
    return min(together, replicas)
