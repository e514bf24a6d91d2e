"""Writes the table of docs/trained-layouts.md: ``make train-table``.

Every row is a run on this host, so the page holds what one host measured on one day; the tests hold its form, and run
a few rows.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ..scenarios.model import load_model
from ..topology.units import format_duration
from ..twin.layout_runs import GLOBAL_BATCH, SEQ_LEN, WITHIN, RunOutcome, run_layouts
from .progress import progress_on

PAGE = Path(__file__).parents[1] / "docs" / "trained-layouts.md"
BLOCK = re.compile(r"(<!-- written by make train-table -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = (
    "model",
    "layout",
    "ranks",
    "micro-batches",
    "right",
    "first loss",
    "third loss",
    "norm",
    "step",
    "cv",
    "tokens/s",
    "compute",
    "comm.",
    "bubble",
    "peak MiB",
)
WORDS = {
    "sequence_parallel=true": "sequence parallel",
    "overlap_grad_reduce=true": "gradients reduced beside the backward (DDP)",
    "schedule": "",
    "cp_attention": "",
    "recompute": "recompute",
    "shard_group": "groups of",
}


def layout_runs_markdown(outcomes: Sequence[RunOutcome], when: str) -> str:
    """The rows as Markdown: how they came about, the table, and what failed.

    Args:
        outcomes: The rows.
        when: Date, host and load, in words.
    """
    failed = [outcome for outcome in outcomes if outcome.measured is None]
    compared = [outcome for outcome in outcomes if not outcome.alone and outcome.differences is not None]
    right = sum(outcome.right for outcome in compared)
    worst = max((max(outcome.differences) for outcome in compared if outcome.differences), default=0.0)
    lines = [
        when,
        "",
        f"{len(outcomes)} runs of {GLOBAL_BATCH} sequences of {SEQ_LEN} tokens a step in fp32. {right} of the "
        f"{len(compared)} that are held against one process are right within {WITHIN:g}; the largest difference is "
        f"{worst:.1e}. {len(failed)} failed.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * 2}{'---:|' * (len(COLUMNS) - 2)}",
        *(f"| {' | '.join(_cells(outcome))} |" for outcome in outcomes),
        "",
    ]
    if failed:
        lines += ["What failed:", ""]
        lines += [f"- {outcome.run.model}, {_layout(outcome)}: {_plain(outcome.reason)}" for outcome in failed]
        lines.append("")
    return "\n".join(lines)


def _cells(outcome: RunOutcome) -> list[str]:
    run, measured = outcome.run, outcome.measured
    head = [run.model, _layout(outcome), str(outcome.ranks), str(GLOBAL_BATCH // run.dp // run.micro_batch)]
    if measured is None:
        return [*head, "failed", *["-"] * (len(COLUMNS) - len(head) - 1)]
    if outcome.alone:
        right = ["reference", *(f"{value:.4f}" for value in _values(outcome))]
    elif outcome.differences is None:
        right = ["no reference", "-", "-", "-"]
    else:
        right = ["yes" if outcome.right else "NO", *(f"{value:.1e}" if value else "0" for value in outcome.differences)]
    parts, spread = measured.breakdown_s, measured.spread_s
    communication = parts.tp_comm + parts.pp_comm + parts.dp_comm + parts.cp_comm + parts.ep_comm
    shares = [(parts.compute + parts.recompute), communication, parts.bubble]
    return [
        *head,
        *right,
        format_duration(measured.step_s),
        f"{100 * spread.cv:.0f} %",
        f"{measured.tokens_per_s:,.0f}",
        *(f"{100 * part / parts.total:.0f} %" for part in shares),
        f"{max(rank.peak_bytes for rank in measured.ranks) / 2**20:,.0f}",
    ]


def _values(outcome: RunOutcome) -> tuple[float, float, float]:
    assert outcome.measured is not None
    steps = outcome.measured.steps
    return steps[0].loss, steps[2].loss, steps[0].gradient_norm or 0.0


def _layout(outcome: RunOutcome) -> str:
    """A row's layout in few words.

    >>> from exatwin.twin.layout_runs import LayoutRun
    >>> _layout(RunOutcome(LayoutRun("gpt-10m", "pp=2 vpp=2 schedule=zb-v", 2, 1), 4, None))
    'pp 2, vpp 2, zb-v, dp 2'
    >>> _layout(RunOutcome(LayoutRun("gpt-10m", "", 1, 4), 1, None))
    'one process'
    """
    words = []
    for word in outcome.run.layout.split():
        key, _, value = word.partition("=")
        words.append(WORDS[word] if word in WORDS else f"{WORDS.get(key, key)} {value.replace('_', '-')}".strip())
    words += [f"dp {outcome.run.dp}"] if outcome.run.dp > 1 else []
    return ", ".join(words) or "one process"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _host(began: str, loads: Sequence[float], seconds: float) -> str:
    parameters = ", ".join(
        f"{name} {load_model(name).parameters(1, SEQ_LEN).total / 1e6:.1f}M"
        for name in ("gpt-10m", "llama-10m", "moe-10m", "gpt-25m", "gpt-50m")
    )
    return (
        f"Measured on {began} on {_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {metadata.version('torch')}, gloo over loopback, one thread a "
        f"rank, in {seconds / 60:.0f} minutes. Other work ran on the host: the load average was between "
        f"{min(loads):.1f} and {max(loads):.1f}. Parameters: {parameters}."
    )


def _processor() -> str:
    """The processor's name, where the kernel tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "an unknown processor"


def with_runs(page: str, text: str) -> str:
    """The page with its table replaced.

    >>> with_runs("<!-- written by make train-table -->\\nold\\n<!-- end -->", "new\\n")
    '<!-- written by make train-table -->\\nnew\\n<!-- end -->'
    """
    return BLOCK.sub(lambda found: f"{found[1]}{text}{found[2]}", page)


def main() -> None:
    """Train every layout, and write the page."""
    began, clock = datetime.datetime.now(datetime.UTC).date().isoformat(), time.monotonic()
    loads = [os.getloadavg()[0]]

    def note(text: str) -> None:
        loads.append(os.getloadavg()[0])
        print(text, file=sys.stderr, flush=True)

    with progress_on(sys.stderr, "training layouts") as progress:
        outcomes = run_layouts(told=progress, note=note)
    host = _host(began, loads, time.monotonic() - clock)
    PAGE.write_text(with_runs(PAGE.read_text(encoding="utf-8"), layout_runs_markdown(outcomes, host)), encoding="utf-8")


if __name__ == "__main__":
    main()
