"""A step in slices of sequences gives the loss and the gradients of the whole model on whole sequences, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeflow import CostModel, Divided, Kind, Pipeline, Schedule, UsageError, Whole, execute_pipeline, make_schedule
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.slices import equal_slices
from pipeflow.engine.deferral.past import Slices, joined
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.slicing import ends_of
from pipeflow.schedules.orders.additions import with_recompute
from pipeflow.testing import RankError, run_processes, run_threads
from pipeflow.training.models import GPTLMLoss, build_gpt_pipeline, build_stage

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "dtype": torch.float64,
}
LAYERS = 8


def batch_of(samples: int, tokens: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Ids, and labels of which many do not count: none of the first slice of the first sample does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (samples, tokens), generator=generator)
    labels = ids.clone()
    labels[0, : tokens // 2] = -100
    labels[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    return {"input_ids": ids}, labels


@dataclass
class Stepped:
    """What a rank has after a step."""

    loss: float | None
    losses: dict[int, float]
    samples: int
    outputs: numpy.ndarray | None
    gradients: dict[str, numpy.ndarray]


def step(
    schedule: Schedule, batch: Any, options: dict[str, Any] | None = None, more: dict[str, Any] | None = None
) -> Stepped:
    """A step of this rank."""
    stages = build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES, **(more or {}))
    pipeline = Pipeline(stages, schedule, criterion=GPTLMLoss(), **(options or {}))
    found = execute_pipeline(iter([batch]), pipeline, return_outputs=True)
    named = {name.split(".", 2)[2]: parameter.grad for name, parameter in pipeline.named_parameters()}
    gradients = {name: gradient.numpy() for name, gradient in named.items() if gradient is not None}
    outputs = found.outputs.detach().numpy() if isinstance(found.outputs, Tensor) else None
    loss = None if found.loss is None else found.loss.item()
    return Stepped(loss, {key: each.item() for key, each in found.losses.items()}, found.samples, outputs, gradients)


def whole(batch: tuple[dict[str, Tensor], Tensor]) -> tuple[float, numpy.ndarray, dict[str, numpy.ndarray]]:
    """Loss, logits and gradients of the whole model, the batch at once."""
    model = build_stage(0, LAYERS, LAYERS, first=True, last=True, **SIZES)
    logits = model(**batch[0])
    loss = GPTLMLoss()(logits, batch[1])
    loss.backward()
    gradients = {name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), logits.detach().numpy(), gradients


def require(found: list[Stepped], batch: tuple[dict[str, Tensor], Tensor], tolerance: float = 1e-12) -> None:
    loss, logits, gradients = whole(batch)
    seen = set()
    for rank in found:
        if rank.loss is not None:
            assert rank.loss == pytest.approx(loss, rel=tolerance)
        if rank.outputs is not None:
            numpy.testing.assert_allclose(rank.outputs, logits, rtol=0, atol=tolerance)
        for name, gradient in rank.gradients.items():
            name = "embedding.word_embeddings.weight" if name == "head.weight" else name
            numpy.testing.assert_allclose(gradient, gradients[name], rtol=0, atol=tolerance, err_msg=name)
            seen.add(name)
        assert rank.samples == len(batch[1])
    assert seen == set(gradients)


FAMILIES = {
    "seq1f1b": {},
    "1f1b": {},
    "interleaved-1f1b": {"chunks": 2},
    "zb-h1": {},
    "zb-v": {},
}


@pytest.mark.some(4)
@pytest.mark.parametrize("slices", [2, 3, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_whole_sequences(name: str, slices: int) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4, slices=slices, **FAMILIES[name])
    batch = batch_of(5, 13)  # 13 tokens divide by no number of slices
    require(run_threads(step, 2, schedule, batch), batch)


def require_same(
    ranks: int, sliced: Schedule, batches: Any, more: dict[str, Any], tolerance: float = 1e-12, **layout: Any
) -> None:
    """A step of whole microbatches gives the same on the same layout."""
    plain = replace_slices(sliced)
    cost = replace(CostModel.even(sliced.placement), attention=0.5)
    runs = [
        run_threads(step_of_replica, ranks, schedule, batches, {"cost": cost}, more, **layout)
        for schedule in (sliced, plain)
    ]
    for found, expected in zip(*runs, strict=True):
        assert (found.loss or 0) == pytest.approx(expected.loss or 0, rel=tolerance)
        assert found.losses == pytest.approx(expected.losses, rel=tolerance, nan_ok=True)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in found.gradients.items():
            numpy.testing.assert_allclose(gradient, expected.gradients[name], rtol=0, atol=tolerance, err_msg=name)


def replace_slices(schedule: Schedule) -> Schedule:
    """The same schedule for whole microbatches: its name says how it was made."""
    name, ranks = schedule.name.split(" ")[0], schedule.placement.num_ranks
    return make_schedule(name, ranks=ranks, microbatches=schedule.num_microbatches)


def step_of_replica(schedule: Schedule, batches: Any, *rest: Any) -> Stepped:
    return step(schedule, batches[current_context().data_rank], *rest)


@pytest.mark.some(2)
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}], ids=["tensor", "sequence parallel"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_tensor_ranks(name: str, more: dict[str, Any]) -> None:
    require_same(4, make_schedule(name, ranks=2, microbatches=2, slices=3), [batch_of(4, 16)], more, tensor=2)


def test_replicas_whose_labels_count_differently() -> None:
    batches = [batch_of(4, 16), batch_of(3, 16, seed=1)]
    require_same(4, make_schedule("zb-h1", ranks=2, microbatches=2, slices=3), batches, {}, data=2)


@pytest.mark.some(2)
@pytest.mark.parametrize("how", ["stage", "block"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_recomputation(name: str, how: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=3, slices=3)
    if how == "stage":
        schedule = with_recompute(schedule)
    batch = batch_of(4, 13)
    require(run_threads(step, 2, schedule, batch, None, {"checkpoint": how == "block"}), batch)


def test_dropout_of_attention_draws_once() -> None:
    """With recomputation, too, a slice draws the masks of its forward: the step with it has the same gradients."""
    schedule = make_schedule("1f1b", ranks=1, microbatches=2, slices=3)
    batch, more = batch_of(4, 13), {"attn_drop_rate": 0.3, "drop_rate": 0.2}
    [plain], [again] = (
        run_threads(step_seeded, 1, each, batch, None, more) for each in (schedule, with_recompute(schedule))
    )
    for name, gradient in plain.gradients.items():
        numpy.testing.assert_allclose(again.gradients[name], gradient, rtol=0, atol=1e-15, err_msg=name)


def step_seeded(*arguments: Any) -> Stepped:
    torch.manual_seed(0)
    return step(*arguments)


def step_sharded(schedule: Schedule, batches: Any) -> dict[str, numpy.ndarray]:
    """The gradients of this rank's stages, whose blocks the replicas divide."""
    context = current_context()
    [*chunks] = make_list(build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES))
    for block in (block for chunk in chunks for block in chunk.blocks.values()):
        fully_shard(block, mesh=context.mesh["data"])
    pipeline = Pipeline(nn.ModuleList(chunks), schedule, criterion=GPTLMLoss())
    execute_pipeline(iter([batches[context.data_rank]]), pipeline)
    named = {name.split(".", 2)[2]: each.grad for name, each in pipeline.named_parameters()}
    wholes = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named.items()}
    return {name: each.numpy() for name, each in wholes.items() if each is not None}


def make_list(stages: nn.Module) -> list[Any]:
    return [*stages] if isinstance(stages, nn.ModuleList) else [stages]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_replicas_that_divide_the_weights(name: str) -> None:
    """Under fully_shard, layers of pipeflow.tensor do not defer weight gradients, which torch takes after I."""
    schedule = make_schedule(name, ranks=1, microbatches=2, slices=3)
    batches = [batch_of(4, 16), batch_of(4, 16, seed=1)]
    expected = run_threads(step_of_replica, 2, replace_slices(schedule), batches, data=2)[0].gradients
    for found in run_processes(step_sharded, 2, schedule, batches, data=2):
        assert found.keys() == expected.keys()
        for parameter, gradient in found.items():
            numpy.testing.assert_allclose(gradient, expected[parameter], rtol=0, atol=1e-12, err_msg=parameter)


@pytest.mark.slow
def test_processes() -> None:
    batch = batch_of(4, 13)
    require(run_processes(step, 2, make_schedule("seq1f1b", ranks=2, microbatches=4, slices=3), batch), batch)


def test_slices_end_where_costs_say() -> None:
    placement = make_schedule("1f1b", ranks=2, microbatches=2).placement
    assert ends_of(16, 1, 2, None) == (8, 16)
    assert (
        ends_of(16, 1, 2, replace(CostModel.even(placement), attention=0.9))
        == equal_slices(16, 2, attention=0.9)
        != (8, 16)
    )
    longer = ends_of(48, 3, 2, replace(CostModel.even(placement), attention=0.4))
    assert longer == equal_slices(48, 2, attention=1.2 / 1.8) != equal_slices(48, 2, attention=0.4)
    assert ends_of(32, 2, 2, replace(CostModel.even(placement), slice_ends=(10, 16))) == (20, 32)
    assert ends_of(16, 1, 3, None, multiple_of=4) == (4, 12, 16)
    with pytest.raises(UsageError, match="leave a slice of 3 tokens empty"):
        ends_of(3, 1, 2, replace(CostModel.even(placement), slice_ends=(15, 16)))


def test_a_divided_batch_of_other_lengths() -> None:
    """Each microbatch is cut at its own length, and the loss is the mean over all its labels."""
    long, short = batch_of(2, 20), batch_of(3, 9, seed=1)
    schedule = make_schedule("zb-h1", ranks=2, microbatches=2, slices=4)
    pair = [long, short]
    plain = make_schedule("zb-h1", ranks=2, microbatches=2)
    cost = replace(CostModel.even(plain.placement), attention=0.5)
    sliced, expected = (run_threads(divided, 2, plain, Divided(pair, each, cost)) for each in (schedule, plain))
    mean = (2 * 20**2 + 3 * 9**2) / (2 * 20 + 3 * 9)  # over tokens, of which half of the cost is attention
    ends = [equal_slices(length, 4, attention=length / (length + mean)) for length in (20, 9)]
    for mine, its in zip(sliced, expected, strict=True):
        assert mine[2] == ends
        assert (mine[0] or 0) == pytest.approx(its[0] or 0, rel=1e-12)
        for name, gradient in its[1].items():
            numpy.testing.assert_allclose(mine[1][name], gradient, rtol=0, atol=1e-12, err_msg=name)


def divided(schedule: Schedule, batch: Divided) -> tuple[float | None, dict[str, numpy.ndarray], list[Any]]:
    """The loss, the gradients, and where microbatches were cut."""
    pipeline = Pipeline(
        build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES), schedule, criterion=GPTLMLoss()
    )
    [stage], cuts = pipeline.runner.stages.values(), list[Any]()
    stage.module.register_forward_pre_hook(lambda *_: cuts.append([past.ends for past in stage.slices.pasts]))
    loss = execute_pipeline(iter([batch]), pipeline).loss
    named = {name: each.grad for name, each in pipeline.named_parameters()}
    gradients = {name: each.numpy() for name, each in named.items() if each is not None}
    return None if loss is None else loss.item(), gradients, cuts[0]


def test_evaluation_gives_whole_outputs_and_the_loss() -> None:
    batch = batch_of(5, 13)
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, slices=3, chunks=2)
    loss, logits, _ = whole(batch)
    *_, last = run_threads(evaluated, 2, schedule, batch)
    assert last[0] == pytest.approx(loss, rel=1e-12)
    numpy.testing.assert_allclose(last[1], logits, rtol=0, atol=1e-12)
    assert last[2] == 0


def test_evaluation_frees_the_keys_of_each_microbatch() -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=3, slices=2)
    assert run_threads(kept_in_evaluation, 1, schedule, batch_of(3, 8)) == [[0, 1, 0, 1, 0, 1]]


def kept_in_evaluation(schedule: Schedule, batch: Any) -> list[int]:
    """When each slice begins, of how many microbatches keys are in memory."""
    pipeline = Pipeline(build_gpt_pipeline(LAYERS, **SIZES), schedule, criterion=GPTLMLoss())
    stage, seen = pipeline.runner.stages[0], list[int]()

    def look(*_: object) -> None:
        seen.append(sum(bool(past._rows) for past in stage.slices.pasts))

    stage.module.register_forward_pre_hook(look)
    execute_pipeline(iter([batch]), pipeline, forward_only=True)
    return seen


def evaluated(schedule: Schedule, batch: Any) -> tuple[Any, Any, int]:
    stages = build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES)
    pipeline = Pipeline(stages, schedule, criterion=GPTLMLoss())
    found = execute_pipeline(iter([batch]), pipeline, forward_only=True, return_outputs=True)
    kept = sum(len(stage.slices.pasts) for stage in pipeline.runner.stages.values())
    loss = None if found.loss is None else found.loss.item()
    return loss, found.outputs.numpy() if isinstance(found.outputs, Tensor) else None, kept


def test_evaluation_needs_no_labels_and_whole_entries_stay_whole() -> None:
    inputs, labels = batch_of(5, 13)
    schedule = make_schedule("1f1b", ranks=2, microbatches=4, slices=3)
    *_, last = run_threads(outputs_of, 2, schedule, {**inputs, "note": Whole(torch.ones(3, 7))})
    numpy.testing.assert_allclose(last, whole((inputs, labels))[1], rtol=0, atol=1e-12)


class Noted(nn.Module):
    """A stage that takes an entry without tokens, too."""

    shares_tokens = True

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_states: Tensor | None = None, input_ids: Tensor | None = None, note: Any = None) -> Tensor:
        assert note.shape == (3, 7)
        hidden: Tensor = self.stage(hidden_states, input_ids)
        return hidden


def outputs_of(schedule: Schedule, inputs: Any) -> Any:
    stage = Noted(build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES))
    pipeline = Pipeline(stage, schedule, criterion=GPTLMLoss())
    found = execute_pipeline(iter([(inputs, None)]), pipeline, forward_only=True, return_outputs=True)
    return found.outputs.numpy() if isinstance(found.outputs, Tensor) else None


@pytest.mark.parametrize("how", ["compiled", "offload"])
def test_what_slices_would_share_wrongly_is_refused(how: str) -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=2, slices=2)
    if how == "offload":
        first, *others = schedule.actions(0)
        schedule = replace(schedule, rows=((first, first.as_kind(Kind.O), first.as_kind(Kind.L), *others),))
    said = "modules of stage 0, a GPTStage, are compiled" if how == "compiled" else "with optimizer steps, offload"
    with pytest.raises(RankError, match=said):
        run_threads(step_compiled, 1, schedule, batch_of(2, 8), how == "compiled")


def step_compiled(schedule: Schedule, batch: Any, compiled: bool) -> None:
    stage: Any = build_gpt_pipeline(LAYERS, **SIZES)
    if compiled:
        stage.blocks["0"].compile(backend="eager")
    execute_pipeline(iter([batch]), Pipeline(stage, schedule, criterion=GPTLMLoss()))


def test_the_head_of_a_slice_may_be_computed_in_slices_of_its_tokens() -> None:
    batch = batch_of(4, 13)
    schedule = make_schedule("zb-v", ranks=2, microbatches=2, slices=3)
    require(run_threads(step, 2, schedule, batch, {"head_slices": 3}), batch)


def test_a_measured_step_has_the_slices() -> None:
    schedule = make_schedule("zb-v", ranks=2, microbatches=2, slices=3)
    timeline = run_threads(traced, 2, schedule, batch_of(2, 14))[0]
    assert [[span.action for span in row] for row in timeline.rows] == [[*row] for row in schedule.rows]
    assert timeline.slice_lengths == pytest.approx((5 / 14, 4 / 14, 5 / 14))
    assert measured_costs(timeline).slice_ends == pytest.approx((5 / 14, 9 / 14, 1))


def traced(schedule: Schedule, batch: Any) -> Any:
    stages = build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES)
    pipeline = Pipeline(stages, schedule, criterion=GPTLMLoss())
    return execute_pipeline(iter([batch]), pipeline, trace=True).timeline


def test_slices_share_the_memory_of_keys() -> None:
    """Attention of each slice saves the keys of all tokens so far, in one buffer: not again for each slice."""
    slices, layer = Slices(), nn.Identity()
    slices.load(layer, [[3, 7, 8]])
    with slices.at(0, 0):
        [first] = joined(layer, torch.ones(2, 3, 4))
    with slices.at(0, 1):
        [second] = joined(layer, torch.zeros(2, 4, 4))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (first == 1).all()
    assert second.shape == (2, 7, 4)


def refused(schedule: Schedule, inputs: Any, labels: Any, options: dict[str, Any], criterion: Any) -> None:
    stages = build_gpt_pipeline(LAYERS, placement=schedule.placement, **SIZES)
    pipeline = Pipeline(stages, schedule, criterion=criterion, **options)
    execute_pipeline(iter([(inputs, labels)]), pipeline)


IDS, LABELS = batch_of(4, 8)


@pytest.mark.parametrize(
    ("inputs", "labels", "options", "criterion", "said"),
    [
        (
            {**IDS, "attention_mask": torch.ones(4, 8)},
            LABELS,
            {},
            GPTLMLoss(),
            "attention_mask is not possible with slices",
        ),
        (IDS, LABELS[:, :4], {}, GPTLMLoss(), "as many as the others"),
        (IDS, torch.ones(4), {}, GPTLMLoss(), "slices are cut along dim 1"),
        (IDS, LABELS, {"tensor_shape": (2, 8, 16)}, GPTLMLoss(), "slices do not go together with tensor_shape="),
        (IDS, LABELS, {"weigh": len}, GPTLMLoss(), "slices do not go together with weigh="),
        (
            IDS,
            LABELS,
            {},
            nn.CrossEntropyLoss(),
            "slices need a loss that shifts labels",
        ),
        (IDS, LABELS, {"cost": "ends"}, GPTLMLoss(), "slice_ends has 3 numbers"),
        ({"input_ids": IDS["input_ids"][:, :1]}, LABELS[:, :1], {}, GPTLMLoss(), "too few for 2 slices"),
    ],
    ids=["mask", "lengths", "no tokens", "shape", "weigh", "criterion", "ends", "few tokens"],
)
def test_what_cannot_be_cut_is_one_error(inputs: Any, labels: Any, options: Any, criterion: Any, said: str) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2, slices=2)
    if options.get("cost"):
        options = {"cost": replace(CostModel.even(schedule.placement), slice_ends=(1, 2, 3))}
    with pytest.raises(RankError, match=said):
        run_threads(refused, 2, schedule, inputs, labels, options, criterion)


def test_a_stage_must_say_that_it_computes_slices() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2, slices=2)
    with pytest.raises(RankError, match="slices need stages that exchange keys and values, and Linear is not known to"):
        run_threads(stepped_linear, 2, schedule)


def stepped_linear(schedule: Schedule) -> None:
    execute_pipeline(
        iter([(torch.ones(2, 4, 3), torch.ones(2, 4))]), Pipeline(nn.Linear(3, 3), schedule, criterion=GPTLMLoss())
    )


def test_a_layer_that_attends_twice_is_refused() -> None:
    slices, layer = Slices(), nn.Identity()
    slices.load(layer, [[1, 2]])
    with slices.at(0, 0):
        joined(layer, torch.ones(1, 1, 1))
        with pytest.raises(UsageError, match="Identity computes attention twice"):
            joined(layer, torch.ones(1, 1, 1))
