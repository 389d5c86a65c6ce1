"""Linear layers and classifiers give what nn.Linear gives, forward and backward, whatever the tensor size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import Classifier, ColumnParallelLinear, RowParallelLinear, VocabParallelClassifier
from tests.tensor.ranks import (
    SIZES,
    Place,
    backward,
    joined,
    mine,
    normal,
    on_ranks,
    require_near,
    require_parts,
    seeded,
)

SIZED = pytest.mark.parametrize("size", SIZES)
BIASED = pytest.mark.parametrize("bias", [True, False])


def whole_linear(out_features: int, bias: bool = True) -> nn.Linear:
    linear: nn.Linear = seeded(nn.Linear, 8, out_features, bias, dtype=torch.float64)
    return linear


@SIZED
@BIASED
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 4, 8)], ids=str)
def test_columns(size: int, bias: bool, shape: tuple[int, ...]) -> None:
    native, input = whole_linear(12, bias), normal(*shape)
    output, of_input = backward(native, input)

    def rank() -> None:
        layer = ColumnParallelLinear.from_native_module(native)
        part, gradient = backward(layer, input, mine(normal(*output.shape, seed=9)))
        require_near(part, mine(output))
        require_near(gradient, of_input)
        require_parts(layer, native)

        layer = ColumnParallelLinear.from_native_module(native, gather_output=True)
        whole, gradient = backward(layer, input)
        require_near(whole, output)
        require_near(gradient, of_input)
        require_parts(layer, native)

    on_ranks(size, rank)


@SIZED
@BIASED
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("kind", [RowParallelLinear, Classifier])
def test_rows(size: int, bias: bool, shape: tuple[int, ...], kind: Any) -> None:
    native, input = whole_linear(5, bias), normal(*shape)
    output, of_input = backward(native, input)
    assert of_input is not None

    def rank() -> None:
        for parallel, given, expected in ((True, mine(input), mine(of_input)), (False, input, of_input)):
            layer = kind.from_native_module(native, input_is_parallel=parallel)
            whole, gradient = backward(layer, given)
            require_near(whole, output)
            require_near(gradient, expected)
            require_parts(layer, native)
            if len(shape) == 3:
                require_near(layer(given.transpose(0, 1)).transpose(0, 1).detach(), output)

    on_ranks(size, rank)


@SIZED
def test_a_split_sequence(size: int) -> None:
    """Column and row with the sequence split outside of the pair."""
    up, down = whole_linear(12), seeded(nn.Linear, 12, 8, dtype=torch.float64)
    native = nn.Sequential(up, nn.GELU(), down)
    input = normal(2, 8, 8)
    output, of_input = backward(native, input)
    assert of_input is not None

    def rank() -> None:
        column = ColumnParallelLinear.from_native_module(up, sequence_parallel=True)
        row = RowParallelLinear.from_native_module(down, sequence_parallel=True)
        pair = nn.Sequential(column, nn.GELU(), row)
        part, gradient = backward(pair, mine(input, 1), mine(normal(*output.shape, seed=9), 1))
        require_near(part, mine(output, 1))
        require_near(gradient, mine(of_input, 1))
        require_parts(column, up)
        require_parts(row, down)

    on_ranks(size, rank)


@SIZED
@pytest.mark.parametrize("classes", [1, 5, 8, 13])
def test_a_classifier_of_any_number_of_classes_split_by_class(size: int, classes: int) -> None:
    native, input = whole_linear(classes), normal(3, 8)
    output, of_input = backward(native, input)

    def rank() -> None:
        layer = VocabParallelClassifier.from_native_module(native, gather_output=True)
        whole, gradient = backward(layer, input)
        require_near(whole, output)
        require_near(gradient, of_input)
        require_parts(layer, native)

        logits = joined(VocabParallelClassifier.from_native_module(native)(input).detach())
        require_near(logits[:, :classes], output)
        assert bool((logits[:, classes:] == -torch.inf).all())

    on_ranks(size, rank)


@SIZED
def test_a_classifier_shares_a_weight(size: int) -> None:
    def rank() -> tuple[bool, int]:
        group = current_context().tensor
        weight = nn.Parameter(normal(-(-13 // group.size), 8))
        layer = VocabParallelClassifier(8, 13, bias=False, weight=weight, dtype=torch.float64)
        before = weight.detach().clone()
        layer.reset_parameters()
        assert torch.equal(weight, before)
        layer(normal(3, 8))[:, :1].sum().backward()
        with pytest.raises(UsageError, match="needs a weight of shape"):
            Classifier(8, 13, weight=nn.Parameter(normal(13, 9)))
        return layer.weight is weight, len(list(layer.parameters()))

    assert set(on_ranks(size, rank)) == {(True, 1)}


@SIZED
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
@pytest.mark.parametrize("autocast", [False, True])
def test_complex_layers(size: int, deferring: bool, autocast: bool) -> None:
    """Gradients are conjugates of what the forward multiplied with; autocast leaves complex numbers as they are."""
    up, down = (seeded(nn.Linear, *sizes, dtype=torch.complex128) for sizes in ((8, 12), (12, 8)))
    native = nn.Sequential(up, down)
    input, gradient = (torch.complex(normal(2, 4, 8, seed=seed), normal(2, 4, 8, seed=seed + 1)) for seed in (0, 2))
    output, of_input = backward(native, input, gradient)

    def rank() -> None:
        column = ColumnParallelLinear.from_native_module(up, gather_output=True)
        pair = nn.Sequential(column, RowParallelLinear.from_native_module(down, input_is_parallel=False))
        if deferring:
            defer_weight_gradients(pair)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            mine, gradient_of_input = backward(pair, input.conj().resolve_conj().conj(), gradient)
        require_near(mine, output)
        require_near(gradient_of_input, of_input)
        require_parts(pair[0], native[0])
        require_parts(pair[1], native[1])

    on_ranks(size, rank)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "input"])
def test_frozen_parameters_and_inputs(frozen: str) -> None:
    native, input = whole_linear(8), normal(3, 8).requires_grad_(frozen != "input")
    native.weight.requires_grad_(frozen not in ("weight", "both"))
    native.bias.requires_grad_(frozen not in ("bias", "both"))

    def rank() -> None:
        for layer in (
            ColumnParallelLinear.from_native_module(native, gather_output=True),
            RowParallelLinear.from_native_module(native, input_is_parallel=False),
        ):
            assert layer.weight.requires_grad == native.weight.requires_grad
            mine = input.detach().clone().requires_grad_(input.requires_grad)
            output = layer(mine)
            assert output.requires_grad
            output.sum().backward()
            assert (mine.grad is None) == (frozen == "input")
            for name in ("weight", "bias"):
                parameter = layer.get_parameter(name)
                assert (parameter.grad is None) == (not parameter.requires_grad)

    on_ranks(2, rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("deferring", [False, True], ids=["plain", "deferring"])
def test_lower_precisions_and_autocast(dtype: torch.dtype, deferring: bool) -> None:
    """The dtypes are those of nn.Linear, the values near."""
    up, down = seeded(nn.Linear, 8, 12), seeded(nn.Linear, 12, 8)
    native = nn.Sequential(up, down)
    input = normal(2, 4, 8, dtype=torch.float32)

    def run(module: nn.Module) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return backward(module, input)

    output, of_input = run(native)
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-5

    def rank() -> None:
        pair = nn.Sequential(ColumnParallelLinear.from_native_module(up), RowParallelLinear.from_native_module(down))
        if deferring:
            defer_weight_gradients(pair)
        mine, gradient = run(pair)
        assert mine.dtype is output.dtype
        require_near(mine, output, tolerance)
        require_near(gradient, of_input, tolerance)
        require_parts(pair[0], native[0], tolerance)
        require_parts(pair[1], native[1], tolerance)

    on_ranks(2, rank)


def test_what_does_not_fit_is_refused() -> None:
    place: Any = Place(0, 4)
    with pytest.raises(UsageError, match="ColumnParallelLinear cannot split out_features=6 over 4"):
        ColumnParallelLinear(8, 6, group=place)
    with pytest.raises(UsageError, match="RowParallelLinear cannot split in_features=6 over 4"):
        RowParallelLinear(6, 8, group=place)
    with pytest.raises(UsageError, match="Classifier cannot split in_features=6 over 4"):
        Classifier(6, 8, group=place)
    with pytest.raises(UsageError, match=r"takes 2 features, got a shape of .*input_is_parallel=False"):
        RowParallelLinear(8, 8, group=place)(torch.ones(3, 8))
    with pytest.raises(UsageError, match=r"needs \(batch, sequence, hidden\)"):
        ColumnParallelLinear(8, 8, sequence_parallel=True, group=place)(torch.ones(3, 8))
    with pytest.raises(UsageError, match="pad its 3 entries to a multiple of 4"):
        RowParallelLinear(8, 8, sequence_parallel=True, group=place)(torch.ones(2, 3, 2))
    with pytest.raises(UsageError, match=r"made from an nn\.Linear, got Conv2d"):
        ColumnParallelLinear.from_native_module(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]


def test_a_graph_of_the_backward_is_refused() -> None:
    def rank() -> None:
        output = ColumnParallelLinear(8, 8, dtype=torch.float64)(normal(3, 8).requires_grad_())
        with pytest.raises(UsageError, match="create_graph"):
            output.sum().backward(create_graph=True)

    on_ranks(2, rank)
