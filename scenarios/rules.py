"""The rules that join the parts of a scenario.

Each rule gives a problem with the rule, the numbers that break it, and the
nearest choices that would not. A rule runs where the parts it joins could be
read, whatever else is wrong, so that everything is said at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..topology.errors import InputError, Problem, nearest_numbers
from ..topology.machine import Machine
from .framework import Framework
from .layout import Layout, even_choices
from .model import Model, divisors
from .parallel_rules import expert_rules, sequence_rules
from .reading import within
from .schedules import load_schedule, misfits
from .training import Training

MOST_ACTIONS = 20_000_000  # forwards and backwards of a step; the largest published run has 205,000


@dataclass(frozen=True)
class Parts:
    """What could be read; None where its own mistakes are reported already."""

    model: Model | None
    training: Training | None
    layout: Layout | None
    machine: Machine | None
    framework: Framework | None
    devices: int | None
    nodes: int | None

    @property
    def replicas(self) -> int | None:
        """dp x cp, where a layout is there and the devices or dp say it."""
        layout, devices = self.layout, self.devices
        if layout is None:
            return None
        if layout.dp is not None:
            return layout.dp * layout.cp
        if devices is None and self.nodes and self.machine:
            devices = self.nodes * self.machine.devices_per_node
        if devices is None or devices % layout.model_parallel:
            return None
        return devices // layout.model_parallel * layout.cp


def model_rules(parts: Parts) -> list[Problem]:
    """Model against layout: what tensor and pipeline parallelism can cut."""
    model, layout = parts.model, parts.layout
    problems = [] if layout is None else _schedule_rules(layout)
    if layout is not None and parts.training is not None:
        problems += sequence_rules(model, parts.training, layout)
    if model is None or layout is None:
        return problems
    problems += _tensor_rules(model, layout.tp, parts.framework)
    problems += _stage_rules(model.layers, model.name, layout)
    problems += expert_rules(model, layout, parts.replicas)
    if isinstance(layout.recompute, tuple) and len(layout.recompute) != layout.pp:
        problems.append(
            Problem(
                "layout.recompute",
                f"has {len(layout.recompute)} entries for pp={layout.pp} stages; "
                f"give {layout.pp} entries or one word for all",
            )
        )
    seq_len = parts.training.seq_len if parts.training else None
    if model.positions == "learned" and model.max_positions and seq_len and seq_len > model.max_positions:
        problems.append(
            Problem(
                "training.seq_len",
                f"seq_len={seq_len} is longer than the {model.max_positions} learned positions of {model.name}; "
                f"it can be up to {model.max_positions}, or set model.max_positions",
            )
        )
    return problems


def _tensor_rules(model: Model, tp: int, framework: Framework | None) -> list[Problem]:
    """What tp must divide; the choices offered keep all of these rules."""
    whole = math.gcd(model.heads, model.hidden, model.ffn)
    valid = [n for n in divisors(whole) if framework is None or _kv_heads_allow(n, model.kv_heads, framework)]
    choices = nearest_numbers(tp, valid)
    problems = []
    sizes = {"attention heads": model.heads, "hidden width": model.hidden, "MLP width (ffn)": model.ffn}
    broken = [
        f"the {number} {what}" if what == "attention heads" else f"the {what} {number}"
        for what, number in sizes.items()
        if number % tp
    ]
    if broken:
        listed = broken[0] if len(broken) == 1 else f"{', '.join(broken[:-1])} and {broken[-1]}"
        problems.append(Problem("layout.tp", f"tp={tp} does not divide {listed} of {model.name}; tp can be {choices}"))
    if framework is not None and not _kv_heads_allow(tp, model.kv_heads, framework) and model.kv_heads != model.heads:
        rule = "is no divisor of" if framework.kv_heads == "divides" else "is neither a divisor nor a multiple of"
        problems.append(
            Problem(
                "layout.tp",
                f"tp={tp} {rule} the {model.kv_heads} key and value heads of {model.name}, as {framework.name} needs; "
                f"tp can be {choices}",
            )
        )
    return problems


def _kv_heads_allow(tp: int, kv_heads: int, framework: Framework) -> bool:
    return kv_heads % tp == 0 or (framework.kv_heads == "multiple_or_divisor" and tp % kv_heads == 0)


def _stage_rules(layers: int, name: str, layout: Layout) -> list[Problem]:
    """How the layers are cut into pp x vpp stages."""
    stages, given = layout.virtual_stages, layout.stage_layers
    across, choices = even_choices(layout, layers)
    if given is not None:
        problems = []
        if len(given) != stages:
            also = f" or set pp={len(given) // layout.vpp}" if len(given) % layout.vpp == 0 else ""
            problems.append(
                Problem(
                    "layout.stage_layers",
                    f"has {len(given)} entries for {across} stages; give {stages} entries{also}",
                )
            )
        if sum(given) != layers:
            problems.append(
                Problem(
                    "layout.stage_layers",
                    f"adds up to {sum(given)} layers, but {name} has {layers}; the entries must add up to {layers}",
                )
            )
        return problems
    if stages > layers:
        return [
            Problem("layout.pp", f"{across} has more stages than the {layers} layers of {name}; pp can be {choices}")
        ]
    if layers % stages:
        return [
            Problem(
                "layout.pp",
                f"{across} does not divide the {layers} layers of {name}; pp can be {choices}, or give stage_layers",
            )
        ]
    return []


def _schedule_rules(layout: Layout) -> list[Problem]:
    """Schedule against the ranks and virtual stages of the pipeline; its file, where it is one."""
    try:
        return misfits(load_schedule(layout.schedule), layout.pp, layout.vpp)
    except InputError as error:
        return within(error, "layout.schedule")


def _step_rules(layout: Layout, micro_batches: int) -> list[Problem]:
    """Schedule against the micro-batches of a step."""
    try:
        schedule = load_schedule(layout.schedule)
    except InputError:
        return []  # said by _schedule_rules
    problems = misfits(schedule, layout.pp, layout.vpp, micro_batches)
    if problems:
        return [problem for problem in problems if problem.field == "training.global_batch"]
    passes = (3 if schedule.splits_backward else 2) * layout.virtual_stages * micro_batches
    if passes > MOST_ACTIONS:
        return [
            Problem(
                "training.global_batch",
                f"a step of {micro_batches} micro-batches on {layout.virtual_stages} stages has {passes} passes; "
                f"at most {MOST_ACTIONS} are simulated",
            )
        ]
    return []


def batch_rules(parts: Parts) -> list[Problem]:
    """Batch = micro-batch x micro-batches x replicas."""
    training, layout = parts.training, parts.layout
    if training is None or layout is None:
        return []
    replicas = parts.replicas
    if replicas is None:
        return []
    dp = replicas // layout.cp
    batch, each = training.global_batch, layout.micro_batch * dp
    if batch % each:
        near = sorted({max(batch // each, 1) * each, (batch // each + 1) * each})
        sizes = [n for n in divisors(batch // dp) if n <= batch] if batch % dp == 0 else []
        also = f"; or micro_batch {nearest_numbers(layout.micro_batch, sizes)}" if sizes else ""
        return [
            Problem(
                "training.global_batch",
                f"global_batch={batch} is not a multiple of micro_batch x dp = {layout.micro_batch} x {dp} = {each}; "
                f"nearest batches: {', '.join(map(str, near))}{also}",
            )
        ]
    return _step_rules(layout, batch // each)


def precision_rules(parts: Parts) -> list[Problem]:
    """Numbers that the device computes and the framework keeps."""
    problems: list[Problem] = []
    if parts.training is None:
        return problems
    precision = parts.training.precision
    if parts.machine is not None and precision not in parts.machine.device.peak:
        known = ", ".join(parts.machine.device.peak)
        problems.append(
            Problem("training.precision", f"{parts.machine.device.name} has no peak for {precision}; it has {known}")
        )
    if parts.framework is not None and precision not in parts.framework.precisions:
        known = ", ".join(parts.framework.precisions)
        problems.append(
            Problem(
                "training.precision",
                f"framework {parts.framework.name} is not described for {precision}; it has {known}",
            )
        )
    return problems


def device_rules(parts: Parts, layout: Layout) -> tuple[int | None, list[Problem]]:
    """Devices = tp x pp x cp x dp, on whole nodes that the machine has; the devices, where they are clear."""
    machine, devices, nodes = parts.machine, parts.devices, parts.nodes
    replica = layout.model_parallel
    formula = f"tp x pp x cp = {layout.tp} x {layout.pp} x {layout.cp} = {replica}"
    if nodes is not None:
        if machine is None:
            return None, []
        on_nodes = nodes * machine.devices_per_node
        if devices is not None and devices != on_nodes:
            message = (
                f"devices={devices} and nodes={nodes} disagree: {nodes} nodes of {machine.name} hold {on_nodes} "
                f"{machine.device.words}; give one of them, or nodes={-(-devices // machine.devices_per_node)}"
            )
            return None, [Problem("devices", message)]
        devices = on_nodes
    if devices is None:
        if layout.dp is None:
            return None, [Problem("devices", "is needed and missing; give devices, nodes or layout.dp")]
        devices = replica * layout.dp
    problems: list[Problem] = []
    near = _around(devices, replica if machine is None else math.lcm(replica, machine.devices_per_node))
    if layout.dp is not None and devices != replica * layout.dp:
        also = f" or dp={devices // replica}" if devices % replica == 0 else ""
        problems.append(
            Problem(
                "layout.dp",
                f"devices={devices} is not tp x pp x cp x dp = {layout.tp} x {layout.pp} x {layout.cp} x {layout.dp} "
                f"= {replica * layout.dp}; it can be devices={replica * layout.dp}{also}",
            )
        )
    elif devices % replica:
        problems.append(Problem("devices", f"devices={devices} is not a multiple of {formula}; nearest: {near}"))
    if machine is not None:
        words, total = machine.device.words, machine.device_count
        if devices > total:
            most = total // replica * replica or total
            problems.append(
                Problem(
                    "devices",
                    f"devices={devices} are more than the {total} {words} of {machine.name} "
                    f"({machine.node_count} nodes of {machine.devices_per_node}); at most {most}",
                )
            )
        elif devices > machine.devices_per_node and devices % machine.devices_per_node:
            problems.append(
                Problem(
                    "devices",
                    f"devices={devices} is not a whole number of nodes of {machine.devices_per_node} {words}; "
                    f"nearest: {near}",
                )
            )
    return devices, problems


def _around(number: int, step: int) -> str:
    """The multiples of a step on both sides of a number."""
    below = number // step * step
    return ", ".join(str(n) for n in (below, below + step) if n)
