"""What a model costs that was not written for a pipeline: GPT-2 of transformers, cut by `Pipeline.from_module`, beside
pipeflow's own GPT of the same size and weights, and beside GPT-2's blocks called by stages written by hand.

All compute the same loss of the same batch, with sdpa and without dropout, in float32, under 1F1B on 2 ranks with a
thread each. Beside the own GPT stands what a user pays for not rewriting the model; beside the stages by hand, what of
it comes with the model's own forward, which every stage runs for every microbatch (masks, outputs as objects), and with
pipeflow's stage around it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, SAMPLES, LENGTH, LAYERS, WORDS = 2, 8, 2, 128, 4, 1024
SIZES = {"width 128": (128, 4, 8), "width 256": (256, 4, 4)}  # width, heads, steps in a row
OWN, CUT, HAND = "pipeflow's GPT", "GPT-2, from_module", "GPT-2, stages by hand"


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 11
    results = run_ranks("unmodified:measure", RANKS, {"rounds": rounds}, deadline=300 + 60 * rounds)
    seconds = step_times([each["seconds"] for each in results])
    cpu = {name: [sum(both) for both in zip(*(each["cpu"][name] for each in results), strict=True)] for name in seconds}
    title = f"unmodified: {RANKS} ranks, {MICROBATCHES} microbatches of {SAMPLES} x {LENGTH} words, {LAYERS} blocks"
    columns = ["", "ms a step", "x own GPT", "x by hand", "CPU ms a step", "x own GPT, CPU", "x by hand, CPU"]
    report = Report("unmodified", f"{title}, {rounds} rounds", columns, data={"seconds": seconds, "cpu": cpu})
    for label in seconds:
        size, _ = label.split(": ")
        row = [label]
        for times in (seconds, cpu):
            row.append(f"{1e3 * statistics.median(times[label]) / SIZES[size][2]:.2f}")
            row += [f"{paired(times, label, f'{size}: {other}'):.3f}" for other in (OWN, HAND)]
        report.rows.append(row)
    report.notes.append("target: from_module at most 1.05 x pipeflow's own GPT; ratios are medians over rounds")
    report.notes.append("CPU: of all threads of both ranks together, waiting for messages included")
    return report


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: checks every contender's loss and gradients, then takes the times."""
    import torch

    from benchmarks.measure import alternate

    found: dict[str, Times] = {"seconds": {}, "cpu": {}}
    for size, (width, heads, steps) in SIZES.items():
        cpu: Times = {}
        contenders = {f"{size}: {name}": each for name, each in _contenders(width, heads).items()}
        for name, each in contenders.items():
            contenders[name] = replace(each, step=_timed(each.step, steps, cpu.setdefault(name, [])))
        found["seconds"] |= alternate(contenders, rounds)
        found["cpu"] |= {name: seconds[1:] for name, seconds in cpu.items()}  # the first is the warm-up
        torch.distributed.barrier()
    return dict(found)


def _timed(step: Callable[[], object], steps: int, cpu: list[float]) -> Callable[[], None]:
    """So many steps, with a note of this process's CPU time."""

    def run() -> None:
        start = time.process_time()
        for _ in range(steps):
            step()
        cpu.append(time.process_time() - start)

    return run


def _contenders(width: int, heads: int) -> dict[str, Any]:
    """By name, each proved to compute the whole model's loss and gradients."""
    import torch

    import pipeflow
    from benchmarks.task import Contender
    from pipeflow.training.models import GPTLMLoss, build_gpt_pipeline

    whole, rank = _gpt2(width, heads), int(os.environ["RANK"])
    words = torch.randint(0, WORDS, (SAMPLES * MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(1))
    loss = whole(input_ids=words, labels=words, use_cache=False).loss
    loss.backward()
    theirs = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    batch, named = ({"input_ids": words}, words), {"input_ids": words, "labels": words, "use_cache": False}

    own = build_gpt_pipeline(
        LAYERS, hidden_size=width, num_attention_heads=heads, vocab_size=WORDS, max_position_embeddings=LENGTH
    )
    converted = _converted({name: each.detach() for name, each in whole.named_parameters()}, heads)
    own.load_state_dict({name: converted[name] for name in own.state_dict()})
    hand = _by_hand(_gpt2(width, heads), rank)
    models = {
        OWN: (pipeflow.Pipeline(own, schedule, criterion=GPTLMLoss()), batch),
        CUT: (pipeflow.Pipeline.from_module(_gpt2(width, heads), schedule, named), named),
        HAND: (pipeflow.Pipeline(hand, schedule, criterion=_loss), batch),
    }
    made = {}
    for name, (model, each) in models.items():

        def step(model: Any = model, each: Any = each) -> Any:
            return pipeflow.execute_pipeline(iter([each]), model, broadcast_loss=True)

        found = step().loss
        assert torch.allclose(found, loss, rtol=1e-5), f"{name}: a loss of {found}, not {loss}"
        expected = theirs if name != OWN else _converted(theirs, heads)
        for key, parameter in model.named_parameters():
            plain = expected[key.removeprefix("chunks.0.").removeprefix("model.")]
            assert (parameter.grad - plain).norm() <= 1e-4 * plain.norm() + 1e-6, f"{name}: the gradient of {key}"
        made[name] = Contender(name, step, [model], model)
    return made


def _gpt2(width: int, heads: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=LAYERS,
        n_head=heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.set_attn_implementation("sdpa")
    return model


def _by_hand(model: Any, rank: int) -> Any:
    """The stage of a rank, as one would write it for GPT-2."""
    import torch
    from torch import Tensor, nn

    import pipeflow

    blocks = model.transformer.h[: LAYERS // RANKS] if rank == 0 else model.transformer.h[LAYERS // RANKS :]

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.transformer = nn.Module()
            self.model.transformer.h = nn.ModuleDict(
                {str(index + rank * LAYERS // RANKS): block for index, block in enumerate(blocks)}
            )
            if rank == 0:
                self.model.transformer.wte, self.model.transformer.wpe = model.transformer.wte, model.transformer.wpe
            else:
                self.model.transformer.ln_f, self.model.lm_head = model.transformer.ln_f, model.lm_head

        def forward(self, hidden: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
            body: Any = self.model.transformer
            if rank == 0:
                assert input_ids is not None
                positions = torch.arange(input_ids.shape[1], device=input_ids.device)
                hidden = body.wte(input_ids) + body.wpe(positions)
            for block in body.h.values():
                hidden = block(hidden)
            if rank == 0:
                assert hidden is not None
                return hidden
            scores: Tensor = self.model.lm_head(body.ln_f(hidden))  # type: ignore[operator]  # a module
            return scores

    tie = pipeflow.PipelineSharedModuleWrapper([0, RANKS - 1])
    tie.register_module(model.transformer.wte if rank == 0 else model.lm_head)
    return Stage()


def _loss(scores: Any, words: Any) -> Any:
    """That of GPT2LMHeadModel."""
    from torch.nn import functional

    shifted = functional.pad(words, (0, 1), value=-100)[:, 1:]
    return functional.cross_entropy(scores.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def _converted(tensors: dict[str, Any], heads: int) -> dict[str, Any]:
    """GPT-2's weights, or their gradients, under the names and in the order of pipeflow's GPT."""
    names = {"ln_1": "norm_1", "ln_2": "norm_2", "attn.c_attn": "attention.query_key_value"}
    names |= {"attn.c_proj": "attention.output", "mlp.c_fc": "wide", "mlp.c_proj": "output"}
    found = {
        "embedding.word_embeddings.weight": tensors["transformer.wte.weight"],
        "embedding.position_embeddings.weight": tensors["transformer.wpe.weight"],
        "head.weight": tensors["transformer.wte.weight"],
        "norm.weight": tensors["transformer.ln_f.weight"],
        "norm.bias": tensors["transformer.ln_f.bias"],
    }
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                tensor = tensors[f"transformer.h.{layer}.{theirs}.{kind}"]
                if kind == "weight" and "ln" not in theirs:
                    tensor = tensor.T
                if theirs == "attn.c_attn":  # query, key and value, of each head, not of all heads
                    tensor = tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
                found[f"blocks.{layer}.{ours}.{kind}"] = tensor.contiguous()
    return found
