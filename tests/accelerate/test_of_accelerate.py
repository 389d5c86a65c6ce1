"""accelerate's own tests of an Accelerator, on pipeflow's. What does not apply is listed with the reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from pipeflow.testing import run_processes

accelerate = pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
IMPORTS = (
    "from pipeflow.accelerate import Accelerator\n"
    "from pipeflow.accelerate.utils import (\n"
    "    broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce\n)\n"
    "is_fp16_available = lambda: False\n"  # mixed_precision="fp16" is refused
)

CALLS = {
    "test_script.py": [
        "process_execution_check()",
        "init_state_check()",
        "rng_sync_check()",
        "dl_preparation_check()",
        "custom_sampler_check()",
        "check_seedable_sampler()",
        "check_seedable_sampler_in_batch_sampler_shard()",
        "check_seedable_sampler_with_data_seed()",
        "training_check(False)",
        "training_check(True)",
        "test_split_between_processes_list()",
        "test_split_between_processes_nested_dict()",
        "test_split_between_processes_tensor()",
        "test_split_between_processes_evenly()",
        "test_trigger()",
        "test_reinstantiated_state()",
    ],
    "test_sync.py": [
        "test_noop_sync(accelerator)",
        "test_gradient_accumulation(sync_each_batch=True)",
        "test_gradient_accumulation(split_batches=True, sync_each_batch=True)",
        "test_gradient_accumulation_with_opt_and_scheduler(sync_each_batch=True)",
        "test_dataloader_break()",
    ],
    "test_ops.py": [
        "test_gather(accelerator.state)",
        "test_gather_object(accelerator.state)",
        "test_gather_non_contiguous(accelerator.state)",
        "test_broadcast(accelerator.state)",
        "test_pad_across_processes(accelerator.state)",
        "test_reduce_sum(accelerator.state)",
        "test_reduce_mean(accelerator.state)",
        "test_reduce_max(accelerator.state)",
    ],
    "test_distributed_data_loop.py": [
        "test_default_ensures_even_batch_sizes()",
        "test_can_disable_even_batches()",
        "test_data_loader(DataLoader(DummyDataset(), shuffle=True, batch_size=4), accelerator)",
        "test_data_loader(DataLoader(DummyDataset(), batch_size=4), accelerator)",
    ],
    "external_deps/test_metrics.py": [
        "test_gather_for_metrics_drop_last()",
        "test_torch_metrics(accelerator, 99)",
        "test_torch_metrics(accelerator, 512)",
    ],
}
NOT = {
    "test_script.py": {
        "central_dl_preparation_check": "dispatch_batches is refused, since every rank reads its own batches",
        "test_split_between_processes_dataset": "needs the package datasets",
    },
    "test_sync.py": {
        "test_distributed_sync": "asserts that replicas do not average gradients under no_sync; a step always does",
        "test_distributed_sync_multiple_fwd": "calls the model again before a backward, which is refused",
    },
    "test_ops.py": {
        "test_op_checker": "asserts that accelerate's own operations compare shapes in debug mode",
        "test_copy_tensor_to_devices": "needs several GPUs",
    },
    "test_distributed_data_loop.py": {
        "test_can_join_uneven_inputs": "replicas need the same number of batches, so other numbers are refused",
        "test_join_raises_warning_for_non_ddp_distributed": "is about a warning of DistributedDataParallel",
        "test_join_can_override_even_batches": "uneven batches are refused",
        "test_join_can_override_for_mixed_type_dataloaders": "uneven batches are refused",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches": "uneven batches are refused",
        "test_pickle_accelerator": "an Accelerator of a pipeline holds connections to other ranks",
        "test_stateful_dataloader": "needs the package torchdata",
        "test_stateful_dataloader_save_state": "needs the package torchdata",
    },
    "external_deps/test_metrics.py": {
        "test_mrpc": "needs data and a model of the hub",
        "test_gather_for_metrics_with_iterable_dataset": "asserts that batches are dispatched, which is refused",
        "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset": "fails on accelerate without dispatching",
    },
}
NO_SCRIPT = {
    "test_cli.py": "prints versions",
    "test_ddp_comm_hook.py": "is about DistributedDataParallel",
    "test_merge_weights.py": "is about FSDP",
    "test_notebook.py": "is about notebook_launcher",
    "external_deps/test_checkpointing.py": "needs data and a model of the hub",
    "external_deps/test_ds_alst_ulysses_sp.py": "is about DeepSpeed",
    "external_deps/test_ds_multiple_model.py": "is about DeepSpeed",
    "external_deps/test_peak_memory_usage.py": "needs GPUs",
    "external_deps/test_performance.py": "needs data and a model of the hub",
    "external_deps/test_pippy.py": "is about accelerate's own pipelines for inference",
    "external_deps/test_zero3_integration.py": "is about DeepSpeed",
}


def script(name: str) -> dict[str, Any]:
    """The names of a script in which the Accelerator is pipeflow's. The model that it compares with is no prepared one,
    so its loss is differentiated by torch.
    """
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    text = re.sub(r"^(import (datasets|evaluate)|from datasets import .*)\n", "", text, flags=re.MULTILINE)
    text = text.replace("\n\n\n", f"\n{IMPORTS}\n\n", 1)
    text = text.replace("(model, input, target, accelerator)", "(model, input, target, accelerator, False)")
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, name, "exec"), names)
    return names


def run() -> None:
    """Each call in turn, with a new Accelerator."""
    for name, calls in CALLS.items():
        names = script(name)
        for call in calls:
            accelerate.state.GradientState._reset_state()
            exec(f"accelerator = Accelerator(); {call}", names)


@pytest.mark.exhaustive
def test_two_replicas_pass() -> None:
    """A replica is one rank here, because these tests take each rank for a process, and their model has no blocks."""
    run_processes(run, 2, deadline=200.0, data=2)


def test_every_test_is_named() -> None:
    """A new one of a later accelerate must be added here."""
    assert {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("test_*.py")} == {*CALLS, *NO_SCRIPT}
    for name, calls in CALLS.items():
        defined = [
            each
            for each in ast.parse((SCRIPTS / name).read_text(encoding="utf-8")).body
            if isinstance(each, ast.FunctionDef)
        ]
        tests = {each.name for each in defined if re.match(r"test_|check_s|\w+_check$", each.name)}
        assert tests == {call.partition("(")[0] for call in calls} | set(NOT[name])
