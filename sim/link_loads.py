"""The busiest links of a step: what each carried, and for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from ..scenarios.result import LinkLoad, LinkPlace
from ..scenarios.scenario import Scenario
from ..topology.placement import Placement
from ..topology.routing import Routes
from .calibration import NetworkFigures
from .communicate import plan_collective, ring_bytes
from .passes import PassCost
from .shards import ReplicaGroup, replica_groups_of
from .traffic import Traffic, placement_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_PLACES: tuple[LinkPlace, ...] = ("node", "nic", "fabric")  # by their numbers in topology.routing


@dataclass(frozen=True)
class PassUse:
    """Which links the collectives within passes use: one entry a stage and link, with the bytes of a step.

    Attributes:
        group: The kind of group.
        stage: Pipeline rank.
        link: The link.
        bytes: Over it in a step.
    """

    group: str
    stage: Ints
    link: Ints
    bytes: Floats


def pass_uses(
    scenario: Scenario,
    figures: NetworkFigures,
    routes: Routes,
    algorithms: Mapping[tuple[str, str], str],
    passes: Sequence[PassCost],
) -> list[PassUse]:
    """The links of all groups that passes talk in.

    Args:
        scenario: What is asked.
        figures: What the library achieves.
        routes: The links of the job.
        algorithms: How the collectives of the passes run, by group and operation.
        passes: All passes of a step, by pipeline rank.
    """
    sent: dict[str, list[float]] = {}
    by_op: dict[tuple[str, str], float] = {}
    for rank, whole in enumerate(passes):
        for use in whole.uses:
            group = "tp" if use.group == "pp" else use.group  # a message's pieces are gathered by the tensor ranks
            sent.setdefault(group, [0.0] * len(passes))[rank] += use.bytes
            by_op[group, use.op] = by_op.get((group, use.op), 0.0) + use.bytes
    found = []
    for group, stage_bytes in sent.items():
        op = max((op for kind, op in by_op if kind == group), key=lambda op: by_op[group, op])
        algorithm = algorithms.get((group, op), "ring")
        found.append(group_use(scenario, figures, routes, group, op, algorithm, stage_bytes))
    return found


def group_use(
    scenario: Scenario,
    figures: NetworkFigures,
    routes: Routes,
    group: str,
    op: str,
    algorithm: str,
    stage_bytes: Sequence[float],
) -> PassUse:
    """The links of all groups of a kind.

    Args:
        scenario: What is asked.
        figures: What the library achieves.
        routes: The links of the job.
        group: The kind.
        op: What most of its bytes are sent for.
        algorithm: How that runs.
        stage_bytes: Of each pipeline rank, what one device would send in a step if all of them were rings.
    """
    placement = placement_of(scenario)
    groups = _groups(scenario, placement, group)
    if groups.shape[1] == 1 or not any(stage_bytes):
        return PassUse(group, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    if op == "sendrecv":  # each hands on to the next, as in a ring
        op, algorithm = "all_gather", "ring"
    stage = np.arange(len(groups)) // (len(groups) // placement.pp)
    sent = np.asarray(stage_bytes, dtype=np.float64)
    per_node, width = placement.devices_per_node, len(routes.node.capacity)
    nodes = groups // per_node
    alike = bool((nodes == nodes[:, :1]).all()) and not routes.faults
    rows, ways = (groups[nodes[:, 0] == 0], Routes(scenario.machine, 1)) if alike else (groups, routes)
    size = 2.0**30  # any: a collective's bytes are in proportion to it
    plan = plan_collective(op, [size], rows, ways, figures, algorithm)
    of_ring = ring_bytes(op, size, groups.shape[1])
    row = np.concatenate([hops.row for hops in plan.hops])
    link = np.concatenate([hops.link for hops in plan.hops])
    scaled = [hops.share * carried / of_ring for hops, carried in zip(plan.hops, plan.edge_bytes[0], strict=True)]
    share = np.concatenate(scaled)
    if not alike:
        return PassUse(group, stage[row], link, share * sent[stage[row]])
    # Every node is like the first: its groups' links are theirs, a node's links further on.
    found = []
    for number, pattern in enumerate(rows):
        mine = row == number
        part = np.bincount(link[mine], share[mine], minlength=width)
        used = np.flatnonzero(part)
        same = np.flatnonzero(groups[:, 0] % per_node == pattern[0] % per_node)
        moved = sent[stage[same], None] * part[used]
        links = groups[same, 0, None] // per_node * width + used
        found.append((np.repeat(stage[same], len(used)), links.reshape(-1), moved.reshape(-1)))
    return PassUse(group, *(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _groups(scenario: Scenario, placement: Placement, group: str) -> Ints:
    """Devices of all groups of a kind, stage by stage."""
    layout = scenario.layout
    etp = layout.etp or layout.tp
    if group == "tp":
        return placement.tensor_groups()
    if group == "cp":
        return placement.replica_groups(layout.cp)
    if group == "ep":
        return placement.expert_groups(layout.ep, etp)
    if group == "etp":
        return placement.expert_tensor_groups(etp)
    if group == "secondary":
        return placement.replica_groups(layout.secondary_shards or 1)
    return replica_groups_of(placement, scenario, cast(ReplicaGroup, group))


def busiest_links(
    traffic: Traffic, class_bytes: Floats, passes: Sequence[PassUse], step_s: float, most: int = 4
) -> tuple[LinkLoad, ...]:
    """The links that carried most for what they can; links loaded alike at one place are one entry.

    Args:
        traffic: Who uses which link.
        class_bytes: Bytes that one transfer of each class moved in the step.
        passes: What the groups of the passes moved.
        step_s: The step.
        most: Entries at most of each place: inside nodes, at NICs, in the fabric.
    """
    use, capacity = traffic.use, traffic.routes.capacity
    by_use = use.share * class_bytes[use.class_of]
    carried = np.zeros(len(capacity))
    for one in passes:
        carried += np.bincount(one.link, one.bytes, minlength=len(capacity))
    carried += np.bincount(use.link, by_use, minlength=len(capacity))
    busy: Floats = np.zeros(len(capacity))
    np.divide(carried, capacity * step_s, out=busy, where=capacity > 0)
    loads = []
    for number, where in enumerate(_PLACES):
        here = np.flatnonzero(traffic.routes.place == number)
        level = np.round(busy[here], 12)
        for value in _largest(level, most):
            links = here[level == value]
            first = int(links[0])
            users = _users(traffic, by_use, passes, first)
            name = traffic.routes.name(first)
            loads.append(LinkLoad(name, where, len(links), float(carried[first]), float(busy[first]), users))
    return tuple(sorted(loads, key=lambda load: -load.busy))


def _users(traffic: Traffic, by_use: Floats, passes: Sequence[PassUse], link: int, most: int = 4) -> tuple[str, ...]:
    """Whose bytes a link carried, most first."""
    total: dict[str, float] = {}
    mine = traffic.use.link == link
    for kind, moved in zip(traffic.use.class_of[mine].tolist(), by_use[mine].tolist(), strict=True):
        if moved > 0:  # a class may be of a rank that has nothing to send, and then it has no name
            total[traffic.names[kind]] = total.get(traffic.names[kind], 0.0) + moved
    for one in passes:
        mine = one.link == link
        for stage, moved in zip(one.stage[mine].tolist(), one.bytes[mine].tolist(), strict=True):
            name = f"{one.group} of stage {stage}"
            total[name] = total.get(name, 0.0) + moved
    ranked = sorted((name for name, moved in total.items() if moved > 0), key=lambda name: -total[name])
    return tuple(ranked[:most])


def _largest(values: Floats, most: int) -> Iterator[float]:
    """The largest different positive values, falling; sorting all of them would take longer."""
    left = values
    for _ in range(most):
        left = left[left > 0]
        if not len(left):
            return
        yield float(left.max())
        left = left[left < left.max()]
