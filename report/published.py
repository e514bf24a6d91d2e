"""A published run beside a prediction: the same figures, and whether it was the same question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..scenarios.measurements import MeasuredRun
    from ..scenarios.result import Prediction
    from ..scenarios.scenario import Scenario

NOT_ASKED = ("name", "title", "note", "measured", "calibration")  # fields that say nothing about the run


@dataclass(frozen=True)
class Published:
    """What a source states about a run.

    Attributes:
        id: The row's name.
        source: Key of docs/sources.md.
        note: What one must know of its figures: what is derived, what was corrected.
        figures: By the names of a prediction's own figures; rates in FLOP/s.
        converted: Those of them that the source does not print but implies.
        peaks: Peak bytes of stages, as the framework's max allocated.
        differs: What the run has otherwise than the question, such as a field with the run's value.
    """

    id: str
    source: str
    note: str
    figures: dict[str, float]
    converted: frozenset[str]
    peaks: dict[int, float]
    differs: tuple[str, ...]


def published_run(scenario: Scenario, prediction: Prediction) -> Published | None:
    """The run that a scenario names as its own, where it names one.

    The sources of the bundled rows count recomputation; the model rate is converted from theirs by the
    prediction's own ratio of the two, which is a count and no prediction.

    Raises:
        InputError: If there is no such run.
    """
    if scenario.measured is None:
        return None
    from ..scenarios.measurements import measured_run, measured_stage_memory

    run = measured_run(scenario.measured)
    figures = _figures(run)
    converted = set()
    hardware = figures.get("hardware")
    if hardware:
        peak = scenario.machine.device.peak_flop_per_s(scenario.training.precision)
        rates = prediction.tflops_per_device
        figures |= {"hfu": hardware / peak, "model": hardware * rates.model / rates.hardware}
        figures["mfu"] = figures["model"] / peak
        converted = {"model", "mfu"}
    return Published(
        id=run.id,
        source=run.source,
        note=run.note,
        figures=figures,
        converted=frozenset(converted),
        peaks={row.stage: row.max_allocated_bytes for row in measured_stage_memory() if row.run == run.id},
        differs=tuple(_differences(scenario, prediction, run)),
    )


def _figures(run: MeasuredRun) -> dict[str, float]:
    stated = {
        "step_s": run.step_s,
        "hardware": run.tflops_hardware * 1e12 if run.tflops_hardware else None,
        "tokens_per_s": run.tokens_per_s,
    }
    return {name: value for name, value in stated.items() if value}


def _differences(scenario: Scenario, prediction: Prediction, run: MeasuredRun) -> Iterator[str]:
    if run.scenario:
        asked, measured = scenario.document(), run.ask().document()
        known = dict(_leaves(asked))
        for field, value in _leaves(measured):
            if field.split(".")[0] not in NOT_ASKED and known.get(field) != value:
                yield f"{field} {value}"
        for field, words in (("placement", "no such placement"), ("collectives", "the library's own algorithms")):
            if field in asked and field not in measured:
                yield words
    if not scenario.perturb.empty:
        yield "none of these perturbations"
    if prediction.network == "solo":
        yield "transfers that share their links"


def _leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
