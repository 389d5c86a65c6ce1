"""Models whose classes define what happens to names that they do not have."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.testing import run_threads
from tests.tensor.ranks import gradients
from tests.tensor.small import GroupedAttention, LanguageModel, LlamaBlock, batch
from tests.tensor.test_rules import plain, require_equal


class Config(dict[str, Any]):
    """Its entries are also its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class Model(LanguageModel):
    """It looks in its config for all names that nn.Module does not have, and has a property of its parameters."""

    def __init__(self) -> None:
        super().__init__(Block, tied=False)
        self.settings = Config(layers=2)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "get", "config", "is_transposed", "has_bias", "_orig_mod"):
            return self.settings[name]
        return super().__getattr__(name)

    @property
    def first(self) -> Tensor:
        return next(each for each in self.parameters() if each.dim() > 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        assert self.settings.get("layers") == 2
        return super().forward(input_ids, labels)


class Attention(GroupedAttention):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(heads=4)

    @property
    def largest(self) -> Tensor:
        return next(each for each in self.parameters() if each.dim() > 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.get("heads") == 4 or self.largest is not None
        return super().forward(x)


class Block(LlamaBlock):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


def test_errors_of_foreign_attributes_are_not_raised() -> None:
    """A `__getattr__` may raise a KeyError, and a property any error."""
    module = Model().double()
    loss, expected = plain(module)

    def rank() -> tuple[float, dict[str, Tensor], int]:
        model = Pipeline.from_module(
            copy.deepcopy(module),
            make_schedule("1f1b", ranks=2 // current_context().tensor_size, microbatches=2),
            batch(),
        )
        output = execute_pipeline(iter([batch()]), model, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item(), gradients(model), len(splits_of(model))

    for tensor in (1, 2):
        results = run_threads(rank, 2, tensor=tensor)
        assert {name for _, found, _ in results for name in found} == expected.keys()
        for its, found, splits in results:
            assert abs(its - loss) <= 1e-9
            require_equal(found, {name: expected[name] for name in found})
            assert (splits > 12) is (tensor == 2)
