"""What a user's training script does in a step, but for the exchange.

The script runs as it is, on all ranks; only what it calls `DistributedOptimizer`, or `DistributedGradientTape`, takes
the time between steps in the place of exchanging gradients. After some steps, it is stopped.
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from horovod_sparse.core.layout import TensorSpec

WARM_UP, STEPS = 3, 12
AT_LEAST = 3


class Profile(NamedTuple):
    """How a script trains."""

    tensors: list[TensorSpec]
    compute_s: float
    """Of a step without an exchange, in seconds."""
    on_gpu: bool


class Stopped(BaseException):
    """Enough steps were taken. No script catches it by mistake."""


class TooFewSteps(RuntimeError):
    """The script has ended, or does not use Horovod's optimizers."""


class Clock:
    """Takes the time at the end of each step."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, ...], list[float]] = {}  # by the model: its parameters' identities
        self._parameters: dict[int, tuple[Any, TensorSpec]] = {}  # the parameters too, lest an identity come back
        self.on_gpu = False

    @property
    def done(self) -> bool:
        return len(self._longest) > WARM_UP + STEPS

    @property
    def _longest(self) -> list[float]:
        """Of the model that has taken most steps: where two take turns, a step is one of both."""
        return max(self._times.values(), key=len, default=[])

    def watch(self, parameters: Sequence[Any], dtypes: Sequence[str]) -> Callable[[], None]:
        """A model is met, for the first time or again; what is returned is called at the end of each of its steps.

        It raises `Stopped` if that was the last one.
        """
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            spec = TensorSpec(f"{len(self._parameters):06}", tuple(parameter.shape), dtype)
            self._parameters.setdefault(id(parameter), (parameter, spec))
        times = self._times.setdefault(tuple(map(id, parameters)), [])

        def tick() -> None:
            times.append(time.perf_counter())
            if self.done:
                raise Stopped

        return tick

    def profile(self) -> Profile:
        """What was seen.

        Raises:
            TooFewSteps: there were too few.
        """
        times = self._longest
        durations = [end - begin for begin, end in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
        if len(durations) < AT_LEAST:
            raise TooFewSteps(
                f"the script took {len(times)} steps with an optimizer, or a tape, made by Horovod's "
                f"DistributedOptimizer or DistributedGradientTape; {WARM_UP + AT_LEAST + 1} are needed: "
                "let it train for longer, or give --parameters in its place"
            )
        return Profile([spec for _, spec in self._parameters.values()], median(durations), self.on_gpu)


def framework_of(script: Path) -> str:
    """With which of FRAMEWORKS a script trains, by what it imports.

    Raises:
        OSError: it cannot be read.
    """
    uses_tensorflow = re.search(r"\b(horovod|horovod_sparse)\.tensorflow\b", script.read_text(encoding="utf-8"))
    return "tensorflow" if uses_tensorflow else "torch"


def profile(script: Path, arguments: Sequence[str], framework: str) -> Profile:
    """Run a script until it has taken some steps.

    Raises:
        TooFewSteps: it took too few.
        Exception: what the script raises.
    """
    clock = Clock()
    replace = watch_torch if framework == "torch" else watch_tensorflow
    restore = replace(clock)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Stopped:
        pass
    except SystemExit as end:
        if end.code and not clock.done:
            raise RuntimeError(f"it ended with sys.exit({end.code!r})") from end
    except Exception:  # TensorFlow raises an error of its own in the place of `Stopped`
        if not clock.done:
            raise
    finally:
        sys.argv, sys.path[:] = argv, path
        restore()
    return clock.profile()


def stop(*_: Any, **__: Any) -> None:
    """A rank has no more data."""
    raise Stopped


# We still need Horovod when the script has ended; and all ranks join when theirs has (see `command.profile_of_all`).
THE_END: Mapping[str, Callable[..., Any]] = {"shutdown": lambda: None, "join": stop}


def replace_in(modules: Mapping[Any, Mapping[str, Callable[..., Any]]]) -> Callable[[], None]:
    """Give modules other functions, by name, where they have such; what is returned gives them their own back."""
    names = [(module, name) for module, functions in modules.items() for name in functions if hasattr(module, name)]
    before = [(module, name, getattr(module, name)) for module, name in names]
    for module, name in names:
        setattr(module, name, modules[module][name])

    def restore() -> None:
        for module, name, function in before:
            setattr(module, name, function)

    return restore


def watch_torch(clock: Clock) -> Callable[[], None]:
    """Let `DistributedOptimizer` of `horovod.torch` return the optimizer that it is given, with a clock."""

    def DistributedOptimizer(optimizer: Any, named_parameters: Any = None, *args: Any, **kwargs: Any) -> Any:
        every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        tick = clock.watch(every, [str(p.dtype).removeprefix("torch.") for p in every])
        clock.on_gpu |= any(p.is_cuda for p in every)
        optimizer.register_step_post_hook(lambda *_: tick())
        optimizer.synchronize = lambda: None
        optimizer.skip_synchronize = nullcontext
        optimizer.set_backward_passes_per_step = lambda passes: None
        return optimizer

    stock, ours = import_module("horovod.torch"), import_module("horovod_sparse.torch")
    functions = {"DistributedOptimizer": DistributedOptimizer, **THE_END}
    without_figures = {"get_compressor": lambda optimizer: ours.MiCROCompressor()}
    return replace_in({stock: functions, ours: functions | without_figures})


def watch_tensorflow(clock: Clock) -> Callable[[], None]:
    """Let tapes and optimizers of `horovod.tensorflow` hand the gradients on, past a clock."""
    import tensorflow as tf

    import horovod_sparse.tensorflow as ours
    import horovod_sparse.tensorflow.keras as ours_keras

    class Watching(ours.MiCROCompressor):
        """Reduces nothing."""

        def reduce(self, gradients: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
            tick = clock.watch(variables, [tf.as_dtype(v.dtype).name for v in variables])
            clock.on_gpu |= bool(tf.config.list_physical_devices("GPU"))

            def ticked() -> int:
                tick()
                return 0

            with tf.control_dependencies(gradients):
                at_the_end = tf.numpy_function(ticked, [], tf.int64)
            with tf.control_dependencies([at_the_end]):
                return [tf.identity(gradient) for gradient in gradients]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            return function(**{**arguments, "compression": Watching()})

        return call

    tapes = {"DistributedGradientTape": watched(ours.DistributedGradientTape)}
    optimizers = {"DistributedOptimizer": watched(ours_keras.DistributedOptimizer), **THE_END}
    stock = import_module("horovod.tensorflow")
    stock_keras = import_module("horovod.tensorflow.keras")
    return replace_in(
        {stock: tapes | optimizers, ours: tapes | optimizers, stock_keras: optimizers, ours_keras: optimizers}
    )
