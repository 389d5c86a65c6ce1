"""What a plan says at its end: what to type, and what to measure first."""

from __future__ import annotations

import copy
import shlex
from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, PRECISIONS, Cluster, Plan, Setup, UsageError, make_schedule, plan
from pipeflow.planning.libraries.own import script
from pipeflow.tools.cli.plan_use import Planned, measured_words, started, use_lines
from tests.cli.run import out

SMALL = GPT(layers=5, hidden=16, heads=2, positions=8, vocabulary=11, tied=False)
ONE = ["tiny", "--device", "a100-40gb", "--pipeline", "2", "--microbatches", "4"]


def planned(name: str, ranks: int, cut: Any = "uniform", options: Any = None, **given: Any) -> Plan:
    precision, model = PRECISIONS[given.pop("precision", "bf16")], given.pop("model", SMALL)
    schedule = make_schedule(name, ranks=ranks, microbatches=4, **(options or {}))
    return plan(model, schedule, Setup(precision=precision, **given), cluster=Cluster.of("h100-80gb"), cut=cut)


def used(shown: str) -> str:
    return shown.partition("\nUse it")[2]


@pytest.mark.some(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "cut", "given"),
    [
        ("1f1b", {}, [(0, 3), (3, 5)], {"precision": "bf16-mixed", "data": 2, "zero": 1}),
        ("interleaved-1f1b", {"chunks": 2}, [(0, 1), (1, 2), (2, 3), (3, 5)], {"data": 2}),
        ("zb-v", {}, "uniform", {"precision": "float32"}),
    ],
)
def test_the_lines_of_a_script_run(name: str, options: Any, cut: Any, given: Any) -> None:
    torch = pytest.importorskip("torch")
    import pipeflow
    from pipeflow.testing import run_threads

    found = planned(name, 2, cut, options, **given)
    launched, *lines = script(found, options).text.splitlines()
    assert launched == "context = pipeflow.launch(pipeline=2)"

    class Model(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(SMALL.layers))

        def forward(self, inputs: Any) -> Any:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs.float().square().mean()

    torch.manual_seed(0)
    dtype = torch.float32 if given.get("precision") == "float32" else torch.bfloat16
    model, batch = Model(), {"inputs": torch.randn(8, 3, dtype=dtype)}  # ranks are threads, which share the generator

    def train() -> tuple[Any, Any, Any]:
        names: dict[str, Any] = {"pipeflow": pipeflow, "torch": torch, "module": copy.deepcopy(model), "batch": batch}
        exec("\n".join(lines), names)
        before = [each.detach().clone() for each in names["model"].parameters()]
        pipeflow.execute_pipeline(iter([names["batch"]]), names["model"])
        names["optimizer"].step()
        changed = [not torch.equal(*pair) for pair in zip(before, names["model"].parameters(), strict=True)]
        wrappers, each = [], names["optimizer"]
        while not isinstance(each, torch.optim.AdamW):
            wrappers.append(type(each).__name__)
            each = each.inner
        return names["schedule"], changed, wrappers

    expected = [list(row) for row in found.schedule.rows]
    masters, divided = "precision" not in given or "mixed" in given["precision"], "zero" in given
    for rank, (schedule, changed, wrappers) in enumerate(
        run_threads(train, 2 * found.setup.data, data=found.setup.data)
    ):
        rows = [[entry for entry in row if "R" not in str(entry)] for row in schedule.rows]
        assert (schedule.placement, rows) == (found.schedule.placement, expected)
        assert len(changed) == 2 * found.ranks[rank % 2].layers  # a weight and a bias of each layer
        assert any(changed)
        assert wrappers == ["MasterWeights"] * masters + ["Zero"] * divided


def test_a_plan_is_started_on_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster.of("h100-80gb")
    assert started(3, cluster, "train.py") == "torchrun --nproc-per-node 3 train.py"
    assert started(16, cluster, "train.py").startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d ")
    assert "on the last node with --nproc-per-node 2" in used(out(capsys, "plan", *ONE, "--data", 5))
    assert "on the last node" not in used(out(capsys, "plan", *ONE, "--data", 4))


def test_the_command_that_corrects_a_plan_has_the_measured_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--device", "t4", "--network-bandwidth=1e9", "--zero", "--devices-per-node", "4", "--tensor", "2"]
    assert measured_words(words) == ["tiny", "--zero", "--tensor", "2", "--cluster", "cluster.json"]
    shown = used(out(capsys, "plan", *ONE))
    commands = shown.replace("\\\n", " ").splitlines()
    [again] = [shlex.split(line) for line in commands if " plan " in line and "cluster.json" in line]
    assert again == ["pipeflow", "plan", *measured_words(ONE)]
    assert "-m pipeflow calibrate" in shown


def test_a_plan_of_a_measured_cluster_asks_for_a_step_alone(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "cluster.json"
    Cluster.of("a100-40gb").save(path)
    shown = used(out(capsys, "plan", "tiny", "--cluster", path))
    assert "calibrate" not in shown
    assert "pipeflow plan --measured run.json" in shown


def test_what_pipeflow_cannot_run_is_said_and_the_next_layout_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["llama3-8b", "--context", 2, "--data", 2, "--zero", 3, "--pipeline", 1, "--device", "a100-40gb"]
    shown = " ".join(used(out(capsys, "plan", *long)).split())
    assert shown.startswith(
        ": pipeflow has no fully_shard over context ranks: --zero 1 or --context 1 plans without it"
    )
    assert "without it; --for prints what other" in shown
    assert "make_schedule" not in shown
    assert "run.json" not in shown
    assert "expect at most" in shown
    assert "-m pipeflow calibrate" in shown
    first, second = planned("1f1b", 2, model=MIXTURE, data=1, context=2, expert=2), planned("1f1b", 2)
    shown = " ".join(" ".join(use_lines([Planned(first, {}), Planned(second, {}, 4)], ONE)).split())
    assert shown.startswith("Use it (layout 4: pipeflow's expert ranks are replicas with all of their tensor ranks")
    assert "make_schedule" in shown


MIXTURE = replace(SMALL, experts=2)


def test_expert_ranks_are_written_or_refused() -> None:
    found = script(planned("1f1b", 2, model=MIXTURE, data=2, expert=2), {})
    assert found.text.startswith("context = pipeflow.launch(pipeline=2, experts=2)\n")
    assert any("one all-to-all, which nothing hides" in note for note in found.notes)
    for told, given in {
        "without --expert-tensor": {"expert_tensor": 2, "tensor": 1},
        "no fully_shard": {"zero": 3},
    }.items():
        with pytest.raises(UsageError, match=told):
            script(planned("1f1b", 2, model=MIXTURE, data=4, expert=2, **given), {})


TIED = replace(SMALL, tied=True)


@pytest.mark.parametrize(("model", "cut"), [(SMALL, None), (TIED, [(0, 3), (3, 5)])])
def test_another_model_over_context_ranks_shares_its_tokens(model: Any, cut: Any) -> None:
    """SMALL is not tied, and pipeflow's own GPT cuts its layers evenly."""
    found = script(planned("1f1b", 2, model=model, context=2, **({"cut": cut} if cut else {})), {})
    assert "huggingface.share_tokens(module)" in found.text
    assert "criterion=huggingface.CausalLMLoss()" in found.text
    assert any("batches have input_ids and position_ids" in note for note in found.notes)


@pytest.mark.slow
def test_the_lines_of_a_script_with_context_ranks_run() -> None:
    torch = pytest.importorskip("torch")
    import pipeflow
    from pipeflow.testing import run_threads

    found = planned("1f1b", 2, model=TIED, context=2, zero=1, precision="bf16-mixed", checkpoint="full")
    written = script(found, {})
    launched, *lines = written.text.splitlines()
    assert launched == 'context = pipeflow.launch(pipeline=2, context=2, context_attention="gather")'
    assert not any("recomputation comes from your module" in note for note in written.notes)

    def train() -> tuple[float, int]:
        names: dict[str, Any] = {"pipeflow": pipeflow, "torch": torch}
        exec("\n".join(lines), names)
        tokens = torch.arange(64).view(8, 8) % TIED.vocabulary
        step = pipeflow.execute_pipeline(iter([({"input_ids": tokens}, tokens)]), names["model"], broadcast_loss=True)
        names["optimizer"].step()
        assert step.loss is not None
        return step.loss.item(), sum(len(chunk.blocks) for chunk in names["model"].chunks)

    losses, blocks = zip(*run_threads(train, 4, context=2), strict=True)
    assert set(losses) == {losses[0]}
    assert blocks == (2, 2, 3, 3)


def test_the_memory_to_expect_is_that_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "plan", *ONE)
    peak = (
        next(line for line in shown.splitlines() if line.startswith("peak: ")).split(" on ")[0].removeprefix("peak: ")
    )
    assert f"expect at most {peak} of tensors on a device" in used(shown)
    assert max(map(len, used(shown).splitlines())) <= 80


def test_where_slices_of_logits_fit_and_whole_ones_do_not_the_lines_have_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = ["llama3.2-1b", "--device", "a100-40gb", "--pipeline", 1, "--microbatches", 1, "--sequence", 2048]
    fits, sliced, neither = (used(out(capsys, "plan", *one, "--microbatch-size", size)) for size in (4, 6, 8))
    assert "head_slices=8" in sliced
    assert "expect at most 35.5 GiB" in sliced
    assert "head_slices" not in fits
    assert "head_slices" not in neither


def test_a_plan_names_its_kernel_and_how_ranks_split_sequences_and_communicate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = out(capsys, "plan", *ONE, "--tensor", 2)
    assert "planned with --attention flash2 --no-overlap\n" in usual
    given = ["--sequence-parallel", "--overlap", "--attention", "flash1"]
    assert "planned with --attention flash1 --sequence-parallel --overlap\n" in out(
        capsys, "plan", *ONE, "--tensor", 2, *given
    )
    assert "planned with --attention flash2\n" in out(capsys, "plan", *ONE)


def test_a_plan_says_which_ranks_communicate_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tensor", 2, "--data", 2, "--devices-per-node"]
    near, far = (" ".join(out(capsys, "plan", *ONE, *sizes, node).split()) for node in (8, 2))
    assert "links: tensor ranks, pipeline ranks and replicas within nodes (300 GB/s of a device)" in near
    assert "links: tensor ranks within nodes (300 GB/s of a device); pipeline ranks and replicas between nodes" in far
    assert "links:" not in out(capsys, "plan", "tiny", "--device", "a100-40gb", "--pipeline", 1)
