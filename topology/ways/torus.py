"""Ways through a torus: axis after axis, the shorter way round each ring."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import input_error, nearest_numbers
from ..fabrics import Torus
from ..faults import Fault
from ..hops import Floats, Hops, Ints, Lanes, hops, join
from .ways import Ways, no_such_link


class TorusWays(Ways):
    """Links: for each node of the grid and each axis one forward and one backward.

    The grid is the job's own torus where it has a shape, else the whole machine's.
    """

    @property
    def _fabric(self) -> Torus:
        fabric = self.machine.fabric
        assert isinstance(fabric, Torus)
        return fabric

    def bandwidths(self) -> Floats:
        """Bytes/s of each link, all alike."""
        fabric = self._fabric
        if self.shape is None:
            self.grid = fabric.shape
            self.closes = tuple(axis.ring.value for axis in fabric.axes)
            self.place = fabric.coordinates(self.node_ids)
        else:
            self.grid = self.shape
            whole = [
                axis.ring.value and axis.length.value == length
                for axis, length in zip(fabric.axes, self.shape, strict=False)
            ]
            # On a Tofu network the job's axes are rings by the way they are laid, whatever the machine's are.
            self.closes = (True,) * 3 if fabric.is_tofu else tuple(whole)
            index = np.arange(len(self.node_ids), dtype=np.int64)
            self.place = np.stack([index // s % n for s, n in zip(self._strides(), self.grid, strict=True)], axis=1)
        self.axes = len(self.grid)
        return np.full(2 * self.axes * int(np.prod(self.grid)), fabric.link_bandwidth.value)

    def _strides(self) -> list[int]:
        """Of node numbers within the grid; the first axis varies fastest."""
        strides = [1]
        for length in self.grid[:-1]:
            strides.append(strides[-1] * length)
        return strides

    def steps(self, source: Ints, target: Ints) -> Ints:
        """Links to pass along each axis, negative backward, shape (messages, axes)."""
        parts = []
        for axis, (length, closes) in enumerate(zip(self.grid, self.closes, strict=True)):
            ahead = self.place[target, axis] - self.place[source, axis]
            if closes:
                ahead = ahead % length
                ahead = np.where(ahead <= length - ahead, ahead, ahead - length)
            parts.append(ahead)
        return np.stack(parts, axis=1)

    def first_direction(self, source: Ints, target: Ints) -> Ints:
        """Number of the direction a message takes first, two an axis."""
        steps = self.steps(source, target)
        axis = np.argmax(steps != 0, axis=1)
        first: Ints = 2 * axis + (np.take_along_axis(steps, axis[:, None], axis=1)[:, 0] < 0)
        return first

    def cross(self, messages: Ints, source: Ints, target: Ints, lanes: Lanes, together: Ints, floor_s: Floats) -> Hops:
        """Each message on every link it passes."""
        crossing = self._ordered(messages, source[messages], target[messages])
        if not self.failed:
            return crossing
        broken = np.unique(crossing.message[np.isin(crossing.link, list(self.failed))])
        if not len(broken):
            return crossing
        kept = ~np.isin(crossing.message, broken)
        found: dict[tuple[int, int], Ints] = {}
        parts = [Hops(crossing.message[kept], crossing.link[kept], crossing.share[kept])]
        for message in broken.tolist():
            ends = int(source[message]), int(target[message])
            if ends not in found:
                found[ends] = self._around(*ends)
            parts.append(hops(np.full(len(found[ends]), message), found[ends]))
        return join(parts)

    def _ordered(self, messages: Ints, source: Ints, target: Ints) -> Hops:
        here = [self.place[source, axis].copy() for axis in range(self.axes)]
        steps = self.steps(source, target)
        parts: list[Hops] = []
        for axis, length in enumerate(self.grid):
            left, way = np.abs(steps[:, axis]), np.sign(steps[:, axis])
            for _ in range(int(left.max(initial=0))):
                moving = left > 0
                node = sum(place * stride for place, stride in zip(here, self._strides(), strict=True))
                link = 2 * self.axes * node + 2 * axis + (way < 0)
                parts.append(hops(messages[moving], link[moving]))
                here[axis] = np.where(moving, (here[axis] + way) % length, here[axis])
                left = left - 1
        return join(parts)

    def _around(self, source: int, target: int) -> Ints:
        """A shortest way over links that work."""
        strides = self._strides()
        start, goal = (
            int(sum(int(p) * s for p, s in zip(self.place[node], strides, strict=True))) for node in (source, target)
        )
        came: dict[int, tuple[int, int]] = {start: (start, -1)}
        waiting = deque([start])
        while waiting and goal not in came:
            here = waiting.popleft()
            for direction in range(2 * self.axes):
                there = self._beside(here, direction)
                link = 2 * self.axes * here + direction
                if there is not None and there not in came and link not in self.failed:
                    came[there] = (here, link)
                    waiting.append(there)
        if goal not in came:
            names = self._word(start), self._word(goal)
            raise input_error(
                f"no way leads from {names[0]} to {names[1]} around links that have failed", field="perturb"
            )
        way = []
        while goal != start:
            goal, link = came[goal]
            way.append(link)
        return np.array(way[::-1], dtype=np.int64)

    def _beside(self, node: int, direction: int) -> int | None:
        axis, back = divmod(direction, 2)
        stride, length = self._strides()[axis], self.grid[axis]
        at = node // stride % length
        to = at + (-1 if back else 1)
        if length == 1 or (not self.closes[axis] and not 0 <= to < length):
            return None
        return node + (to % length - at) * stride

    def find(self, fault: Fault) -> Ints:
        """The links between two neighbours."""
        asked = "a fabric link of a torus joins two neighbouring nodes, by their numbers"
        try:
            a, b = (int(str(end).removeprefix("node:")) for end in fault.ends or ())
        except ValueError:
            raise no_such_link(fault, asked) from None
        numbers = [self._number(fault, end) for end in (a, b)]
        links = [
            2 * self.axes * here + direction
            for here, there in (numbers, numbers[::-1])
            for direction in range(2 * self.axes)
            if self._beside(here, direction) == there
        ]
        if not links:
            near = {self._beside(numbers[0], direction) for direction in range(2 * self.axes)} - {None}
            shown = ", ".join(sorted(self._word(node) for node in near if node is not None))
            raise no_such_link(fault, f"{asked}; node {a} is beside {shown}")
        return np.array(sorted(links))

    def _number(self, fault: Fault, node: int) -> int:
        """A machine node's number within the grid."""
        if self.shape is not None:
            found = np.flatnonzero(self.node_ids == node)
            if not len(found):
                near = nearest_numbers(node, self.node_ids.tolist(), 5)
                raise no_such_link(fault, f"node {node} is not of the job; nearest: {near}")
            return int(found[0])
        if not 0 <= node < self.machine.node_count:
            raise no_such_link(fault, f"the nodes are 0 to {self.machine.node_count - 1}")
        places = self._fabric.coordinates(np.array([node]))[0]
        return int(sum(int(p) * s for p, s in zip(places, self._strides(), strict=True)))

    def _word(self, number: int) -> str:
        """A node of the grid as people call it."""
        if self.shape is not None:
            return f"node {self.node_ids[number]}"
        places = [number // s % n for s, n in zip(self._strides(), self.grid, strict=True)]
        return f"node {self._fabric.node_numbers(np.array([places]))[0]}"

    def distance(self, source: Ints, target: Ints, out_nic: Ints, in_nic: Ints) -> Ints:
        """Links that each message passes."""
        passed: Ints = np.abs(self.steps(source, target)).sum(axis=1)
        return passed

    def name(self, link: int) -> str:
        """Such as ``node 12 -> node 24``."""
        node, direction = divmod(link, 2 * self.axes)
        there = self._beside(node, direction)
        return f"{self._word(node)} -> {self._word(there) if there is not None else 'nowhere'}"
