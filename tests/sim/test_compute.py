"""How long an op takes: never less than the roofline allows, never less for more work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.fields import Precision
from exatwin.sim.calibration import calibration_names, load_calibration
from exatwin.sim.compute import DeviceRates, device_rates, gemm_s, op_s, shape_efficiency
from exatwin.sim.ops import Elementwise, FusedAttention, Gemm
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine

A100 = DeviceRates(250e12, 140e12, 1.6e12, (128, 256), 108, 151.0, 2, 4e-6)

sizes = st.integers(1, 40_000)
gemms = st.builds(Gemm, st.just("x"), m=sizes, n=sizes, k=sizes, count=st.integers(1, 200))
tiles = st.tuples(st.integers(1, 512), st.integers(1, 512))


@given(gemms, tiles, st.integers(1, 200), st.floats(0, 1000))
def test_no_shape_runs_faster_than_the_full_rate(gemm, tile, units, k_half):
    assert 0 < shape_efficiency(gemm, tile, units, k_half) <= 1


def test_a_shape_that_fills_every_wave_runs_at_the_full_rate():
    assert shape_efficiency(Gemm("x", 128 * 9, 256 * 12, 4096), (128, 256), units=108, k_half=0.0) == 1.0


def test_a_result_of_one_tile_keeps_one_unit_busy():
    assert shape_efficiency(Gemm("x", 256, 128, 64), (128, 256), units=100, k_half=0.0) == pytest.approx(0.01)


def test_an_inner_dimension_of_k_half_gives_half_of_the_rate():
    assert shape_efficiency(Gemm("x", 128, 256, 151), (128, 256), units=1, k_half=151.0) == pytest.approx(0.5)


@given(gemms)
def test_a_product_takes_at_least_its_flop_and_at_least_its_bytes(gemm):
    moved = 2 * gemm.count * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    seconds = gemm_s(gemm, A100)
    assert seconds >= gemm.flop / A100.gemm_flop_per_s * (1 - 1e-12)
    assert seconds >= moved / A100.memory_bytes_per_s
    assert seconds >= A100.launch_s


@given(gemms, st.sampled_from(["m", "n", "k", "count"]))
def test_a_product_of_more_is_never_done_sooner(gemm, side):
    for more in (getattr(gemm, side) + 1, 2 * getattr(gemm, side)):
        assert gemm_s(replace(gemm, **{side: more}), A100) >= gemm_s(gemm, A100) * (1 - 1e-12)


@given(st.floats(0, 1e18), st.floats(0, 1e13))
def test_fused_attention_is_bound_by_flop_or_by_bytes(flop, moved):
    seconds = op_s(FusedAttention("attention", flop, moved), A100)
    assert seconds == pytest.approx(max(flop / 140e12, moved / 1.6e12) + 4e-6)


@given(st.floats(0, 1e13), st.integers(1, 9))
def test_element_wise_work_is_bytes_and_launches(moved, kernels):
    assert op_s(Elementwise("loss", moved, kernels), A100) == pytest.approx(moved / 1.6e12 + kernels * 4e-6)


@pytest.mark.parametrize("name", calibration_names())
def test_no_calibrated_rate_is_above_what_the_vendor_printed(name):
    calibration = load_calibration(name)
    for machine in map(load_machine, calibration.machines):
        for precision in calibration.compute.gemm_fraction:
            rates = device_rates(machine, calibration, precision)
            peak = machine.device.peak_flop_per_s(precision)
            assert 0 < rates.gemm_flop_per_s <= peak
            assert 0 < rates.attention_flop_per_s <= peak
            assert 0 < rates.memory_bytes_per_s <= machine.device.memory_bandwidth_bytes_per_s


def test_a_precision_that_was_never_measured_is_refused():
    precision: Precision = "fp32"
    with pytest.raises(InputError, match="no matrix product figure for fp32; it has fp16, bf16"):
        device_rates(load_machine("frontier"), load_calibration("mi250x-rccl"), precision)
