"""What context ranks cannot divide is one clear error that says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pipeflow import (
    Along,
    Divided,
    Pipeline,
    PipelineError,
    UsageError,
    Whole,
    execute_pipeline,
    launch,
    make_schedule,
)
from pipeflow.checking import recorder
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.context_ranks import ContextTokens
from pipeflow.engine.runtime.program import graphs
from pipeflow.models import GPTLMLoss, GPTStage, build_gpt_pipeline
from pipeflow.testing import run_processes, run_threads

OPTIONS: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5, "max_position_embeddings": 8}
SCHEDULE = make_schedule("1f1b", ranks=1, microbatches=2)
TOKENS = torch.arange(16).view(2, 8) % 5


def made(**options: Any) -> Pipeline:
    chunks = build_gpt_pipeline(1, **OPTIONS)
    return Pipeline(chunks, SCHEDULE, **{"criterion": GPTLMLoss(), **options})


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    except PipelineError as error:
        return str(error.__cause__ or error)
    raise AssertionError("nothing was refused")


def on_two(call: Callable[[], object]) -> list[str]:
    return run_threads(refused, 2, call, context=2)


def whole_module() -> Pipeline:
    stage = GPTStage(1, **OPTIONS, first=True, last=True)
    return Pipeline.from_module(stage, SCHEDULE, {"input_ids": TOKENS}, criterion=GPTLMLoss())


def two_stages() -> Pipeline:
    stage, schedule = GPTStage(2, **OPTIONS, first=True, last=True), make_schedule("1f1b", ranks=2, microbatches=2)
    return Pipeline.from_module(stage, schedule, {"input_ids": TOKENS}, criterion=GPTLMLoss())


def test_layers_that_are_split_already_make_no_stages() -> None:
    """Without context ranks, too: a stage lacks the parameters of others, which such layers know."""
    error = "embedding.word_embeddings is a VocabParallelEmbedding of pipeflow.tensor, and from_module makes no stages"
    assert all(error in told for told in run_threads(refused, 2, two_stages))


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.mean()


MAKING: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "a stage": (
        lambda: Pipeline(nn.Linear(2, 2), SCHEDULE, criterion=GPTLMLoss()),
        r"stages that exchange keys and values, and Linear is not known to do so: use a GPTStage",
    ),
    "a whole module": (
        whole_module,
        r"embedding.word_embeddings is a VocabParallelEmbedding of pipeflow.tensor, and from_module makes no stages of",
    ),
    "a module": (
        lambda: Pipeline.from_module(nn.Linear(2, 2), SCHEDULE, {"input": TOKENS}, criterion=GPTLMLoss()),
        r"and Linear is not known to do so: use a GPTStage, call share_tokens\(model\) before from_module",
    ),
    "a loss": (lambda: made(criterion=mean), r"and mean is not known to do so: pass criterion=GPTLMLoss\(\)"),
    "a loss module": (lambda: made(criterion=nn.CrossEntropyLoss()), "and CrossEntropyLoss is not known to do so"),
    "weigh": (lambda: made(weigh=len), "do not go together with weigh=: leave it out"),
    "overlap": (lambda: made(overlap=lambda forward, backward: None), "do not go together with overlap="),
    "the loss of a batch": (lambda: made(loss_over="batch"), "do not go together with loss_over="),
}


@pytest.mark.parametrize("what", MAKING)
def test_a_pipeline_is_refused(what: str) -> None:
    make, error = MAKING[what]
    assert all(re.search(error, told) for told in on_two(make))


def step(batch: object, **options: Any) -> Callable[[], object]:
    return lambda: execute_pipeline(iter([batch]), made(), **options)


BATCHES: dict[str, tuple[Callable[[], object], str]] = {
    "lengths": (
        step(({"input_ids": TOKENS[:, :6]}, TOKENS[:, :6])),
        "sequences of 6 tokens have no 4 equal parts for 2 context ranks: pad them to a multiple of 4",
    ),
    "a divided batch": (
        step(Divided([({"input_ids": each[None]}, each[None]) for each in TOKENS])),
        "context ranks need a batch that is not divided: pass the whole batch",
    ),
    "a mask": (
        step(({"input_ids": TOKENS, "attention_mask": torch.ones(2, 8)}, TOKENS)),
        "attention_mask is not possible with context ranks.* launch with context=1",
    ),
    "another entry": (
        step(({"input_ids": TOKENS, "hidden_states": TOKENS}, TOKENS)),
        "it is not known how context ranks divide the entry 'hidden_states'",
    ),
    "positions without samples": (
        step(({"input_ids": TOKENS, "position_ids": Whole(torch.arange(8))}, TOKENS)),
        "an entry for each token of input_ids, .batch, length., but 'position_ids' is a Whole",
    ),
    "samples along another dimension": (
        step(({"input_ids": Along(TOKENS.T, 1)}, TOKENS)),
        "an entry for each token of input_ids, .batch, length., but 'input_ids' is a Along",
    ),
    "labels of samples": (step(({"input_ids": TOKENS}, TOKENS[:, 0])), r"but 'labels' is \(2,\)"),
    "no dict": (step((TOKENS, TOKENS)), "context ranks need a dict of inputs"),
    "outputs": (
        step(({"input_ids": TOKENS}, TOKENS), forward_only=True, return_outputs=True),
        "outputs cannot be returned over context ranks",
    ),
}


@pytest.mark.parametrize("what", BATCHES)
def test_a_batch_is_refused(what: str) -> None:
    call, error = BATCHES[what]
    assert all(re.search(error, told) for told in on_two(call))


def none_counts() -> None:
    execute_pipeline(iter([({"input_ids": TOKENS}, torch.full_like(TOKENS, -100))]), made())


def test_a_batch_whose_labels_do_not_count_on_any_rank_is_refused() -> None:
    assert all("no label of this batch counts" in told for told in on_two(none_counts))


def read_another() -> None:
    """The ranks of a replica must read one batch, of which each then takes other tokens."""
    tokens = TOKENS.roll(current_context().context_rank)
    execute_pipeline(iter([({"input_ids": tokens}, tokens)]), made())


def test_context_ranks_that_read_other_batches_are_told_so() -> None:
    assert all("rank 1 read another batch than rank 0" in told for told in on_two(read_another))


class Doubled(GPTLMLoss):
    """A loss that has `shifted`, but does not say what it is divided by."""

    @property
    def of_shifted(self) -> Any:
        return lambda logits, labels: 2 * self.loss(logits, labels)


def test_a_loss_whose_labels_cannot_be_counted_is_refused() -> None:
    def tokens() -> ContextTokens:
        return ContextTokens(current_context(), Doubled(), {})

    assert all("Doubled is not known to do so" in told for told in on_two(tokens))


def sharded() -> None:
    chunks: Any = build_gpt_pipeline(1, **OPTIONS)
    fully_shard(chunks.blocks["0"], mesh=current_context().mesh["data"])
    with pytest.raises((UsageError, PipelineError), match=r"fully_shard splits .* use pipeflow\.Zero"):
        Pipeline(chunks, SCHEDULE, criterion=GPTLMLoss())


@pytest.mark.slow
def test_fully_shard_is_refused() -> None:
    run_processes(sharded, 2, context=2)


def test_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capturing", lambda device: None)
    assert all("attention over context ranks communicates" in told for told in on_two(lambda: made(graph=True)))


def test_a_recording_is_refused() -> None:
    def recording() -> object:
        return recorder.groups([made()])

    assert all("cannot put together the tokens of context ranks" in told for told in on_two(recording))


def test_a_launch_whose_sizes_do_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"replicas of 4 \(pipeline 1 x context 2 x tensor 2\): start a multiple of 4"):
        launch(1, 2, context=2)
