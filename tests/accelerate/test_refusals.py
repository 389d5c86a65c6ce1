"""What an Accelerator of a pipeline refuses, each time with one sentence that says what works."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from pipeflow import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from tests.accelerate.loops import Images
from tests.losses.adapters import OfLabels
from tests.losses.forms import mean_ce
from tests.losses.words import batch_of

accelerate = pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 5


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A world of one process, whose context is closed at the end."""
    yield
    context = context_if_launched()
    if context is not None:
        context.close()


def make(**options: Any) -> Any:
    from pipeflow.accelerate import Accelerator

    return Accelerator(pipeline=1, cpu=True, microbatches=2, **options)


def prepared() -> tuple[Any, Any, Any]:
    accelerator, model = make(), Images()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_plugin": object()}, "takes no fsdp_plugin: pipeline= and tensor= divide the model"),
        ({"deepspeed_plugin": object()}, "takes no deepspeed_plugin"),
        ({"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]}, "uses no DistributedDataParallel"),
        ({"mixed_precision": "fp16"}, "use 'bf16' or 'no'"),
        ({"dataloader_config": accelerate.DataLoaderConfiguration(dispatch_batches=True)}, "reads its own batches"),
        ({"parallelism_config": accelerate.ParallelismConfig(dp_shard_size=2)}, "dp_shard_size is not possible"),
        ({"parallelism_config": accelerate.ParallelismConfig(tp_size=2), "tensor": 1}, "give each size once"),
        ({"tensor": 2}, "does not divide|world|processes"),
    ],
)
def test_an_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_a_variable_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="asks for FSDP"):
        make()


def test_names_of_a_parallelism_config() -> None:
    from pipeflow.accelerate import Accelerator, DistributedType, ParallelismConfig

    sizes = ParallelismConfig(pp_size=1, tp_size=1, dp_replicate_size=1)
    made = Accelerator(parallelism_config=sizes, cpu=True)
    assert made.num_processes == 1
    assert made.distributed_type is DistributedType.NO  # its other names are accelerate's


def test_a_second_call_needs_the_backward_of_the_first() -> None:
    accelerator, model, _ = prepared()
    loss = nn.functional.cross_entropy(model(BATCH), LABELS)
    with pytest.raises(UsageError, match="called again before the backward of its last loss"):
        model(BATCH)
    accelerator.backward(loss)
    with pytest.raises(UsageError, match="called before"):
        accelerator.backward(loss)


def test_only_the_loss_of_the_step_has_a_backward() -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(UsageError, match="not that of the model's last call"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    nn.functional.cross_entropy(model(BATCH), LABELS)
    with pytest.raises(UsageError, match="not that of the model's last call"):
        accelerator.backward(torch.zeros((), requires_grad=True) * 2)


def test_an_output_in_training_is_for_a_loss_alone() -> None:
    _, model, _ = prepared()
    output = model(BATCH)
    with pytest.raises(UsageError, match="softmax was called with a model's output in training"):
        torch.softmax(output, 1)
    with pytest.raises(UsageError, match="cross_entropy with reduction='none' was called with a model's output"):
        nn.functional.cross_entropy(output, LABELS, reduction="none")
    with pytest.raises(UsageError, match=r"a tensor of shape \(8, 1\) was used with a model's output before its loss"):
        nn.functional.cross_entropy(output.mul(LABELS[:, None]), LABELS)
    with pytest.raises(UsageError, match="cannot be split like the 8 samples"):
        nn.functional.cross_entropy(output, LABELS[:3])
    with pytest.raises(UsageError, match="computed no loss at its first call"):
        print(output.loss)  # noqa: T201  # an attribute


def test_a_loss_over_the_batch_is_one_that_the_script_computes() -> None:
    accelerator = make(schedule="gpipe", loss_over="batch")
    module = Images()
    expected = nn.functional.cross_entropy(module(BATCH), LABELS)
    expected.backward()
    gradient, module.head.weight.grad = module.head.weight.grad, None
    module.zero_grad()
    model = accelerator.prepare(module)
    loss = nn.functional.cross_entropy(model(BATCH), LABELS)
    accelerator.backward(loss)
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(dict(model.named_parameters())["head.weight"].grad, gradient)
    accelerator.free_memory()
    with pytest.raises(UsageError, match=r'loss_over="batch" needs criterion='):
        accelerator.prepare(OfLabels(mean_ce))(*batch_of(8))


OPERATIONS: list[Callable[[Any], object]] = [
    *(operator.neg, lambda output: 2 * output, lambda output: output / 2, lambda output: output @ output),
    *(lambda output: output == LABELS, lambda output: output != LABELS, bool, float, list, len, numpy.asarray),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_output_in_training_has_no_values(operation: Callable[[Any], object]) -> None:
    """An operator of Python's would otherwise give something else, or an error that says nothing."""
    _, model, _ = prepared()
    with pytest.raises(UsageError, match="was called with a model's output in training"):
        operation(model(BATCH))


def test_a_loss_scales_its_gradients() -> None:
    """A part of it, and a module of torch's that calls a function."""
    accelerator, model, _ = prepared()
    gradients = []
    for factor in (1.0, 0.25):
        accelerator.backward(nn.CrossEntropyLoss()(model(BATCH), LABELS) * factor)
        gradients.append([each.grad.clone() for each in model.parameters()])
        model.zero_grad()
    for whole, quarter in zip(*gradients, strict=True):
        torch.testing.assert_close(whole / 4, quarter)


def test_a_model_is_prepared_once_and_first() -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(UsageError, match="prepares one model"):
        accelerator.prepare(Images())
    with pytest.raises(UsageError, match="cut when it is first called"):
        accelerator.save_state("nowhere")
    with pytest.raises(UsageError, match="together with its model"):
        make().prepare(torch.optim.SGD(Images().parameters(), lr=0.1))
    assert isinstance(accelerator.unwrap_model(model), Images)


def test_one_optimizer_is_prepared() -> None:
    accelerator, model = make(), Images()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.blocks, model.head))
    with pytest.raises(UsageError, match="has 2 optimizers, but a pipeline steps one: use one optimizer with"):
        accelerator.prepare(model, first, second)


@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule])
def test_a_model_of_other_engines_is_refused(kind: Any) -> None:
    class Wrapped(kind, nn.Module):  # type: ignore[misc]  # what is wrapped does not matter
        def __new__(cls) -> Any:
            return nn.Module.__new__(cls)

        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(UsageError, match=r"is a Wrapped, which .* needs neither: pipeline= and tensor= divide"):
        make().prepare(Wrapped())


def test_replicas_join_only_with_even_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepared()
    with accelerator.join_uneven_inputs([model], even_batches=False):  # one replica has no other to wait for
        pass
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    with accelerator.join_uneven_inputs([model]):
        pass
    with (
        pytest.raises(UsageError, match="all need the same number of batches"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass


def test_the_newest_state_is_the_last_whose_model_was_saved(tmp_path: Path) -> None:
    from pipeflow.accelerate import Accelerator

    configuration = SimpleNamespace(automatic_checkpoint_naming=True)
    accelerator: Any = SimpleNamespace(project_dir=str(tmp_path), project_configuration=configuration)
    (tmp_path / "checkpoints" / "checkpoint_9").mkdir(parents=True)
    with pytest.raises(UsageError, match="needs the folder of a saved state"):
        Accelerator._newest(accelerator)
    for number in (2, 10):
        (tmp_path / "checkpoints" / f"checkpoint_{number}" / "pipeflow").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint_11").mkdir()  # a save that was killed
    assert Path(Accelerator._newest(accelerator)).name == "checkpoint_10"
