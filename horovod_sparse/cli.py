"""The command line: `horovod-sparse doctor`, `horovod-sparse advise`, `horovod-sparse report`.

Each command imports what it needs when it runs: the doctor has to run where nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

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


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, for scripts and bug reports.")
    ] = False,
) -> None:
    """Say what is installed, whether it fits together, and what to do if it does not: then, the status is 1."""
    import json

    from rich.console import Console

    from horovod_sparse.doctor import PROBLEM, examine, make_table, summary

    with Console(stderr=True).status("trying the frameworks, each in a process of its own ..."):
        findings = examine()
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        console = Console(highlight=False)
        console.print(make_table(findings))
        console.print(summary(findings))
    if any(finding.level == PROBLEM for finding in findings):
        raise typer.Exit(1)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def advise(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT [ARGUMENT]...]", help="Your training script, which is stopped after a few steps."
        ),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="In the place of a script: how many parameters the model has, such as 25e6.")
    ] = None,
    compute_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="With --parameters: milliseconds of a step without any exchange.")
    ] = 0.0,
    framework: Annotated[
        str | None, typer.Option(help="torch or tensorflow. Default: what the script imports, or what there is.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to rehearse steps, about.")] = 30.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Where to write all figures.")] = None,
) -> None:
    """Say whether compression pays here, and which setting: horovodrun -np 4 horovod-sparse advise train.py"""
    from horovod_sparse.advisor import command

    try:
        command.run(script or [], parameters, compute_ms / 1000, framework, seconds, json_file)
    except command.CannotAdvise as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def report(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Files that monitor.JSONLines has written.")],
    plot: Annotated[
        Path, typer.Option(help="Where to plot the figures: a name that ends in .png, .pdf or .svg.")
    ] = Path("report.png"),
) -> None:
    """Show and plot what the logs of some runs say."""
    from rich.console import Console

    try:
        from horovod_sparse.report import LogError, make_plots, make_table, read
    except ImportError as error:
        fail(f"{error}. pip install 'horovod_sparse[report]'")
    try:
        read_logs = [read(path) for path in logs]
    except LogError as error:
        fail(str(error))
    try:
        if not plot.suffix:
            raise ValueError("the name must end in .png, .pdf or .svg")
        make_plots(read_logs).savefig(plot, dpi=120)
    except (OSError, ValueError) as error:
        fail(f"--plot {plot}: {error}")
    console = Console()
    console.print(make_table(read_logs))
    console.print("Means over the steps that were not skipped; times are medians. Saved: of dense training's bytes.")
    console.print(f"plots: {plot}", markup=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """End with one line that says why."""
    typer.echo(f"horovod-sparse: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="horovod-sparse")
