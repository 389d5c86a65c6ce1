"""Other libraries get the options of a plan, or one sentence on why they cannot run it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pipeflow import GPT, PRECISIONS, Cluster, Plan, Setup, UsageError, ViT, make_schedule, plan
from pipeflow.core.action import actions_of
from pipeflow.core.partition import Cut
from pipeflow.planning.layout_string import LayoutString
from pipeflow.planning.libraries import LIBRARIES
from pipeflow.planning.libraries.torchtitan import SCHEDULES as TORCHS

MODEL = GPT(layers=16, hidden=64, heads=4, positions=32, vocabulary=101, tied=False)
NODES = Cluster.of("h100-80gb", devices_per_node=4)


def mixed(expert_layers: Any, dense_layers: int = 0) -> GPT:
    """The model with experts in some of its layers."""
    return replace(MODEL, experts=4, experts_per_token=2, expert_layers=expert_layers, dense_layers=dense_layers)


def planned(
    name: str = "1f1b", *, ranks: int = 4, many: int = 8, cut: list[int] | None = None, model: GPT = MODEL, **given: Any
) -> Plan:
    """A plan; options of the schedule are those that no setup has."""
    precision = PRECISIONS[given.pop("precision", "bf16-mixed")]
    options = {option: given.pop(option) for option in ("chunks", "group", "extra_warmup") if option in given}
    schedule = make_schedule(name, ranks=ranks, microbatches=many, **options)
    parts: Cut = list(pairwise(accumulate(cut, initial=0))) if cut else "uniform"
    return plan(model, schedule, Setup(precision=precision, **given), cluster=NODES, cut=parts)


def flags(found: Plan) -> dict[str, str]:
    """What Megatron-LM is given, without the sizes that all plans here have."""
    text = LIBRARIES["megatron"].options(found).text
    pairs = {words[0]: " ".join(words[1:]) for words in map(shlex.split, text.splitlines())}
    assert (pairs.pop("--num-layers"), pairs.pop("--seq-length")) == ("16", "32")
    return pairs


def test_megatron_runs_1f1b() -> None:
    found = flags(planned(data=3, tensor=2, zero=1, microbatch_size=5, sequence_parallel=True, checkpoint="full"))
    assert found == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--use-tp-pp-dp-mapping": "",
        "--micro-batch-size": "5",
        "--global-batch-size": "120",
        "--sequence-parallel": "",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
        "--use-distributed-optimizer": "",
        "--overlap-grad-reduce": "",
        "--overlap-param-gather": "",
        "--tp-comm-overlap": "",
        "--bf16": "",
    }


def test_megatron_interleaves_even_stages_by_their_layers_and_others_by_their_layout() -> None:
    even = flags(planned("interleaved-1f1b", chunks=2, precision="bf16", checkpoint="selective"))
    assert even["--num-layers-per-virtual-pipeline-stage"] == "2"
    assert even["--recompute-granularity"] == "selective"
    assert even["--attention-backend"] == "unfused"
    assert "--grad-reduce-in-bf16" in even
    assert not any("layout" in each or "group" in each or "mapping" in each for each in even)
    cut = [1, 3, 0, 2, 2, 2, 3, 3]
    uneven = flags(planned("interleaved-1f1b", chunks=2, group=8, cut=cut, precision="float32"))
    layout = LayoutString.read(uneven["--pipeline-model-parallel-layout"])
    assert [stage.count("t") for stage in layout.stages] == cut
    assert uneven["--microbatch-group-size-per-virtual-pipeline-stage"] == "8"
    assert not {"--bf16", "--num-layers-per-virtual-pipeline-stage"} & set(uneven)


def test_megatron_has_no_pipeline_of_one_rank() -> None:
    found = flags(planned(ranks=1, data=2, precision="fp16-mixed", keep_scores=True))
    sizes = {"--tensor-model-parallel-size": "1", "--pipeline-model-parallel-size": "1"}
    batch = {"--micro-batch-size": "1", "--global-batch-size": "16"}
    types = {"--fp16": "", "--accumulate-allreduce-grads-in-fp32": "", "--attention-backend": "unfused"}
    assert found == sizes | batch | types
    assert flags(planned(ranks=1, precision="fp8"))["--fp8-format"] == "hybrid"


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (mixed(2), "([0,1]*8)"),
        (mixed(None, 3), "([0]*3+[1]*13)"),
        (mixed((1, *[0] * 15)), "([1]*1+[0]*15)"),
        (mixed(None), None),
        (MODEL, None),
    ],
)
def test_megatron_is_told_which_layers_have_experts_if_some_have_none(model: GPT, given: str | None) -> None:
    assert flags(planned(model=model)).get("--moe-layer-freq") == given


@pytest.mark.parametrize("model", [mixed(2), mixed(16), mixed(None, 3), mixed(None), MODEL])
def test_torchtitan_has_experts_in_each_nth_layer_or_in_all_but_the_first(model: GPT) -> None:
    assert LIBRARIES["torchtitan"].options(planned(model=model, data=2, zero=1)).text


def toml(found: Plan) -> dict[str, Any]:
    """What torchtitan is given, without what all plans here have."""
    read = tomllib.loads(LIBRARIES["torchtitan"].options(found).text)
    training, parallelism = read["training"], read["parallelism"]
    assert (training.pop("seq_len"), training.pop("dtype"), training.pop("mixed_precision_reduce")) == (
        *(32, "float32"),
        "float32",
    )
    assert parallelism.pop("fsdp_reshard_after_forward") == "never"
    return read


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ranks": 1, "zero": 3}, ("always", 1, 8)),
        ({"ranks": 1, "zero": 3, "shard_ranks": 4}, ("always", 2, 4)),
        ({"ranks": 1, "zero": 2}, ("never", 1, 8)),
        ({"zero": 3}, ("never", 1, 8)),  # torch's schedules gather and reshard stages
    ],
)
def test_torchtitan_shards_weights(given: dict[str, Any], expected: tuple[str, int, int]) -> None:
    read = tomllib.loads(LIBRARIES["torchtitan"].options(planned(data=8, **given)).text)["parallelism"]
    names = ("fsdp_reshard_after_forward", "data_parallel_replicate_degree", "data_parallel_shard_degree")
    assert tuple(read[name] for name in names) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"zero": 1, "overlap": True}, {}),
        ({"zero": 1, "overlap": False}, {}),
        ({"zero": 2}, {"--data-parallel-sharding-strategy": "optim_grads"}),
        ({"zero": 3, "overlap": False}, {"--data-parallel-sharding-strategy": "optim_grads_params"}),
        ({"zero": 3, "shard_ranks": 2}, {"--num-distributed-optimizer-instances": "4"}),
    ],
)
def test_megatron_divides_gradients_and_weights(given: dict[str, Any], expected: dict[str, str]) -> None:
    found = flags(planned(ranks=1, data=8, **given))
    assert expected.items() <= found.items()
    assert "--use-distributed-optimizer" in found
    assert ("--use-megatron-fsdp" in found) == (given["zero"] > 1)
    overlaps = given.get("overlap", True)  # as with any fused attention in a mixed precision
    assert ("--overlap-param-gather" in found) == ("--overlap-grad-reduce" in found) == overlaps


def test_torchtitan_runs_1f1b() -> None:
    found = toml(planned(data=2, tensor=2, zero=1, microbatch_size=3, sequence_parallel=True, checkpoint="full"))
    stages = found["parallelism"].pop("module_fqns_per_model_part")
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"]
    assert stages[-1] == ["layers.12", "layers.13", "layers.14", "layers.15", "norm", "output"]
    assert found == {
        "parallelism": {
            "pipeline_parallel_degree": 4,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_microbatch_size": 3,
            "tensor_parallel_degree": 2,
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": 2,
        },
        "training": {"local_batch_size": 24, "global_batch_size": 48, "mixed_precision_param": "bfloat16"},
        "activation_checkpoint": {"mode": "full"},
    }


def test_torchtitan_runs_a_v_with_the_cut_of_the_plan() -> None:
    found = toml(planned("zb-v", ranks=2, cut=[0, 7, 4, 5], precision="float32"))["parallelism"]
    assert found["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    stages = found["module_fqns_per_model_part"]
    assert [sum("layers" in name for name in stage) for stage in stages] == [0, 7, 4, 5]
    assert stages[0] == ["tok_embeddings"]


def test_torchtitan_accumulates_gradients_without_a_pipeline() -> None:
    found = toml(planned(ranks=1, data=4, precision="float32", microbatch_size=2))
    assert found["training"] == {
        "local_batch_size": 2,
        "global_batch_size": 64,
        "mixed_precision_param": "float32",
    }
    assert not {name for name in found["parallelism"] if "pipeline" in name} - {"pipeline_parallel_degree"}
    assert found["parallelism"]["data_parallel_replicate_degree"] == 4
    assert found["activation_checkpoint"]["mode"] == "none"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"data": 2, "zero": 1, "microbatch_size": 3, "checkpoint": "full"},
            {
                "train_batch_size": 48,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": 8,
                "zero_optimization": {"stage": 1, "overlap_comm": True},
                "pipeline": {"stages": 4, "activation_checkpoint_interval": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
        ),
        (
            {"ranks": 2, "precision": "fp16", "many": 5},
            {
                "train_batch_size": 5,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 5,
                "zero_optimization": {"stage": 0},
                "pipeline": {"stages": 2, "activation_checkpoint_interval": 0},
                "fp16": {"enabled": True},
            },
        ),
        (
            {"ranks": 1, "data": 4, "zero": 1, "precision": "bf16"},
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 8,
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "bf16"},
            },
        ),
        (
            {"ranks": 1, "data": 4, "zero": 3, "shard_ranks": 2, "overlap": False, "precision": "fp16", "many": 5},
            {
                "train_batch_size": 20,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 5,
                "zero_optimization": {"stage": 3, "overlap_comm": False, "mics_shard_size": 2},
                "fp16": {"enabled": True},
            },
        ),
    ],
)
def test_deepspeed_is_configured(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json.loads(LIBRARIES["deepspeed"].options(planned(**given)).text) == expected


@pytest.mark.parametrize(
    ("library", "given", "note"),
    [
        ("megatron", {"data": 3, "tensor": 2}, "start 24 processes: Megatron-LM makes replicas of all"),
        ("torchtitan", {"data": 2, "zero": 1, "precision": "bf16"}, "torchtitan adds up gradients in float32"),
        ("torchtitan", {"data": 2, "zero": 1}, "torchtitan puts replicas next to each other"),
        ("torchtitan", {"ranks": 1, "data": 2, "zero": 1}, "reduces gradients after each microbatch"),
        (
            "torchtitan",
            {"data": 2, "zero": 1, "overlap": False},
            "reduces gradients while layers compute; --overlap plans",
        ),
        (
            "deepspeed",
            {"ranks": 1, "data": 2, "zero": 3},
            "DeepSpeed gathers layers ahead in backwards, too; --prefetch",
        ),
        ("megatron", {"document": 256}, "documents of 256 tokens have to be packed by the data"),
        ("deepspeed", {"eager": True}, "--eager plans layers without fused kernels"),
        ("deepspeed", {"data": 2, "zero": 1}, "DeepSpeed puts replicas next to each other"),
        ("deepspeed", {}, "give PipelineModule num_stages=4 and partition_method='type:NAME'"),
        ("deepspeed", {"ranks": 1, "checkpoint": "full"}, "the model has to checkpoint each of them"),
        ("deepspeed", {"tensor": 2, "sequence_parallel": True}, "tensor ranks and sequence parallelism come from"),
    ],
)
def test_what_options_do_not_say_is_a_note(library: str, given: dict[str, Any], note: str) -> None:
    assert any(note in each for each in LIBRARIES[library].options(planned(**given)).notes)


def test_there_is_no_note_without_a_reason() -> None:
    assert LIBRARIES["torchtitan"].options(planned(ranks=1, precision="float32")).notes == ()
    assert LIBRARIES["deepspeed"].options(planned(ranks=1)).notes == ()


SHARDED: dict[str, Any] = {"data": 2, "zero": 1}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("megatron", {"name": "zb-h1"}, "Megatron-LM does not have 'zb-h1' on 4 ranks .* is --schedule 1f1b"),
    ("megatron", {"name": "zb-v"}, "the nearest that it has is --schedule interleaved-1f1b --chunks 2"),
    ("megatron", {"name": "1f1b", "extra_warmup": 1}, "does not have '1f1b' on 4 ranks with 8 microbatches"),
    ("megatron", {"name": "interleaved-1f1b", "chunks": 2, "ranks": 1}, "nearest that it has is --schedule 1f1b"),
    ("megatron", {"name": "interleaved-1f1b", "chunks": 2, "many": 6}, "groups of at least 4, into which 6 do not"),
    ("megatron", {"model": ViT.named("vit-b16")}, "written for language models, and this model is none"),
    ("torchtitan", {"name": "v-half", **SHARDED}, "the nearest that it has is --schedule zb-v"),
    ("torchtitan", {"name": "dualpipe", **SHARDED}, "the nearest that it has is --schedule dualpipe-v"),
    ("torchtitan", {"name": "looped-bfs", "chunks": 2, **SHARDED}, "is --schedule interleaved-1f1b --chunks 2"),
    ("torchtitan", {"name": "gis", "chunks": 2, **SHARDED}, "is --schedule interleaved-zb --chunks 2"),
    ("torchtitan", {"name": "interleaved-zb", "chunks": 2, "many": 6, **SHARDED}, "into which 6 do not divide"),
    ("torchtitan", {"name": "dualpipe-v", "many": 6, **SHARDED}, "DualPipeV needs at least 8 microbatches here"),
    ("torchtitan", {"cut": [8, 0, 4, 4], **SHARDED}, "stage 1 has no layers, and torchtitan cannot train a stage"),
    ("torchtitan", {"precision": "fp16", **SHARDED}, "torchtitan does not train in fp16 as planned"),
    ("torchtitan", {"checkpoint": "selective", **SHARDED}, "stores no scores: the nearest is --checkpoint full or no"),
    ("torchtitan", {"keep_scores": True, **SHARDED}, "stores no scores: the nearest is a plan without --keep-scores"),
    ("torchtitan", {"tensor": 2, **SHARDED}, "always split the sequence, too: plan with --sequence-parallel"),
    ("torchtitan", {"data": 2, "precision": "float32"}, "only without tensor and pipeline ranks: plan with --zero"),
    ("torchtitan", {}, "keeps weights in bf16 only where replicas split the optimizer"),
    ("torchtitan", {"model": ViT.named("vit-b16"), **SHARDED}, "written for language models"),
    ("torchtitan", {"model": mixed((0, 1, 1, 0) * 4), **SHARDED}, "every N-th layer or in all but the first ones"),
    ("deepspeed", {"name": "gpipe"}, "DeepSpeed does not have 'gpipe' on 4 ranks .* is --schedule 1f1b"),
    ("deepspeed", {"cut": [5, 4, 4, 3]}, "DeepSpeed divides layers itself and takes no numbers of layers"),
    ("deepspeed", {"precision": "fp16-mixed"}, "does not train in fp16-mixed as planned: the nearest .* fp16"),
    ("deepspeed", {"checkpoint": "selective"}, "recomputes whole layers only: the nearest is --checkpoint full"),
    ("megatron", {"ranks": 1, "data": 2, "zero": 3, "reduce_once": True}, "reduces gradients in every microbatch"),
    ("torchtitan", {"ranks": 1, "data": 2, "zero": 3, "reduce_once": True}, "a plan without --reduce-once"),
    ("deepspeed", {"ranks": 1, "data": 2, "zero": 3, "reduce_once": True}, "a plan without --reduce-once"),
    ("megatron", {"data": 2, "zero": 3}, "does not divide weights of pipeline ranks as planned: .* --zero 1"),
    ("deepspeed", {"data": 2, "zero": 3}, "the pipeline of DeepSpeed has ZeRO-1 at most: .* --zero 1"),
    ("deepspeed", {"ranks": 1, "data": 4, "zero": 2, "shard_ranks": 2}, "over some replicas only with ZeRO-3"),
    ("deepspeed", {"data": 2}, "splits the optimizer's state over the replicas in bf16 anyway: plan with --zero"),
]


@pytest.mark.parametrize(("library", "given", "message"), REFUSED)
def test_what_a_library_cannot_run_is_refused(library: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        LIBRARIES[library].options(planned(**given))
    assert "\n" not in str(raised.value)


def stages(ranks: int, chunks: int) -> list[Any]:
    """What torch's schedules ask of stages before they run."""
    common = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "submod": None, "is_last": False}
    return [SimpleNamespace(stage_index=chunk * ranks, **common) for chunk in range(chunks)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TORCHS if name not in {"1f1b", "gpipe"}])
@pytest.mark.parametrize(("ranks", "many"), [(2, 4), (4, 8), (4, 12)])
def test_torch_runs_the_same_order(name: str, ranks: int, many: int) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours = make_schedule(name, ranks=ranks, microbatches=many)
    order = theirs.get_schedule_class(TORCHS[name])(stages(ranks, 2), many).pipeline_order
    for rank, row in enumerate(ours.rows):
        said = [word for action in order[rank] if action for word in re.findall(r"\d+[FBIW]\d+", str(action))]
        assert said == [str(action) for entry in row for action in actions_of(entry)]
