"""Which replicas behave alike, and the pace of tensor-parallel rings on sound and on disturbed links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..topology.machine import Machine
from ..topology.placement import Placement
from ..topology.routing import Routes
from .calibration import NetworkFigures
from .communicate import PhaseHops, ring_hops, weighed
from .perturb import Damage
from .timeline import Hop

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def find_lanes(
    placement: Placement,
    damage: Damage,
    hops: Sequence[PhaseHops],
    pairs: Sequence[Sequence[Hop]],
    tensor_rates: Floats,
    together: int = 1,
    *,
    fold: bool,
) -> tuple[tuple[int, ...], ...]:
    """Replicas whose devices and links are disturbed alike; all of them in one lane where nothing is.

    Args:
        placement: The ranks.
        damage: What is disturbed.
        hops: Links of the pipeline's messages, a row each, by pair of ranks, replica and tensor rank.
        pairs: The pairs of pipeline ranks, of each of ``hops``.
        tensor_rates: Rate of the tensor-parallel rings of each stage and replica.
        together: Replicas in a row that keep one pace, since they wait for each other in every pass.
        fold: Whether replicas that are alike are one lane.
    """
    grid = placement.grid()
    dp, tp = grid.shape[1:]
    blocks = [tuple(range(first, min(first + together, dp))) for first in range(0, dp, together)]
    if not fold:
        return tuple(blocks)
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
    for part, ways in zip(hops, pairs, strict=True):
        touched = np.isin(part.link, damage.links)
        for row, link in zip(part.row[touched].tolist(), part.link[touched].tolist(), strict=True):
            way, replica = divmod(row // tp, dp)
            marks[replica].add(("link", ways[way], link))
    by_mark: dict[frozenset[tuple[object, ...]], list[int]] = {}
    for block in blocks:
        found = frozenset(mark for replica in block for mark in marks[replica])
        by_mark.setdefault(found, []).extend(block)
    return tuple(tuple(replicas) for replicas in by_mark.values())


def tensor_ring_rate(placement: Placement, machine: Machine, figures: NetworkFigures) -> float:
    """Rate of a tensor-parallel ring while every group of the job runs one, on undamaged links."""
    if placement.tp == 1:
        return float("inf")
    groups, routes = tensor_groups_together(placement, machine)
    return weighed(ring_hops(routes, groups), _ring_reach(figures), routes).rate(routes.capacity)


def disturbed_tensor_rates(placement: Placement, damage: Damage, figures: NetworkFigures, rate: float) -> Floats:
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
