"""Layers on a grid of tensor ranks, beside stock layers; what ranks receive; and what has no form there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import UsageError
from pipeflow.engine.parallel.context import context_if_launched, current_context
from pipeflow.engine.parallel.grid import GridGroups
from pipeflow.engine.parallel.sharding import Split, partial_in, splits_of
from pipeflow.engine.parallel.transport.protocol import Group, Work
from pipeflow.engine.tensor.layer import Membership, TensorLayer, cut
from pipeflow.engine.tensor.random import draw_part_, manual_seed
from pipeflow.engine.tensor.regions import gathered
from pipeflow.engine.tensor.stepping import tried, watch
from pipeflow.optim import Lamb
from pipeflow.tensor import (
    Classifier,
    ColumnParallelLinear,
    CrossEntropy,
    Dropout,
    HiddenParallelEmbedding,
    LayerNorm,
    PatchEmbedding,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelEmbedding,
    shard,
)
from pipeflow.testing import run_threads
from tests.tensor.ranks import indices, normal, require_near, seeded
from tests.training.grids import GRIDS

SAMPLES, LENGTH, WIDTH, WIDER = 8, 3, 8, 16
MODES = pytest.mark.parametrize("mode", GRIDS)


def samples(whole: Tensor) -> Tensor:
    """This rank's samples."""
    context = current_context()
    return whole.chunk(context.layout.sample_parts)[context.layout.sample_part(context.rank)]


def features(whole: Tensor) -> Tensor:
    grid = current_context().grid
    assert grid is not None
    return whole.chunk(grid.grid.side, -1)[grid.features.rank]


def block(whole: Tensor) -> Tensor:
    return features(samples(whole)).contiguous()


def beside(
    native: nn.Module,
    own: Callable[[nn.Module], nn.Module],
    input: Tensor,
    divide: Callable[[Tensor], Tensor],
    tolerance: float = 1e-12,
) -> None:
    """The output, the gradient of the input and those of all parameters are this rank's blocks of the stock layers'.
    `divide` gives this rank's part of an output; inputs that are indices are divided by samples alone.
    """
    context, mine, is_float = current_context(), own(native), input.is_floating_point()
    whole = input.clone().requires_grad_(is_float)
    expected = native(whole)
    upwards = normal(*expected.shape, seed=5)
    gradients = torch.autograd.grad(expected, [*([whole] if is_float else []), *native.parameters()], upwards)
    part = (block(input) if is_float and input.dim() == 3 else samples(input)).clone().requires_grad_(is_float)
    output = mine(part)
    require_near(output.detach(), divide(expected.detach()), tolerance)
    output.backward(divide(upwards))
    if is_float and input.dim() == 3:
        require_near(part.grad, block(gradients[0]), tolerance)
    for parameter in partial_in(mine):
        assert parameter.grad is not None
        context.tensor.all_reduce(parameter.grad).wait()
    splits = splits_of(mine)
    for parameter, its in zip(
        mine.parameters(), gradients[len(gradients) - len([*native.parameters()]) :], strict=True
    ):
        assert parameter.grad is not None
        context.depth.all_reduce(parameter.grad).wait()
        require_near(parameter.grad, cut(its, splits.get(id(parameter)), context.tensor), tolerance)


def on(mode: str, *arguments: Any) -> None:
    run_threads(beside, GRIDS[mode]["tensor"], *arguments, **GRIDS[mode])


def parts_of_pair(native: nn.Module) -> nn.Module:
    assert isinstance(native, nn.Sequential)
    column = ColumnParallelLinear.from_native_module(native[0])  # type: ignore[arg-type]  # an nn.Linear
    return nn.Sequential(column, nn.GELU(), RowParallelLinear.from_native_module(native[2]))  # type: ignore[arg-type]


@MODES
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_of_linear_layers(mode: str, bias: bool) -> None:
    native = nn.Sequential(nn.Linear(WIDTH, WIDER, bias), nn.GELU(), nn.Linear(WIDER, WIDTH, bias)).double()
    on(mode, native, parts_of_pair, normal(SAMPLES, LENGTH, WIDTH), block)


@MODES
def test_layer_norm(mode: str) -> None:
    """Of features far from 0, whose squares would cancel."""
    native = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(native.weight)
    on(mode, native, LayerNorm.from_native_module, 1e4 + normal(SAMPLES, LENGTH, WIDTH), block, 1e-9)


@MODES
@pytest.mark.parametrize("rows", [13, 16])
@pytest.mark.parametrize("kind", [VocabParallelEmbedding, HiddenParallelEmbedding])
def test_embeddings(mode: str, kind: Any, rows: int) -> None:
    native = nn.Embedding(rows, WIDTH, padding_idx=rows - 1).double()
    on(mode, native, kind.from_native_module, indices(SAMPLES, LENGTH, below=rows), block)


@MODES
def test_positions_that_all_samples_share(mode: str) -> None:
    """Their gradient is the sum over all samples."""

    def rank() -> None:
        table = HiddenParallelEmbedding.from_native_module(seeded(nn.Embedding, 5, WIDTH).double())
        upwards = normal(SAMPLES, LENGTH, WIDTH, seed=5)
        table(torch.arange(LENGTH)[None]).expand(len(samples(upwards)), -1, -1).backward(block(upwards))
        assert table.weight.grad is not None
        current_context().depth.all_reduce(table.weight.grad).wait()
        whole = functional.pad(upwards.sum(0), (0, 0, 0, 5 - LENGTH))
        require_near(table.weight.grad, cut(whole, table.splits()["weight"], current_context().tensor))

    run_threads(rank, GRIDS[mode]["tensor"], **GRIDS[mode])


class _Stock(nn.Module):
    """The patch embedding of one rank, with the parameters in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PatchEmbedding(4, 2, 3, WIDTH, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.inner(images)
        return tokens


@MODES
def test_patch_embedding(mode: str) -> None:
    native = seeded(_Stock)  # made before the launch, so it is whole

    def own(native: nn.Module) -> nn.Module:
        mine = PatchEmbedding(4, 2, 3, WIDTH, dtype=torch.float64)
        mine.load_state_dict(native.inner.state_dict())  # type: ignore[union-attr]  # a module
        return mine

    on(mode, native, own, normal(SAMPLES, 3, 4, 4), block)


@MODES
def test_a_classifier_has_all_classes_of_its_samples(mode: str) -> None:
    on(mode, nn.Linear(WIDTH, 5).double(), Classifier.from_native_module, normal(SAMPLES, LENGTH, WIDTH), samples)


@MODES
@pytest.mark.parametrize("gather_output", [False, True])
def test_a_classifier_of_a_vocabulary(mode: str, gather_output: bool) -> None:
    """Its columns, without padding, or all of them."""
    native = nn.Linear(WIDTH, 16).double()
    own = partial(VocabParallelClassifier.from_native_module, gather_output=gather_output)
    on(mode, native, own, normal(SAMPLES, LENGTH, WIDTH), samples if gather_output else block)


@MODES
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_vocabulary_that_is_padded(mode: str, smoothing: float) -> None:
    native, input = nn.Linear(WIDTH, 13).double(), normal(SAMPLES, LENGTH, WIDTH)
    labels = indices(SAMPLES, LENGTH, below=13)

    def rank() -> None:
        logits = VocabParallelClassifier.from_native_module(native)(block(input))
        loss = CrossEntropy(vocab_size=13, label_smoothing=smoothing)(logits, samples(labels))
        whole = functional.cross_entropy(
            native(samples(input)).flatten(0, 1), samples(labels).flatten(), label_smoothing=smoothing
        )
        require_near(loss.detach(), whole.detach())

    run_threads(rank, GRIDS[mode]["tensor"], **GRIDS[mode])


class Received:
    """A group that counts the elements that this rank receives."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.inner, self.elements = group.rank, group.size, group, 0

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        self.elements += (self.size - 1) * part.numel()
        return self.inner.all_gather(whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        self.elements += (self.size - 1) * part.numel()
        return self.inner.reduce_scatter(part, whole)


def received(kind: Any, features_in: int) -> tuple[float, float]:
    """What a forward and a backward of a layer without a bias receive, in elements."""
    layer, grid = kind(features_in, WIDER, bias=False, dtype=torch.float64), current_context().grid
    assert grid is not None
    counted: Any = [Received(group) for group in grid.along]
    layer._membership = Membership(layer.group, GridGroups(grid.grid, grid.rank, counted))
    parts = current_context().layout.sample_parts
    input = torch.ones(SAMPLES // parts, LENGTH, features_in // grid.grid.side, dtype=torch.float64)
    output = layer(input.requires_grad_())
    forward = sum(group.elements for group in counted)
    output.sum().backward()
    return forward, sum(group.elements for group in counted) - forward


@MODES
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelClassifier])
def test_ranks_receive_what_the_papers_say(mode: str, kind: Any) -> None:
    """2104.05343 and 2105.14500: (r - 1) / r x (B S K / r + K N / r), and B S N with a transposed weight. 2105.14450:
    (r - 1) / r^3 x (B S K + K N + B S N). A backward gathers input and weight again, and sums as many gradients.
    """
    r, is_last = 2, kind is VocabParallelClassifier
    tokens, depth = SAMPLES * LENGTH, GRIDS[mode].get("tensor_depth", 1)
    if mode == "3d":
        share = (r - 1) / r**3
        of_input, of_weight, of_output = share * tokens * WIDTH, share * WIDTH * WIDER, share * tokens * WIDER
        if is_last:  # gathers the weight along two axes, and no input
            of_input, of_weight = 0.0, (r + 1) * of_weight
    else:
        share = (r - 1) / r**2
        of_input, of_weight, of_output = share * tokens / depth * WIDTH, share * WIDTH * WIDER, 0.0
        if is_last:
            of_input, of_output = 0.0, share * tokens / depth * WIDER
    found = run_threads(received, GRIDS[mode]["tensor"], kind, WIDTH, **GRIDS[mode])
    assert set(found) == {(of_input + of_weight + of_output, 2 * (of_input + of_weight) + of_output)}


@MODES
def test_a_part_is_drawn_as_it_is_cut(mode: str) -> None:
    """Also of a vocabulary that is padded, and in blocks of rows that end within a part."""

    def rank() -> None:
        table = VocabParallelEmbedding(13, WIDTH)
        draw_part_(table.weight, lambda each: each.copy_(torch.arange(each.numel()).view(each.shape)), **here(table))
        whole = torch.arange(13.0 * WIDTH).view(13, WIDTH)
        require_near(table.weight.detach(), cut(whole, table.splits()["weight"], table.group))

    def here(layer: TensorLayer) -> dict[str, Any]:
        return {"split": layer.splits()["weight"], "rank": layer.group.rank}

    run_threads(rank, GRIDS[mode]["tensor"], **GRIDS[mode])


@MODES
def test_ranks_with_the_same_samples_drop_the_same_of_them(mode: str) -> None:
    """And each drops features of its own; ranks with other samples drop others."""

    def rank() -> tuple[int, tuple[float, ...], tuple[float, ...]]:
        manual_seed(3)
        layer, context = Dropout(0.5), current_context()
        paths, mask = layer(torch.ones(64, 1)), layer(torch.ones(64, 2))
        return context.layout.sample_part(context.rank), tuple(paths.flatten().tolist()), tuple(mask.flatten().tolist())

    found = run_threads(rank, GRIDS[mode]["tensor"], **GRIDS[mode])
    parts = {part for part, _, _ in found}
    assert len({(part, paths) for part, paths, _ in found}) == len({paths for _, paths, _ in found}) == len(parts)
    assert len({mask for _, _, mask in found}) == len(found)


def stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensor:
    """The weight of a layer after two steps, whole."""
    native = nn.Linear(WIDTH, WIDER, bias=False, dtype=torch.float64)
    with torch.no_grad():
        native.weight.copy_(normal(WIDER, WIDTH))
    context = context_if_launched()
    layer: nn.Module = native if context is None else ColumnParallelLinear.from_native_module(native)
    watch(layer)
    optimizer, split = make(layer), splits_of(layer).get(id(layer.weight))
    for step in range(2):
        gradient = normal(WIDER, WIDTH, seed=step)
        layer.get_parameter("weight").grad = gradient if context is None else cut(gradient, split, context.tensor)
        optimizer.step()
    part = layer.get_parameter("weight").detach()
    if context is None or split is None:
        return part
    return split.joined(gathered(context.tensor, part[None], 0).unbind())


@MODES
@pytest.mark.parametrize(
    "make",
    [
        lambda layer: Lamb(layer.parameters(), 0.1, model=layer),
        lambda layer: torch.optim.Adafactor(layer.parameters(), 0.1),
        lambda layer: torch.optim.AdamW(layer.parameters(), 0.1),
    ],
    ids=["Lamb", "Adafactor", "AdamW"],
)
def test_optimizers_step_blocks_as_they_step_the_whole(
    mode: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    [whole] = run_threads(stepped, 1, make)
    for each in run_threads(stepped, GRIDS[mode]["tensor"], make, **GRIDS[mode]):
        require_near(each, whole, 1e-6)


class ByRow(torch.optim.SGD):
    """Steps a row by its gradient divided by the gradient's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nothing is returned
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad / parameter.grad.norm(dim=1, keepdim=True)


def test_an_optimizer_is_tried_along_each_dimension_that_is_split() -> None:
    optimizer = ByRow([nn.Parameter(torch.ones(4, 4))], 0.1)
    group, like = optimizer.param_groups[0], torch.ones(4, 4)
    assert tried(optimizer, group, like, 0).is_elementwise
    assert not tried(optimizer, group, like, 0, 1).is_elementwise


def test_a_part_has_padding_along_both_dimensions() -> None:
    split = Split(0, 3, places=(0, 0, 1, 1), then=Split(1, 5, places=(0, 1, 0, 1)))
    part = torch.ones(2, 3)
    assert [tuple(split.unpadded(part, rank).shape) for rank in range(4)] == [(2, 3), (2, 2), (1, 3), (1, 2)]
    assert split.whole_shape(part.shape) == (3, 5)


def refuses(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize(
    ("mode", "make", "said"),
    [
        ("2d", lambda: ColumnParallelLinear(8, 9), "cannot split out_features=9 over 2 tensor ranks"),
        ("3d", lambda: ColumnParallelLinear(8, 6), "cannot split out_features=6 over 4 tensor ranks"),
        ("2d", lambda: RowParallelLinear(9, 8), "cannot split in_features=9 over 2 tensor ranks"),
        ("2d", lambda: LayerNorm(9), "cannot split normalized_shape=9 over the 2 ranks of a grid"),
        ("2d", lambda: PatchEmbedding(4, 2, 3, 9), "cannot split embed_dim=9 over the 2 ranks of a grid"),
        ("2d", lambda: ColumnParallelLinear(8, 8, gather_output=True), "no gather_output on a grid"),
        ("2d", lambda: LayerNorm(8, sequence_parallel=True), "no sequence_parallel on a grid"),
        ("2d", lambda: VocabParallelEmbedding(8, 8, sequence_parallel=True), "no sequence_parallel on a grid"),
        ("2d", lambda: RowParallelLinear(8, 8, input_is_parallel=False), "no input_is_parallel=False on a grid"),
        ("3d", lambda: Classifier(8, 8, input_is_parallel=True), "no form with input_is_parallel=True in tensor mode"),
        ("2d", lambda: ColumnParallelLinear(8, 8)(torch.ones(2, 8)), "takes 4 features, got a shape of"),
        ("2d", lambda: shard(nn.Linear(8, 8)), "split layers in tensor mode '1d' alone"),
    ],
)
def test_what_has_no_form_on_a_grid_is_refused(mode: str, make: Callable[[], object], said: str) -> None:
    run_threads(refuses, GRIDS[mode]["tensor"], make, said, **GRIDS[mode])
