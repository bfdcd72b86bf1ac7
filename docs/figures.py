"""Draws the pictures of how_it_works.md, those of a step from real ones: `python docs/figures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from horovod_sparse.core import A2SGD, FlatLayout, MiCRO, owned_partition, virtual

FOLDER = Path(__file__).parent
RANK_COLOURS = ["#0072b2", "#e08a00", "#009e73", "#9a5fb8"]
INK, MUTED, PALE = "#263238", "#78909c", "#cfd8dc"
STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.hashsalt": "horovod_sparse",  # the same file in each run
}


def micro_step() -> Figure:
    """The fourth step of MiCRO on 3 ranks, 24 elements: accumulate, select, exchange, hold back."""
    ranks, d, density = 3, 24, 0.25
    rng = np.random.default_rng(4)
    layout = FlatLayout.flat(d)
    steps = rng.normal(size=(4, ranks, d)).astype(np.float32)
    algorithms = [MiCRO(layout, density) for _ in range(ranks)]
    for gradients in steps:
        held = [a.residual.vector.arrays[0].copy() if a.residual.vector else np.zeros(d) for a in algorithms]
        t = algorithms[0].t
        arguments = enumerate(zip(algorithms, gradients, strict=True))
        updates, _ = virtual.run([a.step([g.copy()], rank, ranks) for rank, (a, g) in arguments])
    gradients, (update, *_) = steps[-1], updates
    left = [a.residual.vector.arrays[0] for a in algorithms]
    selected = np.asarray(update.indices)

    figure = Figure(figsize=(10, 7.6))
    grid = figure.add_gridspec(4, 3, left=0.075, right=0.985, top=0.875, bottom=0.045, wspace=0.06, hspace=0.3)
    place = np.arange(d)
    top = max(abs(h + g).max() for h, g in zip(held, gradients, strict=True)) * 1.35
    titles = [
        "1  Accumulate:\nresidual + gradient",
        "2  In one's own partition, select\nwhat reaches the dashed threshold",
        "4  Hold back the rest:\nthe new residual",
    ]

    def owned_by(rank: int) -> tuple[int, int]:
        owned = owned_partition(d, ranks, rank, t)
        return owned.start, owned.stop

    for rank in range(ranks):
        colour = RANK_COLOURS[rank]
        start, stop = owned_by(rank)
        mine = [i for i in selected if start <= i < stop]
        axes = [figure.add_subplot(grid[rank, column]) for column in range(3)]
        for axis, title in zip(axes, titles, strict=True):
            bare(axis, d, top)
            if rank == 0:
                axis.set_title(title, loc="left", fontsize=11, pad=10, fontweight="bold")
        axes[0].set_ylabel(f"rank {rank}", color=colour, fontweight="bold", rotation=0, ha="right", va="center")
        acc = held[rank] + gradients[rank]
        axes[0].bar(place - 0.2, held[rank], 0.4, color=MUTED, label="residual")
        axes[0].bar(place + 0.2, gradients[rank], 0.4, color=colour, label="gradient")
        axes[0].legend(loc="upper right", ncols=2, fontsize=9, frameon=False, borderpad=0, handlelength=1)
        axes[1].axvspan(start - 0.5, stop - 0.5, color=colour, alpha=0.13, lw=0)
        axes[1].bar(place, acc, 0.7, color=[colour if i in mine else PALE for i in place])
        for sign in (-1, 1):
            axes[1].plot([start - 0.5, stop - 0.5], [sign * update.threshold] * 2, "--", color=INK, lw=1)
        for i in mine:
            label(axes[1], i, acc[i], top * 0.05, colour)
        axes[2].bar(place, left[rank], 0.7, color=[PALE] * d)
        axes[2].plot(selected, np.zeros(len(selected)), "o", ms=5, color=INK, label="sent: 0 now")
        axes[2].legend(loc="upper right", fontsize=9, frameon=False, borderpad=0, handletextpad=0.2)

    text = figure.add_subplot(grid[3, 0])
    text.axis("off")
    text.text(0, 0.9, "3  Exchange", fontsize=12, fontweight="bold", va="top")
    text.text(
        0,
        0.66,
        "Allgather: at which indices.\nAllreduce: all ranks' values there.\nTheir mean is the update, "
        "the same on\nall ranks, and 0 elsewhere.",
        va="top",
        fontsize=10.5,
        linespacing=1.4,
    )
    axis = figure.add_subplot(grid[3, 1])
    mean = update.gradient[0]
    bare(axis, d, abs(mean).max() * 1.9)
    owners = [next(rank for rank in range(ranks) if i in range(*owned_by(rank))) for i in place]
    axis.bar(place, mean, 0.7, color=[RANK_COLOURS[rank] for rank in owners])
    for i in selected:
        label(axis, i, mean[i], abs(mean).max() * 0.1, RANK_COLOURS[owners[i]])
    headline(figure, f"One step of MiCRO: {ranks} ranks, {d} elements, {len(selected)} of them sent", y=0.985)
    return figure


def micro_rotation() -> Figure:
    """Which rank selects where, step by step."""
    ranks, d = 4, 4
    figure = Figure(figsize=(10, 3.1))
    axis = figure.add_axes((0.06, 0.03, 0.5, 0.76))
    for t in range(5):
        for rank in range(ranks):
            owned = owned_partition(d, ranks, rank, t)
            axis.barh(t, 0.96, left=owned.start + 0.02, height=0.82, color=RANK_COLOURS[rank], alpha=0.9)
            axis.text(owned.start + 0.5, t, f"rank {rank}", color="white", ha="center", va="center", fontweight="bold")
    axis.set(xlim=(0, d), ylim=(4.6, -0.5), yticks=range(5), yticklabels=[f"step {t}" for t in range(5)])
    axis.set_xticks(np.arange(d) + 0.5, [f"partition {i}" for i in range(d)])
    axis.tick_params(length=0, top=False, labeltop=True, labelbottom=False, labelcolor=INK)
    axis.spines[:].set_visible(False)
    notes = [
        (
            "In a step, each element has one owner:",
            "none is selected twice, and what the ranks\nselect together does not grow with their number.",
        ),
        ("In n steps, each rank owns each partition once:", "what is large on one rank alone is sent, too."),
    ]
    for y, (head, text) in zip((0.72, 0.33), notes, strict=True):
        figure.text(0.585, y, head, fontweight="bold", va="top")
        figure.text(0.585, y - 0.1, text, va="top", linespacing=1.4)
    headline(figure, "In step t, rank i owns partition (i + t) mod n of the flat gradient", y=0.97)
    return figure


def a2sgd_step() -> Figure:
    """A step of A2SGD on 2 ranks, 12 elements; and how replicas drift and are averaged."""
    ranks, d = 2, 12
    rng = np.random.default_rng(11)
    common = np.array([0.5, 1.2, -0.9, 0.8, -1.4, 0.3, -0.4, 1.6, -1.1, -0.3, 0.7, -0.6])
    gradients = (common * [[0.7], [1.4]] + rng.normal(0, 0.15, (ranks, d))).astype(np.float32)
    updates, _ = virtual.run([A2SGD(FlatLayout.flat(d)).step([g.copy()], i, ranks) for i, g in enumerate(gradients)])
    applied = [update.gradient[0] for update in updates]
    means = np.array([[g[g >= 0].mean(), g[g < 0].mean()] for g in gradients])
    mean = means.mean(axis=0)

    figure = Figure(figsize=(10, 6.4))
    grid = figure.add_gridspec(
        3, 2, left=0.095, right=0.935, top=0.845, bottom=0.075, wspace=0.4, hspace=0.34, height_ratios=[1, 1, 1.05]
    )
    top = max(abs(gradients).max(), max(abs(a).max() for a in applied)) * 1.2
    titles = [
        "1  Two numbers: the means of one's own\ngradients that are ≥ 0, and of the others",
        "3  Apply one's own gradient, shifted\nto the global means",
    ]
    for rank in range(ranks):
        colour = RANK_COLOURS[rank]
        for column, (values, levels, style) in enumerate(
            [(gradients[rank], means[rank], colour), (applied[rank], mean, INK)]
        ):
            axis = figure.add_subplot(grid[rank, column])
            bare(axis, d, top)
            axis.bar(np.arange(d), values, 0.7, color=colour, alpha=0.45)
            for level in levels:
                axis.plot([-0.5, d - 0.5], [level, level], "--", color=style, lw=1.6)
                axis.text(d - 0.4, level, f" {level:+.2f}", color=style, va="center", fontweight="bold", clip_on=False)
            if rank == 0:
                axis.set_title(titles[column], loc="left", fontsize=12, pad=10, fontweight="bold")
            if column == 0:
                axis.set_ylabel(f"rank {rank}", color=colour, fontweight="bold", rotation=0, ha="right", va="center")
    figure.text(0.53, 0.66, "2  Average\nthe two:", ha="center", va="center", fontsize=12, fontweight="bold")
    figure.text(0.53, 0.615, f"{mean[0]:+.2f}\n{mean[1]:+.2f}", ha="center", va="top", fontweight="bold")
    arrow(figure, (0.507, 0.53), (0.557, 0.53))

    axis = figure.add_subplot(grid[2, :])
    drifting = np.zeros((ranks, 61))
    for t in range(60):
        drifting[:, t + 1] = drifting[:, t] - 0.012 + rng.normal(0, 0.025, ranks)
        if (t + 1) % 20 == 0:
            axis.axvline(t + 1, color=MUTED, lw=1, ls=":")
            drifting[:, t + 1] = drifting[:, t + 1].mean()
    for rank in range(ranks):
        axis.plot(drifting[rank], color=RANK_COLOURS[rank], lw=2, label=f"rank {rank}")
    axis.set(xlim=(0, 60), yticks=[], xticks=[0, 20, 40, 60])
    axis.set_xticklabels(["0", "sync_every", "2 sync_every", "3 sync_every steps"])
    axis.get_xticklabels()[-1].set_ha("right")
    axis.set_ylabel("one\nparameter", rotation=0, ha="right", va="center", fontsize=10)
    axis.legend(loc="upper right", frameon=False, ncols=2, borderpad=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        "4  So the replicas drift apart, a little, until their parameters are averaged (a sketch)",
        loc="left",
        fontsize=12,
        fontweight="bold",
    )
    headline(figure, "One step of A2SGD: 2 ranks, 12 elements, two numbers sent", y=0.985)
    return figure


def timeline() -> Figure:
    """A step inside Horovod's optimizer for PyTorch, on two ranks whose gradients come in another order."""
    figure = Figure(figsize=(10, 5.6))
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set(xlim=(0, 120), ylim=(0, 59))
    axis.axis("off")
    start, first_round, step_begins, exchange, end = 13, 55, 66, 71, 118
    axis.text(1, 56.9, "A step inside Horovod's optimizer (PyTorch)", fontsize=14, fontweight="bold", va="center")
    for left, right, text in [
        (start, 54, "loss.backward()"),
        (54.6, step_begins - 0.6, "your code"),
        (step_begins, end, "optimizer.step(), which begins with synchronize()"),
    ]:
        axis.plot([left, right], [50.6, 50.6], color=INK, lw=1.4)
        for x in (left, right):
            axis.plot([x, x], [49.9, 51.3], color=INK, lw=1.4)
        axis.text((left + right) / 2, 52.6, text, ha="center", va="center", fontweight="bold")

    orders = [["layer 3", "layer 2", "layer 1"], ["layer 3", "layer 1", "layer 2"]]
    widths = [[11, 13, 12], [12, 14, 13]]
    for rank, base in enumerate((38, 8)):
        colour = RANK_COLOURS[rank]
        axis.text(1, base + 2.5, f"rank {rank}", color=colour, fontweight="bold", va="center")
        x = float(start)
        for name, width in zip(orders[rank], widths[rank], strict=True):
            box(axis, x, base, width - 0.6, 5, name, colour)
            x += width
            token_down(axis, x - 0.8, base, 1 if rank else -1)
        box(axis, exchange + 15.2, base, 8.6, 5, "write", colour)
        axis.text(
            exchange + 19.5,
            base + (-2 if rank else 7),
            "the update into the\ngradients' memory",
            ha="center",
            fontsize=9,
            va="top" if rank else "bottom",
            color=INK,
        )
        box(axis, exchange + 26, base, 19.8, 5, "SGD, Adam, ...", PALE, INK)
        axis.text(
            start + 1,
            base + (-1.3 if rank else 6.2),
            "compress(gradient): notes it, returns a token, never waits",
            fontsize=9,
            va="top" if rank else "bottom",
            color=INK,
        )

    # Between the ranks
    panel = FancyBboxPatch((0.6, 19.6), 118.4, 11.8, boxstyle="round,pad=0,rounding_size=0.8", fc="#eceff1", zorder=0)
    panel.set_edgecolor("none")
    axis.add_patch(panel)
    axis.text(1.6, 25.5, "Horovod's\nnetwork", va="center", fontweight="bold", fontsize=10)
    box(
        axis,
        start + 8,
        21,
        32.4,
        9,
        "Horovod allreduces the tokens,\none number each, in any order",
        "#90a4ae",
        INK,
        9.5,
    )
    box(axis, first_round, 21, 10.6, 9, "first round:\nflags, counts,\nfingerprint", "#455a64", fontsize=8.5)
    box(axis, exchange, 21, 7, 9, "indices:\nallgather", "#455a64", fontsize=8.5)
    box(axis, exchange + 7.6, 21, 7, 9, "values:\nallreduce", "#455a64", fontsize=8.5)
    for rank, (y, edge) in enumerate(((38, 30.2), (13, 20.8))):
        arrow(axis, (first_round - 0.6, y), (first_round + 2.6, edge), RANK_COLOURS[rank])
        arrow(axis, (exchange + 13.4, edge), (exchange + 17, y), RANK_COLOURS[rank])
    axis.text(
        exchange + 18.5,
        25.5,
        "The first decompress() runs the\nexchange for the whole model.",
        va="center",
        fontsize=10,
    )
    axis.text(first_round + 0.6, 41, "started asynchronously,\nbefore step()", fontsize=9, va="center", ha="left")
    return figure


def bare(axis: Axes, d: int, top: float) -> None:
    """An axis for bars: a line at 0, and nothing else."""
    axis.set(xlim=(-0.7, d - 0.3), ylim=(-top, top), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.axhline(0, color=MUTED, lw=0.8, zorder=0.5)


def headline(figure: Figure, text: str, y: float) -> None:
    """What the whole figure shows, at its top left."""
    figure.suptitle(text, x=0.008, y=y, ha="left", fontsize=14, fontweight="bold")


def label(axis: Axes, i: int, value: float, gap: float, colour: str) -> None:
    """The number of an element, at the end of its bar."""
    side = np.sign(value)
    at = value + side * gap
    axis.text(
        i, at, str(i), ha="center", va="bottom" if side > 0 else "top", color=colour, fontsize=9, fontweight="bold"
    )


def box(
    axis: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    colour: str,
    ink: str = "white",
    fontsize: float = 10,
) -> None:
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.6", fc=colour, ec="none")
    )
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=fontsize)


def token_down(axis: Axes, x: float, base: float, direction: int) -> None:
    """A token on its way from a rank to the network."""
    begin, end = (base + 5.2, 20.8) if direction > 0 else (base - 0.2, 30.2)
    arrow(axis, (x, begin), (x, end), MUTED)


def arrow(where: Axes | Figure, begin: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    patch = FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=13, lw=1.5, color=colour, shrinkA=0, shrinkB=0)
    if isinstance(where, Figure):
        patch.set_transform(where.transFigure)
        where.patches.append(patch)
    else:
        where.add_patch(patch)


def main() -> None:
    with matplotlib.rc_context(STYLE):
        for draw in (micro_step, micro_rotation, a2sgd_step, timeline):
            figure = draw()
            FigureCanvasBase(figure)
            figure.savefig(FOLDER / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
