"""Errors of commands: one readable message and an exit code.

0 done, 1 unexpected, 2 bad settings or missing files, 3 the run diverged, 4 the run folder cannot be used (locked, disk
full or damaged), 5 too few clients of a deployment are connected or answer, 130 and 143 stopped by SIGINT and SIGTERM
after the round in progress was saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

UNEXPECTED, BAD_SETTINGS, DIVERGED, BAD_FOLDER, TOO_FEW_CLIENTS, INTERRUPTED = 1, 2, 3, 4, 5, 130


def guarded(work: Callable[[], int], debug: bool) -> NoReturn:
    """Run a command and exit with its code; with `debug` errors keep their traceback."""
    try:
        code = work()
    except KeyboardInterrupt:
        code = fail("stopped; whatever rounds were finished can be resumed", INTERRUPTED)
    except Exception as problem:
        if debug:
            raise
        code = fail(*explained(problem))
    sys.exit(code)


def explained(problem: Exception) -> tuple[str, int]:
    """A message and an exit code for what went wrong."""
    from consilience.core.settings import Invalid

    if isinstance(problem, (Invalid, FileNotFoundError, ImportError)):
        return str(problem), BAD_SETTINGS
    from consilience.core.rounds import Diverged, TooFewClients
    from consilience.runs.checkpoint import CheckpointError
    from consilience.runs.lock import RunLocked
    from consilience.runs.row_log import RecordError

    if isinstance(problem, Diverged):
        return f"{problem}\nThe last good checkpoint is intact.", DIVERGED
    if isinstance(problem, TooFewClients):
        return str(problem), TOO_FEW_CLIENTS
    if isinstance(problem, (CheckpointError, RecordError, RunLocked, OSError)):
        return str(problem), BAD_FOLDER
    if type(problem).__name__ == "OutOfMemoryError":
        return "the device ran out of memory: lower engine.clients_at_once or algorithm.batch_size", UNEXPECTED
    return f"{type(problem).__name__}: {problem}\n(--debug shows where)", UNEXPECTED


def fail(message: str, code: int) -> int:
    """Print the message on the error stream."""
    printable = "\n".join(
        "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in message.split("\n")
    )
    print(f"error: {printable[:8000]}", file=sys.stderr)
    return code
