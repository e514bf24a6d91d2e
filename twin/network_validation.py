"""The network beside measurements: collectives and messages that benchmarks timed.

``validate_network`` predicts every published row with the bundled calibrations;
``fit_network`` makes the fitted figures again from the rows of use ``fit``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..scenarios.measurements import MeasuredBenchmark, Use, measured_benchmarks
from ..sim.calibration import NetworkFigures, load_calibration
from ..sim.communicate import CollectiveTime, collective_s
from ..topology.facts import Fact
from ..topology.machine import load_machine
from ..topology.routing import Routes

MIB = 2**20

BOUNDS = {"large": 0.10, "small": 0.25}
"""Median error that unseen rows are to keep to: messages from 1 MiB on, and below."""


@dataclass(frozen=True)
class NetworkRow:
    """One benchmark row, seconds, and its prediction.

    Attributes:
        ratio: Predicted over measured.
    """

    id: str
    series: str
    machine: str
    op: str
    algorithm: str
    protocol: str
    size_bytes: float
    measured: float
    predicted: float
    use: Use
    source: str

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def size_class(self) -> str:
        """``large`` from 1 MiB on, else ``small``."""
        return "large" if self.size_bytes >= MIB else "small"


@dataclass(frozen=True)
class NetworkSummary:
    """Relative errors of a group of rows."""

    machine: str
    op: str
    size_class: str
    use: Use
    rows: int
    median: float
    worst: float
    bias: float


@dataclass(frozen=True)
class NetworkValidation:
    """All rows that were predicted, in the order of their files."""

    rows: tuple[NetworkRow, ...]

    def summaries(self, by: str = "machine") -> tuple[NetworkSummary, ...]:
        """Errors by size class and use, and by ``machine``, ``op`` (of each machine) or ``all``."""
        groups: dict[tuple[str, str, str, Use], list[float]] = {}
        for row in self.rows:
            machine = "all" if by == "all" else row.machine
            key = (machine, row.op if by == "op" else "all", row.size_class, row.use)
            groups.setdefault(key, []).append(row.ratio - 1)
        return tuple(
            NetworkSummary(
                *key,
                rows=len(errors),
                median=statistics.median(map(abs, errors)),
                worst=max(errors, key=abs),
                bias=statistics.fmean(errors),
            )
            for key, errors in groups.items()
        )

    @property
    def within(self) -> bool:
        """Whether the median errors of all unseen rows keep to their bounds."""
        unseen = [summary for summary in self.summaries("all") if summary.use == "unseen"]
        return all(summary.median <= BOUNDS[summary.size_class] for summary in unseen)


def validate_network(figures: Mapping[str, NetworkFigures] | None = None) -> NetworkValidation:
    """Predict every row that is not context.

    Args:
        figures: In place of those of the bundled calibrations, by its name.
    """
    calls: dict[str, float] = {}
    rows = []
    for row in measured_benchmarks():
        if row.use == "context":
            continue
        own = _of_system(row, (figures or {}).get(row.calibration) or load_calibration(row.calibration).network)
        if row.series not in calls:
            calls[row.series] = _call_s(row, own)
        time = predict_benchmark(row, own)
        rows.append(
            NetworkRow(
                id=row.id,
                series=row.series,
                machine=_machine(row.machine).name,
                op=row.op,
                algorithm=time.algorithm,
                protocol=time.protocol,
                size_bytes=row.size_bytes,
                measured=row.time_s,
                predicted=calls[row.series] + time.seconds,
                use=row.use,
                source=row.source,
            )
        )
    return NetworkValidation(tuple(rows))


def predict_benchmark(row: MeasuredBenchmark, figures: NetworkFigures) -> CollectiveTime:
    """The network's part of a row."""
    machine = _machine(row.machine)
    node = np.arange(row.nodes) * machine.devices_per_node
    if machine.devices_per_node == 1:
        groups = np.repeat(node, row.ranks_per_node)[np.newaxis]
    elif row.groups == "rails":
        groups = np.arange(row.ranks_per_node)[:, np.newaxis] + node
    else:
        groups = (node[:, np.newaxis] + np.arange(row.ranks_per_node)).reshape(1, -1)
    algorithm = "ring" if row.library == "NCCL ring" else None
    return collective_s(row.op, row.size_bytes, groups, _routes(row.machine, row.nodes), figures, algorithm)


SYSTEM_FABRIC_FILL_S = {"aws-p4de": 122e-6, "aws-p5": 75e-6}
"""What EFA costs a pipeline between nodes (`fabric_fill`), a system; InfiniBand's rows show none."""


def _of_system(row: MeasuredBenchmark, figures: NetworkFigures, fill_s: float | None = None) -> NetworkFigures:
    name = _machine(row.machine).name
    if name not in SYSTEM_FABRIC_FILL_S:
        return figures
    fact = Fact[float](
        value=fill_s or SYSTEM_FABRIC_FILL_S[name], source="exatwin-fit", at=f"rows on {name} of use fit"
    )
    return figures.model_copy(update={"fabric_fill": fact})


@cache
def _machine(name: str) -> Any:
    return load_machine(name)


@cache
def _routes(machine: str, nodes: int) -> Routes:
    return Routes(_machine(machine), nodes)


# The series that gives a calibration's host cost of a call to those that begin too large to show their own.
_REFERENCE = {"a100-nccl": "a100-8-azure", "h100-nccl": "h100-8-azure"}


def _call_s(row: MeasuredBenchmark, figures: NetworkFigures) -> float:
    """What the host adds to each call of a series, read off its first row of use ``fit``.

    A benchmark starts each call from an idle host; a training step queues its calls ahead and hides this.
    """
    if row.calibration not in _REFERENCE:
        return 0.0
    rows = measured_benchmarks()
    for series in (row.series, _REFERENCE[row.calibration]):
        first = min((other for other in rows if other.series == series), key=lambda other: other.size_bytes)
        if first.size_bytes < 65536:
            return max(first.time_s - predict_benchmark(first, figures).seconds, 0.0)
    return 0.0


@dataclass(frozen=True)
class NetworkFit:
    """Figures that were fitted, by dotted path, in the calibration's units, and what is left over on the rows."""

    calibration: str
    figures: dict[str, float]
    residuals: dict[str, float]


FITTED: dict[str, dict[str, tuple[str, ...]]] = {
    "h100-nccl": {"h100-8-azure": ("fill", "switch.share")},
    "a64fx-tofud": {
        "fugaku-pingpong": ("eager.start", "eager.fill"),
        "fugaku-allreduce": ("gates.base", "gates.hop", "reduce.rate", "reduce.segment"),
    },
}
"""Figures fitted on the rows of use ``fit`` of the series whose names begin so."""


# What a pipeline of pieces and the switch reach shows in large messages; in small ones the latencies hide it.
_FROM = {"h100-nccl": 32 * MIB}


def fit_network(calibration: str) -> NetworkFit:
    """Make the fitted figures of a calibration again: least squares of the logarithms of the ratios.

    Needs SciPy.
    """
    from scipy.optimize import minimize

    figures = load_calibration(calibration).network
    found: dict[str, float] = {}
    residuals: dict[str, float] = {}
    for series, paths in FITTED[calibration].items():
        rows = [
            row
            for row in measured_benchmarks()
            if row.use == "fit" and row.series.startswith(series) and row.size_bytes >= _FROM.get(calibration, 0)
        ]
        start = np.log([_read(figures, path) for path in paths])

        def with_values(
            logs: Sequence[float], paths: tuple[str, ...] = paths, base: NetworkFigures = figures
        ) -> NetworkFigures:
            for path, value in zip(paths, np.exp(logs), strict=True):
                base = _changed(base, path, float(value))
            return base

        def ratios(
            logs: Sequence[float],
            rows: list[MeasuredBenchmark] = rows,
            make: Callable[[Sequence[float]], NetworkFigures] = with_values,
        ) -> dict[str, float]:
            own = make(logs)
            return {row.id: (_call_s(row, own) + predict_benchmark(row, own).seconds) / row.time_s for row in rows}

        def cost(logs: Sequence[float], ratios: Callable[[Sequence[float]], dict[str, float]] = ratios) -> float:
            return float(sum(np.log(ratio) ** 2 for ratio in ratios(logs).values()))

        best = minimize(cost, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6, "maxiter": 400})
        figures = with_values(best.x)
        found |= dict(zip(paths, np.exp(best.x).tolist(), strict=True))
        residuals |= {name: ratio - 1 for name, ratio in ratios(best.x).items()}
    return NetworkFit(calibration, found, residuals)


def fit_system_fill(system: str) -> float:
    """Make a value of `SYSTEM_FABRIC_FILL_S` again, from that system's rows of use ``fit``. Needs SciPy."""
    from scipy.optimize import minimize_scalar

    rows = [row for row in measured_benchmarks() if row.use == "fit" and _machine(row.machine).name == system]

    def cost(log_fill: float) -> float:
        total = 0.0
        for row in rows:
            own = _of_system(row, load_calibration(row.calibration).network, float(np.exp(log_fill)))
            total += float(np.log((_call_s(row, own) + predict_benchmark(row, own).seconds) / row.time_s) ** 2)
        return total

    return float(np.exp(minimize_scalar(cost, bounds=(np.log(1e-6), np.log(1e-3)), method="bounded").x))


def _read(part: Any, path: str) -> float:
    for name in path.split("."):
        part = getattr(part, name)
    return float(part.value)


def _changed(figures: NetworkFigures, path: str, value: float) -> NetworkFigures:
    head, _, rest = path.partition(".")
    part = getattr(figures, head)
    if rest:
        fact = getattr(part, rest)
        part = part.model_copy(update={rest: fact.model_copy(update={"value": value})})
    else:
        part = part.model_copy(update={"value": value})
    return figures.model_copy(update={head: part})
