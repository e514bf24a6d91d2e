"""What a user chooses for a run beside its scenario."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """How long and with what a scenario is trained.

    Attributes:
        steps: Steps of the whole run, those before a restart included.
        seed: Of the first weights and the order of the data.
        learning_rate: Adam's.
        data: Text or token file in place of the scenario's; None for that.
        checkpoint: Folder of checkpoints; a run goes on from the last one in it.
        checkpoint_every: Steps between checkpoints; there is one at the end too.
        max_restarts: Times that a run whose rank died begins again from its last checkpoint.
        tensorboard: Folder for TensorBoard's events.
        profile: File for a trace of the last three steps of rank 0, which are then not measured.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        balanced: Experts by turns whatever the router says, for timing and counts.
        timeout_s: After which a collective that hangs ends the run.
    """

    steps: int = 20
    seed: int = 0
    learning_rate: float = 3e-4
    data: str | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 100
    max_restarts: int = 0
    tensorboard: Path | None = None
    profile: Path | None = None
    device: str = "auto"
    balanced: bool = False
    timeout_s: float = 600.0
