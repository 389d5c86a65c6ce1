"""Models of transformers whose stages compute slices of a sequence, with pipeflow's attention, and their loss. Must not
contain: how keys pass from slice to slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.past import joined
from pipeflow.engine.tensor.context_attention import causal_attention
from pipeflow.engine.tensor.cross_entropy import CrossEntropy
from pipeflow.engine.torch_private.modes import FakeTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pipeflow"
FAMILIES = frozenset({"gpt2", "llama", "mistral", "olmo2", "qwen2", "qwen3"})
"""The model types whose tokens meet in attention alone, as tests have shown for each."""
UNKNOWN = frozenset({"sliding_window", "softcap", "position_bias", "s_aux", "cache"})
"""Arguments of attention functions that change what a token sees."""


def share_tokens(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a causal model pipeflow's attention, so that its pipeline takes schedules with slices. Call it before
    `Pipeline.from_module`, whose batches then have `input_ids` and `position_ids`, and no `attention_mask`.

    >>> schedule = make_schedule("1f1b", ranks=2, microbatches=8, slices=4)  # doctest: +SKIP
    >>> model = share_tokens(model)  # doctest: +SKIP
    >>> pipeline = Pipeline.from_module(model, schedule, example, criterion=CausalLMLoss())  # doctest: +SKIP

    Args:
        model: a model of transformers, which is changed.

    Returns the model.

    Raises UsageError for a model that is not known to mix tokens in causal attention alone.
    """
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UsageError(
            f"it is not known whether tokens of {type(model).__name__} ({kind}) meet in causal attention alone: use a "
            f"schedule with slices=1, or a model of {', '.join(sorted(FAMILIES))}"
        )
    library: Any = transformers_library()
    library.AttentionInterface.register(NAME, attention)
    # the mask of another function: none for plain causal attention, and one that `attention` refuses for all else
    library.AttentionMaskInterface.register(NAME, library.masking_utils.sdpa_mask)
    model.set_attn_implementation(NAME)
    vars(model)["shares_tokens"] = True
    return model


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a slice to its tokens and those before, as an attention function of transformers.

    Args:
        module: the attention layer.
        query: (batch, heads, tokens, head size).
        key, value: (batch, heads of keys, tokens, head size).
        attention_mask: None; others are refused.
        dropout: probability of dropout of the scores.
        scaling: factor of the scores.
        is_causal: by default what the layer says.
        others: further arguments of the layer, of which none may change what a token sees.

    Returns the output (batch, tokens, heads, head size), and None for the scores.

    Raises UsageError for attention that is not plain and causal.
    """
    found = [name for name in sorted(UNKNOWN) if others.get(name) is not None]
    if attention_mask is not None and not isinstance(attention_mask, FakeTensor):
        found.append("a mask, of padding or of packed documents")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        found.append("is_causal=False")
    if found:
        raise UsageError(
            f"{type(module).__name__} computes attention with {found[0]}, which share_tokens does not know: leave it "
            "out, and use a schedule with slices=1"
        )
    key, value = joined(module, key, value)
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    seen = causal_attention(query, key, value, **options)
    return seen.transpose(1, 2).contiguous(), None


class _OfTokens(CrossEntropy):
    """The mean cross-entropy of a model's logits and of labels that belong to their tokens."""

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        return super().forward(output.logits, labels)


class CausalLMLoss(nn.Module):
    """Mean cross-entropy of predicting each token from the tokens before it, in float32 at least. Takes the output of a
    model of transformers, with `logits` (batch, length, vocabulary), and the input ids (batch, length) as labels, which
    it shifts by one. Labels of -100 do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_shifted = _OfTokens()

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        loss: Tensor = self.of_shifted(output, self.shifted(labels))
        return loss

    def shifted(self, labels: Tensor) -> Tensor:
        """The label of each token, (batch, length): the next token; that of the last one does not count."""
        return functional.pad(labels[:, 1:], (0, 1), value=self.of_shifted.ignore_index)
