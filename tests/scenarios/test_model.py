"""Parameter counts against what logs and model cards print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.model import Model, load_model, model_names
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
    ],
)
def test_bundled_models_have_their_published_size(name: str, tp: int, billions: float):
    assert load_model(name).parameters(tp).total == pytest.approx(billions * 1e9, rel=1e-3)


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
