"""Runs small models in many layouts on this host and writes docs/trained-layouts.md: what is right, and how fast.

``python -m exatwin.report.layout_runs`` takes some minutes; ``--only WORD`` runs the rows that hold a word, and prints
them instead of writing the page.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..scenarios.result import Measurement
from ..scenarios.scenario import load_scenario
from ..topology.errors import InputError, RunError
from ..topology.units import format_duration
from ..trainer.options import TrainOptions
from ..twin.train import train

PAGE = Path("docs/trained-layouts.md")
STEPS = 6
BASE = ("training.global_batch=8", "layout.micro_batch=1", "layout.pp=1", "layout.tp=1")
NEAR = 1e-4  # relative difference of a loss at which a layout counts as right: fp32 sums in another order, through Adam
SP = "tp=2 sequence_parallel=true"

DEGREES = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 4) if tp * pp * dp <= 8]
SEQUENCE_PARALLEL = {(2, 1, 2), (2, 2, 2), (2, 4, 1), (4, 1, 2)}  # about half of the rows with tp > 1

ROWS: tuple[tuple[str, str], ...] = (
    *(
        (
            "gpt-10m",
            f"tp={tp} pp={pp} dp={dp}" + (" sequence_parallel=true" if (tp, pp, dp) in SEQUENCE_PARALLEL else ""),
        )
        for tp, pp, dp in DEGREES
    ),
    ("gpt-10m", "dp=2 overlap_grad_reduce=true"),
    ("gpt-10m", "dp=2 zero=1"),
    ("gpt-10m", "pp=2 dp=4 zero=1"),
    ("gpt-10m", "dp=2 zero=2"),
    ("gpt-10m", "dp=2 zero=3"),
    ("gpt-10m", "dp=4 zero=3"),
    ("gpt-10m", "dp=4 zero=3 shard_group=2"),
    ("gpt-10m", "tp=2 dp=2 zero=3"),
    ("gpt-10m", "pp=2 dp=2 zero=3"),
    ("gpt-10m", "tp=2 pp=2 dp=2 zero=3 sequence_parallel=true"),
    ("gpt-10m", "pp=2 schedule=gpipe"),
    ("gpt-10m", "pp=2 vpp=2 schedule=interleaved"),
    ("gpt-10m", "pp=4 vpp=2 schedule=interleaved"),
    ("gpt-10m", "pp=2 schedule=zb-h1"),
    ("gpt-10m", "pp=4 dp=2 schedule=zb-h1"),
    ("gpt-10m", "pp=2 tp=2 dp=2 schedule=zb-h1 sequence_parallel=true"),
    ("gpt-10m", "pp=2 vpp=2 schedule=zb-v"),
    ("gpt-10m", "pp=4 vpp=2 dp=2 schedule=zb-v zero=1"),
    ("gpt-10m", "pp=2 vpp=2 schedule=dualpipe-v"),
    ("gpt-10m", "cp=2 cp_attention=ring"),
    ("gpt-10m", "cp=2 cp_attention=all_gather"),
    ("gpt-10m", "cp=2 cp_attention=all_to_all"),
    ("gpt-10m", f"cp=2 pp=2 {SP} cp_attention=ring"),
    ("gpt-10m", "dp=2 recompute=full"),
    ("gpt-10m", f"pp=2 {SP} recompute=selective"),
    ("llama-10m", f"pp=2 dp=2 {SP}"),
    ("llama-10m", "dp=4 zero=3"),
    ("moe-10m", "dp=2 ep=2"),
    ("moe-10m", f"dp=2 {SP} ep=2 zero=1"),
    ("gpt-25m", "pp=2 dp=2"),
    ("gpt-25m", f"{SP} dp=2 zero=1"),
    ("gpt-50m", "pp=2 vpp=2 schedule=zb-v"),
    ("gpt-50m", "dp=2 zero=3"),
)


@dataclass(frozen=True)
class LayoutRun:
    """One row: a layout, and what came of it."""

    model: str
    layout: str
    ranks: int
    measured: Measurement | None
    difference: float | None
    problem: str = ""

    @property
    def right(self) -> bool:
        """Whether it trains as one process does."""
        return self.difference is not None and self.difference <= NEAR


def run_layout(model: str, layout: str) -> tuple[int, Measurement | None, str]:
    """Train a model in a layout: ranks, the measurement, or why there is none."""
    words = layout.split()
    changes = [f"layout.{word}" for word in words]
    named = {
        word.partition("=")[0]: int(word.partition("=")[2]) for word in words if word.partition("=")[2].isdecimal()
    }
    dp = named.get("dp", 1)
    ranks = dp * named.get("tp", 1) * named.get("pp", 1) * named.get("cp", 1)
    fields = [f"model={model}", f"devices={ranks}", f"layout.dp={dp}", *BASE, *changes]
    try:
        scenario = load_scenario("local-gpt-10m", fields)
        trained = train(scenario, TrainOptions(steps=STEPS, device="cpu"))
    except (InputError, RunError) as error:
        return ranks, None, " ".join(str(error).split())
    return ranks, trained.measurement, ""


def difference(measured: Measurement, reference: Measurement) -> float:
    """The largest relative difference of a step's loss from that of the one-process run."""
    return max(
        abs(step.loss - other.loss) / abs(other.loss)
        for step, other in zip(measured.steps, reference.steps, strict=True)
    )


def run_all(rows: Iterable[tuple[str, str]]) -> list[LayoutRun]:
    """All rows, beside one-process runs of their models; tells stderr how far it is."""
    references: dict[str, Measurement | None] = {}
    found = []
    rows = list(rows)
    for number, (model, layout) in enumerate(rows, 1):
        if model not in references:
            _, references[model], problem = run_layout(model, "tp=1")
            if problem:
                print(f"{model} alone: {problem}", file=sys.stderr)
        ranks, measured, problem = run_layout(model, layout)
        reference = references[model]
        far = difference(measured, reference) if measured is not None and reference is not None else None
        found.append(LayoutRun(model, layout, ranks, measured, far, problem))
        print(f"{number}/{len(rows)} {row_text(found[-1])}", file=sys.stderr, flush=True)
    return found


HEAD = (
    "| model | layout | ranks | loss differs by | step | varies | tokens/s | compute | comm. | bubble | peak MiB |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def row_text(run: LayoutRun) -> str:
    """One row of the table."""
    start = f"| {run.model} | {run.layout} | {run.ranks} |"
    measured = run.measured
    if measured is None or run.difference is None:
        return f"{start} {run.problem or 'no run of one process'} | | | | | | | |"
    parts, total = measured.breakdown_s, measured.breakdown_s.total
    sent = parts.tp_comm + parts.pp_comm + parts.dp_comm + parts.cp_comm + parts.ep_comm
    work = parts.compute + parts.recompute + parts.optimizer
    shares = " | ".join(f"{100 * part / total:.0f} %" for part in (work, sent, parts.bubble))
    wrong = "" if run.right else " WRONG"
    return (
        f"{start} {run.difference:.0e}{wrong} | {format_duration(measured.step_s)} | {measured.spread_s.cv:.0%} | "
        f"{measured.tokens_per_s:,.0f} | {shares} | {measured.memory.worst.peak_bytes / 2**20:,.0f} |"
    )


def page_text(runs: Sequence[LayoutRun], date: str) -> str:
    """The page."""
    measured = [run.measured for run in runs if run.measured is not None]
    environment = measured[0].environment if measured else {}
    loads = [load for one in measured for load in one.environment.get("hosts", {}).values() if load is not None]
    right = sum(run.right for run in runs)
    load = f"between {min(loads):.1f} and {max(loads):.1f}" if loads else "unknown"
    return "\n".join(
        [
            "# Layouts trained on one host",
            "",
            "Made by `make train-table`, which trains each row and writes this page. Each layout is a run of its own: "
            f"{STEPS} steps of 8 sequences of 128 tokens from the source of Python's standard library, in fp32.",
            "",
            f"Host: {environment.get('cores')} cores, torch {environment.get('torch')}, {environment.get('backend')}, "
            f"one thread a rank; load average {load}; {date}. More ranks than cores share them, so that their steps "
            "are slower than those of a machine with a core for each: the columns say what such a host does, not what "
            "the layout is worth elsewhere.",
            "",
            "- **loss differs by**: the largest relative difference of any step's loss from that of one process with "
            f"the same seed and data; above {NEAR:.0e} it is marked WRONG. {right} of {len(runs)} rows are right.",
            "- **step**: median of the steps past the warm-up; **varies**: their coefficient of variation.",
            "- **compute**, **comm.** (waiting for messages and collectives) and **bubble** (waiting for another "
            "stage or rank) are shares of the busiest rank's step.",
            "- **peak MiB**: of the worst rank, above what a process takes before its model.",
            "",
            *HEAD,
            *(row_text(run) for run in runs),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Run the rows and write the page; 1 where one is wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments and arguments[0] == "--only":
        runs = run_all(row for row in ROWS if all(word in " ".join(row) for word in arguments[1:]))
        print("\n".join([*HEAD, *map(row_text, runs)]))
    else:
        runs = run_all(ROWS)
        PAGE.write_text(page_text(runs, datetime.date.today().isoformat()), encoding="utf-8")
        print(PAGE)
    return 0 if all(run.right for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
