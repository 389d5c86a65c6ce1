"""`pipeflow check` on the examples, in every layout of their tests: both runs of each script are made and compared.
All are alike, so the engines, the scripts and the comparison are right.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report
from pipeflow.checking import Result, check
from pipeflow.checking.findings import paragraph
from pipeflow.checking.scripts import run_both
from pipeflow.core.errors import UsageError

EXAMPLES = Path(__file__).parents[1] / "examples"
COLUMNS = ["script", "layout", "ranks", "result", "compared", "seconds"]
TEXT = [f"document {number} has the number {number} " * 20 for number in range(45)]
VIT: dict[str, float] = {
    "IMG_SIZE": 8,
    "PATCH_SIZE": 4,
    "HIDDEN_SIZE": 16,
    "DEPTH": 2,
    "NUM_HEADS": 2,
    "WARMUP_EPOCHS": 0,
}
VIT |= {"NUM_EPOCHS": 2, "MIXUP_ALPHA": 0.0}  # mixes other images in other layouts
HYBRID = """\
NUM_EPOCHS = 1
SEQ_LEN = 16
LEARNING_RATE = 0.01
clip_grad_norm = 1.0
DROP_RATE = 0.0
"""
WRITTEN = {
    "two_by_two.py": HYBRID
    + "BATCH_SIZE = 4\nNUM_MICRO_BATCHES = 2\nTENSOR_SHAPE = (2, 16, 128)\ngradient_accumulation = 2\n"
    "model = dict(type='GPT_tiny_pipeline_hybrid', checkpoint=True)\n"
    "parallel = dict(pipeline=2, tensor=dict(mode='1d', size=2))\n",
    "alone.py": HYBRID + "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 4\nNUM_CHUNKS = 2\nWEIGHT_DECAY = 0.01\n"
    "model = dict(type='GPT_tiny_pipeline_hybrid')\n",
    "interleaved.py": HYBRID
    + "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 4\nNUM_CHUNKS = 2\nWEIGHT_DECAY = 0.01\nTENSOR_SHAPE = (2, 16, 128)\n"
    "model = dict(type='GPT_tiny_pipeline_hybrid')\nparallel = dict(pipeline=2)\n",
    "coarse.py": HYBRID
    + "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 2\nTENSOR_SHAPE = (4, 16, 128)\nbf16 = dict(mode='parameters')\n"
    "model = dict(type='GPT_tiny_pipeline_hybrid')\nparallel = dict(pipeline=2)\n",
}


@dataclass(frozen=True)
class Layout:
    """A script of the examples and one of its layouts.

    Attributes:
        script: within examples/.
        ranks: how many run it.
        arguments: of the parallel run.
        plain: of the plain run, if they are others.
    """

    script: str
    ranks: int
    arguments: str = ""
    plain: str | None = None


SMALL = "--sequence 32 --steps 4"
GPT = "--steps 4 --config FOLDER"
LAB = "--tiny --steps 3"
COLO = "--length 16 --steps 3"
TORCH = "--steps 3 --library torch.distributed.pipelining"
LOOP = "--epochs 1 --library accelerate"
HF = (
    "--max_steps 4 --use_cpu --disable_tqdm 1 --report_to none --save_strategy no --dataloader_pin_memory 0 "
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_grad_norm 1 --output_dir FOLDER/out"
)
ONCE = HF.replace(
    "--gradient_accumulation_steps 2 ", ""
)  # transformers#47688: its own Trainer does not divide the loss
LAYOUTS = (
    Layout("gpt3/train.py", 2, f"{SMALL} --ranks 2 --batch 5 --microbatches 3",
           f"{SMALL} --ranks 1 --batch 5 --microbatches 3"),
    Layout("gpt3/train.py", 2, f"{SMALL} --ranks 2 --batch 5 --microbatches 3 --schedule interleaved-1f1b",
           f"{SMALL} --ranks 1 --batch 5 --microbatches 3"),
    Layout("gpt3/train.py", 8, f"{SMALL} --ranks 2 --tensor 2 --replicas 2 --batch 8 --microbatches 2",
           f"{SMALL} --ranks 1 --batch 8 --microbatches 2"),
    Layout("gpt3/trainer.py", 4, "--steps 4 --pipeline 2 --tensor 2", "--steps 4"),
    Layout("gpt3/trainer.py", 4, "--steps 4 --pipeline 2", "--steps 4"),
    Layout("gpt3/hybrid.py", 4, f"{GPT}/two_by_two.py", f"{GPT}/alone.py"),
    Layout("gpt3/hybrid.py", 2, f"{GPT}/interleaved.py", f"{GPT}/alone.py"),
    Layout("gpt3/hybrid.py", 2, f"{GPT}/coarse.py"),
    Layout("megatron_lab/lab.py", 2, LAB, f"{LAB} --tensor 1"),
    Layout("megatron_lab/lab.py", 4, f"{LAB} --pipeline 2 --microbatches 2", f"{LAB} --tensor 1 --microbatches 2"),
    Layout("colotensor/train.py", 2, f"{COLO} --tp-degree 2", COLO),
    Layout("colotensor/train.py", 2, f"{COLO} --tp-degree 2 --checkpoint", COLO),
    Layout("pipelining/train.py", 2, "--steps 3", TORCH),
    Layout("pipelining/train.py", 2, "--steps 3 --schedule ZBVZeroBubble", TORCH),
    Layout("pipelining/train.py", 2, "--steps 3 --schedule zb-h1", TORCH),
    Layout("pipelining/train.py", 2, TORCH),
    Layout("pipelining/train.py", 2, f"{TORCH} --schedule ZBVZeroBubble", "--steps 3"),
    Layout("accelerate_loop/train.py", 2, "--epochs 1", LOOP),
    Layout("accelerate_loop/train.py", 4, "--epochs 1 --tensor 2", LOOP),
    Layout("accelerate_loop/train.py", 2, "--epochs 1 --schedule zb-h1", LOOP),
    Layout("huggingface/llama.py", 4, HF, f"FOLDER/plain_llama.py {HF}"),
    Layout("huggingface/bert.py", 2, ONCE, f"FOLDER/plain_bert.py {ONCE}"),
    Layout("huggingface/own_loss.py", 2, HF, f"FOLDER/plain_own_loss.py {HF}"),
    *(
        Layout(f"lightning_loops/{name}.py", 2, "", f"FOLDER/plain_{name}.py")
        for name in ("language", "autoencoder", "classifier", "images", "fabric_loop")
    ),
    *(
        Layout("vit/train.py", ranks, f"--config FOLDER/vit_{name}.py", "--config FOLDER/vit_single.py")
        for name, ranks in (("data_parallel", 2), ("pipeline", 2), ("hybrid", 4))
    ),
)  # fmt: skip


def run(rounds: int | None = None, layouts: Sequence[Layout] = LAYOUTS) -> Report:
    report = Report("checking_examples", "pipeflow check on the examples, every layout of their tests", COLUMNS)
    alike = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _inputs(folder):
            for layout in layouts:
                began = time.perf_counter()
                told, compared = _told(layout, folder)
                alike += told == "alike"
                seconds = f"{time.perf_counter() - began:.0f}"
                report.rows.append([layout.script, layout.arguments, str(layout.ranks), told, compared, seconds])
    report.notes.append(f"alike: {alike} of {len(layouts)}")
    report.notes.append("target: all")
    report.data = {"alike": alike, "layouts": len(layouts)}
    return report


def _told(layout: Layout, folder: Path) -> tuple[str, str]:
    try:
        result = compared(layout, folder)
    except UsageError as error:
        return f"error: {error}", ""
    counts = ", ".join(f"{count} {what}" for what, count in result.compared.items())
    return "alike" if result.alike else paragraph(result), counts


def compared(layout: Layout, folder: Path) -> Result:
    """Runs a layout both ways, in `folder`, which has the configurations."""
    arguments, plain = (_words(each, folder) for each in (layout.arguments, layout.plain))
    if layout.script.startswith("vit"):  # reads images there
        os.environ.pop("DATA", None)
    else:
        os.environ["DATA"] = str(folder / "mine.jsonl")
    with tempfile.TemporaryDirectory() as runs:
        both = run_both(
            EXAMPLES / layout.script, arguments or [], Path(runs), ranks=layout.ranks, plain_arguments=plain
        )
        return check(*both)


def _words(arguments: str | None, folder: Path) -> list[str] | None:
    return None if arguments is None else arguments.replace("FOLDER", str(folder)).split()


@contextmanager
def _inputs(folder: Path) -> Iterator[None]:
    """Texts and configurations in a folder, and the variables of the environment that name them."""
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXT), encoding="utf-8")
    for name, text in WRITTEN.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in (*EXAMPLES.glob("huggingface/*.py"), *EXAMPLES.glob("lightning_loops/*.py")):
        (folder / f"plain_{path.name}").write_text(_plain(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (EXAMPLES / "vit" / "configs").glob("*.py"):
        (folder / f"vit_{path.name}").write_text(_changed(path.read_text(encoding="utf-8")), encoding="utf-8")
    kept, here = dict(os.environ), Path.cwd()
    os.chdir(folder)  # scripts write logs where they run
    paths = [str(each) for each in (EXAMPLES.parent, EXAMPLES, EXAMPLES / "lightning_loops")]
    os.environ |= {"PIPEFLOW_CACHE": str(folder / "cache")}
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(kept)


def _plain(text: str) -> str:
    """A script without its lines about parallelism."""
    lines = [
        re.sub(r"strategy=PipelineStrategy\(.*?\), devices=2, ", "", line)
        for line in text.splitlines(keepends=True)
        if not line.rstrip().endswith("# parallel") and "import PipelineStrategy" not in line
    ]
    return "".join(lines)


def _changed(text: str) -> str:
    """A configuration of the vision transformer for a small one."""
    for key, value in VIT.items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value!r}", text, flags=re.MULTILINE)
        text += "" if count else f"{key} = {value!r}\n"
    return text
