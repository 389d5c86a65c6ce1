"""Tensors that the forward writes to in place after a module returned them, or that a module writes to: what is sent is
what the module returned, and each stage sees the writes that the whole module would have made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from tests.stages.chain import chained
from tests.stages.models import WIDTH, seeded, vectors

DEPTH = 3


class Layer(nn.Module):
    """Half a residual block, whose output autograd does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(values)))


class Model(nn.Module):
    """Residual blocks as many vision transformers have them; subclasses differ in what comes first."""

    checkpoints = False
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.place = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.same = nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.blocks: Any = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(DEPTH))

    def call(self, layer: Any, values: Tensor) -> Any:
        return checkpoint(layer, values, use_reentrant=False) if self.checkpoints else layer(values)

    def first(self, values: Tensor) -> Any:
        values = self.embed(values)
        values += self.place
        return values

    def layers(self, values: Tensor) -> Any:
        for one, two in self.blocks:
            values = self.call(one, values) + values
            values = self.call(two, values) + values
        return values

    def forward(self, values: Tensor) -> Any:
        return self.layers(self.first(values)).square().mean()


class Added(Model):
    """Writes nothing."""

    def first(self, values: Tensor) -> Any:
        return self.embed(values) + self.place


class Shifted(Model):
    """Writes a buffer and an attribute to a view of what the module returned."""

    def first(self, values: Tensor) -> Any:
        values = self.embed(values)
        half = values[:, : WIDTH // 2]
        half *= self.shift[: WIDTH // 2]
        values[:, 0] += 3
        return values


class Named(Model):
    """Writes to a view, then calls a module that returns its argument."""

    def first(self, values: Tensor) -> Any:
        values = self.embed(values)
        values.view(-1).mul_(2)
        return self.same(values)


class Activated(Model):
    """A module writes to what another returned, and its own output is forgotten."""

    def first(self, values: Tensor) -> Any:
        values = self.embed(values)
        self.relu(values)
        return values


class Skipping(Model):
    """The same, but both names are used."""

    def forward(self, values: Tensor) -> Any:
        first = self.embed(values)
        values = self.layers(self.relu(first))
        return (values + first * first).square().mean()


class Late(Model):
    """Writes in a later stage than the one that made the tensor, before and after another stage reads it."""

    def forward(self, values: Tensor) -> Any:
        skip = self.embed(values)
        values = skip * 2
        for one, two in self.blocks:
            values = self.call(two, self.call(one, values)) + skip * 1
            skip += self.place
        return (values + skip).square().mean()


class Residual(Model):
    """Adds to the output of every layer in place."""

    def layers(self, values: Tensor) -> Any:
        for one, two in self.blocks:
            inner = self.call(one, values)
            inner += values
            values = self.call(two, inner)
            values += inner
        return values


class Tree(nn.Module):
    """Returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, values: Tensor) -> dict[str, Any]:
        inner = self.layer(values)
        return {"one": inner, "others": (inner * 2, inner[:, :2])}


class Several(Model):
    """Writes to one of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()

    def forward(self, values: Tensor) -> Any:
        found = self.tree(values)
        found["one"] += self.place
        return (self.layers(found["one"]) + found["one"] * found["others"][0]).square().mean()


class Sharing(Several):
    """Also reads a view of the tensor to which it writes."""

    def forward(self, values: Tensor) -> Any:
        found = self.tree(values)
        found["one"] += self.place
        return self.layers(found["one"]).square().mean() + found["others"][1].mean()


class Collecting(Model):
    """Hooks keep what layers, and modules within them, returned."""

    def forward(self, values: Tensor) -> Any:
        found: list[Tensor] = []
        modules = [each for pair in self.blocks for each in (pair[0], pair[1].outer)]
        hooks = [each.register_forward_hook(lambda *call: found.append(call[2])) for each in modules]
        try:
            values = self.layers(self.first(values))
        finally:
            for hook in hooks:
                hook.remove()
        return values.square().mean() + sum(each.sin().mean() for each in found)


class Overwriting(Layer):
    """Writes to what its last module returned."""

    def forward(self, values: Tensor) -> Any:
        return torch.tanh_(self.outer(torch.tanh(self.inner(values))))


class Overwritten(Collecting):
    """Hooks keep tensors to which their blocks write."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Layer(), Overwriting()]) for _ in range(DEPTH))


class Stored(nn.Module):
    """Returns a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, values: Tensor) -> Any:
        self.last = self.table * values.mean(0)
        return self.last


class Stateful(Model):
    """Writes to an attribute of a module, which the module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = Stored()

    def forward(self, values: Tensor) -> Any:
        last = self.stored(values)
        last *= 2
        return (self.layers(self.first(values) + last) * last).square().mean()


class Writer(nn.Module):
    """Writes to its argument and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> None:
        values += self.layer(values * 1)


class Writers(Model):
    """Blocks that return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Layer(), Writer()]) for _ in range(DEPTH))

    def layers(self, values: Tensor) -> Any:
        for one, two in self.blocks:
            values = self.call(one, values) + values
            two(values)
        return values


MODELS: list[type[Model]] = [
    Model,
    Shifted,
    Named,
    Activated,
    Skipping,
    Late,
    Residual,
    Several,
    Collecting,
    Overwritten,
    Stateful,
    Writers,
]
CUTS = (["blocks.0.0"], ["embed", "blocks.1.0"], ["blocks.0.1", "blocks.1.0", "blocks.2.0"])


def made(kind: type[Model], *, checkpoints: bool = False) -> Model:
    module = kind().double()
    module.checkpoints = checkpoints
    seeded(module, 0)
    return module


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def require_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12), name


def expected_of(module: nn.Module, values: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = module(values)
    loss.backward()
    return loss.item(), gradients(module)


def test_a_plan_within_hooks_of_saved_tensors_is_the_same() -> None:
    """A step that recomputes or offloads has such hooks, and may plan a batch of other shapes."""
    with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        loss, _ = chained(made(Collecting), {"values": vectors(5)[0]}, 2, cuts=["blocks.0.0"])
    assert loss.item() == pytest.approx(expected_of(made(Collecting), vectors(5)[0])[0], rel=1e-12)


@pytest.mark.some(24)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=len)
@pytest.mark.parametrize("kind", MODELS)
def test_stages_compute_what_the_module_does(kind: type[Model], cuts: list[str], checkpoints: bool) -> None:
    if cuts[0] == "embed" and kind in (Several, Late):
        cuts = ["blocks.1.1", "blocks.2.0"]
    module, values = made(kind, checkpoints=checkpoints), vectors(5)[0]
    loss, _ = chained(module, {"values": values}, len(cuts) + 1, cuts=cuts)
    loss.backward()
    found = gradients(module)
    expected_loss, expected = expected_of(made(kind, checkpoints=checkpoints), vectors(5)[0])
    assert torch.equal(values, vectors(5)[0])
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert found.keys() == expected.keys()
    require_near(found, expected)


def test_only_what_is_written_later_is_copied() -> None:
    for kind, copies in ((Model, 1), (Added, 0), (Activated, 0)):
        _, plan = chained(made(kind), {"values": vectors(5)[0]}, 2, cuts=["blocks.0.0"])
        pending, copied = [plan.stages[0].script.root], 0
        while pending:
            node = pending.pop()
            copied += len(node.copies)
            pending += node.inner.values()
        assert copied == copies, kind


def test_writes_to_shared_memory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"one of several tensors of tree that share memory, and needs another"):
        chained(made(Sharing), {"values": vectors(5)[0]}, 2, cuts=["blocks.0.0"])


class Reentrant(Added):
    """Half blocks in reentrant checkpoints."""

    def call(self, layer: Any, values: Tensor) -> Any:
        return checkpoint(layer, values, use_reentrant=True)


def test_a_reentrant_checkpoint_whose_argument_is_computed_from_what_is_received_is_refused() -> None:
    with pytest.raises(UsageError, match=r"blocks\.0\.0 lies within a reentrant checkpoint, and both its input and"):
        chained(made(Reentrant), {"values": vectors(5)[0]}, 2, cuts=["blocks.0.0"])


SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v", "chimera"]


def train(kind: type[Model], name: str, compiled: bool, checkpoints: bool) -> tuple[float | None, dict[str, Tensor]]:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    stages = schedule.placement.num_stages
    module = made(kind, checkpoints=checkpoints)
    cuts = ["blocks.0.0", "blocks.1.0", "blocks.2.0"] if stages == 4 else ["blocks.1.0"]
    model = Pipeline.from_module(module, schedule, (vectors(8)[0], None), cuts=cuts)
    if compiled:
        model.compile(backend="aot_eager")
    output = execute_pipeline(iter([(vectors(8)[0], None)]), model)
    return None if output.loss is None else output.loss.item(), gradients(model)


@pytest.mark.some(5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, pytest.param(Late, marks=pytest.mark.exhaustive), Skipping])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(kind: type[Model], name: str) -> None:
    expected_loss, expected = expected_of(made(kind), vectors(8)[0])
    for loss, found in run_threads(train, 2, kind, name, False, False):
        assert loss is None or loss == pytest.approx(expected_loss, rel=1e-9)
        require_near(found, expected)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides it on one thread
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", [Model, Residual])
def test_compiled_blocks(kind: type[Model], checkpoints: bool) -> None:
    expected_loss, expected = expected_of(made(kind), vectors(8)[0])
    for loss, found in run_threads(train, 2, kind, "zb-v", True, checkpoints, deadline=300.0, timeout=120.0):
        assert loss is None or loss == pytest.approx(expected_loss, rel=1e-9)
        require_near(found, expected)


class Counting(Model):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def first(self, values: Tensor) -> Any:
        self.calls += 1
        return self.embed(values) * self.calls.clone()


def test_stages_of_one_rank_do_not_write_to_the_same_buffer() -> None:
    values, cuts = {"values": vectors(5)[0]}, ["blocks.0.0", "blocks.1.0", "blocks.2.0"]
    two = make_schedule("interleaved-1f1b", ranks=2, microbatches=4).placement
    with pytest.raises(UsageError, match=r"writes to the buffer calls outside of its blocks, so stages 0 and 2, both"):
        chained(made(Counting), values, 4, cuts=cuts, placement=two)
    _, plan = chained(made(Counting), values, 4, cuts=cuts)
    assert all(stage.writes == {"calls"} for stage in plan.stages)
