"""Models of transformers as they are, over two and four tensor ranks and pipeline 2 x tensor 2; float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, clip_grad_norm_, execute_pipeline, make_schedule
from pipeflow.parallel.context import current_context
from pipeflow.parallel.sharding import partial_in, splits_of
from pipeflow.tensor import shard
from pipeflow.testing import run_threads
from tests.stages import families
from tests.tensor.test_rules import gradients

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TWO = make_schedule("1f1b", ranks=2, microbatches=3)
_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 48, "pad_token_id": 0}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}
_STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
_SHORT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **_STILL}
_EXPERTS = {**_GROUPED, "output_router_logits": True, "experts_implementation": "batched_mm"}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {**_GROUPED, **_STILL}),
    "gpt-neox": ("GPTNeoX", {**_SIZES, "use_cache": False}),
    "falcon": ("Falcon", {**_SIZES, "use_cache": False}),
    "falcon-heads": ("Falcon", {**_SIZES, "multi_query": False, "use_cache": False}),
    "falcon-groups": ("Falcon", {**_GROUPED, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("Falcon", {**_SIZES, "alibi": True, "use_cache": False}),
    "mpt": ("Mpt", {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "use_cache": False}),
    "gpt-bigcode": ("GPTBigCode", _SHORT),
    "gpt-bigcode-heads": ("GPTBigCode", {**_SHORT, "multi_query": False}),
    "cohere": ("Cohere", {**_GROUPED, "use_qk_norm": True}),
    "mixtral": ("Mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
}
"""Those that pack what others have apart, have biases per head or experts: the model's name and its sizes."""
ROUNDED = {"gemma2": 1e-6, "cohere": 1e-6, "mixtral": 1e-6, "qwen3-moe": 1e-6, "qwen3": 1e-6}
"""Gemma's norms are computed in float32, and the gradients of their weights summed in it over a microbatch; so are a
router's scores, and norms of heads, which round to float32 what a sum over ranks has rounded otherwise in float64.
"""
QUICK = {"llama", "gpt2", "bert", "opt", "vit", "t5"}


def each_of(names: Any, *quick: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.exhaustive]) for name in names]


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of random weights without dropout, and a batch."""
    if name in families.FAMILIES:
        return families.make(transformers, name)
    model, sizes = CAUSAL[name]
    config = getattr(transformers, f"{model}Config")(**sizes)
    module = getattr(transformers, f"{model}ForCausalLM")(config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    return module, families.make(transformers, "llama")[1]


def require_equal(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """By the largest entry of each gradient, or a thousandth of that of all: some are zero but for rounding."""
    largest = max(float(each.abs().max()) for each in expected.values())
    for key, gradient in found.items():
        scale = max(float(expected[key].abs().max()), largest * 1e-3)
        assert (gradient - expected[key]).abs().max() <= ROUNDED.get(name, 1e-9) * scale, key


def compare(name: str, ranks: int) -> None:
    """Loss, logits and every gradient over tensor ranks alone."""
    module, batch = make(name)
    output, expected = _plain(copy.deepcopy(module), batch)

    def rank() -> tuple[float, Tensor, dict[str, Tensor], int]:
        mine = copy.deepcopy(module)
        shard(mine)
        its = mine(**batch)
        its.loss.backward()
        for parameter in partial_in(mine):
            assert parameter.grad is not None
            current_context().tensor.all_reduce(parameter.grad).wait()
        return its.loss.item(), its.logits.detach(), gradients(mine), len(splits_of(mine))

    for loss, logits, found, splits in run_threads(rank, ranks, tensor=ranks, deadline=200.0):
        assert splits > 0
        assert found.keys() == expected.keys()
        assert loss == pytest.approx(output.loss.item(), rel=1e-6)  # many compute it in float32
        assert (logits - output.logits).abs().max() <= ROUNDED.get(name, 1e-9) * output.logits.abs().max()
        require_equal(name, found, expected)


@pytest.mark.parametrize("name", each_of([*families.FAMILIES, *CAUSAL], "gpt-neox", "falcon", "mixtral", "bloom"))
def test_two_tensor_ranks(name: str) -> None:
    compare(name, 2)


FOUR = ["llama", "glm", "qwen3", "phi3", "falcon", "falcon-alibi", "gpt-bigcode", "mixtral", "whisper", "t5", "bloom"]


@pytest.mark.parametrize("name", each_of(FOUR, "phi3"))
def test_four_tensor_ranks(name: str) -> None:
    """Many have fewer heads of key and value than that."""
    compare(name, 4)


def test_packed_groups_are_not_shared() -> None:
    """Heads of key and value that lie between those of the query belong to one rank."""

    def rank() -> None:
        with pytest.raises(UsageError, match=r"query_key_value is 2, .* choose a tensor size of 1, 2$"):
            shard(make("falcon-groups")[0])

    run_threads(rank, 4, tensor=4)


@pytest.mark.parametrize("name", each_of([*families.FAMILIES, *list(CAUSAL)[:-2]], *QUICK))
def test_pipeline_by_tensor(name: str) -> None:
    module, batch = make(name)
    serial = copy.deepcopy(module)
    output, expected = _plain(serial, batch)  # first: BEiT keeps a table that its first forward makes

    def rank() -> tuple[float, dict[str, Tensor], float, int]:
        model = Pipeline.from_module(copy.deepcopy(module), TWO, batch)
        made = execute_pipeline(iter([batch]), model, broadcast_loss=True)
        assert made.loss is not None
        return made.loss.item(), gradients(model), clip_grad_norm_(model, 1.0).item(), len(splits_of(model))

    results = run_threads(rank, 4, tensor=2, deadline=200.0)
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 1e9).item()
    assert {key for _, found, _, _ in results for key in found} == expected.keys()
    for loss, found, its_norm, splits in results:
        assert splits > 0
        assert loss == pytest.approx(output.loss.item(), rel=1e-6)
        assert its_norm == pytest.approx(norm, rel=ROUNDED.get(name, 1e-9))
        require_equal(name, found, expected)


def _plain(module: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    output = module(**batch)
    output.loss.backward()
    return output, {key: each.grad for key, each in module.named_parameters() if each.grad is not None}
