"""The balance loss of experts counts the tokens of all replicas, context and expert ranks: each microbatch has that of
one process which accumulates, whose microbatches have the samples of all replicas.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import Divided, Pipeline, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.transport.protocol import Alone
from pipeflow.engine.tensor import balance
from pipeflow.engine.tensor.cross_entropy import shifted_labels
from pipeflow.huggingface import CausalLMLoss, share_tokens
from pipeflow.testing import RankError, run_threads
from tests.huggingface.over_experts import ExpertWork, Part, Trained, _array, parts_of, require_trained

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@dataclass(frozen=True)
class Balanced(ExpertWork):
    """A model whose own loss has a balance loss, that is a large part of it."""

    def model(self) -> Any:
        model = super().model()
        for name, value in BALANCED.items():
            setattr(model.config, name, value)
            setattr(model, name, value)
        with float64(vars(import_module("transformers.loss.loss_utils")), "ForCausalLMLoss") as loss:
            model.loss_function = loss
        return model

    def entries(self, replica: int) -> dict[str, Tensor]:
        inputs, labels = self.batch(replica, 1)
        return {**inputs, "labels": labels}


def counted(labels: Tensor) -> Tensor:
    """The labels that count in a loss which shifts them."""
    return (labels[:, 1:] != -100).sum()


@contextmanager
def float64(file: Any, name: str) -> Iterator[Any]:
    """transformers' own function of this name in the names of a file, computed in float64 meanwhile."""
    stock, names = file[name], dict(file)
    source = inspect.getsource(inspect.unwrap(stock))
    exec(source.replace("float32", "float64").replace(".float()", ".double()"), names)
    file[name] = names[name]
    try:
        yield names[name]
    finally:
        file[name] = stock


@cache
def expected(work: Balanced) -> Trained:
    """One process accumulates the microbatches."""
    model = work.model()
    batches = [work.entries(replica) for replica in range(len(work.samples))]
    total = sum(counted(batch["labels"]) for batch in batches)
    loss, number = 0.0, min(work.microbatches, *work.samples)
    with float64(vars(sys.modules[f"transformers.models.{work.kind}.modeling_{work.kind}"]), balance.NAME):
        for microbatch in range(number):
            parts = [{name: each.tensor_split(number)[microbatch] for name, each in b.items()} for b in batches]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            part = model(**whole).loss * counted(whole["labels"]) / total
            part.backward()
            loss += part.item()
    pieces = {name: [Part((0,) * p.dim(), p.detach().numpy(), _array(p.grad))] for name, p in model.named_parameters()}
    return Trained([loss], [0.0], pieces)


def shared(model: Any) -> Any:
    """The model, whose tokens are shared; its loss is transformers' in float64."""
    vars(share_tokens(model))["shifted"] = shifted_labels
    return model


def step(work: Balanced, whole: Any) -> Trained:
    """On one rank."""
    context = current_context()
    model = deepcopy(whole)
    model = shared(model) if context.context_size > 1 else model
    weigh: Any = (lambda labels: (labels != -100).sum()) if context.context_size > 1 else counted
    pipeline = Pipeline.from_module(model, work.schedule, work.entries(0), weigh=weigh)
    output = execute_pipeline(iter([work.entries(context.data_rank)]), pipeline)
    return Trained([None if output.loss is None else output.loss.item()], [0.0], parts_of(pipeline))


CASES: dict[str, tuple[Balanced, dict[str, Any]]] = {
    "replicas": (Balanced("mixtral", samples=(3, 5)), {}),
    "expert ranks": (Balanced("olmoe", "zb-v", samples=(3, 5), layers=4), {"experts": 2}),
    "padding": (Balanced("mixtral", samples=(3, 5), padded=True), {"experts": 2}),
    "tensor ranks": (Balanced("gpt_oss", pipeline=1, samples=(3, 5)), {"tensor": 2, "experts": 2}),
    "context ranks": (Balanced("qwen3_moe"), {"context": 2}),
    "context and expert ranks": (Balanced("qwen3_moe", pipeline=1, samples=(3, 5)), {"context": 2, "experts": 2}),
    "a small batch": (Balanced("mixtral", pipeline=1, samples=(2, 5), microbatches=3), {"experts": 2}),
    "two last stages": (Balanced("qwen3_moe", "dualpipe", samples=(8, 9), microbatches=4, layers=4), {"experts": 2}),
}


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("case", CASES)
def test_a_balance_loss_is_that_of_one_process_that_accumulates(case: str) -> None:
    work, sizes = CASES[case]
    ranks = work.pipeline * len(work.samples) * sizes.get("tensor", 1) * sizes.get("context", 1)
    results = run_threads(step, ranks, work, work.model(), data=len(work.samples), **sizes)
    require_trained(results, expected(work), experts=sizes.get("experts", 1))


@pytest.mark.parametrize("kind", ["mixtral", "nllb_moe"])
def test_functions_of_transformers_compute_this_loss(kind: str) -> None:
    """Their own functions in float64, with tokens that do not count and without. Over several ranks, this is tested
    above.
    """
    file = vars(import_module(f"transformers.models.{kind}.modeling_{kind}"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, 7, generator=generator, dtype=torch.float64)
    with float64(file, balance.NAME) as stock:
        for mask in (None, (torch.rand(4, 3, generator=generator) > 0.4).long()):
            found = []
            for loss in (stock, partial(balance.balance_loss, group=Alone())):
                values = logits.clone().requires_grad_()
                value = loss(values.unbind(), 7, 2, mask)
                value.backward()
                found.append((value.detach(), values.grad))
            torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def other(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Tensor:
    """A balance loss of another form."""
    loss: Tensor = sum(each.softmax(-1).mean(0).square().sum() for each in gate_logits)
    return loss


def test_a_function_of_another_form_is_left_and_told(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    work = Balanced("mixtral", pipeline=1, samples=(2, 2), microbatches=1)
    model = work.model()
    monkeypatch.setattr("transformers.models.mixtral.modeling_mixtral." + balance.NAME, other)
    results = run_threads(step, 2, work, model, data=2)
    assert "MixtralForCausalLM has a balance loss of a form that is not known" in caplog.text
    assert caplog.text.count("has a balance loss") == 1
    assert len({result.losses[0] for result in results}) == 1


def refused(kind: str) -> None:
    context = current_context()
    work = Balanced("qwen3_moe", pipeline=1, samples=(3, 1), slices=2 if kind == "slices" else 1)
    model, entries = work.model(), work.entries(0)
    if kind == "mask":
        entries["attention_mask"] = torch.ones_like(entries["labels"])
    batch: Any = work.batch(0, 1) if kind == "slices" else entries
    options: dict[str, Any] = {"criterion": CausalLMLoss()} if kind == "slices" else {"weigh": counted}
    model = model if kind == "microbatches" else shared(model)
    pipeline = Pipeline.from_module(model, work.schedule, batch, **options)
    if kind == "microbatches":
        one = {name: each[:1] for name, each in entries.items()}
        batch = one if context.data_rank else Divided([entries] * 2)
    execute_pipeline(iter([batch]), pipeline)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "slices": ({}, 1, "slices do not go together with a balance loss"),
    "mask": ({"context": 2}, 2, "context ranks take no attention_mask with a balance loss of experts"),
    "microbatches": ({"data": 2}, 2, "replicas have 2, 1 microbatches, .* divide each batch into as many"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_balance_loss_is_an_error(kind: str) -> None:
    sizes, ranks, said = REFUSED[kind]
    with pytest.raises(RankError, match=said):
        run_threads(refused, ranks, kind, **sizes)
