"""Models from parts under ColossalAI's names: cut as its tutorials say, with names that no layout changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule, partition_balanced, partition_uniform
from pipeflow.colossalai.builder import build_pipeline_model, build_pipeline_model_from_cfg
from pipeflow.colossalai.registry import LAYERS, MODELS
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import RankError, run_threads
from pipeflow.training import disable_existing_loggers, makers

WIDE = (3, 40, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3)


@LAYERS.register_module
class Residual(nn.Module):
    """An inner width that differs from layer to layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((width, inner), (inner, width)))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return result


@MODELS.register_module
class Halved(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / 2


CONFIG: list[dict[str, Any]] = [
    *({"type": "Residual", "width": 4, "inner": inner} for inner in WIDE[:-2]),
    {"type": "Halved"},
    {"type": "Linear", "in_features": 4, "out_features": 2, "dtype": torch.float64},
]


def same_weights(module: nn.Module) -> nn.Module:
    """Values that follow from the names, whoever made the module."""
    for name, parameter in module.named_parameters():
        index = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
        nn.init.constant_(parameter, 0.0).data.add_(torch.sin(index + len(name) + int(name.split(".")[0])) / 4)
    return module


def batch() -> tuple[Tensor, Tensor]:
    index = torch.arange(32, dtype=torch.float64)
    return index.view(8, 4).sin(), index[:16].view(8, 2).cos()


def chunks_of(built: nn.Module) -> nn.ModuleList:
    return built if isinstance(built, nn.ModuleList) else nn.ModuleList([built])


def train(num_chunks: int, method: str | None) -> tuple[list[list[str]], float, dict[str, Any]]:
    """Of this rank: the layers of each chunk, the loss, and the gradients by their names."""
    if method is None:
        built = build_pipeline_model(whole(), num_chunks)
    else:
        built = build_pipeline_model_from_cfg(CONFIG, num_chunks, method)
    assert isinstance(built, nn.ModuleList) == (num_chunks > 1)
    chunks = chunks_of(built)
    for chunk in chunks:
        same_weights(chunk)
    name, options = ("1f1b", {}) if num_chunks == 1 else ("interleaved-1f1b", {"chunks": num_chunks})
    schedule = make_schedule(name, ranks=current_context().pipeline_size, microbatches=4, **options)
    pipeline = Pipeline(built, schedule, criterion=nn.functional.mse_loss)
    loss = execute_pipeline(iter([batch()]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    gradients = {
        name: parameter.grad.numpy()
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    return [[name for name, _ in chunk.named_children()] for chunk in chunks], loss.item(), gradients


def whole() -> nn.Sequential:
    return nn.Sequential(*(make() for make in makers(CONFIG, LAYERS, MODELS)))


SIZES = [sum(parameter.numel() for parameter in layer.parameters()) for layer in whole()]


@pytest.mark.parametrize("method", [None, "layer", "parameter"])
@pytest.mark.parametrize(("ranks", "num_chunks"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_a_model_from_parts_trains_as_the_whole_does(ranks: int, num_chunks: int, method: str | None) -> None:
    model = same_weights(whole())
    inputs, labels = batch()
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    balanced = method == "parameter"
    parts = (
        partition_balanced(SIZES, ranks, num_chunks) if balanced else partition_uniform(len(SIZES), ranks, num_chunks)
    )
    keys: set[str] = set()
    for rank, (names, found, gradients) in enumerate(run_threads(train, ranks, num_chunks, method)):
        assert names == [[str(index) for index in range(*part)] for part in parts[rank]]
        assert abs(found - loss.item()) <= 1e-12
        assert not keys & set(gradients)
        keys |= set(gradients)
        for name, gradient in gradients.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=0, atol=1e-12)
    assert keys == set(model.state_dict())


def test_verbose_says_how_the_layers_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pipeflow")
    disable_existing_loggers()
    caplog.set_level(logging.INFO, "pipeflow")
    logger.addHandler(caplog.handler)
    try:
        run_threads(build_pipeline_model_from_cfg, 2, CONFIG, 2, "layer", True)
    finally:
        logger.removeHandler(caplog.handler)
    told = {record.getMessage() for record in caplog.records if "of each stage" in record.getMessage()}
    assert told == {
        "the layers (start, end) of each stage: 0 on rank 0: (0, 3); 1 on rank 1: (3, 6); 2 on rank 0: (6, 9); "
        "3 on rank 1: (9, 12)"
    }


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            CONFIG,
            {"partition_method": "parameters"},
            'partition_method must be "layer" or "parameter", got \'parameters\'',
        ),
        (CONFIG[:1], {"num_chunks": 2}, "1 layers cannot fill 2 stages"),
        (CONFIG[:3], {"num_chunks": 2, "partition_method": "layer"}, "3 layers do not divide into 2 chunks"),
        ({"type": "Residual"}, {}, "a list of dicts"),
        ([{"type": "Residuals"}], {}, "LAYERS has no 'Residuals': did you mean 'Residual'"),
        ([{"type": "Residual", "width": 4}], {}, "layer 0, 'Residual' of LAYERS: missing a required argument: 'inner'"),
    ],
)
def test_bad_configurations_are_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_pipeline_model_from_cfg(config, **options)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(RankError, match="2 layers cannot fill 4 stages"):
        run_threads(build_pipeline_model, 2, nn.Sequential(nn.Tanh(), nn.Tanh()), 2)
