"""Attention over context ranks is that of the whole sequence, and costs each rank its share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pipeflow import UsageError
from pipeflow.engine.parallel.context import CONTEXT_ATTENTION, current_context
from pipeflow.engine.parallel.sharding import own_tokens
from pipeflow.engine.tensor.block_attention import _Seen
from pipeflow.engine.tensor.context_attention import Attend, ContextAttention
from pipeflow.engine.tensor.masked_attention import masked_attention
from pipeflow.models import GPTBlock, GPTEmbedding
from pipeflow.tensor import Dropout, checkpoint, manual_seed
from pipeflow.testing import run_threads
from tests.tensor.ranks import Counting, normal, require_near

SHAPE = BATCH, HEADS, LENGTH, SIZE = 2, 3, 24, 4


def over_context(function: Any, ranks: int, *arguments: Any, tensor: int = 1, how: str = "gather") -> list[Any]:
    return run_threads(function, ranks, *arguments, context=ranks // tensor, tensor=tensor, context_attention=how)


def mine(whole: Tensor, dim: int = 2) -> Tensor:
    context = current_context()
    return own_tokens(whole, context.context_rank, context.context_size, dim)


def inputs_of(heads: list[int]) -> list[Tensor]:
    return [normal(BATCH, each, LENGTH, SIZE, seed=seed) for seed, each in enumerate(heads)]


def attended(heads: list[int], options: dict[str, Any]) -> list[Tensor]:
    """The output of the whole sequence, and the gradients of queries, keys and values."""
    inputs = [each.requires_grad_() for each in inputs_of(heads)]
    output = masked_attention(*inputs, **options)
    output.backward(normal(*output.shape, seed=9))
    return [output.detach(), *(each.grad for each in inputs if each.grad is not None)]


def attend_here(heads: list[int], options: dict[str, Any]) -> None:
    inputs = [mine(each).requires_grad_() for each in inputs_of(heads)]
    output = ContextAttention()(*inputs, **options)
    output.backward(mine(normal(BATCH, heads[0], LENGTH, SIZE, seed=9)))
    found = [output, *(each.grad for each in inputs)]
    for one, whole in zip(found, attended(heads, options), strict=True):
        require_near(one, mine(whole))


@pytest.mark.parametrize("how", CONTEXT_ATTENTION)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_the_whole_sequence(ranks: int, how: str) -> None:
    over_context(attend_here, ranks, [12, 12, 12], {}, how=how)


DOCUMENTS = (torch.arange(LENGTH) // 7).expand(BATCH, -1)


@pytest.mark.parametrize("how", ["gather", "all_to_all"])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_windows_and_documents_of_fewer_heads_of_keys(heads: int, how: str) -> None:
    """Four ranks need 4 or 12 heads of keys, each beside its own heads of queries."""
    over_context(attend_here, 4, [12, heads, heads], {"window": 9, "documents": DOCUMENTS}, how=how)


@pytest.mark.parametrize("how", CONTEXT_ATTENTION)
def test_attention_to_later_tokens_is_that_of_the_whole_sequence(how: str) -> None:
    over_context(attend_here, 3, [6, 6, 6], {"causal": False}, how=how)


PADDED = DOCUMENTS.clone()
PADDED[0, 4:9] = -1 - PADDED[0, 4:9]  # across the end of a document
PADDED[1, :3] = -1 - PADDED[1, :3]


@pytest.mark.parametrize("how", ["gather", "all_to_all"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_that_of_the_whole_sequence(causal: bool, how: str) -> None:
    over_context(attend_here, 3, [6, 3, 3], {"causal": causal, "window": 9, "documents": PADDED}, how=how)


def refuse_three_heads() -> None:
    with pytest.raises(UsageError, match=r'divides heads over 2 context ranks, but there are 3 .*"gather" or "ring"'):
        ContextAttention()(*map(mine, inputs_of([3, 3, 3])))


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    over_context(refuse_three_heads, 2, how="all_to_all")


def compare_as_torch() -> None:
    ranks = current_context().context_size
    generator = torch.Generator().manual_seed(10)
    wholes = [torch.rand(8, 8, 64 * ranks, 32, generator=generator).requires_grad_() for _ in range(3)]
    query, key, value = wholes
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    output.sum().backward()
    inputs = [mine(each.detach()).requires_grad_() for each in wholes]
    found = ContextAttention()(*inputs)
    found.sum().backward()
    torch.testing.assert_close(found, mine(output), rtol=1e-5, atol=1e-8)
    for each, whole in zip(inputs, wholes, strict=True):
        assert each.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(each.grad, mine(whole.grad), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("how", CONTEXT_ATTENTION)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_own_comparison_of_context_ranks(ranks: int, how: str) -> None:
    """Sizes, dtype and tolerances are those of `test_ring_attention_sdpa` in torch's test/distributed/tensor, for its
    kernel with the least tolerance.
    """
    over_context(compare_as_torch, ranks, how=how)


class Elements(Counting):
    """Counts the elements that collectives bring to this rank from others, or take from it."""

    elements = 0

    def all_gather(self, whole: Tensor, part: Tensor) -> Any:
        self.elements += whole.numel() - part.numel()
        return self.__getattr__("all_gather")(whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Any:
        self.elements += whole.numel() - part.numel()
        return self.__getattr__("reduce_scatter")(part, whole)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Any:
        self.elements += received.numel() - received.split([*receive_counts])[self.rank].numel()
        return self.__getattr__("all_to_all")(received, sent, receive_counts, send_counts)

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        self.elements += tensor.numel() * (source != self.rank)
        return self.__getattr__("broadcast")(tensor, source)

    def reduce(self, tensor: Tensor, target: int) -> Any:
        self.elements += tensor.numel() * (target != self.rank)
        return self.__getattr__("reduce")(tensor, target)


def exchange_counted() -> None:
    group = Elements(current_context().context)
    inputs = [mine(normal(*SHAPE, seed=seed)).requires_grad_() for seed in range(3)]
    output = ContextAttention(group)(*inputs)
    formula = (group.size - 1) / group.size * 2 * LENGTH * HEADS * SIZE * BATCH
    assert (group.elements, group.taken()) == (formula, {"all_gather": 1})
    output.sum().backward()
    assert (group.elements, group.taken()) == (2 * formula, {"reduce_scatter": 1})


SHARED = 1  # heads of keys and values


def ring_counted() -> None:
    """Each rank's keys and values come once in a forward, and again in a backward, which also sends their gradients.
    A rank keeps its own ones alone.
    """
    group = Elements(current_context().context)
    shapes = [SHAPE, (BATCH, SHARED, LENGTH, SIZE), (BATCH, SHARED, LENGTH, SIZE)]
    query, key, value = (mine(normal(*shape, seed=seed)).requires_grad_() for seed, shape in enumerate(shapes))
    formula = (group.size - 1) / group.size * 2 * LENGTH * SHARED * SIZE * BATCH
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ContextAttention(group)(query, key, value)
    assert (group.elements, group.taken()) == (formula, {"broadcast": group.size})
    assert sum(kept.values()) == 2 * query.nbytes + query.nbytes // SIZE + 2 * key.nbytes
    output.sum().backward()
    assert (group.elements, group.taken()) == (3 * formula, {"broadcast": group.size, "reduce": group.size})


def swaps_counted() -> None:
    """Queries, keys and values of other tokens come together, and the output goes back. Two heads of keys are enough
    for two ranks, and four ranks need four.
    """
    group = Elements(current_context().context)
    heads = [8, 2, 2]
    inputs = [mine(normal(BATCH, each, LENGTH, SIZE, seed=each)).requires_grad_() for each in heads]
    output = ContextAttention(group)(*inputs)
    moved = 2 * 8 + 2 * max(2, group.size)
    formula = (group.size - 1) / group.size**2 * LENGTH * moved * SIZE * BATCH
    assert (group.elements, group.taken()) == (formula, {"all_to_all": 2})
    output.sum().backward()
    assert (group.elements, group.taken()) == (2 * formula, {"all_to_all": 2})


COUNTED = {"gather": exchange_counted, "ring": ring_counted, "all_to_all": swaps_counted}


@pytest.mark.parametrize(("how", "counted"), COUNTED.items())
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_the_formula(ranks: int, how: str, counted: Any) -> None:
    over_context(counted, ranks, how=how)


def in_another_form() -> None:
    """What all forms give for fewer heads of keys, another scale, and 16-bit numbers."""
    found = []
    for how in CONTEXT_ATTENTION:
        layer, inputs = (
            ContextAttention(),
            [
                mine(normal(BATCH, heads, LENGTH, SIZE, seed=seed)).float().requires_grad_()
                for seed, heads in enumerate((4, 1, 1))
            ],
        )
        layer.exchange = how
        with torch.autocast("cpu"):
            output = layer(*inputs, scale=0.3)
        output.sum().backward()
        found.append([output, *(each.grad for each in inputs)])
    for gathered, *others in zip(*found, strict=True):
        for other in others:
            assert gathered.dtype == other.dtype
            torch.testing.assert_close(other, gathered, rtol=0.02, atol=0.02)


def test_all_forms_have_grouped_heads_scales_and_autocast() -> None:
    over_context(in_another_form, 2)


def pairs_here() -> int:
    """The pairs of a query and a key whose scores a rank computes in two slices, of blocks that are whole or causal."""
    context, pairs = current_context(), 0
    for source, before in product(range(context.context_size), (0, LENGTH)):
        for (_, queries), (_, keys), causal in _Seen.of(context.context_rank, source, LENGTH, before + LENGTH):
            pairs += queries * (queries + 1) // 2 if causal else queries * keys
    return pairs


def test_each_rank_of_a_ring_computes_an_equal_share() -> None:
    pairs = over_context(pairs_here, 3, how="ring")
    assert len(set(pairs)) == 1
    assert sum(pairs) == 6 * LENGTH * (6 * LENGTH + 1) // 2


def refuse_dropout() -> None:
    block = GPTBlock(WIDTH, HEADS_OF_BLOCK, attention_dropout=0.5)
    with pytest.raises(UsageError, match='launch with context_attention="gather"'):
        block(torch.zeros(1, 4, WIDTH), None)


def test_dropout_in_a_ring_is_refused() -> None:
    over_context(refuse_dropout, 2, how="ring")


def refuse_a_second_derivative() -> None:
    inputs = [mine(normal(*SHAPE, seed=seed)).requires_grad_() for seed in range(3)]
    output = ContextAttention()(*inputs)
    with pytest.raises(UsageError, match="leave create_graph=True out"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)


def test_a_second_derivative_of_a_ring_is_refused() -> None:
    over_context(refuse_a_second_derivative, 2, how="ring")


WIDTH, HEADS_OF_BLOCK, TOKENS = 32, 2, 64


def operations(length: int) -> float:
    """Of a block's forward of `length` tokens: those of linear layers as torch counts them, and two products for each
    pair of a query and a key that it sees.
    """
    block, pairs = GPTBlock(WIDTH, HEADS_OF_BLOCK), list[float]()
    whole_forward = block.attention.over_context.forward

    def counted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys = query.shape[2], key.shape[2]
        pairs.append(queries * keys - queries * (queries - 1) / 2)
        return torch.zeros_like(query)

    def forward(query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        return whole_forward(query, key, value, counted)

    block.attention.over_context.forward = forward  # type: ignore[assignment, method-assign]
    with FlopCounterMode(display=False) as counter:
        block(torch.zeros(1, length, WIDTH), None)
    return float(counter.get_total_flops()) + 2 * 2 * sum(pairs) * WIDTH


def count_here(ranks: int) -> float:
    return operations(TOKENS // ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_computes_an_equal_share(ranks: int) -> None:
    whole = operations(TOKENS)
    for found in over_context(count_here, ranks, ranks):
        assert found / whole == pytest.approx(1 / ranks, abs=0.02)


def draw_here() -> Tensor:
    manual_seed(5)
    mask: Tensor = Dropout(0.5)(torch.ones(64))
    return mask


def test_masks_differ_over_context_ranks_and_are_shared_by_tensor_ranks() -> None:
    masks = over_context(draw_here, 4, tensor=2)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def refuse_to_draw() -> None:
    with pytest.raises(UsageError, match=r"context ranks needs pipeflow\.tensor\.manual_seed"):
        Dropout(0.5)(torch.ones(4))


def test_dropout_without_a_seed_is_refused() -> None:
    over_context(refuse_to_draw, 2)


def drop_here() -> None:
    """A recomputed block gathers again, and draws the masks of its first forward."""
    manual_seed(5)
    block = GPTBlock(WIDTH, HEADS_OF_BLOCK, attention_dropout=0.5, dropout=0.5, dtype=torch.float64)
    for parameter in block.parameters():
        parameter.data.copy_(normal(*parameter.shape) / 4)
    found = []
    for recomputes in (False, True):
        manual_seed(7)
        input = normal(2, 8, WIDTH).requires_grad_()
        output, _ = checkpoint(block, input, None) if recomputes else block(input, None)
        torch.autograd.backward(output.sum())
        found.append((output.detach(), input.grad))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_a_recomputed_block_has_the_masks_of_its_forward() -> None:
    over_context(drop_here, 2)


def embed_here() -> None:
    embedding = GPTEmbedding(4, 5, LENGTH, dtype=torch.float64)
    embedding.position_embeddings.weight.data.copy_(normal(LENGTH, 4))
    embedding.word_embeddings.weight.data.zero_()
    require_near(embedding(torch.zeros(1, LENGTH // 2, dtype=torch.long)), mine(normal(LENGTH, 4)[None], 1))


def test_positions_are_those_of_the_rank_s_own_tokens() -> None:
    over_context(embed_here, 2)


def refuse_a_mask() -> None:
    with pytest.raises(UsageError, match="attention_mask is not possible with context ranks"):
        GPTBlock(WIDTH, HEADS_OF_BLOCK)(torch.zeros(1, 4, WIDTH), torch.ones(1, 1, 1, 4, dtype=torch.bool))


def test_a_mask_is_refused() -> None:
    over_context(refuse_a_mask, 2)
