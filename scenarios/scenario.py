"""One question: a model, on a machine, trained so, cut so.

`load_scenario` reads a file and reports everything that is wrong with it at
once; what it returns is consistent, and nothing later checks it again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from ..topology.errors import InputError, Problem
from ..topology.files import build, looks_like_path, problems_of
from ..topology.machine import Machine, load_machine
from ..topology.placement_spec import PlacementSpec
from .collectives import Algorithms
from .fields import Count, Text
from .framework import Framework, load_framework
from .layout import Layout
from .model import Model, model_document
from .overrides import apply_overrides
from .perturb import Perturbations
from .reading import beside, bundled, read, refuse_monsters, within
from .rules import Parts, batch_rules, device_rules, model_rules, precision_rules
from .schedules import Schedule, is_file, load_schedule
from .sharding_rules import sharding_rules
from .training import Training

ModelT = TypeVar("ModelT", bound=BaseModel)


def _model_reference(value: Any) -> Any:
    if isinstance(value, (str, dict, Model)):
        return value  # read and checked by itself, so that each mistake in it is named once
    raise ValueError("must be a bundled name, a path, or the model's fields")


class ScenarioFile(BaseModel):
    """A scenario as its file says it. Give ``devices``, ``nodes`` or ``layout.dp``; the others follow."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Scenario")

    name: Text = "scenario"
    title: Text | None = None
    note: Text | None = None
    machine: Text = Field(description="a bundled machine or a path")
    devices: Count | None = Field(default=None, description="ranks: on Frontier and LUMI-G a device is one GCD")
    nodes: Count | None = Field(default=None, description="whole nodes, where devices are not given")
    model: Annotated[str | Model, PlainValidator(_model_reference, json_schema_input_type=str | Model)] = Field(
        description="a bundled model, a path, or its fields"
    )
    training: Training
    layout: Layout = Field(default_factory=Layout)
    placement: PlacementSpec = Field(default_factory=PlacementSpec, description="which device each rank runs on")
    framework: Text = Field(default="megatron-deepspeed", description="a bundled framework or a path")
    calibration: Text | None = Field(
        default=None, description="a bundled calibration or a path; left out: the machine's"
    )
    measured: Text | None = Field(default=None, description="id of a published run to set beside the prediction")
    perturb: Perturbations = Field(default_factory=Perturbations, description="slow devices, bad links, jitter")
    collectives: Algorithms = Field(
        default_factory=Algorithms, description="algorithms by group, in place of the library's choice"
    )


@dataclass(frozen=True)
class Scenario:
    """A checked question, whole: every field is filled in and all agree.

    Attributes:
        layout: With ``dp`` filled in.
        nodes: Nodes that hold the devices, the last one perhaps in part.
        machine_reference: The name or path that the machine was read from; likewise the framework's.
    """

    name: str
    machine: Machine
    devices: int
    nodes: int
    model: Model
    training: Training
    layout: Layout
    framework: Framework
    calibration: str | None = None
    measured: str | None = None
    title: str | None = None
    note: str | None = None
    machine_reference: str = ""
    framework_reference: str = ""
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    perturb: Perturbations = field(default_factory=Perturbations)
    collectives: Algorithms = field(default_factory=Algorithms)

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.layout.dp or self.devices // self.layout.model_parallel

    @cached_property
    def schedule(self) -> Schedule:
        """What ``layout.schedule`` names."""
        return load_schedule(self.layout.schedule)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in one step."""
        return self.training.global_batch // (self.layout.micro_batch * self.dp)

    def home_rank(self, virtual_stage: int) -> int:
        """The pipeline rank that runs a virtual stage."""
        layout = self.layout
        if layout.vpp == 1:
            return virtual_stage
        rank, _ = self.schedule.home(virtual_stage, layout.pp, layout.vpp)
        return int(rank)

    @property
    def embedding_ranks(self) -> tuple[int, int]:
        """Pipeline ranks of the first and the last virtual stage."""
        return self.home_rank(0), self.home_rank(self.layout.virtual_stages - 1)

    @property
    def embedding_copied(self) -> bool:
        """Whether a tied embedding stands twice: on two ranks, for the first and the last virtual stage."""
        first, last = self.embedding_ranks
        return self.model.tied and first != last

    def algorithm(self, group: str, op: str) -> str | None:
        """The algorithm that the scenario names for an operation of a group; None for the library's choice."""
        return self.collectives.of(group, op)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step, over all replicas."""
        return self.training.global_batch * self.training.seq_len

    def document(self) -> dict[str, Any]:
        """The resolved scenario in the fields of a file, with plain JSON types; it can be read back."""
        document: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "machine": self.machine_reference or self.machine.name,
            "devices": self.devices,
            "nodes": self.nodes if self.devices == self.nodes * self.machine.devices_per_node else None,
            "model": self.model.model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
            "layout": self.layout.model_dump(mode="json"),
            "placement": self.placement.model_dump(mode="json", exclude_defaults=True) or None,
            "framework": self.framework_reference or self.framework.name,
            "calibration": self.calibration,
            "measured": self.measured,
            "collectives": self.collectives.model_dump(mode="json", exclude_none=True) or None,
            "perturb": None if self.perturb.empty else self.perturb.model_dump(mode="json", exclude_none=True),
        }
        return {key: value for key, value in document.items() if value is not None}


def scenario_names() -> list[str]:
    """The bundled scenarios."""
    return bundled("library")


def load_scenario(name_or_path: str, overrides: Sequence[str] = ()) -> Scenario:
    """A bundled scenario, or one from a file, with fields replaced.

    Args:
        name_or_path: ``frontier-1t``, or ``./mine.yaml``.
        overrides: Fields to replace before anything is checked, such as ``layout.tp=4``
            or ``model.layers=12``; the values are read as YAML.

    Raises:
        InputError: With everything that is wrong.

    >>> load_scenario("lumi-175b", ["devices=256"]).layout.dp
    4
    """
    document, where = read(name_or_path, "library", "scenario")
    folder = Path(where).expanduser().parent if looks_like_path(where) else None
    if "name" not in document:
        document["name"] = Path(where).stem
    return scenario_from_document(document, where, overrides, folder)


def scenario_from_document(
    document: Mapping[str, Any], where: str = "scenario", overrides: Sequence[str] = (), folder: Path | None = None
) -> Scenario:
    """A scenario from the fields of a file.

    Args:
        document: The fields, as `Scenario.document` writes them.
        where: The name that errors carry.
        overrides: As for `load_scenario`.
        folder: Where paths in the document start from; the working directory where None.

    Raises:
        InputError: With everything that is wrong.
    """
    refuse_monsters(document, where)
    fields = copy.deepcopy(dict(document))
    for key in ("machine", "model", "framework", "calibration"):
        if isinstance(fields.get(key), str):
            fields[key] = beside(fields[key], folder)
    layout = fields.get("layout")
    if folder is not None and isinstance(layout, dict) and isinstance(layout.get("schedule"), str):
        name = layout["schedule"].strip()
        if is_file(name) and not name.startswith("~"):
            layout["schedule"] = str(folder / name)
    training = fields.get("training")
    if folder is not None and isinstance(training, dict) and isinstance(training.get("data"), str):
        name = training["data"].strip()
        if name and not name.startswith("~"):  # always a path, whatever it looks like: no data has a bundled name
            training["data"] = str(folder / name)
    if overrides:
        apply_overrides(fields, overrides, where, ScenarioFile.model_fields)
        where = " ".join([where, *(f"--set {option}" for option in overrides)])
    refuse_monsters(fields, where)

    problems: list[Problem] = []
    model = _model(fields.get("model"), problems)
    try:
        file = ScenarioFile.model_validate(fields)
    except ValidationError as error:
        file = None
        problems += problems_of(error, ScenarioFile)
    parts = Parts(
        model=model,
        training=_part(Training, fields.get("training")),
        layout=_part(Layout, fields.get("layout", {})),
        machine=_read_part(load_machine, "machine", fields.get("machine"), problems),
        framework=_read_part(load_framework, "framework", fields.get("framework", "megatron-deepspeed"), problems),
        devices=_count(fields.get("devices")),
        nodes=_count(fields.get("nodes")),
    )
    sizes_are_read = parts.devices == fields.get("devices") and parts.nodes == fields.get("nodes")
    problems += model_rules(parts)
    problems += batch_rules(parts)
    problems += precision_rules(parts)
    problems += sharding_rules(parts)
    devices = None
    if sizes_are_read and parts.layout is not None:
        devices, wrong = device_rules(parts, parts.layout)
        problems += wrong
    placement = _part(PlacementSpec, fields.get("placement", {}))
    if placement is not None and devices is not None and not problems:
        placement = _checked_placement(placement, parts, devices, folder, problems)
    if problems:
        raise InputError(where, _unique(problems))
    assert file is not None and devices is not None
    assert parts.model and parts.training and parts.layout and parts.machine and parts.framework and placement
    return Scenario(
        name=file.name,
        machine=parts.machine,
        devices=devices,
        nodes=-(-devices // parts.machine.devices_per_node),
        model=parts.model,
        training=parts.training,
        layout=parts.layout.model_copy(update={"dp": devices // parts.layout.model_parallel}),
        framework=parts.framework,
        calibration=file.calibration,
        measured=file.measured,
        perturb=file.perturb,
        collectives=file.collectives,
        title=file.title,
        note=file.note,
        machine_reference=file.machine,
        framework_reference=file.framework,
        placement=placement,
    )


def scenario_warnings(scenario: Scenario) -> tuple[str, ...]:
    """What is allowed and seldom meant."""
    layout, machine = scenario.layout, scenario.machine
    words, on_node = machine.device.words, machine.devices_per_node
    warnings = []
    if layout.tp > on_node > 1:  # where a node is one device, every group crosses nodes
        warnings.append(
            f"tp={layout.tp} is wider than a node of {on_node} {words}; every layer waits for the network between nodes"
        )
    elif layout.tp < on_node and on_node % layout.tp and scenario.nodes > 1:
        warnings.append(
            f"tp={layout.tp} does not divide the {on_node} {words} of a node; some tensor-parallel groups cross nodes"
        )
    if scenario.micro_batches < layout.pp:
        warnings.append(
            f"{scenario.micro_batches} micro-batches a replica never fill {layout.pp} stages; "
            f"global_batch = micro_batch x dp x micro-batches = "
            f"{layout.micro_batch} x {scenario.dp} x {scenario.micro_batches}"
        )
    if layout.vpp > 1 and scenario.micro_batches % layout.pp and scenario.schedule.name in ("1f1b", "interleaved"):
        warnings.append(
            f"{scenario.micro_batches} micro-batches a replica are no multiple of pp={layout.pp}; "
            "Megatron-LM runs no interleaved step of that size"
        )
    if layout.zero and scenario.dp == 1:
        warnings.append(f"zero={layout.zero} shards nothing with dp=1")
    return tuple(warnings)


def _part(kind: type[ModelT], fields: Any) -> ModelT | None:
    """A part for the rules that join parts; unknown keys are reported elsewhere and spoil nothing."""
    for _ in range(2):
        try:
            return kind.model_validate(fields)
        except ValidationError as error:
            if not isinstance(fields, dict) or any(item["type"] != "extra_forbidden" for item in error.errors()):
                return None
            fields = {key: value for key, value in fields.items() if key in kind.model_fields}
    return None


def _checked_placement(
    placement: PlacementSpec, parts: Parts, devices: int, folder: Path | None, problems: list[Problem]
) -> PlacementSpec | None:
    """The placement with its node file read; what is wrong with it joins the problems."""
    machine, layout = parts.machine, parts.layout
    if machine is None or layout is None or placement == PlacementSpec():
        return placement  # the first nodes, in order: what holds the devices holds them so
    from ..topology.placement import build_placement  # arrays are loaded where a placement has to be laid out

    try:
        placement = placement.with_nodes_read(folder)
        build_placement(placement, machine, layout.tp, devices // (layout.tp * layout.pp), layout.pp)
    except InputError as error:
        head = f"{error.where}: " if error.where else ""
        problems += [
            Problem(problem.field or "placement.node_file", f"{head}{problem.message}") for problem in error.problems
        ]
    return placement


def _read_part(load: Any, field: str, name: Any, problems: list[Problem]) -> Any:
    """A machine or framework by its name; a wrong kind of name is the schema's to report."""
    if not isinstance(name, str) or not name.strip():
        return None
    try:
        return load(name.strip())
    except InputError as error:
        problems += within(error, field)
    except (OSError, ValueError, RuntimeError) as error:  # a name no file system takes
        problems.append(Problem(field, f"cannot be read: {error}"[:200]))
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000 else None


def _unique(problems: Iterable[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _model(value: Any, problems: list[Problem]) -> Model | None:
    if isinstance(value, Model):
        return value
    try:
        if isinstance(value, str):
            document, where = model_document(value.strip())
            return build(Model, document, where)
        if isinstance(value, dict):
            return build(Model, value, "", "model")
    except InputError as error:
        problems += list(error.problems) if isinstance(value, dict) else within(error, "model")
    return None  # of another type, which the schema reports
