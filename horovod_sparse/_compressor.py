"""What the compressors of all front ends share: their settings, and how Horovod's users hand them over."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from horovod_sparse.core.exchange import A2SGDExchange, MiCROExchange, QSGDExchange, TopKExchange
from horovod_sparse.core.schedule import DensitySchedule

# Of `horovodrun --gloo`, Open MPI, and others.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

_warned_of: set[str] = set()


class on_class_or_instance:
    """A method that Horovod may call on the class that it was given, as well as on an instance."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return partial(self._function, owner) if instance is None else MethodType(self._function, instance)


def is_or_makes(compression: object, compressor: type) -> bool:
    """Whether `compression=` was given a compressor of this kind, be it the class or an instance.

    Raises:
        TypeError: it was given something else than a compressor.
    """
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        raise TypeError(
            f"compression={compression!r}: it must be a compressor, such as Compression.micro, Compression.a2sgd, "
            "Compression.fp16, Compression.none, or an instance such as MiCROCompressor(density=0.001)"
        )
    return issubclass(compression if isinstance(compression, type) else type(compression), compressor)


def follows_learning_rate(settings: Mapping[str, Any], plain_sgd: bool) -> bool:
    """Whether what an exchange with these settings holds back is to follow the learning rate of the optimizer."""
    follow = settings.get("follow_learning_rate", False)
    return plain_sgd if follow is None else bool(follow)


def operation(hvd: Any, op: object) -> str:
    """What users call an operation of Horovod's, such as "hvd.Adasum"."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((f"hvd.{name}" for name in names if op == getattr(hvd, name)), repr(op))


def warn(hvd: Any, text: str, stacklevel: int) -> None:
    """Warn, once, on rank 0 alone. Before `hvd.init()`, what started the job has put the rank into the environment."""
    started_as = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    if (hvd.rank() if hvd.is_initialized() else started_as) == 0 and text not in _warned_of:
        _warned_of.add(text)
        warnings.warn(text, stacklevel=stacklevel + 1)


class NotCopied:
    """What neither pickle nor `copy` can take: it holds the place of this rank, and belongs to one optimizer."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: save its state_dict(), and give it to the "
            "load_state_dict() of a new one"
        )


class Flushing:
    """What compressors offer that hold something back."""

    def flush(self: Any) -> None:
        """Make the next exchange send everything that is held back: afterwards, the residual is 0 on all ranks.

        It holds for all ranks, even if only one of them calls it.
        """
        for exchange in self._exchanges():
            exchange.flush()


class MiCROSettings(Flushing):
    """MiCRO (arXiv 2310.00967): in each step, the largest entries of the accumulated gradient travel, the rest waits.

    Args:
        density: the share of the gradient's elements to send in a step, in (0, 1].
        threshold: "adaptive" meets the density at every step, at any scale of the gradients; "paper" is the published
            rule, which needs hundreds of steps.
        value_dtype: "float16" or "bfloat16" halves the bytes of the values, and sends the rounding error later; None
            sends them as accumulated: in float32, or in float64 where the model has float64 parameters. "float16" takes
            no more rounds than None, "bfloat16" one more, for Horovod adds none; it spares the sum's rounding error.
        follow_learning_rate: when the learning rate changes, multiply what is held back by the ratio of the old one to
            the new one, so that it has the effect that it would have had at once. None: with SGD without momentum.
            Other optimizers do not take the gradient as it is: momentum would keep what was multiplied for a small
            learning rate, and apply it at a large one. It needs an optimizer; a tape knows no learning rate.
        density_schedule: the density of each step, in the place of `density`: `WarmUp(steps)`, which goes from 1 to
            `density` in so many steps, or a function from the number of steps taken so far to a density, which must be
            the same on all ranks. It goes on where a loaded state was saved.
        verify_every: after each so many steps, check that the parameters are bitwise the same on all ranks; if they are
            not, all ranks raise a RuntimeError that names the first rank and parameter that differ. None: never.

    Raises:
        ValueError: a setting is none of these.
    """

    def __init__(
        self,
        density: float = 0.01,
        threshold: str = "adaptive",
        value_dtype: str | None = None,
        follow_learning_rate: bool | None = None,
        density_schedule: DensitySchedule = None,
        verify_every: int | None = None,
    ) -> None:
        common = follow_learning_rate, density_schedule, verify_every
        super().__init__(partial(MiCROExchange, density, threshold, value_dtype, *common))  # type: ignore[call-arg]


class A2SGDSettings:
    """A2SGD (arXiv 2006.07405): each rank sends two numbers, the means of its positive and its negative gradients.

    Two numbers cannot carry a gradient: each rank applies the rest of its own, and the replicas drift apart. So the
    parameters are averaged over the ranks after every `sync_every` steps. Before an evaluation or a checkpoint, call
    `synchronize_parameters()`. The optimizer's own state (momentum, Adam's moments) stays each rank's own.

    Args:
        granularity: "model" takes the means over the whole model, "tensor" over each tensor.
        sync_every: steps from one averaging of the parameters to the next; None never averages them.
        verify_every: after each so many steps, check that the ranks agree on settings, model and step; None: never. The
            parameters, which drift apart by design, are not compared.

    Raises:
        ValueError: a setting is none of these.
    """

    _hvd: Any

    def __init__(
        self, granularity: str = "model", sync_every: int | None = 100, verify_every: int | None = None
    ) -> None:
        super().__init__(partial(A2SGDExchange, granularity, sync_every, verify_every))  # type: ignore[call-arg]
        if sync_every is None:
            warn(
                self._hvd,
                "sync_every=None: with A2SGD the replicas drift apart, and nothing brings them together unless "
                "synchronize_parameters() is called, for example before each evaluation and checkpoint",
                stacklevel=2,
            )


class TopKSettings(Flushing):
    """Top-k (arXiv 1704.05021, 1809.07599): in each step, each rank sends the largest entries of its own gradient.

    The rest waits in a residual. The ranks select different entries, so with more ranks more of the gradient changes.

    Args:
        density: the share of the gradient's elements that each rank sends in a step, in (0, 1].
        follow_learning_rate, density_schedule, verify_every: as of `MiCROCompressor`.

    Raises:
        ValueError: a setting is none of these.
    """

    def __init__(
        self,
        density: float = 0.01,
        follow_learning_rate: bool | None = None,
        density_schedule: DensitySchedule = None,
        verify_every: int | None = None,
    ) -> None:
        common = follow_learning_rate, density_schedule, verify_every
        super().__init__(partial(TopKExchange, density, *common))  # type: ignore[call-arg]


class QSGDSettings:
    """QSGD (arXiv 1610.02132): each element travels in a few bits, rounded at random so that it is right on average.

    Args:
        bits: 2, 4 or 8 for each element, its sign included; each 512 elements share a norm, in 4 bytes more.
        verify_every: as of `MiCROCompressor`.

    Raises:
        ValueError: a setting is none of these.
    """

    def __init__(self, bits: int = 4, verify_every: int | None = None) -> None:
        super().__init__(partial(QSGDExchange, bits, verify_every))  # type: ignore[call-arg]
