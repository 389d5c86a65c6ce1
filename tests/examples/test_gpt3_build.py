"""Which rank makes what of a GPT, what is tied, and that nothing is too big to begin with."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gpt3.build
import gpt3.check
import gpt3.model
import pipeflow
from pipeflow.engine.parallel.context import Context, current_context, set_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.engine.runtime.gradients.weights import tie
from pipeflow.testing import Hub, LocalTransport, run_threads

SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 10, "max_position_embeddings": 8}
META = torch.device("meta")


def at(rank: int, layout: WorldLayout, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What `function` gives on that rank of a world that is nowhere else: nothing is exchanged."""

    def call() -> Any:
        transport = LocalTransport(Hub(layout.world_size), rank, device=torch.device("cpu"), timeout=1.0)
        set_context(Context(rank, layout, torch.device("cpu"), transport))
        return function(*arguments, **options)

    return contextvars.Context().run(call)


def whole_sizes(model: Any) -> dict[str, int]:
    """How many weights the whole has of each that this rank has a part of; a tied one once."""
    splits = splits_of(model)
    sizes = {}
    for name, parameter in model.named_parameters():
        split, count = splits.get(id(parameter)), parameter.numel()
        sizes[name] = count if split is None else count // parameter.shape[split.dim] * split.size
    return sizes


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("GPT_tiny_pipeline_hybrid", 0.00188),
        ("GPT2_small_pipeline_hybrid", 0.124),
        ("GPT2_medium_pipeline_hybrid", 0.355),
        ("GPT2_large_pipeline_hybrid", 0.774),
        ("GPT2_exlarge_pipeline_hybrid", 1.558),
        ("GPT2_8B", 8.31),
        ("GPT2_10B", 10.3),
        ("GPT3_pipeline_hybrid", 174.6),
    ],
)
def test_presets_have_the_size_of_their_name(preset: str, billions: float) -> None:
    build = gpt3.build.PRESETS[preset]
    count = sum(parameter.numel() for parameter in at(0, WorldLayout(), build, device=META).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.005)
    assert count == build.shape.parameters


def test_every_rank_of_175_billion_weights_makes_its_own_part() -> None:
    """Over 8 x 8 ranks, in half precision; without memory, so on any machine."""
    layout, build, total = WorldLayout(pipeline=8, tensor=8), gpt3.build.GPT3_pipeline_hybrid, 0
    for rank in range(8):
        model = at(8 * rank, layout, build, checkpoint=True, dtype=torch.half, device=META)
        assert {parameter.device for parameter in model.parameters()} == {META}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.half}
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == build.shape.parameters_of([(12 * rank, 12 * rank + 12)], tensor=8)
        sizes = whole_sizes(model)
        total += sum(sizes.values()) - sizes.get("head.weight", 0)
    assert 174e9 < total < 176e9
    assert total == build.shape.parameters


PLACEMENTS = {
    "linear": pipeflow.Placement.linear(2),
    "looped": pipeflow.Placement.looped(2, 2),
    "vee": pipeflow.Placement.vee(2),
    "one rank": pipeflow.Placement.linear(1),
    "one rank, chunks": pipeflow.Placement.looped(1, 3),
    "bidirectional": pipeflow.Placement.bidirectional(2),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_ends_and_ties_under_every_placement(name: str) -> None:
    """Each layer once per path, one embedding before the first stage, one head after the last, of one weight."""
    placement = PLACEMENTS[name]

    def build() -> tuple[Any, Any]:
        model = gpt3.build.build_gpt_pipeline(6, placement=placement, **SIZES)
        return model, {ranks for ranks, _ in tie(model)}

    ranks = [at(rank, WorldLayout(pipeline=placement.num_ranks), build) for rank in range(placement.num_ranks)]
    found: list[Any] = [None] * placement.num_stages
    for rank, (model, shared) in enumerate(ranks):
        stages: list[Any] = list(model) if isinstance(model, torch.nn.ModuleList) else [model]
        assert len(stages) == len(placement.stages_of(rank))
        tables = [table.weight for stage in stages for table in stage.word_tables]
        everywhere = {*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)}
        assert [set(holders) for holders in shared] == [everywhere] * bool(tables)
        assert all(table is tables[0] for table in tables)
        for stage, held in zip(placement.stages_of(rank), stages, strict=True):
            found[stage] = held
    assert [layer for stage in found for layer in stage.blocks] == [str(layer) for layer in range(6)]
    for stage, held in enumerate(found):
        assert (held.embedding is not None) == (stage == 0)
        assert (held.head is not None) == (held.norm is not None) == (stage == placement.num_stages - 1)
    assert found[0].embedding.word_embeddings.weight.equal(found[-1].head.weight)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(pipeflow.UsageError, match="layers"):
        at(0, WorldLayout(pipeline=4), gpt3.build.build_gpt_pipeline, 3, **SIZES)


def test_tensor_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(pipeflow.UsageError, match="3"):
        at(0, WorldLayout(tensor=3), gpt3.build.build_gpt_pipeline, 2, **SIZES)


def train_two_steps(name: str, chunks: int | None, sequence_parallel: bool) -> tuple[list[float], dict[str, Any]]:
    context = current_context()
    options = {} if chunks is None else {"chunks": chunks}
    schedule = pipeflow.make_schedule(name, ranks=context.pipeline_size, microbatches=4, **options)
    more: dict[str, Any] = {"dtype": torch.float64, "sequence_parallel": sequence_parallel, **SIZES}
    model = gpt3.build.build_gpt_pipeline(6, placement=schedule.placement, **more)
    pipeline = pipeflow.Pipeline(model, schedule, criterion=gpt3.model.GPTLMLoss())
    optimizer, losses = torch.optim.Adam(pipeline.parameters(), lr=1e-2), []
    ids = torch.randint(10, (8, 8), generator=torch.Generator().manual_seed(0))
    ids = ids.tensor_split(context.data_size)[context.data_rank]
    for _ in range(2):
        optimizer.zero_grad()
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids
        output = pipeflow.execute_pipeline(iter([batch]), pipeline, broadcast_loss=True)
        pipeflow.clip_grad_norm_(pipeline, 0.1)
        optimizer.step()
        assert output.loss is not None
        losses.append(float(output.loss))
    return losses, gpt3.check.parts_of(model)


@pytest.mark.parametrize(
    ("name", "chunks", "layout"),
    [
        ("1f1b", None, WorldLayout(2, 2)),
        ("zb-h1", None, WorldLayout(2, 2)),
        ("interleaved-1f1b", 3, WorldLayout(2, 2)),
        ("zb-v", None, WorldLayout(2, 1, 2)),
        ("interleaved-1f1b", 2, WorldLayout(1, 2)),
        ("dualpipe", None, WorldLayout(2, 2)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_layout_trains_the_same_model(name: str, chunks: int | None, layout: WorldLayout) -> None:
    sequence = layout.tensor > 1 and name in ("zb-h1", "interleaved-1f1b")
    [(losses, expected)] = run_threads(train_two_steps, 1, "1f1b", None, False)
    ranks = run_threads(
        train_two_steps, layout.world_size, name, chunks, sequence, tensor=layout.tensor, data=layout.data
    )
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-12)
    names = set()
    for first in range(0, layout.world_size, layout.tensor):
        group = [parts for _, parts in ranks[first : first + layout.tensor]]
        for each in group[0]:
            names.add(each)
            value = gpt3.check.whole([parts[each] for parts in group])
            torch.testing.assert_close(value, expected[each][0], rtol=0, atol=1e-9, msg=each)
    assert names == expected.keys()
