"""Packed attentions, experts, arguments per head and heads that ranks share: equal to the plain module."""

from __future__ import annotations

import copy
import logging
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.tensor.converted import is_linear
from pipeflow.tensor import DEFAULT_RULES, Rule, shard
from pipeflow.testing import RankError, run_processes, run_threads
from tests.tensor import small
from tests.tensor.packed import INNER, adapted, make
from tests.tensor.ranks import gradients
from tests.tensor.small import HEADS, WIDTH, LanguageModel, batch
from tests.tensor.test_rules import by_hand, plain, require_equal

TWO = make_schedule("1f1b", ranks=2, microbatches=2)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", INNER)
def test_equal_to_the_plain_module(name: str, size: int) -> None:
    """With 4 ranks, those that have 1 or 2 heads of key and value share them."""
    if (name, size) == ("experts", 4):
        pytest.skip("its experts are 6 wide")
    module = make(name)
    loss, expected = plain(module)
    for its, found, numbers in run_threads(by_hand, size, module, tensor=size):
        assert its == pytest.approx(loss, rel=1e-12)
        assert found.keys() == expected.keys()
        require_equal(found, expected)
        assert numbers < (0.8 if size == 2 else 0.6) * sum(each.numel() for each in module.parameters())


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["bloom", "experts", "multi-query"])
def test_under_a_pipeline(name: str) -> None:
    module = make(name)

    def rank() -> tuple[float, dict[str, Tensor]]:
        model = Pipeline.from_module(copy.deepcopy(module), TWO, batch())
        output = execute_pipeline(iter([batch()]), model, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item(), gradients(model)

    loss, expected = plain(module)
    results = run_threads(rank, 4, tensor=2)
    assert {name for _, found in results for name in found} == expected.keys()
    for its, found in results:
        assert its == pytest.approx(loss, rel=1e-9)
        require_equal(found, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_adapters(size: int) -> None:
    """Of the two factors of a LoRA adapter, the one that goes with what is split is split."""
    module = adapted()
    loss, expected = plain(module)
    for its, found, _ in run_threads(by_hand, size, module, tensor=size):
        assert its == pytest.approx(loss, rel=1e-12)
        assert found.keys() == expected.keys()
        require_equal(found, expected)

    def split() -> set[str]:
        shard(mine := copy.deepcopy(module))
        splits = splits_of(mine)
        return {name.partition("blocks.0.")[2] for name, each in mine.named_parameters() if id(each) in splits}

    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    base = {f"{name}.base_layer.weight" for name in (*columns, *rows)}
    factors = {f"{name}.lora_B.default.weight" for name in columns} | {f"{name}.lora_A.default.weight" for name in rows}
    assert run_threads(split, size, tensor=size) == [base | factors | {""}] * size


def test_ranks_share_heads_of_key_and_value() -> None:
    """Two heads over four ranks, each of which keeps a part of a head and computes with the whole of it."""
    module = small.make("llama")
    loss, expected = plain(module)
    for its, found, _ in run_threads(by_hand, 4, module, tensor=4):
        assert its == pytest.approx(loss, rel=1e-12)
        require_equal(found, expected)

    def rank() -> tuple[tuple[int, ...], int]:
        mine = copy.deepcopy(module)
        shard(mine)
        attention: Any = mine.get_submodule("blocks.0.self_attn")
        return tuple(attention.k_proj.weight.shape), attention.num_key_value_heads

    assert run_threads(rank, 4, tensor=4) == [((2, WIDTH), 1)] * 4


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("attention", "query_key_value", parts=3, of="BloomAttention"), None),
        (Rule("whole", "query_key_value", of="BloomAttention"), None),
    ],
)
def test_the_order_matters(rule: Rule, message: str | None) -> None:
    """A rule that says another order makes other numbers, or none; one that keeps the layer whole makes the same."""
    module = make("bloom")
    expected = plain(module)[1]

    def compare() -> None:
        for _, found, _ in run_threads(partial(by_hand, rules=[rule, *DEFAULT_RULES]), 2, module, tensor=2):
            require_equal(found, expected)

    if rule.kind == "whole":
        compare()
    else:
        with pytest.raises((RankError, AssertionError)):
            compare()


class Renamed(nn.Module):
    """An attention with usual names for its layers, and something unusual besides."""

    def __init__(self, **unusual: Any) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        for name, value in unusual.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        layers = dict(self.named_children())
        heads = layers["q_proj"](x).shape[-1] // (WIDTH // HEADS)
        query, key, value = (layers[name](x) for name in ("q_proj", "k_proj", "v_proj"))
        if isinstance(bias := getattr(self, "bias_u", None), Tensor):
            query = query + bias.repeat(query.shape[-1] // bias.shape[0])
        if isinstance(norm := getattr(self, "q_norm", None), nn.Module):
            query = norm(query)
        made: Tensor = layers["o_proj"](small.attention(query, key, value, heads, heads))
        return made


class Reader(Renamed):
    """It asks the config of all modules for what only this rank has less of."""

    def forward(self, x: Tensor) -> Tensor:
        config: Any = self.config
        assert config.num_heads == HEADS
        return super().forward(x)


class Packed(nn.Module):
    """A name that several orders have, in a class that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.query_key_value, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x).chunk(3, -1)
        made: Tensor = self.o_proj(small.attention(query, key, value, HEADS, HEADS))
        return made


class Gated(nn.Module):
    """Twice as wide as its name says, with both halves in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        made: Tensor = self.dense_4h_to_h(gate.sigmoid() * up)
        return made


class Config:
    """Of all modules."""

    num_heads = HEADS


UNSURE = {
    "a count": (lambda: Renamed(heads_in_all=HEADS), "no rule says what its attribute heads_in_all counts"),
    "a parameter": (
        lambda: Renamed(bias_u=nn.Parameter(torch.empty(WIDTH // HEADS))),
        r"no rule says how blocks.\d.bias_u is split along with heads",
    ),
    "nothing": (lambda: Renamed(head_dim=None), "none of its attributes says how many heads it has"),
    "a config": (lambda: Reader(config=Config()), "it reads num_heads from its config"),
    "a wide norm": (lambda: Renamed(q_norm=nn.LayerNorm(WIDTH)), "as wide as all heads together"),
    "an order": (Packed, "the order of its outputs is not known for a Packed"),
    "halves": (Gated, "its outputs are not 1 times the inputs of the layer after it"),
}


@pytest.mark.parametrize("what", UNSURE)
def test_what_is_not_certain_stays_whole(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """And computes the same; the log says why."""
    kind, reason = UNSURE[what]
    module = LanguageModel(kind, tied=False).double()  # type: ignore[arg-type]  # makes a block
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    _, expected = plain(module)
    with caplog.at_level(logging.INFO, "pipeflow"):
        for _, found, _ in run_threads(by_hand, 2, module, tensor=2):
            require_equal(found, expected)
    assert any(re.search(reason, record.message) for record in caplog.records)

    def split() -> set[str]:
        shard(mine := copy.deepcopy(module))
        found = splits_of(mine)
        return {name.rpartition(".")[0] for name, each in mine.named_parameters() if id(each) in found}

    taken = {"an order": {"o_proj"}, "halves": {"dense_4h_to_h"}}.get(what, set())  # they take a whole input, too
    expected_names = {"wte", "lm_head", *(f"blocks.{index}.{name}" for index in range(2) for name in taken)}
    assert run_threads(split, 2, tensor=2) == [expected_names] * 2


def _dropped() -> list[float]:
    """What a rank with a seed of its own has of the gradients of whole parameters."""
    torch.manual_seed(current_context().rank)
    module = small.make("llama")
    for block in module.get_submodule("blocks").children():
        block.norm = nn.Sequential(block.get_submodule("norm"), nn.Dropout(0.5))
    model = Pipeline.from_module(module, make_schedule("1f1b", ranks=1, microbatches=2), batch())
    for _ in range(2):
        execute_pipeline(iter([batch()]), model)
    return [
        each.grad.sum().item() for name, each in model.named_parameters() if "norm.0" in name and each.grad is not None
    ]


@pytest.mark.exhaustive
def test_stock_dropout_drops_alike_on_all_tensor_ranks() -> None:
    """However their processes were seeded: what they hold alike would drift apart otherwise."""
    first, second = run_processes(_dropped, 2, tensor=2)
    assert first == second
    assert first


@pytest.mark.parametrize(
    ("heads", "groups", "size", "sizes"),
    [(6, 3, 2, "1, 3, 6"), (6, 4, 3, "1, 2"), (4, 2, 3, "1, 2, 4")],
)
def test_sizes_that_heads_can_be_shared_by(heads: int, groups: int, size: int, sizes: str) -> None:
    """Those that divide the heads of the query, and divide those of key and value or are a multiple of them."""
    attention = Renamed(num_heads=heads, head_dim=4, num_key_value_heads=groups)
    attention.q_proj, attention.o_proj = nn.Linear(8, 4 * heads), nn.Linear(4 * heads, 8)
    attention.k_proj, attention.v_proj = nn.Linear(8, 4 * groups), nn.Linear(8, 4 * groups)

    def rank() -> None:
        with pytest.raises(UsageError, match=f"choose a tensor size of {sizes}$"):
            shard(nn.ModuleDict({"attention": copy.deepcopy(attention)}))

    run_threads(rank, size, tensor=size)


class SameLinear(nn.Linear):
    """A linear layer in other words."""

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.weight.T
        return made if self.bias is None else made + self.bias


class HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class BrokenLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def test_linear_layers_in_other_words() -> None:
    """They are tried: what computes as nn.Linear does is one."""
    assert [is_linear(kind(2, 2)) for kind in (nn.Linear, SameLinear, HalfLinear, BrokenLinear)] == [True, True] + [
        False
    ] * 2


def test_linear_layers_are_tried_on_real_numbers_while_a_plan_is_made() -> None:
    """Plans run on fake tensors, and what is found then counts for the layers that are split later."""

    class Another(SameLinear):
        """A class that nothing was asked about before."""

    with FakeTensorMode():
        assert is_linear(Another(2, 2))
    assert is_linear(Another(2, 2))


def test_an_argument_that_ranks_cannot_share() -> None:
    def rank() -> None:
        module = make("bloom")
        shard(module)
        attention: Any = module.get_submodule("blocks.0.inner")
        with pytest.raises(
            UsageError, match="alibi of BloomAttention has size 7 in dimension 0, which cannot be split evenly"
        ):
            attention(torch.zeros(2, 3, WIDTH, dtype=torch.float64), alibi=torch.zeros(7, 1, 3, dtype=torch.float64))

    run_threads(rank, 2, tensor=2)


def test_attributes_that_a_rule_needs() -> None:
    rules = [Rule("attention", "q_proj", parts=("many", "few")), *DEFAULT_RULES]
    with pytest.raises(UsageError, match="Renamed has no integer attribute 'many'"):
        shard(nn.ModuleDict({"attention": Renamed()}), rules=rules)
