"""An optimizer on the host: its state in the host's memory, its work on the host's cores.

Source: Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload), sections 4 and 5: gradients go down,
Adam runs on the cores, weights come back tile by tile while later tiles are worked on.
"""

from __future__ import annotations

from ..scenarios.scenario import Scenario
from ..topology.errors import input_error
from ..topology.machine import Node
from . import shards
from .ops import ELEMENT_BYTES

_STATE_BYTES = 12  # master weight and two moments in fp32, each read and written


def adam_host_bytes(gradient_bytes: float, weight_bytes: float) -> float:
    """Bytes a parameter that Adam moves through the host's memory.

    It reads the gradient, the master weight and both moments, and writes the last three and the weight that
    goes back.

    >>> adam_host_bytes(gradient_bytes=2, weight_bytes=2)
    28
    """
    return gradient_bytes + 2 * _STATE_BYTES + weight_bytes


def offloaded_step_s(
    owned: float, gradient_bytes: float, weight_bytes: float, node: Node, *, gradients_are_down: bool = False
) -> float:
    """Seconds of an optimizer step on the host, for the parameters of one device, every device doing the same.

        t = gradients / link + max(Adam's bytes / share of the memory, weights / link)

    The first term is hidden where gradients go down while the backward still runs. The rates are those that are
    printed: Adam on the cores is taken to be bound by memory, as DeepSpeed's is (ZeRO-Offload, section 5.1).

    Args:
        owned: Parameters whose state this device's process keeps.
        gradient_bytes: Bytes of a gradient as it goes down.
        weight_bytes: Bytes of a weight as it comes back.
        node: What joins device and host.
        gradients_are_down: They went during the backward.

    Raises:
        InputError: If the machine says nothing of its host.
    """
    if node.host_link is None or node.host_memory_bandwidth is None:
        raise input_error("an optimizer on the host needs node.host_link and node.host_memory_bandwidth")
    link, memory = node.host_link.value, node.host_memory_bandwidth.value / node.devices
    down = 0.0 if gradients_are_down else owned * gradient_bytes / link
    return down + owned * max(adam_host_bytes(gradient_bytes, weight_bytes) / memory, weight_bytes / link)


def host_optimizer_s(scenario: Scenario, owned: float) -> float:
    """The same for a scenario: gradients as they are added up, weights as the layers compute with them.

    Gradients that each micro-batch reduces beside its backward go down there; a sum over micro-batches goes down
    at the end.
    """
    states = shards.state_bytes(scenario)
    layout, reduce = scenario.layout, scenario.framework.reduce
    beside = shards.reduces_in_pass(scenario) and (layout.overlap_grad_reduce or layout.zero in reduce.overlapped)
    return offloaded_step_s(
        owned,
        states.accumulation or states.gradient,
        ELEMENT_BYTES[scenario.training.precision],
        scenario.machine.node,
        gradients_are_down=beside,
    )
