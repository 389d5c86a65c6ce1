"""Models of transformers whose tokens are shared, over context ranks or in slices of a sequence: with pipeflow's
attention, and their loss. Must not contain: how keys pass from slice to slice or from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.sharing import CONTEXT
from pipeflow.engine.tensor.context_attention import ContextAttention, context_group, has_parts
from pipeflow.engine.tensor.cross_entropy import CrossEntropy, shifted_labels
from pipeflow.engine.tensor.masked_attention import masked_attention, plain_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pipeflow"
FAMILIES = frozenset(
    {"cohere", "gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"}
)
"""The types of causal models whose tokens meet in attention alone, as tests have shown for each."""
BIDIRECTIONAL = {"bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM"}
"""The types of other models, each with the class whose tokens meet in attention alone: heads of others pool tokens."""
UNKNOWN = frozenset({"softcap", "position_bias", "s_aux", "cache"})
"""Arguments of attention functions that change what a token sees, or its scores."""
BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings whose angles depend on the largest position of a forward."""


def share_tokens(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model pipeflow's attention, so that its pipeline runs over context ranks and, if it is causal, takes
    schedules with slices. Call it before `Pipeline.from_module`, whose batches then have `input_ids` and
    `position_ids`. Positions begin at 0 in each sequence; where they begin again, so does a document of a causal model,
    whose tokens see no others. Padding at the end has the label -100. Over context ranks, a batch may have an
    `attention_mask` that is 0 for padding; its sequences are one document each.

    >>> schedule = make_schedule("1f1b", ranks=2, microbatches=8)  # doctest: +SKIP
    >>> model = share_tokens(model)  # doctest: +SKIP
    >>> pipeline = Pipeline.from_module(model, schedule, example, criterion=CausalLMLoss())  # doctest: +SKIP

    Args:
        model: a model of transformers, which is changed. It keeps no cache any more.

    Returns the model.

    Raises UsageError for a model that is not known to mix tokens in attention alone.
    """
    kind, config = model.config.model_type, model.config
    alone = "launch with context=1 and use a schedule with slices=1"
    sees_later = BIDIRECTIONAL.get(kind) == type(model).__name__ and not getattr(config, "is_decoder", False)
    if kind not in FAMILIES and not sees_later:
        known = [*sorted(FAMILIES), *sorted(BIDIRECTIONAL.values())]
        raise UsageError(
            f"it is not known whether tokens of {type(model).__name__} ({kind}) meet in attention alone: "
            f"{alone}, or use a model of {', '.join(known)}"
        )
    if model.get_output_embeddings() is None:
        raise UsageError(
            f"{type(model).__name__} has no head that computes logits of each token: {alone}, or pass a model such as "
            "AutoModelForCausalLM makes"
        )
    if found := sorted(_rope_types(config) & BY_LENGTH):
        raise UsageError(
            f"{type(model).__name__} has rotary embeddings of the type {found[0]!r}, whose angles depend on the "
            f"largest position of a forward, and a part of a sequence has another one: {alone}"
        )
    library: Any = transformers_library()
    library.AttentionInterface.register(NAME, attention)
    library.AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)
    config.use_cache = False  # with a cache, transformers takes packed documents for one
    vars(model)["shares_tokens"] = True
    if sees_later:
        vars(model).update(sees_later_tokens=True, shifted=own_labels)
    elif model.loss_function is library.loss.loss_utils.ForCausalLMLoss:  # it takes labels that are shifted
        vars(model)["shifted"] = shifted_labels
    return model


def _rope_types(config: Any) -> set[str]:
    """The types of a model's rotary embeddings, which some models have per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [found, *(each for each in found.values() if isinstance(each, Mapping))]
    return {str(table.get("rope_type", table.get("type"))) for table in tables}


def mask(*arguments: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """The mask of transformers' own attention, as a function of masks of transformers; None over context ranks, where
    `attention` hides what a token does not see.

    Raises UsageError for a mask of padding over context ranks.
    """
    if context_group().size == 1:
        whole: Any = transformers_library().masking_utils.sdpa_mask
        found: Tensor | None = whole(*arguments, attention_mask=attention_mask, **options)
        return found
    if attention_mask is not None:
        raise CONTEXT.mask_error()
    return None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    documents: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention, as an attention function of transformers: of a slice to its tokens and those before, and of
    the tokens of a context rank to those of all.

    Args:
        module: the attention layer.
        query: (batch, heads, tokens, head size).
        key, value: (batch, heads of keys, tokens, head size).
        attention_mask: what each token of a whole sequence sees; None: all before it, or what `sliding_window` and
            `documents` leave. Parts of a sequence take it from these two.
        dropout: probability of dropout of the scores.
        scaling: factor of the scores.
        is_causal: by default what the layer says.
        sliding_window: how many tokens each sees, itself included, in both directions if not causal; None: all.
        documents: the number of the document of each token of whole sequences, (batch, all tokens), of parts alone.
        others: further arguments of the layer, of which none may change what a token sees.

    Returns the output (batch, tokens, heads, head size), and None for the scores.

    Raises UsageError for attention that is not known.
    """
    found = [name for name in sorted(UNKNOWN) if others.get(name) is not None]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not causal and getattr(getattr(module, "config", None), "model_type", "") not in BIDIRECTIONAL:
        found.append("is_causal=False")
    if found:
        raise UsageError(
            f"{type(module).__name__} computes attention with {found[0]}, which share_tokens does not know: leave it "
            "out, or do not call share_tokens"
        )
    over_context, options = ContextAttention(), {"dropout_p": dropout, "scale": scaling}
    if attention_mask is None or has_parts(module, over_context.group):
        if documents is not None and not causal:
            documents = documents.clamp(-1, 0)  # such models take packed documents for one
        hidden: dict[str, Any] = {"causal": causal, "window": sliding_window, "documents": documents}
        seen = over_context(query, key, value, masked_attention, module, **hidden, **options)
    else:
        seen = plain_attention(query, key, value, attention_mask, **options)
    return seen.transpose(1, 2).contiguous(), None


def own_labels(labels: Tensor) -> Tensor:
    """The label of each token, (batch, length), as they are."""
    return labels


class _OfTokens(CrossEntropy):
    """The mean cross-entropy of a model's logits and of labels that belong to their tokens."""

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        return super().forward(output.logits, labels)


class _TokenLoss(nn.Module):
    """The mean loss of tokens, to which `shifted` gives their labels."""

    shifted: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.of_shifted = _OfTokens()

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        loss: Tensor = self.of_shifted(output, self.shifted(labels))
        return loss


class CausalLMLoss(_TokenLoss):
    """Mean cross-entropy of predicting each token from the tokens before it, in float32 at least. Takes the output of a
    model of transformers, with `logits` (batch, length, vocabulary), and the input ids (batch, length) as labels, which
    it shifts by one. Labels of -100 do not count.
    """

    shifted = staticmethod(shifted_labels)


class MaskedLMLoss(_TokenLoss):
    """Mean cross-entropy of the tokens that have a label, in float32 at least. Takes the output of a model of
    transformers, with `logits` (batch, length, vocabulary), and the labels (batch, length), which belong to their own
    tokens. Labels of -100 do not count.
    """

    shifted = staticmethod(own_labels)
