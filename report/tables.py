"""One prediction on one screen, beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from .._version import __version__
from ..topology.units import format_bytes, format_duration
from .terminal import Screen, bar, indented, plain_table, spaced
from .words import (
    device_words,
    difference,
    gib,
    layout_words,
    parameter_words,
    percent,
    perturbation_words,
    placement_words,
    tera,
    token_words,
)

if TYPE_CHECKING:
    from ..scenarios.result import Breakdown, CommRecord, LinkLoad, Memory, Prediction, StageMemory
    from ..scenarios.scenario import Scenario
    from .published import Published

MOST_STAGES = 5  # rows of the memory table
MOST_LINKS = 4  # rows of the links' table
MOST_PERTURBATIONS = 4  # named in the header

PARTS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_comm": "tensor parallel",
    "pp_comm": "pipeline sends",
    "dp_comm": "data parallel",
    "cp_comm": "context parallel",
    "ep_comm": "expert parallel",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "host work",
}
VERDICT_STYLES = {"fits": "bold green", "marginal": "bold yellow", "does not fit": "bold red"}


def prediction_view(
    prediction: Prediction, scenario: Scenario, published: Published | None, screen: Screen
) -> RenderableType:
    """Everything a prediction says, for people.

    Args:
        prediction: The answer.
        scenario: The question it answers.
        published: The published run to stand beside it.
        screen: Where it is shown; a narrow one loses bars and the lesser columns, never a row.
    """
    sections = [
        _header(prediction, scenario),
        _answer(prediction, scenario, published, screen),
        _breakdown(prediction.breakdown_s, prediction.slowest_stage, screen),
        _communication(prediction.comm, screen),
        _links(prediction.links, screen),
        _memory(prediction.memory, published, screen),
        _campaign(prediction, scenario),
        _warnings(prediction.warnings),
    ]
    return Group(*spaced(sections))


def prediction_document(prediction: Prediction, scenario: Scenario) -> dict[str, Any]:
    """The document of a prediction, with what the view says of the ranks' places and of what is perturbed."""
    return {
        **prediction.document(__version__),
        "placement": placement_words(scenario),
        "perturbed": perturbation_words(scenario),
    }


def shown_stages(memory: Memory, most: int = MOST_STAGES) -> list[StageMemory]:
    """The first, the worst, the last stage and every k-th between, so that the table stays on one screen."""
    stages = memory.stages
    if len(stages) <= most:
        return list(stages)
    step = -(-len(stages) // (most - 2))
    chosen = set(range(0, len(stages), step)) | {len(stages) - 1}
    return [stage for index, stage in enumerate(stages) if index in chosen or stage is memory.worst]


def _header(prediction: Prediction, scenario: Scenario) -> RenderableType:
    training, layout = scenario.training, scenario.layout
    machine, model = scenario.machine, scenario.model
    size = parameter_words(model.parameters(layout.tp, training.seq_len).total)
    placed = placement_words(scenario)
    how = f"calibration {prediction.calibration}, fidelity {prediction.fidelity}"
    lines = [
        f"{model.name}, {size} parameters",
        f"{machine.name}: {device_words(machine, scenario.devices)}",
        layout_words(scenario),
        f"{training.global_batch:,} sequences of {training.seq_len:,} tokens = micro-batch {layout.micro_batch} x "
        f"{scenario.micro_batches:,} micro-batches x dp {layout.dp}",
        *(["; ".join(placed)] if placed else []),
        how + (", network solo: nothing shares a link" if prediction.network == "solo" else ""),
    ]
    perturbed = perturbation_words(scenario)
    marked = [indented(_perturbed_words(perturbed, prediction), "yellow")] if perturbed else []
    return Group(Text(scenario.name, style="bold"), *(indented(line) for line in lines), *marked)


def _perturbed_words(perturbed: Sequence[str], prediction: Prediction) -> str:
    """What is perturbed, and how many kinds of replicas that makes."""
    named = "; ".join(perturbed[:MOST_PERTURBATIONS])
    more = len(perturbed) - MOST_PERTURBATIONS
    named += f" and {more} more" if more > 0 else ""
    lanes = prediction.engine.lanes
    kinds = f"{lanes:,} kinds of replicas" if lanes > 1 else "replicas alike"
    return f"perturbed, {kinds}: {named}"


def _answer(prediction: Prediction, scenario: Scenario, published: Published | None, screen: Screen) -> RenderableType:
    word = scenario.machine.device.word
    rates = prediction.tflops_per_device
    figures = {
        "step": ("step_s", prediction.step_s, format_duration),
        f"hardware TFLOP/s a {word}": ("hardware", rates.hardware, tera),
        f"model TFLOP/s a {word}": ("model", rates.model, tera),
        "HFU, recomputation counted": ("hfu", prediction.hfu, percent),
        "MFU, the model's work alone": ("mfu", prediction.mfu, percent),
        "tokens/s": ("tokens_per_s", prediction.tokens_per_s, "{:,.0f}".format),
        "samples/s": ("samples_per_s", prediction.samples_per_s, "{:,.2f}".format),
    }
    # A difference between two questions is no error of the prediction, so it is not shown as one.
    compared = published is not None and not published.differs
    columns = ["published", *(["difference"] if compared else [])] if published else []
    table = plain_table("", "predicted", *columns)
    for name, (key, value, show) in figures.items():
        cells = _beside(published, key, value, show)[: len(columns)] if published else []
        table.add_row(name, show(value), *cells)
    notes = (_interval_words(prediction), _peak_words(scenario))
    lines: list[RenderableType] = [indented(note, "dim") for note in notes]
    if published:
        star = " * converted from hardware FLOP." if published.converted else ""
        lines.append(indented(f"published: {published.id} ({published.source}). {published.note}{star}".strip(), "dim"))
        if published.differs:
            lines.append(
                indented(f"NOT the same question: the published run has {', '.join(published.differs)}", "yellow")
            )
    return Group(table, *lines)


def _beside(published: Published, key: str, value: float, show: Callable[[float], str]) -> list[str]:
    """The published figure and the difference, where both count the same."""
    known = published.figures.get(key)
    if not known:
        return ["", ""]
    if key in published.converted:
        return [f"{show(known)} *", ""]
    return [show(known), difference(value, known)]


def _interval_words(prediction: Prediction) -> str:
    interval = prediction.interval
    if interval.step_s is None:
        return interval.basis
    low, high = interval.step_s
    return f"step within {format_duration(low)} to {format_duration(high)} ({interval.level:.0%}, {interval.basis})"


def _peak_words(scenario: Scenario) -> str:
    device, precision = scenario.machine.device, scenario.training.precision
    peak = tera(device.peak_flop_per_s(precision))
    return f"HFU and MFU are shares of {peak} TFLOP/s, the {precision} peak of one {device.word}"


def _breakdown(parts: Breakdown, slowest_stage: int, screen: Screen) -> RenderableType:
    table = plain_table("where the step goes", "seconds", "share", *([" "] if screen.roomy else []), left=(" ",))
    total = parts.total
    for key, name in PARTS.items():
        seconds = getattr(parts, key)
        if seconds <= 0:
            continue
        share = seconds / total if total > 0 else 0.0
        cells: list[RenderableType] = [name, f"{seconds:,.3f}", percent(share)]
        if screen.roomy:
            cells.append(Text(bar(share, screen.width - 56, screen.unicode), style="blue"))
        table.add_row(*cells)
    note = f"stage {slowest_stage}, the slowest; exposed communication only; the parts sum to the step"
    return Group(table, indented(note, "dim"))


def _communication(records: Sequence[CommRecord], screen: Screen) -> RenderableType | None:
    if not records:
        return None
    roomy = screen.roomy
    columns = ("algorithm", "times", "bytes each", "busy", "exposed") if roomy else ("times", "bytes each", "exposed")
    table = plain_table("communication", *columns, left=("algorithm",))
    for record in records:
        each = record.bytes / record.count if record.count else 0.0
        table.add_row(
            f"{record.group} {record.op.replace('_', '-')}",
            *([record.algorithm] if roomy else []),
            f"{record.count:,}",
            format_bytes(each),
            *([format_duration(record.busy_s)] if roomy else []),
            format_duration(record.exposed_s),
        )
    return Group(table, indented("one rank of that stage in one step; bytes are what it sends", "dim"))


def _links(links: Sequence[LinkLoad], screen: Screen) -> RenderableType | None:
    if not links:
        return None
    roomy = screen.roomy
    columns = ("alike", "bytes each", "busy", "used by") if roomy else ("alike", "busy")
    table = plain_table("busiest links", *columns, left=("used by",))
    for link in _shown(links):
        table.add_row(
            link.name,
            f"{link.count:,}",
            *([format_bytes(link.bytes)] if roomy else []),
            f"{link.busy * 100:.2f} %",
            *([", ".join(_users(link))] if roomy else []),
        )
    note = "busy: share of the step at full rate, one direction"
    return Group(table, indented(note, "dim"))


def _shown(links: Sequence[LinkLoad]) -> list[LinkLoad]:
    """The busiest of each place, then the busiest of all; the busiest first."""
    first = {link.where: link for link in reversed(links)}
    rest = [link for link in links if link not in first.values()]
    return sorted([*first.values(), *rest][:MOST_LINKS], key=lambda link: -link.busy)


def _users(link: LinkLoad) -> list[str]:
    """The kinds of traffic on it; which stages' is in the document, since it holds for the first of the links alone."""
    return list(dict.fromkeys(user.split()[0] for user in link.users))


def _memory(memory: Memory, published: Published | None, screen: Screen) -> RenderableType:
    worst = memory.worst
    peaks = published.peaks if published else {}
    verdict = Text("memory: ", style="bold")
    verdict.append(memory.verdict, style=VERDICT_STYLES[memory.verdict])
    verdict.append(
        f"; stage {worst.stage} is the worst: {gib(worst.peak_bytes)} GiB at its peak, "
        f"{gib(worst.reserved_bytes)} reserved of {gib(memory.capacity_bytes)}",
        style="not bold",
    )
    columns = ("weights", "grads", "optim.", "activ.", "other") if screen.roomy else ()
    table = plain_table("GiB, stage", "peak", *(["published"] if peaks else []), "reserved", *columns, whole=True)
    for stage in shown_stages(memory):
        held = stage.parts
        parts = (held.parameters, held.gradients, held.optimizer, held.activations, held.buffers + held.overhead)
        known = peaks.get(stage.stage)
        table.add_row(
            f"{stage.stage}" + (" worst" if stage is worst else ""),
            gib(stage.peak_bytes),
            *(["" if known is None else gib(known)] if peaks else []),
            gib(stage.reserved_bytes),
            *(gib(value) for value in parts[: len(columns)]),
        )
    hidden = len(memory.stages) - table.row_count
    note = f"the worst peak comes during {worst.peak_during}"
    note += f"; {hidden} stages between are left out" if hidden else ""
    note += f"; {gib(memory.context_bytes)} GiB more lie outside the allocator" if memory.context_bytes else ""
    return Group(verdict, table, indented(note, "dim"))


def _campaign(prediction: Prediction, scenario: Scenario) -> RenderableType | None:
    campaign = prediction.campaign
    if campaign is None:
        return None
    line = Text("whole run: ", style="bold")
    word = scenario.machine.device.word
    hours = f"{campaign.node_hours:,.0f} node-hours"
    if scenario.machine.devices_per_node > 1:
        hours += f" ({campaign.device_hours:,.0f} {word}-hours)"
    line.append(
        f"{token_words(scenario.training.tokens or 0.0)} tokens in {campaign.steps:,} steps, "
        f"{_days(campaign.days)}, {hours}, nothing lost to failures",
        style="not bold",
    )
    return line


def _days(days: float) -> str:
    return f"{days:,.0f} days ({days / 365.25:,.1f} years)" if days > 1000 else f"{days:,.1f} days"


def _warnings(warnings: Sequence[str]) -> RenderableType | None:
    if not warnings:
        return None
    return Group(*(Text(f"warning: {warning}", style="yellow") for warning in warnings))
