"""The compressors that `hvd.DistributedOptimizer(..., compression=...)` takes.

How a step runs inside stock Horovod, which knows only `compress` and `decompress`, each for one tensor:

- `compress` notes the gradient and returns a token, one number, which Horovod reduces in its place. It never waits for
  another rank: the order in which gradients become ready may differ between ranks.
- At the end of the backward pass that brings the last gradient, the step's first round is started, without waiting
  for it.
- The first `decompress` comes after the last `compress`, inside `optimizer.synchronize()`, which all ranks enter. It
  runs the step to its end, for the whole model, and writes the update into all gradients.

`core.exchange` holds what the ranks have to agree on, and how they raise the same error.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_sparse import _elastic
from horovod_sparse._compressor import (
    A2SGDSettings,
    MiCROSettings,
    NotCopied,
    QSGDSettings,
    TopKSettings,
    follows_learning_rate,
    is_or_makes,
    on_class_or_instance,
    operation,
)
from horovod_sparse.core import FlatLayout, StepStats, TensorSpec
from horovod_sparse.core.collectives import Array
from horovod_sparse.core.exchange import A2SGDExchange, Exchange, check_present
from horovod_sparse.core.layout import accumulator_dtype
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.caller import Caller, enlist, find_caller, unlisted
from horovod_sparse.torch.collectives import Collectives, Running
from horovod_sparse.torch.gradient import FLOATING, FlatGradient, digest, spec_of
from horovod_sparse.torch.loss_scale import before_unscaling, current_scaler, passes_so_far, scaler_since

# What Horovod reduces in a gradient's place. Its value means nothing; that it was reduced means that all ranks have
# their gradient of this parameter.
TOKEN = torch.zeros(1)

# How long to wait for other ranks to finish a backward pass whose step is given up.
GIVE_UP_S = 30.0


class Context(NamedTuple):
    """What Horovod keeps with a gradient of the step under way."""

    compressor: SparseCompressor
    gradient: FlatGradient


class SparseCompressor(NotCopied, hvd.compression.Compressor):  # type: ignore[misc]
    """What the compressors share: life inside Horovod's optimizer."""

    _hvd = hvd

    def __init__(self, make_exchange: Callable[[], Exchange]) -> None:
        self._exchange = make_exchange()
        self._exchange.digests = self._digests
        self._optimizer: weakref.ref[Any] | None = None
        self._collectives: Collectives | None = None  # once the ranks are known to train the same parameters
        self._ever_sparse: set[str] = set()
        self._given_up = 0
        self._handed_over: dict[TensorSpec, weakref.ref[Array]] = {}
        self._begin_step()
        _elastic.followers.add(self)

    # The public surface

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step; None before the first, and on a single rank, where there is nothing to exchange."""
        return self._exchange.stats

    @property
    def method(self) -> str:
        """Its name: "micro", "a2sgd", "topk" or "qsgd"."""
        return self._exchange.method

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number, and the number of ranks, in the last step."""
        return self._exchange.place

    @on_class_or_instance
    def compress(self_or_class: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, Context | None]:
        """Called by Horovod for each gradient: returns a token for Horovod to reduce, and the context.

        Raises:
            ValueError: `tensor` is not the gradient of a parameter of a Horovod optimizer, or the optimizer is one
                that this compressor cannot serve.
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
    def decompress(tensor: torch.Tensor, ctx: Context | None) -> torch.Tensor:
        """Called by Horovod with a reduced token: returns the gradient to apply, in the shape of the parameter."""
        if ctx is None:  # Horovod reduced the gradient itself: a sparse one, or that of a single rank
            return tensor
        if not ctx.compressor._finished:
            ctx.compressor._finish_step()
        return ctx.gradient.tensor

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain tensors, numbers and strings: `torch.load(..., weights_only=True)` reads it."""
        self._find_place()
        state = self._exchange.state()
        if "residual" in state:
            state["residual"] = {name: torch.as_tensor(part).clone() for name, part in state["residual"].items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state that `state_dict()` returned; to be called on all ranks.

        The next exchange finds out whether it fits the model: if it does not, all ranks raise the same error.

        Args:
            state: what this rank saved. That of another rank will do, but then what was held back here is lost. After
                training with another number of ranks: a list of the states that all of them saved, the same on all
                ranks, which keeps the sum of all that was held back.

        Raises:
            ValueError: it was not saved by a compressor of this method, or the list is not complete.
        """
        self._find_place()
        self._exchange.load(state)

    def residual_norm(self) -> float | None:
        """The 2-norm of what this rank holds back; None for a method that holds nothing back. It reads all of it."""
        return self._exchange.residual_norm()

    def reset(self) -> None:
        """Forget all state, as if no step had been taken; to be called on all ranks."""
        self._exchange.reset()

    # What an elastic state has us do: see `_elastic`

    def commit(self) -> dict[str, Any]:
        """A copy of the state of this rank, for `restore`."""
        state = copy.deepcopy(self._exchange.state())
        state.pop("rank", None)  # which may be another one after a reset
        return state

    def restore(self, committed: dict[str, Any] | None) -> None:
        """Go back to what `commit` returned; None: to a state before the first step."""
        self._exchange.load(committed or {"method": self._exchange.method, "step": 0})

    def rejoin(self) -> None:
        """Horovod was shut down, and has begun anew: meet the ranks again."""
        if self._running:
            self._running.forget()
        self._begin_step()
        self._collectives = None
        self._given_up = 0
        self._find_place()
        self._exchange.rejoin()

    # Between the steps

    def _exchanges(self) -> list[Exchange]:
        return [self._exchange]

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
        op = getattr(optimizer, "op", hvd.Adasum)  # Horovod's optimizer for Adasum has no `op`
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(self).__name__} does not work with op={operation(hvd, op)}: use op=hvd.Average or op=hvd.Sum, "
                "or compression=hvd.Compression.fp16"
            )
        self._optimizer = weakref.ref(optimizer)
        self._collectives = None
        optimizer.synchronize = partial(_synchronize, self, optimizer.synchronize)
        before_unscaling[optimizer] = self._check_exchanged

    def _bound_optimizer(self) -> Any:
        """The optimizer; None if there is none yet, or none any more."""
        return self._optimizer() if self._optimizer else None

    def _find_place(self) -> None:
        """Which rank this is, among how many, as far as that is known."""
        optimizer = self._bound_optimizer()
        process_set = optimizer.process_set if optimizer else hvd.global_process_set
        if hvd.is_initialized() and process_set.included():
            self._exchange.place = process_set.rank(), process_set.size()

    def _before_synchronize(self, optimizer: Any) -> None:
        """Called on all ranks, before any of them waits for another's tokens."""
        self._meet(optimizer)

    def _meet(self, optimizer: Any) -> None:
        """Once: do all ranks train the same parameters? If they do not, Horovod would wait for ever.

        Until they are known to agree, the ranks' names for their collectives must not depend on the model; save that
        several threads may train a model each, whose parameters then have different names, as Horovod wants it.
        """
        if self._collectives:
            return
        trained = {name: p for p, name in optimizer._parameter_names.items() if p in optimizer._requires_update}
        specs = [spec_of(name, p) for name, p in sorted(trained.items())]
        first = specs[0].name if specs else ""
        in_main_thread = threading.current_thread() is threading.main_thread()
        collectives = Collectives(
            "horovod_sparse" if in_main_thread else f"horovod_sparse.{first}", optimizer.process_set
        )
        Running(collectives, self._exchange.meet(specs), "meeting").result()
        collectives.name = f"horovod_sparse.{self._exchange.method}.{first}"
        self._collectives = collectives

    def _apply_alone(self, optimizer: Any) -> None:
        """The only rank that is left, or that has loaded a state, need hold nothing back.

        Before a step with a closure, there are no gradients to add to.
        """
        named = {name: p for p, name in optimizer._parameter_names.items() if p.requires_grad}
        if not self._exchange.holds_back or all(p.grad is None for p in named.values()):
            return
        for name, p in named.items():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach()
            gradient = gradient.to_dense() if gradient.is_sparse and optimizer.sparse_as_dense else gradient
            if not gradient.is_sparse:
                self._add(spec_of(name, gradient), gradient)
        arrays, out = self._flatten()
        update = self._exchange.alone(arrays, out, self._learning_rates(), self._loss_scale() or 1.0)
        self._write(update, 1)
        for spec, gradient in self._gradients.items():
            named[spec.name].grad = gradient.tensor
        self._begin_step()

    def _check_exchanged(self) -> None:
        """Raise RuntimeError if there are gradients that are being exchanged."""
        if self._gradients:
            raise RuntimeError(
                "the gradients are being exchanged: call optimizer.synchronize() before scaler.unscale_(optimizer) "
                "or scaler.step(optimizer), and the latter inside optimizer.skip_synchronize()"
            )

    # One step

    def _begin_step(self) -> None:
        self._finished = False
        self._gradients: dict[TensorSpec, FlatGradient] = {}
        self._new: dict[str, torch.nn.Parameter] = {}  # of which Horovod does not know yet
        self._scale: float | None = None  # by what the loss was multiplied, once that is known
        self._scaled_passes = passes_so_far()
        self._running: Running | None = None

    def _abandon_step(self) -> None:
        """The step will never be applied: say, the optimizer's state was loaded after the backward pass."""
        if self._running:
            self._running.give_up(GIVE_UP_S)
        self._begin_step()
        self._given_up += 1  # part of the next step's name, which a rank where this step never began must not meet

    def _compress(self, tensor: torch.Tensor, caller: Caller) -> tuple[torch.Tensor, Context | None]:
        optimizer, parameter, synchronizing = caller
        if optimizer.process_set.size() == 1:
            return tensor, None
        if synchronizing:
            self._meet(optimizer)
        elif self._scale is None:
            scaler = current_scaler()
            self._scale = scaler.get_scale() if scaler else 1.0
        self._finished = False
        if self._gradients and not optimizer._handles:  # Horovod has forgotten the gradients that it was given
            self._abandon_step()
        name = optimizer._parameter_names[parameter]
        if name in self._ever_sparse:  # no gradient on any rank this time: Horovod reduces zeros
            return tensor, None
        tensor = tensor.detach()
        spec = spec_of(name, tensor)
        self._add(spec, tensor)
        algorithm = self._exchange.algorithm
        if algorithm and self._collectives and len(self._gradients) == len(algorithm.layout.tensors):
            if synchronizing:
                self._start_exchange(self._collectives)
            else:  # at the end of the backward pass, when it holds no more of its gradients
                start = partial(self._start_if_begun, self._collectives, self._gradients)
                torch.autograd.Variable._execution_engine.queue_callback(start)
        return TOKEN.to(tensor.device, copy=True), Context(self, self._gradients[spec])

    def _add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        self._gradients[spec] = FlatGradient(tensor, usable=self._check(spec, tensor))

    def _check(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        """Whether the gradient can be compressed; if it cannot, note why."""
        if tensor.is_sparse:
            problem = (
                f"the gradient of {spec} is sparse, and Horovod reduces no such gradients in groups, nor of parameters "
                "that come later: pass sparse_as_dense=True to hvd.DistributedOptimizer, and no groups"
            )
        elif tensor.dtype not in FLOATING:
            problem = (
                f"{spec}: {type(self).__name__} compresses float16, bfloat16, float32 and float64: give the parameter "
                "one of these dtypes, or use compression=hvd.Compression.none"
            )
        else:
            return True
        self._exchange.note(problem)
        return False

    def _add_parameters(self) -> None:
        """Find the parameters whose gradient Horovod does not hand over, rightly or wrongly."""
        optimizer = self._bound_optimizer()
        for p, name in optimizer._parameter_names.items():
            if p.grad is not None and p.grad.is_sparse and not optimizer.sparse_as_dense:
                self._ever_sparse.add(name)
        self._new = unlisted(optimizer)
        for name, p in self._new.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse and optimizer.sparse_as_dense:
                p.grad = p.grad.to_dense()
            self._add(spec_of(name, p.grad), p.grad.detach())

    def _given(self, spec: TensorSpec) -> Array | None:
        """What became a gradient's memory in an earlier step, if it is still used."""
        given = self._handed_over.get(spec)
        return given and given()

    def _start_if_begun(self, collectives: Collectives, gradients: dict[TensorSpec, FlatGradient]) -> None:
        """Start the exchange of `gradients`, unless that was done, or given up, in the meantime."""
        if self._running is None and self._gradients is gradients:
            self._start_exchange(collectives)

    def _start_exchange(self, collectives: Collectives) -> None:
        """Start what does not depend on other ranks; wait for nothing."""
        collectives.count(TOKEN.nbytes * len(self._gradients))
        self._add_parameters()
        device = self._gradients[min(self._gradients)].tensor.device
        for spec in self._exchange.algorithm.layout.tensors if self._exchange.algorithm else ():
            if spec.name in self._ever_sparse and spec not in self._gradients:  # was zero and dense in the first step
                self._gradients[spec] = FlatGradient(torch.zeros(spec.shape, device=device), usable=True)
        arrays, out = self._flatten()
        units = self._learning_rates(), self._loss_scale()
        step = self._exchange.step(arrays, collectives.rank, collectives.world_size, out, *units)
        self._running = Running(collectives, step, f"first_round{self._given_up or ''}")

    def _flatten(self) -> tuple[dict[TensorSpec, Array], dict[TensorSpec, Array]]:
        """The gradients as the core takes them, and memory for a step to use."""
        dtype, device = accumulator_dtype(self._gradients), self._gradients[min(self._gradients)].tensor.device
        arrays = {
            spec: gradient.flatten(dtype, device, self._given(spec)) for spec, gradient in self._gradients.items()
        }
        self._layout = FlatLayout(arrays)
        return arrays, {spec: gradient.out for spec, gradient in self._gradients.items()}

    def _learning_rates(self) -> dict[TensorSpec, float] | None:
        """Those of this step's tensors, if what is held back is to follow them."""
        optimizer = self._bound_optimizer()
        plain = isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
        if not follows_learning_rate(self._exchange.settings, plain):
            return None
        rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for p, name in optimizer._parameter_names.items()} | self._new
        by_name = {name: rates[p] for name, p in named.items() if p in rates}
        return {spec: by_name.get(spec.name, 0.0) for spec in self._layout.tensors}  # 0: the optimizer has it no more

    def _loss_scale(self) -> float | None:
        """By what this step's loss was multiplied; None if that is not known, for no hook has run.

        With several passes a step, the hooks that would tell run in the last one, which may be left out; on a single
        rank, there are none.
        """
        optimizer = self._bound_optimizer()
        alone = optimizer.process_set.size() == 1
        if self._scale is None and (alone or optimizer.backward_passes_per_step > 1):
            scaler = scaler_since(self._scaled_passes)
            self._scale = scaler.get_scale() if scaler else None
        return self._scale

    def _digests(self) -> dict[str, int]:
        """A digest of each parameter."""
        optimizer = self._bound_optimizer()
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        return {name: digest(p) for p, name in optimizer._parameter_names.items() if p in parameters}

    def _finish_step(self) -> None:
        """Run the exchange to its end, and write the update into the gradients.

        Raises:
            RuntimeError: a gradient has changed since the exchange was started; or an error of the exchange.
        """
        collectives = self._collectives
        assert collectives
        try:
            if self._running is None:
                self._start_exchange(collectives)
            assert self._running
            update = self._running.result()
            changed = [spec.name for spec in self._layout.tensors if self._gradients[spec].changed]
            if changed:
                problem = (
                    f"the gradient of {changed[0]!r} was changed after the backward pass, while it was exchanged. "
                    "Call optimizer.synchronize() before whatever changes gradients, such as clip_grad_norm_, then "
                    "optimizer.step() inside optimizer.skip_synchronize()"
                )
                self._exchange.note(problem)
                raise RuntimeError(problem)
        except BaseException:  # this step cannot be finished; should there be another one, it begins with a talk
            self._exchange.something_to_say = True
            self._begin_step()
            raise
        self._write(update, collectives.world_size)
        optimizer = self._bound_optimizer()
        for name, p in self._new.items():
            p.grad = self._gradients[spec_of(name, p)].tensor
            enlist(optimizer, name, p)
        self._add_bytes(collectives)
        self._begin_step()
        self._finished = True

    def _write(self, update: Any, world_size: int) -> None:
        """Turn the gradients into those to apply."""
        gradients = [self._gradients[spec] for spec in self._layout.tensors]
        if update is None:  # as Horovod would have it: a gradient that is not finite on one rank is so on all
            for gradient in gradients:
                gradient.tensor.fill_(float("nan"))
            return
        scale = world_size if self._bound_optimizer().op == hvd.Sum else 1
        for spec, gradient, array in zip(self._layout.tensors, gradients, update.gradient, strict=True):
            if isinstance(gradient.store(array, scale), np.ndarray):
                self._handed_over[spec] = weakref.ref(array)

    def _add_bytes(self, collectives: Collectives) -> None:
        """Add what was sent since the last call to the last step's figures."""
        stats = self._exchange.stats
        if stats:
            self._exchange.stats = stats._replace(bytes_sent=stats.bytes_sent + collectives.take_count())


def _synchronize(compressor: SparseCompressor, synchronize: Callable[[], None]) -> None:
    """In the place of `optimizer.synchronize`: first what must happen before a rank waits for another's tokens."""
    optimizer = compressor._bound_optimizer()
    included = optimizer.process_set.included()
    if included and optimizer.process_set.size() > 1:
        compressor._before_synchronize(optimizer)
    synchronize()
    if included and optimizer.process_set.size() == 1:
        compressor._apply_alone(optimizer)


class MiCROCompressor(MiCROSettings, SparseCompressor):
    __doc__ = MiCROSettings.__doc__


class TopKCompressor(TopKSettings, SparseCompressor):
    __doc__ = TopKSettings.__doc__


class QSGDCompressor(QSGDSettings, SparseCompressor):
    __doc__ = QSGDSettings.__doc__


class A2SGDCompressor(A2SGDSettings, SparseCompressor):
    __doc__ = A2SGDSettings.__doc__

    _exchange: A2SGDExchange

    def _digests(self) -> dict[str, int]:
        return {}  # the replicas differ, by design

    def synchronize_parameters(self) -> None:
        """Average the parameters over the ranks: bitwise the same on all of them afterwards. To be called on all.

        Raises:
            RuntimeError: no optimizer uses this compressor yet, or some ranks have called `hvd.join()`.
        """
        collectives = self._averaging()
        if collectives:
            check_present(collectives.present(), collectives.world_size, "the others are to average the parameters")
            self._average(collectives)

    def _averaging(self) -> Collectives | None:
        """What averages the parameters; None on a single rank."""
        optimizer = self._bound_optimizer()
        if optimizer is None:
            raise RuntimeError(
                "synchronize_parameters() has no parameters before the first step: call "
                "get_compressor(optimizer).synchronize_parameters()"
            )
        process_set = optimizer.process_set
        if not process_set.included() or process_set.size() == 1:
            self._exchange.averaging_due = False
            return None
        return self._collectives or Collectives("horovod_sparse.a2sgd", process_set)

    def _average(self, collectives: Collectives) -> None:
        optimizer = self._bound_optimizer()
        self._exchange.averaging_due = False
        parameters = (p for group in optimizer.param_groups for p in group["params"] if p.is_floating_point())
        ordered = sorted(parameters, key=lambda p: str(optimizer._parameter_names.get(p)))
        collectives.average_([p.data for p in ordered])
        self._add_bytes(collectives)

    def _bind(self, optimizer: Any) -> None:
        first_time = self._bound_optimizer() is not optimizer
        super()._bind(optimizer)
        if first_time:
            optimizer.register_step_post_hook(lambda *_: self._average_if_due())

    def _average_if_due(self) -> None:
        collectives = self._averaging() if self._exchange.averaging_due else None
        if collectives and collectives.present() == collectives.world_size:  # else it is for when all are back
            self._average(collectives)

    def _before_synchronize(self, optimizer: Any) -> None:
        super()._before_synchronize(optimizer)
        # Still due if this rank did not take the last step, say for its loss scaler. Ranks that did are waiting.
        self._average_if_due()


_compressors: weakref.WeakKeyDictionary[Any, SparseCompressor] = weakref.WeakKeyDictionary()


def get_compressor(optimizer: Any) -> Any:
    """The compressor of `horovod_sparse` at work in a `DistributedOptimizer`.

    Raises:
        TypeError: the optimizer uses none of them.
    """
    compression = getattr(optimizer, "_compression", None)
    if isinstance(compression, SparseCompressor):
        compressor = compression
    elif compression and is_or_makes(compression, SparseCompressor):
        if optimizer not in _compressors:
            _compressors[optimizer] = compression()
        compressor = _compressors[optimizer]
    else:
        raise TypeError(
            "get_compressor takes an optimizer made by hvd.DistributedOptimizer(..., compression=MiCROCompressor), or "
            f"another of horovod_sparse, not a {type(optimizer).__name__} with compression={compression!r}"
        )
    compressor._bind(optimizer)
    return compressor
