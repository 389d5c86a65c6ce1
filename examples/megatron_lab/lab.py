r"""The Megatron tensor-parallel lab: trains ten layers on two tensor ranks with mock data, then saves and loads them.

python examples/megatron_lab/lab.py                                     two processes on this machine
torchrun --nproc-per-node 2 examples/megatron_lab/lab.py --steps 20
python examples/megatron_lab/lab.py --tensor 2 --pipeline 2 --microbatches 4
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

import pipeflow
from pipeflow.megatron.core import dist_checkpointing, parallel_state
from pipeflow.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from pipeflow.megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from pipeflow.megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from pipeflow.megatron.core.models.gpt.gpt_model import GPTModel
from pipeflow.megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from pipeflow.megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from pipeflow.megatron.core.transformer.transformer_config import TransformerConfig
from pipeflow.megatron.training.tokenizer.tokenizer import _NullTokenizer

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.ranks import is_rank, start_ranks

SEQUENCE_LENGTH = 64
SEED = 123


def main() -> None:
    arguments = read_arguments()
    try:
        if is_rank() or arguments.tensor * arguments.pipeline == 1:
            run(arguments)
        else:
            start_ranks(arguments.tensor * arguments.pipeline)
    except (pipeflow.UsageError, pipeflow.PipelineError) as error:
        sys.exit(f"lab.py: {error}" if os.environ.get("RANK", "0") == "0" else 1)
    except KeyboardInterrupt:
        sys.exit("\nstopped" if os.environ.get("RANK", "0") == "0" else 1)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=5, help="training steps (%(default)s)")
    add("--short", dest="steps", action="store_const", const=2, help="two steps")
    add("--tensor", type=int, default=2, help="tensor ranks (%(default)s)")
    add("--pipeline", type=int, default=1, help="pipeline ranks (%(default)s)")
    add("--microbatches", type=int, default=1, help="microbatches per step (%(default)s)")
    add("--checkpoint", type=Path, help="folder to save the model to (a temporary one)")
    add("--tiny", action="store_true", help="a model and batches of a few kilobytes")
    return parser.parse_args()


def model_provider(*, tiny: bool = False) -> GPTModel:
    """The lab's model, or with `tiny` one of the same depth that is less wide."""
    config = TransformerConfig(
        num_layers=10, hidden_size=32 if tiny else 512, num_attention_heads=4, use_cpu_initialization=True
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=SEQUENCE_LENGTH)


def get_train_data_iterator(*, tiny: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yields batches forever. Their order depends on the seed, so all ranks of a replica read the same."""
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=SEQUENCE_LENGTH, tokenizer=_NullTokenizer(vocab_size=SEQUENCE_LENGTH)
    )
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    assert train is not None
    generator = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
    loader = DataLoader(train, batch_size=8 if tiny else 128, shuffle=True, drop_last=True, generator=generator)
    while True:
        yield from loader


def forward_step_func(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """Runs one microbatch; returns the model's output and its loss function."""

    def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses, counts = output_tensor.float().flatten(), loss_mask.float().flatten()
        loss = (losses * counts).sum() / counts.sum()
        return loss, {"lm loss": loss}

    data = next(data_iterator)
    output_tensor = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return output_tensor, partial(loss_func, data["loss_mask"])


def run(arguments: argparse.Namespace) -> None:
    """The work of one rank."""
    parallel_state.initialize_model_parallel(arguments.tensor, arguments.pipeline)
    model_parallel_cuda_manual_seed(SEED)
    model = model_provider(tiny=arguments.tiny)
    optimizer = Adam(model.parameters(), lr=3e-4)
    iterator = get_train_data_iterator(tiny=arguments.tiny)
    forward_backward = get_forward_backward_func()
    is_last = parallel_state.is_pipeline_last_stage()
    speaks = is_last and not parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_data_parallel_rank()

    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        logged = forward_backward(
            forward_step_func=forward_step_func,
            data_iterator=iterator,
            model=model,
            num_microbatches=arguments.microbatches,
        )
        optimizer.step()
        if speaks:
            loss = sum(float(values["lm loss"]) for values in logged) / len(logged)
            print(f"step {step}/{arguments.steps}  lm loss {loss:.4f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.checkpoint or Path(shared(folder))
        dist_checkpointing.save(model.sharded_state_dict(), path)
        loaded = model_provider(tiny=arguments.tiny)
        loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), path))
        if any(not value.equal(loaded.get_parameter(name)) for name, value in model.named_parameters()):
            raise pipeflow.UsageError(f"the weights loaded from {path} differ from those that were saved")
        if speaks:
            print("loaded: every weight is what was saved", flush=True)


def shared(folder: str) -> str:
    """The first rank's folder, on every rank."""
    told = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return f"{told[0]}/lab"


if __name__ == "__main__":
    main()
