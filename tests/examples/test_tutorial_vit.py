"""Programs in the way of the tutorial on vision transformers: one by Trainer over replicas, one by the engine in a
pipeline, over tensor ranks too. They import `colossalai`; nothing is replaced but its name, or nothing at all where
`pipeflow.colossalai` runs them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_tutorial import PATHS, with_our_name
from tests.scripts import run_ranks

AS_IT_STANDS = "from pipeflow.colossalai.__main__ import main\n\nmain()\n"

DATA = """
import torch
from torch.utils.data import Dataset


class Colours(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 4
        self.images = torch.randn(count, 3, 8, 8, generator=generator) / 4
        self.images += torch.eye(4, 3)[self.labels][:, :, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]
"""

REPLICAS = """
import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import get_dataloader
from data import Colours
from model_zoo.vit import MixupAccuracy, vit_base_patch16_224

args = colossalai.get_default_parser().parse_args()
colossalai.launch_from_torch(config=args.config)
disable_existing_loggers()
logger = get_dist_logger()
batch_size = gpc.config.BATCH_SIZE
train_dataloader = get_dataloader(dataset=Colours(64, 0), shuffle=True, batch_size=batch_size, pin_memory=True)
test_dataloader = get_dataloader(dataset=Colours(32, 1), batch_size=batch_size, pin_memory=True)
sizes = dict(img_size=8, patch_size=2, embed_dim=16, depth=2, num_heads=2)
model = vit_base_patch16_224(drop_rate=gpc.config.DROP_RATE, num_classes=4, **sizes)
optimizer = colossalai.nn.Lamb(model.parameters(), lr=5e-2, weight_decay=0.1)
criterion = torch.nn.CrossEntropyLoss()
lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=2, total_steps=gpc.config.NUM_EPOCHS)
engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
    model, optimizer, criterion, train_dataloader, test_dataloader
)
trainer = Trainer(engine=engine, logger=logger)
trainer.fit(
    train_dataloader=train_dataloader,
    test_dataloader=test_dataloader,
    epochs=gpc.config.NUM_EPOCHS,
    hooks=[
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=MixupAccuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        hooks.SaveCheckpointHook(interval=1, checkpoint_dir="./ckpt"),
    ],
    display_progress=True,
    test_interval=1,
)
"""

REPLICAS_CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
DROP_RATE = 0.1
NUM_EPOCHS = 8
fp16 = dict(mode=AMP_TYPE.TORCH)
gradient_accumulation = 2
clip_grad_norm = 1.0
dali = dict(gpu_aug=False, mixup_alpha=0.2)
"""

STAGES = """
import os

import colossalai
import torch
from colossalai import nn as col_nn
from colossalai.builder.pipeline import partition_uniform
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.logging import get_dist_logger
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.registry import MODELS
from colossalai.utils import MultiTimer, is_using_pp, get_dataloader
from data import Colours
from model_zoo.vit.vit import ViTBlock, ViTEmbedding, ViTHead, _create_vit_model
from torch import nn


@MODELS.register_module
class Stage(nn.Module):
    def __init__(self, start, end):
        super().__init__()
        config, layers = gpc.config, []
        if start == 0:
            layers.append(ViTEmbedding(config.IMG_SIZE, config.PATCH_SIZE, embedding_dim=config.HIDDEN_SIZE))
        for _ in range(start, end):
            layers.append(ViTBlock(dim=config.HIDDEN_SIZE, num_heads=config.NUM_HEADS, mlp_ratio=config.MLP_RATIO,
                                   checkpoint=config.CHECKPOINT, init_method="jax"))
        if end == config.DEPTH:
            layers.append(col_nn.LayerNorm(normalized_shape=config.HIDDEN_SIZE, eps=1e-6))
            layers.append(ViTHead(dim=config.HIDDEN_SIZE, num_classes=config.NUM_CLASSES, init_method="jax"))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def build(device=torch.device(DEVICE)):
    size, place = gpc.get_world_size(ParallelMode.PIPELINE), gpc.get_local_rank(ParallelMode.PIPELINE)
    [(start, end)] = partition_uniform(gpc.config.DEPTH, size, 1)[place]
    return Stage(start, end).to(device)


parser = colossalai.get_default_parser()
args = parser.parse_args()
colossalai.launch_from_torch(config=args.config)
logger = get_dist_logger()
if hasattr(gpc.config, "LOG_PATH"):
    if gpc.get_global_rank() == 0:
        if not os.path.exists(gpc.config.LOG_PATH):
            os.mkdir(gpc.config.LOG_PATH)
        logger.log_to_file(gpc.config.LOG_PATH)
assert is_using_pp()
model = build()
numel = sum(p.numel() for p in model.parameters())
logger.info(f"number of parameters: {numel} on pipeline stage {gpc.get_local_rank(ParallelMode.PIPELINE)}")
train_dataloader = get_dataloader(dataset=Colours(32, 0), shuffle=True, batch_size=gpc.config.BATCH_SIZE)
criterion = CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY)
lr_scheduler = CosineAnnealingWarmupLR(
    optimizer=optimizer, total_steps=gpc.config.NUM_EPOCHS, warmup_steps=gpc.config.WARMUP_EPOCHS
)
engine, train_dataloader, _, _ = colossalai.initialize(
    model=model, optimizer=optimizer, criterion=criterion, train_dataloader=train_dataloader
)
logger.info("Engine is built", ranks=[0])
data_iter = iter(train_dataloader)
for epoch in range(gpc.config.NUM_EPOCHS):
    engine.train()
    for _ in range(len(train_dataloader)):
        engine.zero_grad()
        output, label, loss = engine.execute_schedule(data_iter, return_output_label=False)
        engine.step()
        lr_scheduler.step()
        assert output is label is None
        if loss is not None:
            print("loss", float(loss), flush=True)
"""

STAGES_CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 16
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 12
WARMUP_EPOCHS = 2
LOG_PATH = "./logs"
IMG_SIZE = 8
PATCH_SIZE = 2
HIDDEN_SIZE = 16
DEPTH = 2
NUM_HEADS = 2
MLP_RATIO = 2
NUM_CLASSES = 4
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1
parallel = dict(pipeline=2, tensor=dict(mode="MODE", size=SIZE))
NUM_MICRO_BATCHES = parallel["pipeline"]
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
"""


def run(folder: Path, program: str, config: str, ranks: int, *, unchanged: bool) -> str:
    """What the ranks print."""
    named = str if unchanged else with_our_name
    for name, text in (("train.py", program), ("config.py", config), ("data.py", DATA)):
        (folder / name).write_text(named(text), encoding="utf-8")
    (folder / "unchanged.py").write_text(AS_IT_STANDS, encoding="utf-8")
    script = ["unchanged.py", "train.py"] if unchanged else ["train.py"]
    variables = {"COLUMNS": "200", "PYTHONPATH": PATHS}
    return run_ranks(folder / script[0], *script[1:], "--config", "config.py", ranks=ranks, folder=folder, **variables)


@pytest.mark.parametrize("unchanged", [False, True], ids=["renamed", "unchanged"])
@pytest.mark.exhaustive
def test_replicas_by_trainer(tmp_path: Path, unchanged: bool) -> None:
    printed = run(tmp_path, REPLICAS, REPLICAS_CONFIG, 2, unchanged=unchanged)
    losses = [float(loss) for loss in re.findall(r"Train\]: Loss = ([\d.]+)", printed)]
    right = [float(share) for share in re.findall(r"Test\]:.* Accuracy = ([\d.]+)", printed)]
    assert len(losses) == len(right) == 8
    assert losses[-1] < losses[0] - 0.3
    assert right[-1] > 0.6
    assert list((tmp_path / "ckpt").iterdir())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("tensor", "mode", "unchanged"),
    [(1, "1d", True), (2, "1d", False), (4, "2d", True)],
    ids=["pipeline", "hybrid", "square"],
)
@pytest.mark.slow
def test_stages_by_engine(tmp_path: Path, tensor: int, mode: str, unchanged: bool) -> None:
    """`cuda` is the CPU where pipeflow.colossalai runs the program on a machine without a GPU."""
    program = STAGES.replace("DEVICE", repr("cuda" if unchanged else "cpu"))
    config = STAGES_CONFIG.replace("=SIZE", f"={tensor}").replace("MODE", mode)
    printed = run(tmp_path, program, config, 2 * tensor, unchanged=unchanged)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 24 * tensor
    assert sum(losses[-2 * tensor :]) < sum(losses[: 2 * tensor]) - 0.3 * 2 * tensor
    assert "number of parameters" in (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8")
