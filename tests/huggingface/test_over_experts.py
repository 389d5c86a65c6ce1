"""Training models of transformers with experts over ranks is training in one process: losses, norms, every gradient,
every weight. What is not known to be so is one clear error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.core.action import Pair
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.huggingface import CausalLMLoss, from_config, from_pretrained, generate, save_pretrained
from pipeflow.optim import Lamb
from pipeflow.testing import RankError, run_processes, run_threads
from tests.covering import covering, some_rows
from tests.huggingface.over_experts import (
    FAMILIES,
    ExpertWork,
    Found,
    Trained,
    parts_of,
    pipeline_of,
    require_trained,
    train,
    train_in_one_process,
)
from tests.huggingface.test_shared_tokens import model_of

SAMPLES = {2: (3, 5), 4: (3, 5, 2, 4)}
LAYOUTS = ((2, 2, 1), (2, 2, 2), (2, 4, 1), (4, 4, 1), (4, 4, 2), (2, 4, 2))
"""Numbers of expert ranks, replicas, and tensor ranks."""
COLUMNS = tuple(FAMILIES), ("1f1b", "zb-v", "interleaved-1f1b"), LAYOUTS, (False, True), (False, True)
FEW = [("mixtral", "zb-v", (2, 4, 1), True, True)]
ROWS = [*FEW, *(row for row in covering(*COLUMNS) if row not in FEW)]


@cache
def expected(work: ExpertWork) -> Trained:
    return train_in_one_process(work)


def run(runner: Callable[..., Any], work: ExpertWork, experts: int = 2, tensor: int = 1) -> None:
    data = len(work.samples)
    sizes = {"data": data, "tensor": tensor, "experts": experts}
    whole = None if runner is run_processes else work.model()  # threads share torch's generator
    results = runner(train, work.pipeline * data * tensor, work, whole, **sizes)
    require_trained(results, expected(work), experts=experts)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_after_twenty_steps(kind: str) -> None:
    run(run_threads, ExpertWork(kind, samples=SAMPLES[2]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "layout", "recomputed", "zero"), some_rows(ROWS, FEW))
def test_layouts(kind: str, name: str, layout: tuple[int, int, int], recomputed: bool, zero: bool) -> None:
    experts, data, tensor = layout
    options: dict[str, Any] = {"samples": SAMPLES[data], "recomputed": recomputed, "zero": zero}
    run(run_threads, ExpertWork(kind, name, layers=4, steps=3, **options), experts, tensor)


@pytest.mark.exhaustive
def test_copies_of_a_stage() -> None:
    run(run_threads, ExpertWork("qwen3_moe", "dualpipe", samples=(8, 9), microbatches=4, steps=3))


def turns_taken(work: ExpertWork, whole: Any) -> tuple[Trained, list[int]]:
    """What a rank has in the end, and which half of a pair computed before each exchange of tokens."""
    turns, taken = current_context().turns, list[int]()
    pass_on = turns.pass_on

    def recorded() -> None:
        taken.extend([turns._turn] * (turns._running == 2))
        pass_on()

    turns.pass_on = recorded  # type: ignore[method-assign]
    return train(work, whole), taken


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_halves_of_pairs_run_in_turns(kind: str, recomputed: bool) -> None:
    """All ranks exchange in one order, in which each backward (0) is followed by a forward (1)."""
    work = ExpertWork(kind, "dualpipe-v", samples=(4, 5), microbatches=4, steps=1, layers=4, recomputed=recomputed)
    results = run_threads(turns_taken, 4, work, work.model(), data=2, experts=2)
    require_trained([trained for trained, _ in results], expected(work), experts=2)
    taken = [its for _, its in results]
    pairs = [sum(isinstance(entry, Pair) for entry in row) for row in work.schedule.rows]
    for many, its in zip([*pairs, *pairs], taken, strict=True):  # a layer a stage: there and back, both ways
        assert len(its) > 4 * many > 0 if recomputed else len(its) == 4 * many > 0
    assert taken[:2] == taken[2:]  # of the two ranks of each place in the pipeline
    assert all(its[0::2].count(1) == its[1::2].count(0) == 0 for its in taken) is not recomputed


@pytest.mark.exhaustive
def test_pairs_in_turns_over_gloo() -> None:
    run(run_processes, ExpertWork("mixtral", "dualpipe-v", samples=(4, 5), microbatches=4, steps=2, layers=4))


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("computed_by", ["eager", "batched_mm"])
def test_a_rank_whose_experts_get_no_tokens(computed_by: str) -> None:
    run(run_threads, ExpertWork("gpt_oss", pipeline=1, samples=SAMPLES[2], idle=True, computed_by=computed_by))


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_experts_that_a_router_rates_alike(kind: str) -> None:
    run(run_threads, ExpertWork(kind, pipeline=1, samples=SAMPLES[2], tied=True, steps=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_gloo(tensor: int) -> None:
    run(run_processes, ExpertWork("qwen3_moe", samples=SAMPLES[2], steps=3), tensor=tensor)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("zero", [True, False])
def test_a_checkpoint_is_loaded_with_any_number_of_expert_ranks(zero: bool, tmp_path: Path) -> None:
    work = ExpertWork("qwen3_moe", pipeline=1, samples=SAMPLES[4], steps=4, zero=zero)
    run_threads(train, 4, replace(work, steps=2), work.model(), str(tmp_path / "saved"), data=4, experts=2)
    for experts in (1, 4):
        results = run_threads(train, 4, work, work.model(), str(tmp_path / "saved"), 2, data=4, experts=experts)
        require_trained(results, expected(work), 2, experts)


def loaded(folder: str, after: str, config: Any) -> tuple[Found, Found]:
    """What a rank has of the weights in a folder, and of initial ones; the first are saved again."""
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    pipeline = from_pretrained(folder, schedule, dtype=torch.float64)
    save_pretrained(pipeline, after)
    return parts_of(pipeline), parts_of(from_config(config, schedule, dtype=torch.float64, seed=5))


@pytest.mark.slow
def test_weights_are_loaded_made_and_saved_in_parts(tmp_path: Path) -> None:
    """In the folder, the experts lie one by one."""
    model = ExpertWork("mixtral").model()
    for module in model.modules():
        module.__class__ = next(each for each in type(module).__mro__ if each.__module__ != __name__)
    model.save_pretrained(tmp_path / "before")
    arguments = str(tmp_path / "before"), str(tmp_path / "after"), model.config
    [(_, initial)] = run_threads(loaded, 1, *arguments)
    results = run_threads(loaded, 2, *arguments, data=2, experts=2)
    saved = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for which, whole in enumerate((saved, {name: part.weight for name, [part] in initial.items()})):
        for result in results:
            for name, [part] in result[which].items():
                ends = map(sum, zip(part.offset, part.weight.shape, strict=True))
                assert (part.weight == whole[name][tuple(map(slice, part.offset, ends))]).all(), name
                assert ("experts" in name) is (part.weight.shape != whole[name].shape)
    back = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float64)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in back.named_parameters())


def refused() -> list[str]:
    """The errors of what expert ranks do not do; then a step with other experts on all ranks."""
    work = ExpertWork("mixtral", pipeline=1, samples=SAMPLES[2])
    context, pipeline = current_context(), pipeline_of(work, work.model())
    told = list[str]()

    def refuse(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError) as raised:
            call()
        told.append(str(raised.value))

    def step() -> None:
        execute_pipeline(iter([work.batch(context.data_rank, 0)]), pipeline)

    step()
    parameters = list(pipeline.parameters())
    refuse(lambda: generate(pipeline, torch.ones(1, 3, dtype=torch.int64)))
    refuse(lambda: nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0))
    refuse(torch.optim.Adafactor(parameters).step)
    refuse(Lamb(parameters).step)
    layer = pipeline.get_submodule("chunks.0.model.layers.0.mlp.experts")
    layer.down_proj = nn.Parameter(layer.get_parameter("down_proj").detach() * 2)
    step()  # whose ranks compare their values
    assert layer.down_proj.grad is not None
    return told


@pytest.mark.slow
def test_what_expert_ranks_refuse() -> None:
    told = [
        "save the model, and generate after launch(experts=1)",
        "call pipeflow.clip_grad_norm_(pipeline, max_norm)",
        "Adafactor needs whole weights, but expert ranks have parts of them",
        "Lamb needs whole weights, but expert ranks have parts of them",
    ]
    for errors in run_threads(refused, 2, data=2, experts=2):
        assert len(errors) == len(told)
        for error, its in zip(errors, told, strict=True):
            assert its in error


def other_copies() -> None:
    """A replica outside of the group of its experts has other ones than the copy of its rank."""
    work = ExpertWork("mixtral", pipeline=1, samples=SAMPLES[4])
    context, pipeline = current_context(), pipeline_of(work, work.model())
    layer = pipeline.get_submodule("chunks.0.model.layers.0.mlp.experts")
    layer.down_proj = nn.Parameter(layer.get_parameter("down_proj").detach() * (1 + context.data_rank // 2))
    execute_pipeline(iter([work.batch(context.data_rank, 0)]), pipeline)


@pytest.mark.slow
def test_other_experts_on_a_copy_are_an_error() -> None:
    with pytest.raises(RankError, match=r"rank 2 holds the same experts as rank 0, but has .*values of digest"):
        run_threads(other_copies, 4, data=4, experts=2)


def no_experts() -> None:
    model, (inputs, labels) = model_of("llama"), ExpertWork("llama").batch(0, 0)
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    Pipeline.from_module(model, schedule, (inputs, labels), criterion=CausalLMLoss())


def test_a_model_without_experts_is_an_error() -> None:
    with pytest.raises(RankError, match=r"LlamaForCausalLM has no layer of experts .*: launch with experts=1"):
        run_threads(no_experts, 2, data=2, experts=2)


def test_expert_ranks_divide_the_replicas() -> None:
    told = "3 expert ranks do not divide the 4 replicas, .*: choose a divisor of 4, or start a multiple of 6 processes"
    with pytest.raises(UsageError, match=told):
        WorldLayout.of(8, 2, experts=3)
    layout = WorldLayout.of(16, 2, context=2, experts=2)
    assert [layout.expert_ranks(rank) for rank in (0, 3, 13)] == [(0, 4), (3, 7), (9, 13)]
    assert [layout.expert_copy_ranks(rank) for rank in (0, 5)] == [(0, 1, 8, 9), (4, 5, 12, 13)]
    assert WorldLayout.of(8, experts=4).pipeline == 2
