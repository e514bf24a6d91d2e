"""Counts that need no clock are those of the simulation: parameters, FLOP, bytes sent, bytes held."""

from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

from exatwin.scenarios.flop import Asked, count_flop
from exatwin.scenarios.scenario import scenario_from_document
from exatwin.sim.predict import predict
from exatwin.sim.shards import stage_parameters
from exatwin.trainer.clock import Clock
from exatwin.trainer.comm import CommLog
from exatwin.trainer.grid import build_grid
from exatwin.trainer.loop import Trainer
from exatwin.trainer.measure import read_step
from exatwin.trainer.worker import memory_parts

from .ranks import lone_grid, on_ranks, quiet_ranks, torch  # noqa: F401

DOCUMENT = {
    "name": "counts",
    "machine": "local",
    "framework": "exatwin",
    "model": {"layers": 8, "hidden": 64, "heads": 8, "vocab": 256, "vocab_multiple": 8},
    "training": {"seq_len": 32, "global_batch": 16, "precision": "fp32"},
    "layout": {"micro_batch": 1, "dp": 1},
}
LLAMA = (
    "model.gated=true model.norm=rms model.positions=rotary model.tied=false model.bias=false model.kv_heads=4 "
    "model.layers=4"
)
EXPERTS = f"{LLAMA} model.experts=4 model.top_k=2 model.ffn=64"
LATENT = "model.gated=true model.positions=rotary model.bias=false model.kv_rank=16 model.q_rank=24 model.rope_dim=4"
SP = "tp=2 sequence_parallel=true"

LAYOUTS = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 overlap_grad_reduce=true",
    "dp=2 zero=2",
    "dp=2 zero=3",
    f"{LLAMA} dp=2 zero=2",
    f"{LLAMA} dp=2 zero=3",
    f"{LLAMA} dp=2 zero=3 training.precision=bf16 tp=2",
    f"{LLAMA} dp=4 zero=3 shard_group=2",
    "tp=2",
    "tp=4",
    SP,
    f"{SP} {LLAMA} model.qk_norm=true",
    f"{SP} dp=2 zero=1 recompute=full",
    "tp=2 recompute=full",
    "tp=2 dp=2 zero=1 training.precision=bf16",
    "cp=2 cp_attention=ring",
    "cp=4 cp_attention=ring",
    "cp=2 cp_attention=all_gather",
    "cp=2 cp_attention=all_to_all",
    f"cp=2 {SP} dp=2",
    "pp=2",
    "pp=4 schedule=gpipe",
    "pp=2 vpp=2 schedule=interleaved",
    f"pp=2 {SP} schedule=zb-h1",
    "pp=2 vpp=2 schedule=zb-v",
    "pp=2 vpp=2 schedule=dualpipe-v dp=2",
    f"{LLAMA} pp=2 dp=2 zero=2",
    f"{LLAMA} pp=2 dp=2 zero=3",
    f"{LLAMA} pp=2 dp=2 tp=2 zero=1",
    f"{EXPERTS} dp=2 ep=2",
    f"{EXPERTS} dp=4 ep=2 zero=1",
    f"{EXPERTS} dp=2 {SP} ep=2",
    f"{EXPERTS} dp=2 {SP} ep=4 etp=1",
]


def asked(changes):
    fields = [change if "." in change.partition("=")[0] else f"layout.{change}" for change in changes.split()]
    return scenario_from_document(DOCUMENT, "counts", fields)


def counted(rank, scenario):
    """What a rank sends and holds in its second step, and where it stands."""
    log = CommLog(Clock())
    trainer = Trainer(scenario, build_grid(scenario, rank, torch.device("cpu"), log), balanced=True)
    begin, count = trainer.rows
    shape = scenario.training.global_batch, scenario.training.seq_len + 1
    batch = np.random.default_rng(0).integers(0, scenario.model.vocab, shape)[begin : begin + count]
    step = [read_step(trainer.step(number, batch), log.clock, 0.0) for number in range(2)][-1]
    sent = {key: traffic.bytes for key, traffic in step.comm.items() if key[0] != "world"}
    place = trainer.grid.place
    return (place.pp, place.dp, place.cp, place.tp), sent, memory_parts(trainer, 0.0), trainer.parameters


@pytest.mark.parametrize("changes", LAYOUTS)
def test_a_run_sends_and_holds_what_is_predicted(changes):
    scenario = asked(changes)
    prediction = predict(scenario)
    predicted = defaultdict(float)
    for record in prediction.comm:
        predicted[record.group, record.op] += record.bytes
    ranks = on_ranks(scenario.devices, counted, scenario)
    held = {place[0]: rest for place, *rest in ranks if not any(place[1:])}
    sent = held[prediction.slowest_stage][0]
    assert sent == pytest.approx(dict(predicted), rel=1e-9)
    for stage, (_, parts, count) in held.items():
        assert count == stage_parameters(scenario)[stage].total
        known = prediction.memory.stages[stage].parts
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(parts, part) == pytest.approx(getattr(known, part), rel=1e-9), (stage, part)


@pytest.mark.parametrize(
    "changes",
    ["", "recompute=full", "recompute=selective", LLAMA, EXPERTS, f"{LATENT} model.head_dim=12", "micro_batch=4"],
)
def test_the_products_of_a_step_are_those_that_are_counted(changes):
    """torch counts what it runs; it knows no fused attention on CPUs, so attention is in products of its own."""
    scenario = asked(f"flash_attention=false {changes}")
    trainer = Trainer(scenario, lone_grid(), balanced=True)
    batch = np.zeros((scenario.training.global_batch, scenario.training.seq_len + 1), dtype=np.int64)
    with FlopCounterMode(display=False) as counter:
        trainer.step(0, batch)
    told = Asked.of(scenario.model, scenario.training, scenario.layout)
    assert counter.get_total_flops() == count_flop("hardware", told)
    rates = predict(scenario)
    assert rates.tflops_per_device.hardware * rates.step_s == pytest.approx(counter.get_total_flops())
