"""What is bundled: lists of it, and one of it in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from ..topology.errors import input_error, nearest
from ..topology.units import format_bandwidth, format_bytes
from .documents import write_text
from .terminal import Screen, group, indented, plain_table, spaced
from .topology import (
    link_maps,
    port_words,
    save_list,
    save_topology,
    topology_document,
    topology_list,
    topology_view,
)
from .words import counted, device_words, fact_text, layout_words, parameter_words, percent, signed_percent, tera

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..scenarios.framework import StateBytes
    from ..scenarios.measurements import MeasuredRun
    from ..scenarios.published import PublishedRun

View = Callable[[Screen], Sequence[RenderableType]]


@dataclass(frozen=True)
class Shown:
    """Something bundled, for programs and for people.

    Attributes:
        document: In plain JSON types.
        view: On a screen.
        save: Writes it into a file, where that is more than its document.
    """

    document: dict[str, Any]
    view: View
    save: Callable[[str], None] | None = None


@dataclass(frozen=True)
class _Kind:
    names: Callable[[], list[str]]
    list_view: Callable[[list[str], Screen], Sequence[RenderableType]]
    one: Callable[[str], Shown]


def names(kind: str) -> list[str]:
    """Names of the bundled members of a kind.

    >>> "frontier" in names("machines")
    True
    """
    return _kind(kind).names()


def show_kind(kind: str) -> Shown:
    """All bundled members of a kind."""
    known = _kind(kind)
    found = known.names()
    documents = [known.one(name).document for name in found]
    document = {kind: documents}
    save = (lambda path: save_list(document, path)) if kind == "topology" else None
    return Shown(document, lambda screen: known.list_view(found, screen), save)


def show_one(kind: str, name: str) -> Shown:
    """One member of a kind, bundled or a file.

    Raises:
        InputError: If there is none, or its file is wrong.
    """
    return _kind(kind).one(name)


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file."""
    from ..scenarios.framework import Framework
    from ..scenarios.model import Model
    from ..scenarios.scenario import ScenarioFile
    from ..topology.machine import Machine

    models: dict[str, type[BaseModel]] = {
        "scenario": ScenarioFile,
        "machine": Machine,
        "model": Model,
        "framework": Framework,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **models[kind].model_json_schema()}


# --- machines ------------------------------------------------------------------------------------------------------


def _machine_names() -> list[str]:
    from ..topology.machine import machine_names

    return machine_names()


def _machines(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..topology.machine import load_machine

    roomy = screen.roomy
    table = plain_table("machine", "nodes", "devices", "a node", *(["memory", "16-bit peak"] if roomy else []))
    for name in found:
        machine = load_machine(name)
        device = machine.device
        half = device.peak.get("bf16") or device.peak.get("fp16")
        more = [format_bytes(device.memory_bytes, 0), f"{tera(half.value)} TFLOP/s" if half else "-"] if roomy else []
        on_node = counted(machine.devices_per_node, device.word)
        table.add_row(name, f"{machine.node_count:,}", f"{machine.device_count:,}", on_node, *more)
    return [table, indented("exatwin show machines NAME: links, NICs, and every figure with its source", "dim")]


def _machine(name: str) -> Shown:
    from ..topology.files import read_document
    from ..topology.graph import fabric_summary
    from ..topology.machine import FOLDER, PACKAGE, load_machine

    machine = load_machine(name)
    written, _ = read_document(name, PACKAGE, FOLDER, "machine")
    document = {"file": written, "fabric_summary": fabric_summary(machine), "device_count": machine.device_count}

    def view(screen: Screen) -> Sequence[RenderableType]:
        device = machine.device
        peaks = ", ".join(f"{precision} {tera(fact.value)}" for precision, fact in device.peak.items())
        head = [
            Text(f"{machine.name}: {machine.title}", style="bold"),
            indented(device_words(machine, machine.device_count)),
            indented(
                f"a {device.word} is one {device.name}: {format_bytes(device.memory_bytes)} at "
                f"{format_bandwidth(device.memory_bandwidth_bytes_per_s)}, peak TFLOP/s {peaks}"
            ),
            indented(port_words(machine)),
            *([indented(machine.note)] if machine.note else []),
        ]
        facts = _facts_table([(path, fact, _at(written, path)) for path, fact in machine.facts()], screen)
        assumed = machine.assumed()
        notes = [indented(f"assumed, not read: {', '.join(assumed)}", "yellow")] if assumed else []
        return spaced([group(head), *link_maps(machine), facts, *notes])

    return Shown(document, view)


# --- topology ------------------------------------------------------------------------------------------------------


def _topologies(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..topology.machine import load_machine

    return topology_list([load_machine(name) for name in found], screen)


def _topology(name: str) -> Shown:
    from ..topology.machine import load_machine

    machine = load_machine(name)
    return Shown(
        topology_document(machine),
        lambda screen: topology_view(machine, screen),
        save=lambda path: save_topology(machine, path),
    )


# --- models --------------------------------------------------------------------------------------------------------


def _model_names() -> list[str]:
    from ..scenarios.reading import bundled

    return bundled("models")


def _models(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    table = plain_table(
        "model", "parameters", "layers", "hidden", "heads", *(["ffn", "vocabulary"] if screen.roomy else [])
    )
    for name in found:
        model = _load_model(name)
        more = [f"{model.ffn:,}", f"{model.vocab:,}"] if screen.roomy else []
        heads = f"{model.heads}" if model.heads == model.kv_heads else f"{model.heads}/{model.kv_heads}"
        table.add_row(
            name, parameter_words(model.parameters().total), f"{model.layers}", f"{model.hidden:,}", heads, *more
        )
    return [table]


def _load_model(name: str) -> Any:
    from ..scenarios.model import load_model

    return load_model(name)


def _model(name: str) -> Shown:
    model = _load_model(name)
    count = model.parameters()
    names = ("embedding", "positions", "layers", "final_norm", "head", *(["mtp"] if model.mtp_layers else []), "total")
    parts = {part: getattr(count, part) for part in names}
    layer = model.layer_parameters()
    active = {"active_parameters": model.active_parameters()} if model.is_moe else {}
    document = {**model.model_dump(mode="json", exclude_none=True), "parameters": parts, **active}

    def view(screen: Screen) -> Sequence[RenderableType]:
        kind = [
            f"{model.layers} layers, hidden {model.hidden:,}, {model.heads} heads of {model.head_dim}"
            + ("" if model.heads == model.kv_heads else f", {model.kv_heads} key and value heads"),
            f"MLP {model.ffn:,}{' gated' if model.gated else ''}, {model.positions} positions, {model.norm} norm, "
            f"{'with' if model.bias else 'no'} biases, {'tied' if model.tied else 'untied'} head, "
            f"vocabulary {model.vocab:,}",
            *_experts(model),
        ]
        table = plain_table("part", "parameters", "share")
        for part, value in parts.items():
            table.add_row(part.replace("_", " "), f"{value:,}", percent(value / count.total))
        experts = (
            f"router and shared {layer.mlp:,}, experts {layer.experts:,}" if layer.experts else f"MLP {layer.mlp:,}"
        )
        per_layer = f"one layer: attention {layer.attention:,}, {experts}, norms {layer.norms:,}"
        padded = f"the vocabulary padded to {model.padded_vocab():,} for tp 1; a wider tp pads it further"
        source = [indented(f"source {model.source}", "dim")] if model.source else []
        head = [Text(model.name, style="bold"), *(indented(line) for line in kind), *source]
        return spaced([group(head), table, group([indented(per_layer), indented(padded, "dim")])])

    return Shown(document, view)


def _experts(model: Any) -> list[str]:
    """A line on the experts, where there are any, and on latent attention."""
    lines = []
    if model.is_moe:
        with_experts = sum(model.has_experts(layer) for layer in range(model.layers))
        shared = f", {model.shared_experts} shared" if model.shared_experts else ""
        lines.append(
            f"{model.experts} experts of {model.expert_width:,} in {with_experts} layers, {model.top_k} for a token"
            f"{shared}; a token passes {parameter_words(model.active_parameters())}"
        )
    if model.kv_rank:
        queries = f", queries of {model.q_rank:,}" if model.q_rank else ""
        lines.append(f"latent attention: keys and values of {model.kv_rank:,}{queries}, rotary part {model.rope_dim}")
    return lines


# --- scenarios -----------------------------------------------------------------------------------------------------


def _scenario_names() -> list[str]:
    from ..scenarios.scenario import scenario_names

    return scenario_names()


def _scenarios(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..scenarios.scenario import load_scenario

    roomy = screen.roomy
    table = plain_table(
        "scenario", "devices", "tp", "pp", "dp", "batch", *(["published run"] if roomy else []), left=("published run",)
    )
    for name in found:
        scenario = load_scenario(name)
        layout = scenario.layout
        devices = counted(scenario.devices, scenario.machine.device.word)
        more = [scenario.measured or "-"] if roomy else []
        table.add_row(
            name, devices, str(layout.tp), str(layout.pp), str(layout.dp), f"{scenario.training.global_batch:,}", *more
        )
    return [table]


def _scenario(name: str) -> Shown:
    from ..scenarios.scenario import load_scenario

    scenario = load_scenario(name)

    def view(screen: Screen) -> Sequence[RenderableType]:
        lines = [
            *([scenario.title] if scenario.title else []),
            device_words(scenario.machine, scenario.devices) + f" of {scenario.machine.title}",
            layout_words(scenario),
            *([scenario.note] if scenario.note else []),
        ]
        head = [Text(scenario.name, style="bold"), *(indented(line) for line in lines)]
        return spaced([group(head), Text(_as_yaml(scenario.document()))])

    return Shown(scenario.document(), view)


# --- calibrations, frameworks, schedules ---------------------------------------------------------------------------


def _calibration_names() -> list[str]:
    from ..sim.calibration import calibration_names

    return calibration_names()


def _calibrations(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..sim.calibration import load_calibration

    table = plain_table(
        "calibration",
        *(["default of", "made"] if screen.roomy else []),
        "fitted on",
        left=("default of", "made", "fitted on"),
    )
    for name in found:
        calibration = load_calibration(name)
        rows = ", ".join(residual.row for residual in calibration.fit.residuals) if calibration.fit else "nothing"
        more = [", ".join(calibration.machines), calibration.date] if screen.roomy else []
        table.add_row(name, *more, rows)
    return [table]


def _calibration(name: str) -> Shown:
    from ..sim.calibration import calibration_document, load_calibration
    from ..topology.facts import facts_in

    calibration = load_calibration(name)
    written, _ = calibration_document(name)

    def view(screen: Screen) -> Sequence[RenderableType]:
        head = [
            Text(f"{calibration.name}: {calibration.title}", style="bold"),
            indented(f"measured on {calibration.device}, {calibration.date}; {calibration.software}"),
            *([indented(calibration.note)] if calibration.note else []),
        ]
        facts = _facts_table([(path, fact, _at(written, path)) for path, fact in facts_in(calibration)], screen)
        fit: list[RenderableType] = []
        if calibration.fit:
            table = plain_table("fitted on", "predicted / measured - 1")
            for residual in calibration.fit.residuals:
                table.add_row(residual.row, signed_percent(residual.error))
            fit = [
                table,
                indented(
                    f"fitted: {', '.join(calibration.fit.parameters)}; again with {calibration.fit.command}", "dim"
                ),
            ]
        return spaced([group(head), facts, group(fit) if fit else None])

    return Shown(calibration.model_dump(mode="json"), view)


def _framework_names() -> list[str]:
    from ..scenarios.framework import framework_names

    return framework_names()


def _frameworks(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..scenarios.framework import load_framework

    table = plain_table("framework", "precision", "weight", "gradient", "accum.", "optimizer")
    for name in found:
        framework = load_framework(name)
        rows: list[tuple[str, StateBytes]] = list(framework.states.items())
        rows += [(f"{precision} by unit", states) for precision, states in (framework.unit_states or {}).items()]
        for index, (precision, states) in enumerate(rows):
            cells = (states.weight, states.gradient, states.accumulation, states.optimizer)
            table.add_row("" if index else name, precision, *(f"{cell:g}" for cell in cells))
    said = "bytes a parameter before sharding; by unit: where ZeRO shards weights unit by unit, if kept otherwise"
    return [table, indented(said, "dim")]


def _framework(name: str) -> Shown:
    from ..scenarios.framework import load_framework

    framework = load_framework(name)
    document = framework.model_dump(mode="json", exclude_none=True)

    def view(screen: Screen) -> Sequence[RenderableType]:
        return [Text(_as_yaml(document))]

    return Shown(document, view)


def _schedule_names() -> list[str]:
    from ..scenarios.schedules import SCHEDULES

    return list(SCHEDULES)


def _schedules(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    return spaced([*(group(_schedule(name).view(screen)) for name in found), indented(_SLOTS, "dim")])


_SLOTS = (
    "F forward, B backward, I and W its halves (gradient of the input, of the weights), and the micro-batch; "
    "a slot is a forward, a half, or half a backward; small letters: a rank's second stage; dots: it waits"
)


def _schedule(name: str) -> Shown:
    from ..scenarios.schedules import in_flight, load_schedule, picture, schedule_table, to_csv

    schedule = load_schedule(name)
    ranks, micro_batches = schedule.shape or (3, 6)
    table = schedule_table(schedule, ranks, micro_batches)
    drawn = picture(table) if ranks * micro_batches <= 1000 else []  # beyond that nobody reads it
    if schedule.shape is None and len(drawn[0]) > 78:  # columns of a narrow terminal
        micro_batches = 3
        table = schedule_table(schedule, ranks, micro_batches)
        drawn = picture(table)
    about = " ".join((type(schedule).__doc__ or "").split("\n\n")[0].split())
    document = {
        "name": name,
        "about": about,
        "virtual_stages_a_rank": list(schedule.chunks) if schedule.chunks else f"{schedule.least_chunks} or more",
        "splits_backward": schedule.splits_backward,
        "example": {
            "ranks": ranks,
            "micro_batches": micro_batches,
            "virtual_stages_a_rank": schedule.least_chunks,
            "passes_in_flight": [in_flight(row) for row in table],
            "csv": to_csv(table),
        },
    }

    def view(screen: Screen) -> Sequence[RenderableType]:
        held = ", ".join(str(in_flight(row)) for row in table)
        each = counted(schedule.least_chunks, "stage")
        note = (
            f"{counted(ranks, 'rank')} of {each}, {micro_batches:,} micro-batches; "
            f"the ranks hold at most {held} passes at once"
        )
        return [Text(name, style="bold"), indented(about), *map(indented, drawn), indented(note, "dim")]

    return Shown(document, view)


# --- published runs ------------------------------------------------------------------------------------------------


def _published_names() -> list[str]:
    from ..scenarios.measurements import measured_runs

    return [run.id for run in measured_runs()]


def _published(found: list[str], screen: Screen) -> Sequence[RenderableType]:
    from ..scenarios.measurements import measured_run

    table = plain_table(
        "published run", *(["devices"] if screen.roomy else []), "step", "TFLOP/s", "used", left=("used",)
    )
    for name in found:
        run = measured_run(name)
        devices = [f"{run.devices:,}" if run.devices else ""] if screen.roomy else []
        step = f"{run.step_s:,.2f} s" if run.step_s else ""
        table.add_row(name, *devices, step, f"{run.tflops_hardware:,.1f}" if run.tflops_hardware else "", run.use)
    return [
        table,
        indented("TFLOP/s of one device, recomputation counted; a calibration has seen the rows used as fit", "dim"),
        "",
        _series(),
    ]


def _series() -> RenderableType:
    """The series of runs that are one line each, by name; `_public_one` shows one of their runs."""
    from ..scenarios.published import published_runs, series_names

    table = plain_table("series", "runs", "machines", "such as", left=("machines", "such as"))
    for series in series_names():
        runs = published_runs(series)
        machines = ", ".join(dict.fromkeys(str(run.fields["machine"]) for run in runs))
        table.add_row(series, f"{len(runs):,}", machines, runs[0].id)
    return table


def _public_one(run: PublishedRun) -> Shown:
    """A run that is one line of a series: its scenario, and what was measured of it; saved as a scenario file."""
    document = asdict(run)
    measured = {
        key: document[key]
        for key in ("step_s", "tflops", "flop_convention", "memory_bytes", "memory_kind", "verdict")
        if document[key] is not None
    }
    text = _as_yaml(run.fields)

    def view(screen: Screen) -> Sequence[RenderableType]:
        table = plain_table("measured", run.id, left=(run.id,), whole=True)
        for key, value in {**measured, "used as": run.use, "source": run.source, "where": run.where}.items():
            table.add_row(key, str(value))
        return spaced([table, Text(text), Text(run.note, style="dim") if run.note else None])

    return Shown(document, view, partial(_save_run, run, text))


def _save_run(run: PublishedRun | MeasuredRun, scenario: str, path: str) -> None:
    """A published run as a scenario file, with its source on top."""
    write_text(f"# {run.source}: {run.where}\n{scenario}\n", path)


def _published_one(name: str) -> Shown:
    from ..scenarios.measurements import measured_run, measured_runs, measured_stage_memory
    from ..scenarios.published import published_runs

    if name not in {run.id for run in measured_runs()}:
        public = {run.id: run for run in published_runs()}
        if name in public:
            return _public_one(public[name])
        known = [*(run.id for run in measured_runs()), *public]
        raise input_error(f"no published run has the id {name!r}{nearest(name, known)}", field="published")
    run = measured_run(name)
    rows = [row for row in measured_stage_memory() if row.run == name]
    document = {**asdict(run), "overrides": list(run.overrides), "memory": [asdict(row) for row in rows]}

    def view(screen: Screen) -> Sequence[RenderableType]:
        fields = {key: value for key, value in asdict(run).items() if value not in (None, "", ())}
        table = plain_table("published run", name, left=(name,), whole=True)
        for key, value in fields.items():
            if key != "id":
                table.add_row(key, "; ".join(value) if isinstance(value, tuple) else fact_text(value))
        memory = plain_table("stage", "allocated", "max allocated", "reserved")
        for row in rows:
            sizes = (row.allocated_bytes, row.max_allocated_bytes, row.reserved_bytes)
            memory.add_row(f"{row.stage}", *("" if size is None else format_bytes(size) for size in sizes))
        return spaced([table, memory if rows else None])

    def save(path: str) -> None:
        fields = run.ask().document() | {"name": name, "measured": name}
        _save_run(run, _as_yaml({key: value for key, value in fields.items() if key != "title"}), path)

    return Shown(document, view, save)


KINDS = {
    "machines": _Kind(_machine_names, _machines, _machine),
    "topology": _Kind(_machine_names, _topologies, _topology),
    "models": _Kind(_model_names, _models, _model),
    "scenarios": _Kind(_scenario_names, _scenarios, _scenario),
    "calibrations": _Kind(_calibration_names, _calibrations, _calibration),
    "frameworks": _Kind(_framework_names, _frameworks, _framework),
    "schedules": _Kind(_schedule_names, _schedules, _schedule),
    "published": _Kind(_published_names, _published, _published_one),
}


def _kind(kind: str) -> _Kind:
    if kind not in KINDS:
        raise input_error(f"nothing of that kind is bundled{nearest(kind, KINDS)}", where=kind)
    return KINDS[kind]


def _facts_table(facts: Sequence[tuple[str, Any, Any]], screen: Screen) -> RenderableType:
    """Facts as their file writes them, each with its source."""
    table = plain_table("figure", "value", "source", left=("value", "source"), whole=screen.roomy)
    for path, fact, raw in facts:
        where = f": {fact.at}" if fact.at else ""
        table.add_row(path, fact_text(raw), f"{fact.source}{where}", style="yellow" if fact.assumed else None)
    return table


def _at(document: Any, path: str) -> Any:
    """The value of a fact as its file writes it, at a dotted path."""
    for part in path.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document["value"] if isinstance(document, dict) and "value" in document else document


def _as_yaml(document: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)).rstrip()
