"""What a configuration may name."""

from __future__ import annotations

import pytest
from torch import nn

from pipeflow import UsageError
from pipeflow.training import Registry


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

    with pytest.raises(UsageError, match=r"layers has another 'Linear' already, of torch.nn.modules.linear"):
        layers.register_module(Linear)
    assert layers.get_module("Linear") is nn.Linear
