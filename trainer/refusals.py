"""What the trainer does not run: each rule with its reason and the nearest choice that runs.

Rules are data, so that the documentation's table and the tests are made from them. None needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..scenarios.scenario import Scenario
from ..topology.errors import InputError, Problem


@dataclass(frozen=True)
class Refusal:
    """Something that a scenario may ask and the trainer does not do.

    Attributes:
        field: The scenario's field.
        what: In words, for the documentation.
        asks: Whether a scenario asks it.
        reason: Why not, for people.
        nearest: Fields to change, as ``--set`` takes them, so that it runs.
        example: Fields that make the bundled scenario local-gpt-10m ask it, likewise.
    """

    field: str
    what: str
    asks: Callable[[Scenario], bool]
    reason: str
    nearest: tuple[str, ...]
    example: tuple[str, ...]

    def problem(self) -> Problem:
        """The rule as an error's line."""
        return Problem(
            self.field, f"the trainer does not run {self.what}: {self.reason}; set {', '.join(self.nearest)}"
        )


def _sharded(scenario: Scenario) -> bool:
    return scenario.layout.zero >= 2


def _first_and_last_meet(scenario: Scenario) -> bool:
    layout = scenario.layout
    if layout.virtual_stages == 1:
        return False
    ends = [scenario.schedule.home(stage, layout.pp, layout.vpp)[0] for stage in (0, layout.virtual_stages - 1)]
    return layout.vpp > 1 and ends[0] == ends[1]


_MOE = ("model.experts=4", "model.top_k=2")

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "training.precision",
        "fp8",
        lambda s: s.training.precision == "fp8",
        "torch alone has no fp8 products that scale their operands",
        ("training.precision=bf16",),
        ("machine=dgx-h100", "training.precision=fp8"),
    ),
    Refusal(
        "training.hidden_dropout",
        "dropout",
        lambda s: s.training.hidden_dropout > 0 or s.training.attention_dropout > 0,
        "its masks would differ from layout to layout, and with them the losses",
        ("training.hidden_dropout=0", "training.attention_dropout=0"),
        ("training.hidden_dropout=0.1",),
    ),
    Refusal(
        "training.accumulate_fp32",
        "gradients that add up below fp32",
        lambda s: s.training.accumulate_fp32 is False and s.training.precision != "fp32",
        "its buffers are fp32",
        ("training.accumulate_fp32=true",),
        ("training.accumulate_fp32=false", "training.precision=bf16"),
    ),
    Refusal(
        "model.mtp_layers",
        "layers that predict further tokens",
        lambda s: s.model.mtp_layers > 0,
        "it builds them, but has no loss for them",
        ("model.mtp_layers=0",),
        ("model.mtp_layers=1",),
    ),
    Refusal(
        "model.bias",
        "experts with biases whose matrices are cut",
        lambda s: s.model.is_moe and s.model.bias and (s.layout.etp or s.layout.tp) > 1,
        "each rank would add the bias of the output",
        ("layout.etp=1",),
        (*_MOE, "layout.tp=2", "layout.dp=1", "layout.sequence_parallel=true"),
    ),
    Refusal(
        "layout.sequence_parallel",
        "experts on tensor-parallel ranks without sequence parallelism",
        lambda s: s.model.is_moe and s.layout.tp > 1 and not s.layout.sequence_parallel,
        "each tensor rank routes its own tokens, as in Megatron-LM, which asks the same",
        ("layout.sequence_parallel=true",),
        (*_MOE, "model.bias=false", "layout.tp=2", "layout.dp=1"),
    ),
    Refusal(
        "layout.zero",
        "fully sharded replicas (zero 2 and 3) with expert parallelism",
        lambda s: _sharded(s) and s.layout.ep > 1,
        "experts and the rest would be sharded over different ranks",
        ("layout.zero=1",),
        (*_MOE, "model.bias=false", "layout.ep=2", "layout.zero=3"),
    ),
    Refusal(
        "layout.reshard_after_forward",
        "weights that are given up between the halves of a backward (zero 3 with a zero-bubble schedule)",
        lambda s: (
            s.layout.zero == 3
            and s.layout.reshard_after_forward
            and s.layout.virtual_stages > 1
            and s.schedule.splits_backward
        ),
        "torch's pipelining writes the second half's gradients to the gathered weights",
        ("layout.reshard_after_forward=false",),
        ("devices=2", "layout.pp=2", "layout.dp=1", "layout.zero=3", "layout.schedule=zb-h1"),
    ),
    Refusal(
        "layout.zero",
        "fully sharded replicas of a tied embedding whose first and last stage share a rank (V-shaped schedules)",
        lambda s: _sharded(s) and s.model.tied and _first_and_last_meet(s),
        "fully_shard takes a parameter into one stage only",
        ("layout.zero=1",),
        ("devices=2", "layout.pp=2", "layout.dp=1", "layout.vpp=2", "layout.zero=3", "layout.schedule=dualpipe-v"),
    ),
    Refusal(
        "layout.shard_group",
        "hybrid shard below zero 2",
        lambda s: s.layout.shard_group is not None and s.layout.zero == 1,
        "the optimizer's shards are over all replicas",
        ("layout.zero=3",),
        ("layout.zero=1", "layout.shard_group=1"),
    ),
    Refusal(
        "layout.overlap_grad_reduce",
        "gradients reduced beside the backward, with zero 0 on tensor, expert or pipeline ranks or below fp32",
        lambda s: (
            s.layout.overlap_grad_reduce
            and s.layout.zero == 0
            and (s.layout.tp * s.layout.virtual_stages * s.layout.ep > 1 or s.training.precision != "fp32")
        ),
        "torch's DistributedDataParallel takes plain fp32 weights, and fails under its pipelining",
        ("layout.overlap_grad_reduce=false",),
        ("layout.tp=2", "layout.dp=1", "layout.overlap_grad_reduce=true"),
    ),
    Refusal(
        "layout.overlap_grad_reduce",
        "gradients reduced beside the backward, with zero 1",
        lambda s: s.layout.overlap_grad_reduce and s.layout.zero == 1,
        "they are scattered in one piece after the last backward",
        ("layout.overlap_grad_reduce=false",),
        ("layout.zero=1", "layout.overlap_grad_reduce=true"),
    ),
    Refusal(
        "layout.overlap_param_gather",
        "weights gathered beside the next forward",
        lambda s: s.layout.overlap_param_gather,
        "they are gathered right after the optimizer",
        ("layout.overlap_param_gather=false",),
        ("layout.zero=1", "layout.overlap_param_gather=true"),
    ),
    Refusal(
        "layout.overlap_tensor",
        "tensor collectives cut into pieces beside their products",
        lambda s: s.layout.overlap_tensor,
        "torch has no such kernels",
        ("layout.overlap_tensor=false",),
        ("layout.tp=2", "layout.dp=1", "layout.sequence_parallel=true", "layout.overlap_tensor=true"),
    ),
    Refusal(
        "layout.prefetch",
        "another prefetch than of one unit",
        lambda s: s.layout.prefetch != 1 and _sharded(s),
        "fully_shard gathers one unit ahead",
        ("layout.prefetch=1",),
        ("layout.zero=3", "layout.prefetch=2"),
    ),
    Refusal(
        "layout.secondary_shards",
        "a second copy of the weights for the backward",
        lambda s: s.layout.secondary_shards is not None,
        "fully_shard keeps one",
        ("layout.secondary_shards=null",),
        ("layout.zero=3", "layout.secondary_shards=2"),
    ),
    Refusal(
        "layout.offload_optimizer",
        "an optimizer on the host",
        lambda s: s.layout.offload_optimizer,
        "its state stays on the device",
        ("layout.offload_optimizer=false",),
        (
            "machine=frontier",
            "devices=8",
            "layout.pp=1",
            "layout.dp=8",
            "training.precision=bf16",
            "layout.offload_optimizer=true",
        ),
    ),
    Refusal(
        "layout.graphs",
        "recorded graphs",
        lambda s: s.layout.graphs != "none",
        "every kernel is handed over by itself",
        ("layout.graphs=none",),
        ("layout.graphs=step",),
    ),
    Refusal(
        "layout.expert_dispatch",
        "tokens sent once to each rank or node",
        lambda s: s.layout.expert_dispatch == "once",
        "torch has the plain all-to-all",
        ("layout.expert_dispatch=copies",),
        (*_MOE, "model.bias=false", "layout.ep=2", "layout.expert_dispatch=once"),
    ),
    Refusal(
        "layout.overlap_experts",
        "tokens on their way to experts beside another micro-batch's pass",
        lambda s: s.layout.overlap_experts,
        "passes run one after the other",
        ("layout.overlap_experts=false",),
        (*_MOE, "model.bias=false", "layout.ep=2", "layout.overlap_experts=true"),
    ),
    Refusal(
        "layout.fused_experts",
        "fused products of experts",
        lambda s: s.layout.fused_experts,
        "torch has no such kernels",
        ("layout.fused_experts=false",),
        (*_MOE, "model.bias=false", "layout.fused_experts=true"),
    ),
    Refusal(
        "layout.cp_attention",
        "ring attention with ALiBi",
        lambda s: s.model.positions == "alibi" and s.layout.cp > 1 and s.layout.cp_attention == "ring",
        "blocks of fused attention take no slopes",
        ("layout.cp_attention=all_gather",),
        ("model.positions=alibi", "layout.cp=2", "layout.dp=1"),
    ),
)


def check_runs(scenario: Scenario, where: str = "") -> None:
    """Refuse what the trainer does not run.

    Raises:
        InputError: With every reason, and the nearest choices that run.
    """
    problems = [refusal.problem() for refusal in REFUSALS if refusal.asks(scenario)]
    if problems:
        raise InputError(where or scenario.name, problems)


def assumptions(scenario: Scenario) -> tuple[str, ...]:
    """What a scenario says of a prediction that a run decides for itself; for its warnings."""
    found = []
    if scenario.training.expert_imbalance != 1.0:
        found.append("training.expert_imbalance is an assumption of a prediction; in a run the router decides")
    if not scenario.perturb.empty:
        found.append("perturb disturbs a prediction; a run has disturbances of its own")
    if scenario.collectives.model_dump(exclude_none=True):
        found.append("collectives names algorithms of a prediction; in a run the library chooses")
    return tuple(found)
