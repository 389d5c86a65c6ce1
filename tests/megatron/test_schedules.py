"""A step by `forward_step_func`: the same under every layout, as plain PyTorch computes it, and what it refuses."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.engine.parallel.context import kept
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.megatron.core import parallel_state
from pipeflow.megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from pipeflow.tensor import cut
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError
from tests.megatron.small import forward_step, loader, logged_losses, masked_mean, models, run_step

LAYOUTS = [(2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)]


def trained(chunks: int, tied: bool) -> tuple[list[float], dict[str, tuple[Tensor, Any]]]:
    """Three steps of batches that differ in size: what was logged, and the weights with how they lie."""
    made, batches, losses = models(chunks, tied=tied), iter(loader(batch_size=5)), []
    optimizer = torch.optim.Adam([parameter for model in made for parameter in model.parameters()], lr=1e-2)
    for microbatches in (2, 1, 2):
        optimizer.zero_grad()
        losses += logged_losses(run_step(made, batches, microbatches))
        optimizer.step()
    named = {name: value for model in made for name, value in model.named_parameters()}
    splits = splits_of(torch.nn.ModuleList(made))
    return losses, {name: (value.detach().clone(), splits.get(id(value))) for name, value in named.items()}


@pytest.mark.some(4)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "tensor", "chunks"), LAYOUTS)
def test_training_is_the_same_under_every_layout(ranks: int, tensor: int, chunks: int, tied: bool) -> None:
    [(losses, weights)] = run_threads(trained, 1, 1, tied)
    assert len(losses) == 5
    assert ("head.weight" in weights) is not tied
    found = run_threads(trained, ranks, chunks, tied, tensor=tensor)
    for rank, (logged, parts) in enumerate(found):
        is_last = rank >= ranks - tensor
        assert logged == (pytest.approx(losses, rel=1e-9) if is_last else [])
        for name, (part, split) in parts.items():
            whole, _ = weights["embedding.word_embeddings.weight" if tied and name == "head.weight" else name]
            group: Any = SimpleNamespace(rank=rank % tensor, size=tensor)
            torch.testing.assert_close(part, cut(whole, split, group), rtol=1e-9, atol=1e-12, msg=name)
    assert {name for _, parts in found for name in parts} >= weights.keys()


def test_a_step_is_what_plain_pytorch_computes() -> None:
    """The mean over the microbatches' losses, however many samples each has; added to the gradients that are there."""

    def compute() -> None:
        [model], [plain] = models(), models()
        for _ in range(2):
            logged = run_step([model], iter(loader(batch_size=10)), 3)
        losses = []
        for data in loader(batch_size=10):
            output = plain(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
            loss, _ = masked_mean(data["loss_mask"], output)
            (2 * loss / 3).backward()
            losses.append(float(loss.detach()))
        assert logged_losses(logged) == pytest.approx(losses, rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12)

    run_threads(compute, 1)


def test_replicas_average_their_gradients() -> None:
    def gradient(first: int, last: int) -> Any:
        [model] = models()
        rank = parallel_state.get_data_parallel_rank()
        batches = list(loader())[first + rank : last + rank]
        run_step([model], iter(batches), last - first)
        return model.get_parameter("blocks.0.wide.weight").grad

    [whole] = run_threads(gradient, 1, 0, 2)
    for found in run_threads(gradient, 2, 0, 1, data=2):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def test_forward_only_touches_no_gradient() -> None:
    def compute() -> tuple[list[float], list[float]]:
        made = models()
        trained, evaluated = run_step(made, iter(loader())), run_step(made, iter(loader()), forward_only=True)
        before = [parameter.grad.clone() for parameter in made[0].parameters() if parameter.grad is not None]
        run_step(made, iter(loader()), 2, forward_only=True)
        after = [parameter.grad for parameter in made[0].parameters() if parameter.grad is not None]
        assert all(one.equal(other) for one, other in zip(before, after, strict=True))
        return logged_losses(trained), logged_losses(evaluated)

    *_, (trained, evaluated) = run_threads(compute, 2)
    assert trained == pytest.approx(evaluated, rel=1e-12)
    assert len(trained) == 4


def test_models_are_prepared_once_whatever_calls_them() -> None:
    """A new function of the step each time, and the function of the engine asked for each time."""

    def compute() -> tuple[int, list[Any]]:
        made, steps = models(), count()
        logged = [
            run_step(
                made, iter(loader()), forward_step_func=lambda data, model: (next(steps), forward_step(data, model))[1]
            )
            for _ in range(3)
        ]
        return len(kept("Megatron-LM's pipelines")), [next(steps), *map(logged_losses, logged)]

    prepared, [calls, first, second, third] = run_threads(compute, 1)[0]
    assert (prepared, calls) == (1, 12)
    assert first == second == third


def test_a_list_of_iterators_is_one_for_each_stage() -> None:
    def compute(several: bool) -> list[float]:
        made = models(2)
        data: Any = [iter(loader()), iter(loader())] if several else iter(loader())
        return logged_losses(run_step(made, data))

    assert run_threads(compute, 2, True)[-1] == run_threads(compute, 2, False)[-1] != []


def test_an_iterator_that_is_shared_goes_on_where_the_step_ended() -> None:
    def compute() -> list[float]:
        made, data = models(2), iter(loader())
        return [*logged_losses(run_step(made, data, 2)), *logged_losses(run_step(made, data, 4))]

    def together() -> list[float]:
        return logged_losses(run_step(models(2), iter(loader()), 6))

    assert run_threads(compute, 2)[-1] == run_threads(together, 2)[-1]


def test_a_sum_over_tokens_may_be_given_with_their_number() -> None:
    def of_sum(data_iterator: Any, model: Any) -> Any:
        losses, mean = forward_step(data_iterator, model)
        [mask] = mean.args
        return losses, lambda each: ((each * mask).sum(), mask.sum(), {"lm loss": (each * mask).sum() / mask.sum()})

    def compute() -> None:
        [one], [other] = models(), models()
        run_step([one], iter(loader()))
        run_step([other], iter(loader()), forward_step_func=of_sum)
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(parameter.grad, other.get_parameter(name).grad, rtol=1e-9, atol=1e-12)

    run_threads(compute, 1)


def refusal(ranks: int, message: str, *arguments: Any, error: type[Exception] = UsageError, **options: Any) -> None:
    """A step of `arguments` is refused on the rank that is last, at least, in these words."""

    def compute() -> None:
        run_step(*[argument() if callable(argument) else argument for argument in arguments], **options)

    with pytest.raises(RankError, match=message) as caught:
        run_threads(compute, ranks)
    assert error.__name__ in str(caught.value)


def test_bad_input_is_one_clear_error() -> None:
    refusal(1, "data_iterator must be an iterator, got DataLoader: pass iter", models, loader)
    refusal(1, "data_iterator has ended", models, lambda: iter([]))
    refusal(1, r"got 2 models", lambda: models() * 2, lambda: iter(loader()))
    refusal(1, r"one for each of 1 models, got 2", models, lambda: [iter(loader())] * 2)
    refusal(1, r"Linear needs a method set_input_tensor", lambda: [torch.nn.Linear(1, 1)], lambda: iter(loader()))

    def four(data: Any, model: Any) -> Any:
        return forward_step(data, model)[0], lambda losses: (losses.sum(),) * 4

    told = r"or \(loss, number of tokens, values to log\), got 4 values"
    refusal(1, told, models, lambda: iter(loader()), forward_step_func=four)


def test_an_iterator_that_ends_in_a_step_is_an_error() -> None:
    refusal(2, "StopIteration", models, lambda: iter(loader()), 7, error=PipelineError)


def test_ranks_that_read_other_batches_are_told() -> None:
    def compute() -> None:
        made, batches = models(), list(loader())
        run_step(made, iter(batches[parallel_state.get_tensor_model_parallel_rank() :]))

    with pytest.raises(RankError, match="read another batch than rank"):
        run_threads(compute, 2, tensor=2)


def test_nothing_runs_before_it_is_initialized() -> None:
    with pytest.raises(UsageError, match=r"call initialize_model_parallel\(tensor, pipeline\) first"):
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=None, model=torch.nn.Identity(), num_microbatches=1
        )
