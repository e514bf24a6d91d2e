"""Fused attention: by pass, head width and blocks, and against kernels that were timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.sim.attention_law import AttentionPass, AttentionRates, attention_flop_s
from exatwin.sim.benchmarks import measured_attention
from exatwin.sim.calibration import load_calibration
from exatwin.sim.compute import device_rates
from exatwin.sim.ops import FusedAttention
from exatwin.topology.machine import load_machine

RATES = AttentionRates(AttentionPass(200e12, 1.8, 0.8), AttentionPass(150e12, 0.7, 0.8), 108, 28.7, 32)


def kernel(tokens=4096, heads=32, width=128, backward=False):
    flop = (5 if backward else 2) * heads * tokens * tokens * width
    return FusedAttention("attention", float(flop), 0.0, width, heads, tokens, tokens, backward)


def rate(op, rates=RATES):
    return op.flop / attention_flop_s(op, rates)


@given(st.integers(1, 200_000), st.integers(1, 4096), st.integers(1, 512), st.booleans())
def test_no_kernel_runs_faster_than_its_pass(tokens, heads, width, backward):
    op = kernel(tokens, heads, width, backward)
    assert 0 < rate(op) <= (150e12 if backward else 200e12) * (1 + 1e-12)


@given(st.integers(1, 100_000), st.integers(1, 512), st.integers(1, 4), st.integers(1, 128))
def test_more_heads_or_tokens_take_longer(tokens, heads, times, width):
    once = attention_flop_s(kernel(tokens, heads, width), RATES)
    assert attention_flop_s(kernel(tokens * times, heads, width), RATES) >= once * (1 - 1e-12)
    assert attention_flop_s(kernel(tokens, heads * times, width), RATES) >= once * (1 - 1e-12)


def test_a_kernel_that_names_no_queries_is_taken_as_a_large_one():
    assert rate(FusedAttention("attention", 1e12, 0.0)) == pytest.approx(200e12)


def test_a_width_that_the_kernel_fills_up_costs_as_the_filled_one():
    """Heads of 80 run as heads of 96."""
    assert attention_flop_s(kernel(width=80), RATES) == pytest.approx(attention_flop_s(kernel(width=96), RATES))


def test_narrow_heads_run_slower_and_so_do_wide_ones():
    assert rate(kernel(width=64)) < rate(kernel(width=96)) < rate(kernel(width=128)) > rate(kernel(width=192))


def test_few_blocks_leave_units_idle():
    rates = replace(RATES, forward=AttentionPass(200e12, fill=1.0))
    blocks = 4096 * 27 / 128
    assert rate(kernel(heads=27), rates) == pytest.approx(200e12 / (1 + 108 / blocks))


@pytest.mark.parametrize(
    ("device", "calibration", "machine", "median", "p90"),
    [("a100", "a100-nccl", "selene", 0.03, 0.10), ("b200", "b200-nccl", "dgx-b200", 0.06, 0.25)],
)
def test_the_law_is_as_far_from_timed_kernels_as_its_device_file_says(device, calibration, machine, median, p90):
    rates = device_rates(load_machine(machine), load_calibration(calibration), "bf16").attention
    found = np.array([abs(case.flop_per_s / rate(case.op, rates) - 1) for case in measured_attention(device)])
    assert np.median(found) <= median
    assert np.percentile(found, 90) <= p90
