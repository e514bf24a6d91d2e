"""How long an op takes: never less than the roofline allows, never less for more work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.fields import Precision
from exatwin.sim.attention_law import AttentionPass, AttentionRates
from exatwin.sim.calibration import calibration_names, calibration_with, default_calibration, load_calibration
from exatwin.sim.compute import DeviceRates, device_rates, gemm_s, op_s
from exatwin.sim.gemm_law import GemmRates, Tile
from exatwin.sim.ops import Elementwise, FusedAttention, Gemm
from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine

TILES = tuple(Tile(*tile) for tile in ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.66)))
A100 = DeviceRates(
    {"fp16": GemmRates(250e12, TILES, 108, 151.0)},
    "fp16",
    AttentionRates(AttentionPass(140e12), AttentionPass(100e12)),
    1.6e12,
    4e-6,
)

sizes = st.integers(1, 40_000)
gemms = st.builds(Gemm, st.just("x"), m=sizes, n=sizes, k=sizes, count=st.integers(1, 200), grouped=st.booleans())


@given(gemms)
def test_a_product_takes_at_least_its_flop_and_at_least_its_bytes(gemm):
    moved = 2 * gemm.count * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    seconds = gemm_s(gemm, A100)
    assert seconds >= gemm.flop / 250e12 * (1 - 1e-12)
    assert seconds >= moved / A100.memory_bytes_per_s
    assert seconds >= A100.launch_s


@given(gemms, st.sampled_from(["m", "n", "k", "count"]))
def test_a_product_of_more_is_never_done_sooner(gemm, side):
    for more in (getattr(gemm, side) + 1, 2 * getattr(gemm, side)):
        assert gemm_s(replace(gemm, **{side: more}), A100) >= gemm_s(gemm, A100) * (1 - 1e-12)


@given(st.floats(0, 1e18), st.floats(0, 1e13), st.booleans())
def test_fused_attention_is_bound_by_flop_or_by_bytes(flop, moved, backward):
    seconds = op_s(FusedAttention("attention", flop, moved, backward=backward), A100)
    assert seconds == pytest.approx(max(flop / (100e12 if backward else 140e12), moved / 1.6e12) + 4e-6)


@given(st.floats(0, 1e13), st.integers(1, 9))
def test_element_wise_work_is_bytes_and_launches(moved, kernels):
    assert op_s(Elementwise("loss", moved, kernels), A100) == pytest.approx(moved / 1.6e12 + kernels * 4e-6)


@pytest.mark.parametrize("name", calibration_names())
def test_no_calibrated_rate_is_above_what_the_vendor_printed(name):
    calibration = load_calibration(name)
    for machine in map(load_machine, calibration.machines):
        for precision in calibration.compute.gemm_fraction:
            rates = device_rates(machine, calibration, precision)
            peak = machine.device.peak_flop_per_s(rates.precision)
            assert all(
                0 < gemm.flop_per_s <= machine.device.peak_flop_per_s(known) for known, gemm in rates.gemms.items()
            )
            assert 0 < rates.attention.forward.flop_per_s <= peak
            assert 0 < rates.attention.backward.flop_per_s <= peak
            assert 0 < rates.memory_bytes_per_s <= machine.device.memory_bandwidth_bytes_per_s
            assert rates.overlap_slowdown >= 1


def test_a_precision_that_was_never_measured_is_refused():
    precision: Precision = "fp32"
    with pytest.raises(InputError, match="no matrix product figure for fp32; it has fp16, bf16"):
        device_rates(load_machine("frontier"), load_calibration("mi250x-rccl"), precision)


def rates_of(machine_name, precision):
    machine = load_machine(machine_name)
    alone = calibration_with(default_calibration(machine).name, {"compute.sustained": 1.0})
    return device_rates(machine, alone, precision)


@pytest.mark.parametrize("machine", ["selene", "frontier", "jean-zay-v100"])
def test_fp8_is_refused_on_a_device_that_has_none(machine):
    with pytest.raises(InputError, match="no peak for fp8"):
        rates_of(machine, "fp8")


def test_in_an_fp8_training_only_the_products_that_say_so_run_in_fp8():
    plain = Gemm("x", 8192, 8192, 8192)
    fp8 = replace(plain, precision="fp8")
    training, usual = rates_of("dgx-h100", "fp8"), rates_of("dgx-h100", "bf16")
    assert gemm_s(plain, training) == gemm_s(plain, usual)
    assert 0.5 < gemm_s(fp8, training) / gemm_s(plain, training) < 0.6
    attention = FusedAttention("attention", 1e12, 1e9, 128, 32, 4096, 4096)
    assert op_s(attention, training) == op_s(attention, usual)


def test_a_product_in_a_precision_beside_the_trainings_takes_its_share_of_that_peak():
    router = Gemm("router", 65_536, 4096, 4096, precision="fp32")
    rates = rates_of("dgx-h100", "bf16")
    assert rates.gemms["fp32"].flop_per_s == pytest.approx(67e12 * 0.8)
    assert gemm_s(router, rates) > gemm_s(replace(router, precision=None), rates)


def test_a_product_in_a_precision_that_the_device_lacks_is_refused():
    with pytest.raises(InputError, match="no matrix products in fp8; it has fp32, fp16, bf16"):
        gemm_s(Gemm("x", 8, 8, 8, precision="fp8"), rates_of("selene", "bf16"))


@pytest.mark.parametrize(
    ("machine", "precision", "least", "most"),
    [
        ("selene", "bf16", 230, 260),  # Azure: 228 to 256.5 TFLOP/s
        ("dgx-h100", "bf16", 700, 795),  # MAMF: 794.5 is the best shape there is
        ("dgx-h100", "fp8", 1200, 1403),  # Azure and MAMF
        ("alps", "bf16", 700, 829),
        ("dgx-b200", "bf16", 950, 1745),
        ("gb200-nvl72", "bf16", 950, 1822),
        ("mi300x-node", "bf16", 600, 785),
        ("frontier", "bf16", 80, 147),
        ("aurora", "bf16", 190, 256),
        ("jean-zay-v100", "fp16", 80, 100),
    ],
)
def test_a_large_product_runs_as_fast_as_people_measure(machine, precision, least, most):
    gemm = Gemm("x", 8192, 8192, 8192, precision=precision)
    assert least < gemm.flop / gemm_s(gemm, rates_of(machine, precision)) / 1e12 < most
