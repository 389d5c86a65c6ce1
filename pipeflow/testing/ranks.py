"""Ranks for tests: run a function on every rank, each with its context. After a deadline ranks that hang are ended, and
every rank's stack is shown.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pipeflow.core.errors import Failure, UsageError
from pipeflow.engine.parallel.context import Context, current_context, set_context
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.local import Hub, LocalTransport
from pipeflow.engine.torch_private.tensors import keep_device_guard

PRELOADED = ["pipeflow.testing", "pipeflow.engine.runtime.pipeline", "torch._dynamo"]  # torch._dynamo: for optimizers
_GRACE = 15.0  # seconds for a process to end
_ON_THE_CALLERS_THREAD = ("cpu", "meta")  # devices whose backwards run there


class Killed(BaseException):
    """Ends the thread of a rank that counts as one whose process was killed."""


def die() -> None:
    """Kills this rank: its process, or its thread, which then raises `Killed`."""
    if isinstance(transport := current_context().whole, LocalTransport):
        transport.die()
        raise Killed
    os.kill(os.getpid(), signal.SIGKILL)


class RankError(Exception):
    """Some ranks failed or hung. The message contains the traceback or stack of each."""


def run_threads(
    function: Callable[..., Any],
    ranks: int,
    *arguments: object,
    deadline: float = 360.0,
    timeout: float = 90.0,
    device: str = "cpu",
    tensor: int = 1,
    data: int = 1,
    context: int = 1,
    context_attention: str = "gather",
    experts: int = 1,
    tensor_mode: str = "1d",
    tensor_depth: int = 1,
    elastic: bool = False,
) -> list[Any]:
    """Calls `function(*arguments)` on every rank, with ranks as threads of this process over a LocalTransport. Returns
    the list of results by rank.

    Args:
        function: called on every rank; `current_context()` is that rank's context.
        ranks: size of the whole world.
        arguments: passed to the function.
        deadline: seconds after which ranks that still run count as hanging.
        timeout: the transport's timeout in seconds, as in `launch`.
        device: "cpu", or a GPU; on a GPU each rank computes on its own stream.
        tensor: number of tensor ranks; 1 on a GPU.
        data: number of replicas.
        context: number of context ranks; 1 on a GPU. The pipeline has the remaining ranks.
        context_attention, tensor_mode, tensor_depth: as in `launch`.
        experts: number of expert ranks, which divides `data`; 1 on a GPU.
        elastic: as in `launch`. The result of a rank that calls `die` is None.

    Raises RankError if a rank raised an error, or did not finish within the deadline, and UsageError for tensor,
    context or expert ranks on a GPU.
    """
    keep_device_guard()  # a fake tensor's would end with its thread in torch 2.11 for GPUs where there are none
    hub, place = Hub(ranks, elastic=elastic), torch.device(device)
    layout = _layout(ranks, tensor, data, context, experts, tensor_mode, tensor_depth)
    if tensor * context * experts > 1 and place.type not in _ON_THE_CALLERS_THREAD:
        kind = "tensor" if tensor > 1 else "context" if context > 1 else "expert"
        raise UsageError(
            f"{kind} ranks that are threads cannot share {place}: autograd runs the "
            "backwards of all threads on one thread per device, where the first collective would wait for ever; use "
            "run_processes, or device='cpu'"
        )
    results: list[Any] = [None] * ranks
    errors: dict[int, str] = {}
    contexts: dict[int, Context] = {}

    def run(rank: int) -> None:
        transport = LocalTransport(hub, rank, device=place, timeout=timeout)
        contexts[rank] = own = Context(rank, layout, place, transport, context_attention, elastic=elastic)
        set_context(own)
        if place.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(place))
        try:
            results[rank] = function(*arguments)
        except Killed:
            pass
        except BaseException as error:
            errors[rank] = traceback.format_exc()
            transport.report(Failure(rank, f"its thread ended: {error!r}"))
        finally:
            own.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            errors[rank] = "hangs:\n" + "".join(traceback.format_stack(frame))
            if rank in contexts:  # the thread cannot be ended; the ranks of the next call must not meet its context
                contexts[rank].close()
    _raise_errors(errors, deadline)
    return results


def _layout(
    ranks: int, tensor: int, data: int, context: int, experts: int, tensor_mode: str, tensor_depth: int
) -> WorldLayout:
    grid: dict[str, Any] = {"tensor_mode": tensor_mode, "tensor_depth": tensor_depth}
    return WorldLayout.of(ranks, ranks // (tensor * data * context), tensor, context, experts, **grid)


def run_processes(
    function: Callable[..., Any],
    ranks: int,
    *arguments: object,
    deadline: float = 360.0,
    timeout: float = 90.0,
    may_die: Sequence[int] = (),
    tensor: int = 1,
    data: int = 1,
    context: int = 1,
    context_attention: str = "gather",
    experts: int = 1,
    tensor_mode: str = "1d",
    tensor_depth: int = 1,
    elastic: bool = False,
) -> list[Any]:
    """Calls `function(*arguments)` on every rank, with ranks as processes that have called `launch`. Returns the list
    of results by rank.

    Args:
        function, ranks, arguments: as in `run_threads`; function, arguments and results must be picklable.
        tensor, data, context, context_attention, experts, tensor_mode, tensor_depth, elastic: as in `run_threads`.
        deadline: seconds after which ranks that still run are ended.
        timeout: as in `launch`, in seconds.
        may_die: ranks that may be killed by the test; their result is then None.

    Raises RankError if a rank raised an error or died, or did not finish within the deadline.
    """
    start: Any = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(PRELOADED)
    port, layout = free_port(), _layout(ranks, tensor, data, context, experts, tensor_mode, tensor_depth)
    together = start.Barrier(ranks)  # all processes start before `timeout` begins to count
    with tempfile.TemporaryDirectory() as folder:
        connections: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            here, there = start.Pipe(duplex=False)
            place = (rank, layout, context_attention, port, timeout, str(Path(folder, f"{rank}.stack")), elastic)
            process = start.Process(target=_run_rank, args=(there, together, place, function, arguments), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        try:
            results = _collect(connections, processes, deadline, may_die, Path(folder))
            _require_ended(processes, Path(folder))
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_rank(
    connection: Connection,
    together: Any,
    place: tuple[int, WorldLayout, str, int, float, str, bool],
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    rank, layout, attention, port, timeout, stack, elastic = place
    faulthandler.register(signal.SIGUSR1, file=Path(stack).open("w", encoding="utf-8"), all_threads=True)  # noqa: SIM115  # open until the end
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        together.wait()
        launch(
            layout.pipeline,
            layout.tensor * layout.depth,
            context=layout.context,
            context_attention=attention,
            experts=layout.experts,
            tensor_mode=layout.tensor_mode,
            tensor_depth=layout.depth,
            elastic=elastic,
            timeout=timeout,
        )
        _send(connection, (True, function(*arguments)))
    except BaseException:
        _send(connection, (False, traceback.format_exc()))
    finally:
        atexit._run_exitfuncs()  # a multiprocessing child does not run them at exit


def _send(connection: Connection, result: tuple[bool, Any]) -> None:
    """Sends a result with the values of its tensors: shared memory would be gone if this process ended too early."""
    connection.send_bytes(pickle.dumps(result))


def _collect(
    connections: list[Connection], processes: list[BaseProcess], deadline: float, may_die: Sequence[int], folder: Path
) -> list[Any]:
    end = time.monotonic() + deadline
    results: list[Any] = [None] * len(connections)
    errors: dict[int, str] = {}
    for rank, connection in enumerate(connections):
        try:
            if not connection.poll(max(0.0, end - time.monotonic())):
                errors[rank] = f"hangs:\n{_stack(processes[rank], folder / f'{rank}.stack')}"
                continue
            succeeded, result = pickle.loads(connection.recv_bytes())
            if succeeded:
                results[rank] = result
            else:
                errors[rank] = result
        except EOFError:
            processes[rank].join(5.0)
            if rank not in may_die:
                errors[rank] = f"died with exit code {processes[rank].exitcode}"
    _raise_errors(errors, deadline)
    return results


def _require_ended(processes: list[BaseProcess], folder: Path) -> None:
    """Raises RankError unless every process ends by itself after its function has returned."""
    errors: dict[int, str] = {}
    for rank, process in enumerate(processes):
        process.join(_GRACE)
        if process.is_alive():
            errors[rank] = f"returned but does not end:\n{_stack(process, folder / f'{rank}.stack')}"
    _raise_errors(errors, _GRACE)


def _stack(process: BaseProcess, file: Path) -> str:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    return file.read_text(encoding="utf-8") if file.exists() else "no stack"


def _raise_errors(errors: dict[int, str], deadline: float) -> None:
    if errors:
        listed = "\n".join(f"--- rank {rank} {text}" for rank, text in sorted(errors.items()))
        raise RankError(f"{len(errors)} ranks failed within the deadline of {deadline} s\n{listed}")


def free_port() -> int:
    """Returns a TCP port that is free on this machine. It is below 32768: systems take the ports of outgoing
    connections from above, so none of them takes it before it is used.
    """
    ports = list(range(20000, 32768))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UsageError("all ports of 127.0.0.1 from 20000 to 32767 are taken: end programs that listen there")
