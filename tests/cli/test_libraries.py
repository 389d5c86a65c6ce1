"""`pipeflow plan --for`: the options of another library, for one layout and for the best of a search."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest

from pipeflow.tools.cli import main
from tests.cli.run import error

SEARCH = ["tiny", "--devices", 4, "--batch", 16, "--device", "a100-40gb"]


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, str]:
    """The two streams of a command that works; progress on a busy machine is left out."""
    assert main(["plan", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    return captured.out, "".join(f"{line}\n" for line in captured.err.splitlines() if not line.endswith(" ..."))


def test_options_are_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said, notes = printed(capsys, "tiny", "--pipeline", 2, "--layout", "E|t*4|t*3|tL", "--for", "megatron")
    assert "--pipeline-model-parallel-layout 'E|t*4|ttt|tL'\n" in said
    assert all(line.startswith("--") for line in said.splitlines())
    start, *used = notes.splitlines()
    assert start == "pipeflow: note: start 2 processes: Megatron-LM makes replicas of all that the other sizes leave"
    assert len(used) == 1
    assert "options of Megatron-LM d98e8a64 of 2026-08-22; expect at most" in used[0]
    assert "add --profile --use-pytorch-profiler" in used[0]
    said, _ = printed(capsys, "tiny", "--precision", "float32", "--for", "torchtitan")
    assert tomllib.loads(said)["parallelism"]["pipeline_parallel_degree"] == 4
    said, _ = printed(capsys, "tiny", "--for", "deepspeed")
    assert json.loads(said)["pipeline"]["stages"] == 4


def test_a_search_has_the_schedules_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tensor", 1, "--pipeline", 4]
    said, _ = printed(capsys, *SEARCH, *sizes, "--for", "megatron")
    assert "--pipeline-model-parallel-size 4" in said
    assert "--global-batch-size 16" in said
    words = shlex.split(said)
    assert ("--num-layers-per-virtual-pipeline-stage" in words) + ("--pipeline-model-parallel-layout" in words) <= 1


def test_a_layout_that_the_library_cannot_run_is_left_out_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 6 microbatches on 4 ranks, interleaved 1F1B is the fastest here, and Megatron-LM does not interleave them."""
    search = ["tiny", "--devices", 4, "--batch", 6, "--device", "a100-40gb", "--tensor", 1, "--pipeline", 4]
    said, notes = printed(capsys, *search, "--vocabulary", 50304, "--microbatch-size", 1, "--for", "megatron")
    assert "virtual" not in said
    assert "--global-batch-size 6\n" in said
    assert notes.startswith("pipeflow: note: layout 1 is left out: Megatron-LM interleaves microbatches in groups of")


def test_a_search_has_only_kinds_of_ranks_for_which_the_library_has_options(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["tiny", "--positions", 65536, "--devices", 8, "--batch", 1, "--device", "a100-40gb", "--top", 1]
    said, _ = printed(capsys, *long, "--for", "megatron")
    assert "--context-parallel-size" in said
    said, _ = printed(capsys, *long, "--for", "deepspeed")
    assert json.loads(said)["train_batch_size"] == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tiny", "--schedule", "zb-h1", "--for", "megatron"], "Megatron-LM does not have 'zb-h1' on 4 ranks with 8"),
        (["tiny", "--for", "megatron", "--json"], "standard output can take one output, not --for and --json"),
        ([*SEARCH, "--for", "megatron", "--svg", "-"], "standard output can take one output, not --for and --svg"),
        (["--measured", "run.json", "--for", "megatron"], "--for is not read with --measured, which has no model"),
        (["tiny", "--for", "fairseq"], "argument --for: invalid choice: 'fairseq'; "),
        (
            [*SEARCH, "--pipeline", 1, "--precision", "fp8", "--device", "h100-80gb", "--for", "deepspeed"],
            "DeepSpeed can run none of the 3 best layouts; layout 1 is left out: DeepSpeed does not train in fp8",
        ),
    ],
)
def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str], argv: list[object], message: str) -> None:
    assert error(capsys, "plan", *argv).startswith(message)
