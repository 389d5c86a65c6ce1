"""The GPT of the example: the same model, and the same first weights, however it is cut and over however many tensor
ranks it lies.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

import gpt3.build
import gpt3.check
import gpt3.model
import pipeflow
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import partial_in, splits_of
from pipeflow.tensor import manual_seed
from pipeflow.testing import run_threads
from tests.examples.conftest import kept_numbers

CUTS = [
    [0, 8],
    [0, 4, 8],
    [0, 1, 7, 8],
    [0, 2, 4, 6, 8],
    list(range(9)),
]
TINY = pipeflow.GPT.named("tiny")
SMALL = pipeflow.GPT(layers=2, hidden=32, heads=4, positions=16, vocabulary=30)


def words(shape: pipeflow.GPT, length: int = 16) -> Any:
    return torch.randint(shape.vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


def stage_of(shape: pipeflow.GPT, start: int, end: int, **options: Any) -> Any:
    ends: dict[str, Any] = {"first": start == 0, "last": end == shape.layers}
    return gpt3.build.build_stage(start, end, shape.layers, **ends, **gpt3.build.options_of(shape), **options)


def stages_of(cut: list[int], seed: int = 0) -> list[Any]:
    return [stage_of(TINY, *part, seed=seed) for part in pairwise(cut)]


def whole_of(shape: pipeflow.GPT = TINY, **options: Any) -> Any:
    return stage_of(shape, 0, shape.layers, **options)


def logits_of(stages: list[Any], ids: Any) -> Any:
    output = stages[0](input_ids=ids)
    for stage in stages[1:]:
        output = stage(output, input_ids=ids)
    return output


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_stages_in_sequence_are_the_whole_model(cut: list[int]) -> None:
    whole, stages, ids = whole_of(), stages_of(cut), words(TINY)
    assert logits_of(stages, ids).equal(whole(input_ids=ids))
    weights = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert weights.keys() == whole.state_dict().keys()
    assert all(value.equal(weights[name]) for name, value in whole.state_dict().items())


def test_layers_and_seeds_start_apart() -> None:
    one, other = whole_of(), whole_of(seed=1)
    for name, value in one.named_parameters():
        if value.dim() == 2:
            assert not value.equal(other.get_parameter(name))
    assert not one.blocks["3"].wide.weight.equal(one.blocks["4"].wide.weight)


def test_first_weights_are_gpt_2s() -> None:
    weights = dict(whole_of().named_parameters())
    spread = {name: float(value.detach().std()) for name, value in weights.items() if value.dim() == 2}
    for name, found in spread.items():
        residual = name.endswith("output.weight")
        assert found == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name  # 2 x 8 layers, square root
    assert all(not value.any() for name, value in weights.items() if name.endswith("bias"))


def test_the_whole_model_has_one_word_table() -> None:
    whole = whole_of()
    assert whole.head.weight is whole.embedding.word_embeddings.weight
    assert whole.head.bias is None


def test_it_computes_what_a_gpt_does() -> None:
    """Against the same thing in plain operations, without a layer of the example or of pipeflow."""
    whole, ids = whole_of(SMALL, dtype=torch.float64), words(SMALL)
    weights, size = whole.state_dict(), SMALL.hidden // SMALL.heads

    def norm(values: Any, name: str) -> Any:
        return functional.layer_norm(values, (SMALL.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(values: Any, name: str) -> Any:
        return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    hidden = weights["embedding.word_embeddings.weight"][ids] + weights["embedding.position_embeddings.weight"][:16]
    for layer in ("blocks.0", "blocks.1"):
        mixed = linear(norm(hidden, f"{layer}.norm_1"), f"{layer}.attention.query_key_value")
        heads = []
        for head in mixed.split(3 * size, -1):
            query, key, value = head.split(size, -1)
            scores = query @ key.transpose(1, 2) / math.sqrt(size)
            later = torch.ones(16, 16, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
        hidden = hidden + linear(torch.cat(heads, -1), f"{layer}.attention.output")
        widened = functional.gelu(linear(norm(hidden, f"{layer}.norm_2"), f"{layer}.wide"))
        hidden = hidden + linear(widened, f"{layer}.output")
    expected = norm(hidden, "norm") @ weights["embedding.word_embeddings.weight"].T
    torch.testing.assert_close(whole(input_ids=ids), expected, rtol=1e-12, atol=1e-12)


def test_a_token_sees_only_what_is_before_it() -> None:
    whole, ids = whole_of(), words(TINY)
    changed = ids.clone()
    changed[:, 10:] = 7
    one, other = whole(input_ids=ids), whole(input_ids=changed)
    torch.testing.assert_close(one[:, :10], other[:, :10])
    assert not torch.allclose(one[:, 10:], other[:, 10:])


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_not_seen(left: bool) -> None:
    """Tokens score the same whatever stands where the mask is 0; no score is nan, not even where all is padding."""
    whole, ids = whole_of(SMALL), words(SMALL)
    mask = torch.ones_like(ids)
    padding = slice(0, 5) if left else slice(11, 16)
    mask[:, padding] = 0
    changed = ids.clone()
    changed[:, padding] = 3
    one, other = (whole(input_ids=each, attention_mask=mask) for each in (ids, changed))
    assert bool(one.isfinite().all())
    torch.testing.assert_close(one[mask.bool()], other[mask.bool()])
    if not left:
        torch.testing.assert_close(one[mask.bool()], whole(input_ids=ids)[mask.bool()])


def test_a_mask_that_is_added_says_the_same() -> None:
    block = whole_of(SMALL).blocks["0"]
    hidden, mask = torch.randn(2, 16, 32), torch.ones(2, 1, 1, 16)
    mask[:, :, :, :4] = 0
    seen, same = block(hidden, (1.0 - mask) * -10000.0)
    assert same.shape == (2, 1, 1, 16)
    torch.testing.assert_close(seen[:, 4:], block(hidden, mask.bool())[0][:, 4:])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_is_drawn_anew_and_repeated_by_a_checkpoint(checkpoint: bool) -> None:
    rates = {"embed_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_rate": 0.1}
    whole, ids = whole_of(SMALL, checkpoint=checkpoint, **rates), words(SMALL)
    plain = whole_of(SMALL, **rates)

    def gradients(model: Any) -> list[Any]:
        manual_seed(5)
        gpt3.model.GPTLMLoss()(model(input_ids=ids), ids).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    def compare() -> None:
        one, again, other = gradients(whole), gradients(whole), gradients(plain)
        assert all(a.equal(b) and a.equal(c) for a, b, c in zip(one, again, other, strict=True))
        assert not whole(input_ids=ids).equal(whole(input_ids=ids))
        assert whole.eval()(input_ids=ids).equal(plain.eval()(input_ids=ids))

    run_threads(compare, 1)


def test_a_checkpoint_keeps_little() -> None:
    whole, plain = (whole_of(SMALL, checkpoint=checkpoint) for checkpoint in (True, False))
    few, many = (kept_numbers(model, input_ids=words(SMALL)) for model in (whole, plain))
    assert few < many / 5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_agrees_over_tensor_ranks(sequence_parallel: bool) -> None:
    """What every rank has whole stays the same on all of them; other heads drop other scores."""
    ids = words(SMALL)

    def train() -> tuple[Any, list[Any]]:
        manual_seed(5)
        rates = {"embed_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_rate": 0.1}
        model = whole_of(SMALL, checkpoint=True, sequence_parallel=sequence_parallel, **rates)
        loss = gpt3.model.GPTLMLoss()(model(input_ids=ids), ids)
        loss.backward()
        for parameter in partial_in(model):
            assert parameter.grad is not None
            current_context().tensor.all_reduce(parameter.grad).wait()
        splits = splits_of(model)
        return loss.detach(), [parameter.grad for parameter in model.parameters() if id(parameter) not in splits]

    (loss, gradients), (other, same) = run_threads(train, 2, tensor=2)
    assert other.equal(loss)
    assert len(gradients) == 14
    for one, two in zip(gradients, same, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def step_of_a_part(ids: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss, and this rank's parts of weights and gradients."""
    model = whole_of(SMALL, dtype=torch.float64, **options)
    loss = gpt3.model.GPTLMLoss()(model(input_ids=ids, attention_mask=torch.ones_like(ids)), ids)
    loss.backward()
    if options.get("sequence_parallel"):
        for parameter in partial_in(model):
            assert parameter.grad is not None
            current_context().tensor.all_reduce(parameter.grad).wait()
    splits = splits_of(model)
    parts = {
        name: tuple((value, splits.get(id(parameter))) for value in (parameter.detach(), parameter.grad))
        for name, parameter in model.named_parameters()
    }
    return loss.detach(), parts


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "checkpoint": True}], ids=["plain", "sequence"])
def test_tensor_ranks_together_are_the_model(tensor: int, options: dict[str, Any]) -> None:
    """First weights bit by bit, loss and gradients to rounding; a vocabulary of 30 does not divide into 4."""
    ids = words(SMALL)
    [(loss, expected)] = run_threads(step_of_a_part, 1, ids, {})
    ranks = run_threads(step_of_a_part, tensor, ids, options, tensor=tensor)
    for other, _ in ranks:
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
    for name, ((weight, _), (gradient, _)) in expected.items():
        assert gpt3.check.whole([parts[name][0] for _, parts in ranks]).equal(weight), name
        found = gpt3.check.whole([parts[name][1] for _, parts in ranks])
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_heads_must_divide() -> None:
    with pytest.raises(pipeflow.UsageError, match="hidden_size 32 must be divisible by the number of heads, 5"):
        gpt3.model.GPTBlock(32, 5)


def test_the_loss_is_that_of_the_next_token() -> None:
    logits, loss = torch.zeros(1, 3, 5), gpt3.model.GPTLMLoss()
    logits[0, 0, 4] = logits[0, 1, 2] = 100.0
    assert loss(logits, torch.tensor([[0, 4, 2]])) == 0
    assert loss(logits, torch.tensor([[0, 4, 3]])) == 50
    even = loss(torch.zeros(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 1]]))
    assert float(even) == pytest.approx(math.log(5))


def test_a_stage_holds_nothing_of_the_others() -> None:
    count = sum(parameter.numel() for parameter in stage_of(TINY, 2, 4).parameters())
    assert count == TINY.parameters_of([(2, 4)])
