"""How sources count the FLOP of a step, and what a rate in one count is in another.

A rate that is published in FLOP/s is a number of steps a second times somebody's count of
the FLOP in a step, and the counts differ by up to a factor of two: with recomputation or
without, attention in full or half of it, the embedding as if it were a matrix product or
not. So a published rate is a step time only together with its convention.

Letters: N parameters, B sequences, s tokens in each, l layers, h hidden width, a heads of
width d, f width of the MLP, V vocabulary padded as the framework pads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..topology.errors import input_error, nearest
from .fields import Recompute
from .layout import Layout
from .model import Model
from .schedules import load_schedule
from .training import Training
from .weights import mtp_weights, token_share


@dataclass(frozen=True)
class Asked:
    """A step whose FLOP are counted.

    Attributes:
        model: What is trained.
        training: Its sequences.
        recompute: What the backward pass runs again: in all layers, or one entry a layer.
        tp: Tensor-parallel degree, to whose multiple the vocabulary is padded.
        recompute_ops: What selective recomputation runs again; norms and activations have no matrix products.
    """

    model: Model
    training: Training
    recompute: Recompute | Sequence[Recompute] = "none"
    tp: int = 1
    recompute_ops: Sequence[str] = ("attention",)

    @classmethod
    def of(cls, model: Model, training: Training, layout: Layout) -> Asked:
        """A step under a layout."""
        return cls(model, training, recompute_by_layer(layout, model.layers), layout.tp, layout.recompute_ops)

    @property
    def tokens(self) -> float:
        """Tokens in a step, B s."""
        return float(self.training.global_batch) * self.training.seq_len

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.training.seq_len

    @property
    def parameters(self) -> int:
        """All that a token passes through: N, for experts the active part."""
        return self.model.active_parameters(self.tp, self.seq)

    @property
    def head(self) -> int:
        """Elements of the output head."""
        return self.model.hidden * self.model.padded_vocab(self.tp)

    @property
    def linear(self) -> int:
        """Elements of all layers' matrices that a token is multiplied by.

        A layer for a further token counts with its projection and with another pass of the head.
        """
        model = self.model
        layers = sum(count * model.matrix_parameters(layer) for (layer, _), count in self.kinds.items())
        further = token_share(mtp_weights(model), model, matrices=True) + self.head
        return layers + model.mtp_layers * further

    def attention(self, causal: bool = False) -> float:
        """FLOP of scores and of the sum over values for one token in one layer, forward: 2 s a (d + d_v)."""
        return 2.0 * self.seq * (self.model.query_width + self.model.value_width) * (0.5 if causal else 1.0)

    def all_attention(self, causal: bool = False) -> float:
        """The same of all layers."""
        return (self.model.layers + self.model.mtp_layers) * self.attention(causal)

    @property
    def modes(self) -> list[Recompute]:
        """What is recomputed in each layer; layers for further tokens do as the last."""
        model = self.model
        modes = [self.recompute] * model.layers if isinstance(self.recompute, str) else list(self.recompute)
        return modes + modes[-1:] * model.mtp_layers

    @property
    def kinds(self) -> Counter[tuple[int, Recompute]]:
        """How many layers are like a layer and recompute in a way: alike are those with experts, and those without."""
        model = self.model
        alike: dict[bool, int] = {}
        found: Counter[tuple[int, Recompute]] = Counter()
        for layer, mode in enumerate(self.modes):
            here = min(layer, model.layers - 1)
            found[alike.setdefault(model.has_experts(here), here), mode] += 1
        return found

    @property
    def factor(self) -> float:
        """Passes of the layers in units of a forward: 3, and 4 where all of each is recomputed."""
        return 3.0 + sum(mode == "full" for mode in self.modes) / len(self.modes)

    def again(self, causal: bool = False, attention_times: float = 1.0) -> float:
        """FLOP that a token's backward pass runs again, in all layers."""
        total = 0.0
        for (layer, mode), count in self.kinds.items():
            if mode == "full":
                total += count * (2.0 * self.model.matrix_parameters(layer) + self.attention(causal))
            elif mode == "selective":
                attention = attention_times * self.attention(causal) if "attention" in self.recompute_ops else 0.0
                experts = 2.0 * self.model.routed_parameters(layer) if "experts" in self.recompute_ops else 0.0
                total += count * (attention + experts)
        return total


def recompute_by_layer(layout: Layout, layers: int) -> tuple[Recompute, ...]:
    """What each layer recomputes, by the mode of its pipeline rank and its place in its virtual stage.

    >>> recompute_by_layer(Layout(pp=2, recompute=["full", "none"]), 4)
    ('full', 'full', 'none', 'none')
    """
    of_rank, schedule = layout.recompute_by_stage(), load_schedule(layout.schedule)
    modes: list[Recompute] = []
    for stage, count in enumerate(layout.layers_by_virtual_stage(layers)):
        rank, _ = schedule.home(stage, layout.pp, layout.vpp)
        modes += [of_rank[rank] if again else "none" for again in layout.recomputed_layers(count)]
    return tuple(modes)


def model_flop(asked: Asked, causal: bool = False) -> float:
    """What the model needs: each matrix product forward and twice backward; attention in full, or its causal half.

    For a GPT layer it is ``72 B s l h^2 (1 + s/6h + V/12lh)``.
    Source: Korthikanti et al. 2022, arXiv 2205.05198, equation 7.
    """
    return 3.0 * asked.tokens * (2.0 * (asked.linear + asked.head) + asked.all_attention(causal))


def hardware_flop(asked: Asked, causal: bool = False) -> float:
    """What is executed: the model's FLOP, and those of the layers, or of their attention, that are computed again.

    For a GPT layer ``96 B s l h^2 (1 + s/6h + V/16lh)`` with full recomputation and
    ``72 B s l h^2 (1 + 2s/9h + V/12lh)`` with selective, where `korthikanti_flop` has ``s/3h``.
    Source: Narayanan et al. 2021, arXiv 2104.04473, appendix.
    """
    return model_flop(asked, causal) + asked.tokens * asked.again(causal)


def korthikanti_flop(asked: Asked) -> float:
    """Korthikanti's hardware FLOP: ``72 B s l h^2 (1 + s/3h + V/12lh)`` with selective recomputation.

    Their equation 8 puts the recomputed attention at as much as forward and backward together.
    Source: Korthikanti et al. 2022, arXiv 2205.05198, equation 8.
    """
    return model_flop(asked) + asked.tokens * asked.again(attention_times=3.0)


def six_n_flop(asked: Asked) -> float:
    """6 N a token: all parameters, embedding included, attention left out.

    Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1; N is all parameters here, as most users of it have it.
    """
    return 6.0 * asked.parameters * asked.tokens


def eight_n_flop(asked: Asked) -> float:
    """8 N a token: 6 N, and a second forward. What BigScience's V100 runs print."""
    return 8.0 * asked.parameters * asked.tokens


def palm_flop(asked: Asked) -> float:
    """6 N + 12 l a d s a token: 6 N, and attention in full.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return six_n_flop(asked) + 3.0 * asked.tokens * asked.all_attention()


def palm_hardware_flop(asked: Asked) -> float:
    """A third more than `palm_flop` where all activations are recomputed: HFU as llm-foundry prints it.

    Source: GitHub mosaicml/llm-foundry, ``scripts/train/benchmarking/collect_results.py``.
    """
    return palm_flop(asked) * asked.factor / 3.0


def torchtitan_flop(asked: Asked) -> float:
    """6 (N - embedding) + 12 l a d s a token; of experts, the active ones.

    Source: GitHub pytorch/torchtitan, ``get_num_flop_per_token``.
    """
    words = asked.model.padded_vocab(asked.tp) * asked.model.hidden
    return palm_flop(asked) - 6.0 * asked.tokens * words


def megatron_deepspeed_flop(asked: Asked) -> float:
    """24 c B s l h^2 (1 + s/6h + V/16lh) with c of 4 where activations are checkpointed and 3 where not.

    Exact with c = 4 for a GPT layer; whatever the MLP's width and the key and value heads, it counts as if
    they were 4 h and a. Megatron-DeepSpeed and GPT-NeoX print it.
    Source: GitHub EleutherAI/gpt-neox @018b8a9, ``megatron/logging.py``.
    """
    layers, hidden = asked.model.layers, asked.model.hidden
    vocab = asked.model.padded_vocab(asked.tp)
    terms = 1.0 + asked.seq / (6.0 * hidden) + vocab / (16.0 * layers * hidden)
    return 24.0 * asked.factor * asked.tokens * layers * hidden**2 * terms


def narayanan_flop(asked: Asked) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): recomputation is always counted.

    Source: Narayanan et al. 2021, arXiv 2104.04473, equation 3.
    """
    layers, hidden = asked.model.layers, asked.model.hidden
    vocab = asked.model.padded_vocab(asked.tp)
    terms = 1.0 + asked.seq / (6.0 * hidden) + vocab / (16.0 * layers * hidden)
    return 96.0 * asked.tokens * layers * hidden**2 * terms


def megatron_flop(asked: Asked, causal: bool = False) -> float:
    """Megatron-LM's count since 2023: the model's FLOP but for routers and the shared experts' gate.

    Attention counts in full until 2024, and by its causal half after (``megatron-causal``).
    Source: GitHub NVIDIA/Megatron-LM, ``num_floating_point_operations`` in ``megatron/training/training.py``.
    """
    model = asked.model
    routed = sum(model.has_experts(layer) for layer in range(model.layers)) + model.mtp_layers * model.is_moe
    small = routed * model.hidden * ((model.experts or 0) + (1 if model.shared_gate else 0))
    return model_flop(asked, causal) - 6.0 * asked.tokens * small


class Convention(NamedTuple):
    """A way to count, under its name."""

    flop: Callable[[Asked], float]
    about: str


CONVENTIONS: dict[str, Convention] = {
    "model": Convention(model_flop, "matrix products of forward and backward, attention in full"),
    "hardware": Convention(hardware_flop, "model, and what is recomputed"),
    "model-causal": Convention(lambda asked: model_flop(asked, True), "model, with half of attention"),
    "hardware-causal": Convention(lambda asked: hardware_flop(asked, True), "hardware, with half of attention"),
    "6n": Convention(six_n_flop, "6 N a token"),
    "8n": Convention(eight_n_flop, "8 N a token"),
    "palm": Convention(palm_flop, "6 N + 12 l a d s a token; also llm-foundry's MFU and ALCF's"),
    "palm-hardware": Convention(palm_hardware_flop, "palm, times 4/3 where all is recomputed; llm-foundry's HFU"),
    "torchtitan": Convention(torchtitan_flop, "palm without the embedding"),
    "gpt-neox": Convention(megatron_deepspeed_flop, "24 c B s l h^2 (1 + s/6h + V/16lh), c 3 or 4"),
    "megatron-deepspeed": Convention(megatron_deepspeed_flop, "the same as gpt-neox; BLOOM, LUMI, Frontier"),
    "narayanan": Convention(narayanan_flop, "96 B s l h^2 (1 + s/6h + V/16lh)"),
    "korthikanti": Convention(korthikanti_flop, "hardware, recomputed attention counted three times"),
    "megatron": Convention(megatron_flop, "Megatron-LM's of 2023 and 2024"),
    "megatron-causal": Convention(lambda asked: megatron_flop(asked, True), "Megatron-LM's of 2025, half of attention"),
}


def count_flop(convention: str, asked: Asked) -> float:
    """FLOP of a step of the whole job, as a convention counts them.

    Raises:
        InputError: If there is no such convention.
    """
    if convention not in CONVENTIONS:
        hint = nearest(convention[:60], CONVENTIONS)
        raise input_error(f"unknown convention {convention[:60]!r}{hint}", field="flop_convention")
    return CONVENTIONS[convention].flop(asked)


def step_flop(
    convention: str,
    model: Model,
    training: Training,
    recompute: Recompute | Sequence[Recompute] = "none",
    tp: int = 1,
) -> float:
    """`count_flop` of a model, its training, and what is recomputed.

    Args:
        convention: One of `CONVENTIONS`.
        model: What is trained.
        training: Its batch and sequence.
        recompute: What the backward pass runs again: in all layers, or one entry a layer.
        tp: Tensor-parallel degree, to whose multiple the vocabulary is padded.

    Raises:
        InputError: If there is no such convention.

    >>> from exatwin.scenarios.model import load_model
    >>> training = Training(seq_len=2048, global_batch=1536, precision="fp16")
    >>> f"{step_flop('narayanan', load_model('gpt-175b'), training):.4g}"
    '4.511e+18'
    """
    return count_flop(convention, Asked(model, training, recompute, tp))


def convert(
    rate: float,
    from_: str,
    to: str,
    model: Model,
    training: Training,
    recompute: Recompute | Sequence[Recompute] = "none",
    tp: int = 1,
) -> float:
    """What a rate (FLOP/s, TFLOP/s, a share of peak) in one convention is in another.

    Args:
        rate: Of any unit; the answer has the same.
        from_: The convention that it was counted by.
        to: The one that is wanted.
        model: What was trained.
        training: Its sequence; the batch cancels.
        recompute: What the backward pass ran again: in all layers, or one entry a layer.
        tp: Tensor-parallel degree, for the vocabulary's padding.

    Raises:
        InputError: If a convention is unknown.

    >>> from exatwin.scenarios.model import load_model
    >>> training = Training(seq_len=2048, global_batch=2048, precision="bf16")
    >>> round(convert(46.2, "palm", "6n", load_model("palm-540b"), training), 1)
    45.7
    """
    asked = Asked(model, training, recompute, tp)
    return rate * count_flop(to, asked) / count_flop(from_, asked)
