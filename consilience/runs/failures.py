"""Errors of commands: one readable message and an exit code.

0 done, 1 unexpected, 2 bad settings or missing files, 3 the run diverged, 4 the run folder cannot be used (locked, disk
full or damaged) or another file cannot be read or written, 5 too few clients of a deployment are connected or answer,
130 and 143 stopped by SIGINT and SIGTERM after the round in progress was saved, 141 whoever read the output closed it.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

import typer

UNEXPECTED, BAD_SETTINGS, DIVERGED, BAD_FOLDER, TOO_FEW_CLIENTS, INTERRUPTED, PIPE_CLOSED = 1, 2, 3, 4, 5, 130, 141


def guarded(work: Callable[[], int], debug: bool) -> NoReturn:
    """Run a command and exit with its code; with `debug` errors keep their traceback."""
    try:
        code = work()
    except (KeyboardInterrupt, typer.Abort) as stop:  # the latter at a question
        asked = isinstance(stop, typer.Abort)
        print(end="\n" if asked else "", file=sys.stderr)
        said = "stopped; nothing was written" if asked else "stopped; finished rounds, if there are any, can be resumed"
        code = fail(said, INTERRUPTED)
    except Exception as problem:
        if isinstance(problem, BrokenPipeError) and _nobody_reads():
            sys.exit(PIPE_CLOSED)
        if debug:
            raise
        code = fail(*explained(problem))
    sys.exit(code)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that was closed, as by `head`; it is then replaced, so that Python can exit."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
        closed = any(event & select.POLLERR for _, event in watched.poll(0))
    except (AttributeError, OSError):  # Windows has no such call, and what replaces standard output perhaps no file
        return False
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def explained(problem: Exception) -> tuple[str, int]:
    """A message and an exit code for what went wrong."""
    from consilience.core.settings import Invalid

    if isinstance(problem, (Invalid, FileNotFoundError, ImportError)) and getattr(problem, "errno", None) is None:
        return str(problem), BAD_SETTINGS
    from consilience.core.rounds import Diverged, TooFewClients
    from consilience.runs.checkpoint import CheckpointError
    from consilience.runs.lock import RunLocked
    from consilience.runs.row_log import RecordError

    if isinstance(problem, Diverged):
        return f"{problem}\nThe last good checkpoint is intact.", DIVERGED
    if isinstance(problem, TooFewClients):
        return str(problem), TOO_FEW_CLIENTS
    if type(problem) in (OSError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError):
        return _of_the_system(problem), BAD_FOLDER
    if isinstance(problem, (CheckpointError, RecordError, RunLocked, OSError)):
        return str(problem), BAD_FOLDER
    if type(problem).__name__ == "SafetensorError":
        return f"a .safetensors file cannot be read or written: {problem}", BAD_FOLDER
    if type(problem).__name__ == "OutOfMemoryError":
        return "the device ran out of memory: lower engine.clients_at_once or algorithm.batch_size", UNEXPECTED
    return f"{type(problem).__name__}: {problem}\n(--debug shows where)", UNEXPECTED


def _of_the_system(problem: Exception) -> str:
    """The file and the reason, instead of a number and the temporary name under which the file was being written."""
    file, reason = getattr(problem, "filename", None), getattr(problem, "strerror", None)
    if file is None or reason is None:
        return str(problem)
    path = Path(os.fsdecode(file))
    name = re.sub(r"^\.(.+)\.tmp-\d+$", r"\1", path.name)
    return f"{path.with_name(name)} cannot be read or written: {reason}"


def fail(message: str, code: int) -> int:
    """Print the message on the error stream."""
    printable = "\n".join(
        "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in message.split("\n")
    )
    print(fitted(f"error: {printable[:8000]}", sys.stderr), file=sys.stderr)
    return code


def fitted(text: str, stream: TextIO) -> str:
    """The text as it is or, for a terminal, broken between words, which a terminal does not do."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else line
        for line in text.split("\n")
    )
