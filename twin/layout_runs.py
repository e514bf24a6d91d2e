"""Layouts run on this host: each against the run of one process, and what each cost here.

The small models are trained in many layouts with the same seed and batches. Whatever the layout, the losses and the
gradients' norm must be those of one process; times, shares and memory are what this host made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..scenarios.result import Measurement
from ..scenarios.scenario import Scenario, scenario_from_document
from ..topology.errors import InputError, RunError
from ..trainer.options import TrainOptions
from .train import train

SEQ_LEN, GLOBAL_BATCH = 128, 8
LONGEST_S = 60.0  # that a collective may take: a row that hangs fails, and the next ones run
LOSSES = (0, 2)  # the first step's, and that after two more
WITHIN = 1e-5  # relative: fp32 sums in another order differ in their last digits, and two steps of Adam add to that


@dataclass(frozen=True)
class LayoutRun:
    """One row: a layout of a bundled model.

    Attributes:
        model: Bundled.
        layout: Fields of the layout, as ``key=value`` with blanks between; ``dp`` is what is left.
        dp: Replicas.
        micro_batch: Sequences.
        steps: Of the run.
    """

    model: str
    layout: str
    dp: int
    micro_batch: int
    steps: int = 6

    @property
    def fields(self) -> dict[str, object]:
        """The layout as a scenario file has it."""
        told = dict(word.split("=") for word in self.layout.split())
        fields: dict[str, object] = {
            key: int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
            for key, value in told.items()
        }
        return {**fields, "dp": self.dp, "micro_batch": self.micro_batch}

    @property
    def scenario(self) -> Scenario:
        """The question.

        Raises:
            InputError: If it is none.
        """
        return scenario_from_document(
            {
                "name": f"{self.model} {self.layout}".strip(),
                "machine": "local",
                "framework": "exatwin",
                "model": self.model,
                "training": {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "precision": "fp32"},
                "layout": self.fields,
            }
        )


def _plain() -> Iterator[LayoutRun]:
    """Every tp, pp and dp of 1, 2 and 4 on up to eight ranks; every other one with tp is sequence-parallel."""
    cut = 0
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2, 4):
                if tp * pp * dp > 8:
                    continue
                words = [f"{name}={degree}" for name, degree in (("tp", tp), ("pp", pp)) if degree > 1]
                if tp > 1:
                    words += ["sequence_parallel=true"] if cut % 2 == 0 else []
                    cut += 1
                count = min(max(pp, 2), GLOBAL_BATCH // dp)
                yield LayoutRun("gpt-10m", " ".join(words), dp, GLOBAL_BATCH // dp // count)


_SP = "tp=2 sequence_parallel=true"

LAYOUT_RUNS: tuple[LayoutRun, ...] = (
    *_plain(),
    # what replicas share
    LayoutRun("gpt-10m", "overlap_grad_reduce=true", 2, 2),
    LayoutRun("gpt-10m", "zero=1", 2, 2),
    LayoutRun("gpt-10m", "zero=2", 2, 2),
    LayoutRun("gpt-10m", "zero=3", 2, 2),
    LayoutRun("gpt-10m", "zero=3 shard_group=2", 4, 1),
    LayoutRun("gpt-10m", "pp=2 zero=3", 2, 2),
    LayoutRun("gpt-10m", f"{_SP} zero=3", 2, 2),
    LayoutRun("gpt-10m", f"{_SP} pp=2 zero=1", 2, 2),
    # schedules
    LayoutRun("gpt-10m", "pp=2 vpp=2 schedule=interleaved", 1, 2),
    LayoutRun("gpt-10m", "pp=4 schedule=zb-h1", 1, 1),
    LayoutRun("gpt-10m", "pp=2 vpp=2 schedule=zb-v", 2, 1),
    LayoutRun("gpt-10m", "pp=2 vpp=2 schedule=dualpipe-v", 1, 2),
    LayoutRun("gpt-10m", "recompute=full", 2, 2),
    # context
    LayoutRun("gpt-10m", "cp=2 cp_attention=ring", 1, 4),
    LayoutRun("gpt-10m", "cp=2 cp_attention=all_gather", 1, 4),
    LayoutRun("gpt-10m", "cp=2 cp_attention=all_to_all", 1, 4),
    LayoutRun("gpt-10m", "cp=2 pp=2", 1, 4),
    # other models
    LayoutRun("llama-10m", "", 1, 4),
    LayoutRun("llama-10m", _SP, 2, 2),
    LayoutRun("llama-10m", "pp=2 zero=1", 2, 2),
    LayoutRun("moe-10m", "", 1, 4),
    LayoutRun("moe-10m", "ep=2 pp=2", 2, 2),
    LayoutRun("moe-10m", f"{_SP} ep=2", 2, 2),
    LayoutRun("gpt-25m", "", 1, 4, 5),
    LayoutRun("gpt-25m", "zero=1", 2, 2, 5),
    LayoutRun("gpt-50m", "", 1, 4, 4),
    LayoutRun("gpt-50m", "pp=2 schedule=zb-h1", 1, 2, 4),
)


@dataclass(frozen=True)
class RunOutcome:
    """What came of a row.

    Attributes:
        run: The row.
        ranks: Processes.
        measured: What was measured; None where it failed.
        reason: Why it failed, in one line; empty where it did not.
        alone: Whether it is the one process that the others of its model are held against.
        differences: Relative differences from that: the first loss, that after two more steps, the first norm; None
            where one of the two failed.
    """

    run: LayoutRun
    ranks: int
    measured: Measurement | None
    reason: str = ""
    alone: bool = False
    differences: tuple[float, float, float] | None = None

    @property
    def right(self) -> bool:
        """Whether it is what one process gives."""
        return self.differences is not None and max(self.differences) <= WITHIN


def run_layouts(
    runs: tuple[LayoutRun, ...] = LAYOUT_RUNS,
    told: Callable[[int, int], None] = lambda done, of: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[RunOutcome]:
    """Train every row, one after the other; one that fails is a row with its reason.

    The first row of a model is the one that the others are held against; it should be one process.

    Args:
        runs: The rows.
        told: Told how many are done, of how many.
        note: Told of each row.

    Raises:
        KeyboardInterrupt: If a row was asked to stop.
    """
    references: dict[str, Measurement | None] = {}
    outcomes = []
    for number, run in enumerate(runs):
        told(number, len(runs))
        outcome = _run(run, references, alone=run.model not in references)
        outcomes.append(outcome)
        note(f"{run.model} {run.layout or 'one process'} dp={run.dp}: {_word(outcome)}")
    told(len(runs), len(runs))
    return outcomes


def _run(run: LayoutRun, references: dict[str, Measurement | None], *, alone: bool) -> RunOutcome:
    measured, reason, ranks = None, "", 0
    try:
        scenario = run.scenario
        ranks = scenario.devices
        trained = train(scenario, TrainOptions(steps=run.steps, device="cpu", timeout_s=LONGEST_S))
        if trained.stopped:
            raise KeyboardInterrupt  # Ctrl-C was for all rows
        measured = trained.measurement
    except (InputError, RunError) as error:
        reason = " ".join(str(error).split())
    if alone:
        references[run.model] = measured
    reference = references[run.model]
    between = None if measured is None or reference is None else differences(measured, reference)
    return RunOutcome(run, ranks, measured, reason, alone, between)


def differences(measured: Measurement, reference: Measurement) -> tuple[float, float, float]:
    """Relative differences of the first loss, of that after two more steps, and of the first gradients' norm."""
    ours, theirs = measured.steps, reference.steps
    losses = [_relative(ours[at].loss, theirs[at].loss) for at in LOSSES]
    norms = ours[0].gradient_norm, theirs[0].gradient_norm
    norm = float("inf") if norms[0] is None or norms[1] is None else _relative(norms[0], norms[1])
    return losses[0], losses[1], norm


def _relative(value: float, reference: float) -> float:
    return abs(value / reference - 1.0)


def _word(outcome: RunOutcome) -> str:
    if outcome.measured is None:
        return f"failed: {outcome.reason}"
    verdict = "" if outcome.alone else ", right" if outcome.right else ", WRONG"
    return f"{outcome.measured.step_s:.2f} s{verdict}"
