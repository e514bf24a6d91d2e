"""Rules about what replicas share: ZeRO stages, shard groups, second copies, the optimizer on the host."""

from __future__ import annotations

from ..topology.errors import Problem, nearest_numbers
from ..topology.machine import load_machine, machine_names
from .framework import Framework, framework_names, load_framework
from .layout import Layout
from .model import divisors
from .rules import Parts


def sharding_rules(parts: Parts) -> list[Problem]:
    """Layout against framework, replicas and machine."""
    layout = parts.layout
    if layout is None:
        return []
    problems = [] if parts.framework is None else _stage_rules(layout, parts.framework)
    problems += _group_rules(layout, parts.replicas)
    problems += _secondary_rules(layout, parts.replicas)
    if layout.overlap_param_gather and layout.zero == 0:
        problems.append(
            Problem(
                "layout.overlap_param_gather",
                "overlap_param_gather has nothing to gather with zero=0, where every replica updates all weights; "
                "set zero=1 or more",
            )
        )
    if layout.offload_optimizer and parts.machine is not None:
        node = parts.machine.node
        if node.host_link is None or node.host_memory_bandwidth is None:
            known = [name for name in machine_names() if load_machine(name).node.host_link is not None]
            problems.append(
                Problem(
                    "layout.offload_optimizer",
                    f"{parts.machine.name} says nothing of its host; it needs node.host_link and "
                    f"node.host_memory_bandwidth, as {', '.join(known)} have them",
                )
            )
    return problems


def _stage_rules(layout: Layout, framework: Framework) -> list[Problem]:
    zero, sharding = layout.zero, framework.sharding
    has = tuple(s for s in sharding.stages if layout.pp == 1 or s in sharding.pipeline_stages)
    if zero in has:
        return []
    where = "" if zero not in sharding.stages else f" with pp={layout.pp}"
    others = [name for name in framework_names() if _has(load_framework(name), zero, layout.pp)]
    also = f"; zero={zero} is in {', '.join(others)}" if others else ""
    return [
        Problem("layout.zero", f"{framework.name} has no zero={zero}{where}; it has zero={_listed(has)}{also}"),
    ]


def _has(framework: Framework, zero: int, pp: int) -> bool:
    sharding = framework.sharding
    return zero in sharding.stages and (pp == 1 or zero in sharding.pipeline_stages)


def _listed(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))


def _group_rules(layout: Layout, replicas: int | None) -> list[Problem]:
    size, field = layout.shard_group, "layout.shard_group"
    if size is None:
        return []
    if layout.zero == 0:
        return [Problem(field, f"shard_group={size} shards nothing with zero=0; set zero=1, 2 or 3")]
    if layout.ep > 1:
        return [Problem(field, f"shard_group={size} goes with ep=1; experts over ep={layout.ep} are shared by all")]
    return _divides(field, "shard_group", size, replicas)


def _secondary_rules(layout: Layout, replicas: int | None) -> list[Problem]:
    size, field = layout.secondary_shards, "layout.secondary_shards"
    if size is None:
        return []
    if layout.zero != 3 or not layout.reshard_after_forward:
        message = f"secondary_shards={size} is for a backward that gathers its weights again"
        return [Problem(field, f"{message}: set zero=3 and reshard_after_forward=true")]
    if layout.shard_group is not None:
        message = f"secondary_shards={size} and shard_group={layout.shard_group} are two ways to stay near; give one"
        return [Problem(field, message)]
    if layout.ep > 1:
        return [Problem(field, f"secondary_shards={size} goes with ep=1, not ep={layout.ep}")]
    return _divides(field, "secondary_shards", size, replicas)


def _divides(field: str, name: str, size: int, replicas: int | None) -> list[Problem]:
    if replicas is None or replicas % size == 0:
        return []
    choices = nearest_numbers(size, divisors(replicas))
    message = f"{name}={size} does not divide the {replicas} replicas (dp x cp); it can be {choices}"
    return [Problem(field, message)]
