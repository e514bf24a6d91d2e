"""A step in closed form: microseconds a layout, for screening.

A pipeline of p ranks and m micro-batches takes ``(m - 1) x the slowest rank's slot + the
slots of the fill``. A slot is forward, backward and the messages that hold a rank up.
What fills and drains is a slot of each rank, for equal ranks the ``(m + p - 1)`` slots of
Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with v chunks a rank a v-th of it
(the same, section 2.2.2); and where backwards are parted a forward and an input gradient
less the weight gradient that fills the gap (Qi et al. 2023, arXiv 2401.10241, table 2), in
V shapes of one chunk. Left out: waits between unequal neighbours in the middle of the
step, jitter, and whatever contention does.
"""

from __future__ import annotations

from ..scenarios.schedules import FORWARD
from .network import TrafficClasses
from .recurrence import Gates, close_step
from .tail import gates_of, gathered_s
from .timeline import Played, Program, Step, Timeline


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step in closed form; its timelines hold no actions."""
    gates = gates_of(step.tail, gathered_s(step.tail, classes))
    timelines = tuple(_pipeline(lane.program, gates) for lane in step.lanes)
    return Played(timelines, close_step(step.lanes, timelines, step.tail, classes))


def _pipeline(program: Program, gates: Gates) -> Timeline:
    ranks, chunks = program.ranks, program.chunks
    held = [program.held(rank) / program.micro_batches for rank in range(ranks)]
    slots = [sum(program.forward_s[rank]) + sum(program.backward_s[rank]) + held[rank] for rank in range(ranks)]
    fills = [slot / chunks for slot in slots]
    if program.splits:
        fills = [max(0.0, fill - 2 * sum(program.weight_s[rank]) / chunks) for rank, fill in enumerate(fills)]
    travel = sum(
        2 * latency + (0.0 if program.send_blocks else up + down)
        for latency, up, down in zip(program.latency_s, program.up_s, program.down_s, strict=True)
    )
    slowest = slots.index(max(slots))
    pipeline_s = sum(fills) - fills[slowest] + program.micro_batches * slots[slowest] + travel / chunks
    pipeline_s += max((_late(program, gates, rank) for rank in range(ranks)), default=0.0) if gates else 0.0
    pipeline_s += max(program.extra_s.values(), default=0.0)
    return Timeline([[] for _ in range(ranks)], [pipeline_s] * ranks, [program.micro_batches * h for h in held])


def _late(program: Program, gates: Gates, rank: int) -> float:
    """How much later a rank's first forward ends for the weights that it waits for."""
    if 0 not in gates[rank]:
        return 0.0
    here = sum(program.forward_s[before][0] + program.travels(before, FORWARD) for before in range(rank))
    seconds = program.forward_s[rank][0]
    return gates[rank][0].passed(here, seconds) - here - seconds
