"""A mixture-of-experts block on one rank: routed experts with their dispatch, and shared ones.

Each rank of a tensor group routes its own share of the tokens, sorts their copies by expert, sends
them to the ranks that hold the experts, and weighs what comes back.

Sources: Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py (``MoEAlltoAllTokenDispatcher``:
permute, all-to-all, gather over the experts' tensor group, sort, and all of it back); Gale et al. 2022,
arXiv 2211.15841 (grouped products); Rajbhandari et al. 2022, arXiv 2201.05596 (without sequence parallelism
the tensor ranks share the tokens out, and gather the results).
"""

from __future__ import annotations

from dataclasses import replace

from .ops import Collective, Elementwise, Gemm, Op, Shapes, enter, leave, linear, plain_precision

_PLAN = 18
"""Small kernels beside the tokens' own: counts by expert and rank (5), their copies to the host (4), the map of
rows (3), and the weights of the copies, permuted, sent and sorted as the tokens are (6).

Source: Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py, ``preprocess`` and ``dispatch_preprocess``.
"""
_ONCE_PLAN = 8
"""The same where tokens go once: layout of the dispatch (3), counts by expert (2), the map of rows (3).

Source: Megatron-LM, megatron/core/transformer/moe/fused_a2a.py and token_dispatcher.py, ``_DeepepManager``.
"""


def busiest(shapes: Shapes) -> float:
    """Tokens of the busiest expert rank over the mean, as far as the capacity lets them."""
    training = shapes.training
    if training.capacity_factor is None:
        return training.expert_imbalance
    return min(training.expert_imbalance, training.capacity_factor)


def expert_rows(shapes: Shapes) -> tuple[int, int]:
    """Tokens of each expert of the busiest rank, and experts there that have any."""
    model = shapes.model
    assert model.experts and model.top_k
    held = model.experts // shapes.layout.ep
    rows = routed_tokens(shapes) * model.top_k * shapes.etp * busiest(shapes)
    return max(-(-int(rows) // held), 1), min(held, max(int(rows), 1))


def routed_tokens(shapes: Shapes) -> int:
    """Tokens that one rank routes: its share of the tensor group's."""
    return shapes.tokens // shapes.layout.tp


def expert_block(shapes: Shapes) -> list[Op]:
    """Router, dispatch, experts, combination; and the shared experts beside them."""
    model = shapes.model
    ops = routed_block(shapes)
    if model.shared_experts:
        ops += mlp_block(shapes, model.shared_width, "shared")
        adding = float(3 * shapes.stream_tokens * model.hidden * shapes.element)
        if model.shared_gate:
            ops.append(Gemm("shared_gate", shapes.stream_tokens, 1, model.hidden, precision=plain_precision(shapes)))
        ops.append(Elementwise("shared_add", adding))
    return ops


def routed_block(shapes: Shapes) -> list[Op]:
    """The routed experts alone."""
    model, layout, e = shapes.model, shapes.layout, shapes.element
    assert model.experts and model.top_k
    tokens, hidden = routed_tokens(shapes), model.hidden
    copies = tokens * model.top_k
    rows, held = expert_rows(shapes)
    once = layout.expert_dispatch == "once"
    sent = copies * hidden * e * busiest(shapes)
    group = shapes.expert_group
    gathered = Collective("expert_gather", "all_gather", sent * shapes.etp, group)
    scattered = Collective("expert_scatter", "reduce_scatter", sent * shapes.etp, group)
    moved = 2.0 * rows * held * hidden * e
    sort = Elementwise("expert_sort", moved, grad_bytes=moved)
    several = model.experts > layout.ep and layout.ep * shapes.etp > 1
    # What came from each rank is sorted by expert; tokens that come once are copied to their experts where they land.
    sorts: list[Op] = [sort] if several and not once else []
    copied = float((copies + tokens) * hidden * e)
    permute = Elementwise("permute", copied, grad_bytes=copied)
    unpermute = Elementwise("unpermute", copied, grad_bytes=copied)
    distinct = model.top_k if once else 0
    cut = shapes.etp > 1
    return [
        Gemm("router", tokens, model.experts, hidden, precision=plain_precision(shapes)),
        # In fp32: logits, softmax (read, write), the choice of k, and its map (write).
        Elementwise("routing", 4.0 * 4 * tokens * model.experts, kernels=4),
        Elementwise("dispatch_plan", 0.0, _ONCE_PLAN if once else _PLAN, grad_bytes=0.0),
        *([] if once else [permute]),
        Collective("dispatch", "all_to_all", sent, "ep", draws=distinct),
        *([permute] if once else []),
        *([gathered] if cut else []),
        *sorts,
        *_experts(shapes, rows, held),
        *sorts,
        *([scattered] if cut else []),
        *([unpermute] if once else []),
        Collective("combine", "all_to_all", sent, "ep", draws=distinct),
        *([] if once else [unpermute]),
        *_whole_again(shapes),
    ]


def _experts(shapes: Shapes, rows: int, held: int) -> list[Op]:
    """The two grouped products and what is between them.

    In fp8 a cast writes what it reads twice, along rows and along columns, as the gradient of the weight needs;
    backward the gradient of what went out is cast. Fused, products do the activation and cast what they make.

    Source: Transformer Engine, transformer_engine/pytorch/module/grouped_linear.py (``split_quantize``), and
    transformer_engine/pytorch/ops/fused (the grouped MLP).
    """
    model, e, fused = shapes.model, shapes.element, shapes.layout.fused_experts
    ffn, tokens = model.expert_width // shapes.etp, rows * held
    wide = (2 if model.gated else 1) * ffn
    into = Gemm("expert_in", rows, wide, model.hidden, held, grouped=True)
    out = Gemm("expert_out", rows, model.hidden, ffn, held, grouped=True)
    # Backward it reads what came in and the gradient of what went out, and writes the gradient of what came in.
    activation = Elementwise(
        "expert_activation", float(tokens * (wide + ffn) * e), grad_bytes=float(tokens * (2 * wide + ffn) * e)
    )
    between: list[Op] = [] if fused else [activation]
    if shapes.training.precision != "fp8":
        return [into, *between, out]
    cast = tokens * (e + 2)
    return [
        Elementwise("expert_in_cast", float(cast * model.hidden), grad_bytes=0.0 if fused else float(cast * wide)),
        replace(into, precision="fp8"),
        *between,
        Elementwise("expert_out_cast", 0.0 if fused else float(cast * ffn), grad_bytes=float(cast * model.hidden)),
        replace(out, precision="fp8"),
    ]


def _whole_again(shapes: Shapes) -> list[Op]:
    """Without sequence parallelism every tensor rank needs what the others routed."""
    if shapes.layout.sequence_parallel:
        return []
    return [Collective("routed_gather", "all_gather", float(shapes.tokens * shapes.model.hidden * shapes.element))]


def mlp_block(shapes: Shapes, width: int, name: str) -> list[Op]:
    """A plain MLP, cut over the tensor group."""
    return [*mlp_inner(shapes, width, name), leave(shapes, f"{name}_reduce")]


def mlp_inner(shapes: Shapes, width: int, name: str, entered: bool = False) -> list[Op]:
    """The same without its last reduction; ``entered``: the tokens are there already."""
    ffn, e, tokens = width // shapes.layout.tp, shapes.element, shapes.tokens
    wide = (2 if shapes.model.gated else 1) * ffn
    *casts, product = linear(shapes, f"{name}_in", tokens, wide, shapes.model.hidden)
    return [
        *casts,
        *([] if entered else [enter(shapes, f"{name}_enter")]),
        product,
        Elementwise("activation" if name == "ffn" else f"{name}_activation", float(tokens * (wide + ffn) * e)),
        *linear(shapes, f"{name}_out", tokens, shapes.model.hidden, ffn),
    ]
