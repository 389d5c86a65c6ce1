"""Aside: a call that may block in C++, where nothing interrupts it, on a thread that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T], name: str) -> Future[T]:
    """Calls `function` on a thread of that name; the future has what it returns or raises. Whoever no longer wants
    that just drops the future: the thread is a daemon, so it does not keep the process from ending.
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
