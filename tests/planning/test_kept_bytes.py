"""The bytes that layers keep for their backwards, beside what torch's autograd saves of such layers on the CPU: with
kinds of attention and of MLPs. Norms and the products of gates save what fused kernels do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from pipeflow import GPT, Setup
from pipeflow.planning.kept import layer_kept
from pipeflow.planning.setup import LORA_TARGETS
from pipeflow.planning.shares import Share
from pipeflow.planning.work import learned_parameters

PLAIN: dict[str, Any] = {"biases": "none", "norm": "rms", "tied": False, "position_table": False, "dropout": False}
MODEL = GPT(1, 256, 8, 512, 1000, **PLAIN)
GATED = {"gated": True, "ffn": 704}
MIXTURE = {"gated": True, "ffn": 256, "experts": 8, "experts_per_token": 2}
LATENT = {"head_size": 48, "rope_size": 16, "value_size": 48, "kv_rank": 64, "q_rank": 96}
SHARE = 0.002  # of the weights of chosen experts, which plans leave out


class FusedNorm(torch.autograd.Function):
    """An RMSNorm that saves its input and a number per token."""

    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        scale = given.float().pow(2).mean(-1, keepdim=True).rsqrt()
        context.save_for_backward(given, scale)
        return (given * scale).type_as(given)


class FusedGate(torch.autograd.Function):
    """SwiGLU's product, which saves what it multiplies."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(gate, up)
        return silu(gate) * up


def norm(given: Tensor) -> Tensor:
    normed: Tensor = FusedNorm.apply(given)  # type: ignore[no-untyped-call]  # as torch has it
    return normed


class Perceptron(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(model.hidden, model.wide, bias=False) for _ in range(1 + model.gated))
        self.down = nn.Linear(model.wide, model.hidden, bias=False)

    def forward(self, given: Tensor) -> Any:
        made = [linear(given) for linear in self.wide]
        return self.down(FusedGate.apply(*made) if len(made) > 1 else gelu(made[0]))  # type: ignore[no-untyped-call]  # as torch has it


class Experts(nn.Module):
    """Tokens are sorted by their experts, and each of them has a part of the sorted ones."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.uses = model.experts_per_token
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.each = nn.ModuleList(Perceptron(model) for _ in range(model.experts))
        self.always = nn.ModuleList(Perceptron(model) for _ in range(model.shared_experts))

    def forward(self, given: Tensor) -> Any:
        weights, chosen = self.router(given).softmax(-1).topk(self.uses, -1)
        order = chosen.flatten().argsort(stable=True)
        parts = given[order // self.uses].split(torch.bincount(chosen.flatten(), minlength=len(self.each)).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.each, parts, strict=True)])
        added = (made * weights.flatten()[order].unsqueeze(-1))[order.argsort()].unflatten(0, (-1, self.uses)).sum(1)
        return added + sum(expert(given) for expert in self.always)


class Attention(nn.Module):
    """Usual attention, with groups of heads where there are some."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.head = model.head_width
        widths = (model.query_width, model.key_width, model.key_width)
        self.made = nn.ModuleList(nn.Linear(model.hidden, width, bias=False) for width in widths)
        self.output = nn.Linear(model.query_width, model.hidden, bias=False)

    def forward(self, given: Tensor) -> Any:
        query, key, value = (linear(given).view(1, len(given), -1, self.head).transpose(1, 2) for linear in self.made)
        found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape != key.shape)
        return self.output(found.transpose(1, 2).reshape(len(given), -1))


class LatentAttention(nn.Module):
    """Query, key and value of all heads are made of latent vectors; heads share the positions of the key."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        assert model.kv_rank
        assert model.q_rank
        self.model, unplaced = model, model.head_width - model.rope_size
        sizes = (
            (model.hidden, model.q_rank),
            (model.q_rank, model.query_width),
            (model.hidden, model.kv_rank + model.rope_size),
            (model.kv_rank, model.heads * (unplaced + model.value_width)),
            (model.heads * model.value_width, model.hidden),
        )
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, given: Tensor) -> Any:
        query, queries, latent, values, output = self.linears
        rank, place, heads = self.model.kv_rank, self.model.rope_size, (1, len(given), self.model.heads, -1)
        vector, position = latent(given).split([rank, place], -1)
        made = values(norm(vector)).view(heads)
        unplaced, value = made.split([self.model.head_width - place, self.model.value_width], -1)
        key = torch.cat([unplaced, position.view(1, len(given), 1, place).expand(-1, -1, heads[2], -1)], -1)
        asked = queries(norm(query(given))).view(heads)
        one, other, third = (part.transpose(1, 2) for part in (asked, key, value.contiguous()))
        found = scaled_dot_product_attention(one, other, third, is_causal=True)
        return output(found.transpose(1, 2).reshape(len(given), -1))


class Layer(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.attention = LatentAttention(model) if model.kv_rank else Attention(model)
        self.perceptron = Experts(model) if model.experts > 1 else Perceptron(model)

    def forward(self, given: Tensor) -> Any:
        hidden = given + self.attention(norm(given))
        return hidden + self.perceptron(norm(hidden))


class EagerNorm(nn.Module):
    """An RMSNorm of single operations, as in the code of Llama 2."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, given: Tensor) -> Tensor:
        wide = given.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.type_as(given) * self.weight


class EagerPerceptron(Perceptron):
    def forward(self, given: Tensor) -> Any:
        gate, up = (linear(given) for linear in self.wide)
        return self.down(silu(gate) * up)


class EagerLayer(Layer):
    """Its norms and its gate have no kernels of their own."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.perceptron = EagerPerceptron(model) if model.gated else self.perceptron
        self.norms = nn.ModuleList(EagerNorm(model.hidden) for _ in range(2))

    def forward(self, given: Tensor) -> Any:
        first, second = self.norms
        hidden = given + self.attention(first(given))
        return hidden + self.perceptron(second(hidden))


@pytest.mark.parametrize("changed", [{}, GATED])
def test_a_layer_of_single_operations_keeps_what_autograd_saves(changed: dict[str, Any]) -> None:
    model = replace(MODEL, **changed)
    torch.manual_seed(0)
    require_kept(EagerLayer(model), model, Setup(eager=True))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        GATED,
        {**GATED, "kv_heads": 2},
        {**GATED, "head_size": 48, "kv_heads": 4},
        MIXTURE,
        {**MIXTURE, "shared_experts": 1},
        {**GATED, **LATENT},
    ],
)
def test_a_layer_keeps_what_autograd_saves(changed: dict[str, Any]) -> None:
    model = replace(MODEL, **changed)
    torch.manual_seed(0)
    require_kept(Layer(model), model, Setup())


class Adapted(nn.Module):
    """A frozen linear with an adapter of rank 1."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(linear.in_features, 1, bias=False), nn.Linear(1, linear.out_features, bias=False)

    def forward(self, given: Tensor) -> Any:
        return self.linear(given) + self.up(self.down(given))


def targets(layer: Layer) -> dict[nn.Module, str]:
    """The name of LORA_TARGETS of each linear; the router has none."""
    found: dict[nn.Module, str] = {}
    for each in layer.modules():
        match each:
            case Perceptron():
                found |= dict.fromkeys(each.wide, "linear_fc1") | {each.down: "linear_fc2"}
            case Attention():
                found |= dict.fromkeys(each.made, "linear_qkv") | {each.output: "linear_proj"}
            case LatentAttention():
                *made, output = each.linears
                found |= dict.fromkeys(made, "linear_qkv") | {output: "linear_proj"}
    return found


@pytest.mark.parametrize("adapted", [(), ("linear_qkv",), ("linear_proj", "linear_fc2"), LORA_TARGETS], ids=len)
@pytest.mark.parametrize("changed", [{}, {**MIXTURE, "shared_experts": 1}, {**GATED, **LATENT}])
def test_a_frozen_layer_keeps_what_autograd_saves(changed: dict[str, Any], adapted: tuple[str, ...]) -> None:
    model = replace(MODEL, **changed)
    torch.manual_seed(0)
    layer = Layer(model).requires_grad_(False)
    names = targets(layer)
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and names.get(child) in adapted:
                setattr(parent, name, Adapted(child))
    setup = Setup(lora_rank=1, lora_targets=adapted) if adapted else Setup(frozen=True)
    require_kept(layer, model, setup)
    learned = sum(each.numel() for each in layer.parameters() if each.requires_grad)
    planned = learned_parameters(model, [Share(model.kinds[:1], first=False, last=False)], setup).total
    assert (0.6 * learned <= planned <= learned) if adapted else (planned == 0)  # plans fuse linears of the same input


def require_kept(layer: Layer, model: GPT, setup: Setup) -> None:
    """Asserts that a layer's autograd saves the planned bytes."""
    layer, saved = layer.to(torch.bfloat16), dict[int, int]()
    own = {each.untyped_storage().data_ptr() for each in layer.parameters()}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        # plans leave out indices, and sums in float32 of a token or head
        is_kept = value.dtype == torch.bfloat16 or value.shape[-1:] == (model.hidden,)
        if is_kept and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    given = torch.randn(model.tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = layer(given)
    planned = model.tokens * layer_kept(model, setup)
    assert output.shape == given.shape
    assert sum(saved.values()) == pytest.approx(planned, rel=SHARE)
