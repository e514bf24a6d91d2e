"""The model: as many parameters as the vocabulary counts, and what each part computes, against its plain formula."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch.nn.functional as F

from exatwin.scenarios.layout import Layout
from exatwin.scenarios.model import Model, load_model, model_names
from exatwin.trainer.initial import SPREAD, initial
from exatwin.trainer.model import EPSILON, Build, ExpertBlock, Layer, Rotary, Stage, slopes
from exatwin.trainer.parallel.context import attend, positions
from exatwin.trainer.parallel.expert import route
from exatwin.trainer.parallel.tensor import cross_entropy

from .ranks import grid_of, lively_weights, lone_grid, on_ranks, quiet_ranks, scenario_of, torch  # noqa: F401

META, CPU = torch.device("meta"), torch.device("cpu")
SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 250, "vocab_multiple": 8}
LLAMA = SMALL | {"gated": True, "norm": "rms", "positions": "rotary", "tied": False, "bias": False, "kv_heads": 2}
LATENT = LLAMA | {"kv_heads": 4, "kv_rank": 16, "q_rank": 24, "rope_dim": 4, "head_dim": 12, "v_head_dim": 8}
EXPERTS = LLAMA | {"experts": 4, "top_k": 2, "ffn": 48}


def build(model, layout=None, grid=None, device=CPU, seq_len=32, **more):
    model = model if isinstance(model, Model) else Model(**model)
    return Build(model, layout or Layout(), seq_len, 1, grid or lone_grid(), device=device, **more)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def stream(seed=0, sequences=2, tokens=8, hidden=32):
    """Activations, from a generator of their own."""
    return torch.randn((sequences, tokens, hidden), generator=torch.Generator().manual_seed(seed))


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_every_bundled_model_has_the_parameters_that_are_predicted(name):
    """Each once, and each under a name of its own."""
    model = load_model(name)
    seq_len = model.max_positions or 2048
    stage = Stage(build(model, device=META, seq_len=seq_len), 0)
    assert count(stage) == model.parameters(1, seq_len).total
    names = [name for name, _ in stage.specs()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "tp", "ep", "etp"),
    [
        ("megatron-22b", 8, 1, None),
        ("gpt-175b", 4, 1, None),
        ("llama-3-70b", 8, 1, None),
        ("mixtral-8x7b", 2, 4, None),
        ("mixtral-8x7b", 4, 8, 1),
        ("deepseek-v3", 2, 8, 1),
        ("deepseek-v3", 4, 16, 2),
    ],
)
def test_a_rank_has_its_share_of_the_parameters(name, tp, ep, etp):
    """Whichever rank of its groups: layers, embedding, head and last norm, as a prediction counts them."""
    model = load_model(name)
    seq_len = model.max_positions or 2048
    layout = Layout(tp=tp, ep=ep, etp=etp, pp=1)
    grid = lone_grid(tp=(tp, tp - 1), ep=(ep, ep // 2), etp=(etp or tp, 0))
    stage = Stage(build(model, layout, grid, META, seq_len), 0)
    for number, layer in stage.layers.items():
        assert count(layer) == model.layer_share(int(number), tp, ep, etp).total
    assert count(stage.embedding) == model.rank_embedding_parameters(tp, seq_len)
    ends = 0 if model.tied else model.rank_head_parameters(tp, seq_len)
    own = {id(parameter) for parameter in stage.embedding.parameters()}
    head = sum(parameter.numel() for parameter in stage.head.parameters() if id(parameter) not in own)
    assert head == ends + model.rank_final_norm_parameters()
    assert count(stage.ahead) == model.mtp_share(tp, ep, etp).total


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, vpp=2, schedule="zb-v"), Layout(pp=2)])
@pytest.mark.parametrize("model", [SMALL, EXPERTS])
def test_stages_together_hold_the_model(model, layout):
    """Each weight on one stage, but for a tied embedding's words, which the last stage has a copy of."""
    made = build(model, layout, device=META)
    stages = [Stage(made, number) for number in range(layout.virtual_stages)]
    names = [name for stage in stages for name, _ in stage.specs()]
    whole = [name for name, _ in Stage(build(model, device=META), 0).specs()]
    assert sorted(names) == sorted(whole + ["embedding.words"] * made.model.tied)


# --- first values -----------------------------------------------------------------------------------------------------


def values_of(model, layout, grid, stage=0):
    return {p.spec.name: p for p in Stage(build(model, layout, grid, seed=3), stage).parameters()}


@pytest.mark.parametrize("model", [SMALL, LLAMA, LATENT], ids=["gpt", "llama", "latent"])
def test_parts_of_tensor_ranks_are_cut_from_the_values_of_one(model):
    whole = values_of(model, Layout(), lone_grid())
    parts = [values_of(model, Layout(tp=2), lone_grid(tp=(2, rank))) for rank in range(2)]
    for name, values in whole.items():
        pieces = [part[name] for part in parts]
        cut = pieces[0].spec.cut
        for piece in pieces if cut is None else [torch.cat(pieces, dim=cut)]:
            assert piece.equal(values), name


def test_parts_of_expert_ranks_are_cut_from_the_values_of_one():
    whole = values_of(EXPERTS, Layout(), lone_grid())
    ranks = [(ep, etp) for ep in range(2) for etp in range(2)]
    layout = Layout(tp=2, ep=2, etp=2)
    parts = {
        rank: values_of(EXPERTS, layout, lone_grid(tp=(2, rank[1]), ep=(2, rank[0]), etp=(2, rank[1])))
        for rank in ranks
    }
    for name, values in whole.items():
        if values.spec.expert:
            rows = [torch.cat([parts[ep, etp][name] for etp in range(2)], values.spec.cut) for ep in range(2)]
            assert torch.cat(rows).equal(values), name


def test_values_do_not_depend_on_the_stage():
    whole = values_of(SMALL, Layout(), lone_grid())
    for stage in range(4):
        for name, values in values_of(SMALL, Layout(pp=4), lone_grid(), stage).items():
            assert values.equal(whole[name]), name


def test_first_values_are_spread_as_said():
    assert initial("a", (400, 400), 0).std() == pytest.approx(SPREAD, rel=0.02)
    assert initial("a", (400, 400), 0, kind="out", layers=8).std() == pytest.approx(SPREAD / 4, rel=0.02)
    assert initial("a", (4,), 0, kind="one").tolist() == [1] * 4
    assert initial("a", (4,), 0, kind="zero").tolist() == [0] * 4
    padded = initial("a", (8, 4), 0, rows=5)
    assert padded[:5].equal(initial("a", (5, 4), 0))
    assert not padded[5:].any()
    other = [initial("a", (4, 4), 1), initial("b", (4, 4), 0)]
    assert not any(values.equal(initial("a", (4, 4), 0)) for values in other)


# --- positions --------------------------------------------------------------------------------------------------------


def plainly_turned(x, at):
    """Pairs (i, i + half) as complex numbers, turned by at / 10000^(i / half)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    rates = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones(()).double(), at.double().unsqueeze(1) * rates)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotary_positions_turn_pairs():
    x, at = stream(tokens=7, hidden=10).unsqueeze(1), torch.tensor([0, 1, 2, 3, 50, 1000, 4000])
    turned = Rotary(10, at)(x)
    assert turned[:, :, 0].equal(x[:, :, 0])  # at position 0 nothing turns
    torch.testing.assert_close(turned.double(), plainly_turned(x, at), rtol=0, atol=1e-3)  # 4000 rad in fp32
    torch.testing.assert_close(turned[:, :, :4].double(), plainly_turned(x, at)[:, :, :4], rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = stream(1, 1, 1, 8), stream(2, 1, 1, 8)
    scores = [
        (Rotary(8, torch.tensor([i]))(q) * Rotary(8, torch.tensor([j]))(k)).sum() for i, j in [(5, 2), (105, 102)]
    ]
    assert scores[0] == pytest.approx(float(scores[1]), abs=1e-4)


def test_rotary_leaves_what_is_beyond_its_width():
    x = stream(hidden=12)
    assert Rotary(8, torch.arange(8))(x)[..., 8:].equal(x[..., 8:])


def test_alibi_slopes_are_those_of_the_paper():
    """Section 3: for 8 heads 1/2, 1/4, ... 1/256; else those of the power below and every other one of twice it."""
    assert slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert slopes(16).tolist() == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])
    assert slopes(12).tolist() == pytest.approx([2.0**-n for n in range(1, 9)] + [2 ** (-n / 2) for n in (1, 3, 5, 7)])


# --- attention --------------------------------------------------------------------------------------------------------


def plainly_attended(q, k, v, slope=None, scale=None):
    """One query after the other, over the keys up to it."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    for b, n, t in np.ndindex(*q.shape[:3]):
        keys, values = k[b, n // group, : t + 1].double(), v[b, n // group, : t + 1].double()
        scores = keys @ q[b, n, t].double() * (scale or 1 / math.sqrt(q.shape[-1]))
        if slope is not None:
            scores = scores - float(slope[n]) * (t - torch.arange(t + 1))
        out[b, n, t] = scores.softmax(0) @ values
    return out


def heads(seed, number, tokens=8, width=6):
    return torch.randn((2, number, tokens, width), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("alibi", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_the_plain_formula(kv_heads, alibi, fused):
    q, k, v = heads(0, 4), heads(1, kv_heads), heads(2, kv_heads, width=5 if not fused else 6)
    slope = slopes(4) if alibi else None
    found = attend(q, k, v, lone_grid()["cp"], Layout(flash_attention=fused), slope)
    torch.testing.assert_close(found.double(), plainly_attended(q, k, v, slope), rtol=0, atol=2e-6)


def cut_attention(rank, changes, kv_heads, slope, whole):
    """This rank's queries, attended over all, and gradients by its part of each input."""
    scenario = scenario_of(changes)
    grid = grid_of(scenario, rank)
    at = positions(scenario.layout, whole[0].shape[2], grid["cp"].rank, CPU)
    mine = [x[:, :, at].requires_grad_() for x in whole[:3]]
    out = attend(*mine, grid["cp"], scenario.layout, slope)
    out.backward(whole[3][:, :, at])
    return at.numpy(), [x.detach().numpy() for x in (out, *(x.grad for x in mine))]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("way", "alibi"),
    [("ring", False), ("all_gather", False), ("all_gather", True), ("all_to_all", False), ("all_to_all", True)],
)
def test_attention_over_context_ranks_is_that_of_one(way, kv_heads, alibi):
    """What comes out, and the gradients of queries, keys and values, at every position."""
    slope = slopes(4) if alibi else None
    whole = heads(0, 4), heads(1, kv_heads), heads(2, kv_heads), heads(3, 4)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    out = attend(*leaves, lone_grid()["cp"], Layout(), slope)
    out.backward(whole[3])
    expected = [x.detach().numpy() for x in (out, *(x.grad for x in leaves))]
    for at, found in on_ranks(2, cut_attention, f"cp=2 cp_attention={way}", kv_heads, slope, whole):
        for mine, everything in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, everything[:, :, at], rtol=0, atol=5e-6)


def named(module):
    return {p.spec.name.split(".", 2)[2]: p.detach() for p in module.parameters()}


def plain_norm(x, weight, bias=None):
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight + bias


def split_heads(x, number):
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def layer_of(model, number=0):
    with lively_weights():
        return Layer(build(model, seq_len=8), number, "none")


def plain_attention(w, x, model):
    """Of a GPT- or llama-like layer, from its weights by name."""
    q, k, v = (
        split_heads(F.linear(x, w[f"attention.projections.{part}"], w.get(f"attention.projections.{part}_bias")), n)
        for part, n in zip(("query", "key", "value"), (model.heads, model.kv_heads, model.kv_heads), strict=True)
    )
    if model.qk_norm:
        q, k = plain_norm(q, w["attention.query_norm.weight"]), plain_norm(k, w["attention.key_norm.weight"])
    if model.positions == "rotary":
        q, k = (plainly_turned(one, torch.arange(8)) for one in (q, k))
    slope = slopes(model.heads) if model.positions == "alibi" else None
    out = plainly_attended(q, k, v, slope).float().transpose(1, 2).flatten(2)
    return F.linear(out, w["attention.out"], w.get("attention.out_bias"))


def plain_mlp(w, x, name="mlp"):
    up = F.linear(x, w[f"{name}.wide.up"], w.get(f"{name}.wide.up_bias"))
    if f"{name}.wide.gate" in w:
        gate = F.linear(x, w[f"{name}.wide.gate"])
        inner = gate * gate.sigmoid() * up
    else:
        inner = up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return F.linear(inner, w[f"{name}.out"], w.get(f"{name}.out_bias"))


def norms_of(w):
    def norm(number):
        return lambda x: plain_norm(x, w[f"norms.{number}.weight"], w.get(f"norms.{number}.bias"))

    return [norm(number) for number in range(4)]


FORMS = {
    "gpt": SMALL,
    "llama": LLAMA,
    "normed queries and keys": LLAMA | {"qk_norm": True},
    "biased queries": LLAMA | {"qkv_bias": True},
    "alibi": SMALL | {"positions": "alibi"},
    "four norms": LLAMA | {"layer_norms": 4},
    "side by side": SMALL | {"parallel_blocks": True},
    "side by side, one norm": SMALL | {"parallel_blocks": True, "layer_norms": 1},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_layer_is_its_plain_formula(form):
    model, layer, x = Model(**form), layer_of(form), stream()
    w = named(layer)
    first, second, third, fourth = norms_of(w)
    if model.parallel_blocks:
        other = first if model.layer_norms == 1 else second
        expected = x + plain_attention(w, first(x), model) + plain_mlp(w, other(x))
    elif model.layer_norms == 4:
        y = x + third(plain_attention(w, first(x), model))
        expected = y + fourth(plain_mlp(w, second(y)))
    else:
        y = x + plain_attention(w, first(x), model)
        expected = y + plain_mlp(w, second(y))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("q_rank", [24, None])
def test_latent_attention_is_its_plain_formula(q_rank):
    """Keys and values of a head from the latent; one rotary key for all heads (DeepSeek-V2, section 2.1)."""
    form = {**LATENT, "q_rank": q_rank}
    model, attention, x = Model(**form), layer_of(form).attention, stream()
    w = {name.removeprefix("attention."): value for name, value in named(attention).items()}
    narrow = plain_norm(x @ w["query_down"].T, w["query_norm.weight"]) if q_rank else x
    q = split_heads(narrow @ w["query"].T, 4)
    down = x @ w["down"].T
    latent, rope = plain_norm(down[..., :16], w["norm.weight"]), down[..., 16:]
    wide = split_heads(latent @ w["up"].T, 4)
    at = torch.arange(8)
    k = torch.cat([wide[..., :8], plainly_turned(rope, at).float().unsqueeze(1).expand(-1, 4, -1, -1)], -1)
    q = torch.cat([q[..., :8], plainly_turned(q[..., 8:], at).float()], -1)
    out = plainly_attended(q, k, wide[..., 8:]).float().transpose(1, 2).flatten(2) @ w["out"].T
    assert model.head_dim == 12
    torch.testing.assert_close(attention(x), out, rtol=0, atol=3e-5)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_of_one_rank_leaves_padded_rows_out():
    logits = 3 * stream(hidden=16)
    targets = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(1))
    mine, real = logits.clone().requires_grad_(), logits[..., :11].clone().requires_grad_()
    losses = cross_entropy(mine, targets, lone_grid(), 11)
    expected = F.cross_entropy(real.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    torch.testing.assert_close(losses, expected)
    weights = torch.linspace(-1, 1, 16).view_as(targets)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad[..., :11], real.grad)
    assert not mine.grad[..., 11:].any()


def cut_loss(rank, changes, logits, targets, vocab):
    grid = grid_of(scenario_of(changes), rank)
    mine = logits.chunk(grid.tp.size, dim=-1)[rank].clone().requires_grad_()
    losses = cross_entropy(mine, targets, grid, vocab)
    (losses * torch.arange(16.0).view_as(losses)).sum().backward()
    return losses.detach().numpy(), mine.grad.numpy()


@pytest.mark.parametrize("vocab", [32, 27, 20, 3])
def test_the_loss_over_a_cut_vocabulary_is_that_of_the_whole(vocab):
    """Also where a rank's rows only fill up: of 32 rows on 4 ranks, words 20 leave the last rank none."""
    logits = 3 * stream(hidden=32)
    targets = torch.randint(0, vocab, (2, 8), generator=torch.Generator().manual_seed(1))
    whole = logits.clone().requires_grad_()
    scores = whole[..., :vocab].flatten(0, 1)
    expected = F.cross_entropy(scores, targets.flatten(), reduction="none").view_as(targets)
    (expected * torch.arange(16.0).view_as(expected)).sum().backward()
    ranks = on_ranks(4, cut_loss, "tp=4", logits, targets, vocab)
    for losses, _ in ranks:
        np.testing.assert_allclose(losses, expected.detach().numpy(), rtol=1e-5)
    found = np.concatenate([gradient for _, gradient in ranks], axis=-1)
    np.testing.assert_allclose(found, whole.grad.numpy(), rtol=0, atol=2e-6)


# --- experts ----------------------------------------------------------------------------------------------------------


def experts_of(form, **more):
    with lively_weights():
        return ExpertBlock(build(form, seq_len=8, **more), "layers.0.mlp", "none")


def plainly_through_experts(w, x, top_k, kept=None):
    """One token after the other: the sum over its experts, weighed by the softmax over their logits."""
    out = torch.zeros_like(x)
    for place in np.ndindex(*x.shape[:2]):
        token = x[place]
        logits = F.linear(token, w["mlp.router"], w.get("mlp.router_bias"))
        best = logits.topk(top_k)
        for weight, expert in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            if kept is not None and (place, expert) not in kept:
                continue
            of = {
                name.replace("mlp.experts.", "").removesuffix("_bias") + ("_bias" if name.endswith("_bias") else ""): v
                for name, v in w.items()
                if name.startswith("mlp.experts.")
            }

            def linear(part, value, of=of, expert=expert):
                bias = of[f"{part}_bias"][expert] if f"{part}_bias" in of else None
                return F.linear(value, of[part][expert], bias)

            out[place] += weight * linear("out", F.silu(linear("gate", token)) * linear("up", token))
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_experts_are_a_plain_loop_over_tokens(top_k, bias):
    form = {**EXPERTS, "top_k": top_k, "bias": bias}
    block, x = experts_of(form), stream()
    torch.testing.assert_close(block(x), plainly_through_experts(named(block), x, top_k), rtol=0, atol=1e-5)


def test_shared_experts_take_every_token():
    """Beside the routed ones, with a gate where the model has one."""
    form = EXPERTS | {"shared_experts": 1, "shared_gate": True, "expert_ffn": 24}
    block, x = experts_of(form), stream()
    w = named(block)
    shared = plain_mlp(w, x, "mlp.shared") * (x @ w["mlp.shared_gate"].T).sigmoid()
    torch.testing.assert_close(block(x), plainly_through_experts(w, x, 2) + shared, rtol=0, atol=1e-5)


def test_beyond_its_capacity_an_expert_drops_the_last_copies():
    """16 tokens to 2 of 4 experts each: even shares are 8 copies, and with a factor of 0.75 an expert takes 6."""
    block, x = experts_of(EXPERTS, capacity_factor=0.75), stream()
    w = named(block)
    chosen = (x @ w["mlp.router"].T).topk(2).indices
    kept, taken = set(), [0] * 4
    for place in np.ndindex(2, 8):
        for expert in chosen[place].tolist():
            taken[expert] += 1
            if taken[expert] <= 6:
                kept.add((place, expert))
    assert max(taken) > 6
    torch.testing.assert_close(block(x), plainly_through_experts(w, x, 2, kept), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("factor", "most"), [(0.01, 1), (0.5, 8), (1.0, 16), (4.0, 64), (None, 64)])
def test_a_capacity_bounds_the_copies_of_an_expert(factor, most):
    """All of 64 tokens want expert 0 of 4."""
    logits = torch.zeros((64, 4))
    logits[:, 0] = 9.0
    routing = route(logits, 1, factor)
    assert routing.counts.tolist() == [most, 0, 0, 0]
    assert routing.tokens.tolist() == list(range(most))


def test_experts_by_turns_get_their_even_share():
    routing = route(stream(1, 1, 24, 8)[0], 2, None, balanced=True)
    assert routing.counts.tolist() == [6] * 8
    assert sorted(routing.tokens.tolist()) == sorted([*range(24)] * 2)


def test_what_a_token_weighs_its_experts_by_sums_to_one():
    routing = route(stream(1, 1, 24, 8)[0], 3, None)
    sums = torch.zeros(24).index_add(0, routing.tokens, routing.weights)
    torch.testing.assert_close(sums, torch.ones(24))
    assert int(routing.counts.sum()) == 72
