"""Parameter counts against what logs and model cards print."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.model import Model, RankParameters, load_model, model_names
from exatwin.topology.errors import InputError
from exatwin.topology.files import build


def test_lumi_stages_weigh_what_their_log_prints():
    model = load_model("bloom-175b-lumi")
    layer = model.rank_layer_parameters(8)
    assert 9 * layer + model.rank_embedding_parameters(8) == pytest.approx(2867.2e6, abs=0.05e6)
    assert 9 * layer == pytest.approx(2775.4e6, abs=0.05e6)
    last = 7 * layer + model.rank_final_norm_parameters()
    assert last + model.rank_head_parameters(8) == pytest.approx(2250.4e6, abs=0.05e6)
    # the embedding's norm in the copy is 0.03M, less than the printed digits can tell
    assert last + model.rank_head_parameters(8, whole_embedding=True) == pytest.approx(2250.4e6, abs=0.1e6)


def test_lumi_replica_weighs_what_its_log_prints():
    """The log adds up the ranks of a replica, norms and row-parallel biases on each, the tied copy once."""
    model = load_model("bloom-175b-lumi")
    rank = 70 * model.rank_layer_parameters(8) + model.rank_embedding_parameters(8) + model.rank_final_norm_parameters()
    assert 8 * rank == pytest.approx(173.427e9, abs=0.0005e9)


def test_crusher_stages_weigh_what_their_log_prints():
    model = load_model("gpt-175b")
    middle = 6 * model.rank_layer_parameters(4)
    assert middle == pytest.approx(2718.48e6, abs=0.005e6)
    assert middle + model.rank_embedding_parameters(4, 2048) == pytest.approx(2899.36e6, abs=0.005e6)
    last = middle + model.rank_final_norm_parameters() + model.rank_head_parameters(4, 2048, whole_embedding=True)
    assert last == pytest.approx(2899.38e6, abs=0.005e6)
    rank = 96 * model.rank_layer_parameters(4) + model.rank_embedding_parameters(4) + model.rank_final_norm_parameters()
    assert 4 * rank == pytest.approx(174.706e9, abs=0.0005e9)


@pytest.mark.parametrize(
    ("name", "tp", "billions"),
    [
        ("llama-3-8b", 1, 8.03),
        ("fugaku-llm-13b", 6, 13.17),
        ("gpt-30b-fugaku", 4, 29.978),
        ("gpt-22b", 1, 22.07),
        ("gpt-175b", 4, 174.61),
        ("gpt-1t", 8, 1008.0),
        ("gpt-7b-lumi", 1, 6.65),
        ("gpt-33b-lumi", 2, 32.24),
        ("grok-1", 1, 315.68),  # published as 314B
        ("kimi-k2", 1, 1026.4),
        ("megatron-1.7b", 1, 1.652),
        ("megatron-7.5b", 1, 7.468),
        ("megatron-39b", 1, 39.1),
        ("megatron-145b", 1, 145.6),
        ("megatron-310b", 1, 310.1),
        ("megatron-530b", 1, 529.6),
        ("megatron-1t", 1, 1008.0),
        ("mistral-7b", 1, 7.2417),
        ("palm-540b", 1, 540.35),
        ("tinyllama-1.1b", 1, 1.1),
        ("opt-175b", 1, 174.6),
        ("nemotron-4-340b", 1, 341.0),
        ("nemotron-4-15b", 1, 15.63),
    ],
)
def test_bundled_models_have_their_published_size(name: str, tp: int, billions: float):
    assert load_model(name).parameters(tp).total == pytest.approx(billions * 1e9, rel=1e-3)


# What the Hub's index of each checkpoint or its model card counts, each trained tensor once.
EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # without the biases of the routers, which no gradient moves
    "gpt-oss-120b": 116_829_156_672 - 36 * 64,  # without the attention sinks
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 179_522_565_120 - 65_024 * 14_848,  # the file stores the tied head too
}


@pytest.mark.parametrize(("name", "parameters"), EXACT.items(), ids=EXACT)
def test_bundled_models_have_exactly_their_published_parameters(name: str, parameters: int):
    assert load_model(name).parameters().total == parameters


# llm-foundry's benchmark prints counts that grow with the sequence, which learned positions are as long as.
MPT = [
    ("mpt-70b", 2048, 64_862_437_376),
    ("mpt-30b", 2048, 29_975_214_080),
    ("mpt-30b", 8192, 30_019_254_272),
    ("mpt-13b", 32768, 13_011_240_960),
    ("mpt-7b", 2048, 6_658_859_008),
    ("mpt-7b", 65536, 6_918_905_856),
    ("mpt-3b", 2048, 2_651_837_440),
    ("mpt-1b", 2048, 1_315_950_592),
    ("mpt-760m", 32768, 807_656_448),
]


@pytest.mark.parametrize(("name", "seq_len", "parameters"), MPT)
def test_mpt_models_have_the_parameters_that_their_benchmark_prints(name: str, seq_len: int, parameters: int):
    assert load_model(name).parameters(seq_len=seq_len).total == parameters


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [
        ("mixtral-8x7b", 12.9, 0.05),
        ("mixtral-8x22b", 39.1, 0.1),
        ("qwen2-57b-a14b", 14.2, 0.1),
        ("qwen3-30b-a3b", 3.35, 0.05),
        ("qwen3-235b-a22b", 22.0, 0.2),
        ("kimi-k2", 32.6, 0.3),
        ("gpt-oss-120b", 5.71, 0.01),  # 5.13 without the embedding
    ],
)
def test_a_token_passes_through_the_published_active_parameters(name: str, billions: float, within: float):
    assert load_model(name).active_parameters() == pytest.approx(billions * 1e9, abs=within * 1e9)


def test_deepseek_v3_passes_through_36_6_billion_beside_its_embedding():
    """Its README_WEIGHTS counts the output head and not the embedding."""
    model = load_model("deepseek-v3")
    assert model.active_parameters() - model.parameters().embedding == pytest.approx(36.6e9, abs=0.05e9)


def test_the_module_for_a_second_token_weighs_what_deepseek_says():
    """11.5e9 parameters of its own; the report rounds, and 11.6e9 is what its tensors hold."""
    model = load_model("deepseek-v3").model_copy(update={"mtp_layers": 1})
    module = model.parameters().mtp
    assert module == pytest.approx(11.5e9, rel=0.011)
    assert model.mtp_share(1).total == module
    assert load_model("deepseek-v3").mtp_share(8).total == 0


def test_every_bundled_model_names_itself_and_its_source():
    for name in model_names():
        model = load_model(name)
        assert (model.name, bool(model.source)) == (name, True)


@given(
    heads=st.sampled_from([8, 16, 32]),
    kv=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    gated=st.booleans(),
    bias=st.booleans(),
    norm=st.sampled_from(["layer", "rms"]),
)
def test_ranks_together_hold_the_layer_and_copies_of_what_is_not_cut(heads, kv, tp, gated, bias, norm):
    model = Model(layers=2, hidden=heads * 64, heads=heads, kv_heads=kv, vocab=1000, gated=gated, bias=bias, norm=norm)
    copies = (tp - 1) * (2 * model.norm_parameters + (2 * model.hidden if bias else 0))
    if tp > kv:  # each rank holds a copy of one key and value head
        one_head = 2 * model.head_dim * (model.hidden + (1 if bias else 0))
        copies += (tp - kv) * one_head
    assert tp * model.rank_layer_parameters(tp) == model.layer_parameters().total + copies


@given(vocab=st.integers(1, 300_000), tp=st.integers(1, 64))
def test_padded_vocabulary_is_the_next_multiple_that_every_rank_shares(vocab, tp):
    padded = Model(layers=1, hidden=8, heads=1, vocab=vocab).padded_vocab(tp)
    assert padded % (128 * tp) == 0 and vocab <= padded < vocab + 128 * tp


def test_fields_left_out_follow_from_the_others():
    model = Model(layers=1, hidden=64, heads=4, vocab=10, kv_heads=None)
    assert (model.kv_heads, model.head_dim, model.ffn) == (4, 16, 256)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden": 65}, "heads=4 does not divide hidden=65; heads can be 1, 5, 13, 65, or give head_dim"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4; kv_heads can be 1, 2, 4"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"layers": True}, "integer"),
        ({"layers": 8.0}, "integer"),
        ({"layers": 10**30}, "less than or equal to"),
        ({"gated": "yes"}, "boolean"),
        ({"headz": 1}, "did you mean heads?"),
        ({"norm": "batch"}, "'layer' or 'rms'"),
    ],
)
def test_a_wrong_field_has_one_message(fields, said):
    with pytest.raises(InputError) as error:
        build(Model, {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100} | fields, "m.yaml")
    assert len(error.value.problems) == 1
    assert said in str(error.value)


def mixture(**fields) -> Model:
    base = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "experts": 8, "top_k": 2, "expert_ffn": 128}
    return Model(**(base | fields))


@given(
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    gated=st.booleans(),
    bias=st.booleans(),
    shared=st.integers(0, 2),
)
def test_ranks_together_hold_every_expert(ep, etp, tp, gated, bias, shared):
    """Over ep x etp ranks the experts lie once, but for the output biases, which each of the etp parts has whole."""
    model = mixture(gated=gated, bias=bias, shared_experts=shared)
    share = model.layer_share(0, tp, ep, etp)
    whole = model.layer_parameters()
    output_biases = model.experts * model.hidden if bias else 0
    assert ep * etp * share.expert == whole.experts + (etp - 1) * output_biases
    assert share.dense == model.layer_share(0, tp).dense
    assert model.layer_share(0, 1) == RankParameters(whole.total - whole.experts, whole.experts)


@given(tp=st.sampled_from([1, 2, 4, 8]), q_rank=st.sampled_from([None, 32]))
def test_latent_attention_is_cut_by_heads_and_its_ways_down_are_whole(tp, q_rank):
    model = Model(layers=1, hidden=64, heads=8, head_dim=24, vocab=9, kv_rank=16, rope_dim=8, q_rank=q_rank,
                  bias=False, norm="rms")  # fmt: skip
    down = 64 * (16 + 8) + 16 + (0 if q_rank is None else 64 * 32 + 32)
    copies = (tp - 1) * (down + 2 * model.norm_parameters)
    assert model.v_head_dim == 16
    assert tp * model.layer_share(0, tp).total == model.layer_parameters().total + copies


def test_the_active_parameters_of_a_dense_model_are_all_of_them():
    for name in model_names():
        model = load_model(name)
        if not model.is_moe:
            assert model.active_parameters() == model.parameters().total


def test_a_token_is_multiplied_by_all_but_biases_and_norms():
    model = Model(layers=1, hidden=64, heads=4, vocab=9)
    assert model.matrix_parameters() == 12 * 64 * 64


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts": 8}, "top_k: is needed with experts=8: how many of them a token goes through, 1 to 8"),
        ({"experts": 8, "top_k": 9}, "top_k=9 is more than the 8 experts; it can be 1 to 8"),
        ({"top_k": 2}, "top_k=2 is of a mixture of experts; set experts too"),
        ({"expert_ffn": 64}, "expert_ffn=64 is of a mixture of experts; set experts too"),
        ({"shared_experts": 1}, "shared_experts=1 is of a mixture of experts"),
        ({"dense_layers": 1}, "dense_layers=1 is of a mixture of experts"),
        ({"moe_every": 2}, "moe_every=2 is of a mixture of experts"),
        ({"experts": 8, "top_k": 2, "dense_layers": 2}, "leaves none of the 2 layers to experts; it can be 0 to 1"),
        ({"experts": 8, "top_k": 2, "moe_every": 3}, "moe_every=3 leaves no layer with experts; it can be 1 to 2"),
        ({"experts": 8, "top_k": 2, "shared_ffn": 3}, "shared_ffn=3 is of shared experts; set shared_experts too"),
        ({"experts": 8, "top_k": 2, "shared_gate": True}, "shared_gate: is of shared experts; set shared_experts too"),
        ({"kv_rank": 8}, "rope_dim: is needed with kv_rank=8: the part of head_dim that is rotary"),
        ({"kv_rank": 8, "rope_dim": 16}, "rope_dim=16 is not less than head_dim=16"),
        ({"kv_rank": 8, "rope_dim": 4, "kv_heads": 2}, "a key for each of the 4 heads; leave kv_heads=2 out"),
        ({"q_rank": 8}, "q_rank=8 is of latent attention; set kv_rank too"),
        ({"layer_norms": 3}, "input should be 1, 2 or 4"),
    ],
)
def test_parts_that_do_not_belong_together_have_one_message(fields, said):
    with pytest.raises(InputError) as error:
        build(Model, {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100} | fields, "m.yaml")
    assert len(error.value.problems) == 1, error.value
    assert said in str(error.value)


def test_every_field_of_a_model_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text()
    for field in set(Model.model_fields) - {"name", "source", "note"}:
        assert f"`{field}`" in page, field
