"""Whatever way a run is cut, it trains as one process does."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from exatwin.scenarios.schedules import SCHEDULES
from exatwin.trainer.data import Batches, open_tokens
from exatwin.trainer.loop import Trainer
from exatwin.trainer.optimizer import FIRST_SCALE
from exatwin.trainer.refusals import check_runs

from .ranks import alone, grid_of, on_ranks, quiet_ranks, scenario_of, train  # noqa: F401

# fp32 sums in another order differ in their last digits; the bounds are four to ten times the worst that was seen.
LOSS = 1e-6  # relative; seen: 1.3e-7
NORM = 2e-6  # relative; seen: 2.2e-7
# Of the largest element of the same weight, or of 1/1000 of the largest of all where that is more: a key's bias has a
# gradient of 0, and what is seen of it is rounding. Seen: 1.4e-5 there, 1e-6 to 1e-5 elsewhere.
GRADIENT = 5e-5

LLAMA = (
    "model.gated=true model.norm=rms model.positions=rotary model.tied=false model.bias=false "
    "model.heads=4 model.kv_heads=2"
)
LATENT = LLAMA.replace("kv_heads=2", "kv_heads=4") + (
    " model.kv_rank=16 model.q_rank=24 model.rope_dim=4 model.head_dim=12 model.v_head_dim=8"
)
PLAIN_LATENT = LATENT.replace(" model.q_rank=24", "")
EXPERTS = LLAMA + " model.experts=4 model.top_k=2 model.ffn=48"
SHARED = EXPERTS + " model.shared_experts=1 model.dense_layers=1 model.expert_ffn=24"
UNTIED = "model.tied=false"
DEEP = "model.layers=8"
SP = "tp=2 sequence_parallel=true"

LAYOUTS = {
    # --- each way on its own
    "micro-batches": "micro_batch=1",
    "dp 2": "dp=2",
    "dp 4": "dp=4",
    "zero 1": "dp=4 zero=1",
    "zero 2": "dp=2 zero=2",
    "zero 3": "dp=4 zero=3",
    "zero 3, weights kept": "dp=2 zero=3 reshard_after_forward=false",
    "zero 3, untied": f"dp=2 zero=3 {UNTIED}",
    "hybrid shard": "dp=4 zero=3 shard_group=2 micro_batch=1",
    "gradients reduced beside the backward": "dp=2 overlap_grad_reduce=true",
    "tp 2": "tp=2",
    "tp 4": "tp=4 micro_batch=4",
    "tp 2, sequence parallel": SP,
    "tp 4, sequence parallel": "tp=4 sequence_parallel=true micro_batch=4",
    "ring of 2": "cp=2 cp_attention=ring",
    "ring of 4": "cp=4 cp_attention=ring micro_batch=4",
    "keys gathered of 2": "cp=2 cp_attention=all_gather",
    "keys gathered of 4": "cp=4 cp_attention=all_gather micro_batch=4",
    "heads exchanged of 2": "cp=2 cp_attention=all_to_all",
    "heads exchanged of 4": "cp=4 cp_attention=all_to_all micro_batch=4",
    "pp 2, 1f1b": "pp=2 schedule=1f1b",
    "pp 4, 1f1b": "pp=4 schedule=1f1b",
    "pp 2, gpipe": "pp=2 schedule=gpipe",
    "pp 4, gpipe": "pp=4 schedule=gpipe",
    "pp 2, interleaved": "pp=2 vpp=2 schedule=interleaved",
    "pp 4, interleaved": f"pp=4 vpp=2 schedule=interleaved {DEEP}",
    "pp 2, zb-h1": "pp=2 schedule=zb-h1",
    "pp 4, zb-h1": "pp=4 schedule=zb-h1",
    "pp 2, zb-v": "pp=2 vpp=2 schedule=zb-v",
    "pp 4, zb-v": f"pp=4 vpp=2 schedule=zb-v micro_batch=1 {DEEP}",
    "pp 2, dualpipe-v": "pp=2 vpp=2 schedule=dualpipe-v",
    "pp 4, dualpipe-v": f"pp=4 vpp=2 schedule=dualpipe-v micro_batch=1 {DEEP}",
    "untied 1f1b": f"pp=2 {UNTIED}",
    "untied zb-v": f"pp=2 vpp=2 schedule=zb-v {UNTIED}",
    "zb-v on one rank": "vpp=2 schedule=zb-v",
    "uneven stages": "pp=2 stage_layers=[3,1]",
    "uneven virtual stages": f"pp=2 vpp=2 schedule=interleaved stage_layers=[1,3,2,2] {DEEP}",
    "unfused attention": "dp=2 flash_attention=false",
    # --- recomputation
    "all layers again": "tp=2 recompute=full",
    "all layers again, zb-h1": "pp=2 schedule=zb-h1 recompute=full",
    "all layers again, zero 3": "dp=2 zero=3 recompute=full",
    "each second layer again": "recompute=full recompute_every=2",
    "first layer again": "dp=2 recompute=full recompute_layers=1",
    "a kind a stage": "pp=2 recompute=[full,none]",
    "parts again": f"{SP} recompute=selective recompute_ops=[attention,norm,activation]",
    "parts again, zb-v": "pp=2 vpp=2 schedule=zb-v recompute=selective",
    "experts again": f"dp=2 ep=2 recompute=selective recompute_ops=[experts] {EXPERTS}",
    "ring attention again": "cp=2 recompute=selective",
    # --- experts
    "experts on one rank": f"dp=2 {EXPERTS}",
    "ep 2": f"dp=2 ep=2 {EXPERTS}",
    "ep 4": f"dp=4 ep=4 {EXPERTS}",
    "ep 2, zero 1": f"dp=4 ep=2 zero=1 {EXPERTS}",
    "experts, zero 3": f"dp=2 zero=3 {EXPERTS}",
    "experts cut": f"{SP} {EXPERTS}",
    "experts cut and spread": f"dp=2 {SP} ep=2 {EXPERTS}",
    "experts whole on tensor ranks": f"{SP} ep=2 etp=1 {EXPERTS}",
    "ep 4 over tensor ranks": f"dp=2 {SP} ep=4 etp=1 {EXPERTS}",
    "shared experts, a dense layer": f"dp=2 ep=2 {SHARED}",
    "shared experts cut": f"{SP} {SHARED} model.shared_gate=true",
    "experts with biases": f"dp=2 ep=2 {EXPERTS} model.bias=true",
    "experts in context ranks": f"cp=2 ep=2 {EXPERTS}",
    "experts, zb-h1": f"pp=2 dp=2 ep=2 schedule=zb-h1 {EXPERTS}",
    # --- forms of the model
    "llama": f"tp=2 {LLAMA}",
    "llama, sequence parallel": f"{SP} {LLAMA} model.qk_norm=true",
    "normed queries and keys": f"tp=2 {LLAMA} model.qk_norm=true",
    "key heads in a ring": f"cp=2 {LLAMA}",
    "key heads gathered": f"cp=2 cp_attention=all_gather {LLAMA}",
    "key heads exchanged": f"cp=2 cp_attention=all_to_all {LLAMA}",
    "latent attention": f"tp=2 {LATENT}",
    "latent attention, sequence parallel": f"{SP} {LATENT}",
    "latent attention, plain queries": f"{SP} {PLAIN_LATENT}",
    "latent attention in a ring": f"cp=2 {LATENT}",
    "latent attention, zb-h1": f"pp=2 schedule=zb-h1 {LATENT}",
    "alibi": f"{SP} model.positions=alibi model.embedding_norm=true",
    "alibi, keys gathered": "cp=2 cp_attention=all_gather model.positions=alibi",
    "alibi, heads exchanged": "cp=2 cp_attention=all_to_all model.positions=alibi",
    "blocks side by side": f"{SP} model.parallel_blocks=true model.layer_norms=1",
    "blocks side by side, two norms": "tp=2 model.parallel_blocks=true",
    "four norms": f"{SP} model.layer_norms=4",
    "biased queries": f"tp=2 {LLAMA} model.qkv_bias=true",
    "a head with bias": f"tp=2 model.head_bias=true {UNTIED}",
    # --- together
    "tp and dp, zero 3": f"{SP} dp=2 zero=3",
    "pp and dp, zero 3": "pp=2 dp=2 zero=3",
    "pp and dp, zero 2": "pp=2 dp=2 zero=2",
    "pp and tp, zb-h1, again": f"pp=2 {SP} schedule=zb-h1 recompute=full",
    "cp and dp, zero 3": "cp=2 dp=2 zero=3",
    "cp and tp, llama": f"cp=2 {SP} {LLAMA}",
    "stages before replicas": f"{SP} pp=2 dp=2 placement.order=tp-pp-dp",
    "stages next to each other": "tp=2 pp=2 dp=2 placement.order=pp-dp-tp zero=1",
    "replicas of four stages, tied": "pp=4 dp=2 micro_batch=1",
    "replicas of stages of which some have experts": f"pp=2 dp=2 {SHARED} model.dense_layers=2",
    "eight ranks, zero 1": f"{SP} pp=2 dp=2 zero=1",
    "eight ranks, zero 3": f"{SP} pp=2 dp=2 zero=3",
    "eight ranks, zero 3, weights kept": f"{SP} pp=2 dp=2 zero=3 reshard_after_forward=false",
    "eight ranks, zb-v, zero 3": (
        f"{SP} pp=2 dp=2 vpp=2 schedule=zb-v zero=3 reshard_after_forward=false micro_batch=1 {UNTIED}"
    ),
    "eight ranks, cp": f"cp=2 {SP} pp=2",
    "eight ranks, experts": f"ep=2 pp=2 dp=4 zero=1 {EXPERTS} micro_batch=1",
    "eight ranks, everything cut": f"ep=2 pp=2 dp=2 {SP} schedule=zb-h1 {SHARED}",
}  # fmt: skip


def assert_as_alone(changes):
    """The layout's losses, norms and gradients are those of one process."""
    scenario, one = scenario_of(changes), alone(changes)
    check_runs(scenario)
    runs = on_ranks(scenario.devices, train, scenario)
    largest = max(np.abs(gradient).max() for gradient in one.gradients.values())
    for run in runs:
        np.testing.assert_allclose(run.losses, one.losses, rtol=LOSS)
        np.testing.assert_allclose(run.norms, one.norms, rtol=NORM)
        for name, gradient in run.gradients.items():
            expected = one.gradients[name]
            bound = GRADIENT * max(np.abs(expected).max(), 1e-3 * largest)
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=bound, err_msg=name)
    assert set().union(*(run.gradients for run in runs)) == set(one.gradients)
    assert min(one.norms) > 0.1


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_trains_as_one_process_does(changes):
    """Losses and norms of two steps, and every gradient of the first, to what fp32 knows."""
    assert_as_alone(changes)


def test_a_schedule_from_a_file_trains_as_one_process_does(tmp_path):
    """One that nothing here is named after: backwards in the order opposite to the forwards."""
    table = ["0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0", "1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0"]
    path = tmp_path / "last-first.csv"
    path.write_text("\n".join(table))
    assert_as_alone(f"pp=2 schedule={path}")


def test_every_schedule_is_tried():
    tried = " ".join(LAYOUTS.values())
    for name in SCHEDULES:
        assert f"schedule={name}" in tried


def test_rows_that_fill_the_vocabulary_up_change_nothing():
    """Four tensor ranks pad 129 words to 160 rows where one pads them to 136; the real rows train alike."""
    changes = "tp=4 model.vocab=129 micro_batch=4"
    one, runs = alone(changes), on_ranks(4, train, scenario_of(changes))
    for run in runs:
        np.testing.assert_allclose(run.losses, one.losses, rtol=LOSS)
        np.testing.assert_allclose(run.norms, one.norms, rtol=NORM)
        words, expected = run.gradients["embedding.words"], one.gradients["embedding.words"]
        assert (len(words), len(expected)) == (160, 136)
        np.testing.assert_allclose(words[:129], expected[:129], rtol=0, atol=GRADIENT * np.abs(expected).max())
        assert not words[129:].any()
        assert not expected[129:].any()


def test_a_run_ends_in_the_same_weights_however_it_is_cut():
    """Four steps of a model without biases: Adam would make whole steps of a key's bias, whose gradient is rounding.

    A step is 1e-3; seen were 1.2e-6.
    """
    one = alone(LLAMA, steps=4)
    for changes in (f"dp=4 zero=1 {LLAMA}", f"dp=2 zero=3 {LLAMA}", f"tp=2 pp=2 {LLAMA}"):
        scenario = scenario_of(changes)
        for run in on_ranks(scenario.devices, train, scenario, 4):
            np.testing.assert_allclose(run.losses, one.losses, rtol=LOSS)
            for name, weight in run.weights.items():
                np.testing.assert_allclose(weight, one.weights[name], rtol=0, atol=1e-5, err_msg=name)


# --- half precision -------------------------------------------------------------------------------------------------

HALVES = {
    "one process": "",
    "zero 1": "dp=2 zero=1",
    "zero 2": "dp=2 zero=2",
    "zero 3": "dp=2 zero=3",
    "tensor and pipeline ranks": f"pp=2 {SP}",
    "zb-v": "pp=2 vpp=2 schedule=zb-v",
    "ring": "cp=2",
    "keys gathered": "cp=2 cp_attention=all_gather",
    "heads exchanged": "cp=2 cp_attention=all_to_all",
    "experts": f"dp=2 ep=2 {EXPERTS}",
    "latent attention": f"{SP} {LATENT}",
    "recomputed": "tp=2 recompute=full",
    "alibi": f"{SP} model.positions=alibi",
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("changes", HALVES.values(), ids=HALVES)
def test_in_half_precision_losses_are_near_those_of_fp32(changes, precision):
    """bf16 keeps 8 bits of a number, fp16 keeps 11. Seen of losses: 2.4e-4 and 3e-5; of norms 2.7e-3 and 2.2e-4."""
    near = {"bf16": 1e-3, "fp16": 1e-4}[precision]
    scenario, one = scenario_of(changes, precision), alone(changes)
    check_runs(scenario)
    for run in on_ranks(scenario.devices, train, scenario):
        np.testing.assert_allclose(run.losses, one.losses, rtol=near)
        np.testing.assert_allclose(run.norms, one.norms, rtol=10 * near)
        distance = sum(np.sum((run.gradients[name] - one.gradients[name]) ** 2) for name in run.gradients)
        assert np.sqrt(distance) < 50 * near  # of gradients of norm 1; seen: 1.6e-2 and 2.1e-3
        assert run.skipped == [False, False]
        assert run.scales == [FIRST_SCALE if precision == "fp16" else 1.0] * 2


@pytest.mark.parametrize("changes", ["", "dp=2 zero=1", "dp=2 zero=3", f"pp=2 {SP}"])
def test_an_overflow_skips_the_step_on_every_rank_and_halves_the_scale(changes):
    scenario = scenario_of(changes, "fp16")
    before = on_ranks(scenario.devices, train, scenario, 0)
    once = on_ranks(scenario.devices, train, scenario, 1, 2.0**40)
    for start, run in zip(before, once, strict=True):
        assert (run.skipped, run.scales) == ([True], [2.0**39])
        assert not np.isfinite(run.norms[0])
        assert run.losses == pytest.approx(alone(changes).losses[:1], rel=2e-3)
        for name, weight in run.weights.items():
            np.testing.assert_array_equal(weight, start.weights[name])


def test_after_overflows_the_scale_comes_to_where_training_goes_on():
    scenario = scenario_of("dp=2 zero=1", "fp16")
    for run in on_ranks(2, train, scenario, 12, 2.0**24):
        assert run.skipped[0]
        first = run.skipped.index(False)
        assert run.scales[first - 1] == 2.0 ** (24 - first)
        assert run.skipped == [True] * first + [False] * (12 - first)
        assert np.isfinite(run.norms[first:]).all()


# --- a longer run -----------------------------------------------------------------------------------------------------

CURVE_STEPS = 50
JSON = str(Path(json.__file__).parent)


def curve(rank, scenario, folder):
    """Losses of a run on the text of a folder."""
    tokens = open_tokens(JSON, scenario.model.vocab, folder)
    batches = Batches(tokens, scenario.training.seq_len, scenario.training.global_batch, 0)
    trainer = Trainer(scenario, grid_of(scenario, rank), seed=1, learning_rate=3e-3)
    return [trainer.step(step, batches.rows(step, *trainer.rows)).loss for step in range(CURVE_STEPS)]


def test_loss_curves_agree_and_fall(tmp_path):
    """Fifty steps on real text, Python's json package. Rounding grows from step to step: from 1.3e-7 to 3e-6."""
    model = "model.vocab=256 training.seq_len=64 micro_batch=4 model.layers=2"
    layouts = ("", "tp=2 pp=2", "dp=4 zero=3 micro_batch=2")
    one, *others = (
        on_ranks(scenario.devices, curve, scenario, tmp_path)
        for scenario in (scenario_of(f"{model} {changes}") for changes in layouts)
    )
    (expected,) = one
    assert expected[0] == pytest.approx(np.log(256), abs=0.1)  # a model that knows nothing
    shares = np.bincount(open_tokens(JSON, 256, tmp_path).ids)
    shares = shares[shares > 0] / shares.sum()
    assert np.mean(expected[-5:]) < -(shares * np.log(shares)).sum()  # it knows more than how often letters come
    for ranks in others:
        for losses in ranks:
            np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-6)
            np.testing.assert_allclose(losses, expected, rtol=3e-5)
