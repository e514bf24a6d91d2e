"""What every kind of fabric can say about ways through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..errors import InputError, input_error
from ..faults import Fault
from ..hops import Floats, Hops, Ints, Lanes
from ..machine import Machine


class Ways(ABC):
    """Links of one fabric, numbered from 0, and which of them messages take.

    Args:
        machine: The machine.
        node_ids: Machine node of each node of the job.
        shape: The job's own torus; None where its messages cross the machine's.
        faults: Links of the fabric that carry less.
        non_minimal: Share of a dragonfly's messages between groups that goes by a third group; None balances.
    """

    def __init__(
        self,
        machine: Machine,
        node_ids: Ints,
        shape: tuple[int, ...] | None,
        faults: Sequence[Fault],
        non_minimal: float | None,
    ) -> None:
        self.machine = machine
        self.node_ids = node_ids
        self.shape = shape
        self.non_minimal = non_minimal
        self.capacity: Floats = self.bandwidths()
        self.failed: frozenset[int] = frozenset()
        for fault in faults:
            links = self.find(fault)
            before = self.capacity[links]
            self.capacity[links] *= fault.factor
            self.lose(links, before - self.capacity[links])
        if faults:
            self.failed = frozenset(np.flatnonzero(self.capacity <= 0).tolist())

    @abstractmethod
    def bandwidths(self) -> Floats:
        """Bytes/s of each link, all of them whole."""

    @abstractmethod
    def cross(self, messages: Ints, source: Ints, target: Ints, lanes: Lanes, together: Ints, floor_s: Floats) -> Hops:
        """Links of messages that leave their node.

        Args:
            messages: Numbers of those messages.
            source: Node of each sender, by message number.
            target: Node of each receiver, likewise.
            lanes: The ports they use.
            together: Set of messages that are under way at once, by message number.
            floor_s: Seconds a byte of each message takes at least, for each set, whatever the fabric does.
        """

    @abstractmethod
    def distance(self, source: Ints, target: Ints, out_nic: Ints, in_nic: Ints) -> Ints:
        """Hops between switches, or between nodes that pass messages on; 0 inside a node."""

    @abstractmethod
    def name(self, link: int) -> str:
        """A link as people call it."""

    @abstractmethod
    def find(self, fault: Fault) -> Ints:
        """The links, both ways, that a fault names.

        Raises:
            InputError: If there is none.
        """

    def lose(self, links: Ints, bytes_per_s: Floats) -> None:  # noqa: B027 - most fabrics have no pools
        """Take what links lost from the pools they belong to; a fabric without pools has nothing to do."""

    def refuse_failed(self, crossing: Hops) -> Hops:
        """The hops, unless one of them takes a link that carries nothing.

        Raises:
            InputError: If one does.
        """
        if self.failed:
            taken = np.isin(crossing.link, list(self.failed)) & (crossing.share > 0)
            if taken.any():
                link = int(crossing.link[taken][0])
                raise input_error(f"{self.name(link)} has failed and no other way leads around it", field="perturb")
        return crossing


def no_such_link(fault: Fault, asked: str) -> InputError:
    """The error for a fault that names nothing."""
    return input_error(f"{fault} is not there; {asked}", field="perturb")
