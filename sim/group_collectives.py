"""Seconds of the collectives of one kind of group, every group of the job running its own at the same time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..scenarios.scenario import Scenario
from ..topology.errors import told_as
from ..topology.placement import Placement
from ..topology.routing import Routes
from .calibration import NetworkFigures
from .communicate import CollectiveTime, collective_s, ring_bytes

Ints = npt.NDArray[np.int64]


class GroupCollectives:
    """The collectives of one kind of group; each operation and size is worked out once.

    Args:
        scenario: What is asked; it may name an algorithm for the group.
        figures: What the library achieves.
        group: What the kind is called, such as ``tp``.
        placement: Where the ranks are.
        groups: Devices of all such groups of the job, one a row.
    """

    def __init__(
        self, scenario: Scenario, figures: NetworkFigures, group: str, placement: Placement, groups: Ints
    ) -> None:
        self.group = group
        self.size = groups.shape[1]
        self._scenario = scenario
        self._figures = figures
        nodes = groups // placement.devices_per_node
        if (nodes == nodes[:, :1]).all():  # no group leaves its node, and every node is alike
            self._groups, self._routes = groups[nodes[:, 0] == 0], Routes(scenario.machine, 1)
        else:
            self._groups, self._routes = groups, placement.routes(scenario.machine)
        self._nodes = len(np.unique(nodes[0]))
        self._times: dict[tuple[str, float], CollectiveTime] = {}

    def time(self, op: str, size_bytes: float) -> CollectiveTime:
        """One call.

        Raises:
            InputError: If the algorithm that the scenario names cannot run.
        """
        if (op, size_bytes) not in self._times:
            named = self._scenario.algorithm(self.group, op)
            with told_as(f"scenario {self._scenario.name}", collective=f"collectives.{self.group}.{op}"):
                found = collective_s(op, size_bytes, self._groups, self._routes, self._figures, named)
            self._times[op, size_bytes] = found
        return self._times[op, size_bytes]

    def seconds(self, op: str, size_bytes: float) -> tuple[float, float]:
        """Seconds of one call, and the bytes that a ring would have a rank send for it; of a message, all of it."""
        if self.size == 1:
            return 0.0, 0.0
        sent = size_bytes if op == "sendrecv" else ring_bytes(op, size_bytes, self.size)
        return self.time(op, size_bytes).seconds, sent

    def share_once(self, draws: int) -> float:
        """What an all-to-all sends where a token goes once to a place, over what it sends with a copy for each expert.

        A place is a rank, or a node where the group spans several, whose links are what such a call waits for.
        Each of the copies is for any place with equal odds.

        Source: GitHub deepseek-ai/DeepEP, README.md: over the fabric to one rank of a node, which passes on within it.

        >>> share = (1 - (1 - 1 / 4) ** 8) * 4 / 8  # 4 nodes, 8 experts a token
        >>> round(share, 3)
        0.45
        """
        places = self._nodes if self._nodes > 1 else self.size
        return places * (1 - (1 - 1 / places) ** draws) / draws

    def algorithms(self) -> dict[tuple[str, str], str]:
        """How the largest call of each operation ran, by group and operation."""
        largest: dict[str, tuple[float, str]] = {}
        for (op, size), found in self._times.items():
            largest[op] = max(largest.get(op, (0.0, "")), (size, found.algorithm))
        return {(self.group, op): algorithm for op, (_, algorithm) in largest.items()}
