"""The command line: `horovod-sparse doctor`, `horovod-sparse advise`, `horovod-sparse report`.

Each command imports what it needs when it runs: the doctor has to run where nothing else does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import __version__

app = typer.Typer(
    help="Gradient compression for Horovod: is it set up, does it pay here, and what is it doing?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(f"horovod-sparse {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """One command for each question."""


if __name__ == "__main__":
    app(prog_name="horovod-sparse")
