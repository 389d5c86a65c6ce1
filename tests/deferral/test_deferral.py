"""Layers that defer give the gradients that torch's own give, now or later; what cannot defer is left as it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.deferral.products import run_products
from tests.deferral.halves import (
    CASES,
    TIED,
    Case,
    Operations,
    Tied,
    at_once,
    collecting,
    conv,
    embedding,
    gradients,
    gradients_of,
    halves,
    linear,
    normal,
    products_of,
    require_near,
    require_same_bits,
    whole,
)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradients_are_those_of_the_plain_layer(case: Case) -> None:
    module, input = case.module(torch.float64), case.inputs(torch.float64)
    plain, mine = gradients_of(whole, module, input), gradients_of(halves, module, input)
    require_near(mine, plain)
    for name, gradient in mine.items():
        assert gradient.stride() == plain[name].stride(), name


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch says it once a process
@pytest.mark.some(22)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_halves_have_the_bits_of_the_whole_and_of_the_plain_layer(case: Case, dtype: torch.dtype) -> None:
    module, input = case.module(dtype), case.inputs(dtype)
    plain = gradients_of(whole, module, input)
    require_same_bits(gradients_of(halves, module, input), plain)
    require_same_bits(gradients_of(at_once, module, input), plain)


@pytest.mark.parametrize(
    ("case", "work"),
    [(linear("first", lambda: normal(3, 5)), "mm"), (conv(2, "first"), "convolution_backward")],
    ids=["linear", "conv2d"],
)
def test_each_half_does_its_own_work_alone(case: Case, work: str) -> None:
    """One product in I, for an input that wants a gradient, and one in W."""
    module = case.module(torch.float64)
    deferral = defer_weight_gradients(module)
    for wants in (True, False):
        output = module(case.input().requires_grad_(wants))
        with collecting(deferral) as queue, Operations() as first:
            output.sum().backward()
        with Operations() as second:
            run_products(queue)
        assert first.names.count(work) == wants
        assert second.names.count(work) + second.names.count("addmm_") == 1


def test_a_tied_weight_and_a_layer_used_twice() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        module, input = TIED.module(dtype), TIED.inputs(dtype)
        plain = gradients_of(whole, module, input)
        require_same_bits(gradients_of(halves, module, input), plain)
        require_same_bits(gradients_of(at_once, module, input), plain)


def test_what_was_done_is_told() -> None:
    deferral = defer_weight_gradients(Tied())
    assert deferral.deferred == {"words.weight": 35, "twice.weight": 25, "twice.bias": 5}
    assert deferral.remaining == {"norm.weight": 5, "norm.bias": 5}
    told = "65 of 75 elements of weight gradients are deferred (3 parameters); not deferred: norm.weight, norm.bias"
    assert str(deferral) == told


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def with_own_forward() -> nn.Module:
    layer = nn.Linear(5, 4)
    layer.forward = lambda input: functional.linear(input, layer.weight, layer.bias).tanh()  # type: ignore[method-assign]
    return layer


LEFT = [
    Case("subclass", lambda: Doubled(5, 4), lambda: normal(3, 5)),
    Case("own-forward", with_own_forward, lambda: normal(3, 5)),
    Case("parametrized", lambda: parametrizations.weight_norm(nn.Linear(5, 4)), lambda: normal(3, 5)),
    Case("complex", lambda: nn.Linear(5, 4, dtype=torch.complex128), lambda: normal(3, 5) + 0j),
    embedding("sparse", sparse=True),
    embedding("max-norm", max_norm=1.0),
]


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_what_cannot_defer_is_left_as_it_is(case: Case) -> None:
    module = case.make() if case.name == "complex" else case.make().double()
    deferral = defer_weight_gradients(module)
    assert deferral.deferred == {}
    assert deferral.remaining.keys() == dict(module.named_parameters()).keys()
    with collecting(deferral) as queue:
        module(case.input()).abs().sum().backward()
    assert not queue
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("case", [linear("complex", lambda: normal(3, 5)), conv(2, "complex")], ids=str)
def test_a_layer_that_became_complex_has_the_gradients_of_torchs(case: Case) -> None:
    plain, mine = case.module(torch.float64), case.module(torch.float64)
    defer_weight_gradients(mine)
    found = []
    for module in (plain, mine):
        module.to(torch.complex128)
        for parameter in module.parameters():
            parameter.data *= 1 + 0.5j
        real, imaginary = case.input(), case.input().flip(0)
        input = torch.complex(real, imaginary).requires_grad_()
        output = module(input)
        output.backward(torch.complex(output.detach().imag, output.detach().real))
        found.append(gradients(module, input))
    torch.testing.assert_close(found[1], found[0])


def test_a_frozen_weight_has_no_product_and_a_frozen_bias_no_gradient() -> None:
    for frozen in ("weight", "bias"):
        module = nn.Linear(5, 4)
        module.get_parameter(frozen).requires_grad_(False)
        deferral, input = defer_weight_gradients(module), normal(3, 5, dtype=torch.float32).requires_grad_()
        assert list(deferral.deferred) == (["weight"] if frozen == "bias" else [])
        with collecting(deferral) as queue:
            module(input).sum().backward()
        assert len(queue) == (frozen == "bias")
        run_products(queue)
        assert gradients(module, input).keys() == {"weight", "bias", "input"} - {frozen}


def test_a_layer_changed_afterwards_is_left_to_torch() -> None:
    module = nn.Linear(5, 4)
    deferral = defer_weight_gradients(module)
    parametrizations.weight_norm(module)
    assert defer_weight_gradients(module).deferred == {}
    with collecting(deferral) as queue:
        module(normal(3, 5, dtype=torch.float32)).sum().backward()
    assert not queue
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_without_gradients_nothing_is_kept() -> None:
    module = TIED.module(torch.float64)
    defer_weight_gradients(module)
    with torch.no_grad():
        assert not module(TIED.input()).requires_grad


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("conv2d-last", "embedding-plain")], ids=str)
def test_it_looks_like_the_plain_layer_and_is_copied_as_it(case: Case) -> None:
    plain = case.module(torch.float64)
    module = copy.deepcopy(plain)
    defer_weight_gradients(module)
    assert isinstance(module, type(plain))
    assert repr(module) == repr(plain)
    assert module.state_dict().keys() == plain.state_dict().keys()
    for copied in (
        copy.deepcopy(module),
        copy.copy(module),
        *(pickle.loads(pickle.dumps(module, each)) for each in range(2, 6)),
    ):
        assert type(copied) is type(plain)
        assert "deferral" not in vars(copied)
        input = case.inputs(torch.float64)
        assert torch.equal(copied(input), plain(input))


def test_calling_again_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    deferral = defer_weight_gradients(module)
    assert defer_weight_gradients(module) is deferral
    assert defer_weight_gradients(module[0]) is not deferral


def test_a_layer_of_two_stages_belongs_to_the_last() -> None:
    """Both stages have its whole gradient; the first one's part of it is computed at once."""
    shared = nn.Linear(5, 5)
    stages = [nn.Sequential(nn.Linear(5, 5), shared), nn.Sequential(shared, nn.Linear(5, 5))]
    plain, input = copy.deepcopy(stages), normal(3, 5, dtype=torch.float32)
    deferrals = [defer_weight_gradients(stage) for stage in stages]
    for stage, deferral, products in zip(stages, deferrals, (1, 2), strict=True):
        with collecting(deferral) as queue:
            stage(input).sum().backward()
        assert len(products_of(queue)) == products
        run_products(queue)
    for stage in plain:
        stage(input).sum().backward()
    for mine, theirs in zip(stages, plain, strict=True):
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Linear(3, 4, bias=False), nn.Embedding(5, 4)], ids=str)
def test_outputs_may_be_written_to_in_place(layer: nn.Module) -> None:
    """As those of the plain layers may, whatever the number of dimensions."""
    is_words, double = isinstance(layer, nn.Embedding), layer.double()
    inputs = [torch.arange(4).reshape(shape) % 5 for shape in ((4,), (2, 2), (1, 2, 2))]
    for words in inputs:
        input = words if is_words else words.unsqueeze(-1).double().repeat(*[1] * words.dim(), 3)
        found: list[dict[str, Tensor]] = []
        for module in (copy.deepcopy(double), copy.deepcopy(double)):
            if found:
                defer_weight_gradients(module)
            functional.relu_(module(input).mul_(2).add_(1)).square().sum().backward()
            found.append({name: each.grad for name, each in module.named_parameters() if each.grad is not None})
        require_near(found[1], found[0])
