"""Models of transformers with experts in one process, and the same with experts over ranks: what both have after some
steps, in float64 throughout.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from torch import Tensor

from pipeflow import Pipeline, Zero, load_checkpoint, save_checkpoint
from pipeflow.huggingface import CausalLMLoss
from pipeflow.training.checkpoint.pieces import LocalTensor, local_tensors
from tests.huggingface.over_context import TOLERANCE, Work, optimizer_of, recompute
from tests.huggingface.test_shared_tokens import SIZES
from tests.training.over_context import loop_in_one_process, loop_on_a_rank

_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4},
    "deepseek_v3": {**_LATENT, **_GROUPS, "moe_intermediate_size": 12, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4, "sliding_window": 64},
    "glm4_moe": {**_GROUPS, "moe_intermediate_size": 12, "head_dim": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
}
"""Families with what their configurations need. Two have shared experts and a first layer without experts."""


@dataclass(frozen=True)
class ExpertWork(Work):
    """What is trained, and how. With `idle`, no token of the family gpt_oss chooses an expert of the second half, which
    rank 1 of 2 holds. With `tied`, each router rates its first and last experts alike.
    """

    steps: int = 20
    computed_by: str = "batched_mm"
    layers: int = 2
    idle: bool = False
    tied: bool = False
    zero: bool = False

    def model(self) -> Any:
        torch.manual_seed(0)
        options = {
            "num_experts_per_tok": 2,
            "use_cache": False,
            "num_hidden_layers": self.layers,
            **FAMILIES[self.kind],
        }
        config = transformers.AutoConfig.for_model(self.kind, **{**SIZES, **options})
        config._experts_implementation = self.computed_by
        model = transformers.AutoModelForCausalLM.from_config(config).double().train()
        for module in model.modules():
            module.__class__ = _wide(type(module))  # type: ignore[arg-type]  # types are hashable
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self.idle and name.endswith("router.bias"):
                    parameter[len(parameter) // 2 :] = -100
                if self.tied and re.search(r"(gate|router)\.weight", name):
                    parameter[-1] = parameter[0]
        return model


@lru_cache
def _wide(kind: Any) -> Any:
    """The class, whose forward computes in float64 what transformers' computes in float32."""
    if not kind.__module__.startswith("transformers.models") or not re.search("Norm|Router|Gate", kind.__name__):
        return kind
    source = textwrap.dedent(inspect.getsource(kind.forward))
    wide = re.sub(r"torch\.float(32)?\b", "torch.float64", source).replace(".float()", ".double()")
    if wide == source:
        return kind
    names = dict(vars(sys.modules[kind.__module__]))
    exec(wide, names)  # transformers' own source
    return type(kind.__name__, (kind,), {"forward": names["forward"], "__module__": kind.__module__})


class Part(NamedTuple):
    """A piece of a weight: its offset in the whole, its values, and its gradient or None, as arrays."""

    offset: tuple[int, ...]
    weight: Any
    gradient: Any


Found = dict[str, list[Part]]
"""By name in the whole model, the pieces that a rank has."""


@dataclass(frozen=True)
class Trained:
    """What a rank has in the end."""

    losses: list[float | None]
    norms: list[float]
    pieces: Found


def train_in_one_process(work: ExpertWork) -> Trained:
    """All replicas' batches at once."""
    model = work.model()
    losses, norms = loop_in_one_process(work, model, CausalLMLoss(), optimizer_of(model.parameters()))
    pieces = {name: [Part((0,) * p.dim(), p.detach().numpy(), _array(p.grad))] for name, p in model.named_parameters()}
    return Trained(losses, norms, pieces)


def pipeline_of(work: ExpertWork, whole: Any) -> Pipeline:
    model = deepcopy(whole)
    if work.recomputed:
        recompute(model)
    loss: Any = CausalLMLoss()  # what it is divided by is told, since reading that takes longer than the steps
    options: dict[str, Any] = {"criterion": loss, "weigh": lambda labels: loss.of_shifted.weigh(loss.shifted(labels))}
    return Pipeline.from_module(model, work.schedule, work.batch(0, 0), **options)


def train(work: ExpertWork, whole: Any, folder: str = "", first: int = 0) -> Trained:
    """On one rank of the layout, from step `first` on, which a checkpoint in `folder` has. Without, the end is saved
    there. A process that gets no model makes it.
    """
    pipeline = pipeline_of(work, work.model() if whole is None else whole)
    optimizer: Any = optimizer_of(pipeline.parameters())
    optimizer = Zero(pipeline, optimizer) if work.zero else optimizer
    if first:
        load_checkpoint(folder, pipeline, optimizer)
    losses, norms = loop_on_a_rank(work, pipeline, optimizer, first)
    if folder and not first:
        save_checkpoint(folder, pipeline, optimizer)
    return Trained(losses, norms, parts_of(pipeline))


def parts_of(pipeline: Pipeline) -> Found:
    """The pieces of all parameters of this rank."""
    return {
        local.name: [
            Part(tuple(own.offset), own.tensor.numpy(), gradient)
            for own, gradient in zip(local.pieces, _gradients(local), strict=True)
        ]
        for local in local_tensors(pipeline, pipeline.context, None)
        if local.is_parameter
    }


def _gradients(local: LocalTensor) -> list[Any]:
    gradient = local.tensor.grad
    return (
        [_array(each.tensor) for each in local.pieces_of(gradient)]
        if gradient is not None
        else [None] * len(local.pieces)
    )


def _array(values: Tensor | None) -> Any:
    return None if values is None else values.detach().numpy()


def require_trained(results: list[Trained], expected: Trained, first: int = 0, experts: int = 1) -> None:
    """Every rank has the losses and norms, and its part of every gradient and weight; together they have all. A rank
    has as large a part of each expert weight as others.
    """
    assert any(result.losses[0] is not None for result in results)
    for result in results:
        if result.losses[0] is not None:
            _require_near(numpy.array(result.losses), numpy.array(expected.losses[first:]), "losses")
        _require_near(numpy.array(result.norms), numpy.array(expected.norms[first:]), "norms")
        for name, parts in result.pieces.items():
            [whole] = expected.pieces[name]
            for part in parts:
                ends = map(sum, zip(part.offset, part.weight.shape, strict=True))
                where = tuple(map(slice, part.offset, ends))
                _require_near(part.weight, whole.weight[where], f"weight {name}")
                if part.gradient is not None:
                    _require_near(part.gradient, whole.gradient[where], f"gradient {name}")
                if re.search(r"\.experts\.(gate_up|down)_proj", name):
                    assert part.weight.shape[0] * experts == whole.weight.shape[0], name
    for name, [whole] in expected.pieces.items():
        parts = [part for result in results for part in result.pieces.get(name, ())]
        for its in (parts, [part for part in parts if part.gradient is not None]):
            assert sum({part.offset: part.weight.size for part in its}.values()) == whole.weight.size, name


def _require_near(mine: Any, whole: Any, what: str) -> None:
    assert mine.shape == whole.shape, what
    error = float(numpy.abs(mine - whole).max()) if mine.size else 0.0
    assert error <= TOLERANCE * max(1.0, float(numpy.abs(whole).max())), f"{what}: {error} off"
