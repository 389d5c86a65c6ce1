"""Batches that are divided already: microbatches of any sizes and lengths, and the schedule that comes with them."""

from __future__ import annotations

from copy import deepcopy
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from pipeflow import Divided, Pipeline, UsageError, Whole, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import RankError, run_threads
from pipeflow.testing.models import PlainModel, TinyModel, TreeModel
from tests.runtime.work import build, gradients_of, require_near, schedule_of

PADDING = -100
Told = list[tuple[float, dict[str, Any]]]


def pieces(batch: Any, groups: list[list[int]]) -> list[Any]:
    return [tree_map_only(Tensor, itemgetter(group), batch) for group in groups]


def run_equal(model: TinyModel, variant: tuple[str, int, int]) -> Told:
    """A whole batch, and the same one divided as it is split."""
    pipeline, batch = build(model, schedule_of(variant, 3)), model.batch(7)
    told = []
    for given in (batch, Divided(pieces(batch, [[0, 1, 2], [3, 4], [5, 6]]))):
        pipeline.zero_grad()
        output = execute_pipeline(iter([given]), pipeline, broadcast_loss=True)
        assert output.loss is not None
        assert output.samples == 7
        told.append((output.loss.item(), gradients_of(pipeline)))
    return told


@pytest.mark.parametrize("variant", [("1f1b", 2, 1), ("zb-v", 2, 2)], ids=str)
@pytest.mark.parametrize("model", [PlainModel(), TreeModel()], ids=str)
def test_a_batch_divided_as_it_is_split_gives_the_same_numbers(model: TinyModel, variant: tuple[str, int, int]) -> None:
    for (loss, gradients), (divided, its) in run_threads(run_equal, variant[1], model, variant):
        assert loss == divided
        assert all((gradients[name] == its[name]).all() for name in gradients)


def run_groups(model: TinyModel, groups: list[list[int]]) -> Told:
    """Groups of other sizes, with a schedule of their own; evaluated too."""
    batch = model.batch(9)
    pipeline = build(model, make_schedule("1f1b", ranks=2, microbatches=2))
    own = make_schedule("zb-h1", ranks=2, microbatches=len(groups))
    given = Divided(pieces(batch, groups), own)
    output = execute_pipeline(iter([given]), pipeline, broadcast_loss=True, trace=True)
    evaluated = execute_pipeline(iter([given]), pipeline, forward_only=True, broadcast_loss=True, return_outputs=True)
    assert output.loss is not None
    assert evaluated.loss is not None
    assert evaluated.loss.item() == pytest.approx(output.loss.item(), rel=1e-12)
    assert output.timeline is not None
    assert output.timeline.name == "zb-h1"
    assert output.timeline.num_microbatches == len(groups)
    return [(output.loss.item(), gradients_of(pipeline))]


def test_the_loss_is_the_mean_over_the_samples_of_all_groups() -> None:
    model = PlainModel()
    loss, gradients = model.plain_step(model.batch(9))
    for [(divided, its)] in run_threads(run_groups, 2, model, [[8], [0, 3, 5, 1], [2], [7, 4, 6]]):
        assert divided == pytest.approx(loss.item(), rel=1e-12)
        require_near(its, gradients)


class Words(nn.Module):
    """A model with a loss over the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.head = nn.Linear(6, 11, dtype=torch.float64)

    def forward(self, words: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        hidden = self.table(words) * mask
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)


torch.manual_seed(0)
WORDS = Words()  # for threads, which share a random generator


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 11, (length,), generator=generator) for length in (9, 2, 3, 5, 4, 2, 12)]


def padded(texts: list[Tensor]) -> dict[str, Any]:
    words = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    return {"words": words, "labels": labels, "mask": Whole(torch.tensor(1.0, dtype=torch.float64))}


def run_words(groups: list[list[int]]) -> Told:
    """Microbatches of other lengths, in turn with whole batches."""
    texts, schedule = sentences(), make_schedule("1f1b", ranks=2, microbatches=len(groups))
    pipeline = Pipeline.from_module(deepcopy(WORDS), schedule, padded(texts))
    told = []
    for given in (padded(texts), Divided([padded([texts[index] for index in group]) for group in groups])) * 2:
        pipeline.zero_grad()
        output = execute_pipeline(iter([given]), pipeline, broadcast_loss=True)
        assert output.loss is not None
        gradients = {
            name: each.grad.numpy().copy() for name, each in pipeline.named_parameters() if each.grad is not None
        }
        told.append((output.loss.item(), gradients))
    return told


def test_microbatches_of_other_lengths_are_weighed_by_their_words() -> None:
    module, batch = deepcopy(WORDS), padded(sentences())
    loss = module(batch["words"], batch["labels"], batch["mask"].value)
    loss.backward()
    expected = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for told in run_threads(run_words, 2, [[6], [0, 1], [3, 2, 4, 5]]):
        for its, gradients in told:
            assert its == pytest.approx(loss.item(), rel=1e-12)
            require_near(gradients, {name: expected[name] for name in gradients})


def run_inputs_with_gradients() -> list[Tensor | None]:
    pipeline = build(PlainModel(), make_schedule("1f1b", ranks=2, microbatches=2))
    parts = pieces(PlainModel().batch(5), [[0], [1, 2, 3, 4]])
    for inputs, _ in parts:
        inputs.requires_grad_()
    execute_pipeline(iter([Divided(parts)]), pipeline)
    return [inputs.grad for inputs, _ in parts] if current_context().pipeline_rank == 0 else []


def test_inputs_of_every_microbatch_get_gradients() -> None:
    first, _ = run_threads(run_inputs_with_gradients, 2)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in first)


def run_wrong(given: Any) -> None:
    execute_pipeline(iter([given]), build(PlainModel(), make_schedule("1f1b", ranks=2, microbatches=3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[:2], "divided into 2 microbatches, but schedule '1f1b' has 3"),
        (lambda parts: [*parts[:2], (parts[2][0], [parts[2][1]])], "microbatch 2 of a divided batch has other entries"),
        (lambda parts: [*parts[:2], (parts[2][0][:0], parts[2][1][:0])], "the batch has no samples"),
        (lambda parts: [*parts[:2], (parts[2][0][:1], parts[2][1])], "differ in dim 0"),
    ],
)
def test_what_is_no_divided_batch_is_refused(change: Any, message: str) -> None:
    parts = pieces(PlainModel().batch(6), [[0, 1], [2, 3], [4, 5]])
    with pytest.raises(RankError, match=message):
        run_threads(run_wrong, 2, Divided(change(parts)))


def test_a_divided_batch_fits_its_schedule() -> None:
    with pytest.raises(UsageError, match="needs a microbatch"):
        Divided([])
    with pytest.raises(UsageError, match="divided into 1 microbatches, but schedule '1f1b' has 3"):
        Divided([PlainModel().batch(2)], make_schedule("1f1b", ranks=2, microbatches=3))


def run_other_groups() -> None:
    rank = current_context().pipeline_rank
    groups = [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]
    pipeline = build(PlainModel(), make_schedule("1f1b", ranks=2, microbatches=2))
    execute_pipeline(iter([Divided(pieces(PlainModel().batch(4), groups))]), pipeline)


def test_ranks_that_divide_a_batch_otherwise_are_noticed() -> None:
    with pytest.raises(RankError, match="read another batch than rank"):
        run_threads(run_other_groups, 2)
