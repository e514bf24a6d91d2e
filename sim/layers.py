"""A transformer layer, the embedding and the head on one rank, as lists of ops.

Column-parallel projections split their output, row-parallel ones their input, and an all-reduce
over the tensor group ends each of the two blocks of a layer; with sequence parallelism a gather
begins it and a reduce-scatter ends it.

Source: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from ..scenarios.framework import Framework
from .attention import attention_core
from .experts import expert_block, mlp_block, mlp_inner, routed_block
from .ops import (
    MASK_BYTES,
    Collective,
    Elementwise,
    Gemm,
    Op,
    Shapes,
    backward_ops,
    enter,
    executed,
    in_pieces,
    leave,
    linear,
    of_weights,
    plain_precision,
)


def layer_forward(shapes: Shapes, moe: bool = False) -> list[Op]:
    """One transformer layer, forward, on one rank."""
    return _pieced(executed(_layer(shapes, moe)), shapes)


def _pieced(ops: list[Op], shapes: Shapes) -> list[Op]:
    layout = shapes.layout
    return in_pieces(ops, layout.tp) if layout.overlap_tensor and layout.sequence_parallel and layout.tp > 1 else ops


def layer_backward(shapes: Shapes, framework: Framework, moe: bool = False, split: bool = False) -> list[Op]:
    """One transformer layer, backward, on one rank, without recomputation.

    Args:
        shapes: The numbers of a rank.
        framework: How gradients add up, and whether collectives run beside products.
        moe: A layer with experts.
        split: The schedule runs the gradients of weights apart, so that nothing runs beside them.
    """
    ops = backward_ops(
        _layer(shapes, moe),
        overlap=framework.overlap_tensor_grads and not split,
        adds=adds_in_product(shapes, framework),
    )
    ops = ops if split else _pieced(ops, shapes)
    return [*ops, accumulate(shapes.layer_parameters(moe).total, shapes, framework)]


def weight_part(ops: list[Op]) -> list[Op]:
    """The ops of a backward pass that only make the gradients of weights (W of a zero-bubble schedule)."""
    return [op for op in ops if of_weights(op)]


def _layer(shapes: Shapes, moe: bool) -> list[Op]:
    model, e = shapes.model, shapes.element
    hidden = shapes.stream_tokens * model.hidden
    norm = 2 * hidden * e
    if model.parallel_blocks and not moe:
        # One input, one reduction; two outputs are added to the stream.
        return [
            _norm("norm_1", model.layer_norms * norm, model.layer_norms),
            *_attention(shapes),
            *mlp_inner(shapes, model.ffn, "ffn", entered=True),
            leave(shapes, "block_reduce"),
            _add("residual", shapes, more=hidden * e),
        ]
    more = model.layer_norms - 2  # norms of what the blocks give, as in Gemma 2
    return [
        _norm("norm_1", norm),
        *_attention(shapes),
        leave(shapes, "attention_reduce"),
        _add("residual_1", shapes),
        _norm("norm_2", norm),
        *(expert_block(shapes) if moe else mlp_block(shapes, model.ffn, "ffn")),
        _add("residual_2", shapes),
        *([_norm("norm_outputs", more * norm, more)] if more > 0 else []),
    ]


def _norm(name: str, moved: int, kernels: int = 1) -> Elementwise:
    """Norms that read and write so many bytes.

    Backward they read input and gradient twice, once for either gradient that they make, and write one.

    Source: NVIDIA apex, csrc/layer_norm_cuda_kernel.cu (one kernel for the input's gradient, one for the weight's).
    """
    return Elementwise(name, moved, kernels, grad_bytes=2.5 * moved)


def _add(name: str, shapes: Shapes, more: int = 0) -> Elementwise:
    """Bias, dropout and residual in one kernel: two reads, one write, the mask; ``more`` bytes of a further addend.

    Backward the dropout (read, write, the mask), the sum that is the bias's gradient, and the sum of the
    stream's two gradients (two reads, one write).
    """
    e, dropped = shapes.element, shapes.training.hidden_dropout > 0
    mask = MASK_BYTES if dropped else 0
    hidden = shapes.stream_tokens * shapes.model.hidden
    back = (2 * e + mask if dropped else 0) + (e if shapes.model.bias else 0) + 3 * e
    return Elementwise(name, hidden * (3 * e + mask) + more, grad_bytes=float(hidden * back + more))


def _attention(shapes: Shapes) -> list[Op]:
    """The attention block up to its last reduction."""
    model, tokens, e = shapes.model, shapes.tokens, shapes.element
    heads = tokens * (shapes.rank_query + shapes.rank_key)
    ops = _latent_projections(shapes) if shapes.latent else _projections(shapes)
    if model.qk_norm and not shapes.latent:
        ops.append(Elementwise("query_key_norm", 2 * heads * e, kernels=2))
    if model.positions == "rotary":
        turned = heads if not shapes.latent else tokens * (shapes.rank_heads + 1) * (model.rope_dim or 0)
        ops.append(_rotary(turned, shapes))
    return [*ops, *attention_core(shapes), *linear(shapes, "projection", tokens, model.hidden, shapes.rank_attended)]


def _rotary(elements: int, shapes: Shapes) -> Elementwise:
    """Turning so many elements: read and written once, or in PyTorch's own kernels.

    Those negate a half (1), join the halves (2), multiply by sine and by cosine (2 + 2) and add (3). Backward they
    multiply twice (2 + 2), negate a half (1), widen both halves with zeros (4) and add up three gradients (6).
    Source: GitHub EleutherAI/gpt-neox, megatron/model/positional_embeddings.py, ``apply_rotary_pos_emb_torch``;
    PyTorch, tools/autograd/derivatives.yaml (slice, cat).
    """
    e = shapes.element
    if shapes.training.precision not in shapes.habits.eager_rotary:
        return Elementwise("rotary", 2 * elements * e)
    return Elementwise("rotary", 10 * elements * e, kernels=10, grad_bytes=15.0 * elements * e)


def _projections(shapes: Shapes) -> list[Op]:
    width = shapes.rank_query + shapes.rank_key + shapes.rank_value
    *casts, product = linear(shapes, "qkv", shapes.tokens, width, shapes.model.hidden)
    return [*casts, enter(shapes, "attention_enter"), product]


def _latent_projections(shapes: Shapes) -> list[Op]:
    """Down to the latent widths, uncut, on the tokens of the stream; up to the heads, cut over the tensor group.

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1; Megatron-LM,
    megatron/core/transformer/multi_latent_attention.py.
    """
    model, e, here, tokens = shapes.model, shapes.element, shapes.stream_tokens, shapes.tokens
    rank, rope = model.kv_rank or 0, model.rope_dim or 0
    ops: list[Op] = []
    if model.q_rank:
        *casts, up = linear(shapes, "query_up", tokens, shapes.rank_query, model.q_rank)
        ops += linear(shapes, "query_down", here, model.q_rank, model.hidden)
        ops += [Elementwise("query_norm", 2 * here * model.q_rank * e), *casts]
        ops += [enter(shapes, "query_enter", model.q_rank), up]
    else:
        *casts, product = linear(shapes, "query", tokens, shapes.rank_query, model.hidden)
        ops += [*casts, enter(shapes, "query_enter"), product]
    plain = shapes.query_dim - rope
    *casts, up = linear(shapes, "key_value_up", tokens, shapes.rank_heads * (plain + shapes.value_dim), rank)
    ops += linear(shapes, "key_value_down", here, rank + rope, model.hidden)
    ops += [Elementwise("key_value_norm", 2 * here * rank * e), *casts]
    ops += [enter(shapes, "key_value_enter", rank + rope), up]
    # The rotary part of the keys is one for all heads; each head gets its copy beside the plain part.
    return [*ops, Elementwise("key_concat", 2 * tokens * shapes.rank_heads * shapes.query_dim * e)]


def adds_in_product(shapes: Shapes, framework: Framework) -> bool:
    """Whether the product that makes a weight's gradient adds it to a sum in fp32 itself."""
    states = framework.state_bytes(shapes.training.precision, shapes.layout.zero)
    return not framework.memory.fresh_gradients and states.accumulation == 4


def accumulate(parameters: int, shapes: Shapes, framework: Framework) -> Elementwise:
    """Adding a micro-batch's weight gradients to what earlier ones left.

    Reads the new gradient, reads and writes the sum. Where each micro-batch's gradients are reduced, only
    their shards are added up, which `sim.weight_streams` counts; where the product itself adds up, nothing is left.
    """
    if framework.reduce.in_pass(shapes.layout.zero, shapes.layout.pp) or not framework.memory.fresh_gradients:
        return Elementwise("accumulate", 0.0, 0)
    states = framework.state_bytes(shapes.training.precision, shapes.layout.zero)
    kept = states.accumulation or states.gradient
    new = states.gradient or shapes.element
    return Elementwise("accumulate", parameters * (new + 2 * kept))


def recomputed(shapes: Shapes, mode: str, moe: bool = False) -> list[Op]:
    """The forward ops of a layer that the backward pass runs again."""
    if mode == "full":
        return [*_gathered_start(shapes), *layer_forward(shapes, moe)]
    if mode == "none":
        return []
    chosen = shapes.layout.recompute_ops
    ops: list[Op] = attention_core(shapes) if "attention" in chosen else []
    named = [name for name in ("norm", "activation") if name in chosen]
    again = routed_block(shapes) if moe and "experts" in chosen else []
    for op in layer_forward(shapes, moe):
        chosen_alone = isinstance(op, Elementwise) and any(name in op.name for name in named)
        ops += [op] if chosen_alone and op not in again else []
    return executed([*ops, *again])


def _gathered_start(shapes: Shapes) -> list[Op]:
    """The gather of what a recomputed layer starts from, where the ranks of the tensor group each kept a part.

    Source: DeepSpeed, runtime/activation_checkpointing/checkpointing.py, ``gather_partitioned_activations``.
    """
    layout = shapes.layout
    if layout.tp == 1 or layout.sequence_parallel or not shapes.habits.partition_checkpoints:
        return []
    return [Collective("checkpoint_gather", "all_gather", float(shapes.tokens * shapes.model.hidden * shapes.element))]


def embedding_forward(shapes: Shapes) -> list[Op]:
    """Word and position embedding on the first stage."""
    whole, e = shapes.tokens * shapes.model.hidden, shapes.element
    hidden = shapes.stream_tokens * shapes.model.hidden
    dropout = MASK_BYTES if shapes.training.hidden_dropout > 0 else 0
    ops: list[Op] = [
        Elementwise("embedding", 2 * whole * e),
        leave(shapes, "embedding_reduce", product=False),
        Elementwise("embedding_add", hidden * (2 * e + dropout)),
    ]
    if shapes.model.embedding_norm:
        ops.append(Elementwise("embedding_norm", 2 * hidden * e))
    return ops


def embedding_backward(shapes: Shapes, framework: Framework) -> list[Op]:
    """The scatter of the gradient into the embedding's rows, and its accumulation over the whole shard."""
    whole = shapes.tokens * shapes.model.hidden
    parameters = shapes.model.rank_embedding_parameters(shapes.layout.tp, shapes.training.seq_len)
    return [
        *backward_ops([leave(shapes, "embedding_reduce", product=False)]),
        Elementwise("embedding_grad", 2 * whole * shapes.element),
        accumulate(parameters, shapes, framework),
    ]


def head_forward(shapes: Shapes) -> list[Op]:
    """Final norm, logits and the vocabulary-parallel loss on the last stage."""
    e, logits = shapes.element, shapes.tokens * shapes.rank_vocab
    # The loss in fp32: convert (read e, write 4), maximum (4), subtract (8), exponentiate (8), sum (4), divide (8).
    # Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py. Fused it reads twice and writes its gradient.
    loss = Elementwise("loss", logits * (e + 4 + 4 + 8 + 8 + 4 + 8), kernels=6)
    if shapes.habits.fused_loss:
        loss = Elementwise("loss", logits * 3 * e, kernels=2)
    # Once more to be logged: convert, then the logarithm of the softmax in one kernel (read, write), in fp32.
    # Source: Composer, composer/trainer/trainer.py, ``_eval_train_metrics``, within autocast.
    again = shapes.habits.metric_losses
    logged = [Elementwise("loss_logged", float(again * logits * (e + 4 + 8)), kernels=2 * again)] if again else []
    return [
        Elementwise("final_norm", 2 * shapes.stream_tokens * shapes.model.hidden * e),
        *executed(_logits(shapes)),
        loss,
        # Maximum, target logit and sum, in fp32.
        Collective("loss_reduce", "all_reduce", float(3 * 4 * shapes.tokens)),
        *logged,
    ]


def head_backward(shapes: Shapes, framework: Framework, split: bool = False) -> list[Op]:
    """Gradient of loss, logits and final norm, and the accumulation of the head's shard."""
    e, logits = shapes.element, shapes.tokens * shapes.rank_vocab
    head = shapes.model.rank_head_parameters(shapes.layout.tp)
    back = 2 * e if shapes.habits.fused_loss else 8 + 4 + e  # scaled where it lies; else scaled in fp32 and converted
    return [
        Elementwise("loss_grad", logits * back, kernels=2),
        *backward_ops(
            _logits(shapes),
            overlap=framework.overlap_tensor_grads and not split,
            adds=adds_in_product(shapes, framework),
        ),
        Elementwise("final_norm_grad", 4 * shapes.stream_tokens * shapes.model.hidden * e),
        accumulate(head, shapes, framework),
    ]


def _logits(shapes: Shapes) -> list[Op]:
    product = Gemm("logits", shapes.tokens, shapes.rank_vocab, shapes.model.hidden, precision=plain_precision(shapes))
    return [enter(shapes, "logits_enter", product=False), product]


def ahead_forward(shapes: Shapes) -> list[Op]:
    """What a layer that predicts a further token has beside a layer and a head: norms, and two streams made one.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.
    """
    return executed(_ahead(shapes))


def ahead_backward(shapes: Shapes, framework: Framework) -> list[Op]:
    """Its backward."""
    hidden = shapes.model.hidden
    parameters = 2 * hidden * hidden // shapes.layout.tp + 3 * shapes.model.norm_parameters
    ops = backward_ops(_ahead(shapes), adds=adds_in_product(shapes, framework))
    return [*ops, accumulate(parameters, shapes, framework)]


def _ahead(shapes: Shapes) -> list[Op]:
    hidden, e = shapes.model.hidden, shapes.element
    here, tokens = shapes.stream_tokens, shapes.tokens
    *casts, product = linear(shapes, "ahead", tokens, hidden // shapes.layout.tp, 2 * hidden)
    return [
        *embedding_forward(shapes),
        Elementwise("ahead_norms", 3 * 2 * here * hidden * e, kernels=3),
        *casts,
        enter(shapes, "ahead_enter", 2 * hidden),
        product,
        Collective("ahead_gather", "all_gather", float(tokens * hidden * e)),
    ]
