"""The optimizer's part of a step: the norm of all gradients, clipping, loss scaling, Adam.

Works on the runs of elements that a rank owns (`parallel.replicas.Owned`), whatever layout they come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .comm import Channel
from .parallel.replicas import Owned

BETAS, EPSILON = (0.9, 0.95), 1e-8  # Adam as GPT-3 was trained: Brown et al. 2020, arXiv 2005.14165, appendix B
MOST_NORM = 1.0  # gradients are clipped to this global norm; likewise
FIRST_SCALE, MOST_SCALE, GROW_EVERY = 2.0**16, 2.0**24, 2000  # torch.amp.GradScaler's first scale and growth interval


def adam(owned: Sequence[Owned], learning_rate: float) -> torch.optim.Optimizer:
    """Adam over what a rank owns, in one kernel: no copy of the parameters is made."""
    return torch.optim.Adam(
        [run.held for run in owned], lr=learning_rate, betas=BETAS, eps=EPSILON, fused=True, foreach=False
    )


def squared_norm(owned: Sequence[Owned], world: Channel) -> torch.Tensor:
    """The squared norm of all gradients of the model, each element once, in fp64; every rank calls it.

    What several ranks own alike counts its part on each of them.
    """
    device = owned[0].master.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for run in owned:
        assert run.gradient is not None
        flat = run.gradient.reshape(-1)
        for begin, end, copies in run.copies:
            part = flat[begin:end]
            total += part.dot(part).double() / copies
    return world.all_reduce(total)


@dataclass
class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16; 1 and fixed otherwise.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2, and torch.amp.GradScaler.
    """

    scale: float = 1.0
    moves: bool = False
    good_steps: int = 0

    def after(self, *, finite: bool) -> None:
        """Half of it after an overflow, twice after many steps without."""
        if not self.moves:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps % GROW_EVERY == 0:
            self.scale = min(self.scale * 2, MOST_SCALE)


def update(
    owned: Sequence[Owned], optimizer: torch.optim.Optimizer, world: Channel, scale: LossScale, *, clip: bool
) -> float:
    """One step of the optimizer; gives the gradients' norm before clipping.

    Where it is not finite nothing is updated.
    """
    norm = float(squared_norm(owned, world).sqrt()) / scale.scale
    finite = math.isfinite(norm)
    if finite:
        factor = 1.0 / scale.scale
        if clip and norm > MOST_NORM:
            factor *= MOST_NORM / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        for run in owned:
            assert run.gradient is not None
            run.held.grad = run.gradient if factor == 1.0 else run.gradient.mul_(factor)
        optimizer.step()
        for run in owned:
            run.held.grad = None
    scale.after(finite=finite)
    return norm
