"""What a run holds: its live tensors are those that are predicted, and what is measured means tensors."""

import json
import subprocess
import sys
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exatwin.scenarios.scenario import load_scenario
from exatwin.sim.predict import predict
from exatwin.trainer.loop import Trainer
from exatwin.trainer.memory import host_available_bytes

from .ranks import lone_grid, quiet_ranks, torch  # noqa: F401

ALONE = ("layout.tp=1", "layout.pp=1", "layout.dp=1", "devices=1", "training.global_batch=4")
MIB = 2**20


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that an operation has made and nobody has let go, and their peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key):
        self.now -= self.sizes.pop(key, 0)


def batch_of(scenario):
    shape = scenario.training.global_batch, scenario.training.seq_len + 1
    return np.zeros(shape, dtype=np.int64)


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ((), 0.005),
        (("layout.recompute=full",), 0.005),
        (("layout.flash_attention=false",), 0.005),
        (("training.precision=bf16",), 0.005),
        (("layout.micro_batch=4",), 0.005),
        (("model=llama-10m",), 0.05),  # RMS norms of a CPU are put together from kernels that keep more
    ],
    ids=str,
)
def test_the_peak_of_live_tensors_is_predicted(changes, within):
    scenario = load_scenario("local-gpt-10m", [*ALONE, *changes])
    with LiveTensors() as live:
        trainer = Trainer(scenario, lone_grid())
        held = live.now
        for step in range(2):
            trainer.step(step, batch_of(scenario))
    predicted = predict(scenario).memory.stages[0]
    assert live.peak == pytest.approx(predicted.peak_bytes, rel=within)
    # Before the optimizer's first step its moments are not there; nothing of the way in which weights are made stays.
    parts = predicted.parts
    moments = 2 * 4 * trainer.parameters
    assert held == pytest.approx(parts.parameters + parts.gradients + parts.optimizer - moments, rel=0.001)


@pytest.mark.parametrize("layout", [(), ("layout.recompute=full",)], ids=str)
def test_a_runs_memory_is_that_of_its_tensors(layout):
    """A few MiB beside them are Python's own objects and what malloc keeps of small blocks."""
    changes = [argument for change in (*ALONE, *layout) for argument in ("--set", change)]
    command = [sys.executable, "-m", "exatwin", "train", "local-gpt-10m", *changes, "--steps", "2", "--json", "-q"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (measured,) = json.loads(answer.stdout)["memory"]["stages"]
    (predicted,) = predict(load_scenario("local-gpt-10m", [*ALONE, *layout])).memory.stages
    assert predicted.peak_bytes < measured["peak_bytes"] < predicted.peak_bytes + 12 * MIB


def test_the_host_says_what_is_free():
    assert 64 * MIB < host_available_bytes() < 2**50
