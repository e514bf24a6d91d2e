"""One entry of a schedule table, and its compact form.

A long step has hundreds of thousands of actions, so the players walk codes: one
integer an action, ``KINDS * (chunk * micro_batches + micro_batch) + kind``, where a
chunk is one of the virtual stages that a rank holds. With one chunk a rank that is
``KINDS * micro_batch + kind``. `Action` is what people, files and the trainer see;
it names the virtual stage as the whole pipeline counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

KINDS = 4
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = range(KINDS)
LETTERS: tuple[Kind, ...] = ("F", "B", "I", "W")  # as torch's pipelining writes them


class Action(NamedTuple):
    """A pass of one micro-batch through one virtual stage.

    Attributes:
        kind: ``F`` forward, ``B`` full backward; or its halves, ``I`` the gradient of the
            input, which the stage before waits for, and ``W`` that of the weights, which nobody does.
        stage: The virtual stage, counted over the whole pipeline.
        micro_batch: Counted from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    def code(self, chunk: int = 0, micro_batches: int = 0) -> int:
        """The compact form on the rank that holds the stage as its chunk of that number.

        >>> Action("B", 0, 3).code(), Action("W", 7, 3).code(chunk=1, micro_batches=8)
        (13, 47)
        """
        return KINDS * (chunk * micro_batches + self.micro_batch) + LETTERS.index(self.kind)


def split_code(code: int, micro_batches: int) -> tuple[int, int, int]:
    """Kind, chunk and micro-batch of a code.

    >>> split_code(47, micro_batches=8)
    (3, 1, 3)
    """
    number, kind = divmod(code, KINDS)
    return kind, *divmod(number, micro_batches)


def action_of(code: int, stage: int, micro_batches: int | None = None) -> Action:
    """The action behind a code.

    Args:
        code: What stands in the list of a rank.
        stage: The virtual stage of its chunk; with one chunk a rank, the rank.
        micro_batches: Of the step; needed where a rank has several chunks.

    >>> str(action_of(13, stage=1)), str(action_of(47, stage=7, micro_batches=8))
    ('1B3', '7W3')
    """
    number, kind = divmod(code, KINDS)
    return Action(LETTERS[kind], stage, number if micro_batches is None else number % micro_batches)


class Codes:
    """Runs of codes of one rank: a kind and a chunk, over neighbouring micro-batches.

    Args:
        micro_batches: Of the step; the stride between chunks.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def run(self, kind: int, chunk: int, first: int, count: int) -> range:
        """Codes of ``count`` micro-batches from ``first``.

        >>> list(Codes(8).run(FORWARD, 1, first=2, count=3))
        [40, 44, 48]
        """
        start = KINDS * (chunk * self.micro_batches + first) + kind
        return range(start, start + KINDS * count, KINDS)


def woven(*runs: Sequence[int]) -> list[int]:
    """Runs of one length, taken by turns.

    >>> woven(range(3), range(10, 13))
    [0, 10, 1, 11, 2, 12]
    """
    turns = len(runs)
    together = [0] * sum(map(len, runs))
    for turn, run in enumerate(runs):
        together[turn::turns] = run
    return together


def most_held(codes: Sequence[int]) -> int:
    """The most passes of a rank that are forward and not yet wholly backward at once.

    >>> most_held([0, 4, 2, 3, 6, 7])
    2
    """
    change = (1, -1, 0, -1)
    now = most = 0
    for code in codes:
        now += change[code % KINDS]
        most = max(most, now)
    return most
