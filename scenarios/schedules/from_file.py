"""A schedule that a user wrote, or that torch dumped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ...topology.errors import InputError, input_error
from ...topology.files import read_text
from .action import most_held
from .schedule import Looped, VShaped
from .table import Table
from .text import from_csv

SUFFIX = ".csv"
MOST_BYTES = 64 * 2**20  # 64 ranks of two stages and 1,600 micro-batches have 4.6 MB


def is_file(name: str) -> bool:
    """Whether a schedule's name is that of a file.

    >>> is_file("./mine.csv"), is_file("1f1b")
    (True, False)
    """
    return name.lower().endswith(SUFFIX)


class FileSchedule:
    """A table from a CSV file, for its own number of ranks and micro-batches.

    Args:
        name: The path, as the scenario gives it.
        table: Actions of each rank, checked.

    Raises:
        InputError: If ranks hold different numbers of stages, or hold them neither in a loop nor in a V.
    """

    def __init__(self, name: str, table: Table) -> None:
        self.name = name
        self.table = table
        ranks, stages = len(table), 1 + max(action.stage for row in table for action in row)
        if stages % ranks:
            raise input_error(f"has {stages} stages on {ranks} ranks; every rank has to hold as many", where=name)
        count = stages // ranks
        micro_batches = 1 + max(action.micro_batch for row in table for action in row)
        self.shape: tuple[int, int] | None = (ranks, micro_batches)
        self.chunks: tuple[int, ...] | None = (count,)
        self.least_chunks = count
        self.splits_backward = any(action.kind in "IW" for row in table for action in row)
        self._placed = _placing(name, table, ranks, count)
        self._codes = [
            [action.code(self.home(action.stage, ranks, count)[1], micro_batches) for action in row] for row in table
        ]

    def least_micro_batches(self, ranks: int) -> int:
        """Those of the file."""
        return self.shape[1] if self.shape else 1

    def home(self, stage: int, ranks: int, chunks: int) -> tuple[int, int]:
        """The rank that holds a virtual stage, and which of its chunks it is."""
        return self._placed.home(stage, ranks, chunks)

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """The virtual stage that is this chunk of this rank."""
        return self._placed.stage_of(rank, chunk, ranks)

    def codes(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> Sequence[int]:
        """What stands in the rank's row."""
        return self._codes[rank]

    def most_in_flight(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Counted along the row."""
        return most_held(self._codes[rank])


def _placing(name: str, table: Table, ranks: int, chunks: int) -> Looped | VShaped:
    """How the table's stages lie on its ranks."""
    homes = {action.stage: rank for rank, row in enumerate(table) for action in row}
    placings: list[Looped | VShaped] = [Looped()] + ([VShaped()] if chunks == 2 else [])
    for placing in placings:
        if all(placing.home(stage, ranks, chunks)[0] == rank for stage, rank in homes.items()):
            return placing
    stage, rank = next((s, r) for s, r in sorted(homes.items()) if s % ranks != r)
    also = f", or in a V on rank {VShaped().home(stage, ranks, chunks)[0]}" if chunks == 2 else ""
    raise input_error(f"has stage {stage} on rank {rank}; in a loop it lies on rank {stage % ranks}{also}", where=name)


def read_schedule(path: str) -> FileSchedule:
    """The schedule in a CSV file.

    Raises:
        InputError: If the file cannot be read, or its table cannot be played.
    """
    try:
        return _parsed(read_text(Path(path).expanduser(), path, MOST_BYTES), path)
    except (ValueError, RuntimeError) as error:  # a name no file system takes
        if isinstance(error, InputError):
            raise
        raise input_error(f"cannot be read: {error}"[:200], where=path[:60]) from None


@lru_cache(maxsize=4)
def _parsed(text: str, path: str) -> FileSchedule:
    """Read once for the rules and again for the run: large tables take a while."""
    return FileSchedule(path, from_csv(text, path))
