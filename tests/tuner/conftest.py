"""The command line, called in this process or started in another."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.tuner.cli import main

CommandLine = Callable[[str], tuple[int, str, str]]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that does not outlive a failed test."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    """Runs the words after `paceline`; gives the exit status, stdout and stderr."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def call(command: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    yield call
    for each, handler in handlers.items():
        signal.signal(each, handler)
