"""Which pipeline rank holds which virtual stages, and between which ranks messages go."""

from __future__ import annotations

from itertools import pairwise

from ..scenarios.scenario import Scenario
from .timeline import Hop

StageTable = tuple[tuple[int, ...], ...]


def stage_table(scenario: Scenario) -> StageTable:
    """Virtual stage of each pipeline rank's chunks."""
    ranks, chunks, schedule = scenario.layout.pp, scenario.layout.vpp, scenario.schedule
    return tuple(tuple(schedule.stage_of(rank, chunk, ranks) for chunk in range(chunks)) for rank in range(ranks))


def in_pieces(scenario: Scenario) -> bool:
    """Whether each tensor rank sends a piece of a message, and those who get it gather it.

    With sequence parallelism a piece is all that a rank has and needs.
    """
    layout = scenario.layout
    return layout.tp > 1 and scenario.framework.pipeline.partition_over_tp and not layout.sequence_parallel


def rank_of(placed: StageTable) -> list[int]:
    """Pipeline rank of each virtual stage.

    >>> rank_of(((0, 3), (1, 2)))
    [0, 1, 1, 0]
    """
    homes = {stage: rank for rank, row in enumerate(placed) for stage in row}
    return [homes[stage] for stage in range(len(homes))]


def hops_around(placed: StageTable) -> list[Hop]:
    """Ranks between which messages go though they are no neighbours: forward, and back.

    >>> hops_around(((0, 3), (1, 4), (2, 5)))
    [(2, 0), (0, 2)]
    >>> hops_around(((0, 3), (1, 2)))
    []
    """
    ranks = rank_of(placed)
    found: dict[Hop, None] = {}
    for source, target in pairwise(ranks):
        if abs(source - target) > 1:
            found |= dict.fromkeys([(source, target), (target, source)])
    return list(found)


def boundaries(placed: StageTable) -> list[Hop]:
    """Of each boundary between virtual stages the rank before it and the rank after it."""
    ranks = rank_of(placed)
    return list(pairwise(ranks))


def messages_of(placed: StageTable) -> dict[Hop, int]:
    """Of each pair of ranks, the messages that go from one to the other for one micro-batch."""
    counts: dict[Hop, int] = {}
    for source, target in boundaries(placed):
        for hop in ((source, target), (target, source)):
            counts[hop] = counts.get(hop, 0) + (source != target)
    return counts


def ends_of(placed: StageTable) -> tuple[int, int]:
    """Pipeline ranks of the first and of the last virtual stage."""
    ranks = rank_of(placed)
    return ranks[0], ranks[-1]
