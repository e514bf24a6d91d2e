"""Torus: nodes on a grid of any number of axes, each axis a ring or a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..errors import Problem, input_error
from ..facts import BandwidthFact, CountFact, Entry, FlagFact

if TYPE_CHECKING:
    import networkx as nx

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
        }

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
