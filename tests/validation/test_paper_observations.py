"""What the Frontier paper saw, from the model itself: nothing here was fitted to it.

Dash et al., Optimizing Distributed Training on Frontier for Large Language Models, ISC 2024, doi
10.23919/ISC.2024.10528939: sections III (the 22B model, one knob after another) and V (scaling). The paper's numbers
behind its knob studies are not at hand, so those are tests of direction, with the model's own numbers pinned beside.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.predict import predict

POINT = 0.01  # of efficiency


@cache
def answer(name, *overrides):
    return predict(load_scenario(name, overrides))


def rate(name, *overrides):
    """Hardware TFLOP/s of a GCD."""
    return answer(name, *overrides).tflops_per_device.hardware / 1e12


def fits(name, *overrides):
    return answer(name, *overrides).memory.verdict == "fits"


def falls(values):
    return all(later < earlier for earlier, later in pairwise(values))


# The 22B model, one knob after another


def cut(devices, tp, pp, batch=320):
    """Rate of the 22B model on so many GCDs, in replicas of ``tp`` x ``pp``, which must fit into memory."""
    question = ("frontier-22b", f"devices={devices}", f"layout.tp={tp}", f"layout.pp={pp}")
    assert fits(*question, f"training.global_batch={batch}")
    return rate(*question, f"training.global_batch={batch}")


@pytest.mark.parametrize(
    ("devices", "stages", "batch", "degrees"),
    [
        pytest.param(64, 4, 1280, (1, 2, 4, 8, 16), id="64 GCDs, four stages, whatever is left in replicas"),
        pytest.param(32, 2, 640, (2, 4, 8, 16), id="32 GCDs, two stages"),
        pytest.param(16, 1, 320, (4, 8, 16), id="16 GCDs, no pipeline"),
    ],
)
def test_throughput_falls_as_tensor_parallelism_grows_and_steeply_once_it_leaves_the_node(
    devices, stages, batch, degrees
):
    rates = [cut(devices, tp, stages, batch) for tp in degrees]
    assert falls(rates)
    inside, outside = rates[-2] / rates[-3], rates[-1] / rates[-2]
    assert inside > 0.85  # 4 to 8 GCDs, all in one node
    assert outside < 0.65  # 8 to 16, in two


@pytest.mark.parametrize("devices", [16, 32, 64])
def test_a_replica_cut_by_tensors_alone_or_stages_alone_is_worse_than_one_cut_by_both(devices):
    """At one batch of 320: sixteen stages lose to their bubble, tp 16 to the network between nodes."""
    cuts = {tp: cut(devices, tp, 16 // tp) for tp in (1, 2, 4, 8, 16)}
    assert falls([cuts[tp] for tp in (2, 4, 8, 16)])
    assert cuts[1] < cuts[2]
    assert cuts[16] < 0.65 * cuts[8]


def test_more_micro_batches_fill_the_pipeline():
    """Eight stages, two replicas: the bubble leaves m / (m + 7) of the time, and the rate follows it."""
    counts = (2, 4, 8, 16, 32, 64, 128, 256)
    rates = [rate("frontier-22b", f"training.global_batch={2 * count}") for count in counts]
    assert falls(rates[::-1])
    assert rates[-1] / rates[-2] < 1.04  # it saturates
    assert rates[1] / rates[0] > 1.5
    filled = [value * (count + 7) / count for value, count in zip(rates, counts, strict=True)]
    assert filled[3:] == pytest.approx([filled[-1]] * 5, rel=0.06)  # the rest is the once-a-step work


@pytest.mark.parametrize(
    ("devices", "stages"),
    [
        pytest.param(None, (4, 8, 12, 16, 24), id="more GCDs for one replica"),
        pytest.param(96, (4, 8, 12, 16, 24, 48), id="fewer replicas of as many GCDs"),
    ],
)
def test_more_stages_at_a_fixed_batch_cost_throughput(devices, stages):
    assert falls([cut(devices or 2 * count, 2, count, batch=192) for count in stages])


def test_stages_and_micro_batches_that_grow_together_hold_most_of_the_rate():
    """From four stages to twelve: with the batch grown threefold 8 % is lost, with the batch held 19 %.

    What is lost in both is the head, which weighs more beside four layers than beside twelve.
    """
    first = cut(8, 2, 4, batch=64)
    held, fixed = cut(24, 2, 12, batch=192) / first, cut(24, 2, 12, batch=64) / first
    assert (held, fixed) == pytest.approx((0.92, 0.81), abs=POINT)
    assert held > fixed + 10 * POINT


# Scaling


def scaled(name, devices, batch):
    layout = load_scenario(name).layout
    size = f"layout.dp={devices // layout.model_parallel}"
    return (name, f"devices={devices}", size, f"training.global_batch={batch}")


@pytest.mark.parametrize(("name", "share"), [("frontier-1t", 1600), ("frontier-1t", 400), ("frontier-175b", 640)])
def test_weak_scaling_loses_less_than_one_percent(name, share):
    """The paper: 100 %, for 1T from 1,024 to 3,072 GCDs and 175B to 1,024; the batch of a replica stays."""
    sizes = {"frontier-1t": (1024, 2048, 3072), "frontier-175b": (128, 256, 512, 1024)}[name]
    one = load_scenario(name).layout.model_parallel
    rates = [rate(*scaled(name, size, share * size // one)) for size in sizes]
    assert rates == pytest.approx([rates[0]] * len(rates), rel=0.01)


# Strong scaling: batch, smallest machine that holds the model, largest; efficiency printed; predicted with all
# micro-batches and with a quarter of them.
STRONG = {
    "frontier-175b": (8000, 64, 1024, 0.8993, 0.963, 0.874),
    "frontier-1t": (8016, 512, 3072, 0.8705, 0.960, 0.858),
}


def efficiency(name, batch, least, most):
    return rate(*scaled(name, most, batch)) / rate(*scaled(name, least, batch))


@pytest.mark.parametrize("name", STRONG)
def test_the_smallest_machine_of_a_strong_scaling_holds_the_model(name):
    batch, least, *_ = STRONG[name]
    assert fits(*scaled(name, least, batch))
    for fewer in (16, 32) if name == "frontier-175b" else ():
        half = scaled(name, least, batch)
        assert not fits(half[0], f"devices={fewer}", f"layout.pp={fewer // 4}", "layout.dp=1", half[3])


@pytest.mark.parametrize("name", STRONG)
def test_strong_scaling_as_the_batch_is_reported_loses_less_than_the_paper_printed(name):
    """500 micro-batches a replica for 175B and 1,336 for 1T leave little bubble: 96 %, where 90 and 87 are printed."""
    batch, least, most, printed, nominal, _ = STRONG[name]
    found = efficiency(name, batch, least, most)
    assert found == pytest.approx(nominal, abs=POINT / 2)
    assert found - printed > 4 * POINT


@pytest.mark.parametrize("name", STRONG)
def test_strong_scaling_with_a_quarter_of_the_micro_batches_is_the_papers(name):
    """The authors' public logs run a quarter of the micro-batches that Megatron counted; docs/accuracy.md tells more.

    With a quarter here too, the efficiencies come out within four points.
    """
    batch, least, most, printed, _, quarter = STRONG[name]
    found = efficiency(name, batch // 4, least, most)
    assert found == pytest.approx(quarter, abs=POINT / 2)
    assert abs(found - printed) < 4 * POINT
