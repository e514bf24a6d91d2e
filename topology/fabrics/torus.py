"""Torus: nodes on a grid of any number of axes, each axis a ring or a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..errors import Problem, input_error
from ..facts import BandwidthFact, CountFact, Entry, FlagFact

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

TOFU_UNIT = (2, 3, 2)  # a, b, c: the twelve nodes of a unit
MOST_DRAWN = 200_000  # Fugaku has 158,976 nodes


class Axis(Entry):
    """One axis: its name, how many nodes it has, and whether the last is a neighbour of the first."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")
    length: CountFact
    ring: FlagFact


class Torus(Entry):
    """A grid of nodes that pass each other's messages on.

    Attributes:
        axes: Slowest first, as coordinates are written.
        link_bandwidth: One link, one direction.
    """

    kind: Literal["torus"]
    axes: Annotated[tuple[Axis, ...], Field(min_length=1, max_length=10)]
    link_bandwidth: BandwidthFact

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One link, one direction."""
        return self.link_bandwidth.value

    @property
    def shape(self) -> tuple[int, ...]:
        """Nodes along each axis."""
        return tuple(axis.length.value for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, in order."""
        return tuple(axis.name for axis in self.axes)

    def ports_per_node(self) -> int:
        """Links of a node that stands at no open end.

        A ring of three or more gives two, a ring or a line of two gives one.
        """
        return sum(min(length - 1, 2) for length in self.shape)

    def summary(self) -> dict[str, float | int | str]:
        """The sizes and bandwidths that describe the fabric."""
        return {
            "kind": self.kind,
            "shape": "x".join(str(length) for length in self.shape),
            "axes": "".join(self.names),
            "nodes": math.prod(self.shape),
            "ports_per_node": self.ports_per_node(),
            "link_bytes_per_s": self.link_bandwidth_bytes_per_s,
            "bisection_bytes_per_s": self.bisection_bytes_per_s(),
            "diameter_hops": sum(
                axis.length.value // 2 if axis.ring.value else axis.length.value - 1 for axis in self.axes
            ),
        }

    def bisection_bytes_per_s(self) -> float:
        """What one half of the nodes can send to the other, one direction, over the thinnest flat cut.

        The cut goes across an axis, through a ring twice; an odd axis is cut as if its halves were equal.
        """
        nodes = math.prod(self.shape)
        cuts = [
            nodes / axis.length.value * (2 if axis.ring.value and axis.length.value > 2 else 1)
            for axis in self.axes
            if axis.length.value > 1
        ]
        return min(cuts, default=0.0) * self.link_bandwidth_bytes_per_s

    @property
    def is_tofu(self) -> bool:
        """Whether this is a Tofu network: three long axes, and units of 2 x 3 x 2 nodes whose middle axis is a ring.

        A job on one sees a three-dimensional torus of its own.
        """
        return len(self.axes) == 6 and self.shape[3:] == TOFU_UNIT and self.axes[4].ring.value

    @property
    def job_axes(self) -> int:
        """Axes of the torus that a job sees."""
        return 3 if self.is_tofu else len(self.axes)

    def job_shape(self, nodes: int) -> tuple[int, ...]:
        """The torus that a job of so many nodes gets where it asks for none: as near to a cube as can be held.

        >>> from exatwin.topology.machine import load_machine
        >>> load_machine("fugaku").fabric.job_shape(158_976)
        (69, 48, 48)
        """
        held = min(self._shapes(nodes), key=max, default=None)
        if held is not None:
            return held
        return (*near_cube(nodes), *(1,) * (self.job_axes - 3)) if self.job_axes >= 3 else (nodes,)

    def nearest_shapes(self, nodes: int, asked: Sequence[int], most: int = 5) -> list[tuple[int, ...]]:
        """Shapes of so many nodes that can be held, those nearest to one that was asked for first."""
        padded = tuple(asked)[: self.job_axes] + (1,) * (self.job_axes - len(asked))
        shapes = {tuple(order) for shape in self._shapes(nodes) for order in permutations(shape)}
        fitting = [shape for shape in shapes if self.shape_problem(shape, nodes) is None]
        return sorted(fitting, key=lambda s: (sum(abs(a - b) for a, b in zip(s, padded, strict=True)), s))[:most]

    def _shapes(self, nodes: int) -> Iterator[tuple[int, ...]]:
        return (shape for shape in _factors(nodes, self.job_axes) if self.shape_problem(shape, nodes) is None)

    def shape_problem(self, shape: Sequence[int], nodes: int) -> str | None:
        """Why a job of so many nodes cannot have this shape; None where it can."""
        shown = "x".join(map(str, shape))
        if len(shape) != self.job_axes:
            return f"{shown} has {len(shape)} axes; a job here has {self.job_axes}"
        if math.prod(shape) != nodes:
            return f"{shown} makes {math.prod(shape)} nodes, but the job has {nodes}"
        if self.is_tofu:
            if _tofu_axes(tuple(shape), self.shape) is None:
                return (
                    f"{shown} cannot be laid on {'x'.join(map(str, self.shape))} without detours: one axis up to "
                    f"{3 * self.shape[1]} may be odd, the others are even and up to {2 * self.shape[0]}, or 1"
                )
            return None
        for length, axis in zip(shape, self.axes, strict=True):
            if length > axis.length.value:
                return f"{shown} is longer than axis {axis.name} of {axis.length.value}"
        return None

    def job_nodes(self, shape: Sequence[int]) -> Ints:
        """Machine node of each of a job's nodes, the job's first axis fastest, laid from node 0 on."""
        import numpy as np

        if self.is_tofu:
            placed = tofu_embedding(shape, self.shape)
            return self.node_numbers(placed.transpose(2, 1, 0, 3).reshape(-1, 6))
        grids = np.unravel_index(np.arange(math.prod(shape)), tuple(shape), order="F")
        return self.node_numbers(np.stack(grids, axis=1).astype(np.int64))

    def node_numbers(self, coordinates: Ints) -> Ints:
        """Numbers of nodes at coordinates, shape (nodes, axes).

        On a Tofu network as its site numbers them, x + y X + z X Y units of twelve, in a unit a + 2 b + 6 c
        (riken: T6Dcoord2ID.py of fugaku-mapping-tool); elsewhere the last axis varies fastest.
        """
        import numpy as np

        numbers: Ints = coordinates @ np.array(self._strides(), dtype=np.int64)
        return numbers

    def coordinates(self, nodes: Ints) -> Ints:
        """Coordinates of nodes by their numbers, shape (nodes, axes)."""
        import numpy as np

        strides = np.array(self._strides(), dtype=np.int64)
        return nodes[:, None] // strides % np.array(self.shape, dtype=np.int64)

    def _strides(self) -> list[int]:
        if self.is_tofu:
            x, y, *_ = self.shape
            return [12, 12 * x, 12 * x * y, 1, 2, 6]
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]

    def problems(self, nodes: int, nics_per_node: int) -> list[Problem]:
        """What keeps so many nodes from standing on the grid."""
        problems = []
        held = math.prod(self.shape)
        if held != nodes:
            shape = "x".join(str(length) for length in self.shape)
            problems.append(Problem("fabric.axes", f"{shape} makes {held} nodes, but there are {nodes}"))
        problems += [
            Problem("fabric.axes", f"axis {name} stands {times} times")
            for name, times in Counter(self.names).items()
            if times > 1
        ]
        return problems

    def graph(self, shape: Sequence[int] | None = None) -> nx.Graph:
        """Nodes and the links between them, as `networkx` sees them.

        Args:
            shape: A block of the grid to build, one length an axis. An axis cut short is a line.

        Returns:
            A graph whose vertices are coordinates. An edge has its ``axis``, a ``count`` of 1 and
            ``bandwidth_bytes_per_s``, one direction.
        """
        import networkx as nx

        shape = self.shape if shape is None else tuple(shape)
        if len(shape) != len(self.axes) or not all(0 < n <= most for n, most in zip(shape, self.shape, strict=True)):
            raise input_error(f"the shape {shape} is no block of {self.shape}")
        if math.prod(shape) > MOST_DRAWN:
            raise input_error(f"the shape {shape} makes {math.prod(shape)} nodes; at most {MOST_DRAWN} can be drawn")
        graph = nx.Graph(kind=self.kind)
        graph.add_nodes_from(product(*(range(length) for length in shape)))
        link = {"count": 1, "bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s}
        for index, axis in enumerate(self.axes):
            graph.add_edges_from(self._links(index, shape), axis=axis.name, **link)
        return graph

    def _links(self, index: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pairs of neighbours along one axis."""
        axis, length = self.axes[index], shape[index]
        closes = axis.ring.value and length == axis.length.value and length > 2
        for place in product(*(range(n) for n in shape)):
            after = place[index] + 1
            if after < length or closes:
                yield place, (*place[:index], after % length, *place[index + 1 :])


def near_cube(nodes: int) -> tuple[int, int, int]:
    """Three factors of a node count, as equal as can be, largest first.

    >>> near_cube(6144)
    (24, 16, 16)
    """
    return min(_factors(nodes, 3), key=max)  # type: ignore[return-value]


def _factors(number: int, axes: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product, largest factor first."""
    if axes == 1:
        yield (number,)
        return
    for last in range(least, round(number ** (1 / axes)) + 2):
        if number % last == 0 and last**axes <= number:
            for front in _factors(number // last, axes - 1, last):
                yield (*front, last)


def _tofu_axes(shape: tuple[int, ...], machine: Sequence[int]) -> tuple[int, int, int] | None:
    """Which of a job's axes lies along (x, a), which along (y, b) and which along (z, c); None where none fits."""
    for order in permutations(range(3)):
        x, y, z = (shape[axis] for axis in order)
        if _folds(x, machine[0]) and 1 <= y <= 3 * machine[1] and _folds(z, machine[2]):
            return order  # type: ignore[return-value]
    return None


def _folds(length: int, along: int) -> bool:
    return length == 1 or (length % 2 == 0 and 1 <= length // 2 <= along)


def tofu_embedding(shape: Sequence[int], machine: Sequence[int] = (24, 23, 24, *TOFU_UNIT)) -> Ints:
    """Where the nodes of a job's torus stand on a Tofu network, so that neighbours are one cable apart.

    One axis of the job goes out along x at a = 0 and comes back at a = 1, another does so along z and c; the
    third goes out along y at b = 0 and comes back weaving between b = 1 and b = 2, since b is a ring of three.
    So each axis closes to a ring without x, y or z being one.

    Args:
        shape: Nodes along the job's three axes.
        machine: Lengths of x, y, z, a, b, c.

    Returns:
        Coordinates (x, y, z, a, b, c), shape (X, Y, Z, 6).

    Raises:
        InputError: If the shape cannot be laid so.

    Source: found in the published coordinate dumps of fugaku-mapping-tool (jobs of 8x8x8, 16x16x8 and 8x16x16).

    >>> tofu_embedding((4, 1, 1))[:, 0, 0, [0, 3]].tolist()
    [[0, 0], [1, 0], [1, 1], [0, 1]]
    """
    import numpy as np

    order = _tofu_axes(tuple(shape), machine) if len(shape) == 3 else None
    if order is None:
        shown = "x".join(map(str, shape))
        raise input_error(f"the shape {shown} cannot be laid on {'x'.join(map(str, machine))} without detours")
    lines = {0: _fold(shape[order[0]]), 1: _weave(shape[order[1]]), 2: _fold(shape[order[2]])}
    placed = np.zeros((*shape, 6), dtype=np.int64)
    for long_axis, axis in enumerate(order):
        spread: list[int] = [1, 1, 1]
        spread[axis] = shape[axis]
        for part, column in ((0, long_axis), (1, long_axis + 3)):
            placed[..., column] = np.array([step[part] for step in lines[long_axis]]).reshape(spread)
    return placed


def _fold(length: int) -> list[tuple[int, int]]:
    """Out at 0 and back at 1."""
    half = -(-length // 2)
    return [(n, 0) for n in range(half)] + [(n, 1) for n in reversed(range(length - half))]


def _weave(length: int) -> list[tuple[int, int]]:
    """Out at 0, and back between 2 and 1, at both of them where the length needs it."""
    out = -(-length // 3)
    both, at = length - 2 * out, 2
    walk = [(n, 0) for n in range(out)]
    for n in reversed(range(out)):
        if len(walk) < length:
            walk.append((n, at))
        if both > 0 and len(walk) < length:
            at, both = 3 - at, both - 1
            walk.append((n, at))
    return walk
