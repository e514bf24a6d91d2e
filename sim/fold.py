"""Classes of transfers: numbered as they are found, with the links that they use, and folded for the network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..topology.routing import Routes
from .communicate import PhaseHops
from .network import TrafficClasses, traffic_classes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinkUse:
    """Who uses which link: one entry a class and link, with how many of the class's transfers cross it."""

    class_of: Ints
    link: Ints
    share: Floats


class Classes:
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
