"""What a stage holds: parts, peaks and verdicts."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.scenario import load_scenario, scenario_names
from exatwin.scenarios.schedules import SCHEDULES, code_table, in_flight, schedule_table
from exatwin.sim.activations import Sizes, backward_bytes, kept_bytes, layer_steps
from exatwin.sim.memory import ChunkBytes, chunk_bytes, peak_of, rank_memory
from exatwin.sim.predict import predict
from exatwin.sim.shards import rank_parameters

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


def layer_kept_bytes(some, experts=False):
    """What one layer keeps from forward to backward without recomputation, its input included."""
    return kept_bytes(layer_steps(some, experts))


@pytest.mark.parametrize("name", scenario_names())
def test_the_parts_of_every_stage_add_up_to_its_peak(name):
    """Between steps there are the states, buffers that stay, and no gradients where a framework gives them up."""
    scenario = load_scenario(name)
    answer = predict(scenario)
    for stage in answer.memory.stages:
        parts = stage.parts
        assert parts.total == pytest.approx(stage.peak_bytes, rel=1e-9)
        states = parts.parameters + parts.gradients + parts.optimizer
        held = states - (parts.gradients if scenario.framework.memory.gradients_freed else 0.0)
        assert held * (1 - 1e-9) <= stage.between_steps_bytes <= (held + parts.buffers) * (1 + 1e-9)
        if not scenario.framework.memory.dummy_gradients:
            assert stage.between_steps_bytes == pytest.approx(held, rel=1e-9)
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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
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


def node(*overrides):
    """A scenario on one node, with a framework that has every stage of ZeRO."""
    base = ["machine=dgx-h100", "devices=8", "framework=megatron-core", "training.global_batch=64", "layout={}"]
    return load_scenario("h100-llama-3-8b", [*base, *overrides])


def states(*overrides):
    asked = node(*overrides)
    table = code_table(SCHEDULES["1f1b"], asked.layout.pp, asked.micro_batches)
    parameters = [rank_parameters(asked, stage) for stage in range(asked.layout.virtual_stages)]
    return rank_memory(asked, 0, table[0], parameters)[0]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_at_its_peak_what_its_schedule_claims(name, ranks):
    """One byte a chunk and micro-batch, held until the last part of its backward."""
    schedule = SCHEDULES[name]
    chunks = 2 if name == "interleaved" else (schedule.chunks or (1,))[0]
    micro_batches = 4 * ranks
    for rank, codes in enumerate(code_table(schedule, ranks, micro_batches, chunks)):
        peak = peak_of(codes, micro_batches, [ChunkBytes(kept=1.0, deferred=1.0)] * chunks)
        assert peak.level == schedule.most_in_flight(rank, ranks, micro_batches, chunks)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_split_backward_frees_early_what_its_weights_do_not_need(name):
    schedule, ranks, micro_batches = SCHEDULES[name], 4, 16
    chunks = (schedule.chunks or (1,))[0]
    for codes in code_table(schedule, ranks, micro_batches, chunks):
        late = peak_of(codes, micro_batches, [ChunkBytes(kept=1.0, deferred=1.0)] * chunks).level
        early = peak_of(codes, micro_batches, [ChunkBytes(kept=1.0, deferred=0.25)] * chunks).level
        assert early <= late


@pytest.mark.parametrize(("parallel", "factor"), [("false", 10 + 24 / 2), ("true", 34 / 2)])
def test_sequence_parallelism_shares_what_every_rank_kept(parallel, factor):
    """Korthikanti: s b h (10 + 24/t) bytes become 34/t, scores aside."""
    model = "{layers: 2, hidden: 1024, heads: 16, vocab: 4000}"
    asked = node(f"model={model}", "layout.tp=2", f"layout.sequence_parallel={parallel}", "training.hidden_dropout=0.1")
    some = Sizes(asked.model, asked.training, asked.layout)
    statistic = 4 * some.tokens * some.heads
    assert layer_kept_bytes(some) - statistic == pytest.approx(some.tokens * 1024 * factor)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["ring", "all_gather", "all_to_all"]))
def test_context_parallelism_shares_the_tokens(cp, how):
    whole = node("layout.zero=1")
    cut = node("layout.zero=1", f"layout.cp={cp}", f"layout.cp_attention={how}", f"training.global_batch={64 // cp}")
    one, part = (layer_kept_bytes(Sizes(each.model, each.training, each.layout)) for each in (whole, cut))
    extra = Sizes(cut.model, cut.training, cut.layout).context if cp > 1 and how == "all_to_all" else 0
    assert (part - extra) * cp == pytest.approx(one)


def test_experts_keep_a_row_for_each_token_and_expert_it_goes_through():
    """What one more expert a token adds: its row, both factors, and their product."""
    moe = "{layers: 2, hidden: 1024, heads: 16, vocab: 4000, gated: true, experts: 8, expert_ffn: 512, top_k: %d}"
    two, three = (node(f"model={moe % k}", "layout.ep=8", "layout.zero=1") for k in (2, 3))
    kept = [layer_kept_bytes(Sizes(each.model, each.training, each.layout), experts=True) for each in (two, three)]
    assert kept[1] - kept[0] == pytest.approx(two.training.seq_len * 2 * (1024 + 3 * 512))


@pytest.mark.parametrize(("imbalance", "capacity", "rows"), [(1.0, "null", 1), (1.5, "null", 1.5), (1.5, "1.25", 1.25)])
def test_the_busiest_rank_has_more_rows_until_its_capacity_cuts_them(imbalance, capacity, rows):
    asked = node(
        "model={layers: 2, hidden: 1024, heads: 16, vocab: 4000, experts: 8, top_k: 2}",
        "layout={ep: 8, zero: 1}",
        f"training.expert_imbalance={imbalance}",
        f"training.capacity_factor={capacity}",
    )
    sizes = Sizes(asked.model, asked.training, asked.layout)
    assert sizes.routed_rows == pytest.approx(2 * sizes.tokens * rows)


@pytest.mark.parametrize("part", ["attention", "norm", "activation", "experts"])
def test_what_is_given_up_comes_back_in_the_backward(part):
    asked = node(
        "model={layers: 2, hidden: 1024, heads: 16, vocab: 4000, gated: true, experts: 8, top_k: 2}",
        "layout={ep: 8, zero: 1, flash_attention: false}",
    )
    steps = layer_steps(Sizes(asked.model, asked.training, asked.layout), experts=True)
    given, stream = frozenset({part}), 1.0
    assert kept_bytes(steps, given) < kept_bytes(steps)
    whole = kept_bytes(steps) + backward_bytes(steps, stream, 0.0)
    again = kept_bytes(steps, given) + backward_bytes(steps, stream, 0.0, given)
    assert again <= whole + 1e-6


@pytest.mark.parametrize("some", ["layout.recompute_layers=8", "layout.recompute_every=4"])
def test_recomputing_some_layers_lies_between_none_and_all(some):
    kept = [
        chunk_bytes(node(f"layout.recompute={mode}", *more), 0, range(32), mode).kept
        for mode, *more in (("none",), ("full", some), ("full",))
    ]
    assert kept[0] > kept[1] > kept[2]
    assert kept[0] - kept[1] == pytest.approx((kept[0] - kept[2]) / 4)


def test_each_stage_of_zero_shards_one_thing_more():
    """The same totals over eight replicas: optimizer, then gradients, then weights."""
    stages = [states(f"layout.zero={zero}") for zero in (0, 1, 2, 3)]
    for one, other, name in zip(stages, stages[1:], ("optimizer", "gradients", "parameters"), strict=False):
        assert getattr(other, name) == pytest.approx(getattr(one, name) / 8)
        assert other.total < one.total
    assert stages[3].units > 0
    assert states("layout.zero=3", "layout.reshard_after_forward=false").units > stages[3].units


def test_hybrid_shards_divide_by_their_group():
    assert states("layout.zero=3", "layout.shard_group=4").optimizer == pytest.approx(
        2 * states("layout.zero=3").optimizer
    )


def test_an_optimizer_on_the_host_leaves_the_device():
    assert states("layout.zero=1", "layout.offload_optimizer=true").optimizer == 0


def test_experts_are_sharded_over_the_replicas_that_hold_the_same_ones():
    """Eight experts over eight ranks: one copy, so nothing of theirs is shared."""
    moe = "model={layers: 2, hidden: 1024, heads: 16, vocab: 4000, tied: false, experts: 8, top_k: 2}"
    asked = node(moe, "layout={ep: 8, zero: 1}")
    held = rank_parameters(asked, 0)
    assert states(moe, "layout={ep: 8, zero: 1}").optimizer == pytest.approx(12 * (held.dense / 8 + held.expert))


def test_the_driver_shows_what_the_allocator_reserved_and_what_lies_outside_it():
    answer = memory()
    for stage in answer.stages:
        assert stage.device_bytes == pytest.approx(stage.reserved_bytes + answer.context_bytes)
    assert answer.worst.reserved_bytes == pytest.approx(answer.worst.peak_bytes + answer.reserve_bytes)
