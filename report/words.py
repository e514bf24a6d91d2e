"""Numbers and layouts in the words people use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..scenarios.scenario import Scenario
    from ..topology.machine import Machine


def counted(count: int, word: str) -> str:
    """So many of something.

    >>> counted(3072, "GCD"), counted(1, "node")
    ('3,072 GCDs', '1 node')
    """
    return f"{count:,} {word}" + ("" if count == 1 else "s")


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
