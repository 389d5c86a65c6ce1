"""Aside: runs a call that may block in C++, where nothing can interrupt it, on a thread that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T], name: str) -> Future[T]:
    """Calls `function` on a new thread called `name` and returns a future of its result or exception.

    A caller that no longer needs the result drops the future. The thread is a daemon, so it does not keep the process
    alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
