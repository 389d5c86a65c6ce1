"""A model made in a PipelinableContext is cut by each policy, and its stages compute what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.colossalai.context import ParallelMode
from pipeflow.colossalai.core import global_context as gpc
from pipeflow.colossalai.pipeline.pipelinable import PipelinableContext
from pipeflow.core.errors import UsageError
from pipeflow.testing import run_threads


class Masked(nn.Module):
    """A layer that takes an entry of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made: Tensor = self.linear(x)
        return made if mask is None else made * mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Masked(6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        x = self.first(input).relu()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x / 2)  # type: ignore[no-any-return]  # a layer's


NAMES = ["first", "blocks.0", "blocks.1", "blocks.2", "head"]
HALVED = (lambda x: x / 2, "front")
SEQUENCE: list[Any] = ["first", torch.relu, "SPLIT_NODE", *NAMES[1:4], HALVED, "head"]
POLICIES: dict[str, tuple[Any, list[int]]] = {
    "uniform": ("uniform", [2, 3]),
    "balanced": ("balanced", [2, 3]),
    "customized": ("customized", [1, 4]),
    "dict": ({0: [(0, 4)], 1: [(4, 5)]}, [4, 1]),
}


def seeded() -> tuple[PipelinableContext, Net]:
    with PipelinableContext() as pipelinable:
        torch.manual_seed(0)
        model = Net()
    return pipelinable, model.double()


def batch(samples: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((samples, 3), (samples, 1), (samples, 1))
    inputs, mask, labels = (torch.rand(size, dtype=torch.float64, generator=generator) for size in sizes)
    return {"input": inputs, "mask": mask}, labels


def stage_of(policy: Any, chunks: int = 1) -> Any:
    pipelinable, _ = seeded()
    pipelinable.to_layer_list(SEQUENCE)
    pipelinable.policy = policy
    assert (pipelinable.layers_count, pipelinable.funcs_count) == (5, 2)
    rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    return pipelinable.partition(chunks, gpc.pipeline_parallel_size, rank)


def gradients(policy: Any, chunks: int = 1) -> tuple[list[int], Any, dict[str, Tensor]]:
    """How many layers this rank's stages have, the loss, and the gradients by the names of the layers."""
    stages = stage_of(policy, chunks)
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    options = {} if chunks == 1 else {"chunks": chunks}
    schedule = make_schedule(name, ranks=2, microbatches=1, **options)
    made = Pipeline(stages, schedule, criterion=nn.functional.mse_loss)
    loss = execute_pipeline(iter([batch()]), made, broadcast_loss=True).loss
    named = {key.split("layers.")[1]: each.grad for key, each in made.named_parameters() if each.grad is not None}
    return [len(each.layers) for each in (stages if chunks > 1 else [stages])], loss, named


def require_whole(found: list[tuple[list[int], Any, dict[str, Tensor]]]) -> None:
    _, model = seeded()
    inputs, labels = batch()
    expected = nn.functional.mse_loss(model(**inputs), labels)
    expected.backward()
    together: dict[str, Tensor] = {}
    for _, loss, named in found:
        torch.testing.assert_close(loss, expected.detach())
        assert not together.keys() & named.keys()
        together |= named
    wanted = {
        f"{NAMES.index(name)}.{key}": each.grad
        for name in NAMES
        for key, each in model.get_submodule(name).named_parameters()
    }
    assert together.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(together[name], gradient)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_covers_the_model_once(policy: str) -> None:
    """And its stages train as the whole model does; layers keep their index in it."""
    given, sizes = POLICIES[policy]
    found = run_threads(gradients, 2, given)
    assert [size for [size], _, _ in found] == sizes
    require_whole(found)


def test_several_chunks() -> None:
    found = run_threads(gradients, 2, {0: [(0, 1), (2, 4)], 1: [(1, 2), (4, 5)]}, 2)
    assert [sizes for sizes, _, _ in found] == [[1, 2], [1, 1]]
    require_whole(found)


def test_a_weight_that_layers_share_is_tied() -> None:
    def rank() -> Any:
        with PipelinableContext("uniform") as pipelinable:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            model[1].weight = model[0].weight
        pipelinable.to_layer_list()
        stage: Any = pipelinable.partition(1, 2, gpc.get_local_rank(ParallelMode.PIPELINE))
        made = Pipeline(stage, make_schedule("1f1b", ranks=2, microbatches=1), criterion=nn.functional.mse_loss)
        execute_pipeline(iter([(torch.ones(2, 2), torch.zeros(2, 2))]), made)
        weight = next(iter(stage.layers)).weight
        return weight.grad

    first, second = run_threads(rank, 2)
    torch.testing.assert_close(first, second)


def test_a_model_in_the_order_of_its_registration() -> None:
    """Without a list; its functions are missing then, so it may not be called like the model."""
    pipelinable, model = seeded()
    pipelinable.to_layer_list()
    assert pipelinable.layers_count == 5
    pipelinable.policy = "uniform"
    stage: Any = pipelinable.partition(1, 1, 0)
    assert [id(layer) for layer in stage.layers] == [id(model.get_submodule(name)) for name in NAMES]


def test_functions_of_entries_replace_them() -> None:
    def inverted(mask: Tensor) -> Tensor:
        return 1 - mask

    pipelinable, model = seeded()
    pipelinable.to_layer_list(["first", torch.relu, (inverted, "front"), *NAMES[1:4], HALVED, "head"])
    stage = pipelinable.partition(1, 1, 0)
    inputs, _ = batch()
    expected = model(inputs["input"], 1 - inputs["mask"])
    torch.testing.assert_close(stage(**inputs), expected)
    torch.testing.assert_close(stage(inputs["input"], mask=inputs["mask"]), expected)


def test_what_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="the with block made no model"), PipelinableContext():
        pass
    pipelinable, _ = seeded()
    with pytest.raises(UsageError, match="exec_seq has 'second', which is neither a module of Net nor SPLIT_NODE"):
        pipelinable.to_layer_list(["first", "second"])
    with pytest.raises(UsageError, match="exec_seq has <built-in"):
        pipelinable.to_layer_list([torch.relu, "first"])
    with pytest.raises(UsageError, match="put it before the layer"):
        pipelinable.to_layer_list(["first", HALVED])
    pipelinable.to_layer_list()
    for policy, said in (
        ("even", "policy must be uniform, balanced"),
        ("customized", "exec_seq has 0 SPLIT_NODE, so 1 stages, for 1 ranks with 2 chunks"),
    ):
        pipelinable.policy = policy
        with pytest.raises(UsageError, match=said):
            pipelinable.partition(2, 1, 0)
    pipelinable.to_layer_list(SEQUENCE)
    with pytest.raises(UsageError, match="exec_seq has 1 SPLIT_NODE, so 2 stages, for 1 ranks with 1 chunks each"):
        pipelinable.partition(1, 1, 0)
    with pytest.raises(UsageError, match="this is rank 0 of a pipeline of 1, got 1 of 2"):
        pipelinable.partition(1, 2, 1)


def test_a_policy_has_parts_for_each_rank() -> None:
    with PipelinableContext({1: [(0, 2)]}) as pipelinable:
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipelinable.to_layer_list()
    with pytest.raises(UsageError, match="the policy lacks rank 0: give parts to each of 1 ranks"):
        pipelinable.partition(1, 1, 0)
