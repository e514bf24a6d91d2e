"""Any valid scenario, drawn at random: every machine, framework and schedule, and every way to cut a model.

Small enough to be played event by event.
"""

from __future__ import annotations

import math
from functools import cache

from hypothesis import strategies as st

from exatwin.scenarios.framework import framework_names, load_framework
from exatwin.scenarios.model import divisors
from exatwin.scenarios.scenario import scenario_from_document
from exatwin.scenarios.schedules import SCHEDULES
from exatwin.sim.calibration import default_calibration
from exatwin.topology.machine import load_machine, machine_names

MOST_DEVICES = 192

calibration = cache(lambda name: default_calibration(load_machine(name)))
framework = cache(load_framework)


@cache
def degrees(per_node, most):
    """(tp, pp, cp, dp) on a part of a node or on whole nodes."""
    return [
        (tp, pp, cp, dp)
        for tp in (1, 2, 3, 4, 6, 8, 16)
        for pp in (1, 2, 3, 4, 6, 8)
        for cp in (1, 2, 4)
        for dp in (1, 2, 3, 4, 6, 8)
        if (devices := tp * pp * cp * dp) <= per_node or (devices % per_node == 0 and devices <= most)
    ]


def mostly(value, strategy):
    """A value, or once in a while another."""
    return st.one_of(st.just(value), st.just(value), strategy)


@st.composite
def scenarios(draw):
    """A valid scenario."""
    machine = load_machine(draw(st.sampled_from(machine_names())))
    tp, pp, cp, dp = draw(st.sampled_from(degrees(machine.devices_per_node, min(machine.device_count, MOST_DEVICES))))
    rates = set(calibration(machine.name).compute.gemm_fraction)
    kind = framework(draw(st.sampled_from([n for n in framework_names() if rates & set(framework(n).precisions)])))
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    chunks = st.sampled_from(schedule.chunks) if schedule.chunks else st.integers(schedule.least_chunks, 3)
    vpp, least = draw(chunks), schedule.least_micro_batches(pp)
    stages, micro_batch = pp * vpp, draw(st.integers(1, 4))
    stage_layers = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    even, flash = draw(st.booleans()), draw(st.booleans())
    layers = stages * stage_layers[0] if even else sum(stage_layers)
    layout = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "vpp": vpp,
        "micro_batch": micro_batch,
        "schedule": schedule.name,
        "sequence_parallel": draw(st.booleans()),
        "cp_attention": draw(st.sampled_from(["all_gather", "all_to_all", *["ring"] * flash])),
        "flash_attention": flash,
        "stage_layers": None if even else stage_layers,
        **draw(recomputation(pp)),
    }
    whole_heads = cp if layout["cp_attention"] == "all_to_all" else 1
    groups = whole_heads * draw(st.integers(1, 2))
    heads, head_dim = tp * groups * draw(st.integers(1, 3)), draw(st.sampled_from([16, 64, 128]))
    model = {
        "layers": layers,
        "hidden": heads * head_dim,
        "heads": heads,
        "kv_heads": tp * groups,
        "ffn": tp * draw(st.integers(1, 4096)),
        "vocab": draw(st.integers(2, 200_000)),
        "gated": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "positions": draw(st.sampled_from(["learned", "rotary", "alibi"])),
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "bias": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
    }
    if draw(mostly(False, st.just(True))):
        experts, spread = draw(experts_of(tp, layers, cp * dp))
        model, layout = model | experts, layout | spread
    layout |= draw(sharing(kind, machine, pp, cp * dp, layout.get("ep", 1)))
    dropout = st.sampled_from([0.0, 0.1])
    return scenario_from_document(
        {
            "name": "random",
            "machine": machine.name,
            "devices": tp * pp * cp * dp,
            "model": model,
            "training": {
                "seq_len": 2 * cp * tp * draw(st.integers(1, 8192 // (2 * cp * tp))),
                "global_batch": micro_batch * dp * draw(st.integers(least, least + 11)),
                "precision": draw(st.sampled_from(sorted(rates & set(kind.precisions)))),
                "tokens": draw(st.sampled_from([1, 1e9, 20e12])),
                "attention_dropout": draw(dropout),
                "hidden_dropout": draw(dropout),
                "gradient_clipping": draw(st.booleans()),
                "accumulate_fp32": draw(st.sampled_from([None, True, False])),
                "expert_imbalance": draw(st.sampled_from([1.0, 1.5])),
                "capacity_factor": draw(st.sampled_from([None, 1.25])),
            },
            "layout": layout,
            "framework": kind.name,
        }
    )


@st.composite
def recomputation(draw, pp):
    """What the backward pass runs again: all alike, or each stage in its way."""
    mode = st.sampled_from(["none", "selective", "full"])
    parts = st.sampled_from(["attention", "norm", "activation", "experts"])
    return {
        "recompute": draw(st.one_of(mode, st.lists(mode, min_size=pp, max_size=pp))),
        "recompute_ops": draw(mostly(["attention"], st.lists(parts, min_size=1, unique=True))),
        "recompute_layers": draw(mostly(None, st.integers(1, 3))),
        "recompute_every": draw(mostly(1, st.integers(1, 3))),
    }


@st.composite
def experts_of(draw, tp, layers, replicas):
    """Experts of a model, and how they are spread over the ranks of a stage."""
    experts = draw(st.sampled_from([4, 6, 8]))
    etp = draw(st.sampled_from(divisors(tp)))
    ep = draw(st.sampled_from(divisors(math.gcd(experts, replicas * tp // etp))))
    shared = draw(st.integers(0, 1))
    model = {
        "experts": experts,
        "top_k": draw(st.integers(1, 4)),
        "expert_ffn": tp * draw(st.integers(1, 2048)),
        "shared_experts": shared,
        "shared_gate": bool(shared) and draw(st.booleans()),
        "dense_layers": draw(st.integers(0, min(layers - 1, 2))),
    }
    return model, {"ep": ep, "etp": etp}


@st.composite
def sharing(draw, kind, machine, pp, replicas, ep):
    """What replicas share, and what runs beside the passes."""
    sharding = kind.sharding
    zero = draw(st.sampled_from([s for s in sharding.stages if pp == 1 or s in sharding.pipeline_stages]))
    layout = {
        "zero": zero,
        "reshard_after_forward": draw(st.booleans()),
        "prefetch": draw(st.integers(0, 2)),
        "overlap_grad_reduce": draw(st.booleans()),
        "overlap_param_gather": zero > 0 and draw(st.booleans()),
        "offload_optimizer": machine.node.host_link is not None and draw(st.integers(0, 3)) == 0,
    }
    if zero > 0 and ep == 1:
        layout["shard_group"] = draw(mostly(None, st.sampled_from(divisors(replicas))))
    if zero == 3 and ep == 1 and layout["reshard_after_forward"] and layout["shard_group"] is None:
        layout["secondary_shards"] = draw(mostly(None, st.sampled_from(divisors(replicas))))
    return layout
