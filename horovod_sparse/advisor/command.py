"""`horovod-sparse advise`, on each rank."""

from __future__ import annotations

import json
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from horovod_sparse.advisor.advice import Advice, advise, link_lines, make_table
from horovod_sparse.advisor.ranks import FRAMEWORKS, Ranks, TensorFlowRanks, TorchRanks
from horovod_sparse.advisor.script import Profile, TooFewSteps, framework_of, profile
from horovod_sparse.core.layout import TensorSpec

TENSORS = 32
"""In so many tensors are a model's parameters, where only their number is known."""


SAY_EVERY_S = 10.0


class CannotAdvise(Exception):
    """The message says why, and what to do about it."""


def run(
    script: Sequence[str],
    parameters: float | None,
    compute_s: float,
    framework: str | None,
    seconds: float,
    json_file: Path | None,
) -> None:
    """Advise; rank 0 prints.

    Raises:
        CannotAdvise: something is wrong with what was asked for; on all ranks.
    """
    if bool(script) == (parameters is not None):
        raise CannotAdvise("give a SCRIPT, or else --parameters, the number of the model's parameters")
    if parameters is not None and not 1 <= parameters <= 1e12:
        raise CannotAdvise(f"--parameters {parameters:g}: it must be a number from 1 to 1e12")
    if framework not in (None, *FRAMEWORKS):
        raise CannotAdvise(f"--framework {framework}: it must be one of {', '.join(FRAMEWORKS)}")
    if script:
        try:
            of_script = framework_of(Path(script[0]))
        except (OSError, UnicodeDecodeError) as error:
            raise CannotAdvise(f"{script[0]}: {error}") from error
        framework = framework or of_script
    json_file = json_file and json_file.absolute()  # the script may go elsewhere
    ranks = make_ranks(framework)
    if ranks.size == 1:
        raise CannotAdvise("there is one rank, and nothing to exchange: horovodrun -np N horovod-sparse advise ...")
    problem = ranks.gather(unwritable(json_file) if json_file and ranks.rank == 0 else None)[0]
    if problem:
        raise CannotAdvise(f"--json {json_file}: {problem}. Name a file that can be written")
    console = Console(highlight=False, quiet=ranks.rank > 0)
    if script:
        console.print(f"running {' '.join(script)}, without exchanges ...", markup=False, soft_wrap=True)
        found = profile_of_all(ranks, script, framework or "torch")
    else:
        sizes = [int(parameters or 0) // TENSORS] * TENSORS
        sizes[0] += int(parameters or 0) - sum(sizes)
        found = Profile(
            [TensorSpec(f"{i:02}", (size,), "float32") for i, size in enumerate(sizes) if size], compute_s, False
        )
    numel = sum(spec.numel for spec in found.tensors)
    console.print(f"{ranks.size} ranks; {numel:,} parameters; {1000 * found.compute_s:,.1f} ms a step without exchange")
    on_one_host = len(set(ranks.gather(socket.gethostname()))) == 1
    console.print(f"measuring the link, then rehearsing each setting, for some {seconds:g} s ...")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # launchers hand on Ctrl-C as this
    advice: Advice | None = None
    said, interrupted = time.monotonic(), False
    try:
        for turn, advice in enumerate(advise(ranks, found, seconds), 2):
            if time.monotonic() - said > SAY_EVERY_S and not advice.noisy:
                said = time.monotonic()
                console.print(f"turn {turn}: {advice.recommended.candidate.setting} so far")
            if json_file and ranks.rank == 0:
                json_file.write_text(json.dumps(advice.as_json(), indent=1) + "\n")
    except OSError as error:
        raise CannotAdvise(f"--json {json_file}: {error}") from error
    except KeyboardInterrupt:
        if advice is None:
            raise
        console.print("interrupted; what was measured so far:")
        interrupted = True
    assert advice
    for line in link_lines(advice.link, ranks.size):
        console.print(line)
    console.print(make_table(advice))
    for line in advice.lines():
        console.print(line, soft_wrap=True)
    if on_one_host:
        console.print("All ranks are on one host: this says nothing about a network between hosts.")
    if not found.compute_s:
        console.print(
            "The time of a step without exchange is not known: --compute-ms would make that more than a guess."
        )
    if interrupted:
        raise KeyboardInterrupt


def unwritable(path: Path) -> str | None:
    """Why a file cannot be written; None if it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return str(error)
    return None


def make_ranks(framework: str | None) -> Ranks:
    """All ranks of this job, by this framework, or the one that Horovod was built with."""
    try:
        return TensorFlowRanks() if framework == "tensorflow" else TorchRanks()
    except ImportError as error:
        if framework:
            raise CannotAdvise(str(error)) from error
        return make_ranks("tensorflow")


def profile_of_all(ranks: Ranks, script: Sequence[str], framework: str) -> Profile:
    """How the script trains, with the mean of the ranks' times.

    Raises:
        CannotAdvise: the script failed on this rank, which ends the job, as it would without us.
    """
    try:
        found = profile(Path(script[0]), script[1:], framework)
    except TooFewSteps as error:
        raise CannotAdvise(f"{script[0]}, rank {ranks.rank}: {error}") from error
    except Exception as error:
        traceback.print_exc()
        raise CannotAdvise(f"{script[0]}, rank {ranks.rank}: {type(error).__name__}: {error}") from error
    ranks.join()  # others may have more steps to take, and some scripts reduce a figure in each
    return found._replace(compute_s=fmean(ranks.gather(found.compute_s)))
