"""A model made in a LazyInitContext takes no memory until it is boosted; then a rank has its own part alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.lazy import LazyInitContext
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError


class Block(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.narrow(self.wide(x).relu())
        return made + self.shift


class Model(nn.Module):
    """Its first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


TOTAL = 64 + 4 * (8 * 16 + 16 + 16 * 8 + 8)
BATCH = {"x": torch.rand(4, 3, 8, generator=torch.Generator().manual_seed(0))}


def lazy() -> Model:
    with LazyInitContext():
        made = Model()
    assert all(each.is_meta for each in made.parameters())
    assert made.head.weight is made.embed.weight
    assert not any(each.is_meta for each in made.buffers())
    return made


def square(outputs: Tensor, inputs: Any) -> Tensor:
    return outputs.square().mean()


def trained(make: Any, batch: Any, criterion: Any, options: dict[str, Any]) -> Any:
    """The first and the third loss, and the names of this rank's parameters with their initial values and splits."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **options))
    module = make()
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.01), criterion)
    model.prepare(batch)
    splits = splits_of(model)
    held = {
        name: (each.detach().clone(), splits.get(id(each)))
        for name, each in model.named_parameters(remove_duplicate=False)
    }
    assert not any(value.is_meta for value, _ in held.values())
    assert {each for group in optimizer.param_groups for each in group["params"]} == set(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"])
        optimizer.step()
    return losses, held


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"tp_size": 1, "pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2, "pp_size": 1},
    "pp2 x tp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
}


def require_same(make: Any, batch: Any, criterion: Any, layout: str, names: set[str]) -> list[dict[str, Any]]:
    """Under a layout and on one rank; each weight is on the ranks of its stages alone."""
    options = LAYOUTS[layout]
    [(alone, whole)] = run_threads(trained, 1, make, batch, criterion, {"tp_size": 1, "pp_size": 1})
    assert whole.keys() == names
    tensor = options["tp_size"]
    results = run_threads(trained, tensor * options["pp_size"], make, batch, criterion, options, tensor=tensor)
    for losses, _ in results[-tensor:]:
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)
    for first in range(0, len(results), tensor):
        parts = [held for _, held in results[first : first + tensor]]
        for name in parts[0]:
            split = parts[0][name][1]
            joined = parts[0][name][0] if split is None else split.joined([part[name][0] for part in parts])
            torch.testing.assert_close(joined, whole[name][0], rtol=0, atol=0)
    return [held for _, held in results]


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_makes_its_own_parameters_alone(layout: str) -> None:
    names = {name for name, _ in lazy().named_parameters(remove_duplicate=False)}
    made = require_same(lazy, BATCH, square, layout, names)
    if layout == "pp2":
        assert [sum("layers." in name for name in held) for held in made] == [8, 8]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_transformers_has_the_values_of_its_class(layout: str) -> None:
    transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    sizes = {"vocab_size": 48, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "initializer_range": 0.3}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)

    def make() -> nn.Module:
        with LazyInitContext():
            made: nn.Module = transformers.GPT2LMHeadModel(config)
        return made

    words = torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(0))
    names = {name for name, _ in make().named_parameters(remove_duplicate=False)}
    batch = {"input_ids": words, "labels": words}
    made = require_same(make, batch, lambda outputs, inputs: outputs.loss, layout, names)
    weight, _ = made[0]["transformer.h.0.attn.c_attn.weight"]
    assert 0.25 < float(weight.std()) < 0.35


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_weights_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    said = r"drops values, and \w+ gets '\w+' with values, as by from_pretrained"
    with pytest.raises(UsageError, match=said), LazyInitContext():
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)


def test_a_module_must_say_how_its_parameters_begin() -> None:
    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    class Sized(Scaled):
        def reset_parameters(self) -> None:
            self.scale.fill_(3.0)

    def make(kind: type[Model]) -> nn.Module:
        with LazyInitContext():
            return kind()

    options = {"tp_size": 1, "pp_size": 1}
    with pytest.raises(RankError, match=r"Scaled \(the model\) has parameters of its own but no reset_parameters"):
        run_threads(trained, 1, lambda: make(Scaled), BATCH, square, options)
    [(_, held)] = run_threads(trained, 1, lambda: make(Sized), BATCH, square, options)
    assert held["scale"][0].tolist() == [3.0] * 8


def test_no_parameter_takes_memory_in_the_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(8))
            self.one, self.other, self.real = weight, weight, ref(weight)

    with LazyInitContext():
        made = Twice()
        assert made.one is made.other
        assert made.one.is_meta
        assert made.real() is None


def test_a_whole_model_can_be_made() -> None:
    torch.manual_seed(4)
    made: Any = LazyInitContext.materialize(lazy())
    assert sum(each.numel() for each in made.parameters()) == TOTAL
    assert made.head.weight is made.embed.weight
    assert 0 < float(made.embed.weight.detach().abs().max()) < 8**-0.5
    assert made(**BATCH).isfinite().all()
    torch.manual_seed(4)
    again: Any = LazyInitContext.materialize(lazy())
    assert torch.equal(again.layers[1].wide.weight, made.layers[1].wide.weight)
    with LazyInitContext():
        owner = nn.Module()
        owner.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="no reset_parameters"):
        LazyInitContext.materialize(owner)


def test_gradients_are_sharded_of_real_parameters() -> None:
    def rank() -> None:
        plugin = HybridParallelPlugin(1, 1, precision="fp32", zero_stage=2)
        with pytest.raises(UsageError, match="make the model without LazyInitContext"):
            Booster(plugin=plugin).boost(lazy())

    run_threads(rank, 2, data=2)
