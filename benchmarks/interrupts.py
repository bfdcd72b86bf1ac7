"""How a benchmark ends on Ctrl-C: with one line and status 130, also while it still imports what it needs.

To be imported before all else.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import TracebackType


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def start(main: Callable[..., None]) -> None:
    """typer.run, which ends with status 130 on Ctrl-C, but says nothing."""
    import typer

    try:
        typer.run(main)
    except SystemExit as end:
        if end.code == 130:
            print("Interrupted.", file=sys.stderr)
        raise


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, interrupt)
sys.excepthook = say
