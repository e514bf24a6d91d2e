"""The network: max-min fair rates of coflows that share links, and their arbiter.

A coflow is a set of transfers that start together, move the same bytes each and
share one rate: the edges of a ring, or the messages of all replicas of a pipeline
boundary. Its weight on a link is how many of its transfers cross that link (more
where the library achieves less than the link: a transfer that reaches a fraction
``f`` occupies ``1 / f`` of its rate). Rates are max-min fair; they change only
when a coflow starts or ends.

Sources: Bertsekas and Gallager, Data Networks, 2nd ed. 1992, section 6.5.2
(progressive filling); Chowdhury and Stoica 2012, doi 10.1145/2390231.2390237 (coflows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simpy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Weights = Mapping[int, float]


def max_min_rates(coflows: Sequence[Weights], capacity: Mapping[int, float] | Sequence[float]) -> list[float]:
    """Rates of coflows by progressive filling.

    All rates grow together; when a link is full, the coflows on it stop growing.

    Args:
        coflows: For each coflow the links it crosses and its weight on each, above 0.
        capacity: Bytes/s of each link.

    Returns:
        Bytes/s of one transfer of each coflow; infinite for one that crosses no link.

    >>> max_min_rates([{0: 1.0, 1: 1.0}, {0: 1.0}, {1: 1.0}], [1.0, 2.0])
    [0.5, 0.5, 1.5]
    """
    rates = [math.inf] * len(coflows)
    open_coflows = {i for i, weights in enumerate(coflows) if weights}
    users: dict[int, list[int]] = {}
    load: dict[int, float] = {}
    left: dict[int, float] = {}
    for i in sorted(open_coflows):
        for link, weight in coflows[i].items():
            users.setdefault(link, []).append(i)
            load[link] = load.get(link, 0.0) + weight
            left[link] = float(capacity[link])
    while open_coflows:
        fullest = min(users, key=lambda link: (left[link] / load[link], link))
        rate = left[fullest] / load[fullest]
        for i in users[fullest]:
            if i not in open_coflows:
                continue
            open_coflows.discard(i)
            rates[i] = rate
            for link, weight in coflows[i].items():
                left[link] = max(left[link] - rate * weight, 0.0)
                load[link] -= weight
        for link in [link for link in users if not any(i in open_coflows for i in users[link])]:
            del users[link]
        for link, crossing in users.items():
            load[link] = sum(coflows[i][link] for i in crossing if i in open_coflows)
    return rates


@dataclass(frozen=True)
class TrafficClasses:
    """Every kind of transfer a job makes, as coflows over constraint rows.

    A row stands for all links that the same classes cross with the same weights;
    only the thinnest of them can bind.

    Attributes:
        weights: For each class its rows and its weight on each.
        capacity: Bytes/s of each row.
        solo: Rate of each class while it is alone, bytes/s of one transfer.
        links: How many links the rows stand for.
    """

    weights: tuple[Weights, ...]
    capacity: tuple[float, ...]
    solo: tuple[float, ...]
    links: int


def traffic_classes(classes: int, class_of: Ints, link: Ints, weight: Floats, capacity: Floats) -> TrafficClasses:
    """Classes over as few rows as they need.

    Args:
        classes: How many classes there are.
        class_of: Class of each use of a link.
        link: The link of each use.
        weight: Its weight.
        capacity: Bytes/s of every link.
    """
    if len(link) == 0:
        return TrafficClasses(({},) * classes, (), (math.inf,) * classes, 0)
    pair, position = np.unique(link * classes + class_of, return_inverse=True)
    total = np.bincount(position, weights=weight)
    pair_link, pair_class = pair // classes, pair % classes
    links, first = np.unique(pair_link, return_index=True)
    # A link's pattern: its classes and weights, hashed with one fixed random number a class, so that equal ones meet.
    key = np.random.default_rng(20231).integers(1, 2**62, size=classes, dtype=np.uint64)
    term = key[pair_class] * np.round(total * 2**20).astype(np.uint64)
    pattern = np.add.reduceat(term, first)
    patterns, row_of = np.unique(pattern, return_inverse=True)
    thinnest = np.full(len(patterns), math.inf)
    np.minimum.at(thinnest, row_of, capacity[links])
    sample = np.full(len(patterns), -1)
    sample[row_of[::-1]] = np.arange(len(links))[::-1]
    ends = np.append(first, len(pair))
    weights: list[dict[int, float]] = [{} for _ in range(classes)]
    for row, index in enumerate(sample.tolist()):
        for use in range(int(ends[index]), int(ends[index + 1])):
            weights[int(pair_class[use])][row] = float(total[use])
    solo = [min((thinnest[row] / w for row, w in rows.items()), default=math.inf) for rows in weights]
    return _without_idle_rows(weights, thinnest.tolist(), [float(rate) for rate in solo], len(links))


def _without_idle_rows(
    weights: list[dict[int, float]], capacity: list[float], solo: list[float], links: int
) -> TrafficClasses:
    """Drop the rows that cannot bind even if every class ran at its solo rate."""
    demand = [0.0] * len(capacity)
    crowd = [0] * len(capacity)
    for rows, rate in zip(weights, solo, strict=True):
        for row, weight in rows.items():
            demand[row] += weight * rate
            crowd[row] += 1
    binding = [row for row in range(len(capacity)) if crowd[row] > 1 and demand[row] > capacity[row] * (1 + 1e-12)]
    number = {row: i for i, row in enumerate(binding)}
    kept = tuple({number[row]: weight for row, weight in rows.items() if row in number} for rows in weights)
    return TrafficClasses(kept, tuple(capacity[row] for row in binding), tuple(solo), links)


class Network:
    """The arbiter: shares the links among the coflows under way, in simulated time.

    A coflow that shares no binding row with another runs at its solo rate, without a
    solve. Otherwise the connected component is solved, once for each set of classes.

    Args:
        env: The simulation.
        classes: The kinds of transfer.
    """

    def __init__(self, env: simpy.Environment, classes: TrafficClasses) -> None:
        self._env = env
        self._classes = classes
        self._active: dict[int, _Transfer] = {}
        self._on_row: dict[int, set[int]] = {}
        self._memo: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._next_id = 0
        self.solves = 0
        self.busy_s = [0.0] * len(classes.weights)

    def start(self, kind: int, transfer_bytes: float) -> simpy.Event:
        """Begin a coflow of a class, each transfer of it moving so many bytes; the event fires at its end."""
        done = self._env.event()
        solo = self._classes.solo[kind]
        if transfer_bytes <= 0 or math.isinf(solo):
            return done.succeed()
        transfer = _Transfer(kind, transfer_bytes, done, self._env.now, self._env.now)
        number = self._next_id
        self._next_id += 1
        self._active[number] = transfer
        rows = self._classes.weights[kind]
        crowded = False
        for row in rows:
            users = self._on_row.setdefault(row, set())
            crowded = crowded or bool(users)
            users.add(number)
        if crowded:
            self._share(self._component(number))
        else:
            self._set_rate(number, solo)
        return done

    def _component(self, number: int) -> list[int]:
        seen, stack = {number}, [number]
        while stack:
            for row in self._classes.weights[self._active[stack.pop()].kind]:
                for other in self._on_row[row] - seen:
                    seen.add(other)
                    stack.append(other)
        return sorted(seen)

    def _share(self, numbers: Iterable[int]) -> None:
        members = list(numbers)
        members.sort(key=lambda number: (self._active[number].kind, number))
        kinds = tuple(self._active[number].kind for number in members)
        if kinds not in self._memo:
            self.solves += 1
            weights = self._classes.weights
            coflows = [{**weights[kind], -1 - i: 1.0} for i, kind in enumerate(kinds)]
            # A link of its own for each coflow, as thin as its solo rate, stands for the rows that were dropped.
            capacity = dict(enumerate(self._classes.capacity))
            capacity.update({-1 - i: self._classes.solo[kind] for i, kind in enumerate(kinds)})
            self._memo[kinds] = tuple(max_min_rates(coflows, capacity))
        for number, rate in zip(members, self._memo[kinds], strict=True):
            self._set_rate(number, rate)

    def _set_rate(self, number: int, rate: float) -> None:
        transfer = self._active[number]
        if rate == transfer.rate:
            return
        now = self._env.now
        transfer.left -= transfer.rate * (now - transfer.since)
        transfer.since, transfer.rate = now, rate
        transfer.generation += 1
        generation = transfer.generation
        timer = self._env.timeout(max(transfer.left, 0.0) / rate)
        timer.callbacks.append(lambda _: self._finish(number, generation))

    def _finish(self, number: int, generation: int) -> None:
        transfer = self._active.get(number)
        if transfer is None or transfer.generation != generation:
            return  # the rate changed since: a later timer ends it
        del self._active[number]
        self.busy_s[transfer.kind] += self._env.now - transfer.began
        touched: set[int] = set()
        for row in self._classes.weights[transfer.kind]:
            self._on_row[row].discard(number)
            touched |= self._on_row[row]
        transfer.done.succeed()
        while touched:
            component = self._component(min(touched))
            if len(component) == 1:
                self._set_rate(component[0], self._classes.solo[self._active[component[0]].kind])
            else:
                self._share(component)
            touched.difference_update(component)


@dataclass(slots=True)
class _Transfer:
    kind: int
    left: float
    done: simpy.Event
    began: float
    since: float
    rate: float = 0.0
    generation: int = 0
