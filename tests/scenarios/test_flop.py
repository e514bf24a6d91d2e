"""Ways to count FLOP against closed forms, and against sources that print a rate beside the time it is from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.flop import CONVENTIONS, Asked, convert, count_flop, recompute_by_layer, step_flop
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model, load_model, model_names
from exatwin.scenarios.training import Training
from exatwin.topology.errors import InputError

A100 = 312e12


def training(seq_len: int, batch: int = 1) -> Training:
    return Training(seq_len=seq_len, global_batch=batch, precision="bf16")


gpts = st.builds(
    lambda layers, heads, vocab: Model(layers=layers, hidden=64 * heads, heads=heads, vocab=vocab),
    st.integers(1, 100), st.integers(1, 128), st.integers(1, 300_000),
)  # fmt: skip


@given(model=gpts, seq=st.integers(1, 100_000), batch=st.integers(1, 4096), tp=st.sampled_from([1, 2, 8]))
def test_a_gpt_layer_counts_as_the_papers_formulas(model, seq, batch, tp):
    layers, hidden, vocab = model.layers, model.hidden, model.padded_vocab(tp)
    base = batch * seq * layers * hidden**2
    steps = training(seq, batch)
    seq_term, head = seq / (6 * hidden), vocab / (12 * layers * hidden)
    assert step_flop("model", model, steps, tp=tp) == pytest.approx(72 * base * (1 + seq_term + head))
    assert step_flop("korthikanti", model, steps, "selective", tp) == pytest.approx(
        72 * base * (1 + 2 * seq_term + head)
    )
    full = 96 * base * (1 + seq_term + vocab / (16 * layers * hidden))
    for convention in ("hardware", "narayanan", "megatron-deepspeed", "gpt-neox", "korthikanti"):
        assert step_flop(convention, model, steps, "full", tp) == pytest.approx(full)
    assert step_flop("megatron", model, steps, "full", tp) == step_flop("model", model, steps, tp=tp)


def test_a_layer_counts_as_megatron_lm_does():
    """12 B s l h^2 ((1 + g/a + s/h) d a/h + 3/2 f/h + V/2lh) for a gated MLP and g key and value heads."""
    llama, seq = load_model("llama-3-70b"), 8192
    h, a, g, f, vocab = llama.hidden, llama.heads, llama.kv_heads, llama.ffn, llama.padded_vocab()
    terms = (1 + g / a + seq / h) * llama.query_width / h + 1.5 * f / h + vocab / (2 * llama.layers * h)
    counted = 12 * seq * llama.layers * h**2 * terms
    assert step_flop("megatron", llama, training(seq)) == pytest.approx(counted)
    halved = counted - 6 * seq * llama.layers * seq * llama.query_width
    assert step_flop("megatron-causal", llama, training(seq)) == pytest.approx(halved)


def test_megatron_lm_counts_experts_and_leaves_their_router_out():
    model, seq = load_model("deepseek-v3"), 4096
    router = 6 * seq * 58 * model.hidden * model.experts
    assert step_flop("megatron", model, training(seq)) == step_flop("model", model, training(seq)) - router


@pytest.mark.parametrize("name", model_names())
def test_every_convention_counts_every_bundled_model(name):
    """Recomputing never makes a count smaller, and half of attention never makes it larger."""
    model, steps = load_model(name), training(2048)
    for convention in CONVENTIONS:
        none, selective, full = (step_flop(convention, model, steps, kind) for kind in ("none", "selective", "full"))
        assert 0 < none <= min(selective, full), convention
        if f"{convention}-causal" in CONVENTIONS:
            assert step_flop(f"{convention}-causal", model, steps) < none


@given(
    model=gpts,
    seq=st.integers(1, 8192),
    rate=st.floats(1, 1e3),
    ends=st.tuples(*[st.sampled_from(sorted(CONVENTIONS))] * 2),
)
def test_a_rate_converts_there_and_back(model, seq, rate, ends):
    there = convert(rate, *ends, model, training(seq), "full")
    assert convert(there, *reversed(ends), model, training(seq), "full") == pytest.approx(rate)


@given(model=gpts, seq=st.integers(1, 100_000))
def test_what_is_recomputed_adds_to_hardware_alone(model, seq):
    none, selective, full = (
        step_flop("hardware", model, training(seq), recompute) for recompute in ("none", "selective", "full")
    )
    assert step_flop("model", model, training(seq)) == none < selective < full < 4 / 3 * none
    assert step_flop("model", model, training(seq), "full") == none
    assert step_flop("hardware-causal", model, training(seq), "full") < full


def test_layers_that_recompute_differently_count_as_their_parts():
    model, steps = load_model("gpt-22b"), training(2048, 64)
    halves = [step_flop("hardware", model, steps, kind) for kind in ("full", "none")]
    layout = Layout(pp=2, recompute=["full", "none"])
    for asked in (Asked.of(model, steps, layout), Asked(model, steps, ("none", "full") * 24)):
        assert count_flop("hardware", asked) == pytest.approx(sum(halves) / 2)
        assert count_flop("megatron-deepspeed", asked) == pytest.approx(
            sum(step_flop("megatron-deepspeed", model, steps, kind) for kind in ("full", "none")) / 2
        )
    some = Layout(pp=4, recompute="full", recompute_layers=3)
    assert recompute_by_layer(some, 48) == (("full",) * 3 + ("none",) * 9) * 4
    chunks = Layout(pp=2, vpp=2, recompute=["full", "none"], recompute_layers=1)  # rank 0 has stages 0 and 2
    assert recompute_by_layer(chunks, 8) == ("full", "none", "none", "none") * 2


def test_selective_recomputation_counts_the_products_that_it_names():
    model, steps = load_model("mixtral-8x7b"), training(4096)
    plain = step_flop("model", model, steps)
    experts = 4096 * 32 * 2 * 2 * 3 * model.hidden * model.ffn  # two experts, three matrices
    scores = 4096 * 32 * 4 * 4096 * model.query_width
    for ops, again in (((), 0), (("norm", "activation"), 0), (("attention",), scores), (("experts",), experts)):
        asked = Asked(model, steps, "selective", recompute_ops=ops)
        assert count_flop("hardware", asked) - plain == pytest.approx(again)


def test_a_layer_for_a_further_token_counts_with_its_head():
    model, steps = load_model("deepseek-v3"), training(4096)
    more = model.model_copy(update={"mtp_layers": 1})
    products = model.matrix_parameters() + 2 * model.hidden**2 + model.hidden * model.vocab
    attention = 2 * 4096 * (model.query_width + model.value_width)
    added = step_flop("model", more, steps) - step_flop("model", model, steps)
    assert added == pytest.approx(3 * 4096 * (2 * products + attention))


def test_palm_prints_its_utilisation_with_and_without_attention():
    """46.2 % with, 45.7 % without, from 238.3 thousand tokens a second on 6,144 chips of 275 TFLOP/s (section 4.1)."""
    palm, seq = load_model("palm-540b"), training(2048, 2048)
    tokens_per_s = 238.3e3 / 6144
    assert tokens_per_s * step_flop("palm", palm, seq) / (2048 * 2048) / 275e12 == pytest.approx(0.462, abs=5e-4)
    assert convert(46.2, "palm", "6n", palm, seq) == pytest.approx(45.7, abs=0.05)
    # 57.8 % with recomputation is less than all of it again
    assert 57.8 < convert(46.2, "palm", "hardware", palm, seq, "full") < 61.6


# Korthikanti et al. 2022, table 5, sequence parallel with selective recomputation: seconds, MFU and HFU in per cent.
KORTHIKANTI = [
    ("megatron-22b", 4, 8, 1.10, 41.5, 43.7),
    ("gpt-175b", 64, 64, 13.75, 51.4, 52.8),
    ("megatron-530b", 280, 280, 37.83, 56.0, 57.0),
    ("megatron-1t", 512, 512, 71.49, 56.3, 57.0),
]


@pytest.mark.parametrize(("name", "batch", "devices", "step_s", "mfu", "hfu"), KORTHIKANTI)
def test_korthikanti_prints_two_utilisations_beside_the_time(name, batch, devices, step_s, mfu, hfu):
    """The time is rounded to 0.01 s, which is half a per cent of the shortest."""
    asked = (load_model(name), training(2048, batch), "selective", 8)
    utilisation = 100 * step_flop("model", *asked) / step_s / devices / A100
    assert utilisation == pytest.approx(mfu, abs=0.05 + 0.005 / step_s * mfu)
    assert convert(mfu, "model", "korthikanti", *asked) == pytest.approx(hfu, abs=0.1)


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md: tokens/s of a device, MFU, HFU in per cent, peak.
MOSAIC = [
    ("mpt-70b", 2048, "full", 1058, 43.36, 57.81, 989e12),
    ("mpt-30b", 8192, "full", 1384, 29.92, 39.9, 989e12),
    ("mpt-13b", 32768, "full", 1976, 31.68, 42.24, 989e12),
    ("mpt-7b", 65536, "full", 1956, 28.59, 38.13, 989e12),
    ("mpt-7b", 2048, "none", 9670, 42.2, 42.2, 989e12),
    ("mpt-3b", 512, "none", 27965, 46.32, 46.32, 989e12),
    ("mpt-760m", 32768, "none", 16291, 31.84, 31.84, 989e12),
]


@pytest.mark.parametrize(("name", "seq", "recompute", "tokens_per_s", "mfu", "hfu", "peak"), MOSAIC)
def test_llm_foundry_prints_two_utilisations_beside_the_tokens(name, seq, recompute, tokens_per_s, mfu, hfu, peak):
    asked = (load_model(name), training(seq), recompute)
    assert 100 * tokens_per_s / seq * step_flop("palm", *asked) / peak == pytest.approx(mfu, rel=2.5e-3)
    assert convert(mfu, "palm", "palm-hardware", *asked) == pytest.approx(hfu, abs=0.02)


# bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 384 GPUs: layers, hidden, batch, tp,
# seconds, TFLOP/s of a GPU.
BLOOM = [
    (72, 14336, 1568, 8, 113.01, 109.22),
    (72, 14336, 1568, 8, 92.75, 133.08),
    (78, 13824, 2048, 4, 153.90, 105.54),
    (84, 13312, 2048, 4, 103.82, 156.46),
]


@pytest.mark.parametrize(("layers", "hidden", "batch", "tp", "step_s", "tflops"), BLOOM)
def test_bloom_prints_rates_by_the_megatron_deepspeed_formula(layers, hidden, batch, tp, step_s, tflops):
    model = Model(layers=layers, hidden=hidden, heads=64, vocab=250880, positions="alibi")
    rate = step_flop("megatron-deepspeed", model, training(2048, batch), "full", tp) / step_s / 384 / 1e12
    assert rate == pytest.approx(tflops, rel=1.1e-3)


def test_narayanan_prints_a_rate_and_the_days_that_8_n_tokens_take_at_it():
    """1T on 3,072 A100: 163 TFLOP/s a GPU, and 84 days for 450e9 tokens by 8 T P / (n X) (section 5.1)."""
    model = load_model("megatron-1t")
    assert model.parameters(seq_len=2048).total * 8 * 450e9 / (3072 * 163e12) / 86400 == pytest.approx(84, abs=0.5)
    rate = convert(163, "narayanan", "8n", model, training(2048), "full")
    assert rate == pytest.approx(163, rel=0.015)


# argonne-lcf's notes: tokens/s of a tile and TFLOP/s of a 70B run; Megatron-DeepSpeed's of cut Llama 3 models.
def test_aurora_prints_rates_of_two_conventions():
    seventy = load_model("llama-2-70b")
    assert 122.974 * step_flop("palm", seventy, training(4096)) / 4096 == pytest.approx(54.66e12, rel=4e-3)
    for layers, tokens_per_s, tflops in ((4, 8018, 66.75), (6, 6786, 68.76), (8, 5874, 70.37), (10, 5179, 71.36)):
        cut = Model(layers=layers, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=256000, gated=True, tied=False,
                    positions="rotary", norm="rms", bias=False)  # fmt: skip
        counted = tokens_per_s / 8192 * step_flop("megatron", cut, training(8192))
        assert counted == pytest.approx(tflops * 1e12, rel=2.5e-3)


def test_fms_fsdp_prints_the_utilisation_of_palm():
    """Llama 2 7B on A100 at 4,096 tokens, nothing recomputed: 4,550 tokens/s are 68 %, 13B at 2,150 are 61 %."""
    for name, tokens_per_s, mfu in (("llama-2-7b", 4550, 0.68), ("llama-2-13b", 2150, 0.61)):
        counted = tokens_per_s / 4096 * step_flop("palm", load_model(name), training(4096)) / A100
        assert counted == pytest.approx(mfu, abs=0.005)


def test_an_unknown_convention_suggests_the_nearest():
    with pytest.raises(InputError, match="unknown convention 'megatrom'; did you mean megatron"):
        step_flop("megatrom", load_model("gpt-22b"), training(2048))
