"""What a compressor does on a rank in a step, apart from communication: how many copies of the gradient does it cost?

    python benchmarks/kernels.py                       # the table at 25.6 million elements, then how it scales
    python benchmarks/kernels.py --reduced
    python benchmarks/kernels.py --device cuda
    python benchmarks/kernels.py --help

The unit is one `copy_` of the gradient by torch, with the same number of threads, measured in turn with the rest. One
rank takes real steps of the core on normal gradients; what the other ranks would send it is made up, in the same
amounts, outside of the time measured. Takes about 5 minutes and 3 GB.
"""

from __future__ import annotations

import interrupts

# isort: split
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import NormalDist, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from outputs import json_option, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

from horovod_sparse.core import A2SGD, QSGD, Allgather, FlatLayout, MiCRO, Partition, TensorSpec, TopK, owned_partition
from horovod_sparse.core.indices import code_dtype, decode, encode
from horovod_sparse.core.kernels import host, kernels_for

NUMEL = 25_600_000
TENSORS = 46
RANKS = 4
DENSITY = 0.01
WARM_UP = 4  # the threshold finds its place, and loops are compiled

host.thread_count = torch.get_num_threads

METHODS: dict[str, Callable[[FlatLayout, float], Any]] = {
    "MiCRO": MiCRO,
    "A2SGD": lambda layout, density: A2SGD(layout),
    "top-k": TopK,
    "QSGD, 4 bits": lambda layout, density: QSGD(layout, 4),
}


class Case(NamedTuple):
    """What is measured."""

    method: str
    numel: int = NUMEL
    ranks: int = RANKS
    density: float = DENSITY
    threads: int = 1


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Rank:
    """Rank 0 of the case's, which takes steps with what the others would send."""

    def __init__(self, case: Case, device: str) -> None:
        bounds = np.linspace(0, case.numel, TENSORS + 1).astype(int).tolist()
        layout = FlatLayout(TensorSpec(f"{i:02}", (b - a,), "float32") for i, (a, b) in enumerate(pairwise(bounds)))
        self.algorithm = METHODS[case.method](layout, case.density)
        self._ranks, self._device = case.ranks, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._gradient = [self._array(torch.zeros(tensor.numel, device=device)) for tensor in layout.tensors]
        # What the others select falls anywhere with the same probability.
        gaps = np.random.default_rng(0).geometric(case.density, int(1.1 * case.density * case.numel) + 100)
        indices = np.cumsum(gaps) - 1
        self.selected = indices[indices < case.numel].astype(np.int32)

    def draw(self) -> None:
        """Make a gradient."""
        for array in self._gradient:
            torch.as_tensor(array).normal_(generator=self._generator)

    def step(self) -> float:
        """The seconds that a step takes on this rank alone."""
        self.draw()
        t = self.algorithm.t
        step = self.algorithm.step(self._gradient, 0, self._ranks, self._gradient)
        seconds, answer = 0.0, None
        while True:
            start = now(self._device)
            try:
                request = step.send(answer)
            except StopIteration as stop:
                seconds += now(self._device) - start
                self._gradient = stop.value.gradient
                return seconds
            seconds += now(self._device) - start
            answer = self._answer(request, t)

    def _answer(self, request: Any, t: int) -> Any:
        if not isinstance(request, Allgather):
            return request.array * self._ranks
        kernels = kernels_for(request.array)
        if not isinstance(self.algorithm, MiCRO):
            return kernels.join([request.array] * self._ranks)
        messages = [request.array]
        for rank in range(1, self._ranks):
            start, stop = owned_partition(self.algorithm.layout.numel, self._ranks, rank, t)
            first, last = np.searchsorted(self.selected, [start, stop])
            message = encode(self.selected[first:last], start, code_dtype(self.algorithm.density))
            messages.append(message if self._device == "cpu" else torch.from_numpy(message).to(self._device))
        return kernels.join(messages)

    def _array(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy() if self._device == "cpu" else tensor


def in_turn(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median seconds of each, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(WARM_UP + repeats):
        for name, run in runs.items():
            value = run()
            if i >= WARM_UP:
                seconds[name].append(value)
    return {name: median(values) for name, values in seconds.items()}


def timed(function: Callable[[], Any], device: str) -> Callable[[], float]:
    def run() -> float:
        start = now(device)
        function()
        return now(device) - start

    return run


def copy_of(numel: int, device: str) -> Callable[[], float]:
    source, target = (torch.ones(numel, device=device) for _ in range(2))
    return timed(lambda: target.copy_(source), device)


def measure_step(case: Case, device: str) -> dict[str, Any]:
    """Seconds of a step, and of a copy."""
    torch.set_num_threads(case.threads)
    repeats = 7 if case.numel >= 10**7 else 21
    rank = Rank(case, device)
    seconds = in_turn({"copy_": copy_of(case.numel, device), "step": rank.step}, repeats)
    return {**case._asdict(), **seconds}


def measure_selection(numel: int, threads: int, device: str) -> dict[str, Any]:
    """Seconds of a selection of the largest 1 % from a whole vector, by ours and by torch, and of a copy."""
    torch.set_num_threads(threads)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(numel, np.float32)).to(device)
    threshold = NormalDist().inv_cdf(1 - DENSITY / 2)
    vector: Any = host.FlatVector([x.numpy()]) if device == "cpu" else x
    kernels = kernels_for(vector)
    functions = {
        "ours": lambda: kernels.select(vector, Partition(0, numel), threshold, "int32"),
        "where": lambda: torch.where(x.abs() >= threshold),
        "topk": lambda: torch.topk(x.abs(), int(DENSITY * numel), sorted=False),
    }
    runs = {name: timed(function, device) for name, function in functions.items()}
    return {"numel": numel, "threads": threads} | in_turn({"copy_": copy_of(numel, device), **runs}, repeats=3)


def measure_coding(case: Case) -> dict[str, Any]:
    """Bytes of an index, what coding and decoding take on a rank, and what they save on a link of 10 Gbit/s.

    Without, an index has 4 bytes. A rank codes its own indices and decodes all; it sends its own to all others.
    """
    rank = Rank(case, "cpu")
    codes = code_dtype(case.density)
    starts = [owned_partition(case.numel, case.ranks, i, 0).start for i in range(case.ranks)]
    bounds = np.searchsorted(rank.selected, [*starts, case.numel])
    own = [rank.selected[a:b] for a, b in pairwise(bounds)]
    messages = [encode(indices, start, codes) for indices, start in zip(own, starts, strict=True)]
    joined = np.concatenate(messages)
    runs = {
        "encode": timed(lambda: encode(own[0], starts[0], codes), "cpu"),
        "decode": timed(lambda: decode(joined, starts, 0, codes, "int32"), "cpu"),
    }
    sent = (case.ranks - 1) / case.ranks
    saved = 8 * sent * (4 * len(rank.selected) - len(joined)) / 10e9
    return {**case._asdict(), "bytes": len(joined) / len(rank.selected), "saved": saved, **in_turn(runs, repeats=21)}


def measure_memory(case: Case) -> dict[str, Any]:
    """Peak resident memory of some steps, in a process of their own, in elements for each of the gradient's."""
    code = f"import kernels; print(kernels.peak(kernels.Case(*{tuple(case)!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {**case._asdict(), "elements": int(done.stdout) / 4 / case.numel}


def peak(case: Case) -> int:
    """Bytes of resident memory that steps take beyond the gradient's."""
    torch.set_num_threads(case.threads)
    # The loops are compiled, or loaded, beforehand; and the gradient is there.
    small = Rank(case._replace(numel=100_000), "cpu")
    for _ in range(WARM_UP):
        small.step()
    rank = Rank(case, "cpu")
    rank.draw()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    for _ in range(WARM_UP):
        rank.step()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Resident memory of this process in bytes: now (VmRSS), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def scaling_cases(numel: int, reduced: bool) -> Iterator[tuple[str, Case]]:
    """The cases, each with the name of what varies."""
    for threads, method in product((1, 2), ("MiCRO", "A2SGD")):
        case = Case(method, numel, threads=threads)
        for power in range(4, 8 if reduced else 9):
            yield "elements", case._replace(numel=10**power)
        if reduced or method == "A2SGD":
            continue
        for ranks in (1, 2, 4, 16, 64):
            yield "ranks", case._replace(ranks=ranks)
        for density in (0.1, 0.01, 0.001, 0.0001):
            yield "density", case._replace(density=density)


def table_of_steps(title: str, records: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    for heading in ("elements", "ranks", "density", "threads", "ms", "copy_, ms", "copies"):
        table.add_column(heading, justify="right", no_wrap=heading == "elements")
    for r in records:
        ms = (1000 * r["step"], 1000 * r["copy_"])
        numbers = (f"{r['numel']:,}", str(r["ranks"]), f"{r['density']:g}", str(r["threads"]))
        table.add_row(r["method"], *numbers, f"{ms[0]:.3f}", f"{ms[1]:.3f}", f"{ms[0] / ms[1]:.2f}")
    return table


def table_of_selections(records: list[dict[str, Any]]) -> Table:
    table = Table("elements", title="Selecting the largest 1 % of a whole vector", caption="where: of |x| >= threshold")
    for heading in ("threads", "ours, copies", "torch.topk / ours", "torch.where / ours"):
        table.add_column(heading, justify="right")
    for r in records:
        ratios = (r["ours"] / r["copy_"], r["topk"] / r["ours"], r["where"] / r["ours"])
        table.add_row(f"{r['numel']:,}", str(r["threads"]), *(f"{ratio:.2f}" for ratio in ratios))
    return table


def table_of_coding(records: list[dict[str, Any]]) -> Table:
    table = Table("density", title="Coding of indices, at 10 Gbit/s")
    for heading in ("elements", "bytes an index", "ms to code", "ms saved", "saved / coding"):
        table.add_column(heading, justify="right")
    for r in records:
        coding = r["encode"] + r["decode"]
        cells = (f"{r['numel']:,}", f"{r['bytes']:.2f}", f"{1000 * coding:.3f}", f"{1000 * r['saved']:.3f}")
        table.add_row(f"{r['density']:g}", *cells, f"{r['saved'] / coding:.2f}")
    return table


def table_of_memory(records: list[dict[str, Any]]) -> Table:
    table = Table(
        "method", title="Peak memory beyond the model and its gradients, in elements for each of the gradient's"
    )
    table.add_column("elements / d", justify="right")
    for r in records:
        table.add_row(r["method"], f"{r['elements']:.3f}")
    return table


def main(
    device: Annotated[str, typer.Option(help="cpu, or a GPU as torch names it.")] = "cpu",
    numel: Annotated[int, typer.Option(min=1000, help="Gradient elements, where they do not vary.")] = NUMEL,
    reduced: Annotated[bool, typer.Option(help="Less of everything, in half a minute.")] = False,
    results: Annotated[Path | None, json_option()] = None,
) -> None:
    """What a compressor does on a rank in a step, apart from communication, in copies of the gradient."""
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"torch sees no GPU: --device {device} needs one, with a torch built for it")
    threads = (1, 2) if device == "cpu" else (1,)
    cases = [Case(method, numel, threads=t) for t in threads for method in METHODS]
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    work += [("steps", partial(measure_step, case, device)) for case in cases]
    work += [("selection", partial(measure_selection, numel, t, device)) for t in threads]
    if device == "cpu":
        work += [("coding", partial(measure_coding, Case("MiCRO", numel, density=rho))) for rho in (0.1, 0.01, 0.001)]
        work += [("memory", partial(measure_memory, Case(method, numel))) for method in ("MiCRO", "A2SGD")]
    work += [
        (name, partial(measure_step, case, device))
        for name, case in scaling_cases(numel, reduced)
        if case.threads in threads
    ]
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in work}
    console = Console()
    for name, measure in track(work, "measuring", console=console, transient=True):
        figures[name].append(measure())
        write_json(results, {"device": device, **figures}, indent=1)
    console.print(table_of_steps("What a step costs on a rank", figures["steps"]))
    console.print(table_of_selections(figures["selection"]))
    if "coding" in figures:
        console.print(table_of_coding(figures["coding"]))
    if "memory" in figures:
        console.print(table_of_memory(figures["memory"]))
    for name in ("elements", "ranks", "density"):
        if name in figures:
            console.print(table_of_steps(f"The same, by {name}", figures[name]))


if __name__ == "__main__":
    interrupts.start(main)
