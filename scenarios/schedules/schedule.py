"""What a schedule is, and the two ways in which virtual stages lie on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Schedule(Protocol):
    """What every member of ``SCHEDULES``, and a schedule from a file, can do.

    A pipeline rank holds ``chunks`` virtual stages. A pass of a chunk is one micro-batch forward, or
    backward, or half of a backward.
    """

    @property
    def name(self) -> str:
        """The word in ``layout.schedule``."""
        ...

    @property
    def splits_backward(self) -> bool:
        """Whether some backwards come in two halves, of the input and of the weights."""
        ...

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The virtual stages that a rank may hold; None for any number from ``least_chunks``."""
        ...

    @property
    def least_chunks(self) -> int:
        """The fewest virtual stages that a rank may hold."""
        ...

    @property
    def shape(self) -> tuple[int, int] | None:
        """Ranks and micro-batches of a table that was given whole; None where it is built for any."""
        ...

    def least_micro_batches(self, ranks: int) -> int:
        """The fewest micro-batches of a step."""
        ...

    def home(self, stage: int, ranks: int, chunks: int) -> tuple[int, int]:
        """The rank that holds a virtual stage, and which of its chunks it is."""
        ...

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """The virtual stage that is this chunk of this rank."""
        ...

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> Sequence[int]:
        """What a rank does, in its order, in compact form."""
        ...

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """The most passes whose forward ran and whose last backward did not, at once on a rank.

        Each is one micro-batch through one of the rank's chunks.
        """
        ...


class Looped:
    """Stage after stage from rank to rank, and round again: with v chunks a rank, a micro-batch passes v times."""

    chunks: tuple[int, ...] | None = None
    least_chunks = 1
    shape: tuple[int, int] | None = None

    def least_micro_batches(self, ranks: int) -> int:
        """One: the order is defined for any number."""
        return 1

    def home(self, stage: int, ranks: int, chunks: int) -> tuple[int, int]:
        """Stage s lies on rank s mod p.

        >>> Looped().home(5, ranks=4, chunks=2)
        (1, 1)
        """
        return stage % ranks, stage // ranks

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """The inverse of `home`.

        >>> Looped().stage_of(rank=1, chunk=1, ranks=4)
        5
        """
        return chunk * ranks + rank


class VShaped:
    """Down the ranks and up again: the first stage and the last share rank 0, and the loss is made there."""

    chunks: tuple[int, ...] | None = (2,)
    least_chunks = 2
    shape: tuple[int, int] | None = None

    def least_micro_batches(self, ranks: int) -> int:
        """One: the order is defined for any number."""
        return 1

    def home(self, stage: int, ranks: int, chunks: int) -> tuple[int, int]:
        """The first half of the stages goes down, the second up.

        >>> [VShaped().home(stage, ranks=2, chunks=2) for stage in range(4)]
        [(0, 0), (1, 0), (1, 1), (0, 1)]
        """
        return (stage, 0) if stage < ranks else (2 * ranks - 1 - stage, 1)

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """The inverse of `home`.

        >>> VShaped().stage_of(rank=1, chunk=1, ranks=4)
        6
        """
        return rank if chunk == 0 else 2 * ranks - 1 - rank
