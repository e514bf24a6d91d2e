"""What many rows say together: errors by group, order of layouts, scaling, and the rows that are farthest off."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..scenarios.measurements import Use
from .validation_rows import Kind, ValidationRow

FEWEST_RANKED = 3  # rows of a group that say anything of order
FEWEST_PEERS = 4  # rows of one machine that a row is compared with


@dataclass(frozen=True)
class Summary:
    """Errors of one group of rows, relative; of verdicts, the share that is wrong is the mean.

    Attributes:
        by: What the rows were grouped by: ``all``, ``source``, ``device``; ``name`` is the group's.
        p90: The error that nine of ten rows keep to.
        bias: Mean of the signed errors; above zero is too slow, or too much memory.
    """

    by: str
    name: str
    kind: Kind
    use: Use
    rows: int
    median: float
    mean: float
    p90: float
    worst: float
    bias: float


@dataclass(frozen=True)
class Ranking:
    """How rows that differ only in their layout are ordered.

    Attributes:
        tau: Kendall's tau-b between predicted and measured step times: 1 is the same order.
        regret: How much slower the layout predicted best ran than the best measured, relative.
    """

    group: str
    use: Use
    rows: int
    tau: float
    regret: float


@dataclass(frozen=True)
class Scaling:
    """Efficiency from the fewest to the most devices of runs that differ in nothing but their replicas.

    Attributes:
        kind: ``strong`` at one batch, ``weak`` at one batch a replica.
        measured: Tokens a second of a device on the most, over the same on the fewest; likewise predicted.
    """

    first: str
    last: str
    kind: str
    fewest: int
    most: int
    measured: float
    predicted: float


@dataclass(frozen=True)
class Suspect:
    """A row that is far off, and the part of its step that is probably wrong.

    Attributes:
        part: The part whose share of the step exceeds most what well predicted rows of the same machine
            give it; empty where there are too few of those.
        share: Its share of the predicted step; ``usual`` is the median share of those rows.
    """

    row: ValidationRow
    part: str
    share: float
    usual: float

    def document(self) -> dict[str, Any]:
        """The fields of ``--json``; the row by its id."""
        return {
            "id": self.row.id,
            "error": self.row.error,
            "part": self.part,
            "share": self.share,
            "usual": self.usual,
        }


GROUPINGS: dict[str, Callable[[ValidationRow], str]] = {
    "all": lambda row: "all",
    "source": lambda row: row.series,
    "device": lambda row: row.device,
}


def summaries(rows: Iterable[ValidationRow], by: str) -> tuple[Summary, ...]:
    """Errors by group, kind and use, in the order in which they first come."""
    name = GROUPINGS[by]
    groups: dict[tuple[str, Kind, Use], list[float]] = {}
    for row in rows:
        groups.setdefault((name(row), row.kind, row.use), []).append(row.error)
    return tuple(_summary(by, *key, errors) for key, errors in groups.items())


def _summary(by: str, name: str, kind: Kind, use: Use, errors: Sequence[float]) -> Summary:
    sizes = sorted(abs(error) for error in errors)
    return Summary(
        by=by,
        name=name,
        kind=kind,
        use=use,
        rows=len(errors),
        median=statistics.median(sizes),
        mean=statistics.fmean(sizes),
        p90=quantile(sizes, 0.9),
        worst=max(errors, key=abs),
        bias=statistics.fmean(errors),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which so much of an ordered sequence lies, between its neighbours in proportion.

    >>> quantile([1.0, 2.0, 3.0], 0.5), quantile([1.0, 2.0], 0.9)
    (2.0, 1.9)
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def rankings(rows: Iterable[ValidationRow]) -> tuple[Ranking, ...]:
    """Order within each group of at least three step times; a group with a fitted row counts as fitted."""
    groups: dict[str, list[ValidationRow]] = {}
    for row in rows:
        if row.group and row.quantity == "step":
            groups.setdefault(row.group, []).append(row)
    found = []
    for name, members in groups.items():
        if len(members) < FEWEST_RANKED:
            continue
        measured = [row.measured for row in members]
        chosen = min(members, key=lambda row: row.predicted)
        use: Use = "fit" if any(row.use == "fit" for row in members) else members[0].use
        tau = kendall_tau([row.predicted for row in members], measured)
        found.append(Ranking(name, use, len(members), tau, chosen.measured / min(measured) - 1))
    return tuple(found)


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the other, over pairs that are tied in neither.

        tau = (C - D) / sqrt((C + D + ties of left alone) (C + D + ties of right alone))

    Source: M. Kendall, "Rank Correlation Methods", 1948. 0 where one side is all ties.

    >>> round(kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]), 4)
    0.6667
    >>> round(kendall_tau([1, 2, 2], [1, 2, 3]), 4)
    0.8165
    """
    same = other = only_left = only_right = 0
    for (a, b), (c, d) in combinations(zip(left, right, strict=True), 2):
        product = (a - c) * (b - d)
        if product > 0:
            same += 1
        elif product < 0:
            other += 1
        elif a == c and b != d:
            only_left += 1
        elif b == d and a != c:
            only_right += 1
    norm = ((same + other + only_left) * (same + other + only_right)) ** 0.5
    return (same - other) / norm if norm else 0.0


def scalings(rows: Iterable[ValidationRow]) -> tuple[Scaling, ...]:
    """Efficiency from the fewest to the most devices, of the runs that differ in nothing but their replicas."""
    rows = [row for row in rows if row.quantity == "step" and row.use != "context"]
    found = []
    for kind in ("strong", "weak"):
        groups: dict[str, list[ValidationRow]] = {}
        for row in rows:
            key = getattr(row, kind)
            if key:
                groups.setdefault(f"{row.series} {key}", []).append(row)
        for members in groups.values():
            first = min(members, key=lambda row: row.devices)
            last = max(members, key=lambda row: row.devices)
            if last.devices > first.devices:
                efficiency = {side: _rate(last, side) / _rate(first, side) for side in ("measured", "predicted")}
                found.append(Scaling(first.id, last.id, kind, first.devices, last.devices, **efficiency))
    return tuple(found)


def _rate(row: ValidationRow, side: str) -> float:
    """Tokens a second of one device."""
    return float(row.tokens / getattr(row, side) / row.devices)


def suspects(rows: Iterable[ValidationRow], count: int = 10) -> tuple[Suspect, ...]:
    """The rows farthest off in time, worst first, each with the part that is probably wrong.

    A row is compared with those of its machine that are predicted better than the median of them. The
    part whose share of the step is most above its median share there is named: what is priced wrongly
    shows where there is most of it. It points, it does not prove; a cost that the model leaves out
    altogether has no part that could be named.
    """
    timed = [row for row in rows if row.kind == "time"]
    peers: dict[str, list[ValidationRow]] = {}
    for row in timed:
        peers.setdefault(row.machine, []).append(row)
    worst = sorted((row for row in timed if row.use != "context"), key=lambda row: -abs(row.error))[:count]
    return tuple(_suspect(row, peers[row.machine]) for row in worst)


def _suspect(row: ValidationRow, peers: Sequence[ValidationRow]) -> Suspect:
    if len(peers) < FEWEST_PEERS or not row.parts:
        return Suspect(row, "", 0.0, 0.0)
    middle = statistics.median(abs(peer.error) for peer in peers)
    good = [_shares(peer) for peer in peers if abs(peer.error) <= middle]
    own = _shares(row)
    usual = {part: statistics.median(shares.get(part, 0.0) for shares in good) for part in own}
    part = max(own, key=lambda name: own[name] - usual[name])
    return Suspect(row, part, own[part], usual[part])


def _shares(row: ValidationRow) -> dict[str, float]:
    total = sum(row.parts.values()) or 1.0
    return {part: seconds / total for part, seconds in row.parts.items()}


def overview(found: Sequence[Any], field: str) -> float:
    """The median of a field over rankings or scalings; 0 where there are none."""
    return statistics.median(getattr(item, field) for item in found) if found else 0.0
