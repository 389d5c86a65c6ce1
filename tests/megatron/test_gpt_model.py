"""GPTModel: losses and scores, its place, its first weights, and what it is not made from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.megatron.core import parallel_state
from pipeflow.megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from pipeflow.megatron.core.models.gpt.gpt_model import GPTModel
from pipeflow.megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from pipeflow.tensor import cut
from pipeflow.testing import run_threads
from tests.megatron.small import NAMES, SEQUENCE, WORDS, configuration, loader, models


def test_it_gives_each_tokens_loss_or_its_scores() -> None:
    def compute() -> Any:
        [model], sample = models(), next(iter(loader()))
        given = [sample[name] for name in NAMES]
        losses, scores = model(*given, labels=sample["labels"]), model(*given)
        assert losses.shape == (4, SEQUENCE)
        return losses.detach(), scores.detach(), sample["labels"]

    [(losses, whole, labels)] = run_threads(compute, 1)
    assert whole.shape == (4, SEQUENCE, WORDS)
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    halves = run_threads(compute, 2, tensor=2)
    torch.testing.assert_close(torch.cat([scores for _, scores, _ in halves], -1)[..., :WORDS], whole)
    assert all(torch.allclose(found, losses) for found, _, _ in halves)


def test_a_token_sees_what_the_mask_leaves() -> None:
    """True hides; without a mask, what comes later is hidden."""

    def compute() -> None:
        [model], (tokens, positions, mask) = models(), [next(iter(loader()))[name] for name in NAMES]
        causal = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        torch.testing.assert_close(model(tokens, positions, None), model(tokens, positions, causal))
        assert not torch.allclose(model(tokens, positions, mask), model(tokens, positions, None))

    run_threads(compute, 1)


def test_first_weights_follow_from_the_seed_and_from_no_layout() -> None:
    def drawn(seed: int | None) -> Any:
        parallel_state.initialize_model_parallel(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if seed is not None:
            model_parallel_cuda_manual_seed(seed)
        [model] = models()
        splits = splits_of(model)
        return {name: (value.detach(), splits.get(id(value))) for name, value in model.named_parameters()}

    [whole], [other], [unseeded] = (run_threads(drawn, 1, seed) for seed in (5, 6, None))
    name = "blocks.0.wide.weight"
    assert not whole[name][0].equal(other[name][0])
    assert not whole[name][0].equal(unseeded[name][0])
    for rank, parts in enumerate(run_threads(drawn, 4, 5, tensor=2)):
        for each, (part, split) in parts.items():
            group: Any = type("Group", (), {"rank": rank % 2, "size": 2})
            assert part.equal(cut(whole[each][0], split, group)), each


def test_options_reach_the_layers() -> None:
    def compute() -> None:
        [model] = models(
            ffn_hidden_size=32, hidden_dropout=0.25, attention_dropout=0.5, layernorm_epsilon=1e-3, init_method_std=0.5,
            activation_func=torch.relu, params_dtype=torch.float32, recompute_granularity="full",
        )  # fmt: skip
        block: Any = model.blocks["0"]
        assert block.wide.weight.shape == (32, 16)
        assert block.dropout.p == 0.25
        assert block.attention.dropout.p == 0.5
        assert block.norm_1.eps == 1e-3
        assert block.activation is torch.relu
        assert block.checkpoint
        assert model.embedding is not None
        assert model.embedding.dropout.p == 0.25
        assert float(model.embedding.word_embeddings.weight.detach().std()) == pytest.approx(0.5, rel=0.2)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    run_threads(compute, 1)


def test_a_stage_has_what_belongs_to_its_place() -> None:
    def ends(chunks: int) -> list[tuple[bool, bool, list[str]]]:
        return [(made.pre_process, made.post_process, list(made.blocks)) for made in models(chunks)]

    assert run_threads(ends, 2, 1) == [[(True, False, ["0", "1"])], [(False, True, ["2", "3"])]]
    first, last = run_threads(ends, 2, 2)
    assert first == [(True, False, ["0"]), (False, False, ["2"])]
    assert last == [(False, False, ["1"]), (False, True, ["3"])]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"pipeline_dtype": torch.bfloat16}, {}, "pipeline_dtype must be the weights' dtype, torch.float64"),
        ({"tensor_model_parallel_size": 2}, {}, "has tensor_model_parallel_size=2, but 1 was initialized"),
        ({"pipeline_model_parallel_size": 4}, {}, "has pipeline_model_parallel_size=4, but 2 was initialized"),
        ({"ffn_hidden_size": 40}, {}, "ffn_hidden_size=40 must be a multiple of hidden_size=16"),
        ({"recompute_granularity": "selective"}, {}, "must be None or 'full', got 'selective'"),
        ({}, {"position_embedding_type": "rope"}, "position_embedding_type must be 'learned_absolute', got 'rope'"),
        ({}, {"transformer_layer_spec": torch.nn.Linear}, "the only kind of layer is"),
        ({}, {"pre_process": True, "post_process": True}, "must be (True|False) for this stage, got"),
        ({}, {"vp_stage": 1}, "this rank has no stage 1: it has 1"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    def refused() -> None:
        given = {"transformer_layer_spec": get_gpt_layer_local_spec(), **options}
        with pytest.raises(UsageError, match=message):
            GPTModel(configuration(**config), vocab_size=WORDS, max_sequence_length=SEQUENCE, **given)

    run_threads(refused, 2)


def test_an_input_may_come_in_a_list() -> None:
    def compute() -> None:
        [model], hidden = models(), torch.randn(1, 4, 16, dtype=torch.float64)
        if model.pre_process:
            return
        tokens, positions = torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None]
        outputs = []
        for given in (hidden, [hidden]):
            model.set_input_tensor(given)
            outputs.append(model(tokens, positions, None))
        assert outputs[0].equal(outputs[1])

    run_threads(compute, 2)
