"""The busiest links of a step: what each carried, and for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..scenarios.result import LinkLoad, LinkPlace
from ..scenarios.scenario import Scenario
from ..topology.routing import Routes
from .calibration import NetworkFigures
from .communicate import plan_collective, ring_bytes
from .traffic import Traffic, placement_of, tensor_groups_together

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_PLACES: tuple[LinkPlace, ...] = ("node", "nic", "fabric")  # by their numbers in topology.routing


@dataclass(frozen=True)
class TensorUse:
    """Who of the tensor-parallel groups uses which link: one entry a stage and link, with the bytes of a step."""

    stage: Ints
    link: Ints
    bytes: Floats


def tensor_use(
    scenario: Scenario,
    figures: NetworkFigures,
    routes: Routes,
    algorithms: dict[tuple[str, str], str],
    stage_bytes: Sequence[float],
) -> TensorUse:
    """The links of all tensor-parallel groups.

    Args:
        scenario: What is asked.
        figures: What the library achieves.
        routes: The links of the job.
        algorithms: How the tensor-parallel collectives run, by group and operation.
        stage_bytes: Of each stage, what one rank would send in a step if all of them were rings.
    """
    placement = placement_of(scenario)
    named = {op: algorithm for (group, op), algorithm in algorithms.items() if group == "tp"}
    if placement.tp == 1 or not named:
        return TensorUse(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    op, algorithm = min(named.items(), key=lambda item: item[0] != "all_reduce")
    groups = placement.tensor_groups()
    stage = np.repeat(np.arange(placement.pp), placement.dp)
    sent = np.asarray(stage_bytes, dtype=np.float64)
    alike = not placement.tensor_group_crosses_nodes() and not routes.faults
    rows, ways = tensor_groups_together(placement, scenario.machine) if alike else (groups, routes)
    size = 2.0**30  # any: a collective's bytes are in proportion to it
    plan = plan_collective(op, [size], rows, ways, figures, algorithm)
    of_ring = ring_bytes(op, size, placement.tp)
    row = np.concatenate([hops.row for hops in plan.hops])
    link = np.concatenate([hops.link for hops in plan.hops])
    scaled = [hops.share * carried / of_ring for hops, carried in zip(plan.hops, plan.edge_bytes[0], strict=True)]
    share = np.concatenate(scaled)
    if not alike:
        return TensorUse(stage[row], link, share * sent[stage[row]])
    # Every node is like the first: its groups' links are theirs, a node's links further on.
    per_node, width = placement.devices_per_node, len(routes.node.capacity)
    found = []
    for number, pattern in enumerate(rows):
        mine = row == number
        part = np.bincount(link[mine], share[mine], minlength=width)
        used = np.flatnonzero(part)
        same = np.flatnonzero(groups[:, 0] % per_node == pattern[0] % per_node)
        moved = sent[stage[same], None] * part[used]
        links = groups[same, 0, None] // per_node * width + used
        found.append((np.repeat(stage[same], len(used)), links.reshape(-1), moved.reshape(-1)))
    return TensorUse(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def busiest_links(
    traffic: Traffic, class_bytes: Floats, tensor: TensorUse, step_s: float, most: int = 4
) -> tuple[LinkLoad, ...]:
    """The links that carried most for what they can; links loaded alike at one place are one entry.

    Args:
        traffic: Who uses which link.
        class_bytes: Bytes that one transfer of each class moved in the step.
        tensor: What the tensor-parallel groups moved.
        step_s: The step.
        most: Entries at most of each place: inside nodes, at NICs, in the fabric.
    """
    use, capacity = traffic.use, traffic.routes.capacity
    by_use = use.share * class_bytes[use.class_of]
    of_tensor = np.bincount(tensor.link, tensor.bytes, minlength=len(capacity))
    carried = of_tensor + np.bincount(use.link, by_use, minlength=len(capacity))
    busy: Floats = np.zeros(len(capacity))
    np.divide(carried, capacity * step_s, out=busy, where=capacity > 0)
    loads = []
    for number, where in enumerate(_PLACES):
        here = np.flatnonzero(traffic.routes.place == number)
        level = np.round(busy[here], 12)
        for value in _largest(level, most):
            links = here[level == value]
            first = int(links[0])
            users = _users(traffic, by_use, tensor, first)
            name = traffic.routes.name(first)
            loads.append(LinkLoad(name, where, len(links), float(carried[first]), float(busy[first]), users))
    return tuple(sorted(loads, key=lambda load: -load.busy))


def _users(traffic: Traffic, by_use: Floats, tensor: TensorUse, link: int, most: int = 4) -> tuple[str, ...]:
    """Whose bytes a link carried, most first."""
    total: dict[str, float] = {}
    mine = traffic.use.link == link
    for kind, moved in zip(traffic.use.class_of[mine].tolist(), by_use[mine].tolist(), strict=True):
        total[traffic.names[kind]] = total.get(traffic.names[kind], 0.0) + moved
    mine = tensor.link == link
    for stage, moved in zip(tensor.stage[mine].tolist(), tensor.bytes[mine].tolist(), strict=True):
        total[f"tp of stage {stage}"] = total.get(f"tp of stage {stage}", 0.0) + moved
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
