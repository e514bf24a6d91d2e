"""What one rank of a stage sends in a step, by group and operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..scenarios.result import CommRecord
from ..scenarios.schedules import BACKWARD, FORWARD, KINDS
from .network import TrafficClasses
from .passes import CommUse
from .tail import Collective
from .timeline import Program, Timeline


def pass_records(uses: Iterable[CommUse], algorithms: Mapping[tuple[str, str], str]) -> Iterator[CommRecord]:
    """What passes send in collectives; those that gather a message in pieces run on the tensor ranks."""
    for use in uses:
        if use.count and use.busy_s > 0:
            known = algorithms.get((use.group, use.op)) or algorithms.get(("tp", use.op), "direct")
            yield CommRecord(use.group, use.op, known, use.bytes, use.count, use.busy_s, use.exposed_s)


def message_record(program: Program, timeline: Timeline, rank: int, message_bytes: float) -> CommRecord | None:
    """A rank's messages to its neighbours in the pipeline; None where it sends none."""
    messages, busy = 0, 0.0
    for chunk in range(program.chunks):
        for kind in (FORWARD, BACKWARD):
            slot = program.slots[rank][chunk * KINDS + kind]
            if slot.to is not None and slot.to != rank:
                messages += program.micro_batches
                busy += program.micro_batches * slot.sends_s
    if not messages:
        return None
    held = timeline.held_s[rank]
    return CommRecord("pp", "send", "direct", messages * message_bytes, messages, max(busy, held), held)


def tail_records(
    collective: Collective,
    busy_s: float,
    exposed_s: float,
    algorithms: Mapping[tuple[str, str], str],
    classes: TrafficClasses,
) -> Iterator[CommRecord]:
    """What a rank sends once a step; several kinds in a row share the time as they would if alone.

    Args:
        collective: All that travels in a row.
        busy_s: Seconds that it took.
        exposed_s: The part of them in which the rank waited.
        algorithms: How each ran.
        classes: Rates while alone.
    """
    alone: dict[tuple[str, str], float] = {}
    sent: dict[tuple[str, str], float] = {}
    for exchange in collective:
        key = exchange.group, exchange.op
        alone[key] = alone.get(key, 0.0) + exchange.alone_s(classes)
        sent[key] = sent.get(key, 0.0) + exchange.edge_bytes
    whole = sum(alone.values())
    for (group, op), seconds in alone.items():
        if seconds > 0 and busy_s > 0:
            share = seconds / whole
            yield CommRecord(
                group, op, algorithms[group, op], sent[group, op], 1, share * busy_s, share * min(exposed_s, busy_s)
            )
