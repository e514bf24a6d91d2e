"""Scenarios that tests of costs ask, said in few words."""

from __future__ import annotations

from exatwin.scenarios.scenario import Scenario, scenario_from_document
from exatwin.sim.calibration import default_calibration
from exatwin.sim.costs import JobCost, job_cost
from exatwin.sim.traffic import build_traffic

GPT = {"name": "gpt", "layers": 4, "hidden": 2048, "heads": 16, "vocab": 50257}
LLAMA = {
    "name": "llama", "layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    "gated": True, "tied": False, "positions": "rotary", "norm": "rms", "bias": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"name": "mixtral", "vocab": 32000, "experts": 8, "top_k": 2}
DEEPSEEK = LLAMA | {
    "name": "deepseek", "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 192, "rope_dim": 64,
    "v_head_dim": 128, "kv_rank": 512, "q_rank": 1536, "ffn": 10944, "experts": 64, "top_k": 6, "expert_ffn": 1408,
    "shared_experts": 2, "dense_layers": 1,
}  # fmt: skip


def asked(model, devices=8, framework="megatron-core", machine="dgx-h100", layout=None, **training) -> Scenario:
    """A scenario of a model on some devices, 4,096 tokens a sequence."""
    document = {
        "name": "asked",
        "machine": machine,
        "devices": devices,
        "model": model,
        "training": {"seq_len": 4096, "global_batch": 16, "precision": "bf16"} | training,
        "layout": layout or {},
        "framework": framework,
    }
    return scenario_from_document(document, "asked")


def cost_of(scenario: Scenario) -> JobCost:
    """Its costs with its machine's own calibration."""
    calibration = default_calibration(scenario.machine)
    return job_cost(scenario, calibration, build_traffic(scenario, calibration))
