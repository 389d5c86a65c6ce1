"""Watching the calls of modules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow.engine.stages.calls import watched
from tests.stages.models import WIDTH, Block


class Doubling:
    """Doubles what the watched modules return."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.seen.append(name)
        return call(*arguments, **keywords) * 2


def test_calls_are_watched_in_their_own_thread_and_only_meanwhile() -> None:
    module, values, watcher = Block(), torch.ones(2, WIDTH), Doubling()
    expected: Tensor = module(values)
    with watched({"block": module, "norm": module.norm}, watcher.called), ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(module, values).result(), expected)
        assert not watcher.seen
        assert not torch.equal(module(values), expected)
        assert watcher.seen == ["block", "norm"]
        assert isinstance(module.norm, nn.LayerNorm)
        assert type(module).__name__ == "Block"
    assert torch.equal(module(values), expected)
    assert (type(module), type(module.norm)) == (Block, nn.LayerNorm)
    pickle.dumps(module)


def test_an_error_leaves_the_modules_as_they_were() -> None:
    module = Block()
    with pytest.raises(RuntimeError), watched({"block": module}, Doubling().called):
        module(torch.ones(2, WIDTH + 1))
    assert type(module) is Block


class Guarded(nn.Module):
    """Its subclasses are counted."""

    made = 0

    def __init_subclass__(cls) -> None:
        Guarded.made += 1


def test_a_watched_class_is_no_subclass_that_anyone_is_told_of() -> None:
    with watched({"guarded": Guarded()}, Doubling().called):
        assert Guarded.made == 0
