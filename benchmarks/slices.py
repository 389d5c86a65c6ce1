"""Slices of a sequence: do they gain what their simulation promises? On 4 ranks whose stages sleep for each slice, with
attention as half of the work; and on 2 ranks with a GPT of pipeflow.models, at 4,096 tokens.
"""

from __future__ import annotations

import os
import statistics
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import pipeflow
from benchmarks.measure import Times, alternate, paired, step_times
from benchmarks.models import Sleep, TokenMean
from benchmarks.processes import run_ranks
from benchmarks.report import Report
from benchmarks.task import Contender
from pipeflow.engine.runtime.past import tokens_before
from pipeflow.models import GPTLMLoss, build_gpt_pipeline

TOKENS, ATTENTION = 4096, 0.5
RANKS, MICROBATCHES, FORWARD, BACKWARD = 4, 8, 0.160, 0.320  # of stages that sleep
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}


class SleepingSlice(nn.Module):
    """A stage that sleeps as long as a slice of a causal model computes."""

    shares_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        start = tokens_before(self)
        places = start / TOKENS, (start + tokens.shape[1]) / TOKENS
        share = (1 - ATTENTION) * (places[1] - places[0]) + ATTENTION * (places[1] ** 2 - places[0] ** 2)
        sleep: Any = Sleep.apply
        output: Tensor = sleep(tokens * self.scale, share * FORWARD, share * BACKWARD)
        return output


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    title = f"slices: {TOKENS} tokens, in {rounds} rounds"
    columns = ["stages", "slices", "step ms", "simulated gain", "measured gain", "measured / simulated step"]
    report = Report("slices", title, [*columns, "simulated peak of rank 0, microbatches", "measured / simulated peak"])
    data, fixed = {}, {}
    for name, ranks in (("sleep", RANKS), ("gpt", 2)):
        results = run_ranks("slices:measure", ranks, {"name": name, "rounds": rounds}, deadline=300 + 60 * rounds)
        times, simulated = step_times([each["times"] for each in results]), results[0]["simulated"]
        data[name] = {"seconds": times, "simulated": simulated}
        for ways in times:
            step, gain = statistics.median(times[ways]), simulated["whole"] / simulated[ways]
            figures = [gain, paired(times, "whole", ways), step / simulated[ways]]
            if name == "gpt":  # a stage that sleeps saves next to nothing
                peak = results[0]["simulated peaks"][ways]
                figures += [peak, results[0]["peaks"][ways] / peak]
            report.rows.append(
                [f"{name}, {ranks} ranks", ways, f"{1e3 * step:.0f}", *(f"{each:.3f}" for each in figures)]
                + ["", ""] * (name != "gpt")
            )
        fixed[name] = 1e3 * results[0]["fixed"]
    report.data = data
    report.notes += [
        "targets: measured / simulated within 0.95 and 1.05; of sleeping stages, the step of slices of equal cost is "
        "(M q + P - 1) / (q (M + P - 1)) of 1f1b within 3 %: "
        f"{RANKS - 1 + 4 * MICROBATCHES} / {4 * (RANKS - 1 + MICROBATCHES)} with 4 slices, a gain of "
        f"{4 * (RANKS - 1 + MICROBATCHES) / (RANKS - 1 + 4 * MICROBATCHES):.3f}",
        "peaks: bytes that autograd saved, over those of a whole microbatch; the simulated peak counts tokens, and is "
        "(P - 1 + q) / q of equally long slices; slices of equal cost have more, since the first ones are longer",
        f"a forward or backward of a slice took {fixed['sleep']:.2f} ms longer than it slept, in a traced step: "
        "simulations leave this out, and slices have it more often",
        "the costs of the GPT come from a traced step of 1f1b, its share of attention from steps of 1,024 to 4,096 "
        "tokens",
    ]
    return report


def measure(name: str, rounds: int) -> dict[str, Any]:
    """On every rank: the times of whole microbatches, of equally long slices and of slices of equal cost."""
    from benchmarks.links import go_first

    if name == "sleep":
        go_first()
    ranks = int(os.environ["WORLD_SIZE"])
    schedules = {
        slices: pipeflow.make_schedule("1f1b", ranks=ranks, microbatches=MICROBATCHES, slices=slices)
        for slices in (1, 4)
    }
    tokens = torch.zeros(MICROBATCHES, TOKENS, dtype=torch.long)
    if name == "sleep":
        stage: nn.Module = SleepingSlice()
        criterion: nn.Module = TokenMean()
        batch: Any = (tokens[..., None].float(), tokens.float())
    else:
        stage = build_gpt_pipeline(2 * ranks, max_position_embeddings=TOKENS, **SIZES)
        criterion, batch = GPTLMLoss(), ({"input_ids": tokens}, tokens)
    cost = pipeflow.CostModel((FORWARD,) * ranks, (BACKWARD,) * ranks, (0.0,) * ranks, attention=ATTENTION)
    if name == "gpt":
        cost = _measured(stage, schedules[1], criterion)
    ways = {
        "whole": (schedules[1], cost),
        "equally long": (schedules[4], replace(cost, attention=0.0)),
        "equal cost": (schedules[4], cost),
    }
    contenders, peaks, simulated, fullest = {}, {}, {}, {}
    for way, (schedule, each) in ways.items():
        model = pipeflow.Pipeline(stage, schedules[1], criterion=criterion, cost=each)
        ends = pipeflow.equal_slices(TOKENS, schedule.slices, attention=each.attention)
        timeline = pipeflow.simulate(schedule, replace(cost, slice_ends=ends))
        simulated[way], fullest[way] = timeline.makespan, timeline.peak_activations[0]
        contenders[way] = Contender(way, partial(_step, batch, model, schedule), [stage])
        peaks[way] = _peak(contenders[way])
    first = (
        (tokens[:1, :, None].float(), tokens[:1].float())
        if name == "sleep"
        else ({"input_ids": tokens[:1]}, tokens[:1])
    )
    alone = Contender("alone", partial(_step, first, model, schedules[1].first(1)), [stage])
    whole = _peak(alone)
    times: Times = alternate(contenders, rounds)
    peaks = {way: peak / whole if whole else 0.0 for way, peak in peaks.items()}
    traced = pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule, trace=True).timeline
    fixed = 0.0 if traced is None else (_computed(traced) - _computed(timeline)) / sum(map(len, timeline.rows))
    return {"times": times, "simulated": simulated, "peaks": peaks, "simulated peaks": fullest, "fixed": fixed}


def _computed(timeline: pipeflow.Timeline) -> float:
    """The seconds of all actions of a step."""
    return sum(span.end - span.start for row in timeline.rows for span in row)


def _step(batch: Any, model: pipeflow.Pipeline, schedule: pipeflow.Schedule) -> pipeflow.Output:
    return pipeflow.execute_pipeline(iter([batch]), model, schedule=schedule)


def _measured(stage: nn.Module, schedule: pipeflow.Schedule, criterion: nn.Module) -> pipeflow.CostModel:
    """The costs of this GPT: from traced steps of whole microbatches, the median of the lengths' steps."""
    model = pipeflow.Pipeline(stage, schedule, criterion=criterion)
    costs, times = {}, {}
    for length in (TOKENS // 4, TOKENS // 2, TOKENS):
        tokens = torch.zeros(MICROBATCHES, length, dtype=torch.long)
        timelines = [
            pipeflow.execute_pipeline(iter([({"input_ids": tokens}, tokens)]), model, trace=True).timeline
            for _ in range(4)
        ]
        costs[length] = [pipeflow.measured_costs(each) for each in timelines[1:] if each is not None]
        sums = [sum(each.forward) + sum(each.backward_input) + sum(each.backward_weight) for each in costs[length]]
        times[length] = statistics.median(sums)
        middle = costs[length][sums.index(times[length])]
    return replace(middle, attention=pipeflow.attention_share(times, TOKENS))


class _Saved:
    """In the place of a tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _peak(contender: Contender) -> float:
    """The most bytes that autograd has saved at once on this rank in a step, without weights."""
    weights = {each.untyped_storage().data_ptr() for module in contender.modules for each in module.parameters()}
    alive: Counter[int] = Counter()
    now = most = 0

    def pack(tensor: Tensor) -> _Saved:
        nonlocal now, most
        saved, storage = _Saved(tensor.detach()), tensor.untyped_storage()
        key, size = storage.data_ptr(), 0 if storage.data_ptr() in weights else storage.nbytes()
        now += size if not alive[key] else 0
        most, alive[key] = max(most, now), alive[key] + 1
        weakref.finalize(saved, drop, key, size)
        return saved

    def drop(key: int, size: int) -> None:
        nonlocal now
        alive[key] -= 1
        now -= size if not alive[key] else 0

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        contender.step()
    return float(most)
