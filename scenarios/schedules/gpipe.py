"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from .action import BACKWARD, FORWARD, KINDS


class GPipe:
    """GPipe: a stage holds every micro-batch of the step at once.

    Source: gpipe (Huang et al. 2019). Backwards run in the order of the forwards, as torch's
    ``ScheduleGPipe`` does.
    """

    name = "gpipe"

    def codes(self, stage: int, stages: int, micro_batches: int) -> list[int]:
        """The same on every stage.

        >>> from .action import action_of
        >>> [str(action_of(code, 0)) for code in GPipe().codes(stage=0, stages=2, micro_batches=2)]
        ['0F0', '0F1', '0B0', '0B1']
        """
        end = KINDS * micro_batches
        return [*range(FORWARD, end, KINDS), *range(BACKWARD, end, KINDS)]
