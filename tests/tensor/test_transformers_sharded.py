"""Models of transformers as they are, in pipeline 2 x tensor 2 and over four tensor ranks; float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Schedule, UsageError, clip_grad_norm_, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import partial_in, splits_of
from pipeflow.tensor import shard
from pipeflow.testing import run_threads
from tests.stages.compared import (
    SPLIT,
    Step,
    each_but,
    gradients_of,
    require_equal,
    require_near,
    samples,
    step,
    transformers,
)
from tests.stages.families import EVERY, make
from tests.stages.family import criterion
from tests.tensor.ranks import gradients

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DRAWING = {"dinov3"}
"""It draws its positions from torch's generator, which ranks that are threads share."""
NAMES = [name for name in SPLIT if name not in DRAWING]
FLOOR = 1e-3
"""A sum over ranks rounds otherwise, which is seen in gradients that are 0 but for rounding, such as those of biases of
keys: they are compared with 1e-3 of the largest gradient.
"""
IN_FLOAT32 = {
    **dict.fromkeys(("mixtral", "mixtral-classifier", "deepseek-v2", "deepseek-v3"), "the scores of the router"),
    **dict.fromkeys(
        ("qwen3", "qwen3-moe", "qwen3-next", "gemma3", "cohere", "lfm2"), "the norm of each head's query and key"
    ),
    **dict.fromkeys(("gpt-neo", "gptj"), "the scores of attention"),
}
"""What a model computes in float32 from a sum over ranks: that rounds otherwise in float64, so this may in float32."""
REFUSED = {
    **dict.fromkeys(
        ("swin", "swinv2", "swin-painter", "vit-mae", "segformer", "mobilevit", "patchtst"),
        r"number of heads of \S+ is 2, .* choose a tensor size of 1, 2$",
    ),
    "falcon-groups": r"query_key_value is 2, .* choose a tensor size of 1, 2$",
}
"""What four tensor ranks cannot share, in the words of the error."""


def tolerance(name: str) -> float:
    """The relative one of gradients and outputs."""
    return 1e-6 if name in IN_FLOAT32 else EVERY[name].tolerance


def split_names(module: nn.Module) -> set[str]:
    """The parameters of which a rank has a part."""
    splits = splits_of(module)
    return {name for name, parameter in module.named_parameters() if id(parameter) in splits}


def sharded(name: str) -> set[str]:
    """The parameters that are split without a pipeline."""
    module, _ = make(transformers, name)
    shard(module)
    return split_names(module)


def train(name: str, schedule: Schedule) -> tuple[Step, float, set[str]]:
    """A rank's step, the norm of all gradients, and which of its parameters are split."""
    found = step(name, schedule)
    return found, clip_grad_norm_(found.model, 1.0).item(), split_names(found.model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", each_but("llama", "t5", "falcon", among=NAMES))
def test_pipeline_by_tensor(name: str) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=samples(name))
    steps, norms, split = zip(*run_threads(train, 4, name, schedule, tensor=2, deadline=200.0), strict=True)
    require_equal(name, steps, tolerance=tolerance(name), floor=FLOOR)
    whole: dict[str, Tensor] = {}
    for each in steps:
        whole |= each.gradients
    norm = torch.stack([each.norm() for each in whole.values()]).norm().item()
    assert norms == pytest.approx([norm] * 4, rel=1e-9)
    assert set().union(*split) == run_threads(sharded, 2, name, tensor=2)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", each_but("bloom", "mixtral", "phi3", among=NAMES))
def test_four_tensor_ranks(name: str) -> None:
    """The loss, the logits and every gradient. Many have fewer heads of key and value than ranks."""
    module, batch = make(transformers, name)

    def rank() -> tuple[float, dict[str, Tensor], Tensor | None]:
        mine = copy.deepcopy(module)
        shard(mine)
        output = mine(**EVERY[name].batch())
        loss = criterion(output)
        loss.backward()
        for parameter in partial_in(mine):
            assert parameter.grad is not None
            current_context().tensor.all_reduce(parameter.grad).wait()
        logits = getattr(output, "logits", None)
        return loss.item(), gradients(mine), logits.detach() if isinstance(logits, Tensor) else None

    def refused() -> None:
        with pytest.raises(UsageError, match=REFUSED[name]):
            shard(copy.deepcopy(module))

    if name in REFUSED:
        run_threads(refused, 4, tensor=4)
        return
    results = run_threads(rank, 4, tensor=4, deadline=200.0)
    output = module(**batch)
    expected_loss = criterion(output)
    expected_loss.backward()
    expected = gradients_of(module)
    for loss, found, logits in results:
        assert found.keys() == expected.keys()
        assert loss == pytest.approx(expected_loss.item(), rel=1e-7)  # many compute it in float32
        require_near(found, expected, tolerance(name), floor=FLOOR)
        if logits is not None:
            assert (logits - output.logits).abs().max() <= tolerance(name) * output.logits.abs().max()
