"""Fields of a layout and of a training run."""

from __future__ import annotations

import math

import pytest

from exatwin.scenarios.fields import parse_number, parse_tokens
from exatwin.scenarios.framework import framework_names, load_framework
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.training import Training
from exatwin.topology.errors import InputError
from exatwin.topology.files import build


@pytest.mark.parametrize("key", ["tp", "pp", "dp", "vpp", "cp", "ep", "micro_batch"])
@pytest.mark.parametrize(
    "value", [0, -1, 1.0, 8.5, "8", True, 10**30, 1e30, math.nan, math.inf, [1], {}, "", "acht", b"8"]
)
def test_a_degree_is_a_whole_number_from_one_to_a_million(key, value):
    with pytest.raises(InputError) as error:
        build(Layout, {key: value}, "x")
    assert [problem.field for problem in error.value.problems] == [f"layout.{key}"[7:]]


@pytest.mark.parametrize("key", ["sequence_parallel", "flash_attention"])
@pytest.mark.parametrize("value", ["yes", "true", 1, 0, None, []])
def test_a_flag_is_true_or_false(key, value):
    with pytest.raises(InputError, match="boolean"):
        build(Layout, {key: value}, "x")


@pytest.mark.parametrize(
    "fields",
    [
        {"zero": 4},
        {"zero": True},
        {"zero": -1},
        {"recompute": "ful"},
        {"recompute": []},
        {"recompute": ["full", 3]},
        {"recompute": {"a": 1}},
        {"recompute": True},
        {"schedule": "zb"},
        {"schedule": 3},
        {"stage_layers": "99"},
        {"stage_layers": [9, 0]},
        {"stage_layers": [9, True]},
        {"stage_layers": {9: 1}},
        {"tq": 1},
    ],
)
def test_a_wrong_layout_field_has_one_message(fields):
    with pytest.raises(InputError) as error:
        build(Layout, fields, "x")
    assert len(error.value.problems) == 1


def test_layers_are_shared_evenly_or_as_said():
    assert Layout(pp=4).layers_by_stage(8) == (2, 2, 2, 2)
    assert Layout(pp=2, stage_layers=(5, 3)).layers_by_stage(8) == (5, 3)
    with pytest.raises(InputError, match="pp=3 does not divide 8 layers; pp can be 1, 2, 4, 8"):
        Layout(pp=3).layers_by_stage(8)


def test_recompute_is_said_for_all_stages_or_for_each():
    assert Layout(pp=2, recompute="full").recompute_by_stage() == ("full", "full")
    assert Layout(pp=2, recompute=("full", "none")).recompute_by_stage() == ("full", "none")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [(20e12, 20e12), ("20e12", 20e12), ("20T", 20e12), ("380B", 380e9), ("1.5 M", 1.5e6), ("1_000K", 1e6), (7, 7.0)],
)
def test_tokens_are_a_number_or_a_number_with_its_scale(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "value", [True, None, [], "", "T", "20Q", "nan", "inf", -1, 0, "-5B", 1e30, math.nan, math.inf, 10**400, "٣T"]
)
def test_other_tokens_are_refused(value):
    with pytest.raises(ValueError, match="tokens"):
        parse_tokens(value)


@pytest.mark.parametrize("value", [1.0, -0.1, math.nan, math.inf, "x", True, None, [], 10**400, "1_0"])
def test_a_dropout_is_a_probability_below_one(value):
    with pytest.raises(InputError) as error:
        build(Training, {"seq_len": 1, "global_batch": 1, "precision": "bf16", "hidden_dropout": value}, "x")
    assert [problem.field for problem in error.value.problems] == ["hidden_dropout"]
    assert parse_number("1e-3") == 0.001


def test_every_problem_of_a_training_is_said_at_once():
    with pytest.raises(InputError) as error:
        build(
            Training, {"seq_len": 0, "global_batch": "x", "precision": "fp9", "tokens": "x", "optimiser": "adam"}, "x"
        )
    assert {p.field for p in error.value.problems} == {"seq_len", "global_batch", "precision", "tokens", "optimiser"}


def test_frameworks_keep_what_their_logs_show():
    """Bytes a parameter between steps of the LUMI and Crusher runs, ZeRO-1 over dp replicas."""
    deepspeed = load_framework("megatron-deepspeed")
    bf16, fp16 = deepspeed.state_bytes("bf16"), deepspeed.state_bytes("fp16")
    assert bf16.weight + bf16.gradient + bf16.accumulation + bf16.optimizer / 2 == 14
    assert bf16.weight + bf16.gradient + bf16.accumulation + bf16.optimizer / 32 == 8.375
    assert fp16.weight + fp16.optimizer / 2 + fp16.gradient / 2 == 9
    assert load_framework("megatron").state_bytes("bf16").total == 18
    assert load_framework("megatron-deepspeed-fugaku").precisions == ("fp32",)


def test_a_framework_says_which_precisions_it_has():
    with pytest.raises(InputError, match="not described for bf16; it has fp32"):
        load_framework("megatron-deepspeed-fugaku").state_bytes("bf16")
    assert {load_framework(name).name for name in framework_names()} == set(framework_names())
