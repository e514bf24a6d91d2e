"""Which replicas a perturbation touches, and that what names nothing of the job is told with its field."""

from __future__ import annotations

import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.predict import predict
from exatwin.topology.errors import InputError


def perturbed(name, entry):
    return predict(load_scenario(name, [f"perturb={{{entry}}}"]))


@pytest.mark.parametrize(
    "entry",
    [
        "nics: [{node: 1, nic: hsn0, rate: 1.0}]",
        "links: [{node: 1, between: [0, 1], rate: 1}]",
        "devices: [{node: 1, speed: 1.0}]",
    ],
)
def test_what_is_sound_disturbs_nobody(entry):
    answer = perturbed("frontier-22b", entry)
    assert answer.engine.lanes == 1
    assert answer.step_s == predict(load_scenario("frontier-22b")).step_s


@pytest.mark.parametrize(
    ("scenario", "entry"),
    [
        ("h100-llama-3-8b", "links: [{node: 0, between: [0, switch], rate: 0.5}]"),
        ("fugaku-30b", 'links: [{ends: ["node:0", "node:1"], rate: 0.05}]'),
    ],
)
def test_links_of_switches_and_of_fabrics_that_are_no_dragonfly_can_be_slow(scenario, entry):
    assert perturbed(scenario, entry).step_s > predict(load_scenario(scenario)).step_s


def test_everything_that_is_not_there_is_told_at_once():
    entry = (
        "nics: [{node: 0, nic: a, rate: 1}], links: [{node: 1, between: [0, 3], rate: 1}, {groups: [0, 1], rate: 1}]"
    )
    with pytest.raises(InputError) as caught:
        perturbed("frontier-175b", entry)
    assert [problem.field for problem in caught.value.problems] == ["perturb.nics.0", "perturb.links.0"]
