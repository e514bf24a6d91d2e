"""Numbers and layouts in the words people use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..topology.units import format_bandwidth, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..scenarios.perturb import LinkFault, SlowDevice
    from ..scenarios.scenario import Scenario
    from ..topology.machine import Machine


def counted(count: int, word: str) -> str:
    """So many of something.

    >>> counted(3072, "GCD"), counted(1, "node")
    ('3,072 GCDs', '1 node')
    """
    return f"{count:,} {word if count == 1 else plural(word)}"


def device_words(machine: Machine, devices: int) -> str:
    """How many devices these are in the words of the machine, with nodes and modules where they are whole.

    >>> from exatwin.topology.machine import load_machine
    >>> device_words(load_machine("frontier"), 3072)
    '3,072 GCDs = 384 nodes = 1,536 MI250X modules'
    >>> device_words(load_machine("fugaku"), 192)
    '192 nodes'
    """
    device = machine.device
    text = counted(devices, device.word)
    if machine.devices_per_node > 1 and devices % machine.devices_per_node == 0:
        text += f" = {counted(devices // machine.devices_per_node, 'node')}"
    if device.devices_per_module > 1 and devices % device.devices_per_module == 0:
        word = f"{device.module_word} module" if device.module_word else "module"
        text += f" = {counted(devices // device.devices_per_module, word)}"
    return text


def layout_words(scenario: Scenario) -> str:
    """The layout and what of the training goes with it, in one line."""
    layout, training = scenario.layout, scenario.training
    recompute = layout.recompute if isinstance(layout.recompute, str) else "by stage"
    words = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    words += [
        f"{name} {value}" for name, value in (("vpp", layout.vpp), ("cp", layout.cp), ("ep", layout.ep)) if value > 1
    ]
    words += [layout.schedule, training.precision, f"ZeRO-{layout.zero}", f"recompute {recompute}"]
    words += ["uneven stages"] if layout.stage_layers else []
    words += ["sequence parallel"] if layout.sequence_parallel else []
    words += ["flash attention" if layout.flash_attention else "unfused attention"]
    return ", ".join(words)


def placement_words(scenario: Scenario) -> list[str]:
    """What the scenario says of its placement, and which of its groups leave a node.

    >>> from exatwin.scenarios.scenario import load_scenario
    >>> placement_words(load_scenario("frontier-1t", ["placement.nodes=spread"]))[0]
    'nodes spread'
    """
    from ..sim.traffic import placement_of
    from ..topology.placement import crossings

    spec = scenario.placement
    said = [f"rank order {spec.order}"] if "order" in spec.model_fields_set else []
    said += ["devices of a node reordered"] if spec.device_order else []
    if spec.nodes == "spread":
        said.append(f"nodes spread over {spec.groups} groups" if spec.groups else "nodes spread")
    elif spec.nodes != "contiguous":
        said.append("nodes as listed")
    said += [f"torus {'x'.join(map(str, spec.shape))}"] if spec.shape else []
    layout = scenario.layout
    leaving = crossings(placement_of(scenario), scenario.machine, layout.cp, layout.ep, layout.etp)
    return [*([", ".join(said)] if said else []), *leaving]


def perturbation_words(scenario: Scenario) -> list[str]:
    """What is not as it should be, an entry each.

    >>> from exatwin.scenarios.scenario import load_scenario
    >>> perturbation_words(load_scenario("frontier-1t", ["perturb.nics=[{node: 6, nic: hsn0, rate: 0.5}]"]))
    ['NIC hsn0 of node 6 at 50 %']
    """
    return list(_perturbations(scenario))


def _perturbations(scenario: Scenario) -> Iterator[str]:
    perturb = scenario.perturb
    for slow in perturb.devices:
        yield f"{_slow_device(slow)} at {slow.speed:.0%} of its speed".replace("%", " %")
    for nic in perturb.nics:
        yield f"NIC {nic.nic} of node {nic.node} {_rate(nic.rate)}"
    for link in perturb.links:
        yield f"{_link(link, scenario)} {_rate(link.rate)}"
    for stream in perturb.background:
        rate = format_bandwidth(stream.rate)
        yield f"{rate} of another job, node {stream.source} to {stream.target}"
    if perturb.jitter:
        yield f"jitter of {perturb.jitter.spread:.3g} of each action's time, seed {perturb.jitter.seed}"


def _slow_device(slow: SlowDevice) -> str:
    return f"rank {slow.rank}" if slow.node is None else f"node {slow.node}"


def _link(link: LinkFault, scenario: Scenario) -> str:
    if link.groups:
        return f"links between groups {link.groups[0]} and {link.groups[1]}"
    if link.ends:
        return f"links between {link.ends[0]} and {link.ends[1]}"
    a, b = link.between or (0, 0)
    if "switch" in (a, b):
        return f"link of {scenario.machine.device.word} {b if a == 'switch' else a} to the switch of node {link.node}"
    return f"link between {scenario.machine.device.words} {a} and {b} of node {link.node}"


def _rate(share: float) -> str:
    return f"at {100 * share:.3g} %" if share else "failed"


def parameter_words(count: float) -> str:
    """A count of parameters.

    >>> parameter_words(174.7e9), parameter_words(1.0081e12), parameter_words(0)
    ('175B', '1.01T', '0')
    """
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            scaled = count / factor
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.3g}{unit}"
    return f"{count:.0f}"


def token_words(tokens: float) -> str:
    """A number of tokens.

    >>> token_words(20e12), token_words(380e9), token_words(5)
    ('20T', '380B', '5')
    """
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= factor:
            return f"{tokens / factor:g}{unit}"
    return f"{tokens:,.0f}"


def difference(predicted: float, published: float) -> str:
    """How far a prediction is from what was published, relative.

    >>> difference(61.812, 61.2)
    '+1.0 %'
    """
    return signed_percent(predicted / published - 1)


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.3196)
    '32.0 %'
    """
    return f"{share * 100:.1f} %"


def signed_percent(share: float) -> str:
    """A relative difference in percent.

    >>> signed_percent(-0.021), signed_percent(-1e-9)
    ('-2.1 %', '+0.0 %')
    """
    return f"{round(share * 100, 1) + 0.0:+.1f} %"


def tera(value: float) -> str:
    """A rate in 1e12 a second.

    >>> tera(61.2e12), tera(0.92e12)
    ('61.2', '0.92')
    """
    return f"{value / 1e12:,.{1 if value >= 10e12 else 2}f}"


def gib(value: float) -> str:
    """Bytes in GiB, the unit left to the heading.

    >>> gib(64 * 2**30)
    '64.0'
    """
    return f"{value / 2**30:,.1f}"


def fact_text(value: Any) -> str:
    """A value as its file writes it; a long list by its length.

    >>> fact_text("200 Gb/s"), fact_text([[0, 1], [2, 3]]), fact_text(list(range(99)))
    ('200 Gb/s', '[[0, 1], [2, 3]]', '99 entries')
    """
    if isinstance(value, (list, dict)):
        text = json.dumps(value)
        return text if len(text) <= 60 else f"{len(value)} entries"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
