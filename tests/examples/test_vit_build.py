"""Which rank makes what of a vision transformer, and that it trains the same in every layout."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeflow
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import Split, splits_of
from pipeflow.testing import run_threads
from pipeflow.training import Hook, Step, Trainer, make_engine
from tests.covering import some_rows
from tests.examples.test_gpt3_build import at, whole_sizes
from vit.build import build_pipeline_vit, build_stage, vit_base_patch16_224
from vit.model import PipelineVisionTransformer

SIZES: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "dim": 16,
    "num_heads": 4,
    "num_classes": 5,
    "dropout": 0.0,
    "dtype": torch.float64,
    "seed": 3,
}
Weights = dict[str, Tensor]


def stages_of(model: nn.Module) -> list[PipelineVisionTransformer]:
    stages = list(model) if isinstance(model, nn.ModuleList) else [model]
    assert all(isinstance(stage, PipelineVisionTransformer) for stage in stages)
    return stages  # type: ignore[return-value]  # as was just seen


def test_every_layer_is_on_one_stage_and_the_ends_are_at_the_ends() -> None:
    for chunks in (1, 2):
        ranks = [
            stages_of(at(rank, WorldLayout(pipeline=2), build_pipeline_vit, 8, chunks, "meta", **SIZES))
            for rank in (0, 1)
        ]
        in_order = [ranks[rank][chunk] for chunk in range(chunks) for rank in (0, 1)]
        names = [name for stage in in_order for name, _ in stage.layers.named_children()]
        assert names == ["embedding", *map(str, range(8)), "norm", "head"]


def test_without_a_launch_the_whole_model_is_built() -> None:
    model = build_pipeline_vit(2, **SIZES)
    assert model(torch.randn(3, 1, 8, 8, dtype=torch.float64)).shape == (3, 5)


def test_tensor_ranks_have_a_part_of_every_layer_of_86_million_weights() -> None:
    """Over 2 x 4 ranks. What is whole on each is the embedding, the norms, and the bias of what is summed."""
    layout, total, whole = WorldLayout(pipeline=2, tensor=4), 0, set()
    for first in (0, 4):
        model = at(first, layout, vit_base_patch16_224, device="meta")
        total += sum(whole_sizes(model).values())
        splits = splits_of(model)
        whole |= {name for name, parameter in model.layers.named_parameters() if id(parameter) not in splits}
    assert total == 86_567_656
    assert {re.sub(r"^\d+\.", "", name) for name in whole} == {
        *(f"embedding.patches.{name}" for name in ("class_token", "positions", "projection.weight", "projection.bias")),
        *(f"{name}.{kind}" for name in ("norm_1", "norm_2", "norm") for kind in ("weight", "bias")),
        *("attention.output.bias", "narrow.bias", "head.classifier.bias"),
    }


STEPS = 20
CONFIG = {"NUM_MICRO_BATCHES": 2, "clip_grad_norm": 1.0}
Result = tuple[list[float], Weights, dict[str, Split]]


class Losses(Hook):
    """The loss of every step."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.each.append(float(step.loss))


def batches(context: pipeflow.Context) -> list[tuple[Tensor, Tensor]]:
    """Batches of 8, of which each replica takes its part."""
    generator = torch.Generator().manual_seed(0)
    each = []
    for _ in range(STEPS):
        images = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (8,), generator=generator)
        parts = (whole.tensor_split(context.data_size)[context.data_rank] for whole in (images, labels))
        each.append((*parts,))
    return each  # type: ignore[return-value]  # pairs


def train(chunks: int, options: dict[str, Any]) -> Result:
    """By a Trainer: losses, and the weights by their names in the whole model, and how they are split."""
    model, losses = build_pipeline_vit(4, chunks, **{**SIZES, **options}), Losses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = make_engine(model, optimizer, nn.CrossEntropyLoss(), config=CONFIG)
    Trainer(engine, [losses]).fit(batches(current_context()), 1)
    splits, weights, places = splits_of(model), {}, {}
    for stage in stages_of(model):
        for name, parameter in stage.named_parameters():
            weights[name] = parameter.detach()
            if id(parameter) in splits:
                places[name] = splits[id(parameter)]
    return losses.each, weights, places


def train_in_one_piece(options: dict[str, Any]) -> tuple[list[float], Weights]:
    """By torch alone."""
    model = build_stage(depth=4, **{**SIZES, **options})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for images, labels in batches(current_context()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CONFIG["clip_grad_norm"])
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, dict(model.state_dict())


LAYOUTS = {
    "single": (WorldLayout(), 1),
    "2 replicas": (WorldLayout(data=2), 1),
    "pipeline": (WorldLayout(pipeline=2), 1),
    "pipeline and tensor": (WorldLayout(pipeline=2, tensor=2), 1),
    "pipeline, interleaved": (WorldLayout(pipeline=2), 2),
    "pipeline and tensor, interleaved": (WorldLayout(pipeline=2, tensor=2), 2),
    "all": (WorldLayout(data=2, pipeline=2, tensor=2), 1),
}


OPTIONS = [{}, {"init_method": "jax", "checkpoint": True, "representation_size": 8}]
FEWER = [*((name, OPTIONS[0]) for name in LAYOUTS), *((name, OPTIONS[1]) for name in [*LAYOUTS][-2:])]


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "options"), some_rows(product(LAYOUTS, OPTIONS), FEWER), ids=str)
@pytest.mark.slow
def test_every_layout_trains_the_same_model(name: str, options: dict[str, Any]) -> None:
    """Losses and weights over 20 steps of a Trainer, against plain torch."""
    layout, chunks = LAYOUTS[name]
    [(losses, expected)] = run_threads(train_in_one_piece, 1, options)
    ranks = run_threads(train, layout.world_size, chunks, options, tensor=layout.tensor, data=layout.data)
    seen = set()
    for rank, (found, weights, splits) in enumerate(ranks):
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
        for each, weight in weights.items():
            whole, split = expected[each], splits.get(each)
            mine = whole if split is None else whole.chunk(layout.tensor, split.dim)[rank % layout.tensor]
            torch.testing.assert_close(weight, mine, rtol=0, atol=1e-9, msg=f"{each} of rank {rank}")
        seen |= weights.keys()
    assert seen == expected.keys()
