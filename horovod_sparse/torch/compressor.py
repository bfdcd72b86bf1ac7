"""The compressors that `hvd.DistributedOptimizer(..., compression=...)` takes.

How a step runs inside stock Horovod, which knows only `compress` and `decompress`, each for one tensor:

- `compress` notes the gradient and returns a token, one number, which Horovod reduces in its place. It never waits for
  another rank: the order in which gradients become ready may differ between ranks.
- With the last gradient of the step, the step's first round is started, without waiting for it.
- The first `decompress` comes after the last `compress`, inside `optimizer.synchronize()`, which all ranks enter. It
  runs the step to its end, for the whole model, and writes the update into all gradients.
- When a rank has something that all must know before they go on (it is in its first step, its state was loaded or
  reset, it wants a flush, it met an error), it raises its flag; then all ranks compare notes, and go on together or
  raise the same error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_sparse.core import A2SGD, Allreduce, FlatLayout, MiCRO, SparseUpdate, StepStats, TensorSpec, a2sgd, micro
from horovod_sparse.core.collectives import Array
from horovod_sparse.core.layout import first_difference
from horovod_sparse.core.step import Step
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.agreement import disagreement
from horovod_sparse.torch.caller import Caller, find_caller
from horovod_sparse.torch.collectives import Collectives
from horovod_sparse.torch.gradient import FLOATING, FlatGradient, spec_of

State = Mapping[str, Any]

# What Horovod reduces in a gradient's place. Its value means nothing: that it was reduced tells that all ranks have
# their gradient of this parameter.
TOKEN = torch.zeros(1)


class Gradient(NamedTuple):
    """A gradient of the step under way: what Horovod keeps as its context."""

    compressor: SparseCompressor
    tensor: torch.Tensor
    spec: TensorSpec


class on_class_or_instance:
    """A method that Horovod may call on the class that it was given, as well as on an instance."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return partial(self._function, owner) if instance is None else MethodType(self._function, instance)


class SparseCompressor(hvd.compression.Compressor):  # type: ignore[misc]
    """What MiCROCompressor and A2SGDCompressor share: life inside Horovod's optimizer."""

    method: str

    stats: StepStats | None
    """Figures of the last step; None before the first."""

    _loaded: State | None

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Any] | None = None
        self._collectives: Collectives | None = None  # once the ranks are known to train the same parameters
        self.reset()

    # What differs between the methods

    def _settings(self) -> dict[str, Any]:
        """The settings, which have to be the same on all ranks."""
        raise NotImplementedError

    def _make_algorithm(self, layout: FlatLayout) -> Any:
        raise NotImplementedError

    def _save(self, algorithm: Any) -> dict[str, Any]:
        """The algorithm's state, besides its step."""
        return {}

    def _restore(self, algorithm: Any, state: State) -> None:
        """Undo `_save`; raise ValueError if `state` does not fit."""

    def _notes(self) -> dict[str, Any]:
        """What else the ranks have to agree on."""
        return {}

    def _heed(self, notes: list[dict[str, Any]]) -> None:
        """Act on the ranks' notes, once they agree."""

    def _make_stats(self, update: Any, layout: FlatLayout, bytes_sent: int) -> StepStats:
        raise NotImplementedError

    # The public surface that both share

    @on_class_or_instance
    def compress(self_or_class: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, Gradient | None]:
        """Called by Horovod for each gradient: returns a token for Horovod to reduce, and the context.

        Raises:
            ValueError: `tensor` is not the gradient of a parameter of a Horovod optimizer.
        """
        caller = find_caller(tensor)
        optimizer, parameter, _ = caller
        try:
            compressor = self_or_class if isinstance(self_or_class, SparseCompressor) else get_compressor(optimizer)
            compressor._bind(optimizer)
        except ValueError:
            if hasattr(optimizer, "_starting_models"):  # Adasum has put its update in the parameter's place
                parameter.data.copy_(optimizer._starting_models[parameter])
            raise
        return compressor._compress(tensor, caller)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Gradient | None) -> torch.Tensor:
        """Called by Horovod with a reduced token: returns the gradient to apply, in the shape of the parameter."""
        if ctx is None:  # Horovod reduced the gradient itself: a sparse one, or that of a single rank
            return tensor
        if not ctx.compressor._finished:
            ctx.compressor._finish_step()
        return ctx.tensor

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain tensors, numbers and strings: `torch.load(..., weights_only=True)` reads it."""
        if self._algorithm is None:
            return dict(self._loaded) if self._loaded else {"method": self.method, "step": 0}
        return {"method": self.method, "step": self._algorithm.t, **self._save(self._algorithm)}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict()` returned on the same rank; to be called on all ranks.

        The next exchange finds out whether it fits the model: if it does not, all ranks raise the same error.

        Raises:
            ValueError: `state` was not saved by a compressor of this method.
        """
        method = state.get("method") if isinstance(state, Mapping) else type(state).__name__
        if method != self.method:
            raise ValueError(f"{type(self).__name__}.load_state_dict: the state is of {method!r}, not {self.method!r}")
        self.reset()
        self._loaded = state

    def reset(self) -> None:
        """Forget all state, as if no step had been taken; to be called on all ranks."""
        self.stats = None
        self._algorithm: Any = None
        self._loaded = None
        self._agreed = False  # do the ranks hold matching states?
        self._problem: str | None = None
        self._begin_step()

    # Between the steps

    def _bind(self, optimizer: Any) -> None:
        """Serve `optimizer`, and no other."""
        bound = self._bound_optimizer()
        if bound is optimizer:
            return
        if bound is not None:
            raise ValueError(
                f"this {type(self).__name__} already serves another optimizer, and two optimizers cannot share a "
                "residual: give each an instance of its own, or the class"
            )
        if getattr(optimizer, "op", hvd.Adasum) == hvd.Adasum:  # Horovod's optimizer for Adasum has no `op`
            raise ValueError(
                f"{type(self).__name__} does not work with op=hvd.Adasum, which combines whole gradients: use "
                "op=hvd.Average or op=hvd.Sum, or Adasum with compression=hvd.Compression.fp16"
            )
        self._optimizer = weakref.ref(optimizer)
        optimizer.synchronize = partial(_synchronize, self, optimizer.synchronize)

    def _bound_optimizer(self) -> Any:
        """The optimizer, or None if there is none, or none any more."""
        return self._optimizer() if self._optimizer else None

    def _before_synchronize(self, optimizer: Any) -> None:
        """Called on all ranks, before any of them waits for another's tokens."""
        self._agree_on_parameters(optimizer)

    def _check_hooks(self, optimizer: Any) -> None:
        """Note a parameter whose gradient Horovod does not hand over."""
        hooked = optimizer._requires_update
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.requires_grad and p not in hooked:
                name = optimizer._parameter_names.get(p, "of the optimizer")
                self._note(
                    f"parameter {name}, of shape {tuple(p.shape)}, was added or unfrozen after the optimizer was given "
                    "to hvd.DistributedOptimizer, so Horovod does not reduce its gradient: make a new one"
                )

    def _agree_on_parameters(self, optimizer: Any) -> None:
        """Once: do all ranks train the same parameters? If they do not, Horovod would wait for ever."""
        if self._collectives:
            return
        trained = {name: p for p, name in optimizer._parameter_names.items() if p in optimizer._requires_update}
        specs = [spec_of(name, p) for name, p in sorted(trained.items())]
        # Until they are known to agree, the ranks' names for their collectives must not depend on the model.
        collectives = Collectives("horovod_sparse", optimizer.process_set)
        self._agree(collectives, specs)
        collectives.name = f"horovod_sparse.{self.method}.{specs[0].name if specs else ''}"
        self._collectives = collectives

    def _agree(self, collectives: Collectives, specs: list[TensorSpec], **state: Any) -> list[dict[str, Any]]:
        """Compare notes with all ranks; raise the same RuntimeError on all of them if they do not match."""
        notes = {"problem": self._problem, "method": self.method, "settings": self._settings(), "tensors": specs}
        all_notes = collectives.gather_objects({**notes, **state}, "notes")
        problem = disagreement(all_notes)
        if problem:
            raise RuntimeError(problem)
        return all_notes

    # One step

    def _begin_step(self) -> None:
        self._finished = False
        self._gradients: dict[str, Gradient] = {}
        self._flag: int | None = None  # Horovod's handles
        self._first_round: int | None = None
        self._flat: list[FlatGradient] = []
        self._step: Step[Any] | None = None

    def _compress(self, tensor: torch.Tensor, caller: Caller) -> tuple[torch.Tensor, Gradient | None]:
        optimizer, parameter, synchronizing = caller
        if optimizer.process_set.size() == 1:
            return tensor, None
        if synchronizing:
            self._agree_on_parameters(optimizer)
        self._finished = False
        name = optimizer._parameter_names[parameter]
        gradient = self._gradients[name] = Gradient(self, tensor.detach(), spec_of(name, tensor))
        self._check(gradient)
        if self._algorithm and self._collectives and len(self._gradients) == len(self._algorithm.layout.tensors):
            self._start_exchange()
        return TOKEN.to(tensor.device, copy=True), gradient

    def _check(self, gradient: Gradient) -> None:
        """Note what is wrong with a gradient."""
        tensor, spec = gradient.tensor, gradient.spec
        if tensor.is_sparse:
            self._note(f"the gradient of {spec} is sparse, and Horovod reduces no sparse gradients in groups")
        elif tensor.dtype not in FLOATING:
            self._note(f"{spec}: {type(self).__name__} compresses float16, bfloat16, float32 and float64")
        elif tensor.device != next(iter(self._gradients.values())).tensor.device:
            self._note(f"{spec} lies on {tensor.device}, others do not: all parameters must lie on one device")
        elif self._algorithm and spec not in self._algorithm.layout:
            self._note(
                f"{spec} is not what the model had in the steps before. If it was changed on purpose, call reset() on "
                "the compressor of every rank"
            )

    def _note(self, problem: str) -> None:
        """Keep what is wrong until all ranks meet: an error on one rank alone would leave the others waiting."""
        self._problem = self._problem or problem

    def _start_exchange(self) -> None:
        """Start what does not depend on other ranks; wait for nothing."""
        assert self._collectives
        self._check_hooks(self._bound_optimizer())
        self._collectives.count(TOKEN.nbytes * len(self._gradients))
        needs_talk = not self._agreed or self._problem is not None
        self._flag = self._collectives.start(Allreduce(np.array([needs_talk], np.float32)), "flag")
        if not needs_talk:
            self._start_first_round()

    def _start_first_round(self) -> None:
        assert self._collectives
        layout: FlatLayout = self._algorithm.layout
        self._flat = [FlatGradient(self._gradients[spec.name].tensor, layout.dtype) for spec in layout.tensors]
        arrays = [flat.array for flat in self._flat]
        self._step = self._algorithm.step(arrays, self._collectives.rank, self._collectives.world_size)
        self._first_round = self._collectives.start(next(self._step), "first_round")

    def _finish_step(self) -> None:
        """Run the exchange to its end, and write the update into the gradients."""
        try:
            update = self._exchange()
        except BaseException:  # this step cannot be finished; should there be another one, it begins with a talk
            self._agreed = False
            self._begin_step()
            raise
        assert self._collectives
        self._write(update)
        self.stats = self._make_stats(update, self._algorithm.layout, self._collectives.take_count())
        self._begin_step()
        self._finished = True

    def _exchange(self) -> Any:
        """Run the exchange to its end; return the update."""
        if self._flag is None:
            self._start_exchange()
        assert self._collectives
        assert self._flag is not None
        if self._collectives.finish(self._flag)[0] > 0:
            self._talk()
        if self._first_round is None:
            self._start_first_round()
        assert self._step
        assert self._first_round is not None
        return _drive(self._step, self._collectives, self._collectives.finish(self._first_round))

    def _talk(self) -> None:
        """Compare layout, state and wishes with all ranks: some rank has raised its flag."""
        if self._algorithm is None:
            self._algorithm = self._make_algorithm(FlatLayout(g.spec for g in self._gradients.values()))
            if self._loaded:
                try:
                    self._algorithm.t = self._loaded["step"]
                    self._restore(self._algorithm, self._loaded)
                except ValueError as error:
                    self._note(str(error))
        assert self._collectives
        specs = sorted(gradient.spec for gradient in self._gradients.values())
        self._heed(self._agree(self._collectives, specs, step=self._algorithm.t, **self._notes()))
        self._agreed = True
        self._loaded = None

    def _write(self, update: Any) -> None:
        """Turn the gradients into those to apply."""
        if update is None:  # as Horovod would have: a gradient that is not finite on one rank is so on all
            for gradient in self._gradients.values():
                gradient.tensor.fill_(float("nan"))
            return
        update.write(self._algorithm.layout, [flat.array for flat in self._flat])
        assert self._collectives
        summing = self._bound_optimizer().op == hvd.Sum
        for flat in self._flat:
            flat.store(scale=self._collectives.world_size if summing else 1)


def _synchronize(compressor: SparseCompressor, synchronize: Callable[[], None]) -> None:
    """In the place of `optimizer.synchronize`: first what must happen before a rank waits for another's tokens."""
    optimizer = compressor._bound_optimizer()
    if optimizer.process_set.included() and optimizer.process_set.size() > 1:
        compressor._before_synchronize(optimizer)
    synchronize()


def _drive(step: Step[Any], collectives: Collectives, answer: Array) -> Any:
    """Give `step` the answer to its first request, then run its further ones; return its update."""
    while True:
        try:
            request = step.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = collectives.run(request, type(request).__name__.lower())


class MiCROCompressor(SparseCompressor):
    """MiCRO (arXiv 2310.00967): in each step, the largest entries of the accumulated gradient travel, the rest waits.

    Args:
        density: the share of the gradient's elements to send in a step, in (0, 1].
        threshold: "adaptive" meets the density at every step, at any scale of the gradients; "paper" is the published
            rule, which needs hundreds of steps.
        value_dtype: "float16" halves the bytes of the values, and sends the rounding error later; None sends them as
            accumulated: in float32, or in float64 where the model has float64 parameters.

    Raises:
        ValueError: a setting is none of these.
    """

    method = "micro"

    def __init__(self, density: float = 0.01, threshold: str = "adaptive", value_dtype: str | None = None) -> None:
        micro.check_settings(density, threshold, value_dtype)
        self.density = float(density)
        self.threshold = threshold
        self.value_dtype = value_dtype
        super().__init__()

    def flush(self) -> None:
        """Make the next exchange send everything that is held back: afterwards, the residual is 0 on all ranks.

        It holds for all ranks, even if only one of them calls it.
        """
        self._flush = True
        self._agreed = False

    def reset(self) -> None:
        super().reset()
        self._flush = False

    def _settings(self) -> dict[str, Any]:
        return {"density": self.density, "threshold": self.threshold, "value_dtype": self.value_dtype}

    def _make_algorithm(self, layout: FlatLayout) -> MiCRO:
        return MiCRO(layout, **self._settings())

    def _save(self, algorithm: MiCRO) -> dict[str, Any]:
        residual = {}
        if algorithm.residual is not None:
            for spec, part in zip(algorithm.layout.tensors, algorithm.layout.split(algorithm.residual), strict=True):
                residual[spec.name] = torch.as_tensor(part).clone().view(spec.shape)
        return {"threshold": algorithm.estimator.state(), "residual": residual}

    def _restore(self, algorithm: MiCRO, state: State) -> None:
        algorithm.estimator.load(state["threshold"])
        residual: Mapping[str, torch.Tensor] = state["residual"]
        if not residual:
            return
        layout = algorithm.layout
        saved = [spec_of(name, tensor) for name, tensor in sorted(residual.items())]
        wanted = [spec._replace(dtype=layout.dtype) for spec in layout.tensors]
        difference = first_difference(saved, wanted)
        if difference:
            raise ValueError(
                f"the loaded state does not fit the model: it has {difference[0]} where the model has {difference[1]}"
            )
        device = next(iter(self._gradients.values())).tensor.device
        algorithm.residual = FlatGradient(
            torch.cat([residual[spec.name].reshape(-1) for spec in layout.tensors]).to(device), layout.dtype
        ).array

    def _notes(self) -> dict[str, Any]:
        return {"threshold": self._algorithm.estimator.state(), "flush": self._flush}

    def _heed(self, notes: list[dict[str, Any]]) -> None:
        self._algorithm.flushing = any(note["flush"] for note in notes)
        self._flush = False

    def _make_stats(self, update: SparseUpdate | None, layout: FlatLayout, bytes_sent: int) -> StepStats:
        selected = len(update.values) if update else 0
        return StepStats(
            step=self._algorithm.t,
            numel=layout.numel,
            target_density=self.density,
            density=selected / max(layout.numel, 1),
            selected=selected,
            threshold=update.threshold if update else self._algorithm.estimator.threshold,
            bytes_sent=bytes_sent,
            skipped=update is None,
        )


class A2SGDCompressor(SparseCompressor):
    """A2SGD (arXiv 2006.07405): each rank sends two numbers, the means of its positive and its negative gradients.

    Two numbers cannot carry a gradient: each rank applies the rest of its own, and the replicas drift apart. So the
    parameters are averaged over the ranks after every `sync_every` steps. Before an evaluation or a checkpoint, call
    `synchronize_parameters()`. The optimizer's own state (momentum, Adam's moments) stays each rank's own.

    Args:
        granularity: "model" takes the means over the whole model, "tensor" over each tensor.
        sync_every: steps from one averaging of the parameters to the next; None never averages them.

    Raises:
        ValueError: a setting is none of these.
    """

    method = "a2sgd"

    def __init__(self, granularity: str = "model", sync_every: int | None = 100) -> None:
        a2sgd.check_settings(granularity, sync_every)
        self.granularity = granularity
        self.sync_every = sync_every
        super().__init__()
        if sync_every is None and not (hvd.is_initialized() and hvd.rank() > 0):
            warnings.warn(
                "sync_every=None: with A2SGD the replicas drift apart, and nothing brings them together unless "
                "synchronize_parameters() is called, for example before each evaluation and checkpoint",
                stacklevel=2,
            )

    def synchronize_parameters(self) -> None:
        """Average the parameters over the ranks: bitwise the same on all of them afterwards. To be called on all.

        Raises:
            RuntimeError: no optimizer uses this compressor yet.
        """
        optimizer = self._bound_optimizer()
        if optimizer is None:
            raise RuntimeError(
                "synchronize_parameters() has no parameters before the first step: call "
                "get_compressor(optimizer).synchronize_parameters()"
            )
        self._averaging_due = False
        process_set = optimizer.process_set
        if not process_set.included() or process_set.size() == 1:
            return
        named = sorted((name, p) for p, name in optimizer._parameter_names.items())
        parameters = [p.data for _, p in named if p.is_floating_point()]
        collectives = self._collectives or Collectives("horovod_sparse.a2sgd", process_set)
        collectives.average_(parameters)
        if self.stats:
            self.stats = self.stats._replace(bytes_sent=self.stats.bytes_sent + collectives.take_count())

    def reset(self) -> None:
        super().reset()
        self._averaging_due = False

    def _settings(self) -> dict[str, Any]:
        return {"granularity": self.granularity, "sync_every": self.sync_every}

    def _make_algorithm(self, layout: FlatLayout) -> A2SGD:
        return A2SGD(layout, self.granularity)

    def _bind(self, optimizer: Any) -> None:
        first_time = self._bound_optimizer() is not optimizer
        super()._bind(optimizer)
        if first_time:
            optimizer.register_step_post_hook(lambda *_: self._average_if_due())

    def _average_if_due(self) -> None:
        if self._averaging_due:
            self.synchronize_parameters()

    def _before_synchronize(self, optimizer: Any) -> None:
        super()._before_synchronize(optimizer)
        # Still due if the last step was not taken, say by a loss scaler. Ranks that did take it are waiting.
        self._average_if_due()

    def _make_stats(self, update: Any, layout: FlatLayout, bytes_sent: int) -> StepStats:
        step = self._algorithm.t
        self._averaging_due = self.sync_every is not None and step % self.sync_every == 0
        return StepStats(
            step=step,
            numel=layout.numel,
            target_density=None,
            density=None,
            selected=None,
            threshold=None,
            bytes_sent=bytes_sent,
            skipped=update is None,
        )


_compressors: weakref.WeakKeyDictionary[Any, SparseCompressor] = weakref.WeakKeyDictionary()


def get_compressor(optimizer: Any) -> Any:
    """The MiCROCompressor or A2SGDCompressor at work in a `DistributedOptimizer`.

    Raises:
        TypeError: the optimizer uses neither.
    """
    compression = getattr(optimizer, "_compression", None)
    if isinstance(compression, SparseCompressor):
        compressor = compression
    elif isinstance(compression, type) and issubclass(compression, SparseCompressor):
        if optimizer not in _compressors:
            _compressors[optimizer] = compression()
        compressor = _compressors[optimizer]
    else:
        raise TypeError(
            f"get_compressor takes an optimizer made by hvd.DistributedOptimizer(..., compression=MiCROCompressor) or "
            f"A2SGDCompressor, not a {type(optimizer).__name__} with compression={compression!r}"
        )
    compressor._bind(optimizer)
    return compressor
