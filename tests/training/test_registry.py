"""What a configuration may name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeflow import UsageError
from pipeflow.training import Registry, makers


def test_names_lead_to_what_was_registered() -> None:
    layers = Registry("layers")

    @layers.register_module
    class Block(nn.Module):
        pass

    assert layers.get_module("Block") is Block
    assert layers.has("Block")
    assert layers.register_module(Block) is Block
    assert not layers.has("Blocks")
    with pytest.raises(UsageError, match="layers has no 'Blocks': did you mean 'Block'"):
        layers.get_module("Blocks")


def test_two_of_a_name_are_refused() -> None:
    layers = Registry("layers")
    with pytest.raises(UsageError, match="layers has no 'Linear': register it with register_module"):
        layers.get_module("Linear")
    layers.register_module(nn.Linear)

    class Linear(nn.Module):
        pass

    with pytest.raises(UsageError, match=r"layers already has another 'Linear', from torch.nn.modules.linear"):
        layers.register_module(Linear)
    assert layers.get_module("Linear") is nn.Linear


def test_classes_of_a_library_are_found_behind_those_that_were_registered() -> None:
    layers = Registry("layers", [nn])
    assert layers.get_module("Linear") is nn.Linear
    assert not layers.has("init")  # a module of it, no class

    class Linear(nn.Module):
        pass

    assert layers.register_module(Linear) is layers.get_module("Linear") is Linear


def test_a_specification_names_a_class_and_its_arguments() -> None:
    first, second = Registry("first", [nn]), Registry("second")
    second.register_module(complex)
    specification = {"type": "Linear", "in_features": 2, "out_features": 3}
    linear, number = makers([specification, {"type": "complex", "imag": 1}], first, second)
    assert linear().weight.shape == (3, 2)
    assert linear() is not linear()
    assert number() == 1j
    assert "type" in specification


@pytest.mark.parametrize(
    ("specifications", "message"),
    [
        ({"type": "Linear"}, "a list of dicts such as .*, got dict"),
        ([{"in_features": 2}], r"layer 0 must be a dict whose \"type\" is a name, .* got \{'in_features': 2\}"),
        ([{"type": "Tanh"}, nn.Tanh()], "layer 1 must be a dict"),
        ([{"type": nn.Tanh}], "layer 0 must be a dict whose"),
        ([{"type": "Tanhh"}], "layers has no 'Tanhh': did you mean 'Tanh'"),
        (
            [{"type": "Linear", "in_features": 2}],
            "layer 0, 'Linear' of layers: missing a required argument: 'out_features'",
        ),
        ([{"type": "Dropout", "width": 2}], "layer 0, 'Dropout' of layers: got an unexpected keyword argument 'width'"),
    ],
)
def test_bad_specifications_are_refused(specifications: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        makers(specifications, Registry("layers", [nn]))
