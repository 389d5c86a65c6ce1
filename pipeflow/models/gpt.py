"""A GPT for every layout: whole, a pipeline stage of it, and one tensor rank's part of either.

The layers are pipeflow.tensor's, which with one tensor rank are ordinary ones. A stage has the blocks that it is given
and, where it is the first or the last, what belongs to that end of the model; a block keeps the index it has in the
whole model, so parameters have the same name under every cut. And its loss. What must not live here: which rank holds
what, and the first weights (`gpt_stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.tensor.classifier import VocabParallelClassifier
from pipeflow.tensor.cross_entropy import VocabParallelCrossEntropy
from pipeflow.tensor.dropout import Dropout
from pipeflow.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear
from pipeflow.tensor.norm import LayerNorm
from pipeflow.tensor.recompute import checkpoint
from pipeflow.tensor.regions import scatter_to_sequence_region

Activation = Callable[[Tensor], Tensor]


def causal(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """What each token may look at: what is before it, as far as `attention_mask` lets it.

    The mask is bool, True for what may be seen, or a number added to the scores. One of shape (batch, 1, 1, length)
    says it per key and is made (batch, 1, length, length) here, every token seeing at least itself; any other says it
    per query already, and stays as it is. None: everything before a token may be seen.
    """
    if attention_mask is None or attention_mask.shape[-2] != 1:
        return attention_mask
    square = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    if attention_mask.dtype != torch.bool:
        return torch.where(square.triu(1), float("-inf"), attention_mask)
    return attention_mask & square.tril() | torch.eye(length, dtype=torch.bool, device=attention_mask.device)


class Attention(nn.Module):
    """Self-attention in heads. Query, key and value come out of one layer, interleaved per head (its weight is one of
    heads x 3 x head size rows), so that its parts on the tensor ranks are whole heads.

    Without dropout no score is kept. With it, which scores are dropped follows from the rank's own random numbers,
    which torch's scaled_dot_product_attention cannot be given, so they are computed here.
    """

    def __init__(
        self, hidden_size: int, heads: int, *, dropout: float, dtype: torch.dtype, sequence_parallel: bool
    ) -> None:
        super().__init__()
        if hidden_size % heads:
            raise UsageError(f"{heads} heads do not divide a hidden size of {hidden_size}")
        self.head_size = hidden_size // heads
        self.query_key_value = ColumnParallelLinear(
            hidden_size, 3 * hidden_size, dtype=dtype, sequence_parallel=sequence_parallel
        )
        self.output = RowParallelLinear(hidden_size, hidden_size, dtype=dtype, sequence_parallel=sequence_parallel)
        self.dropout = Dropout(dropout, parallel_input=True)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        mixed = self.query_key_value(hidden_states).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = mixed.permute(3, 0, 2, 1, 4)
        mask = causal(attention_mask, query.shape[2])
        if self.training and self.dropout.p:
            seen = self._with_dropout(query, key, value, mask)
        else:
            seen = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        output: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return output

    def _with_dropout(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) / self.head_size**0.5
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        kept: Tensor = self.dropout(scores.softmax(-1))
        return kept @ value


class GPTBlock(nn.Module):
    """One layer: attention, then a perceptron `mlp_ratio` times as wide, each behind its norm and beside its input.

    Takes and gives `(hidden_states, attention_mask)`: (batch, length, hidden), of length / tensor size under sequence
    parallelism, and a mask as of `causal`. With `checkpoint` it keeps its input alone, and is computed again in its
    backward.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        mlp_ratio: int = 4,
        activation: Activation = functional.gelu,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        layer_norm_epsilon: float = 1e-5,
        dtype: torch.dtype = torch.float,
        checkpoint: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel}
        self.norm_1 = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
        self.attention = Attention(hidden_size, num_attention_heads, dropout=attention_dropout, **options)
        self.norm_2 = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
        self.wide = ColumnParallelLinear(hidden_size, mlp_ratio * hidden_size, **options)
        self.output = RowParallelLinear(mlp_ratio * hidden_size, hidden_size, **options)
        self.dropout = Dropout(dropout, parallel_input=sequence_parallel)
        self.activation = activation
        self.checkpoint = checkpoint

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.checkpoint and torch.is_grad_enabled():
            return checkpoint(self._compute, hidden_states, attention_mask), attention_mask
        return self._compute(hidden_states, attention_mask), attention_mask

    def _compute(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        attended = self.attention(self.norm_1(hidden_states), attention_mask)
        hidden_states = hidden_states + self.dropout(attended)
        widened = self.activation(self.wide(self.norm_2(hidden_states)))
        output: Tensor = hidden_states + self.dropout(self.output(widened))
        return output


class GPTEmbedding(nn.Module):
    """A vector per token, and one per place: ids (batch, length) become (batch, length, hidden). The word table is
    split by words, the position table by hidden.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_position_embeddings: int,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, hidden_size, dtype=dtype, sequence_parallel=sequence_parallel
        )
        self.position_embeddings = HiddenParallelEmbedding(max_position_embeddings, hidden_size, dtype=dtype)
        self.dropout = Dropout(dropout, parallel_input=sequence_parallel)
        self.sequence_parallel = sequence_parallel

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        positions = self.position_embeddings(position_ids)
        if self.sequence_parallel:
            positions = scatter_to_sequence_region(positions, self.position_embeddings.group)
        output: Tensor = self.dropout(self.word_embeddings(input_ids) + positions)
        return output


class GPTLMHead(VocabParallelClassifier):
    """Scores for every word: (batch, length, dim) becomes (batch, length, this rank's words)."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        dtype: torch.dtype = torch.float,
        bias: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(dim, vocab_size, bias=bias, dtype=dtype, sequence_parallel=sequence_parallel)


class GPTLMLoss(nn.Module):
    """The mean cross-entropy of each token given those before it: logits (batch, length, this rank's words) against
    the very ids (batch, length) that went in, shifted by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = VocabParallelCrossEntropy()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(logits[:, :-1], labels[:, 1:])
        return loss


class GPTStage(nn.Module):
    """`num_layers` blocks of a GPT, the first of them block `start` of the whole model; with the embedding where it is
    the `first` stage, with the last norm and the head where it is the `last`.

    The first stage takes `input_ids`, (batch, length), and may take `position_ids`; every other takes the output of
    the one before it, (batch, length, hidden). All take `attention_mask`: (batch, length), 0 where there is padding;
    or one of four dimensions, as of `causal`. The last makes logits, (batch, length, this rank's words).
    """

    def __init__(
        self,
        num_layers: int = 12,
        hidden_size: int = 768,
        num_attention_heads: int = 12,
        vocab_size: int = 50304,
        embed_drop_rate: float = 0.0,
        act_func: Activation = functional.gelu,
        mlp_ratio: int = 4,
        attn_drop_rate: float = 0.0,
        drop_rate: float = 0.0,
        dtype: torch.dtype = torch.float,
        checkpoint: bool = False,
        max_position_embeddings: int = 1024,
        layer_norm_epsilon: float = 1e-5,
        first: bool = False,
        last: bool = False,
        *,
        start: int = 0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel}
        self.embedding = self.norm = self.head = None
        if first:
            self.embedding = GPTEmbedding(
                hidden_size, vocab_size, max_position_embeddings, dropout=embed_drop_rate, **options
            )
        self.blocks = nn.ModuleDict(
            {
                str(layer): GPTBlock(
                    hidden_size,
                    num_attention_heads,
                    mlp_ratio=mlp_ratio,
                    activation=act_func,
                    attention_dropout=attn_drop_rate,
                    dropout=drop_rate,
                    layer_norm_epsilon=layer_norm_epsilon,
                    checkpoint=checkpoint,
                    **options,
                )
                for layer in range(start, start + num_layers)
            }
        )
        if last:
            self.norm = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
            self.head = GPTLMHead(vocab_size=vocab_size, dim=hidden_size, **options)

    @property
    def word_tables(self) -> list[nn.Module]:
        """The embedding of words and the head, where they are here: one weight, to be tied."""
        return [part for part in (self.embedding and self.embedding.word_embeddings, self.head) if part is not None]

    def forward(
        self,
        hidden_states: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = causal(attention_mask[:, None, None, :].bool(), attention_mask.shape[1])
        if self.embedding is not None:
            hidden_states = self.embedding(input_ids, position_ids)
        for block in self.blocks.values():
            hidden_states, attention_mask = block(hidden_states, attention_mask)
        assert hidden_states is not None
        if self.norm is None or self.head is None:
            return hidden_states
        scores: Tensor = self.head(self.norm(hidden_states))
        return scores
