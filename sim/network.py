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

from ..topology.hops import run_starts

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
    number = {link: i for i, link in enumerate(dict.fromkeys(link for weights in coflows for link in weights))}
    flow = [i for i, weights in enumerate(coflows) for _ in weights]
    link = [number[link] for weights in coflows for link in weights]
    weight = [value for weights in coflows for value in weights.values()]
    limits = np.array([float(capacity[link]) for link in number])
    rates = fair_rates(len(coflows), np.array(flow, np.int64), np.array(link, np.int64), np.array(weight), limits)
    return [float(rate) for rate in rates]


def fair_rates(flows: int, flow: Ints, link: Ints, weight: Floats, capacity: Floats) -> Floats:
    """The same over arrays: one entry of ``flow``, ``link`` and ``weight`` for each use of a link, ordered by flow.

    In each round every link that is the tightest of all links of all its flows is filled:
    those flows cannot be helped by anything else, so many links are settled at once and the
    result is that of filling the tightest link of all, one after another.

    Args:
        flows: How many there are.
        flow: Flow of each use, ascending.
        link: Link of each use, from 0 without gaps.
        weight: How much of the link's capacity the flow takes for each byte/s of its rate.
        capacity: Bytes/s of each link.
    """
    rates = np.full(flows, math.inf)
    left = capacity.astype(float)
    by_link = np.argsort(link, kind="stable")
    while len(flow):
        links = len(left)
        load = np.bincount(link, weight, minlength=links)
        fair = np.divide(left, load, out=np.full(links, math.inf), where=load > 0)
        opens = run_starts(flow)
        least = np.minimum.reduceat(fair[link], opens)  # of each flow over its links
        of_use = np.repeat(least, np.diff(np.append(opens, len(flow))))
        sorted_link = link[by_link]
        link_opens = run_starts(sorted_link)
        tightest = np.full(links, math.inf)
        tightest[sorted_link[link_opens]] = np.minimum.reduceat(of_use[by_link], link_opens)
        full = tightest >= fair
        stops = np.zeros(flows, dtype=bool)
        stops[flow[full[link]]] = True
        stopped = stops[flow[opens]]
        rates[flow[opens][stopped]] = least[stopped]
        done = stops[flow]
        left = np.maximum(left - np.bincount(link[done], weight[done] * of_use[done], minlength=links), 0.0)
        keep = ~done
        position = np.cumsum(keep) - 1
        by_link = position[by_link[keep[by_link]]]
        flow, link, weight = flow[keep], link[keep], weight[keep]
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
    # The uses come in long ordered runs, which a merging sort joins quickly.
    key_of_use = link * classes + class_of
    order = np.argsort(key_of_use, kind="stable")
    ordered = key_of_use[order]
    opens = run_starts(ordered)
    pair = ordered[opens]
    total = np.add.reduceat(weight[order], opens)
    pair_link, pair_class = pair // classes, pair % classes
    first = run_starts(pair_link)
    links = pair_link[first]
    # A link's pattern is the sum of one mixed number for each of its classes and weights, so that equal ones meet.
    pattern = np.add.reduceat(_mixed(pair_class.astype(np.uint64), total), first)
    patterns = np.unique(pattern)
    row_of = np.searchsorted(patterns, pattern)  # few patterns: quicker than np.unique's own inverse
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


def _mixed(class_of: npt.NDArray[np.uint64], weight: Floats) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each class and weight, all bits depending on all (the finaliser of splitmix64)."""
    mixed = np.round(weight * 2**20).astype(np.uint64) + class_of * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    finished: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return finished


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
        self._capacity = np.array(classes.capacity)
        self._solo = np.array(classes.solo)
        # Behind the rows of each class stands a link of its own, numbered in _solve.
        self._links = [np.array([*rows, 0], np.int64) for rows in classes.weights]
        self._weights = [np.array([*rows.values(), 1.0]) for rows in classes.weights]
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
            self._memo[kinds] = self._solve(kinds)
        for number, rate in zip(members, self._memo[kinds], strict=True):
            self._set_rate(number, rate)

    def _solve(self, kinds: tuple[int, ...]) -> tuple[float, ...]:
        link = np.concatenate([self._links[kind] for kind in kinds])
        weight = np.concatenate([self._weights[kind] for kind in kinds])
        lengths = np.array([len(self._links[kind]) for kind in kinds])
        flow = np.repeat(np.arange(len(kinds)), lengths)
        # A link of its own for each coflow, as thin as its solo rate, stands for the rows that were dropped.
        link[np.cumsum(lengths) - 1] = len(self._capacity) + np.arange(len(kinds))
        limits = np.concatenate([self._capacity, self._solo[list(kinds)]])
        load = np.bincount(link, weight * self._solo[list(kinds)][flow], minlength=len(limits))
        if (load <= limits).all():
            return tuple(self._solo[list(kinds)].tolist())
        used, link = np.unique(link, return_inverse=True)
        return tuple(fair_rates(len(kinds), flow, link, weight, limits[used]).tolist())

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
