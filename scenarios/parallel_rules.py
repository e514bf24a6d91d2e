"""What sequence, context and expert parallelism need of a model, a training and the devices.

Each rule gives a problem with the rule, the numbers that break it, and the nearest choices
that would not.
"""

from __future__ import annotations

import math

from ..topology.errors import Problem, nearest_numbers
from .layout import Layout
from .model import Model, divisors
from .training import Training


def sequence_rules(model: Model | None, training: Training, layout: Layout) -> list[Problem]:
    """How the tokens of a sequence are cut: over the context-parallel group, and with SP over the tensor group."""
    seq, cp, tp = training.seq_len, layout.cp, layout.tp
    # With the causal mask each rank takes two pieces, one from either end, so that all have the same work.
    pieces = 2 if layout.cp_attention != "all_to_all" else 1
    problems = []
    if cp > 1 and seq % (pieces * cp):
        asked = f"2 x cp = 2 x {cp} = {2 * cp}" if pieces == 2 else f"cp={cp}"
        choices = nearest_numbers(cp, [n for n in divisors(seq) if seq % (pieces * n) == 0] or [1])
        problems.append(
            Problem("layout.cp", f"{asked} does not divide the seq_len={seq} tokens of a sequence; cp can be {choices}")
        )
    elif layout.sequence_parallel and seq % (cp * tp):
        cut = f"tp={tp}" if cp == 1 else f"cp x tp = {cp} x {tp} = {cp * tp}"
        below, above = seq // (cp * tp) * cp * tp, -(-seq // (cp * tp)) * cp * tp
        near = ", ".join(str(n) for n in (below, above) if n)
        problems.append(
            Problem(
                "layout.sequence_parallel",
                f"{cut} does not divide the seq_len={seq} tokens of a sequence; nearest seq_len: {near}",
            )
        )
    if cp > 1 and layout.cp_attention == "ring" and not layout.flash_attention:
        problems.append(
            Problem(
                "layout.cp_attention",
                "ring joins blocks by the statistics of fused attention, but flash_attention is false; "
                "set flash_attention: true, or cp_attention to all_gather or all_to_all",
            )
        )
    if model is not None and cp > 1 and layout.cp_attention == "all_to_all" and model.heads % tp == 0:
        heads = max(math.gcd(model.heads, model.kv_heads or model.heads) // tp, 1)
        if heads % cp:
            choices = nearest_numbers(cp, divisors(heads))
            problems.append(
                Problem(
                    "layout.cp",
                    f"cp={cp} does not divide the {heads} key and value heads of a tensor rank of {model.name}, "
                    f"which all_to_all shares out; cp can be {choices}, or cp_attention ring or all_gather",
                )
            )
    return problems


def expert_rules(model: Model, layout: Layout, replicas: int | None) -> list[Problem]:
    """What the experts are spread over.

    Args:
        model: What is trained.
        layout: How it is cut.
        replicas: dp x cp, where it is clear.
    """
    ep, tp = layout.ep, layout.tp
    if model.experts is None:
        return [
            Problem(f"layout.{key}", f"{key}={value} is for experts, and {model.name} has none; leave it out")
            for key, value in (("ep", ep), ("etp", layout.etp or 1))
            if value > 1
        ]
    problems = []
    if model.experts % ep:
        choices = nearest_numbers(ep, divisors(model.experts))
        problems.append(
            Problem(
                "layout.ep", f"ep={ep} does not divide the {model.experts} experts of {model.name}; ep can be {choices}"
            )
        )
    etp, width = layout.etp or tp, model.expert_width
    if tp % etp:
        choices = nearest_numbers(etp, divisors(tp))
        problems.append(Problem("layout.etp", f"etp={etp} does not divide tp={tp}; etp can be {choices}"))
    elif width % etp:
        choices = nearest_numbers(etp, divisors(math.gcd(tp, width)))
        problems.append(
            Problem(
                "layout.etp",
                f"etp={etp} does not divide the width {width} of an expert of {model.name}; etp can be {choices}",
            )
        )
    elif replicas is not None and replicas * tp % (ep * etp):
        choices = nearest_numbers(ep, [n for n in divisors(model.experts) if replicas * tp // etp % n == 0])
        problems.append(
            Problem(
                "layout.ep",
                f"ep x etp = {ep} x {etp} = {ep * etp} does not divide tp x cp x dp = {replicas * tp}, "
                f"the ranks of a stage; ep can be {choices}",
            )
        )
    return problems
