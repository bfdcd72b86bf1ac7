"""The command line: `horovod-sparse doctor`, `horovod-sparse advise`, `horovod-sparse report`.

Each command imports what it needs when it runs: the doctor has to run where nothing else does.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Gradient compression for Horovod: is it set up, does it pay here, and what is it doing?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """One command for each question."""


if __name__ == "__main__":
    app(prog_name="horovod-sparse")
