"""Language models of transformers on one GPU: what pipeflow's engine costs beside a plain loop, and whether plans hold.

Each model trains in bfloat16 with float32 masters and AdamW, in 4 microbatches, by a plain loop that accumulates their
gradients, and by pipeflow with the unmodified model on one rank. A plan is made of the model's sizes with the device's
data sheet (`pipeflow plan --engine torchtitan`), the same with what `pipeflow calibrate` measured just before, and of
the module's own operators (`pipeflow.plan_module`) with both. On a machine without a GPU, one small model runs in
float32 on the CPU, whose memory is not measured.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Times, paired
from benchmarks.report import Report

if TYPE_CHECKING:
    import torch

    from pipeflow import Cluster
    from pipeflow.planning.step_plan import StepPlan

MICROBATCHES = 4
PLAIN, OURS = "plain loop", "pipeflow"
SECONDS = 40  # of calibration


@dataclass(frozen=True)
class Case:
    """A model, and the size of its microbatches. `type` and `sizes` make its configuration in transformers."""

    name: str  # of the planner's list
    samples: int
    length: int
    type: str
    sizes: dict[str, Any]


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": 50304}


def _llama(layers: int, width: int, heads: int, inner: int, words: int, **given: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": words,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        **given,
    }


GPU = (
    Case("gpt2-small", 2, 1024, "GPT2", _gpt2(12, 768, 12)),
    Case("gpt2-small", 16, 1024, "GPT2", _gpt2(12, 768, 12)),
    Case("gpt2-medium", 8, 1024, "GPT2", _gpt2(24, 1024, 16)),
    Case("gpt2-large", 8, 1024, "GPT2", _gpt2(36, 1280, 20)),
    Case("qwen3-0.6b", 2, 4096, "Qwen3", _llama(28, 1024, 16, 3072, 151936, head_dim=128)),
    Case("llama3.2-1b", 1, 8192, "Llama", _llama(16, 2048, 32, 8192, 128256)),
    Case("llama3.2-1b", 4, 2048, "Llama", _llama(16, 2048, 32, 8192, 128256)),
    Case("llama3.2-3b", 2, 2048, "Llama", _llama(28, 3072, 24, 8192, 128256)),
)
CPU = (Case("gpt2-small", 1, 128, "GPT2", _gpt2(12, 768, 12)),)


def run(rounds: int | None = None) -> Report:
    import pipeflow
    from pipeflow import Cluster
    from pipeflow.tools.calibration.machine import device_name
    from pipeflow.training.hooks.measuring import device_called

    rounds = rounds or 7
    device = pipeflow.launch(pipeline=1).device
    clusters = {"calibrated": _calibrated(device)}
    if device.type == "cuda" and (known := device_called(device_name(device, 1))) is not None:
        clusters = {"data sheet": Cluster.of(known)} | clusters
    columns = ["", f"{PLAIN} ms", f"{OURS} ms", "x plain loop", f"{PLAIN} GiB", f"{OURS} GiB"]
    columns += [f"{kind}, {name}" for name in clusters for kind in ("sizes", "operators")]
    columns += ["GiB, sizes", "GiB, operators"]
    title = f"one_gpu: {MICROBATCHES} microbatches, {device_name(device, 1)}, {rounds} rounds"
    report = Report("one_gpu", title, columns)
    report.data = {"clusters": {name: asdict(each) for name, each in clusters.items()}, "cases": []}
    precision = "bf16" if device.type == "cuda" else "float32"
    for case in GPU if device.type == "cuda" else CPU:
        times, peaks = _measure(case, device, rounds)
        plans = {name: _plans(case, cluster, precision) for name, cluster in clusters.items()}
        _add(report, case, times, peaks, plans)
    report.notes.append("x plain loop: the median over rounds of the ratio of two times of the same round")
    report.notes.append("plans: the planned step, and how far it is from the plain loop's median")
    report.notes.append("GiB: the most that torch's allocator gave out in a step; planned as with the data sheet")
    report.notes.append(f"target: pipeflow at most 1.02 x the plain loop; calibrated for {SECONDS} s")
    return report


def _add(
    report: Report, case: Case, times: Times, peaks: dict[str, int], plans: dict[str, tuple[StepPlan, StepPlan]]
) -> None:
    measured = {name: statistics.median(seconds) for name, seconds in times.items()}
    row = [_label(case)]
    row += [f"{1e3 * measured[name]:.1f}" for name in (PLAIN, OURS)]
    row.append(f"{paired(times, OURS, PLAIN):.3f}")
    row += [f"{peaks[name] / 2**30:.2f}" if peaks else "" for name in (PLAIN, OURS)]
    for pair in plans.values():
        for each in pair:
            seconds = each.step_seconds or 0.0
            row.append(f"{1e3 * seconds:.1f} ({seconds / measured[PLAIN] - 1:+.1%})")
    for each in next(iter(plans.values())):
        off = f" ({each.peak_bytes / peaks[PLAIN] - 1:+.1%})" if peaks else ""
        row.append(f"{each.peak_bytes / 2**30:.2f}{off}")
    report.rows.append(row)
    planned = {
        name: [{"seconds": each.step_seconds, "bytes": each.peak_bytes} for each in pair]
        for name, pair in plans.items()
    }
    report.data["cases"].append({"case": row[0], "seconds": times, "bytes": peaks, "planned": planned})


def _label(case: Case) -> str:
    return f"{case.name}, {case.samples} x {case.length}"


def _calibrated(device: torch.device) -> Cluster:
    """What the command measures."""
    from pipeflow import Cluster

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        command = [sys.executable, "-m", "pipeflow", "calibrate", "--output", str(file), "--seconds", str(SECONDS)]
        subprocess.run([*command, "--ranks", "1", "--device", device.type], check=True, stdout=subprocess.DEVNULL)
        return Cluster.load(file)


def _plans(case: Case, cluster: Cluster, precision: str) -> tuple[StepPlan, StepPlan]:
    """Of the model's sizes, and of the module's operators."""
    import torch

    from pipeflow import GPT, PRECISIONS, Setup, make_schedule, plan, plan_module

    schedule = make_schedule("1f1b", ranks=1, microbatches=MICROBATCHES)
    whole = Setup(precision=PRECISIONS[precision])
    setup = replace(whole, microbatch_size=case.samples, sequence=case.length, engine="torchtitan")
    words = torch.zeros(case.samples, case.length, dtype=torch.int64)
    with torch.device("meta"):
        module = _model(case)
    named = {"input_ids": words, "labels": words, "use_cache": False}
    return (
        plan(GPT.named(case.name), schedule, setup, cluster=cluster),
        plan_module(module, schedule, named, whole, cluster=cluster),
    )


def _model(case: Case) -> Any:
    import transformers

    config = getattr(transformers, f"{case.type}Config")(
        **case.sizes, attn_implementation="sdpa", bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    kind = "LMHeadModel" if case.type == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{case.type}{kind}")(config).train()


def _measure(case: Case, device: torch.device, rounds: int) -> tuple[Times, dict[str, int]]:
    """Seconds of steps, in rounds that alternate the contenders, after two of warm-up; and bytes of one step."""
    import torch

    words = torch.randint(0, 50000, (case.samples * MICROBATCHES, case.length), device=device)
    steps: dict[str, Callable[[], object]] = {}
    held: dict[str, int] = {}
    for name, make in ((PLAIN, _plain), (OURS, _ours)):
        before = _allocated(device)
        with device:
            torch.manual_seed(0)
            model = _model(case).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        steps[name] = make(model, words, case)
        losses = [steps[name]() for _ in range(3)]
        held[name] = _allocated(device) - before
        print(f"{_label(case)}, {name}: losses {losses}", file=sys.stderr)
    times: Times = {name: [] for name in steps}
    peaks: dict[str, int] = {}
    gc.collect()
    for number in range(-1, rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            _finish(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            steps[name]()
            _finish(device)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
                if device.type == "cuda":
                    others = sum(size for other, size in held.items() if other != name)
                    peaks[name] = torch.cuda.max_memory_allocated(device) - others
    print(f"{_label(case)}: seconds {times}, bytes {peaks}", file=sys.stderr)
    return times, peaks


def _plain(model: Any, words: torch.Tensor, case: Case) -> Callable[[], float]:
    import torch

    parameters = list(model.parameters())
    masters = [each.detach().float() for each in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step() -> float:
        model.zero_grad()
        total = torch.zeros((), device=words.device)
        for part in words.split(case.samples):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / MICROBATCHES
            loss.backward()
            total += loss.detach()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return total.item()

    return step


def _ours(model: Any, words: torch.Tensor, case: Case) -> Callable[[], float]:
    import torch

    import pipeflow

    schedule = pipeflow.make_schedule("1f1b", ranks=1, microbatches=MICROBATCHES)
    named = {"input_ids": words, "labels": words, "use_cache": False}
    whole = pipeflow.Pipeline.from_module(model, schedule, named)
    optimizer = pipeflow.MasterWeights(whole, torch.optim.AdamW(whole.parameters(), lr=1e-4, fused=True))

    def step() -> float:
        optimizer.zero_grad()
        loss = pipeflow.execute_pipeline(iter([named]), whole).loss
        optimizer.step()
        assert loss is not None
        return float(loss)

    return step


def _allocated(device: torch.device) -> int:
    import torch

    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _finish(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
