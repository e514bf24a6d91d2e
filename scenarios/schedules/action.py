"""One entry of a schedule table, and its compact form.

A long step has hundreds of thousands of actions, so the players walk codes: one
integer an action, ``KINDS * micro_batch + kind``. `Action` is what people, files
and the trainer see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["F", "B"]

KINDS = 4  # room for the halves of a backward
FORWARD, BACKWARD = 0, 1
_KIND_OF: dict[int, Kind] = {FORWARD: "F", BACKWARD: "B"}
_CODE_OF = {kind: code for code, kind in _KIND_OF.items()}


class Action(NamedTuple):
    """A pass of one micro-batch through one stage: ``F`` forward, ``B`` full backward."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def code(self) -> int:
        """The compact form; the stage is left to the list it stands in.

        >>> Action("B", 0, 3).code
        13
        """
        return KINDS * self.micro_batch + _CODE_OF[self.kind]


def action_of(code: int, stage: int) -> Action:
    """The action behind a code.

    >>> str(action_of(13, stage=1))
    '1B3'
    """
    return Action(_KIND_OF[code % KINDS], stage, code // KINDS)


class Schedule(Protocol):
    """What every member of ``SCHEDULES`` can do."""

    name: str

    def codes(self, stage: int, stages: int, micro_batches: int) -> Sequence[int]:
        """What a stage does, in its order, in compact form."""
        ...
