"""1F1B: one forward, one backward, once the pipeline is full."""

from __future__ import annotations

from .action import BACKWARD, FORWARD, KINDS


class OneForwardOneBackward:
    """1F1B: a stage holds at most ``stages - stage`` micro-batches at once.

    Source: pipedream-2021 (Narayanan et al., PipeDream-Flush), as Megatron-LM, DeepSpeed and
    torch's ``Schedule1F1B`` run it.
    """

    name = "1f1b"

    def codes(self, stage: int, stages: int, micro_batches: int) -> list[int]:
        """Forwards until the pipeline is full, then one of each, then the backwards left over.

        >>> from .action import action_of
        >>> [str(action_of(code, 0)) for code in OneForwardOneBackward().codes(stage=0, stages=2, micro_batches=3)]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
        """
        forwards = range(FORWARD, KINDS * micro_batches, KINDS)
        backwards = range(BACKWARD, KINDS * micro_batches, KINDS)
        warm_up = min(stages - stage - 1, micro_batches)
        steady = [0] * (2 * (micro_batches - warm_up))
        steady[0::2] = forwards[warm_up:]
        steady[1::2] = backwards[: micro_batches - warm_up]
        return [*forwards[:warm_up], *steady, *backwards[micro_batches - warm_up :]]
