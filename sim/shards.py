"""What one rank holds of a model, which ranks share it, and what they exchange beside their passes.

ZeRO and FSDP cut optimizer state, gradients and weights over replicas: all dp x cp of them, or
groups of `layout.shard_group` that hold a whole copy each (hybrid shard). Experts are copied less
often than the rest, so they have groups of their own. What a pass gathers and reduces for itself
is in `sim.weight_streams`; here is what is left for the end of a step.

Sources: Rajbhandari et al. 2020, arXiv 1910.02054 (the stages); Zhao et al. 2023, arXiv
2304.11277, section 3.2 (full and hybrid shard).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..scenarios.framework import StateBytes
from ..scenarios.model import RankParameters
from ..scenarios.scenario import Scenario
from ..scenarios.weights import head_norm_weights, mtp_weights, whole_elements
from ..topology.placement import Placement
from .ops import ELEMENT_BYTES

Ints = npt.NDArray[np.int64]
ReplicaGroup = Literal["dp", "edp", "shard", "hybrid"]
ReplicaOp = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class ReplicaBuffer:
    """One exchange between replicas at the end of a step.

    Attributes:
        group: Who exchanges, as `replica_groups_of` lists them.
        op: The collective.
        bytes: The whole buffer of a rank, one entry a pipeline rank.
    """

    group: ReplicaGroup
    op: ReplicaOp
    bytes: tuple[float, ...]


# --- what a rank holds ----------------------------------------------------------------------------------------------


def rank_parameters(scenario: Scenario, virtual_stage: int) -> RankParameters:
    """Parameters of one rank of a virtual stage.

    The last one holds its own copy of a tied embedding, and the layers for further tokens. Where the first and
    the last share a rank, as in V-shaped schedules, there is one copy.
    """
    model, layout = scenario.model, scenario.layout
    layers = layout.layers_by_virtual_stage(model.layers)
    first = sum(layers[:virtual_stage])
    count = RankParameters(0)
    for layer in range(first, first + layers[virtual_stage]):
        count += model.layer_share(layer, layout.tp, layout.ep, layout.etp)
    dense = 0
    if virtual_stage == 0:
        dense += model.rank_embedding_parameters(layout.tp, scenario.training.seq_len)
    if virtual_stage == layout.virtual_stages - 1:
        count += model.mtp_share(layout.tp, layout.ep, layout.etp)
        dense += model.rank_final_norm_parameters()
        if not model.tied or scenario.embedding_copied:
            dense += head_parameters(scenario)
    return count + RankParameters(dense)


def head_parameters(scenario: Scenario) -> int:
    """Parameters of a rank's head: its own, or the copy of a tied embedding that its framework keeps there."""
    return scenario.model.rank_head_parameters(
        scenario.layout.tp, scenario.training.seq_len, scenario.framework.tied_copy == "embedding"
    )


def stage_parameters(scenario: Scenario) -> tuple[RankParameters, ...]:
    """Parameters of one rank, one entry a pipeline rank: those of all its virtual stages."""
    held = [RankParameters(0)] * scenario.layout.pp
    for virtual_stage in range(scenario.layout.virtual_stages):
        held[scenario.home_rank(virtual_stage)] += rank_parameters(scenario, virtual_stage)
    return tuple(held)


def partial_parameters(scenario: Scenario, virtual_stage: int) -> int:
    """Of a rank's dense parameters those whose gradients are parts of what its tensor group has to sum.

    The norms of queries and keys see a rank's own heads. With sequence parallelism every weight that is whole on
    each tensor rank sees its own tokens: norms, biases added after a reduce-scatter, routers, the narrow
    projections of latent attention, positions and the norm of the embedding.

    Source: Megatron-LM, megatron/core/distributed/finalize_model_grads.py,
    ``_allreduce_non_tensor_model_parallel_grads``, over parameters that are marked ``sequence_parallel``, and with
    ``qk_layernorm`` over ``q_layernorm`` and ``k_layernorm``.
    """
    model, layout = scenario.model, scenario.layout
    if layout.tp == 1:
        return 0
    layers = layout.layers_by_virtual_stage(model.layers)
    first, last = sum(layers[:virtual_stage]), len(layers) - 1
    ahead = model.mtp_layers if virtual_stage == last else 0
    if not layout.sequence_parallel:
        return (layers[virtual_stage] + ahead) * whole_elements(head_norm_weights(model))
    count = sum(whole_elements(model.layer_weights(layer)) for layer in range(first, first + layers[virtual_stage]))
    if virtual_stage == 0:
        seq_len = scenario.training.seq_len
        count += model.rank_embedding_parameters(layout.tp, seq_len) - model.rank_word_parameters(layout.tp)
    if virtual_stage == last:
        count += model.rank_final_norm_parameters()
        count += ahead * whole_elements([*model.layer_weights(), *mtp_weights(model)])
    return count


# --- who shares it --------------------------------------------------------------------------------------------------


def replicas(scenario: Scenario) -> int:
    """Ranks that hold the same dense parameters before sharding: dp x cp."""
    return scenario.dp * scenario.layout.cp


def expert_replicas(scenario: Scenario) -> int:
    """Ranks that hold the same experts before sharding: dp x cp x tp / (ep x etp)."""
    layout = scenario.layout
    return replicas(scenario) * layout.tp // (layout.ep * (layout.etp or layout.tp))


def shard_members(scenario: Scenario) -> int:
    """Ranks that share one copy of what ZeRO shards of the dense parameters."""
    return scenario.layout.shard_group or replicas(scenario)


def shard_copies(scenario: Scenario) -> int:
    """Copies of what ZeRO shards; one, but for hybrid shard."""
    return replicas(scenario) // shard_members(scenario)


def owned(scenario: Scenario, parameters: RankParameters) -> float:
    """Of a rank's parameters those whose optimizer state it keeps and works on."""
    if scenario.layout.zero == 0:
        return float(parameters.total)
    expert = parameters.expert / expert_replicas(scenario) if parameters.expert else 0.0
    return parameters.dense / shard_members(scenario) + expert


def summed(scenario: Scenario, parameters: RankParameters) -> float:
    """Of a rank's parameters those whose summed gradients it has once they are reduced."""
    scattered = scenario.layout.zero >= 2 or reduce_op(scenario) == "reduce_scatter"
    return owned(scenario, parameters) if scattered else float(parameters.total)


def replica_groups_of(placement: Placement, scenario: Scenario, group: ReplicaGroup) -> Ints:
    """Devices of every group of a kind, one group a row, stage by stage.

    Args:
        placement: Its ``dp`` axis counts dp x cp.
        scenario: What is asked.
        group: ``dp`` all replicas; ``edp`` the ranks that hold the same experts; ``shard`` those that share one
            copy of what ZeRO shards; ``hybrid`` the ranks that hold the same shard in different copies.
    """
    layout = scenario.layout
    if group == "edp":
        return placement.expert_data_groups(layout.ep, layout.etp or layout.tp)
    if group == "shard":
        return placement.replica_groups(shard_members(scenario))
    if group == "hybrid":
        return placement.replica_groups(shard_copies(scenario), shard_members(scenario))
    return placement.data_groups()


# --- how it travels -------------------------------------------------------------------------------------------------


def state_bytes(scenario: Scenario) -> StateBytes:
    """Bytes a parameter before sharding, with gradients added up as the training asks.

    In fp32 the sum is a buffer of 4 bytes, and what a backward writes in fewer bytes goes once it is added;
    else the gradient that the backward writes is the sum.
    """
    training = scenario.training
    states = scenario.framework.state_bytes(training.precision, scenario.layout.zero)
    element = ELEMENT_BYTES[training.precision]
    if training.accumulate_fp32 is None or element == 4:
        return states
    if training.accumulate_fp32:
        if max(states.gradient, states.accumulation) >= 4:
            return states
        return states.model_copy(update={"gradient": 0.0, "accumulation": 4.0})
    return states.model_copy(update={"gradient": float(element), "accumulation": 0.0})


def wire_bytes(scenario: Scenario) -> float:
    """Bytes an element of the gradients on the wire."""
    training, reduce = scenario.training, scenario.framework.reduce
    if reduce.as_accumulated and training.accumulate_fp32 is not None:
        return 4.0 if training.accumulate_fp32 else float(ELEMENT_BYTES[training.precision])
    return reduce.bytes[training.precision]


def weight_bytes(scenario: Scenario) -> float:
    """Bytes an element of the weights on the wire, where they are gathered."""
    given = scenario.framework.sharding.gather_bytes
    return given[scenario.training.precision] if given else float(ELEMENT_BYTES[scenario.training.precision])


def reduce_op(scenario: Scenario) -> ReplicaOp:
    """How gradients are summed over the members of a shard group."""
    zero = scenario.layout.zero
    if zero == 3 or (zero > 0 and scenario.framework.reduce.collective == "reduce_scatter"):
        return "reduce_scatter"
    return "all_reduce"


def reshards(scenario: Scenario) -> bool:
    """Whether weights are given up after a forward and gathered again by its backward."""
    return scenario.layout.zero == 3 and scenario.layout.reshard_after_forward


def by_unit(scenario: Scenario) -> bool:
    """Whether weights are made whole, and gradients reduced, one unit of the model at a time."""
    return scenario.framework.sharding.by_unit(scenario.layout.zero)


def embedding_with_head(scenario: Scenario) -> bool:
    """Whether embedding and head are one unit where units are gathered and reduced: a tied one, on a single stage.

    A tensor belongs to one unit. The unit around all others, torch's root, has what no other has: the embedding and
    the final norm. It is not given up after a forward, and its gradients are whole when the embedding's are made.

    Source: PyTorch, torch/distributed/fsdp/_fully_shard/_fully_shard.py, ``fully_shard``: ``reshard_after_forward``
    left out is False for the root; shared parameters are managed by the module that holds all that share them.
    """
    return scenario.model.tied and scenario.layout.virtual_stages == 1


def gathers_in_pass(scenario: Scenario) -> bool:
    """Whether each forward gathers its weights; else they are gathered once a step, after the optimizer.

    Between pipeline stages weights that are not resharded stay for all micro-batches.
    """
    return by_unit(scenario) and (scenario.layout.pp == 1 or reshards(scenario))


def reduces_in_pass(scenario: Scenario) -> bool:
    """Whether each micro-batch's backward reduces its gradients; else they are reduced once a step."""
    return scenario.framework.reduce.in_pass(scenario.layout.zero, scenario.layout.pp)


# --- what is exchanged at the end of a step -------------------------------------------------------------------------


def after_backward(scenario: Scenario) -> tuple[ReplicaBuffer, ...]:
    """The reductions of the gradients that no pass has done, in the order in which they run."""
    if reduces_in_pass(scenario):
        return ()
    op, each = reduce_op(scenario), wire_bytes(scenario)
    held = stage_parameters(scenario)
    dense = tuple(each * parameters.dense for parameters in held)
    found: list[ReplicaBuffer] = []
    if op == "reduce_scatter" and shard_copies(scenario) > 1:
        members = shard_members(scenario)
        found += [
            ReplicaBuffer("shard", op, dense if members > 1 else ()),
            ReplicaBuffer("hybrid", "all_reduce", tuple(size / members for size in dense)),
        ]
    else:
        found.append(ReplicaBuffer("dp", op, dense if replicas(scenario) > 1 else ()))
    found.append(_experts(scenario, op, each, held))
    return tuple(buffer for buffer in found if any(buffer.bytes))


def tensor_sums(scenario: Scenario) -> tuple[float, ...]:
    """Buffer that each tensor group sums at the end of a step, a pipeline rank: see `partial_parameters`.

    Where gradients are sharded unit by unit each replica sums what it has of them once they are reduced.
    """
    found = [0.0] * scenario.layout.pp
    each = wire_bytes(scenario) / (shard_members(scenario) if by_unit(scenario) else 1)
    for virtual_stage in range(scenario.layout.virtual_stages):
        found[scenario.home_rank(virtual_stage)] += each * partial_parameters(scenario, virtual_stage)
    return tuple(found)


def after_optimizer(scenario: Scenario) -> tuple[ReplicaBuffer, ...]:
    """The gathering of the new weights, where the passes do not do it themselves."""
    if scenario.layout.zero == 0 or gathers_in_pass(scenario):
        return ()
    each, held = weight_bytes(scenario), stage_parameters(scenario)
    group: ReplicaGroup = "shard" if shard_copies(scenario) > 1 else "dp"
    dense = tuple(each * parameters.dense for parameters in held)
    found = (
        ReplicaBuffer(group, "all_gather", dense if shard_members(scenario) > 1 else ()),
        _experts(scenario, "all_gather", each, held),
    )
    return tuple(buffer for buffer in found if any(buffer.bytes))


def _experts(scenario: Scenario, op: ReplicaOp, each: float, held: tuple[RankParameters, ...]) -> ReplicaBuffer:
    several = any(parameters.expert for parameters in held) and expert_replicas(scenario) > 1
    return ReplicaBuffer("edp", op, tuple(each * parameters.expert for parameters in held) if several else ())


def embedding_bytes(scenario: Scenario) -> float:
    """Gradient buffer that the two copies of a tied embedding reduce; 0 where there is one copy."""
    if not scenario.embedding_copied:
        return 0.0
    return float(head_parameters(scenario) * scenario.framework.tied_reduce_bytes[scenario.training.precision])
