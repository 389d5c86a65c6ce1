"""Who speaks, and which file keeps it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.logging import RichHandler

from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import disable_existing_loggers, get_dist_logger

NAME = "pipeflow.tests"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    logger = logging.getLogger(NAME)
    for handler in list(logger.handlers):
        handler.close()
        logger.removeHandler(handler)
    logger.propagate = True


def speak(folder: Path) -> None:
    logger, rank = get_dist_logger(NAME), current_context().rank
    logger.log_to_file(folder)
    logger.info(f"all, {rank}")
    logger.warning("some", ranks=[1, 2])
    logger.debug("nobody")
    logger.set_level("ERROR")
    logger.info("nor this", ranks=[rank])


def test_each_rank_keeps_what_it_says(tmp_path: Path) -> None:
    get_dist_logger(NAME).logger.handlers[:] = [logging.NullHandler()]
    for rank in range(3):  # one after the other: threads share the level
        logging.getLogger(NAME).setLevel(logging.INFO)
        run_threads(speak_as, 3, rank, tmp_path / "logs")
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == [f"rank_{rank}.log" for rank in range(3)]
    for rank in range(3):
        lines = (tmp_path / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8").splitlines()
        said = [line.partition(f" {NAME}: ")[2] for line in lines]
        assert said == [f"all, {rank}", *(["some"] if rank in (1, 2) else [])]


def speak_as(rank: int, folder: Path) -> None:
    if current_context().rank == rank:
        speak(folder)


def test_the_terminal_hears_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_dist_logger(NAME)
    assert get_dist_logger(NAME).logger is logger.logger
    [handler] = logger.logger.handlers
    assert isinstance(handler, RichHandler)
    logger.info("50% [done]")
    logger.info("not here", ranks=[5])
    printed = capsys.readouterr().out
    assert printed.count("50% [done]") == 1
    assert "not here" not in printed


def test_other_loggers_fall_silent() -> None:
    others = [logging.getLogger(name) for name in ("tests.one", "tests.two", NAME, "pipeflowing")]
    for other in others:
        other.setLevel(logging.INFO)
    disable_existing_loggers(include=["tests.one"])
    assert [other.level for other in others] == [logging.WARNING, *[logging.INFO] * 3]
    disable_existing_loggers(exclude=["pipeflow", "tests.two"])
    assert [other.level for other in others] == [logging.WARNING, logging.INFO, logging.INFO, logging.WARNING]
