"""Runs llama.py on four processes of this machine: 2 pipeline ranks x 2 tensor ranks. `--short` takes a minute;
`--check` runs a few steps and compares with the same script without its parallel lines, on one process with
transformers' own Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.data import DataError, prepare
from gpt3.ranks import start_ranks

SCRIPT = Path(__file__).with_name("llama.py")
MARK = "# parallel"
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="training steps (240; --short: 40; --check: 10)")
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--check", action="store_true", help="compare with transformers' own Trainer on one process")
    arguments = parser.parse_args()
    steps = arguments.steps or (10 if arguments.check else 40 if arguments.short else 240)
    try:
        prepare(Path(os.environ["DATA"]) if os.environ.get("DATA") else None, vocabulary=2048)
    except DataError as error:
        sys.exit(f"demo.py: {error}")
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(steps, Path(folder, "pipeline"), log_every=1 if arguments.check else 10)
        sys.argv = [str(SCRIPT), *options]
        start_ranks(4)
        if arguments.check:
            check(Path(folder), steps)


def options_of(steps: int, folder: Path, log_every: int) -> list[str]:
    """The script's options."""
    options = f"--max_steps {steps} --logging_steps {log_every} --warmup_steps {steps // 10} --learning_rate 4e-3 "
    options += "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_grad_norm 1 --weight_decay 0.01 "
    options += "--disable_tqdm 1 --report_to none --save_strategy no --dataloader_pin_memory 0"
    device = [] if torch.cuda.is_available() else ["--use_cpu"]
    return [*options.split(), *device, "--output_dir", str(folder)]


def without_parallel_lines(text: str) -> str:
    """The script for one process."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(MARK))


def losses_in(folder: Path) -> list[float]:
    """The losses of the logged steps."""
    logged = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in logged if "loss" in entry]


def check(folder: Path, steps: int) -> None:
    """Also trains on one process, and compares."""
    print(f"the same without the lines that end in {MARK!r}, on one process:", flush=True)
    sys.argv = [str(SCRIPT), *options_of(steps, folder / "alone", log_every=1)]
    transformers.logging.disable_progress_bar()
    program = compile(without_parallel_lines(SCRIPT.read_text(encoding="utf-8")), str(SCRIPT), "exec")
    exec(program, {"__name__": "__main__", "__file__": str(SCRIPT)})
    pairs = list(zip(losses_in(folder / "pipeline"), losses_in(folder / "alone"), strict=True))
    largest = max(abs(one - other) for one, other in pairs)
    print(f"{len(pairs)} losses, which differ by {largest:.1e} at most")
    if not pairs or largest > TOLERANCE:
        sys.exit(f"demo.py: the losses differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
