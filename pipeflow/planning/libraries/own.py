"""What a script of pipeflow has for a plan: the ranks, the schedule, the stages and the optimizer. Must not contain:
how it is started, and what a plan costs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import partition_uniform
from pipeflow.planning.estimate import plan
from pipeflow.planning.libraries.library import LibraryOptions
from pipeflow.planning.setup import FEW_BITS, ContextKind
from pipeflow.planning.step_plan import Plan
from pipeflow.planning.transformer import GPT
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.registry import is_searched

WIDTH = 76  # letters of a line
LAYERS = "layers"  # what a script may call its layers


def script(found: Plan, options: Mapping[str, Any]) -> LibraryOptions:
    """The lines of a script, and what they do not say. `options` are those of the schedule, if it has a name in
    SCHEDULES; any other name is that of a file. Raises UsageError for what pipeflow cannot run.
    """
    if found.setup.data % found.setup.expert or found.setup.expert_split != found.setup.tensor:
        raise UsageError(
            "pipeflow's expert ranks are replicas with all of their tensor ranks: plan with an --expert that divides "
            "--data, and without --expert-tensor"
        )
    if found.setup.expert > 1 and found.setup.zero > 1:
        raise UsageError("pipeflow has no fully_shard over expert ranks: --zero 1 or --expert 1 plans without it")
    if found.setup.offload_optimizer:
        raise UsageError("pipeflow steps the optimizer on the device: plan without --offload-optimizer")
    has_scans = isinstance(found.model, GPT) and "M" in (found.model.pattern or "")
    if has_scans and found.setup.tensor * found.setup.context > 1:
        raise UsageError("pipeflow leaves scans whole on each rank: --tensor 1 and --context 1 plan that")
    if found.setup.context > 1 and found.setup.zero > 1:
        raise UsageError("pipeflow has no fully_shard over context ranks: --zero 1 or --context 1 plans without it")
    if any(start == end for start, end in found.cut):
        raise UsageError("from_module needs a layer in each stage: the nearest is another --cut")
    return LibraryOptions("\n".join(_lines(found, options)), tuple(_notes(found)))


def _lines(found: Plan, options: Mapping[str, Any]) -> Iterator[str]:
    setup, precision = found.setup, found.setup.precision
    sizes = [f"{name}={size}" for name in ("context", "tensor") if (size := getattr(setup, name)) > 1]
    sizes += [f"experts={setup.expert}"] * (setup.expert > 1)
    if setup.context > 1:
        sizes.append(f'context_attention="{_context_kind(found).replace("-", "_")}"')
    yield _call("context = pipeflow.launch", [f"pipeline={len(found.ranks)}", *sizes])
    yield _schedule(found, options)
    if setup.replicas > 1:
        yield "schedule = schedule.with_reductions()"
    if found.schedule.slices > 1:
        yield "from dataclasses import replace"
        cost = "pipeflow.CostModel.even(schedule.placement)"
        yield _call("cost = replace", [cost, f"attention={found.cost.attention:.3f}"])
    yield from _gpt(found) if _is_own(found) else _module(found)
    yield "optimizer = torch.optim.AdamW(model.parameters())"
    if setup.zero == 1 and setup.replicas > 1:
        yield "optimizer = pipeflow.Zero(model, optimizer)"
    if precision.master:
        scaler = ", scaler=pipeflow.LossScaler()" if precision.products == "fp16" else ""
        yield f"optimizer = pipeflow.MasterWeights(model, optimizer{scaler})"


def _context_kind(found: Plan) -> ContextKind:
    """How attention sees the tokens of other context ranks: as planned, but in a ring on CPUs alone. pipeflow's ring
    has no kernel on other devices, which no plan counts. There it is the kind that takes the least time by plan, of
    those that fit if one does.
    """
    setup, cluster = found.setup, found.cluster
    if setup.context_kind != "ring" or (cluster is not None and not cluster.device.runs_ahead):
        return setup.context_kind
    if cluster is None:
        return "gather"
    plans, cut = list[Plan](), list(found.cut)
    for kind in ("gather", "all-to-all"):
        with suppress(UsageError):  # ranks that cannot share the heads
            its: Any = {"context_kind": kind}
            factors = found.cost.microbatch_factors
            plans.append(
                plan(
                    found.model,
                    found.schedule,
                    replace(setup, **its),
                    cluster=cluster,
                    cut=cut,
                    microbatch_factors=factors,
                )
            )
    return min(plans, key=lambda each: (not each.fits, each.step_seconds or 0.0)).setup.context_kind


def _dtype(found: Plan) -> str:
    """The dtype of the weights as a script writes it; empty for float32."""
    precision = found.setup.precision
    return "" if precision.weight != 2 else f"torch.{'float16' if precision.products == 'fp16' else 'bfloat16'}"


def _options(found: Plan) -> list[str]:
    """The arguments of a Pipeline that follow from precision and memory."""
    precision, slices = found.setup.precision, found.setup.head_slices
    wide = ["gradient_dtype=torch.float32"] * (precision.gradient > precision.weight)
    return wide + [f"head_slices={slices}"] * (slices > 1) + ["cost=cost"] * (found.schedule.slices > 1)


def _module(found: Plan) -> Iterator[str]:
    """The lines that cut the script's own module."""
    if dtype := _dtype(found):
        yield f"module = module.to({dtype})"
    given = ["module", "schedule", "example=batch"]
    if _shares_tokens(found):
        yield "from pipeflow import huggingface"
        given = ["huggingface.share_tokens(module)", *given[1:], "criterion=huggingface.CausalLMLoss()"]
    if len({end - start for start, end in found.cut}) > 1:
        ends = ", ".join(str(end - 1) for _, end in found.cut[:-1])
        yield textwrap.fill(f'cuts = [f"{LAYERS}.{{n}}" for n in [{ends}]]', WIDTH, subsequent_indent="    ")
        given.append("cuts=cuts")
    yield _call("model = pipeflow.Pipeline.from_module", [*given, *_options(found)])


def _shares_tokens(found: Plan) -> bool:
    """Whether stages compute parts of sequences: those of a context rank, or slices."""
    return found.setup.context > 1 or found.schedule.slices > 1


def _is_own(found: Plan) -> bool:
    """Whether tokens are shared, and the model is pipeflow's GPT, cut as it cuts itself."""
    model = found.model
    its = (model.layers, model.hidden, model.heads)
    is_gpt = isinstance(model, GPT) and model == GPT(
        *its, model.positions, model.vocabulary, model.mlp_ratio, dropout=model.dropout
    )
    is_even = list(found.cut) == [part for [part] in partition_uniform(model.layers, len(found.cut))]
    return _shares_tokens(found) and is_gpt and is_even


def _gpt(found: Plan) -> Iterator[str]:
    """The lines that make the stages of pipeflow's GPT."""
    model, setup = found.model, found.setup
    assert isinstance(model, GPT)
    sizes = {
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "mlp_ratio": model.mlp_ratio,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
    }
    given = [str(model.layers), "placement=schedule.placement", *(f"{name}={size}" for name, size in sizes.items())]
    given += [f"dtype={_dtype(found)}"] * bool(_dtype(found)) + ["checkpoint=True"] * (setup.checkpoint == "full")
    given += ["sequence_parallel=True"] * (setup.tensor > 1 and setup.sequence_parallel)
    yield "from pipeflow import models"
    yield _call("chunks = models.build_gpt_pipeline", given)
    loss = "criterion=models.GPTLMLoss()"
    yield _call("model = pipeflow.Pipeline", ["chunks", "schedule", loss, *_options(found)])


def _call(name: str, given: list[str]) -> str:
    """A call, in several lines if one is too long."""
    line = f"{name}({', '.join(given)})"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(", ".join(given), WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
    return f"{name}(\n{inside}\n)"


def _schedule(found: Plan, options: Mapping[str, Any]) -> str:
    name = found.schedule.name
    if name not in SCHEDULES:
        return f"schedule = pipeflow.Schedule.from_csv(open({_literal(name)}).read())"
    sizes = {"ranks": len(found.ranks), "microbatches": found.schedule.num_microbatches}
    given = [f"{option}={_literal(value)}" for option, value in (sizes | _writable(options)).items()]
    return _call("schedule = pipeflow.make_schedule", [f'"{name}"', *given])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _writable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without what an order was searched for, which a script measures itself."""
    return {name: value for name, value in options.items() if name not in {"cost", "bytes_cap", "candidates"}}


def _notes(found: Plan) -> Iterator[str]:
    setup = found.setup
    if setup.precision.products in FEW_BITS:
        yield f"products in {setup.precision.name} come from the layers of your module"
    if setup.lora_rank:
        yield "adapters come from your module, such as with peft"
    if setup.context > 1:
        yield "a batch is whole on each context rank"
        if (kind := _context_kind(found)) != setup.context_kind:
            yield (
                "pipeflow's ring has no kernel on GPUs, so these lines exchange keys and values without hiding that: "
                f"--context-kind {kind} plans it"
            )
    if setup.expert > 1:
        yield "tokens go to their experts by one all-to-all, which nothing hides; layers are those of transformers"
    if _is_own(found):
        yield 'a batch is ({"input_ids": tokens}, tokens)'
    elif _shares_tokens(found):
        yield "share_tokens takes models of some families of transformers; batches have input_ids and position_ids"
    if not _is_own(found) and setup.tensor > 1 and setup.sequence_parallel:
        yield (
            "from_module splits layers over tensor ranks, but no sequences, and hides none of their sums: "
            "--no-sequence-parallel plans that"
        )
    if setup.zero > 1:
        mesh = f", over a mesh of {setup.replicas // setup.shards} x {setup.shards}" * (setup.shards < setup.replicas)
        yield f"for ZeRO-{setup.zero}, apply torch's fully_shard to the stages{mesh}"
    elif setup.zero and setup.shards < setup.replicas:
        yield "pipeflow.Zero divides over all replicas: plan without --shard-ranks"
    is_own = _is_own(found) and setup.checkpoint == "full"
    if (setup.checkpoint != "none" and not is_own) or setup.recompute_modules:
        yield "recomputation comes from your module, such as with torch.utils.checkpoint"
    if setup.head_slices > 1:
        yield "head_slices takes the head of a model of transformers; for another module, name it with head="
    if is_searched(found.schedule.name):
        yield f"{found.schedule.name} is searched for under costs: give it cost=, and bytes_cap= for memory"
    if not _is_own(found) and len({end - start for start, end in found.cut}) > 1:
        yield f"{LAYERS} is the list of layers in your module"
