"""What the benchmark `planner` writes elsewhere: the tables of docs/planning.md that say how close plans come to
published steps, and the errors of similar jobs in pipeflow/planning/similar.py. A test holds both to
benchmarks/results/planner.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measured_steps import MeasuredBytes, device_commands, memory_commands, memory_rows
from benchmarks.report import between

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- written by: python -m benchmarks planner --save -->", "<!-- end -->"
SIMILAR = ROOT / "pipeflow" / "planning" / "similar.py"
MARK, LAST = "    # written by: python -m benchmarks planner --save\n", "    # end\n"
VTRAIN = "[vTrain](https://github.com/VIA-Research/vTrain)"
FOUNDRY = "[llm-foundry](https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking)"
TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/tree/main/benchmarks)"
DGXC = "[DGX Cloud](https://github.com/NVIDIA/dgxc-benchmarking)"
INTERN = "[InternEvo](https://github.com/InternLM/InternEvo/blob/develop/doc/en/train_performance.md)"
MODALITIES = "[Modalities](https://github.com/Modalities/modalities/tree/main/docs/scaling_experiments)"
NANOTRON = "[nanotron](https://github.com/huggingface/nanotron/blob/main/docs/benchmark_summary.svg)"
LONG = "https://github.com/NVIDIA/NeMo/blob/a2c4cc8ee6/docs/source/performance/performance_long_sequence.md"
FMS = "[fms-fsdp](https://github.com/foundation-model-stack/fms-fsdp)"
SOURCES = {
    "vtrain-single": f"one node of A100, GPTs of 0.2 to 1.3 billion parameters ({VTRAIN})",
    "vtrain-multi": "8 nodes of A100, a GPT of 3.6 billion (vTrain)",
    "2205.05198-tab5": "8 to 512 A100, GPTs of 22 to 1,000 billion ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198))",
    "oneflow-megatron-v100": (
        "1 to 32 V100, GPTs of 0.1 to 3.7 billion, Megatron-LM ([OneFlow](https://github.com/Oneflow-Inc/OneAutoTest))"
    ),
    "llm-foundry-a100-40gb-bf16": f"8 A100 of 40 GB, FSDP, MPT of 0.1 to 13 billion, 512 to 32k tokens ({FOUNDRY})",
    "llm-foundry-a100-40gb-bf16-multi": "the same on 16 to 128 A100, 2k tokens",
    "llm-foundry-a100-80gb-bf16": "8 A100 of 80 GB, FSDP, MPT of 0.1 to 30 billion, 512 to 64k tokens",
    "llm-foundry-a100-80gb-bf16-multi": "the same on 32 and 64 A100, 70 billion",
    "llm-foundry-h100-80gb-bf16": "8 H100, FSDP, MPT of 0.8 to 30 billion, 512 to 64k tokens",
    "torchtitan-a100": f"64 A100, FSDP, Llama 3 of 8 and 70 billion ({TITAN})",
    "torchtitan-2025-06-tp": "64 and 256 H100 of 96 GB, FSDP with tensor ranks, Llama 3, bf16 and fp8 (torchtitan)",
    "nemo-24.07": "8 to 512 H100, fp8, GPTs and Llamas ([NeMo 24.07](https://github.com/NVIDIA/NeMo))",
    "dgxc-h100": f"8 to 2,304 H100, Llama 3.1 of 8 to 405 billion, bf16 and fp8 ({DGXC})",
    "dgxc-grok": "8 to 256 H100 and GB200, Grok-1 of 2 to 64 layers, bf16 and fp8 (DGX Cloud; not fitted)",
    "dgxc-finetune": "8 to 32 H100, fine-tuning of Llama 3, whole and LoRA (DGX Cloud)",
    "dgxc-gb200": "128 to 512 GB200, Llama 3.1 of 405 billion, bf16 and fp8 (DGX Cloud)",
    "dgxc-llama4": "128 to 512 GB200 and 512 H100, Llama 4 Maverick, bf16 and fp8 (DGX Cloud)",
    "dgxc-moe": "DeepSeek-V3 on H100 and GB200 (DGX Cloud; not fitted)",
    "megatron-llama-fp8": "8 to 1,024 H100, Llama 3, fp8 ([Megatron-LM](https://github.com/NVIDIA/Megatron-LM))",
    "megatron-readme": "48 to 6,144 H100, GPTs of 2 to 462 billion (Megatron-LM; not fitted)",
    "nemo-long": f"H100, Llama 3 of 8 billion, 8k to 1,024k tokens, fp8 ([NeMo]({LONG}))",
    "nemo-long-b200": "the same on B200 (not fitted)",
    "internevo": f"8 to 128 A100, a Llama of 7 billion ({INTERN}; not fitted)",
    "internevo-ac": "the same, recomputed or packed (not fitted)",
    "modalities-h100": f"4 to 2,048 H100 of 64 GB, FSDP, GPTs of 3 to 28 billion ({MODALITIES})",
    "modalities-a100": "8 to 256 A100 of 64 GB, the same (Modalities)",
    "nanotron": f"8 to 64 H100, Llamas of 1 to 80 billion ({NANOTRON})",
    "fms-fsdp": f"96 H100 and 128 A100, FSDP, Llama 2 ({FMS}; not fitted)",
}
FORMULA = "2205.05198-tab5"
MEMORY = (
    "4 to 512 H100 and H200, Llama 3.1 and Qwen3, torchtitan ([arXiv 2410.06511](https://arxiv.org/abs/2410.06511))"
)
BLOOM = "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md"
DEVICES = f"8 to 384 A100, trials of BLOOM, Megatron-DeepSpeed ([BigScience]({BLOOM}))"


def docs_table(data: Mapping[str, Any]) -> str:
    """A line per source: the errors of coefficients that never saw it, that of the planner's own, and that of memory,
    which has no coefficients.
    """
    seen = "mean error, fitted on all | within what was promised | memory: rows | mean error | largest"
    lines = [f"| published steps | rows | mean error | largest | bias | regret | largest | {seen} |"]
    lines.append("|---" + "|---:" * 11 + "|")
    for source, steps in SOURCES.items():
        own, unseen = data["errors"][source], data["errors"][f"{source}, fitted without it"]
        cells = [_percent(unseen[key]) for key in ("error", "largest", "bias", "regret", "largest_regret")]
        memory = _memory(memory_rows()) if source == FORMULA else [""] * 3
        held = data["held"][source]
        cells += [_percent(own["error"]), _percent(held["held"] / held["rows"]) if held["rows"] else "nothing was"]
        lines.append(" | ".join([f"| {steps}", f"{own['rows']:,}", *cells, *memory]) + " |")
    for name, measured in ((MEMORY, memory_commands()), (DEVICES, device_commands())):
        lines.append(" | ".join([f"| {name}", *[""] * 8, *_memory(measured)]) + " |")
    lines += ["", "Sharded weights by the length of a sequence, unseen:", ""]
    lines += ["| device | tokens | rows | mean error | bias |", "|---|---:|---:|---:|---:|"]
    for each in data["lengths"]:
        cells = [_percent(each[key]) for key in ("error", "bias")]
        lines.append(" | ".join([f"| {each['device']}", f"{each['tokens']:,}", str(each["rows"]), *cells]) + " |")
    return "\n".join(lines)


def _memory(found: Sequence[MeasuredBytes]) -> list[str]:
    errors = [abs(each.error) for each in found]
    return [str(len(errors)), _percent(fmean(errors)), _percent(max(errors))]


def similar_rows(data: Mapping[str, Any]) -> str:
    """The rows of the table in pipeflow/planning/similar.py: the kinds that at least two sources measured."""
    return "".join(
        f'    "{kind}": ({found["rows"]}, {found["sources"]}, {found["error"]:.3f}, {found["most"]:.3f}),\n'
        for kind, found in data["kinds"].items()
    )


def tables(data: Mapping[str, Any]) -> dict[Path, str]:
    """The table, by document."""
    return {ROOT / "docs" / "planning.md": docs_table(data)}


def written(text: str) -> str:
    """What a document has between the two marks."""
    return text.split(BEGIN + "\n")[1].split("\n" + END)[0]


def write_tables(data: Mapping[str, Any]) -> None:
    """Writes them between the marks of the documents, and the errors of similar jobs."""
    for path, table in tables(data).items():
        path.write_text(between(path.read_text(encoding="utf-8"), BEGIN, END, f"\n{table}\n"), encoding="utf-8")
    text = SIMILAR.read_text(encoding="utf-8")
    SIMILAR.write_text(between(text, MARK, LAST, similar_rows(data)), encoding="utf-8")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
