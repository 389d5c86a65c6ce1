"""Any optimizer steps weights of which a tensor rank has a part as it steps whole ones, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow import (
    MasterWeights,
    Pipeline,
    UsageError,
    Zero,
    execute_pipeline,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.tensor.stepping import stepping_of
from pipeflow.optim import Lamb
from pipeflow.tensor import cut
from pipeflow.testing import run_processes, run_threads
from pipeflow.training import Engine
from tests.checkpoint.checkpoints import Layout, under
from tests.tensor.ranks import normal
from tests.tensor.small import batch, make

STEPS = 4
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Normed(Optimizer):
    """Gradient descent along the gradient's direction, with a moving norm: no library's."""

    def __init__(self, params: Any, lr: float = 0.1, keep: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                norm = self.state[parameter].setdefault("norm", parameter.grad.norm())
                norm.lerp_(parameter.grad.norm(), group["keep"])
                parameter.add_(parameter.grad / norm, alpha=-group["lr"])


class Odd(Normed):
    """One that cannot be made from parameters and options alone."""

    def __init__(self, params: Any, factor: float, /) -> None:
        super().__init__(params, lr=0.1 * factor)


class Together(Normed):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        for group in self.param_groups:
            mine = [each for each in group["params"] if each.grad is not None]
            norm = torch.stack([each.grad.norm() for each in mine]).norm()
            for parameter in mine:
                parameter.add_(parameter.grad / norm, alpha=-group["lr"])


def transformers_adafactor(parameters: Iterable[nn.Parameter]) -> Optimizer:
    from transformers.optimization import Adafactor  # optional

    return Adafactor(parameters)


MATRICES: dict[str, Make] = {
    "muon": partial(torch.optim.Muon, lr=0.1),
    "muon-rms": partial(torch.optim.Muon, lr=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.5),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1, weight_decay=0.1),
    "adafactor-foreach": partial(torch.optim.Adafactor, lr=0.1, foreach=True),
    "normed": Normed,
    "odd": lambda parameters: Odd(parameters, 1.0),
}


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.dim() == 2]


def most(module: nn.Module) -> list[nn.Parameter]:
    """All but one kind: the gradient of a key's bias is 0, and Adafactor divides its rounding by itself."""
    return [each for name, each in module.named_parameters() if not name.endswith("c_attn.bias")]


def serial(make_optimizer: Make, of: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """The weights of the module in one process, as torch trains it."""
    module = make("gpt2-tied")
    optimizer = make_optimizer(of(module))
    for _ in range(STEPS):
        module.zero_grad()
        module(**batch()).backward()
        optimizer.step()
    return {name: each.detach() for name, each in module.named_parameters()}


def build(dtype: torch.dtype = torch.float64) -> Pipeline:
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    return Pipeline.from_module(make("gpt2-tied").to(dtype), schedule, batch())


def train(model: Pipeline, optimizer: Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        model.zero_grad()
        execute_pipeline(iter([batch()]), model)
        optimizer.step()


def difference(model: Pipeline, expected: dict[str, Tensor]) -> float:
    """The largest between this rank's weights and its parts of the expected ones."""
    splits, group = splits_of(model), current_context().tensor
    return max(
        float((each.detach() - cut(expected[name], splits.get(id(each)), group)).abs().max())
        for name, each in model.named_parameters()
    )


def bare(make_optimizer: Make, of: Callable[[nn.Module], Any]) -> float:
    model = build()
    train(model, make_optimizer(of(model)))
    return difference(model, serial(make_optimizer, of))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", MATRICES)
def test_torchs_own_loop(name: str) -> None:
    """Over parts of matrices, packed and padded ones among them, and, if the optimizer takes them, of vectors."""
    of = matrices if name.startswith("muon") else most
    assert max(run_threads(bare, 2, MATRICES[name], of, tensor=2)) <= 1e-9


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 4, 1)])
def test_other_layouts(layout: Layout) -> None:
    assert max(under(layout, bare, MATRICES["muon"], matrices)) <= 1e-9


def test_of_transformers() -> None:
    pytest.importorskip("transformers")
    assert max(run_threads(bare, 2, transformers_adafactor, most, tensor=2)) <= 1e-9


def with_zero(name: str) -> float:
    model = build()
    train(model, Zero(model, MATRICES[name](matrices(model))))
    return difference(model, serial(MATRICES[name], matrices))


def with_engine(name: str) -> float:
    model = build()
    engine = Engine(model, MATRICES[name](matrices(model)), gradient_accumulation=2)
    for _ in range(STEPS):
        engine.train_step(iter([batch(), batch()]))
    return difference(model, serial(MATRICES[name], matrices))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["muon", "adafactor", "normed"])
@pytest.mark.parametrize(("train_with", "data"), [(with_zero, 2), (with_engine, 1)])
def test_wrapped(name: str, train_with: Callable[[str], float], data: int) -> None:
    assert max(under((1, 2, data), train_with, name)) <= 1e-9


def with_masters(name: str, zero: bool) -> dict[str, Tensor]:
    """The masters on this rank, put together."""
    model = build(torch.bfloat16)
    optimizer = MATRICES[name](matrices(model))
    optimizer = MasterWeights(model, Zero(model, optimizer) if zero else optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for step in range(STEPS):
        for index, (name, parameter) in enumerate(model.named_parameters()):
            whole = normal(*make("gpt2-tied").get_parameter(name).shape, seed=100 * step + index).bfloat16()
            parameter.grad = cut(whole, splits_of(model).get(id(parameter)), model.context.tensor)
        optimizer.step()
    found = {}
    for parameter, master in optimizer.stepped.items():
        split = splits_of(model).get(id(parameter))
        parts = master.new_empty(model.context.tensor_size * master.shape[0], *master.shape[1:])
        model.context.tensor.all_gather(parts, master.detach().contiguous()).wait()
        of_ranks = parts.chunk(model.context.tensor_size)
        found[names[id(parameter)]] = (of_ranks[0] if split is None else split.joined(of_ranks)).clone()
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("zero", [False, True])
def test_masters(name: str, zero: bool) -> None:
    """They are float32 weights stepped with the same gradients in one process."""
    module = make("gpt2-tied").to(torch.bfloat16).float()
    optimizer = MATRICES[name](matrices(module))
    for step in range(STEPS):
        for index, parameter in enumerate(module.parameters()):
            parameter.grad = normal(*parameter.shape, seed=100 * step + index).bfloat16().float()
        optimizer.step()
    results = under((1, 2, 2 if zero else 1), with_masters, name, zero)
    held = {name for found in results for name in found}
    assert held == {name for name, each in module.named_parameters() if each.dim() == 2}
    for found in results:
        for its, master in found.items():
            torch.testing.assert_close(master, module.get_parameter(its).detach(), rtol=0, atol=1e-6)


def save(path: Path, name: str) -> None:
    model = build()
    optimizer = MATRICES[name](matrices(model))
    train(model, optimizer, 2)
    save_checkpoint(path, model, optimizer)


def load(path: Path, name: str) -> tuple[float, list[tuple[int, ...]]]:
    model = build()
    optimizer = MATRICES[name](matrices(model))
    load_checkpoint(path, model, optimizer)
    train(model, optimizer, 2)
    shapes = [tuple(each.shape) for state in optimizer.state.values() for each in state.values() if each.dim()]
    return difference(model, serial(MATRICES[name], matrices)), shapes


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["muon", "adafactor", "normed", "odd"])
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 2), (2, 4)])
def test_resumed_under_another_layout(tmp_path: Path, name: str, first: int, then: int) -> None:
    run_threads(save, first, tmp_path / "saved", name, tensor=first)
    results = run_threads(load, then, tmp_path / "saved", name, tensor=then)
    assert max(difference for difference, _ in results) <= 1e-9


def memory() -> tuple[int, int]:
    """The numbers in Muon's states on this rank, and in the weights that it steps."""
    model = build()
    optimizer = torch.optim.Muon(matrices(model))
    train(model, optimizer, 1)
    states = sum(each.numel() for state in optimizer.state.values() for each in state.values())
    return states, sum(each.numel() for each in matrices(model))


def test_states_of_the_shape_of_a_weight_are_split() -> None:
    for states, weights in run_threads(memory, 2, tensor=2):
        assert states == weights


def ways() -> dict[str, int]:
    """How many weights each optimizer steps whole."""
    model = build()
    optimizers = {
        **{name: each(matrices(model)) for name, each in MATRICES.items()},
        "adam": torch.optim.AdamW(model.parameters(), lr=0.0),
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adagrad": torch.optim.Adagrad(model.parameters()),
        "rprop": torch.optim.Rprop(model.parameters()),
        "asgd": torch.optim.ASGD(model.parameters()),
        "nadam": torch.optim.NAdam(model.parameters()),
        "rmsprop": torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9),
        "fused": torch.optim.AdamW(model.parameters(), fused=True),
        "lamb": Lamb(model.parameters()),
        "muon-still": torch.optim.Muon(matrices(model), lr=0.0),
    }
    return {name: len(stepping_of(each).wholes) for name, each in optimizers.items()}


def test_only_what_is_not_elementwise_is_stepped_whole() -> None:
    """Judged by a trial, also while a schedule holds the learning rate at 0."""
    for found in run_threads(ways, 2, tensor=2):
        assert {name for name, wholes in found.items() if wholes} == {*MATRICES, "muon-still"}
        assert len({wholes for wholes in found.values() if wholes}) == 1


def attributes() -> tuple[bool, bool, bool]:
    """Groups, gradients and parameters are those of before, after a step and after an error in one."""
    model = build()
    optimizer = torch.optim.Muon(matrices(model), lr=0.1)
    execute_pipeline(iter([batch()]), model)
    groups, before = optimizer.param_groups, list(optimizer.param_groups[0]["params"])
    gradients = [each.grad for each in before]
    optimizer.step()
    whole = [
        optimizer.param_groups is groups,
        all(one is other for one, other in zip(groups[0]["params"], before, strict=True)),
        all(one.grad is other for one, other in zip(before, gradients, strict=True)),
    ]
    groups[0]["ns_steps"] = 1000
    with pytest.raises(Exception, match="less than 100"):
        optimizer.step()
    whole[1] &= all(one is other for one, other in zip(groups[0]["params"], before, strict=True))
    whole[2] &= set(optimizer.state) == set(before)
    return whole[0], whole[1], whole[2]


def test_nothing_but_weights_and_states_changes() -> None:
    assert run_threads(attributes, 2, tensor=2) == [(True, True, True)] * 2


def refused(kind: type[Optimizer], zero: bool) -> str:
    model = build()
    optimizer = kind(model.parameters())  # type: ignore[call-arg]  # its own constructor
    wrapped = Zero(model, optimizer) if zero else optimizer
    before = copy.deepcopy(model.chunks.state_dict())
    execute_pipeline(iter([batch()]), model)
    with pytest.raises(UsageError) as caught:
        wrapped.step()
    assert all(torch.equal(each, before[name]) for name, each in model.chunks.state_dict().items())
    return str(caught.value)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Together])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_optimizers_of_all_weights_together(kind: type[Optimizer], layout: Layout) -> None:
    """Refused where a rank has only some of the weights, or steps only some."""
    for told in under(layout, refused, kind, layout[2] > 1):
        assert told.startswith(f"{kind.__name__} computes")
        assert "only some of" in told


def replicas(kind: type[Optimizer]) -> float:
    model = build()
    train(model, kind(most(model)))  # type: ignore[call-arg]  # its own constructor
    return difference(model, serial(kind, most))


def test_replicas_alone_step_them() -> None:
    assert max(run_threads(replicas, 2, Together, data=2)) <= 1e-9


def closure() -> None:
    model = build()
    optimizer = torch.optim.Muon(matrices(model))
    execute_pipeline(iter([batch()]), model)
    with pytest.raises(UsageError, match="takes no closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_closure() -> None:
    run_threads(closure, 2, tensor=2)


@pytest.mark.exhaustive
def test_processes() -> None:
    assert max(run_processes(bare, 2, MATRICES["muon"], matrices, tensor=2)) <= 1e-9
