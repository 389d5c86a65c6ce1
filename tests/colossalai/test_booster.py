"""A Booster trains models of transformers as they are: equal to the plain model, under every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.plugins import require_fits
from pipeflow.core.errors import PipelineError, UsageError
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.testing import run_processes, run_threads
from tests.colossalai.boosted import Batch, causal_loss, own_part, require_as_plain
from tests.covering import some
from tests.stages.families import make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "pp2": ({"tp_size": 1, "pp_size": 2, "num_microbatches": 2}, 1),
    "tp2": ({"tp_size": 2, "pp_size": 1}, 1),
    "pp2 x tp2": ({"tp_size": 2, "pp_size": 2, "microbatch_size": 1}, 1),
    "pp2 x dp2, zero 1": ({"tp_size": 1, "pp_size": 2, "microbatch_size": 1, "zero_stage": 1}, 2),
}
PIPELINE: dict[str, Any] = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"}


def made(name: str) -> tuple[nn.Module, Batch]:
    """A model and a batch of four samples, of which one has labels that do not count."""
    module, batch = make(transformers, name)
    return module, {key: torch.cat([each, each[1:2]]) for key, each in batch.items()}


def classifier(labels: int) -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = transformers.BertForSequenceClassification(config).double()
    words = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    return module, {"input_ids": words, "labels": torch.arange(4) % labels}


def class_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits, inputs["labels"])


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_equal_to_the_plain_model(name: str, layout: str) -> None:
    options, data = LAYOUTS[layout]
    require_as_plain(*made(name), causal_loss, {**options, "max_norm": 0.5}, data=data)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", some(LAYOUTS, ["tp2", "pp2 x tp2"]))
def test_labels_that_the_tensor_size_does_not_divide(layout: str) -> None:
    options, data = LAYOUTS[layout]
    require_as_plain(*classifier(3), class_loss, options, data=data)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"pp_style": "interleaved", "num_model_chunks": 2},
        {"pp_style": "zbv", "num_model_chunks": 2},
        {"num_layers_per_stage": [1, 3]},
    ],
    ids=str,
)
def test_styles_of_pipelines(options: dict[str, Any]) -> None:
    require_as_plain(*made("llama"), causal_loss, {**PIPELINE, **options})


@pytest.mark.exhaustive
def test_a_rank_keeps_states_of_its_own_alone() -> None:
    module, batch = made("llama")
    total = sum(each.numel() for each in module.parameters())
    options, data = LAYOUTS["pp2 x dp2, zero 1"]
    states = require_as_plain(module, batch, causal_loss, options, data=data)
    assert sum(states) == total
    assert max(states) < total / 2
    whole = require_as_plain(module, batch, causal_loss, {**options, "zero_stage": 0}, data=data)
    assert sum(whole) == 2 * total


@pytest.mark.exhaustive
def test_stages_have_the_blocks_that_were_asked_for() -> None:
    def rank() -> int:
        module, batch = made("llama")
        booster = Booster(plugin=HybridParallelPlugin(**PIPELINE, num_layers_per_stage=[1, 3]))
        model, *_ = booster.boost(module)
        with torch.no_grad():
            booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss)
        return sum(name.endswith("self_attn.q_proj.weight") for name, _ in model.named_parameters())

    assert run_threads(rank, 2) == [1, 3]


@pytest.mark.exhaustive
def test_evaluation_and_outputs() -> None:
    """Of any number of samples, before training; only the last stage has them."""
    module, batch = made("llama")
    expected = module(**batch)

    def rank() -> list[Any]:
        module, batch = made("llama")
        booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=2, microbatch_size=2, precision="fp32"))
        model, *_ = booster.boost(module.eval())
        assert not model.training
        few = {name: each[:3] for name, each in batch.items()}
        with torch.no_grad():
            told = booster.execute_pipeline(iter([few]), model, lambda outputs, _: outputs.loss, return_outputs=True)
            again = booster.execute_pipeline(iter([batch]), model, causal_loss, None, False, True)
        last = booster.plugin.stage_manager.is_last_stage()
        assert booster.plugin.stage_manager.is_first_stage() is not last
        assert (told["loss"] is None) is not last
        assert again["loss"] is None
        return [last, told["outputs"], again["outputs"]]

    (_, none, _), (last, few, four) = run_threads(rank, 2)
    assert last
    assert none is None
    torch.testing.assert_close(few["logits"], expected.logits[:3], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(four["logits"], expected.logits, rtol=1e-9, atol=1e-12)


@pytest.mark.exhaustive
def test_gradients_add_up_without_sync() -> None:
    """Two halves, of which the first is not averaged, and half of each loss: the gradient of the whole."""
    module, batch = classifier(3)
    class_loss(module(**batch), batch).backward()

    def rank() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        module_, batch_ = classifier(3)
        module_.load_state_dict(module.state_dict())
        booster = Booster(plugin=HybridParallelPlugin(**PIPELINE))
        model, optimizer, *_ = booster.boost(module_, SGD(module_.parameters(), lr=0.1))
        halves = [{name: each.chunk(2)[half] for name, each in batch_.items()} for half in range(2)]

        def half_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
            return class_loss(outputs, inputs) / 2

        data_rank = booster.plugin.context.data_rank
        order = halves if data_rank == 0 else halves[::-1]
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter(order[:1]), model, half_loss, optimizer)
            own = next(each.grad.clone() for each in model.parameters() if each.grad is not None)
        booster.execute_pipeline(iter(order[1:]), model, half_loss, optimizer)
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, own

    results = run_threads(rank, 4, data=2)
    assert not torch.allclose(results[0][1], results[2][1])  # of two replicas
    for gradients, _ in results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, module.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


@pytest.mark.exhaustive
def test_schedulers_of_rates_work_on_the_optimizer_that_was_given() -> None:
    def rank() -> list[float]:
        module, batch = made("llama")
        booster = Booster(plugin=HybridParallelPlugin(**PIPELINE, max_norm=1.0))
        optimizer = AdamW(module.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        model, optimizer, criterion, loader, scheduler = booster.boost(
            module, optimizer, causal_loss, [batch], scheduler
        )
        rates = []
        for _ in range(2):
            booster.execute_pipeline(iter(loader), model, criterion, optimizer)
            assert optimizer.get_grad_norm() is None or optimizer.get_grad_norm() > 0
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run_threads(rank, 2) == [[0.5, 0.25]] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_has_float32_masters(precision: str) -> None:
    def rank() -> list[Any]:
        torch.manual_seed(0)
        module, batch = classifier(3)
        booster = Booster(plugin=HybridParallelPlugin(**{**PIPELINE, "precision": precision}, initial_scale=64.0))
        model, optimizer, *_ = booster.boost(module.float(), AdamW(module.parameters(), lr=0.01))
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)["loss"]
            optimizer.step()
            losses.append(None if loss is None else loss.item())
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert {each.dtype for group in optimizer.param_groups for each in group["params"]} == {torch.float32}
        return losses

    first, last = run_threads(rank, 2)
    assert first == [None] * 8
    assert last[-1] < last[0] - 0.3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_flash_atention": True}, "unknown option of HybridParallelPlugin 'enable_flash_atention'; did you mean"),
    ({"zero_stage": 2}, "zero_stage=2 needs pp_size=1"),
    ({"zero_stage": 3}, "zero_stage must be 0, 1 or 2, got 3"),
    (
        {"overlap_p2p": False, "pp_style": "interleaved", "num_model_chunks": 2},
        "overlap_p2p=False is not supported with pp_style='interleaved'",
    ),
    ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by must be at least 1, got 0"),
    ({"pp_style": "gpipe"}, "pp_style must be one of 1f1b, interleaved, zbv, got 'gpipe'"),
    ({"pp_style": "interleaved"}, "needs num_model_chunks of at least 2, got 1"),
    ({"num_model_chunks": 2}, "pp_style='1f1b' has 1 stages per rank, got num_model_chunks=2"),
    ({"microbatch_size": 1}, "pass num_microbatches or microbatch_size, not both"),
    ({"num_microbatches": None}, "a pipeline needs num_microbatches or microbatch_size"),
    ({"num_microbatches": 0}, "num_microbatches must be a whole number of at least 1, got 0"),
    ({"precision": "fp8"}, "precision must be one of fp16, bf16, fp32, got 'fp8'"),
    ({"fp8_communication": True}, "does not support fp8_communication=True: tensors are sent in their own dtype"),
    ({"sequence_parallelism_mode": "ring"}, "sequence_parallelism_mode='ring' is not supported: it splits the context"),
    (
        {"sequence_parallelism_mode": "all_to_all"},
        "use 'split_gather', or context ranks, as in .*\"all_to_all\"",
    ),
    ({"pp_size": 3}, "a world of 2 processes is not divisible into replicas of 3"),
    ({"num_layers_per_stage": [4]}, "num_layers_per_stage has 1 numbers for 2 stages"),
    ({"max_norm": -1.0}, "max_norm must be positive"),
    ({"initial_scale": 0.5, "precision": "fp16"}, "min_scale 1.0 <= initial_scale 0.5"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_a_plugin_refuses(options: dict[str, Any], said: str) -> None:
    def rank() -> None:
        with pytest.raises(UsageError, match=said):
            HybridParallelPlugin(**{**PIPELINE, **options})
        HybridParallelPlugin(**PIPELINE, cpu_offload=False, ddp_bucket_cap_mb=25)

    run_threads(rank, 2)


@pytest.mark.exhaustive
def test_options_that_change_no_result_are_accepted() -> None:
    """Where they would, the layout or the device decides."""
    accepted: dict[str, Any] = {"cpu_offload": True, "overlap_p2p": False, "enable_metadata_cache": False}
    accepted |= {"make_vocab_size_divisible_by": 128, "dp_outside": False}

    def rank(sizes: dict[str, Any]) -> None:
        plugin = HybridParallelPlugin(**{**PIPELINE, **accepted, **sizes})
        assert plugin.shard_config.make_vocab_size_divisible_by == 128
        there = SimpleNamespace(device=torch.device("cuda"))
        with pytest.raises(UsageError, match="cpu_offload=True is not supported on cuda"):
            require_fits(plugin.settings, there)  # type: ignore[arg-type]  # as a context would be

    run_threads(rank, 2, {})
    run_threads(rank, 2, {"pp_size": 1}, data=2)

    def between() -> None:
        with pytest.raises(UsageError, match="dp_outside=False is not supported with replicas of a pipeline"):
            HybridParallelPlugin(**{**PIPELINE, "dp_outside": False})

    run_threads(between, 4, data=2)


def both_ways(tensor: int) -> Any:
    """Without sharded gradients, and with them."""
    return [sharded_gradients({"tp_size": tensor, "zero_stage": stage}) for stage in (0, 2)]


def sharded_gradients(options: dict[str, Any]) -> Any:
    """The losses of three steps and the weights then, joined, and how much of each this rank has."""
    torch.manual_seed(0)
    module, batch = classifier(3)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=1, precision="fp32", max_norm=0.5, **options))
    model, optimizer, criterion, *_ = booster.boost(module, AdamW(module.parameters(), lr=0.01), class_loss)
    batch, losses = own_part(batch), []
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            with booster.no_sync(model, optimizer):
                booster.backward(criterion(model(**batch), batch), optimizer)
        losses.append(criterion(model(**batch), batch))
        booster.backward(losses[-1], optimizer)
        optimizer.step()
    held = sum(_here(each.grad).numel() for each in model.parameters() if each.grad is not None)
    states = sum(_here(state["exp_avg"]).numel() for state in optimizer.state.values())
    splits = splits_of(model)
    weights = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().numpy().copy()
        for name, each in model.named_parameters()
        if id(each) not in splits
    }
    return [loss.item() for loss in losses], weights, held, states, sum(each.numel() for each in module.parameters())


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", some([1, 2], [2]))
def test_zero_stage_2_shards_gradients(tensor: int) -> None:
    """Between the replicas of a whole model; it trains as without."""
    for plain, sharded in run_processes(both_ways, 2 * tensor, tensor, data=2, tensor=tensor):
        (losses, weights, held, states, _), (same, alike, less, fewer, _) = plain, sharded
        assert same == pytest.approx(losses, rel=1e-9)
        for name, weight in weights.items():
            assert numpy.allclose(alike[name], weight, rtol=1e-9, atol=1e-9), name
        assert less < 0.6 * held
        assert fewer < 0.6 * states


def test_a_booster_refuses() -> None:
    def rank() -> None:
        module, batch = made("llama")
        booster = Booster(plugin=HybridParallelPlugin(**PIPELINE))
        with pytest.raises(UsageError, match="has parameters that are not in the model"):
            booster.boost(module, SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        model, optimizer, *_ = booster.boost(module, SGD(module.parameters(), lr=0.1))
        with pytest.raises(UsageError, match=r"run every batch with booster\.execute_pipeline"):
            model(**batch)
        with pytest.raises(UsageError, match="the model has not run a batch yet"):
            booster.backward(torch.ones((), requires_grad=True), optimizer)
        with pytest.raises(UsageError, match="training needs the optimizer that boost returned"):
            booster.execute_pipeline(iter([batch]), model, causal_loss)
        with pytest.raises(UsageError, match="data_iter has no batch left"):
            booster.execute_pipeline(iter([]), model, causal_loss, optimizer)
        with pytest.raises(UsageError, match="there is no criterion"):
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        with pytest.raises(PipelineError, match="You must specify exactly one of input_ids or inputs_embeds"):
            booster.execute_pipeline(iter([{"labels": batch["input_ids"]}]), model, causal_loss, optimizer)
        booster.execute_pipeline(iter([batch]), model, causal_loss, optimizer)
        with pytest.raises(UsageError, match="needs the model that boost returned"):
            booster.execute_pipeline(iter([batch]), module, causal_loss, optimizer)
        with pytest.raises(UsageError, match="this rank has a part of the model only"):
            booster.backward(torch.ones((), requires_grad=True), optimizer)
        with pytest.raises(UsageError, match="that is not boosted yet"):
            booster.boost(model)

    run_threads(rank, 2)
