"""A parser of the arguments of ColossalAI's `launch`."""

from __future__ import annotations

from argparse import ArgumentParser

from pipeflow.colossalai.launching import BACKENDS


def get_default_parser() -> ArgumentParser:
    """Returns a parser of the arguments of `launch`; add your own options to it."""
    parser = ArgumentParser()
    parser.add_argument("--config", help="a Python file")
    parser.add_argument("--host", help="host name or address of rank 0's machine")
    parser.add_argument("--port", type=int, help="a free port on that machine")
    parser.add_argument("--world_size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="index of this process, from 0")
    parser.add_argument("--local_rank", type=int, help="index of this process on its machine, from 0")
    parser.add_argument("--backend", choices=BACKENDS, help="by default nccl if there is a GPU, else gloo")
    return parser
