"""Published measurements: what was run, where it says so, and what this project uses it for.

The rows are CSV files under ``validation/``. Each names a bundled scenario and
the fields that differ from it, so that a prediction can be set beside it.
``use`` keeps a fit honest: a row is ``fit`` (a calibration saw it), ``unseen``
(accuracy is quoted on it), or ``context`` (neither; its note says why).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, cast, get_args

from ..topology.errors import input_error, nearest
from .reading import PACKAGE
from .scenario import Scenario, load_scenario

Use = Literal["fit", "unseen", "context"]

MIB = 2**20


@dataclass(frozen=True)
class MeasuredRun:
    """One published run; None where the source does not say.

    Attributes:
        id: The row's own name.
        source: Key in docs/sources.md; ``where`` is the place in that source.
        scenario: Bundled scenario that asks the same; empty where none can.
        overrides: Fields that differ from it, as ``--set`` takes them.
        step_s: Seconds of one step, warm-up left out.
        tflops_hardware: 1e12 FLOP/s of one device, recomputation counted, as the source counts.
        tokens_per_s: Of all devices.
    """

    id: str
    source: str
    where: str
    scenario: str
    overrides: tuple[str, ...]
    devices: int | None
    step_s: float | None
    tflops_hardware: float | None
    tokens_per_s: float | None
    use: Use
    note: str

    def ask(self) -> Scenario:
        """The scenario of this run.

        Raises:
            InputError: If no scenario can ask it.
        """
        if not self.scenario:
            raise input_error("no bundled scenario describes this run", where=self.id)
        return load_scenario(self.scenario, self.overrides)


@dataclass(frozen=True)
class MeasuredStageMemory:
    """Memory of one pipeline stage of a published run, in bytes; None where the source does not say.

    Attributes:
        run: The row's name in `measured_runs`; scenario and overrides are those of that run.
        allocated_bytes: What stays allocated between steps.
        max_allocated_bytes: The framework's peak.
        reserved_bytes: What its allocator held.
    """

    run: str
    source: str
    where: str
    stage: int
    allocated_bytes: float | None
    max_allocated_bytes: float
    reserved_bytes: float | None
    use: Use
    note: str


@dataclass(frozen=True)
class MeasuredCollective:
    """One kind of communication, timed inside a published run.

    Attributes:
        scenario: Bundled scenario that asks the same; ``overrides`` are the fields that differ from it.
        group: ``tp``, ``pp``, ``dp``, ``embedding``, or empty where the log leaves it open.
        ranks: Members of the group; None where open.
        size_bytes: The message as the log prints it, rounded there.
        median_s: Over the calls of one rank; ``min_s`` is the least disturbed of them.
    """

    id: str
    source: str
    where: str
    scenario: str
    overrides: tuple[str, ...]
    nodes: int
    op: str
    group: str
    ranks: int | None
    size_bytes: float
    median_s: float
    min_s: float
    calls: int
    use: Use
    note: str

    def ask(self) -> Scenario:
        """The scenario of the run that it was timed in."""
        return load_scenario(self.scenario, self.overrides)


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """All published runs, in the order of their files."""
    return tuple(
        MeasuredRun(
            id=row["id"],
            source=row["source"],
            where=row["where"],
            scenario=row["scenario"],
            overrides=_overrides(row),
            devices=int(row["devices"]) if row["devices"] else None,
            step_s=_number(row["step_s"]),
            tflops_hardware=_number(row["tflops_hardware"]),
            tokens_per_s=_number(row["tokens_per_s"]),
            use=_use(row),
            note=row["note"],
        )
        for row in _rows("runs.csv")
    )


def measured_run(run_id: str) -> MeasuredRun:
    """A published run by its id.

    >>> measured_run("lumi-175b-128gcd").step_s
    346.65

    Raises:
        InputError: If there is none of that name.
    """
    by_id = {run.id: run for run in measured_runs()}
    if run_id not in by_id:
        raise input_error(f"no published run has the id {run_id!r}{nearest(run_id, by_id)}", field="measured")
    return by_id[run_id]


@cache
def measured_stage_memory() -> tuple[MeasuredStageMemory, ...]:
    """Memory of the stages of published runs."""
    return tuple(
        MeasuredStageMemory(
            run=row["id"],
            source=row["source"],
            where=row["where"],
            stage=int(row["stage"]),
            allocated_bytes=_number(row["allocated_mib"], MIB),
            max_allocated_bytes=float(row["max_allocated_mib"]) * MIB,
            reserved_bytes=_number(row["reserved_mib"], MIB),
            use=_use(row),
            note=row["note"],
        )
        for row in _rows("memory.csv")
    )


@cache
def measured_collectives() -> tuple[MeasuredCollective, ...]:
    """Communication timed inside published runs."""
    return tuple(
        MeasuredCollective(
            id=row["id"],
            source=row["source"],
            where=row["where"],
            scenario=row["scenario"],
            overrides=_overrides(row),
            nodes=int(row["nodes"]),
            op=row["op"],
            group=row["group"],
            ranks=int(row["ranks"]) if row["ranks"] else None,
            size_bytes=float(row["size_bytes"]),
            median_s=float(row["median_us"]) * 1e-6,
            min_s=float(row["min_us"]) * 1e-6,
            calls=int(row["calls"]),
            use=_use(row),
            note=row["note"],
        )
        for row in _rows("collectives.csv")
    )


@dataclass(frozen=True)
class MeasuredBenchmark:
    """One collective or message timed by a benchmark, alone on its machine.

    Attributes:
        series: Rows of one table; they share one system, group and software.
        machine: A bundled machine, or the path of a machine file of the validation.
        calibration: The figures that a prediction uses.
        ranks_per_node: Devices of each node that take part; on Fugaku, processes that share it.
        groups: ``whole`` for one group of all, ``rails`` for one group for each place in a node, all at once.
        size_bytes: The whole buffer, as the simulation counts it.
    """

    id: str
    series: str
    source: str
    where: str
    machine: str
    calibration: str
    nodes: int
    ranks_per_node: int
    groups: Literal["whole", "rails"]
    op: str
    library: str
    size_bytes: float
    time_s: float
    use: Use
    note: str


@cache
def measured_benchmarks() -> tuple[MeasuredBenchmark, ...]:
    """Published collective benchmarks.

    Which rows a fit may see follows a rule, not the outcome: of one series a system, the sizes that
    are powers of 32 (1 KiB, 32 KiB, 1 MiB, 32 MiB, 1 GiB) and the largest; of every series of NCCL
    that begins below 64 KiB, its first row, for what the host adds to each call; of the all-reduces
    of Fugaku 8 B, 256 KiB and 4 MiB on the fewest and the most nodes; of LUMI what the whole-run
    fit saw; of the rings of H200, eight ranks; and the rows that a calibration reads a share off,
    1 GiB on 8 A100 (vTrain) and on 64 H100. Messages under 1 KiB of NCCL are context otherwise.
    No figure was fitted on an ``unseen`` row, but the form of the model (which algorithm a library
    takes where its rule is not published, what overlaps, what a pipeline of pieces costs) was
    settled with all rows in view.
    """
    folder = resources.files(PACKAGE) / "validation" / "collectives"
    rows = []
    for name in ("nccl.csv", "rccl.csv", "mpi.csv"):
        for row in csv.DictReader(io.StringIO((folder / name).read_text(encoding="utf-8"))):
            machine = row["machine"]
            rows.append(
                MeasuredBenchmark(
                    id=row["id"],
                    series=row["series"],
                    source=row["source"],
                    where=row["where"],
                    machine=str(folder / f"{machine.split('/')[1]}.yaml") if "/" in machine else machine,
                    calibration=row["calibration"],
                    nodes=int(row["nodes"]),
                    ranks_per_node=int(row["ranks_per_node"]),
                    groups="rails" if row["groups"] == "rails" else "whole",
                    op=row["op"],
                    library=row["library"],
                    size_bytes=float(row["size_bytes"]),
                    time_s=float(row["time_us"]) * 1e-6,
                    use=_use(row),
                    note=row["note"],
                )
            )
    return tuple(rows)


def _rows(name: str) -> list[dict[str, str]]:
    """The rows of that file in every folder of ``validation/``."""
    rows = []
    root = resources.files(PACKAGE) / "validation"
    for folder in sorted(root.iterdir(), key=lambda entry: entry.name):
        file = folder / name
        if file.is_file():
            rows += list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    return rows


def _overrides(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part for part in row["set"].split(";") if part)


def _number(text: str, scale: float = 1.0) -> float | None:
    return float(text) * scale if text else None


def _use(row: Mapping[str, str]) -> Use:
    if row["use"] not in get_args(Use):
        raise ValueError(f"{row['id']}: use is {row['use']!r}")
    return cast(Use, row["use"])
