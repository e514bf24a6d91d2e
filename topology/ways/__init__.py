"""Ways through the fabric, by arithmetic where its form is known: one module a kind, and one line in `WAYS`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import input_error
from ..faults import Fault
from ..hops import Ints
from ..machine import Machine
from .dragonfly import DragonflyWays
from .fat_tree import FatTreeWays
from .searched import SearchedWays
from .torus import TorusWays
from .ways import Ways

WAYS: dict[str, type[Ways]] = {
    "dragonfly": DragonflyWays,
    "fat_tree": FatTreeWays,
    "torus": TorusWays,
    "graph": SearchedWays,
}


def fabric_ways(
    machine: Machine, node_ids: Ints, shape: tuple[int, ...] | None, faults: Sequence[Fault], non_minimal: float | None
) -> Ways:
    """The ways between nodes of a job.

    Args:
        machine: The machine.
        node_ids: Machine node of each node of the job.
        shape: The job's own torus; None where its messages cross the machine's.
        faults: Links of the fabric that carry less.
        non_minimal: Share of a dragonfly's messages between groups that goes by a third group; None balances.
    """
    kind = WAYS.get(machine.fabric.kind)
    if kind is None:
        raise input_error(f"a fabric of kind {machine.fabric.kind} has no routes", field="fabric.kind")
    return kind(machine, node_ids, shape, faults, non_minimal)


__all__ = ["WAYS", "Ways", "fabric_ways"]
