"""Compiled stages make the gradients of eager ones under every schedule, split backwards included, and are compiled in
the first step alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from tests.compiling import COMPILED
from tests.runtime.work import build, each_once, schedule_of, variants

TOLERANCE = 1e-6
Gradients = dict[str, Tensor]
FIRST = ("1f1b", 2, 1), ("zb-h1", 2, 1), ("zb-v", 2, 2), ("dualpipe-v", 2, 2), ("zb-auto", 2, 1)

pytestmark = COMPILED


def gradients_of(pipeline: Pipeline) -> Gradients:
    return {name: each.grad.clone() for name, each in pipeline.named_parameters() if each.grad is not None}


def train(model: TinyModel, schedule: Schedule, compiling: dict[str, Any] | None, steps: int = 1) -> list[Gradients]:
    """This rank's gradients of each step."""
    pipeline = build(model, schedule)
    if compiling is not None:
        pipeline.compile(**compiling)
    found = []
    for step in range(steps):
        pipeline.zero_grad()
        execute_pipeline(iter([model.batch(2 * schedule.num_microbatches, seed=step)]), pipeline, broadcast_loss=True)
        found.append(gradients_of(pipeline))
    return found


def require_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= 3 * TOLERANCE * float(gradient.abs().max()), name  # rounding: some sums are of a few numbers
    errors = [(found[name] - gradient).norm() for name, gradient in expected.items()]
    whole = [gradient.norm() for gradient in expected.values()]
    assert torch.stack(errors).norm() <= TOLERANCE * torch.stack(whole).norm()


def require_compiled(model: TinyModel, variant: tuple[str, int, int], **compiling: Any) -> None:
    schedule, ranks = schedule_of(variant, 4), variant[1]
    expected = run_threads(train, ranks, model, schedule, None, 3)
    found = run_threads(train, ranks, model, schedule, compiling, 3, deadline=900.0, timeout=300.0)
    assert counters["stats"]["unique_graphs"] > 0
    for mine, its in zip(found, expected, strict=True):
        for gradients, eager in zip(mine, its, strict=True):
            require_equal(gradients, eager)


@pytest.mark.some(2)
@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_blocks(variant: tuple[str, int, int]) -> None:
    require_compiled(PlainModel(8, torch.float32), variant, backend="aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", FIRST[:3], ids=str)
def test_whole_stages(variant: tuple[str, int, int]) -> None:
    require_compiled(TiedModel(4, torch.float32), variant, backend="aot_eager", blocks=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("variant", each_once(variants()))
def test_every_schedule(variant: tuple[str, int, int], blocks: bool) -> None:
    stages = schedule_of(variant, 4).placement.num_stages
    require_compiled(TiedModel(max(4, stages), torch.float32), variant, backend="aot_eager", blocks=blocks)


@pytest.mark.parametrize(
    "variant",
    [FIRST[2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in FIRST[:2] + FIRST[3:])],
    ids=str,
)
def test_inductor(variant: tuple[str, int, int]) -> None:
    require_compiled(TiedModel(8, torch.float32), variant)


@pytest.mark.exhaustive
def test_a_backend_that_does_not_defer() -> None:
    require_compiled(PlainModel(4, torch.float32), FIRST[1], backend="eager")


SPLIT = Schedule.from_csv("0F0,0I0,0F1,0W0,0I1,0W1")


def run_watching(compiling: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Before each F, whether a linear weight and another parameter have a gradient, under a schedule that leaves the
    first W until after the second F.
    """
    model = PlainModel(2, torch.float32)
    pipeline = build(model, SPLIT)
    pipeline.compile(**compiling)
    seen: list[tuple[bool, bool]] = []
    layer: Any = pipeline.get_submodule("chunks.0.layers.0")
    pipeline.get_submodule("chunks.0").register_forward_pre_hook(
        lambda *_: seen.append((layer.linear.weight.grad is not None, layer.scale.grad is not None))
    )
    execute_pipeline(iter([model.batch(4)]), pipeline)
    assert layer.linear.weight.grad is not None
    return seen


@pytest.mark.some(1)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_weights_come_in_w_and_others_in_i(blocks: bool) -> None:
    none, both = (False, False), (True, True)
    assert run_threads(run_watching, 1, {"backend": "aot_eager", "blocks": blocks}) == [[none, (False, True)]]
    assert run_threads(run_watching, 1, {"backend": "eager", "blocks": blocks}) == [[none, both]]


def told(compiling: dict[str, Any]) -> str:
    pipeline = build(PlainModel(1), SPLIT)
    pipeline.compile(**compiling)
    return str(pipeline.deferrals[0])


@pytest.mark.exhaustive
def test_which_gradients_wait_is_told() -> None:
    of_weight = (
        "36 of 48 elements of weight gradients are deferred (1 parameters); "
        "not deferred: layers.0.scale, layers.0.linear.bias"
    )
    assert run_threads(told, 1, {}) == [of_weight]
    assert run_threads(told, 1, {"backend": "eager"})[0].startswith("0 of 48")


def run_on(variant: tuple[str, int, int], blocks: bool) -> bool:
    """Trains, evaluates, and does both again; from then on another compilation is an error."""
    model = TiedModel(8, torch.float32)
    pipeline = build(model, schedule_of(variant, 4))
    pipeline.compile(backend="aot_eager", blocks=blocks)
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            for training in (True, False):
                pipeline.train(training)
                execute_pipeline(iter([model.batch(8, seed=step)]), pipeline, forward_only=not training)
    return counters["stats"]["unique_graphs"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "blocks"),
    [
        (FIRST[2], True),
        *(
            pytest.param(each, blocks, marks=pytest.mark.exhaustive)
            for each in (*FIRST, ("dualpipe", 2, 1), ("chimera", 2, 1))
            for blocks in (True, False)
        ),
    ],
    ids=str,
)
def test_nothing_is_compiled_after_the_first_steps(variant: tuple[str, int, int], blocks: bool) -> None:
    """In processes: threads that evaluate the guards of one piece of code at once may compile it again."""
    assert all(run_processes(run_on, 2, variant, blocks, deadline=300.0, timeout=120.0))


class Block(nn.Module):
    """What goes on in blocks: dropout, a norm, a checkpointed part, a parameter that is added, one that is not used."""

    def __init__(self, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6, bias=False)
        self.shift = nn.Parameter(torch.zeros(3, 6))
        self.unused = nn.Parameter(torch.zeros(2, 2))
        self.dropout = dropout
        self.reentrant = reentrant

    def inner(self, hidden: Tensor) -> Tensor:
        hidden = functional.dropout(self.up(self.norm(hidden)), self.dropout, self.training)
        output: Tensor = self.down(functional.gelu(hidden))
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        inner = (
            self.inner if self.reentrant is None else lambda x: checkpoint(self.inner, x, use_reentrant=self.reentrant)
        )
        output: Tensor = hidden + self.shift + inner(hidden)
        return output


def train_blocks(compiling: dict[str, Any] | None, autocast: torch.dtype | None, **options: Any) -> Gradients:
    blocks = [Block(**options) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for parameter in (each for block in blocks for each in block.parameters()):
        nn.init.normal_(parameter, generator=generator)
    blocks[1].down.weight = blocks[0].down.weight
    pipeline = Pipeline(nn.Sequential(*blocks), SPLIT, criterion=functional.mse_loss, autocast=autocast)
    if compiling is not None:
        pipeline.compile(**compiling)
    values, target = torch.randn(2, 4, 3, 6, generator=generator).unbind()
    for _ in range(2):
        pipeline.zero_grad()
        execute_pipeline(iter([(values, target)]), pipeline)
    return gradients_of(pipeline)


@pytest.mark.some(1)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [None, False], ids=["kept", "checkpointed"])
def test_what_goes_on_in_a_block(blocks: bool, autocast: torch.dtype | None, reentrant: bool | None) -> None:
    options = {"reentrant": reentrant}
    [expected] = run_threads(lambda: train_blocks(None, autocast, **options), 1)
    [found] = run_threads(lambda: train_blocks({"backend": "aot_eager", "blocks": blocks}, autocast, **options), 1)
    require_equal(found, expected)
    assert "chunks.0.0.unused" not in found


@pytest.mark.exhaustive
def test_a_recompute_draws_the_dropout_of_its_forward() -> None:
    """The gradient of a layer without bias is zero where its input was dropped, in each of its parts."""
    [found] = run_threads(lambda: train_blocks({"backend": "aot_eager"}, None, dropout=1.0, reentrant=False), 1)
    assert not found["chunks.0.0.down.weight"].any()
    assert found["chunks.0.0.shift"].any()


def compile_with(**compiling: Any) -> None:
    build(PlainModel(2), make_schedule("1f1b", ranks=1, microbatches=2)).compile(**compiling)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compiling", "said"),
    [
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' uses CUDA graphs"),
        ({"mode": "max-autotune"}, 'use mode="max-autotune-no-cudagraphs"'),
        ({"options": {"triton.cudagraphs": True}}, "uses CUDA graphs"),
        ({"backend": "cudagraphs"}, "the backend cudagraphs uses CUDA graphs"),
        ({"backend": "no-such"}, "no backend 'no-such'; it has"),
        ({"mode": "fast"}, "no mode 'fast'; it has 'default'"),
        ({"options": {"no-such": 1}}, "no option 'no-such'"),
        ({"mode": "default", "options": {"max_autotune": True}}, "not both"),
        ({"backend": "aot_eager", "options": {"max_autotune": True}}, "not with aot_eager"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_so(compiling: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match="UsageError") as error:
        run_threads(lambda: compile_with(**compiling), 1)
    assert said in str(error.value)


def compile_compiled(in_place: bool) -> str:
    first: Any = Block()
    if in_place:
        first.compile(backend="eager")
    else:
        first = torch.compile(first, backend="eager")
    pipeline = Pipeline(nn.Sequential(first, Block()), SPLIT, criterion=functional.mse_loss)
    with pytest.raises(UsageError, match="0 is compiled already"):
        pipeline.compile(backend="aot_eager")
    execute_pipeline(iter([(torch.ones(4, 3, 6), torch.zeros(4, 3, 6))]), pipeline)
    return str(pipeline.deferrals[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "wrapped"])
def test_a_block_that_was_compiled_before(in_place: bool) -> None:
    [told] = run_threads(compile_compiled, 1, in_place)
    assert told.startswith("156 of 380 elements")
    assert ", 0.up.weight" in told.replace("_orig_mod.", "")
