"""What the trainer does not run: said with its reason and the nearest choice that it does."""

import pytest

from exatwin.scenarios.scenario import load_scenario
from exatwin.topology.errors import InputError
from exatwin.trainer.refusals import REFUSALS, assumptions, check_runs

BASE = "local-gpt-10m"
IDS = [f"{number}-{refusal.field}" for number, refusal in enumerate(REFUSALS)]


def test_the_bundled_scenario_runs():
    """What the rules' examples begin with is refused by none of them."""
    check_runs(load_scenario(BASE))


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_an_example_is_refused_with_field_reason_and_nearest(refusal):
    """The message is what somebody needs to go on."""
    with pytest.raises(InputError) as raised:
        check_runs(load_scenario(BASE, refusal.example))
    (mine,) = [problem for problem in raised.value.problems if refusal.reason in problem.message]
    assert mine.field == refusal.field
    assert refusal.what in mine.message
    for change in refusal.nearest:
        assert change in mine.message
    assert raised.value.where == BASE


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_the_nearest_choice_runs(refusal):
    """Following the advice once is enough."""
    check_runs(load_scenario(BASE, (*refusal.example, *refusal.nearest)))


def test_all_that_is_refused_is_said_at_once():
    """Nobody should have to ask three times."""
    with pytest.raises(InputError) as raised:
        check_runs(load_scenario(BASE, ("layout.graphs=step", "training.hidden_dropout=0.1", "model.mtp_layers=1")))
    assert {problem.field for problem in raised.value.problems} == {
        "layout.graphs",
        "training.hidden_dropout",
        "model.mtp_layers",
    }


def test_what_a_prediction_assumes_is_said_and_not_refused():
    """A run decides it for itself."""
    asked = load_scenario(BASE, ("perturb.jitter.spread=0.05",))
    check_runs(asked)
    assert any("perturb" in text for text in assumptions(asked))
    assert assumptions(load_scenario(BASE)) == ()
