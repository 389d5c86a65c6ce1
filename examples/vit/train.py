r"""Train a vision transformer from a configuration file: on one process, or with replicas, a pipeline and tensor ranks.

    python examples/vit/train.py                                        configs/hybrid.py: four processes
    python examples/vit/train.py --config examples/vit/configs/single.py
    python examples/vit/train.py --world_size 8                         two replicas of four processes
    python examples/vit/train.py --short                                two epochs
    python examples/vit/train.py --check                                compares with one process, in float64
    python examples/vit/train.py --checkpoints folder                   resumes where the last run ended
    DATA=folder python examples/vit/train.py                            CIFAR-10 from that folder
    torchrun --nproc-per-node 4 examples/vit/train.py --config examples/vit/configs/hybrid.py

Without torchrun it starts the processes itself.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from torch import nn

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.plan import PlanHook
from gpt3.ranks import errors_in_one_line, is_rank, start_ranks
from pipeflow.training import (
    AccuracyHook,
    CheckpointHook,
    Config,
    Hook,
    Mixup,
    MixupLoss,
    Trainer,
    get_dataloader,
    get_dist_logger,
    launch_from_config,
    make_engine,
    read_config,
)
from vit.build import build_pipeline_vit
from vit.check import check
from vit.data import Images, load_images
from vit.options import layout_of, make_optimizer, model_options, require_keys, validate

HYBRID = Path(__file__).with_name("configs") / "hybrid.py"


def main() -> None:
    arguments = read_arguments()
    with errors_in_one_line():
        config = read_config(arguments.config)
        if arguments.short:
            config = read_config({**config.given, "NUM_EPOCHS": 2, "WARMUP_EPOCHS": 1})
        require_keys(config)
        layout, images = layout_of(config, arguments.world_size), load_images(config.IMG_SIZE)
        validate(config, layout, images)
        if layout.world_size > 1 and not is_rank():
            start_ranks(layout.world_size)
        elif arguments.check:
            check(config, images, arguments.device)
        else:
            train(config, images, arguments)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=HYBRID, metavar="FILE", help="a Python file (configs/hybrid.py)")
    parser.add_argument("--world_size", type=int, help="processes to start without torchrun; by default one replica's")
    parser.add_argument("--device", help="device such as cpu; by default a GPU if there is one")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save every epoch there, and resume from the newest")
    parser.add_argument("--short", action="store_true", help="train for two epochs")
    parser.add_argument("--check", action="store_true", help="take a few steps, and compare them with one process")
    return parser.parse_args()


def train(config: Config, images: Images, arguments: argparse.Namespace) -> None:
    """The work of one rank, from the launch to the last epoch."""
    context = launch_from_config(config, device=arguments.device)
    logger = get_dist_logger()
    loader = get_dataloader(
        images.train,
        config.BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        pin_memory=True,
        collate_fn=Mixup(config.given.get("MIXUP_ALPHA", 0.0)),
    )
    test_loader = get_dataloader(images.test, config.BATCH_SIZE)

    model = build_pipeline_vit(config.DEPTH, config.num_chunks or 1, **model_options(config))
    optimizer, scheduler = make_optimizer(model.parameters(), config, len(loader) // config.gradient_accumulation)
    smoothed = partial(nn.CrossEntropyLoss, label_smoothing=config.given.get("LABEL_SMOOTHING", 0.0))
    engine = make_engine(model, optimizer, MixupLoss(smoothed), scheduler=scheduler)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(f"{parameters:,} parameters on stage {context.pipeline_rank}", ranks=context.layout.pipeline_ranks(0))
    hooks: list[Hook] = [AccuracyHook(), plan := PlanHook()]
    if arguments.checkpoints:
        hooks.append(CheckpointHook(arguments.checkpoints, best="accuracy"))
    trainer = Trainer(engine, hooks, progress=True)
    trainer.fit(loader, config.NUM_EPOCHS, test_loader=test_loader)
    accuracy = trainer.evaluate(test_loader)["accuracy"]
    logger.info(f"{accuracy:.1%} of the test images are classified correctly", ranks=[0])
    plan.tell(engine.model)


if __name__ == "__main__":
    main()
