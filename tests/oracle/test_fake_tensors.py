"""What torch itself allocates, traced without a device: the model's bytes against those of real modules.

Fake tensors have shapes and storages but no numbers, and a fake process group stands for the other ranks, so that one
process traces one rank of a large layout in seconds. The tracker counts live storages.
"""

from __future__ import annotations

import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from exatwin.scenarios.scenario import load_scenario  # noqa: E402
from exatwin.scenarios.schedules import BACKWARD, FORWARD, KINDS, SCHEDULES, code_table  # noqa: E402
from exatwin.sim.activations import Sizes, backward_bytes, kept_bytes, layer_steps  # noqa: E402
from exatwin.sim.memory import ChunkBytes, peak_of, rank_memory  # noqa: E402
from exatwin.sim.shards import rank_parameters  # noqa: E402

FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, of those made while it is entered."""

    def __init__(self, *known):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = torch.utils.weak.WeakIdKeyDictionary()
        for tensor in known:
            self.sizes[tensor.untyped_storage()] = [tensor.untyped_storage().nbytes()]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage):
        size = storage.nbytes()
        if storage not in self.sizes:
            self.sizes[storage] = entry = [0]
            weakref.finalize(storage, self.drop, entry)
        self.change(self.sizes[storage], size)

    def change(self, entry, size):
        self.live += size - entry[0]
        entry[0] = size
        self.peak = max(self.peak, self.live)

    def drop(self, entry):
        self.change(entry, 0)


class Regather(torch.autograd.Function):
    """A linear layer on gathered tokens that keeps its own share and gathers again, as Megatron does."""

    @staticmethod
    def forward(ctx, share, weight, ranks):
        ctx.save_for_backward(share, weight)
        ctx.ranks = ranks
        return functional.linear(share.repeat(1, ranks, 1), weight)

    @staticmethod
    def backward(ctx, grad):
        share, weight = ctx.saved_tensors
        whole = share.repeat(1, ctx.ranks, 1)
        grad_weight = grad.flatten(0, 1).t() @ whole.flatten(0, 1)
        return (grad @ weight)[:, : share.shape[1]].clone(), grad_weight, None


class Scatter(torch.autograd.Function):
    """A share of the tokens of a sum over ranks; its gradient is gathered."""

    @staticmethod
    def forward(ctx, whole, ranks):
        ctx.ranks = ranks
        return whole[:, : whole.shape[1] // ranks].clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.repeat(1, ctx.ranks, 1), None


class Block(torch.nn.Module):
    """One rank's share of a GPT or Llama layer."""

    def __init__(self, sizes):
        super().__init__()
        model, layout = sizes.model, sizes.layout
        self.heads, self.kv_heads, self.width = sizes.heads, sizes.kv_heads, sizes.key_dim
        self.ranks = layout.tp if layout.sequence_parallel else 1
        self.gated = model.gated
        hidden, ffn = model.hidden, model.ffn // layout.tp
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)])
        self.qkv = torch.nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.width, bias=False)
        self.out = torch.nn.Linear(self.heads * self.width, hidden, bias=False)
        self.up = torch.nn.Linear(hidden, (2 if self.gated else 1) * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, hidden, bias=False)

    def enter(self, linear, x):
        return Regather.apply(x, linear.weight, self.ranks) if self.ranks > 1 else linear(x)

    def leave(self, linear, x):
        return Scatter.apply(linear(x), self.ranks) if self.ranks > 1 else linear(x)

    def forward(self, x):
        heads = self.enter(self.qkv, self.norms[0](x))
        batch, tokens, _ = heads.shape
        parts = heads.split([n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q, k, v = (part.reshape(batch, tokens, -1, self.width).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.leave(self.out, mixed.transpose(1, 2).reshape(batch, tokens, -1))
        inner = self.enter(self.up, self.norms[1](x))
        if self.gated:
            gate, value = inner.chunk(2, -1)
            inner = functional.silu(gate) * value
        else:
            inner = functional.gelu(inner)
        return x + self.leave(self.down, inner)


@pytest.fixture
def fake():
    before = torch.get_default_dtype()
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        yield
    torch.set_default_dtype(before)


def sizes_of(*overrides):
    asked = load_scenario("h100-llama-3-8b", ["layout={}", *overrides])
    return asked, Sizes(asked.model, asked.training, asked.layout)


def gpt(parallel, heads=48):
    return sizes_of(
        "machine=dgx-h100",
        "devices=8",
        "framework=megatron",
        "training={seq_len: 2048, global_batch: 4, precision: bf16}",
        f"model={{layers: 48, hidden: 6144, heads: {heads}, vocab: 51200}}",
        f"layout={{tp: 8, sequence_parallel: {parallel}}}",
    )


def entering(sizes):
    return torch.empty(1, sizes.own_tokens, sizes.model.hidden, requires_grad=True)


@pytest.mark.parametrize(("parallel", "factor"), [("false", 11.005), ("true", 4.004)])
def test_a_layer_of_22b_on_eight_ranks_keeps_what_torch_keeps(fake, parallel, factor):
    _, sizes = gpt(parallel)
    blocks = torch.nn.ModuleList(Block(sizes) for _ in range(3))
    with Live(*blocks.parameters()) as live:
        x = entering(sizes)
        marks = [live.live]
        for block in blocks:
            x = block(x)
            marks.append(live.live)
    layer = kept_bytes(layer_steps(sizes, experts=False))
    assert layer / (sizes.tokens * 6144) == pytest.approx(factor, abs=0.01)
    assert [later - mark for mark, later in itertools.pairwise(marks)] == pytest.approx([layer] * 3, rel=1e-3)


@pytest.mark.parametrize("parallel", ["false", "true"])
def test_the_backward_of_a_layer_takes_what_torch_takes(fake, parallel):
    """Gradients of weights go as soon as they are made, as where they are added to others."""
    _, sizes = gpt(parallel)
    block = Block(sizes)
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Live(*block.parameters()) as live:
        y = block(entering(sizes))
        grad = torch.empty_like(y)
        held, live.peak = live.live - grad.untyped_storage().nbytes(), live.live
        y.backward(grad)
    expected = backward_bytes(layer_steps(sizes, experts=False), sizes.hidden, sizes.element)
    assert live.peak - held == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_pipeline_stage_played_in_torch_peaks_where_its_schedule_says(fake, name, rank):
    _, sizes = gpt("false")
    block, codes = Block(sizes), code_table(SCHEDULES[name], 4, 8)[rank]
    steps = layer_steps(sizes, experts=False)
    with Live(*block.parameters()) as live:
        waiting, levels = {}, []
        for code in codes:
            if code % KINDS == FORWARD:
                x = entering(sizes)
                waiting[code // KINDS] = (x, block(x))
            elif code % KINDS == BACKWARD:
                x, y = waiting.pop(code // KINDS)
                y.backward(torch.empty_like(y))
                del x, y
                for parameter in block.parameters():
                    parameter.grad = None
            levels.append(live.live)
    kept = kept_bytes(steps) + sizes.hidden  # torch also holds what the stage hands on
    assert max(levels) == pytest.approx(peak_of(codes, 8, [ChunkBytes(kept=kept)]).level, rel=0.05)


@pytest.fixture
def eight_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield torch.distributed.init_device_mesh("cpu", (8,))
    torch.distributed.destroy_process_group()


class Llama(torch.nn.Module):
    def __init__(self, sizes, layers):
        super().__init__()
        self.words = torch.nn.Embedding(sizes.vocab, sizes.model.hidden)
        self.layers = torch.nn.ModuleList(Block(sizes) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(sizes.model.hidden)
        self.head = torch.nn.Linear(sizes.model.hidden, sizes.vocab, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_llama_3_8b_sharded_over_eight_ranks_holds_what_torch_holds(eight_ranks, monkeypatch):
    """Eight of its layers under fully_shard, bf16 with an fp32 reduction, one micro-batch."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    asked, sizes = sizes_of(
        "machine=dgx-h100",
        "devices=8",
        "framework=fsdp2",
        "layout={zero: 3}",
        "training.seq_len=4096",
        "training.global_batch=8",
        "model.layers=8",
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = Llama(sizes, 8)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*module.layers, module):
            fully_shard(part, mesh=eight_ranks, mp_policy=policy)
        shards = [parameter.to_local() for parameter in module.parameters()]
        resize = torch.UntypedStorage.resize_
        with Live(*shards) as live:
            monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda s, n: (resize(s, n), live.see(s))[0])
            tokens = torch.zeros(1, 4096, dtype=torch.long)
            loss = functional.cross_entropy(module(tokens).float().flatten(0, 1), tokens.flatten())
            after_forward = live.live
            loss.backward()
    states, peak = rank_memory(asked, 0, [FORWARD, BACKWARD], [rank_parameters(asked, 0)])
    assert sum(shard.untyped_storage().nbytes() for shard in shards) == pytest.approx(states.optimizer / 3, rel=1e-3)
    assert after_forward == pytest.approx(states.units + peak.held, rel=0.01)
    assert live.peak == pytest.approx(states.units + peak.level + peak.absent, rel=0.02)
    gradients = sum(parameter.grad.to_local().nbytes for parameter in module.parameters())
    assert gradients == pytest.approx(states.gradients, rel=1e-3)
