"""A real run for people: its progress while it goes on, and what was measured, on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Group, RenderableType
from rich.text import Text

from ..topology.units import format_bytes, format_duration
from .tables import PARTS
from .terminal import Screen, bar, indented, plain_table, spaced
from .words import layout_words, parameter_words, percent, tera

if TYPE_CHECKING:
    from ..scenarios.result import Breakdown, Measurement
    from ..scenarios.scenario import Scenario
    from ..trainer.worker import StepNews

EVERY_S = 10.0  # between lines where the stream is no terminal


@contextmanager
def training_on(
    stream: TextIO, *, quiet: bool = False
) -> Iterator[tuple[Callable[[StepNews], None], Callable[[str], None]]]:
    """Two functions: one is told of steps, one of what people should know.

    On a terminal a bar shows loss, tokens/s, memory and the time left; elsewhere a line comes now and then.
    """
    if quiet:
        yield (lambda news: None), (lambda text: None)
        return
    if not stream.isatty():
        last = [0.0]

        def line(news: StepNews) -> None:
            now = time.monotonic()
            if now - last[0] >= EVERY_S or news.step + 1 == news.steps:
                last[0] = now
                print(news_words(news), file=stream, flush=True)

        yield line, lambda text: print(text, file=stream, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("starting the ranks", total=None)
        yield (
            lambda news: progress.update(task, description=news_words(news), total=news.steps, completed=news.step + 1),
            lambda text: progress.console.print(text, markup=False, highlight=False),
        )


def news_words(news: StepNews) -> str:
    """One step in a line."""
    return (
        f"step {news.step + 1}/{news.steps}  loss {news.loss:.4f}  {news.tokens_per_s:,.0f} tokens/s  "
        f"{format_bytes(news.memory_bytes)}"
    )


def measurement_view(measured: Measurement, scenario: Scenario, screen: Screen) -> RenderableType:
    """Everything a run measured, for people."""
    sections = [
        _header(measured, scenario),
        _answer(measured, scenario),
        _breakdown(measured.breakdown_s, measured.slowest_stage, screen),
        _communication(measured, screen),
        _memory(measured, screen),
        Group(*(Text(f"warning: {warning}", style="yellow") for warning in measured.warnings))
        if measured.warnings
        else None,
    ]
    return Group(*spaced(sections))


def _header(measured: Measurement, scenario: Scenario) -> RenderableType:
    training, layout = scenario.training, scenario.layout
    size = parameter_words(scenario.model.parameters(layout.tp, training.seq_len).total)
    environment = measured.environment
    hosts = environment.get("hosts", {})
    loads = [load for load in hosts.values() if load is not None]
    where = f"{scenario.devices} ranks on {len(hosts)} host{'s' if len(hosts) != 1 else ''}"
    load = f", load {max(loads):.1f} on {environment.get('cores')} cores" if loads else ""
    lines = [
        f"{scenario.model.name}, {size} parameters",
        layout_words(scenario),
        f"{training.global_batch:,} sequences of {training.seq_len:,} tokens = micro-batch {layout.micro_batch} x "
        f"{scenario.micro_batches:,} micro-batches x dp {layout.dp}",
        f"{where}: torch {environment.get('torch')}, {environment.get('backend')}{load}",
    ]
    return Group(Text(scenario.name, style="bold"), *(indented(line) for line in lines))


def _answer(measured: Measurement, scenario: Scenario) -> RenderableType:
    spread, steps = measured.spread_s, measured.steps
    word = scenario.machine.device.word
    table = plain_table("", "measured")
    rows = [
        ("step", format_duration(measured.step_s)),
        ("tokens/s", f"{measured.tokens_per_s:,.0f}"),
        (f"model TFLOP/s a {word}", tera(measured.tflops_per_device.model)),
        ("loss, first step", f"{steps[0].loss:.4f}"),
        ("loss, last step", f"{steps[-1].loss:.4f}"),
        ("wait for data", format_duration(measured.data_s)),
    ]
    if measured.noise_scale is not None:
        rows.append(("gradient noise scale, sequences", f"{measured.noise_scale:,.1f}"))
    if measured.profiler_overhead is not None:
        rows.append(("profiled steps were slower by", percent(measured.profiler_overhead)))
    for row in rows:
        table.add_row(*row)
    counted = sum(step.counted for step in steps)
    note = (
        f"median of {counted} of {len(steps)} steps ({measured.warmup_steps} of warm-up); 80 % of them within "
        f"{format_duration(spread.p10)} to {format_duration(spread.p90)}, they vary by {spread.cv:.1%}"
    )
    return Group(table, indented(note, "dim"))


def _breakdown(parts: Breakdown, slowest_stage: int, screen: Screen) -> RenderableType:
    table = plain_table("where the step goes", "time", "share", *([" "] if screen.roomy else []), left=(" ",))
    total = parts.total
    for key, name in PARTS.items():
        seconds = getattr(parts, key)
        if seconds <= 0:
            continue
        cells: list[RenderableType] = [name, format_duration(seconds), percent(seconds / total)]
        if screen.roomy:
            cells.append(Text(bar(seconds / total, screen.width - 56, screen.unicode), style="blue"))
        table.add_row(*cells)
    note = f"the busiest rank, of stage {slowest_stage}; communication as far as it waited; the parts sum to the step"
    return Group(table, indented(note, "dim"))


def _communication(measured: Measurement, screen: Screen) -> RenderableType | None:
    if not measured.comm:
        return None
    columns = ("times", "bytes each", "busy", "exposed") if screen.roomy else ("times", "bytes each", "exposed")
    table = plain_table("communication", *columns)
    for record in measured.comm:
        table.add_row(
            f"{record.group} {record.op.replace('_', '-')}",
            f"{record.count:,}",
            format_bytes(record.bytes / record.count if record.count else 0.0),
            *([format_duration(record.busy_s)] if screen.roomy else []),
            format_duration(record.exposed_s),
        )
    return Group(table, indented("that rank in one step; bytes are what it sends", "dim"))


def _memory(measured: Measurement, screen: Screen) -> RenderableType:
    columns = ("weights", "grads", "optim.", "activ.") if screen.roomy else ()
    table = plain_table("memory, stage", "peak", *columns, whole=True)
    for stage in measured.memory.stages:
        held = stage.parts
        parts = (held.parameters, held.gradients, held.optimizer, held.activations)
        table.add_row(
            f"{stage.stage}", format_bytes(stage.peak_bytes), *(format_bytes(value) for value in parts[: len(columns)])
        )
    note = "the rank of each stage with the highest peak, above what a process takes before its model"
    return Group(table, indented(note, "dim"))
