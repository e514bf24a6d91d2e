"""Ways through a dragonfly: by the links of the two groups, or by a third group.

A message from group a to group b goes by the bundle of links between the two
(minimal), or by a third group, any of them alike (non-minimal; Valiant). Adaptive
routing sends packets the second way while the first is the more crowded (UGAL), so
as a flow the message is split: a share ``1 - v`` on the bundle and ``v`` by all
other groups. Pools stand for links that traffic spreads over evenly: all that leave
a group, all that enter it, all that stay inside it, and all between groups together,
where a message crosses one link minimally and two otherwise, ``1 + v`` in all.

Sources: Kim, Dally, Scott and Abts, Technology-Driven, Highly-Scalable Dragonfly
Topology, ISCA 2008 (minimal, Valiant and UGAL); the fluid split is ours.
"""

from __future__ import annotations

import numpy as np

from ..errors import input_error, nearest_numbers
from ..fabrics import Dragonfly
from ..faults import Fault
from ..hops import Floats, Hops, Ints, Lanes, hops, join
from .ways import Ways, no_such_link


def balanced_level(load: Floats, capacity: Floats, of: Ints, total: Floats, pool: float, floor: Floats) -> Floats:
    """Seconds a byte on the busiest links of each set, split between bundles and detours as well as can be.

    A bundle that would be busier than the level sheds what is above it; each byte shed crosses one
    link more, so the level T solves ``(total + sum of what is shed at T) / pool = T``, or is the
    floor where that is higher. What is shed falls with T in straight pieces, so Newton's steps from
    below end exactly.

    Args:
        load: Messages on each bundle, all minimal.
        capacity: Bytes/s of each bundle.
        of: The set of each bundle.
        total: Messages of each set.
        pool: Bytes/s of all links between groups together.
        floor: Least level of each set.

    >>> ones = np.ones(1)
    >>> balanced_level(24 * ones, 1 * ones, np.zeros(1, int), 24 * ones, 72.0, 0 * ones)
    array([0.65753425])
    """
    level = np.maximum(floor, total / pool)
    for _ in range(len(load) + 1):
        over = load > level[of] * capacity
        shed_load = np.bincount(of[over], weights=load[over], minlength=len(total))
        shed_room = np.bincount(of[over], weights=capacity[over], minlength=len(total))
        better = np.maximum(level, (total + shed_load) / (pool + shed_room))
        if np.allclose(better, level, rtol=1e-14, atol=0.0):
            break
        level = better
    return level


class DragonflyWays(Ways):
    """Links: from each group to each other; then pools out of each group and into each, and all together.

    A group's links to itself are the pool of links between its switches.
    """

    @property
    def _fabric(self) -> Dragonfly:
        fabric = self.machine.fabric
        assert isinstance(fabric, Dragonfly)
        return fabric

    def bandwidths(self) -> Floats:
        """Bytes/s of bundles, and of the pools they add up to."""
        fabric = self._fabric
        self.groups = groups = fabric.groups.value
        self.group = fabric.groups_of(self.node_ids)
        bundle = np.full((groups, groups), fabric.pair_bytes_per_s())
        np.fill_diagonal(bundle, fabric.local_bytes_per_s())
        outgoing = (groups - 1) * fabric.pair_bytes_per_s()
        # Links inside a group cannot fill up where all that its nodes send and all that comes in fits on them.
        nodes = max(fabric.group_nodes.value, self.machine.node_count - (groups - 1) * fabric.group_nodes.value)
        injection = nodes * self.machine.node.injection_bytes_per_s
        self.local_can_fill = injection + min(injection, outgoing) > fabric.local_bytes_per_s() > 0
        return np.concatenate([bundle.ravel(), np.full(2 * groups, outgoing), [groups * outgoing]])

    def lose(self, links: Ints, bytes_per_s: Floats) -> None:
        """Bundles are part of what leaves one group, of what enters another, and of all together."""
        groups = self.groups
        for link, lost in zip(links.tolist(), bytes_per_s.tolist(), strict=True):
            a, b = divmod(link, groups)
            if a != b:
                self.capacity[[groups * groups + a, groups * groups + groups + b, -1]] -= lost

    def find(self, fault: Fault) -> Ints:
        """The bundle between two groups, both ways."""
        try:
            a, b = (int(str(end).removeprefix("group:")) for end in fault.ends or ())
        except ValueError:
            raise no_such_link(fault, "a fabric link of a dragonfly joins two groups, such as 3 and 5") from None
        for group in (a, b):
            if not 0 <= group < self.groups:
                near = nearest_numbers(group, range(self.groups), 3)
                raise no_such_link(fault, f"the groups are 0 to {self.groups - 1}; nearest: {near}")
        return np.unique(np.array([a * self.groups + b, b * self.groups + a]))

    def cross(self, messages: Ints, source: Ints, target: Ints, lanes: Lanes, together: Ints, floor_s: Floats) -> Hops:
        """Each message between groups on its bundle, by third groups, and on the pools."""
        groups, square = self.groups, self.groups**2
        from_group, to_group = self.group[source[messages]], self.group[target[messages]]
        between = from_group != to_group
        far = messages[between]
        a, b = from_group[between], to_group[between]
        parts = []
        if self.local_can_fill:
            near = messages[~between]
            parts.append(hops(near, from_group[~between] * (groups + 1)))
            parts += [hops(far, end * (groups + 1)) for end in (a, b)]
        if len(far):
            detour = self._detours(a, b, together[far], floor_s)
            minimal = detour < 1
            parts.append(hops(far[minimal], (a * groups + b)[minimal], 1 - detour[minimal]))
            parts.append(hops(far, square + a))
            parts.append(hops(far, square + groups + b))
            if detour.any():  # else no pool of all links fills before those of a group do
                parts.append(hops(far, np.full(len(far), square + 2 * groups), 1 + detour))
        return self.refuse_failed(join(parts))

    def _detours(self, a: Ints, b: Ints, together: Ints, floor_s: Floats) -> Floats:
        """The share of each message that goes by a third group."""
        groups, square = self.groups, self.groups**2
        pair = a * groups + b
        if groups < 3:
            return np.zeros(len(a))
        if self.non_minimal is not None:
            return np.where(self.capacity[pair] > 0, self.non_minimal, 1.0)
        sets = len(floor_s)
        kinds, kind = np.unique(together * square + pair, return_inverse=True)
        of, bundle = np.divmod(kinds, square)
        load = np.bincount(kind).astype(np.float64)
        capacity = self.capacity[bundle]
        outward = np.bincount(of * groups + bundle // groups, weights=load, minlength=sets * groups)
        inward = np.bincount(of * groups + bundle % groups, weights=load, minlength=sets * groups)
        with np.errstate(divide="ignore", invalid="ignore"):
            out_level = outward.reshape(sets, groups) / self.capacity[square : square + groups]
            in_level = inward.reshape(sets, groups) / self.capacity[square + groups : square + 2 * groups]
        ends = np.fmax(np.nanmax(out_level, axis=1), np.nanmax(in_level, axis=1))
        if not np.isfinite(ends).all():
            raise input_error("every link of a dragonfly group of the job has failed", field="perturb")
        floor = np.maximum(floor_s, ends)
        total = np.bincount(of, weights=load, minlength=sets).astype(np.float64)
        level = balanced_level(load, capacity, of, total, float(self.capacity[-1]), floor)
        kept = level[of] * capacity / load
        # A sliver of a detour is no detour: rounding must not put a message on links it does not need.
        shed = np.where(kept < 1 - 1e-9, 1 - kept, 0.0)
        detours: Floats = shed[kind]
        return detours

    def distance(self, source: Ints, target: Ints, out_nic: Ints, in_nic: Ints) -> Ints:
        """Hops of the shortest way with at most one link between groups."""
        fabric = self._fabric
        nics = self.machine.node.nic_count
        here = fabric.switches_of(self.node_ids[source], out_nic, nics)
        there = fabric.switches_of(self.node_ids[target], in_nic, nics)
        a, b = self.group[source], self.group[target]
        switches, links = fabric.switches_per_group.value, fabric.links_per_group_pair.value
        far = np.full(len(a), 3, dtype=np.int64)
        for link in range(links):
            leaves = ((b - (b > a)) * links + link) % switches  # as Dragonfly.gateway deals links to switches
            enters = ((a - (a > b)) * links + link) % switches
            far = np.minimum(far, 1 + (here != leaves) + (there != enters))
        return np.where(source == target, 0, np.where(a == b, (here != there).astype(np.int64), far))

    def name(self, link: int) -> str:
        """Such as ``group 3 -> group 5``."""
        groups = self.groups
        if link < groups * groups:
            a, b = divmod(link, groups)
            return f"group {a} -> group {b}" if a != b else f"inside group {a}"
        pool, group = divmod(link - groups * groups, groups)
        return (f"out of group {group}", f"into group {group}", "all links between groups")[pool]
