"""What a Booster writes is read by plain torch and by transformers, and by a Booster of another layout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from pipeflow.colossalai.booster import Booster
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.core.errors import PipeflowError, UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.training.checkpoint.safetensors import load_safetensors
from tests.colossalai.boosted import causal_loss
from tests.stages.families import make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STAGES: dict[str, Any] = {"tp_size": 1, "pp_size": 2, "num_microbatches": 3, "precision": "fp32"}
PARTS: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "precision": "fp32"}


class Training:
    """One rank's, of GPT-2, whose embedding is its head."""

    def __init__(self, options: dict[str, Any], seed: int = 1) -> None:
        module, self.batch = make(transformers, "gpt2")
        if seed != 1:
            for parameter in module.parameters():
                nn.init.ones_(parameter)
        self.booster = Booster(plugin=HybridParallelPlugin(**options))
        optimizer = AdamW(module.parameters(), lr=0.01)
        rates = LambdaLR(optimizer, lambda step: 0.5**step)
        self.model, self.optimizer, *_, self.rates = self.booster.boost(module, optimizer, causal_loss, None, rates)

    def step(self) -> None:
        self.booster.execute_pipeline(iter([self.batch]), self.model, None, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()

    def loss(self) -> Any:
        with torch.no_grad():
            found: Any = self.booster.execute_pipeline(iter([self.batch]), self.model)["loss"]
        return found if found is None else found.detach()


def weights_of(training: Training) -> dict[str, Any]:
    """Those of rank 0 alone, whole."""
    return {name: each.detach().clone() for name, each in training.model.named_parameters(remove_duplicate=False)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["pt", "safetensors", "folder"])
@pytest.mark.parametrize(("first", "then"), [(STAGES, PARTS), (PARTS, STAGES)], ids=["stages", "parts"])
def test_weights(tmp_path: Path, form: str, first: dict[str, Any], then: dict[str, Any]) -> None:
    path = tmp_path / f"model.{form}"

    def save() -> Any:
        training = Training(first)
        training.step()
        options: dict[str, Any] = {"shard": True, "size_per_shard": 1} if form == "folder" else {}
        training.booster.save_model(training.model, path, **options, use_safetensors=form == "safetensors")
        return training.loss()

    def load() -> Any:
        training = Training(then, seed=2)
        training.booster.load_model(training.model, path)
        return training.loss()

    expected = [loss for loss in run_threads(save, 2, tensor=first["tp_size"]) if loss is not None]
    for loss in run_threads(load, 2, tensor=then["tp_size"]):
        assert loss is None or torch.allclose(loss, expected[0], rtol=1e-9, atol=0)
    module, batch = make(transformers, "gpt2")
    if form == "pt":
        module.load_state_dict(torch.load(path, weights_only=True))
    elif form == "safetensors":
        from safetensors.torch import load_file

        module.load_state_dict(load_file(path))
    else:
        module.config.save_pretrained(path)  # type: ignore[union-attr, operator]  # a model of transformers
        module = type(module).from_pretrained(path, dtype=torch.float64)  # type: ignore[attr-defined]  # likewise
    assert torch.allclose(causal_loss(module(**batch), batch), expected[0], rtol=1e-9, atol=0)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [STAGES, PARTS], ids=["stages", "parts"])
def test_a_folder_of_transformers_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    """It has a tied weight once."""
    module, batch = make(transformers, "gpt2")
    module.save_pretrained(tmp_path)  # type: ignore[operator]  # a model of transformers
    expected = causal_loss(module(**batch), batch).detach()

    def load() -> Any:
        made = type(module)(module.config)
        booster = Booster(plugin=HybridParallelPlugin(**options))
        model, *_ = booster.boost(made.double(), None, causal_loss)
        booster.load_model(model, tmp_path)
        with torch.no_grad():
            return booster.execute_pipeline(iter([batch]), model)["loss"]

    losses = [loss for loss in run_threads(load, 2, tensor=options["tp_size"]) if loss is not None]
    assert losses
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)


def saved_in_parts(path: Path) -> list[float]:
    """The losses when it was saved and a step later, of replicas of tensor ranks that shard what they hold."""
    training = Training({**PARTS, "zero_stage": 2})
    training.step()
    training.booster.save_model(training.model, path / "model", shard=True)
    training.booster.save_optimizer(training.optimizer, path / "optimizer")
    losses = [training.loss().item()]
    training.step()
    return [*losses, training.loss().item()]


def loaded(path: Path, options: dict[str, Any]) -> list[float]:
    training = Training({**PARTS, **options}, seed=2)
    training.booster.load_model(training.model, path / "model")
    losses = [training.loss().item()]
    training.booster.load_optimizer(training.optimizer, path / "optimizer")
    training.rates.step()
    training.step()
    return [*losses, training.loss().item()]


@pytest.mark.exhaustive
def test_what_zero_stage_2_shards_is_saved_whole(tmp_path: Path) -> None:
    [expected, *others] = run_processes(saved_in_parts, 4, tmp_path, data=2, tensor=2)
    assert others == [pytest.approx(expected, rel=1e-9)] * 3
    [alone] = run_threads(loaded, 1, tmp_path, {"tp_size": 1})
    assert alone == pytest.approx(expected, rel=1e-9)
    assert (
        run_processes(loaded, 4, tmp_path, {"zero_stage": 2}, data=2, tensor=2)
        == [pytest.approx(expected, rel=1e-9)] * 4
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("then", [STAGES, PARTS], ids=["the same layout", "tensor ranks"])
def test_training_goes_on(tmp_path: Path, then: dict[str, Any]) -> None:
    """Loaded before the first batch, in a model of other weights."""

    def run(options: dict[str, Any], *, resumed: bool) -> Any:
        training = Training(options, seed=2 if resumed else 1)
        if resumed:
            training.booster.load_model(training.model, tmp_path / "model")
            training.booster.load_optimizer(training.optimizer, tmp_path / "optimizer")
            training.booster.load_lr_scheduler(training.rates, tmp_path / "rates")
        else:
            training.step()
            training.booster.save_model(training.model, tmp_path / "model", shard=True)
            training.booster.save_optimizer(training.optimizer, tmp_path / "optimizer", shard=True)
            training.booster.save_lr_scheduler(training.rates, tmp_path / "rates")
        training.step()
        training.step()
        return training.loss()

    expected = [loss for loss in run_threads(lambda: run(STAGES, resumed=False), 2) if loss is not None]
    again = run_threads(lambda: run(then, resumed=True), 2, tensor=then["tp_size"])
    losses = [loss for loss in again if loss is not None]
    assert losses
    for loss in losses:
        assert torch.allclose(loss, expected[0], rtol=1e-9, atol=0)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text", encoding="utf-8")
    torch.save({"step": 1}, tmp_path / "step.pt")
    torch.save({"transformer.wte.weight": torch.ones(1)}, tmp_path / "few.pt")

    def rank() -> None:
        training = Training(STAGES)
        booster = training.booster
        for file, said in [
            ("nowhere", "there is no file or folder"),
            ("text", "damaged"),
            ("step.pt", "is not a state_dict of tensors"),
            ("few.pt", "lacks .* weights of the model"),
        ]:
            with pytest.raises(PipeflowError, match=said):
                booster.load_model(training.model, tmp_path / file)
        with pytest.raises(UsageError, match="is not a checkpoint: it does not exist"):
            booster.load_optimizer(training.optimizer, tmp_path / "nowhere")
        with pytest.raises(UsageError, match=r"was not written by torch\.save"):
            booster.load_lr_scheduler(training.rates, tmp_path / "text")
        with pytest.raises(UsageError, match="the model has not run a batch yet"):
            booster.save_optimizer(training.optimizer, tmp_path / "optimizer")
        with pytest.raises(UsageError, match="the model that boost returned"):
            booster.save_model(nn.Linear(1, 1), tmp_path / "model")
        with pytest.raises(UsageError, match="the optimizer that boost returned"):
            booster.save_optimizer(AdamW(nn.Linear(1, 1).parameters()), tmp_path / "model")

    run_threads(rank, 2)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.exhaustive
def test_a_rank_that_reads_slowly_finds_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the other rank has already failed, which ends in removing the file's parts."""
    torch.save({"transformer.wte.weight": torch.ones(1)}, tmp_path / "few.pt")

    def slowly(*arguments: Any) -> None:
        time.sleep(0.5 if current_context().rank else 0.0)
        load_safetensors(*arguments)

    monkeypatch.setattr("pipeflow.colossalai.boosters.load_safetensors", slowly)

    def rank() -> None:
        training = Training(STAGES)
        with pytest.raises(PipeflowError, match=r"lacks .* weights of the model"):
            training.booster.load_model(training.model, tmp_path / "few.pt")

    run_threads(rank, 2)
    assert not list(tmp_path.glob(".*"))
