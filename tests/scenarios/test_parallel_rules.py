"""Sequence, context and expert parallelism that cannot be: what is said, and what is offered."""

from __future__ import annotations

import pytest

from exatwin.scenarios.scenario import scenario_from_document
from exatwin.topology.errors import InputError

DENSE = {"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "vocab": 50257, "name": "dense"}
EXPERTS = DENSE | {"name": "mixed", "experts": 12, "top_k": 2, "expert_ffn": 1536}


def built(model, devices=16, seq_len=4096, **layout):
    document = {
        "machine": "dgx-h100",
        "devices": devices,
        "model": model,
        "training": {"seq_len": seq_len, "global_batch": 96, "precision": "bf16"},
        "layout": layout,
        "framework": "megatron-core",
    }
    return scenario_from_document(document, "asked")


@pytest.mark.parametrize(
    ("model", "layout", "field", "words"),
    [
        (DENSE, {"seq_len": 1000, "cp": 8}, "layout.cp", ["2 x cp = 2 x 8 = 16", "seq_len=1000", "cp can be"]),
        (DENSE, {"cp": 2, "flash_attention": False}, "layout.cp_attention", ["ring", "flash_attention: true"]),
        (DENSE, {"cp": 8, "cp_attention": "all_to_all"}, "layout.cp", ["cp=8", "4 key and value heads", "1, 2, 4"]),
        (
            DENSE,
            {"seq_len": 1026, "tp": 4, "sequence_parallel": True},
            "layout.sequence_parallel",
            ["tp=4", "seq_len=1026", "1024, 1028"],
        ),
        (DENSE, {"ep": 2}, "layout.ep", ["ep=2", "dense has none"]),
        (DENSE, {"tp": 2, "etp": 2}, "layout.etp", ["etp=2", "dense has none"]),
        (EXPERTS, {"ep": 8}, "layout.ep", ["ep=8", "12 experts of mixed", "6, 12"]),
        (EXPERTS, {"tp": 4, "etp": 3}, "layout.etp", ["etp=3 does not divide tp=4", "1, 2, 4"]),
        (EXPERTS, {"tp": 4, "ep": 6}, "layout.ep", ["6 x 4 = 24", "tp x cp x dp = 16", "ep can be"]),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_can(model, layout, field, words):
    with pytest.raises(InputError) as caught:
        built(model, **layout)
    (problem,) = [problem for problem in caught.value.problems if problem.field == field]
    assert all(word in problem.message for word in words), problem.message


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, {"cp": 8}),
        (DENSE, {"cp": 4, "cp_attention": "all_to_all"}),
        (DENSE, {"cp": 2, "cp_attention": "all_gather", "flash_attention": False}),
        (DENSE, {"tp": 4, "cp": 2, "sequence_parallel": True}),
        (DENSE, {"sequence_parallel": True}),
        (EXPERTS, {"ep": 4}),
        (EXPERTS, {"tp": 4, "etp": 1, "ep": 4}),
        (EXPERTS, {"devices": 24, "tp": 4, "etp": 2, "ep": 12}),
        (EXPERTS, {"cp": 4, "ep": 4}),
    ],
)
def test_a_layout_that_can_be_is_taken(model, layout):
    assert built(model, **layout).layout.cp == layout.get("cp", 1)
