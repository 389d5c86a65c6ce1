"""Models of transformers compute their logits and their own loss by slices of tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.testing import run_threads

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
WORDS = 53
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Granite": {"logits_scaling": 2.0},
    "Cohere": {"logit_scale": 0.3},
}


def exact(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' loss of language models, but in the dtype of the logits."""
    wanted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(logits.view(-1, vocab_size), wanted, ignore_index=-100, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def stepped(module: Any, slices: int | None, counts: bool) -> tuple[Any, dict[str, Any], Any]:
    """A step and an evaluation with its logits."""
    ids = torch.randint(3, WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:2] = labels[3, 3:8] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if counts:
        batch["num_items_in_batch"] = int((labels[:, 1:] != -100).sum())
    schedule = make_schedule("zb-h1", ranks=2, microbatches=2)
    model = Pipeline.from_module(copy.deepcopy(module), schedule, batch, head_slices=slices)
    loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
    found: Any = execute_pipeline(iter([batch]), model, forward_only=True, return_outputs=True).outputs
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return loss, gradients, None if found is None else found.logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own", "tensor"), [("Gemma2", False, 2), ("Granite", False, 1), ("Cohere", False, 1), ("Llama", True, 1)]
)
def test_slices_leave_the_loss_and_the_gradients(name: str, own: bool, tensor: int) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    module = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    if not own:
        module.loss_function = exact
    close = 1e-6 if own else 1e-12  # transformers' own loss computes in float32
    whole, sliced = (run_threads(stepped, 2 * tensor, module, n, own, tensor=tensor) for n in (None, 3))
    for one, other in zip(whole, sliced, strict=True):
        assert abs(one[0] - other[0]) <= close * abs(one[0])
        for key, mine in one[1].items():
            assert (mine - other[1][key]).abs().max() <= close * mine.abs().max(), key
        assert (one[2] is None) == (other[2] is None)
        assert one[2] is None or torch.allclose(one[2], other[2], rtol=close, atol=close)
