"""Tensor parallelism of any module by rules: equal to the plain module, by hand and under a pipeline."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import (
    Pipeline,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    load_checkpoint,
    load_safetensors,
    make_schedule,
    save_checkpoint,
    save_safetensors,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import partial_in, splits_of
from pipeflow.engine.parallel.transport.protocol import Unconnected
from pipeflow.engine.tensor.layer import cut
from pipeflow.tensor import DEFAULT_RULES, Rule, shard
from pipeflow.testing import RankError, run_threads
from tests.tensor.ranks import gradients
from tests.tensor.small import (
    HEADS,
    LENGTH,
    MODELS,
    WIDTH,
    GroupedAttention,
    PackedAttention,
    attention,
    batch,
    fill,
    make,
)

Named = dict[str, Tensor]
ONE = make_schedule("1f1b", ranks=1, microbatches=2)


def plain(module: nn.Module) -> tuple[float, Named]:
    loss = module(**batch())
    loss.backward()
    return loss.item(), {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def by_hand(module: nn.Module, **options: Any) -> tuple[float, Named, int]:
    module = copy.deepcopy(module)
    shard(module, **options)
    loss = module(**batch())
    loss.backward()
    for parameter in partial_in(module):
        assert parameter.grad is not None
        current_context().tensor.all_reduce(parameter.grad).wait()
    return loss.item(), gradients(module), sum(each.numel() for each in module.parameters())


def require_equal(found: Named, expected: Named) -> None:
    """Within 1e-9 of each one's largest entry, or of a thousandth of all: some are zero but for rounding."""
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in found.items():
        assert gradient.shape == expected[name].shape, name
        scale = max(float(expected[name].abs().max()), largest * 1e-3)
        assert (gradient - expected[name]).abs().max() <= 1e-9 * scale, name


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_plain_module(name: str) -> None:
    module = make(name)
    results = run_threads(by_hand, 2, module, tensor=2)
    loss, expected = plain(module)
    for its, found, numbers in results:
        assert its == pytest.approx(loss, rel=1e-12)
        assert found.keys() == expected.keys()
        require_equal(found, expected)
        assert numbers < 0.75 * sum(each.numel() for each in module.parameters())


def test_a_group_of_one_changes_nothing() -> None:
    module = make("gpt2")
    before = [(type(each), id(each)) for each in module.modules()]
    shard(module)
    assert [(type(each), id(each)) for each in module.modules()] == before


@pytest.mark.some(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_under_a_pipeline(name: str, schedule: str) -> None:
    """Pipeline 2 x tensor 2: loss, gradients, and the norm that clipping finds."""
    module, two = make(name), make_schedule(schedule, ranks=2, microbatches=4)

    def rank() -> tuple[float, Named, float]:
        model = Pipeline.from_module(copy.deepcopy(module), two, batch())
        output = execute_pipeline(iter([batch()]), model, broadcast_loss=True)
        assert output.loss is not None
        found = gradients(model)
        return output.loss.item(), found, clip_grad_norm_(model, 1e-3).item()

    results = run_threads(rank, 4, tensor=2)
    loss, expected = plain(module)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()
    assert {name for _, found, _ in results for name in found} == expected.keys()
    for its, found, its_norm in results:
        assert its == pytest.approx(loss, rel=1e-9)
        require_equal(found, expected)
        assert its_norm == pytest.approx(norm, rel=1e-9)


class ExactAttention(GroupedAttention):
    """Its heads are a number, and no -1."""

    def forward(self, x: Tensor) -> Tensor:
        self.q_proj(x).view(*x.shape[:2], self.num_heads, self.head_dim)
        return super().forward(x)


def test_a_new_shape_is_planned_with_all_heads() -> None:
    """A rank has some of them, but a plan is one of the whole module."""
    module, two = make("llama"), make_schedule("1f1b", ranks=2, microbatches=4)
    for each in module.modules():
        if type(each) is GroupedAttention:
            each.__class__ = ExactAttention
    short = {name: each[:, :-1] for name, each in batch().items()}

    def rank() -> float:
        model = Pipeline.from_module(copy.deepcopy(module), two, batch())
        output = execute_pipeline(iter([short]), model, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item()

    assert run_threads(rank, 4, tensor=2) == pytest.approx([module(**short).item()] * 4, rel=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 4)])
def test_checkpoints_under_another_tensor_size(tmp_path: Path, first: int, then: int) -> None:
    """Packed weights are whole in the folder, and so are an optimizer's states of them."""
    module = make("gpt2-tied")

    def model() -> tuple[Pipeline, torch.optim.Optimizer]:
        made = Pipeline.from_module(copy.deepcopy(module), ONE, batch())
        return made, torch.optim.Adam(made.parameters(), lr=0.01)

    def step(made: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        made.zero_grad()
        execute_pipeline(iter([batch()]), made)
        optimizer.step()

    def save() -> None:
        made, optimizer = model()
        step(made, optimizer)
        save_checkpoint(tmp_path / "saved", made, optimizer)

    def load() -> list[tuple[str, bool]]:
        made, optimizer = model()
        load_checkpoint(tmp_path / "saved", made, optimizer)
        step(made, optimizer)
        context, splits = current_context(), splits_of(made)
        return [
            (name, torch.allclose(each, cut(expected[name], splits.get(id(each)), context.tensor), rtol=1e-9))
            for name, each in made.named_parameters()
        ]

    serial = copy.deepcopy(module)
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        serial(**batch()).backward()
        optimizer.step()
    expected = dict(serial.named_parameters())
    run_threads(save, first, tensor=first)
    for found in run_threads(load, then, tensor=then):
        assert [name for name, is_equal in found if not is_equal] == []


def test_safetensors_of_packed_weights(tmp_path: Path) -> None:
    """Written whole by two tensor ranks, and read by them in parts."""
    pytest.importorskip("safetensors")
    module = make("gpt2-tied")
    wanted = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def save() -> None:
        mine = copy.deepcopy(module)
        shard(mine)
        save_safetensors(tmp_path / "model", mine)

    def load() -> list[bool]:
        mine = copy.deepcopy(module)
        shard(mine)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.zero_()
        load_safetensors(tmp_path / "model", mine)
        splits, group = splits_of(mine), current_context().tensor
        return [
            torch.equal(each, cut(wanted[name], splits.get(id(each)), group)) for name, each in mine.named_parameters()
        ]

    run_threads(save, 2, tensor=2)
    stored = safetensors_of(tmp_path / "model")
    assert all(torch.equal(stored[name], each) for name, each in wanted.items())
    assert all(all(found) for found in run_threads(load, 2, tensor=2))


def safetensors_of(folder: Path) -> Named:
    from safetensors.torch import load_file  # optional

    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


class Own(nn.Module):
    """Names and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.h = HEADS
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS))
        self.scale = nn.Parameter(torch.ones(WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        query = (query.unflatten(-1, (self.h, -1)) * self.temperature[:, None] * self.scale).flatten(-2)
        made: Tensor = self.mix(attention(query, key, value, self.h, self.h))
        return made


OWN = [
    Rule("attention", "qkv", parts=3),
    Rule("row", "mix"),
    Rule("attribute", "h"),
    Rule("parameter", "temperature"),
    Rule("partial", "scale"),
]


def own() -> nn.Module:
    module = make("llama")
    module.blocks = nn.ModuleList(Own().double() for _ in range(2))
    return module


def test_rules_of_ones_own() -> None:
    """One of each kind, a line each."""
    module = own()
    expected = plain(module)[1]
    for _, found, numbers in run_threads(partial(by_hand, rules=[*OWN, *DEFAULT_RULES]), 2, module, tensor=2):
        require_equal(found, expected)
        assert numbers < 0.6 * sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize("left_out", range(len(OWN)))
def test_every_rule_is_needed(left_out: int) -> None:
    """Without any of them the shapes do not fit, or a gradient is another."""
    rules, module = [*OWN[:left_out], *OWN[left_out + 1 :], *DEFAULT_RULES], own()
    expected = plain(module)[1]

    def compare() -> None:
        for _, found, _ in run_threads(partial(by_hand, rules=rules), 2, module, tensor=2):
            require_equal(found, expected)

    with pytest.raises((RankError, AssertionError), match=r"scale|size|shape|takes|inputs"):
        compare()


def test_a_rule_that_keeps_layers_whole() -> None:
    module = make("llama")
    rules = [Rule("whole", r"self_attn\..*"), *DEFAULT_RULES]
    expected = plain(module)[1]
    for _, found, _ in run_threads(partial(by_hand, rules=rules), 2, module, tensor=2):
        require_equal(found, expected)


@pytest.mark.parametrize(
    ("rules", "size", "message"),
    [
        ([Rule("column", "nothing")], 2, "matches nothing"),
        ([Rule("row", "norm")], 2, "it cannot split a RMSNorm"),
        ((), 3, "q_proj is 4, which 3 tensor ranks cannot share: choose a tensor size of 1, 2, 4"),
        ([Rule("column", "q_proj", parts=5)], 2, "cannot be divided into the parts"),
        ([Rule("parameter", r"norm\.weight", dim=3)], 2, "whose shape is"),
    ],
)
def test_what_is_refused_changes_nothing(rules: list[Rule], size: int, message: str) -> None:
    def rank() -> None:
        module = make("llama")
        before = [(type(each), each) for each in module.modules()], {k: v.shape for k, v in module.named_parameters()}
        with pytest.raises(UsageError, match=message):
            shard(module, rules=[*rules, *DEFAULT_RULES])
        assert before[1] == {name: each.shape for name, each in module.named_parameters()}
        assert before[0] == [(type(each), each) for each in module.modules()]

    run_threads(rank, size, tensor=size)


def test_a_rule_must_be_one() -> None:
    with pytest.raises(UsageError, match="no kind of rule"):
        Rule("diagonal", "x")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(UsageError, match="not a regular expression"):
        Rule("row", "(")


def test_an_embedding_whose_weight_another_layer_uses_whole_stays_whole() -> None:
    module = make("gpt2")
    module.other = nn.Linear(WIDTH, 13, bias=False)
    module.other.weight = module.get_submodule("wte").weight  # type: ignore[assignment]  # a parameter

    def rank() -> bool:
        mine = copy.deepcopy(module)
        shard(mine)
        return id(mine.get_submodule("wte").weight) in splits_of(mine)

    assert run_threads(rank, 2, tensor=2) == [False, False]


def test_torchs_attention_stays_whole() -> None:
    """It computes with its out_proj's weight without calling it."""

    def rank() -> tuple[int, Tensor]:
        with torch.random.fork_rng(devices=[]):
            module = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, dtype=torch.float64)})
        shard(module)
        return len(splits_of(module)), module["attn"].out_proj.weight  # type: ignore[union-attr, return-value]  # that of torch's

    for splits, weight in run_threads(rank, 2, tensor=2):
        assert splits == 0
        assert weight.shape == (8, 8)


def test_packed_attention_needs_its_split_size() -> None:
    """What is divided is the attention's own; nothing outside of it."""

    def rank() -> tuple[int, int]:
        module = make("gpt2")
        shard(module)
        first: Any = module.get_submodule("blocks.0.attn")
        assert type(first) is PackedAttention
        return first.num_heads, first.split_size

    assert run_threads(rank, 2, tensor=2) == [(HEADS // 2, WIDTH // 2)] * 2


def test_rules_are_rules() -> None:
    with pytest.raises(UsageError, match=r"rules are pipeflow.tensor.Rule objects, got 'qkv'"):
        shard(make("gpt2"), rules=["qkv"])  # type: ignore[list-item]  # what is refused


def test_a_graph_of_whole_parameters_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rules = [Rule("column", "0"), Rule("row", "1")]
    kept = module(torch.ones(2, 4))
    with pytest.raises(UsageError, match=r"0\.weight is split, but the graph of an earlier loss or output still"):
        shard(module, rules=rules, group=Unconnected(0, 2))
    assert module[0].weight.shape == (4, 4)
    del kept
    shard(module, rules=rules, group=Unconnected(0, 2))
    assert module[0].weight.shape == (2, 4)


def test_nothing_to_split_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the first tensor rank; not where no rules were asked for."""

    def rank() -> None:
        shard(nn.Sequential(nn.Linear(4, 4)))
        shard(nn.Sequential(nn.Linear(4, 4)), rules=())

    run_threads(rank, 2, tensor=2)
    assert [record.message for record in caplog.records if "no rule matches" in record.message] == [
        "no rule matches a layer of Sequential, so all 2 tensor ranks compute the same: see pipeflow.tensor.Rule"
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_no_rules_keep_everything_whole(size: int) -> None:
    """In from_module, whose rules are the default ones otherwise."""

    def rank() -> tuple[int, int]:
        numbers = [
            sum(each.numel() for each in made.parameters())
            for made in (
                Pipeline.from_module(make("gpt2"), ONE, batch(), rules=()),
                Pipeline.from_module(make("gpt2"), ONE, batch()),
            )
        ]
        return numbers[0], numbers[1]

    whole = sum(each.numel() for each in make("gpt2").parameters())
    for kept, split in run_threads(rank, size, tensor=size):
        assert kept == whole
        assert (split < whole) == (size == 2)


# An attention or a layer that is not certain to compute the same in parts stays whole, and all of its tensors with it.


class WindowAttention(nn.Module):
    """Packed projections under names without a rule, and a table with an entry per head under a name with one."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (WIDTH // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * LENGTH - 1) ** 2, heads))
        places = torch.arange(LENGTH)
        self.register_buffer("relative_position_index", places[:, None] - places + LENGTH - 1, persistent=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        index: Any = self.relative_position_index
        bias = self.relative_position_bias_table[index.flatten()].view(LENGTH, LENGTH, -1).permute(2, 0, 1)
        made = (query * self.scale @ key.transpose(-2, -1) + bias).softmax(-1) @ value
        output: Tensor = self.proj(made.transpose(1, 2).flatten(2))
        return output


class BiasedAttention(nn.Module):
    """Its projection's weight is used without calling the layer, with biases of query and value beside it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_bias, self.v_bias = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("k_bias", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        key_bias: Any = self.k_bias
        packed = functional.linear(x, self.qkv.weight, torch.cat([self.q_bias, key_bias, self.v_bias]))
        query, key, value = packed.chunk(3, -1)
        made: Tensor = self.proj(attention(query, key, value, self.num_heads, self.num_heads))
        return made


class NormedAttention(nn.Module):
    """With norms per head and a parameter per head, all under names of rules."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.sinks = nn.Parameter(torch.empty(heads))
        self.q_norm = nn.LayerNorm(WIDTH // heads)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        query = self.q_norm(query.unflatten(-1, (self.num_heads, -1))) * self.sinks[:, None]
        made: Tensor = self.proj(attention(query.flatten(2), key, value, self.num_heads, self.num_heads))
        return made


class Slopes(nn.Module):
    """A PReLU with a slope for each of 24 features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.weight)


class Mlp(nn.Module):
    """With a function between its layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 24), between, nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(self.act(self.fc1(x)))
        return made


class DroppedSoftmax(nn.Module):
    """A softmax within a module that has a child."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.dropout(x).softmax(-1)
        return made


class WindowBlock(nn.Module):
    """An attention beside layers that are split; the attention may also be a part of the block itself."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        made: Tensor = self.mlp(x)
        return x + made


class InlineBlock(NormedAttention):
    """One module with a whole attention and split layers."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 24), nn.PReLU(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        made: Tensor = self.fc2(self.act(self.fc1(x)))
        output: Tensor = x + self.act(made)
        return output


class Regression(nn.Module):
    """Ends with a layer whose name has a rule; nothing takes its outputs in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.fc1(x).square().mean(-1, keepdim=True)
        return made


UNCERTAIN: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a table per head": (lambda: WindowBlock(WindowAttention(2), Mlp(nn.GELU())), {"mlp.fc1", "mlp.fc2"}),
    "a table of 4 heads": (lambda: WindowBlock(WindowAttention(4), Mlp(nn.GELU())), {"mlp.fc1", "mlp.fc2"}),
    "biases": (lambda: WindowBlock(BiasedAttention(2), Mlp(nn.GELU())), {"mlp.fc1", "mlp.fc2"}),
    "norms": (lambda: WindowBlock(NormedAttention(4), Mlp(nn.Dropout(0.0))), {"mlp.fc1", "mlp.fc2"}),
    "a slope": (lambda: WindowBlock(NormedAttention(4), Mlp(nn.PReLU())), {"mlp.fc1", "mlp.act", "mlp.fc2"}),
    "a slope per output": (lambda: Mlp(Slopes()), {"fc2"}),
    "a softmax": (lambda: Mlp(nn.Softmax(-1)), {"fc2"}),
    "a softmax around a dropout": (lambda: Mlp(DroppedSoftmax()), {"fc2"}),
    "functions in a row": (lambda: Mlp(nn.Sequential(nn.GELU(), nn.Dropout(0.0))), {"fc1", "fc2"}),
    "a norm without weights": (lambda: Mlp(nn.LayerNorm(24, elementwise_affine=False)), {"fc2"}),
    "norms of a block": (lambda: InlineBlock(4), {"fc2"}),
    "a last layer": (Regression, set()),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_uncertain_stays_whole(name: str) -> None:
    """Loss and gradients are those of the plain module; only layers that compute the same in parts are split."""
    block, split = UNCERTAIN[name]
    module = make("llama")
    module.blocks = nn.ModuleList([block()])
    fill(module)
    loss, expected = plain(module)

    def rank() -> tuple[float, Named, set[str]]:
        mine = copy.deepcopy(module)
        its, found, _ = by_hand(mine)
        shard(mine)
        parts = {*splits_of(mine), *map(id, partial_in(mine))}
        names = {name.rpartition(".")[0] for name, each in mine.named_parameters() if id(each) in parts}
        return its, found, {each.removeprefix("blocks.0.") for each in names if each.startswith("blocks.0.")}

    for its, found, names in run_threads(rank, 2, tensor=2):
        assert its == pytest.approx(loss, rel=1e-12)
        require_equal(found, expected)
        assert names == split


class SharedKey(nn.Module):
    """An attention one of whose weights another layer uses whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GroupedAttention()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.inner.q_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(x) + self.other(x)
        return made


def test_an_attention_is_split_as_a_whole_or_not_at_all() -> None:
    module = make("llama")
    module.blocks = nn.ModuleList([SharedKey()])
    fill(module)
    loss, expected = plain(module)
    for its, found, _ in run_threads(by_hand, 2, module, tensor=2):
        assert its == pytest.approx(loss, rel=1e-12)
        require_equal(found, expected)


WRONG = [Rule("parameter", "relative_position_bias_table", dim=1), Rule("whole", "lm_head"), *DEFAULT_RULES]


def test_tensor_ranks_with_different_losses_are_an_error() -> None:
    """Here by a rule of one's own, for a table whose attention stays whole: one entry is used for both heads. A head
    that gathers its outputs from all ranks would give all of them the same loss.
    """
    module = make("llama")
    module.blocks = nn.ModuleList([WindowBlock(WindowAttention(2), Mlp(nn.GELU()))])
    fill(module)

    def rank() -> str:
        model = Pipeline.from_module(copy.deepcopy(module), ONE, batch(), rules=WRONG)
        with pytest.raises(UsageError, match="a layer was split that must stay whole") as caught:
            execute_pipeline(iter([batch()]), model, broadcast_loss=True)
        return str(caught.value)

    first, second = run_threads(rank, 2, tensor=2)
    assert first == second
    assert "on rank 1, " in first


def test_the_default_rules_keep_the_help_of_from_module_short() -> None:
    assert str(inspect.signature(Pipeline.from_module)).endswith("rules: 'Sequence[Rule]' = DEFAULT_RULES) -> 'Self'")
    assert [*DEFAULT_RULES] == list(DEFAULT_RULES) != []
