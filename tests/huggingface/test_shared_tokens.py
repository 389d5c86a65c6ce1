"""Models of transformers in slices of a sequence give the loss and the gradients of the whole model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.adapters.huggingface.shared_tokens import BIDIRECTIONAL, FAMILIES
from pipeflow.huggingface import CausalLMLoss, share_tokens
from pipeflow.testing import RankError, run_threads

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
OTHERS = {
    "gpt2": {
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": 48,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
}


class GemmaNorm(Gemma3RMSNorm):
    """In float64, where transformers' adds up the gradient of its weight in float32."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x)  # type: ignore[no-untyped-call]  # transformers'
        return normed * (1 + self.weight)


class CohereNorm(CohereLayerNorm):
    """In float64, as above."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        spread = hidden_states - hidden_states.mean(-1, keepdim=True)
        return self.weight * (spread * torch.rsqrt(spread.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


WIDE = {Gemma3RMSNorm: GemmaNorm, CohereLayerNorm: CohereNorm}


MORE: dict[str, Any] = {
    "gemma3_text": {"head_dim": 4, "query_pre_attn_scalar": 7, "sliding_window_pattern": 2, "sliding_window": 64},
    "phi3": {"pad_token_id": 0},
    "granite": {
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3,
        "logits_scaling": 2,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {"sliding_window": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0},
}


def model_of(kind: str, **options: Any) -> Any:
    """A small model in float64, in training."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**OTHERS.get(kind, SIZES), **MORE.get(kind, {}), **options})
    config._experts_implementation = "batched_mm"  # what it would choose knows no float64
    auto: Any = transformers.AutoModelForMaskedLM if kind in BIDIRECTIONAL else transformers.AutoModelForCausalLM
    model = auto.from_config(config).double().train()
    for module in model.modules():
        module.__class__ = WIDE.get(type(module), type(module))
    return model


def batch_of(tokens: int = 13) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(48, (4, tokens), generator=generator)
    labels = ids.clone()
    labels[0, : tokens // 2] = -100
    return {"input_ids": ids, "position_ids": torch.arange(tokens).expand(4, tokens)}, labels


def step(whole: Any, schedule: Schedule, batch: Any) -> tuple[float | None, dict[str, Any]]:
    model = share_tokens(deepcopy(whole))
    pipeline = Pipeline.from_module(model, schedule, batch, criterion=CausalLMLoss())
    loss = execute_pipeline(iter([batch]), pipeline).loss
    gradients = {name: each.grad for name, each in pipeline.named_parameters()}
    found = {name: each.numpy() for name, each in gradients.items() if each is not None}
    return None if loss is None else loss.item(), found


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", sorted(FAMILIES))
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_are_those_of_whole_sequences(kind: str, name: str) -> None:
    batch = batch_of()
    model = model_of(kind)
    loss = CausalLMLoss()(model(**batch[0]), batch[1])
    loss.backward()
    expected = {name: each.grad.numpy() for name, each in model.named_parameters()}
    schedule = make_schedule(name, ranks=2, microbatches=2, slices=3)
    seen = set()
    for its, gradients in run_threads(step, 2, model, schedule, batch):
        assert (its or loss.item()) == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients.items():
            whole = next(key for key in sorted(expected, key=len, reverse=True) if name.endswith(key))
            numpy.testing.assert_allclose(gradient, expected[whole], rtol=0, atol=1e-12, err_msg=name)
            seen.add(whole)
    assert seen == set(expected)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scores that are capped": ("gemma2", {}, "it is not known whether tokens of Gemma2ForCausalLM"),
    "angles by length": ("llama", {"rope_parameters": DYNAMIC}, "rotary embeddings of the type 'dynamic'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_models_are_refused(what: str) -> None:
    kind, options, error = REFUSED[what]
    with pytest.raises(UsageError, match=error):
        share_tokens(model_of(kind, **options))


def test_a_model_without_logits_is_refused() -> None:
    config = model_of("llama").config
    with pytest.raises(UsageError, match="LlamaForSequenceClassification has no head that computes logits"):
        share_tokens(transformers.LlamaForSequenceClassification(config))


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertLMHeadModel", "BertForMaskedLM"])
def test_heads_that_pool_tokens_and_decoders_are_refused(kind: str) -> None:
    config = model_of("bert").config
    config.is_decoder = kind != "BertForPreTraining"
    with pytest.raises(UsageError, match=rf"it is not known whether tokens of {kind} \(bert\) meet in attention alone"):
        share_tokens(getattr(transformers, kind)(config))


def test_slices_of_tokens_that_see_later_ones_are_refused() -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=2, slices=3)
    with pytest.raises(RankError, match=r"stage 0, a BertForMaskedLM, see later ones, .* with slices=1"):
        run_threads(step, 1, model_of("bert"), schedule, batch_of(12))


def test_attention_to_later_tokens_is_refused() -> None:
    model = share_tokens(model_of("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UsageError, match="Gemma3Attention computes attention with is_causal=False"):
        model(**batch_of()[0])


@pytest.mark.parametrize("change", ["none", "from one", "jump", "mask"])
def test_positions_must_count(change: str) -> None:
    inputs, labels = batch_of(12)
    positions = inputs["position_ids"].clone()
    positions[1, 7:] += change == "jump"
    inputs["position_ids"] = positions + (change == "from one")
    if change == "none":
        del inputs["position_ids"]
    elif change == "mask":
        inputs["attention_mask"] = torch.ones(4, 12, dtype=torch.long)
    schedule = make_schedule("1f1b", ranks=1, microbatches=2, slices=2)
    said = "attention_mask is not possible" if change == "mask" else "slices need position_ids"
    with pytest.raises(RankError, match=said):
        run_threads(step, 1, model_of("llama"), schedule, (inputs, labels))


def test_masks_are_never_left_out() -> None:
    """With whole sequences, too, and without a pipeline: padding, packed documents and windows are what they were. A
    model that shares tokens keeps no cache, with which packed documents would be one.
    """
    inputs, _ = batch_of(12)
    padded = {**inputs, "attention_mask": torch.ones(4, 12, dtype=torch.long).tril(8)}
    packed = {**inputs, "position_ids": inputs["position_ids"] % 6}
    model = model_of("mistral", sliding_window=5).eval()
    expected = [model(**each, use_cache=False).logits for each in (inputs, padded, packed)]
    shared = share_tokens(model)
    for each, logits in zip((inputs, padded, packed), expected, strict=True):
        torch.testing.assert_close(shared(**each).logits, logits, rtol=0, atol=1e-12)
