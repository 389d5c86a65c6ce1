"""The GPT of the example: the same model, and the same initial weights, however it is cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

CUTS = [
    [0, 8],
    [0, 4, 8],
    [0, 1, 7, 8],
    [0, 2, 4, 6, 8],
    list(range(9)),
]


@pytest.fixture
def ids(gpt3: Any) -> Any:
    return torch.randint(gpt3.model.PRESETS["tiny"].vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))


def stages_of(gpt3: Any, cut: list[int], seed: int = 0) -> list[Any]:
    shape = gpt3.model.PRESETS["tiny"]
    return [gpt3.model.build_stage(shape, *part, seed=seed) for part in pairwise(cut)]


def logits_of(stages: list[Any], ids: Any) -> Any:
    output = stages[0](input_ids=ids)
    for stage in stages[1:]:
        output = stage(output, input_ids=ids)
    return output


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_stages_in_sequence_are_the_whole_model(gpt3: Any, ids: Any, cut: list[int]) -> None:
    [whole] = stages_of(gpt3, CUTS[0])
    stages = stages_of(gpt3, cut)
    assert logits_of(stages, ids).equal(whole(input_ids=ids))
    weights = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert weights.keys() == whole.state_dict().keys()
    assert all(value.equal(weights[name]) for name, value in whole.state_dict().items())


def test_layers_and_seeds_start_apart(gpt3: Any) -> None:
    [one] = stages_of(gpt3, CUTS[0])
    [other] = stages_of(gpt3, CUTS[0], seed=1)
    for name, value in one.named_parameters():
        if value.dim() == 2:
            assert not value.equal(other.get_parameter(name))
    assert not one.blocks["3"].wide.weight.equal(one.blocks["4"].wide.weight)


def test_the_whole_model_has_one_word_table(gpt3: Any) -> None:
    [whole] = stages_of(gpt3, CUTS[0])
    assert whole.head.weight is whole.word_embeddings.weight
    assert whole.head.bias is None


def test_a_token_sees_only_what_is_before_it(gpt3: Any, ids: Any) -> None:
    [whole] = stages_of(gpt3, CUTS[0])
    changed = ids.clone()
    changed[:, 10:] = 7
    one, other = whole(input_ids=ids), whole(input_ids=changed)
    torch.testing.assert_close(one[:, :10], other[:, :10])
    assert not torch.allclose(one[:, 10:], other[:, 10:])


def test_the_loss_is_that_of_the_next_token(gpt3: Any) -> None:
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 4] = logits[0, 1, 2] = 100.0
    assert gpt3.model.next_token_loss(logits, torch.tensor([[0, 4, 2]])) == 0
    assert gpt3.model.next_token_loss(logits, torch.tensor([[0, 4, 3]])) == 50
    even = gpt3.model.next_token_loss(torch.zeros(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 1]]))
    assert float(even) == pytest.approx(math.log(5))


@pytest.mark.parametrize(
    ("preset", "billions"), [("tiny", 0.00188), ("gpt2-small", 0.124), ("gpt2-xl", 1.558), ("gpt3", 174.6)]
)
def test_presets_have_the_size_of_their_name(gpt3: Any, preset: str, billions: float) -> None:
    shape = gpt3.model.PRESETS[preset]
    with torch.device("meta"):
        model = gpt3.model.build_stage(shape, 0, shape.layers)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_stage_holds_nothing_of_the_others(gpt3: Any) -> None:
    shape = gpt3.model.PRESETS["tiny"]
    middle = gpt3.model.build_stage(shape, 2, 4)
    layer = sum(parameter.numel() for parameter in gpt3.model.Block(shape).parameters())
    assert sum(parameter.numel() for parameter in middle.parameters()) == 2 * layer
