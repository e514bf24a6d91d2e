"""What a stage holds: parts, peaks and verdicts."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.scenario import load_scenario, scenario_names
from exatwin.scenarios.schedules import SCHEDULES, in_flight, schedule_table
from exatwin.sim.activations import Sizes, layer_kept_bytes
from exatwin.sim.predict import predict

SMALL = [
    "machine=frontier",
    "framework=megatron-deepspeed",
    "devices=16",
    "training.global_batch=32",
    "training.seq_len=512",
    "model={layers: 8, hidden: 1024, heads: 16, vocab: 4000}",
    "layout={tp: 2, pp: 4, micro_batch: 1, zero: 0, flash_attention: false}",
]


@cache
def memory(*overrides):
    return predict(load_scenario("h100-llama-3-8b", [*SMALL, *overrides]), fidelity="recurrence").memory


def sizes(model="{layers: 2, hidden: 1024, heads: 16, vocab: 4000}", **training):
    options = [f"training.{key}={value}" for key, value in training.items()]
    scenario = load_scenario("h100-llama-3-8b", [*SMALL, f"model={model}", "layout.pp=1", "devices=8", *options])
    return Sizes(scenario.model, scenario.training, scenario.layout)


@pytest.mark.parametrize("name", scenario_names())
def test_the_parts_of_every_stage_add_up_to_its_peak(name):
    answer = predict(load_scenario(name))
    for stage in answer.memory.stages:
        parts = stage.parts
        assert parts.total == pytest.approx(stage.peak_bytes, rel=1e-9)
        states = parts.parameters + parts.gradients + parts.optimizer
        assert stage.between_steps_bytes == pytest.approx(states, rel=1e-9)
        assert 0 < states < stage.peak_bytes <= stage.reserved_bytes
        assert min(parts.activations, parts.buffers, parts.overhead) >= 0
        assert 0 <= stage.peak_s <= answer.step_s


def test_a_gpt_layer_keeps_what_korthikanti_counts():
    """s b h (10 + 24/t + 5 a s / (h t)) bytes with dropout, unfused and without sequence parallelism.

    The 10 is two norm inputs and two outputs of 2 bytes, which every rank keeps, and two masks.
    """
    some = sizes(attention_dropout=0.1, hidden_dropout=0.1)
    s, h, a, t = 512, 1024, 16, 2
    assert layer_kept_bytes(some) == pytest.approx(s * h * (10 + 24 / t + 5 * a * s / (h * t)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_has_under_way(schedule, micro_batches):
    """With little else about, doubling what is kept shows how many are: min(m, p - stage) in 1F1B, m in GPipe."""
    batch = f"training.global_batch={2 * micro_batches}"
    peaks = [
        [stage.parts.activations for stage in memory(f"layout.schedule={schedule}", batch, dropout).stages]
        for dropout in ("training.hidden_dropout=0.0", "training.hidden_dropout=0.1")
    ]
    masks = 2 * 2 * 512 * 1024  # two layers of two masks of s b h bytes
    table = schedule_table(SCHEDULES[schedule], 4, micro_batches)
    for stage in range(1, 4):  # the first stage has one more mask, on the embedding
        assert peaks[1][stage] - peaks[0][stage] == pytest.approx(in_flight(table[stage]) * masks)
        expected = min(micro_batches, 4 - stage) if schedule == "1f1b" else micro_batches
        assert in_flight(table[stage]) == expected


@pytest.mark.parametrize("flash", ["true", "false"])
def test_recomputation_gives_up_activations(flash):
    full, selective, none = (
        [stage.peak_bytes for stage in memory(f"layout.recompute={mode}", f"layout.flash_attention={flash}").stages]
        for mode in ("full", "selective", "none")
    )
    for least, less, most in zip(full[:-1], selective[:-1], none[:-1], strict=True):
        assert least < less <= most  # a stage with one micro-batch under way gains nothing from it
    assert full[-1] <= none[-1] * 1.1


def test_each_stage_recomputes_as_it_is_told():
    mixed = memory("layout.recompute=[full, none, none, full]").stages
    full, none = memory("layout.recompute=full").stages, memory("layout.recompute=none").stages
    assert [stage.peak_bytes for stage in mixed] == [s[i].peak_bytes for i, s in enumerate((full, none, none, full))]


def test_zero_shards_the_optimizer_over_the_replicas_and_nothing_else():
    whole, sharded = memory("layout.zero=0").stages, memory("layout.zero=1").stages
    for one, other in zip(whole, sharded, strict=True):
        assert other.parts.optimizer == pytest.approx(one.parts.optimizer / 2)
        assert other.parts.parameters == one.parts.parameters
        assert other.parts.gradients == one.parts.gradients
        assert other.parts.activations == one.parts.activations


@pytest.mark.parametrize(("precision", "weight", "gradients", "optimizer"), [("bf16", 2, 6, 12), ("fp16", 2, 2, 12)])
def test_states_are_the_bytes_a_parameter_of_the_framework(precision, weight, gradients, optimizer):
    parts = memory(f"training.precision={precision}").stages[1].parts
    scenario = load_scenario("h100-llama-3-8b", SMALL)
    parameters = 2 * scenario.model.rank_layer_parameters(2)
    assert (parts.parameters, parts.gradients, parts.optimizer) == pytest.approx(
        (weight * parameters, gradients * parameters, optimizer * parameters)
    )


@given(st.sampled_from(["training.seq_len", "layout.micro_batch"]), st.sampled_from(["none", "selective", "full"]))
def test_longer_sequences_and_larger_micro_batches_take_more_memory(field, mode):
    values = (256, 512, 1024) if field == "training.seq_len" else (1, 2, 4)
    peaks = [memory(f"{field}={size}", f"layout.recompute={mode}").worst.peak_bytes for size in values]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_fused_attention_keeps_no_scores():
    fused, unfused = memory("layout.flash_attention=true"), memory()
    scores = 2 * 512 * 512 * 8  # bytes of a layer and micro-batch: s s a/t in two bytes
    assert unfused.stages[1].parts.activations - fused.stages[1].parts.activations > 3 * 2 * scores * 0.99


@pytest.mark.parametrize("name", scenario_names())
def test_every_bundled_run_fits_as_it_did(name):
    assert predict(load_scenario(name)).memory.verdict == "fits"


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [
        (["layout.recompute=none", "layout.pp=16", "devices=768"], "does not fit"),
        (["layout.tp=1", "devices=384"], "does not fit"),
        (["layout.zero=0"], "fits"),
    ],
)
def test_the_trillion_parameter_run_fits_one_way_and_not_another(overrides, verdict):
    answer = predict(load_scenario("frontier-1t", overrides), fidelity="recurrence").memory
    assert answer.verdict == verdict
    room = answer.capacity_bytes - answer.context_bytes
    assert (answer.worst.peak_bytes > room) == (verdict == "does not fit")


def test_the_verdict_follows_the_peak_the_reserve_and_what_lies_outside():
    """Growing the micro-batch of one run passes from fits through marginal to does not fit."""
    verdicts = []
    for size in range(40, 81, 8):
        answer = memory(f"layout.micro_batch={size}", f"training.global_batch={8 * size}", "training.seq_len=2048")
        peak, room = answer.worst.peak_bytes, answer.capacity_bytes - answer.context_bytes
        assert (answer.verdict == "does not fit") == (peak > room)
        assert all(stage.reserved_bytes <= max(room, stage.peak_bytes) for stage in answer.stages)
        verdicts.append(answer.verdict)
    order = ["fits", "marginal", "does not fit"]
    assert sorted(verdicts, key=order.index) == verdicts
    assert set(verdicts) == set(order)


def test_the_peak_comes_where_most_is_under_way():
    """Recomputation puts it in a backward: on the first stage the first one, with all four micro-batches held."""
    stages = memory("layout.recompute=full", "layout.flash_attention=true").stages
    assert [stage.peak_during for stage in stages[:-1]] == ["backward of micro-batch 0"] * 3
    assert all(stage.peak_s > 0 for stage in stages)
