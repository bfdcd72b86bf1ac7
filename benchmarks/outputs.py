"""Files that benchmarks write: it is found out first whether they can be, and none is left half written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure


def check_output(path: Path | None) -> Path | None:
    """Find out now, not after the measurements, that `path` cannot be written."""
    if path:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            path.open("a").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def check_plot(path: Path | None) -> Path | None:
    formats = FigureCanvasBase.get_supported_filetypes()
    if path and path.suffix[1:].lower() not in formats:
        raise typer.BadParameter(f"{path} must end in one of .{', .'.join(formats)}")
    return check_output(path)


def json_option() -> Any:
    """`--json OUT`."""
    return typer.Option("--json", metavar="OUT", callback=check_output, help="Where to write all figures.")


def plot_option(text: str) -> Any:
    """`--plot OUT`."""
    return typer.Option(metavar="OUT", callback=check_plot, help=text)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """What to write to in the place of `path`, which then holds all of it, or what it held before."""
    if path.exists() and not path.is_file():  # say a pipe
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path | None, figures: Any, **options: Any) -> None:
    """Write figures, with options of `json.dumps`, if there is a path to write them to."""
    if path:
        with whole(path) as part:
            part.write_text(json.dumps(figures, **options))


def save_plot(path: Path, figure: Figure) -> None:
    with whole(path) as part:
        figure.savefig(part, dpi=120)
