"""A GPT for every layout: the whole model, a pipeline stage, or one tensor rank's part of either; its loss, and how a
rank makes its stages.

The layers are pipeflow.tensor's; with one tensor rank they are ordinary layers. A block keeps its index in the whole
model, so parameters have the same names under every cut. A rank creates only its own stages: first on torch's meta
device, then on its own device with initial weights. So the whole model never has to fit on one rank. Must not contain:
how it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper
from pipeflow.engine.runtime.sharing import CONTEXT, SLICES
from pipeflow.engine.tensor.block_attention import seen_keys
from pipeflow.engine.tensor.context_attention import Attend, ContextAttention, context_group, has_parts, positions_of
from pipeflow.engine.tensor.cross_entropy import VocabParallelCrossEntropy, shifted_labels
from pipeflow.engine.tensor.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from pipeflow.engine.tensor.experts import divide_experts
from pipeflow.engine.tensor.layer import LayerNorm, Membership, divide, feature_parts
from pipeflow.engine.tensor.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelClassifier
from pipeflow.engine.tensor.masked_attention import masked_attention, plain_attention
from pipeflow.engine.tensor.mixture import MixtureOfExperts
from pipeflow.engine.tensor.random import Dropout, Factors, checkpoint, initialize_
from pipeflow.engine.tensor.regions import scatter_to_sequence_region

__all__ = ["GPTBlock", "GPTEmbedding", "GPTLMHead", "GPTLMLoss", "GPTStage", "build_gpt_pipeline", "build_stage"]

Activation = Callable[[Tensor], Tensor]


def causal(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Combines the causal mask with `attention_mask`: a token attends to itself and to earlier tokens that it allows.

    The mask is bool (True: attend) or numbers that are added to the scores. A mask of shape (batch, 1, 1, length) is
    per key and becomes (batch, 1, length, length), in which every token attends at least to itself. A mask of another
    shape is per query already and is returned as it is. None means no mask besides the causal one, and returns None.
    """
    if attention_mask is None or attention_mask.shape[-2] != 1:
        return attention_mask
    square = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    if attention_mask.dtype != torch.bool:
        return torch.where(square.triu(1), float("-inf"), attention_mask)
    return attention_mask & square.tril() | torch.eye(length, dtype=torch.bool, device=attention_mask.device)


class Attention(nn.Module):
    """Multi-head self-attention. One layer computes query, key and value, interleaved per head (its weight has
    heads x 3 x head size rows), so that each tensor rank has whole heads.

    Without dropout it uses torch's scaled_dot_product_attention. With dropout scores are computed here, because that
    function cannot draw from the rank's own random generator. Context ranks have no mask, and the dropout of one rank.
    """

    def __init__(
        self, hidden_size: int, heads: int, *, dropout: float, dtype: torch.dtype, sequence_parallel: bool
    ) -> None:
        super().__init__()
        if hidden_size % heads:
            raise UsageError(f"hidden_size {hidden_size} must be divisible by the number of heads, {heads}")
        divide("Attention", "heads", heads, feature_parts())
        self.head_size = hidden_size // heads
        self.query_key_value = ColumnParallelLinear(
            hidden_size, 3 * hidden_size, dtype=dtype, sequence_parallel=sequence_parallel
        )
        self.output = RowParallelLinear(hidden_size, hidden_size, dtype=dtype, sequence_parallel=sequence_parallel)
        self.dropout = Dropout(dropout, parallel_input=True)
        self.over_context = ContextAttention()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        mixed = self.query_key_value(hidden_states).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = mixed.permute(3, 0, 2, 1, 4)
        mask = causal(attention_mask, query.shape[2])
        if mask is not None and has_parts(self, self.over_context.group):
            raise (CONTEXT if self.over_context.group.size > 1 else SLICES).mask_error()
        if mask is not None and (groups := self.output.grid) is not None and groups.grid.axes == 3:
            raise UsageError(
                "a GPT takes no attention mask in tensor mode '3d', where attention has other samples than its stage: "
                "leave it out, and give padding the label -100, or launch with tensor_mode='2d'"
            )
        with_dropout = self.training and self.dropout.p
        if mask is None:
            attend: Attend = masked_attention
            if with_dropout:
                factors = self.dropout.of_scores(query, self.over_context.group)
                attend = partial(self._with_dropout, factors=factors)
            seen = self.over_context(query, key, value, attend)
        else:
            seen = (self._with_dropout if with_dropout else plain_attention)(query, key, value, mask)
        output: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return output

    def _with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, factors: Factors | None = None
    ) -> Tensor:
        scores = query @ key.transpose(-1, -2) / self.head_size**0.5
        mask = seen_keys(query, key.shape[2]) if mask is None else mask
        scores = (scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask).softmax(-1)
        kept: Tensor = self.dropout(scores) if factors is None else scores * factors(query, key)
        return kept @ value


class GPTBlock(nn.Module):
    """One transformer block: attention, then an MLP, each with a layer norm before it and a residual connection.

    Its forward takes and returns `(hidden_states, attention_mask)`: hidden states (batch, length, hidden), with
    length / tensor size under sequence parallelism, and a mask as in `causal`.

    Args:
        hidden_size: width of the hidden states.
        num_attention_heads: number of heads; must divide `hidden_size`.
        mlp_ratio: width of the MLP's inner layer, in multiples of `hidden_size`.
        activation: activation function of the MLP.
        attention_dropout: dropout probability of attention scores.
        dropout: dropout probability of the outputs of attention and MLP.
        layer_norm_epsilon: epsilon of the layer norms.
        dtype: dtype of the parameters.
        checkpoint: activation checkpointing: keep only the input, and recompute the block in its backward.
        sequence_parallel: split the hidden states over the tensor ranks by length.
        experts: number of experts in place of the MLP, as in MixtureOfExperts; 0 for an MLP.
        top_k: number of experts of each token.

    Raises UsageError if the heads do not divide the hidden size.
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
        experts: int = 0,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel}
        self.norm_1 = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
        self.attention = Attention(hidden_size, num_attention_heads, dropout=attention_dropout, **options)
        self.norm_2 = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
        inner = mlp_ratio * hidden_size
        self.mixture = MixtureOfExperts(hidden_size, inner, experts, top_k, activation, **options) if experts else None
        if not experts:
            self.wide = ColumnParallelLinear(hidden_size, inner, **options)
            self.output = RowParallelLinear(inner, hidden_size, **options)
        self.dropout = Dropout(dropout, parallel_input=sequence_parallel, tokens=None if sequence_parallel else 1)
        self.activation = activation
        self.checkpoint = checkpoint

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.checkpoint and torch.is_grad_enabled():
            return checkpoint(self._compute, hidden_states, attention_mask), attention_mask
        return self._compute(hidden_states, attention_mask), attention_mask

    def _compute(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        attended = self.attention(self.norm_1(hidden_states), attention_mask)
        hidden_states = hidden_states + self.dropout(attended)
        normed = self.norm_2(hidden_states)
        computed = self.output(self.activation(self.wide(normed))) if self.mixture is None else self.mixture(normed)
        output: Tensor = hidden_states + self.dropout(computed)
        return output


class GPTEmbedding(nn.Module):
    """Token and position embeddings: ids (batch, length) become hidden states (batch, length, hidden). Tensor ranks
    split the token table by vocabulary, the position table by hidden size.

    Args:
        hidden_size: width of the hidden states.
        vocab_size: number of tokens in the vocabulary.
        max_position_embeddings: maximum length of a sequence.
        dropout: dropout probability of the sum.
        dtype: dtype of the parameters.
        sequence_parallel: return only this tensor rank's part of the length.
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
        self.dropout = Dropout(dropout, parallel_input=sequence_parallel, tokens=None if sequence_parallel else 1)
        self.sequence_parallel = sequence_parallel
        self._context = Membership(context_group())

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = positions_of(self, self._context.group, input_ids.shape[1], input_ids.device)
        positions = self.position_embeddings(position_ids)
        if self.sequence_parallel:
            positions = scatter_to_sequence_region(positions, self.position_embeddings.group)
        output: Tensor = self.dropout(self.word_embeddings(input_ids) + positions)
        return output


class GPTLMHead(VocabParallelClassifier):
    """The head: hidden states (batch, length, dim) become logits (batch, length, this rank's part of the vocabulary).

    Args:
        vocab_size: number of tokens in the vocabulary.
        dim: width of the hidden states.
        dtype: dtype of the parameters.
        bias: add a bias.
        sequence_parallel: the input is this tensor rank's part of the length.
    """

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
    """Mean cross-entropy of predicting each token from the tokens before it. Takes logits (batch, length, this rank's
    part of the vocabulary) and the input ids (batch, length) as labels, which it shifts by one.

    Over context ranks and in slices, labels are `shifted` before tokens are divided, and each part's loss is
    `of_shifted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = VocabParallelCrossEntropy()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(logits[:, :-1], labels[:, 1:])
        return loss

    def shifted(self, labels: Tensor) -> Tensor:
        """The label of each token, (batch, length): the next token; that of the last one does not count."""
        return shifted_labels(labels, self.loss.ignore_index)

    @property
    def of_shifted(self) -> VocabParallelCrossEntropy:
        """The mean cross-entropy of logits and labels that are `shifted`."""
        return self.loss


class GPTStage(nn.Module):
    """A pipeline stage of a GPT: some blocks, with the embedding if it is the first stage, and with the last norm and
    the head if it is the last. With both it is the whole model.

    The first stage takes `input_ids` (batch, length) and optionally `position_ids`; other stages take the previous
    stage's output (batch, length, hidden). All take `attention_mask`: (batch, length) with 0 for padding, or one of
    four dimensions as in `causal`. The last stage returns logits (batch, length, this rank's part of the vocabulary).
    Over context ranks, lengths are those of this rank's tokens, and `attention_mask` must be None.

    Attributes:
        shares_tokens: True, since it computes over context ranks, and slices of a sequence.
        fits_grids: True, since it computes on grids of tensor ranks.

    Args:
        num_layers: number of blocks in this stage.
        hidden_size, num_attention_heads, mlp_ratio, layer_norm_epsilon, dtype, checkpoint: as in GPTBlock.
        vocab_size, max_position_embeddings: as in GPTEmbedding.
        embed_drop_rate: dropout probability of the embedding.
        act_func: activation function of the MLPs.
        attn_drop_rate: dropout probability of attention scores.
        drop_rate: dropout probability of the outputs of attention and MLP.
        first: whether this is the first stage.
        last: whether this is the last stage.
        start: index of its first block in the whole model.
        sequence_parallel: split hidden states over the tensor ranks by length.
        experts, top_k: as in GPTBlock. Expert ranks divide the experts.
    """

    shares_tokens = True
    fits_grids = True

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
        experts: int = 0,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel}
        self.embedding = self.norm = self.head = None
        if first:
            self.embedding = GPTEmbedding(
                hidden_size, vocab_size, max_position_embeddings, dropout=embed_drop_rate, **options
            )
        block: dict[str, Any] = {"mlp_ratio": mlp_ratio, "activation": act_func, "checkpoint": checkpoint, **options}
        block |= {"attention_dropout": attn_drop_rate, "dropout": drop_rate, "experts": experts, "top_k": top_k}
        block["layer_norm_epsilon"] = layer_norm_epsilon
        numbers = range(start, start + num_layers)
        self.blocks = nn.ModuleDict({str(n): GPTBlock(hidden_size, num_attention_heads, **block) for n in numbers})
        if last:
            self.norm = LayerNorm(hidden_size, eps=layer_norm_epsilon, **options)
            self.head = GPTLMHead(vocab_size=vocab_size, dim=hidden_size, **options)

    @property
    def word_tables(self) -> list[nn.Module]:
        """Returns the modules of this stage that share the token table: the token embedding and the head."""
        return [part for part in (self.embedding and self.embedding.word_embeddings, self.head) if part is not None]

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the head, as models of transformers do; None in a stage without one."""
        return self.head

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


def build_stage(
    start: int,
    end: int,
    num_layers: int,
    *,
    first: bool,
    last: bool,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> GPTStage:
    """Makes the stage with blocks [start, end) of a GPT, and allocates nothing else. A stage that is first and last
    ties its token embedding to its head; `tie` ties those of two stages.

    Args:
        start: index of its first block.
        end: index after its last block.
        num_layers: number of blocks of the whole model.
        first: whether this is the first stage.
        last: whether this is the last stage.
        seed: seed of the initial weights.
        device: device of the weights; "meta" allocates no memory.
        options: further arguments of GPTStage.
    """
    with torch.device("meta"):
        stage = GPTStage(end - start, first=first, last=last, start=start, **options)
        divide_experts(stage)
    begin(stage, num_layers, seed=seed, device=device)
    return stage


def begin(
    stage: GPTStage,
    num_layers: int,
    *,
    seed: int,
    device: torch.device | str,
    std: float = 0.02,
    tied: bool = True,
) -> None:
    """Moves a stage from the meta device to `device` and gives it initial weights. If it is first and last, its token
    embedding and head share one weight, unless `tied` is False. On "meta" it stays without memory.
    """
    if torch.device(device).type != "meta":
        stage.to_empty(device=device)
        initialize(stage, num_layers, seed, std=std, tied=tied)
    if tied and stage.embedding is not None and stage.head is not None:
        stage.head.weight = stage.embedding.word_embeddings.weight


def initialize(stage: GPTStage, num_layers: int, seed: int, *, std: float = 0.02, tied: bool = True) -> None:
    """Gives a stage GPT-2's initial weights. Each depends only on `seed` and on the weight's name in the whole model.
    If `tied`, embedding and head get the same weights.
    """

    def fill(name: str, block: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            block.zero_()
        elif block.dim() == 1:
            block.fill_(1)  # weight of a norm
        else:
            residual = name.endswith(("output.weight", "experts.output"))  # two of a layer add to the residual stream
            block.normal_(0, std / (2 * num_layers) ** 0.5 if residual else std, generator=generator)

    for name, part in stage.named_children():
        prefix = "embedding.word_embeddings" if name == "head" and tied else name
        initialize_(part, fill, seed=seed, prefix=prefix)


def build_gpt_pipeline(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | str | None = None,
    *,
    placement: Placement | None = None,
    **options: Any,
) -> nn.Module:
    """Makes this rank's stages of a GPT. Returns a module, or an nn.ModuleList in chunk order if there are several. The
    token embedding of the first stage and the head of the last are tied.

    Args:
        num_layers: number of blocks of the whole model.
        num_chunks: number of stages per rank.
        device: device of the weights; by default the rank's own. On "meta" weights have no memory.
        placement: the schedule's placement; by default stage s is on rank s modulo the number of ranks.
        options: further arguments of GPTStage, and the `seed` of the weights.
    """
    context = current_context()
    if placement is None:
        placement = Placement.looped(context.pipeline_size, num_chunks)
    parts = [part for [part] in partition_uniform(num_layers, placement.num_stages)]
    stages = [
        build_stage(
            *parts[stage],
            num_layers,
            first=stage == 0,
            last=stage == placement.num_stages - 1,
            device=context.device if device is None else device,
            **options,
        )
        for stage in placement.stages_of(context.pipeline_rank)
    ]
    tie(stages, placement)
    return stages[0] if len(stages) == 1 else nn.ModuleList(stages)


def tie(stages: Iterable[GPTStage], placement: Placement) -> None:
    """Ties the token embedding of the first stage to the head of the last, also if both are on one rank."""
    ranks = [*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)]
    wrapper = PipelineSharedModuleWrapper(ranks)
    for stage in stages:
        for table in stage.word_tables:
            wrapper.register_module(table)
