"""The compressors that `compression=` takes in TensorFlow.

Stock Horovod calls `compress` and `decompress` while a graph is traced, for one tensor, or for each of a group. Each in
a branch of its own, they cannot see the whole model, so there a method works on what Horovod reduces together, and
`compress` puts the whole exchange into the graph. What it returns for Horovod to reduce is one number that nobody
needs, so a graph does not even reduce it. The drop-in tape and optimizers give `reduce` all gradients of the model.

All state lives in Python, in an `Exchange` for each set of tensors that is reduced together; a graph finds it when it
runs, by the identity of the variables. So tracing again loses nothing, and models that share a graph do not share it.

TensorFlow runs what has side effects, as our exchange has, in the order of the program, so all ranks run the same
exchanges in the same order. A graph that differs between ranks breaks that: see `Slot.step`.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import posixpath
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_sparse import _elastic
from horovod_sparse._compressor import (
    A2SGDSettings,
    MiCROSettings,
    NotCopied,
    QSGDSettings,
    TopKSettings,
    is_or_makes,
    on_class_or_instance,
    operation,
    warn,
)
from horovod_sparse.core import StepStats, TensorSpec
from horovod_sparse.core.checkpoint import checked
from horovod_sparse.core.collectives import Array
from horovod_sparse.core.exchange import A2SGDExchange, Exchange
from horovod_sparse.core.step import Step
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.averaging import average
from horovod_sparse.tensorflow.caller import Call, find_call
from horovod_sparse.tensorflow.graphs import is_for_session
from horovod_sparse.tensorflow.reduction import Reduction, Slot, count

FLOATING = ("float16", "bfloat16", "float32", "float64")

# Fewer elements than this gain nothing from two more rounds; stock Horovod reduces such a tensor as it is.
SMALL = 1024


class Trained(NamedTuple):
    """Variables whose gradients are reduced together."""

    reduction: Reduction
    variables: list[weakref.ref[Any]]
    slot: Any
    """The key of their slot."""


class Parts(NamedTuple):
    """What stock Horovod reduces one after the other in one graph: the parts of a model."""

    reductions: list[Reduction]
    dense: dict[str, TensorSpec]
    """What it reduces as it is."""


class SparseCompressor(NotCopied, hvd.compression.Compressor):  # type: ignore[misc]
    """What the compressors share: life inside TensorFlow's graphs."""

    _hvd = hvd
    small = 0
    """Stock Horovod reduces a tensor with fewer elements as it is."""

    def __init__(self, make_exchange: Callable[[], Exchange]) -> None:
        self.settings = make_exchange().settings
        self._make_exchange = make_exchange
        self.slots: dict[Any, Slot] = {}
        self._waiting: list[Exchange] = []  # with a loaded state, for the slots to come
        self._reductions: dict[Any, Reduction] = {}
        self._trained: dict[tuple[int, ...], Trained] = {}
        self._models: weakref.WeakKeyDictionary[Any, Parts] = weakref.WeakKeyDictionary()
        self._met: set[Any] = set()  # the process sets whose ranks are known to have the same settings
        self._process_set: Any = hvd.global_process_set  # the last one
        self._last_slot: Any = None  # its key
        self._mortal: set[Any] = set()  # the slots' keys that are forgotten with their variables
        self.last: Reduction | None = None  # the last one that ran
        self._group: list[tuple[Any, Any]] = []
        _elastic.followers.add(self)

    # The public surface

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step, over all tensors; None before the first, and on a single rank.

        Where Horovod has us reduce the model in parts, each with a threshold of its own, `threshold` is None.
        """
        if not self.last:
            return None
        parts = next((p for p in self._models.values() if self.last in p.reductions), Parts([self.last], {}))
        slots = [reduction.slot for reduction in parts.reductions]
        every = [slot.exchange.stats for slot in slots if slot and slot.exchange.stats]
        dense = parts.dense.values()
        if len(every) < 2 and not dense:
            return every[0] if every else None
        last = every[-1]
        numel = sum(stats.numel for stats in every) + sum(spec.numel for spec in dense)
        selected = None
        if last.selected is not None:
            selected = sum(stats.selected or 0 for stats in every) + sum(spec.numel for spec in dense)
        return StepStats(
            step=max(stats.step for stats in every),
            numel=numel,
            target_density=last.target_density,
            density=None if selected is None else selected / numel,
            selected=selected,
            threshold=None,
            bytes_sent=sum(s.bytes_sent for s in every) + sum(spec.nbytes for spec in dense),
            skipped=any(stats.skipped for stats in every),
            dense_bytes=sum(s.dense_bytes for s in every) + sum(spec.nbytes for spec in dense),
            selection_s=sum(s.selection_s for s in every),
            exchange_s=sum(s.exchange_s for s in every),
        )

    @property
    def method(self) -> str:
        """Its name: "micro", "a2sgd", "topk" or "qsgd"."""
        return self._make_exchange().method

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number, and the number of ranks, in the last step."""
        slot = self.last and self.last.slot
        return slot.exchange.place if slot else (0, 1)

    @on_class_or_instance
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self_or_class: Any, tensor: Any) -> Any:
        """Called by Horovod for each gradient: returns what it shall reduce in its place, and the context.

        Raises:
            ValueError: we cannot do what Horovod was asked to do.
        """
        return working(self_or_class)._compress(tensor)

    @staticmethod
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Called by Horovod with what it has reduced: returns the gradient to apply."""
        if ctx is None:  # Horovod has reduced it as it is
            return tensor
        return tf.cast(tensor, ctx) if isinstance(ctx, tf.DType) else ctx

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as numpy arrays, numbers and strings."""
        states = [self._placed(exchange).state() for exchange in self._exchanges()]
        for state in states:
            if "residual" in state:
                state["residual"] = {name: np.array(part) for name, part in state["residual"].items()}
        return states[0] if len(states) == 1 else {"method": self.method, "exchanges": states}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state that `state_dict()` returned; to be called on all ranks.

        The next step finds out whether it fits the model: if it does not, all ranks raise the same error.

        Args:
            state: what this rank saved. That of another rank will do, but then what was held back here is lost. After
                training with another number of ranks: a list of the states that all of them saved, the same on all
                ranks, which keeps the sum of all that was held back.

        Raises:
            ValueError: it was not saved by a compressor of this method, or the list is not complete.
        """
        given = checked(state, self.method)
        parts = [part.get("exchanges", [part]) for part in given]  # of several sets of tensors
        if len({len(of_rank) for of_rank in parts}) != 1:
            raise ValueError(
                f"load_state_dict: the states are of {sorted(map(len, parts))} sets of tensors, so not of the same "
                "model. Give those that all ranks saved together"
            )
        loaded = []
        for of_ranks in zip(*parts, strict=True):
            loaded.append(self._placed(self._make_exchange()))
            loaded[-1].load(of_ranks[0] if isinstance(state, Mapping) else of_ranks)
        self._take(loaded)

    def _take(self, loaded: list[Exchange]) -> None:
        """Go on with these, in the order in which the sets of tensors have come, or will come."""
        self.reset()
        for key, slot in self.slots.items():
            if loaded:
                slot.exchange = loaded.pop(0)
                slot.exchange.digests = partial(self._digests, key)
        self._waiting = loaded

    def residual_norm(self) -> float | None:
        """The 2-norm of what this rank holds back; None for a method that holds nothing back. It reads all of it."""
        norms = [norm for exchange in self._exchanges() if (norm := exchange.residual_norm()) is not None]
        return math.hypot(*norms) if norms else None

    def reset(self) -> None:
        """Forget all state, as if no step had been taken; to be called on all ranks."""
        self._waiting = []
        for exchange in self._exchanges():
            exchange.reset()

    # What an elastic state has us do: see `_elastic`

    def commit(self) -> list[dict[str, Any]]:
        """A copy of the state of this rank, for `restore`."""
        states = [copy.deepcopy(exchange.state()) for exchange in self._exchanges()]
        for state in states:
            state.pop("rank", None)  # which may be another one after a reset
        return states

    def restore(self, committed: list[dict[str, Any]] | None) -> None:
        """Go back to what `commit` returned; None: to a state before the first step."""
        exchanges = [self._make_exchange() for _ in committed or ()]
        for exchange, state in zip(exchanges, committed or (), strict=True):
            exchange.load(state)
        self._take(exchanges)

    def rejoin(self) -> None:
        """Horovod was shut down, and has begun anew: meet the ranks again."""
        self._met.clear()
        for slot in self.slots.values():
            self._placed(slot.exchange)
            slot.rejoin()

    # For what puts us to work

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        op: Any,
        process_set: Any,
        learning_rate: Any = None,
        loss_scale: Any = None,
    ) -> list[Any]:
        """Reduce the dense gradients of a model's variables, the whole model in one.

        What is held back follows `learning_rate`, a scalar tensor, unless that is None. The loss was multiplied by
        `loss_scale`, unless that is None.

        Raises:
            ValueError: the gradients cannot be reduced in this way, or here.
        """
        units = {"learning_rate": learning_rate, "loss_scale": loss_scale}
        return self._reduce(Call(gradients, variables, op, process_set, **units))

    def average_if_due(self, variables: Sequence[Any]) -> None:
        """Once a step has been applied: average its variables over the ranks, if the method wants that now."""

    def slot(self, key: bytes, specs: tuple[TensorSpec, ...], process_set: Any) -> Slot:
        """The state of a set of tensors."""
        found = key, specs
        if found not in self.slots:
            exchange = self._waiting.pop(0) if self._waiting else self._make_exchange()
            exchange.digests = partial(self._digests, found)
            self.slots[found] = Slot(exchange, specs, process_set)
        if found != self._last_slot:
            self._last_slot = found
            self._gather_held_back(found)
        return self.slots[found]

    def _gather_held_back(self, key: Any) -> None:
        """What other slots hold back of a slot's variables moves there: some are trained with others than before."""
        exchange = self.slots[key].exchange
        if exchange.algorithm is None and exchange.holds_back:  # a state was loaded for it
            return
        names = {id(v): name for name, v in self._variables_of(key)}
        moved: dict[str, tuple[Any, float]] = {}
        latest: dict[str, Any] = {"step": 0}
        for other in (other for other in self.slots if other != key):
            if not self.slots[other].exchange.holds_back:
                continue
            state = self.slots[other].exchange.state()
            for name, v in self._variables_of(other):
                if id(v) in names:
                    part = state["residual"][name]
                    moved[names[id(v)]] = part.copy(), state.get("rates", {}).get(name, 0.0)
                    part[...] = 0
                    latest = max(latest, state, key=lambda s: s["step"])
        if not moved:
            return
        if not exchange.holds_back:
            zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in key[1]}
            residual = {**zeros, **{name: part for name, (part, _) in moved.items()}}
            rates = {name: rate for name, (_, rate) in moved.items()}
            latest.pop("rank", None)  # this one, whichever it is
            exchange.load({**latest, "residual": residual, "rates": rates})
            return
        state = exchange.state()
        for name, (part, rate) in moved.items():
            own = state["rates"].get(name, 0.0)
            state["residual"][name] += part * (rate / own if rate > 0 and own > 0 else 1.0)

    def _placed(self, exchange: Exchange) -> Exchange:
        """An exchange that knows which rank this is, among how many, as far as that is known."""
        if hvd.is_initialized() and self._process_set.included():
            exchange.place = self._process_set.rank(), self._process_set.size()
        return exchange

    def _variables_of(self, key: Any) -> list[tuple[str, Any]]:
        """The variables of a slot, with their names in its layout."""
        trained = next((trained for trained in self._trained.values() if trained.slot == key), None)
        pairs = zip(key[1], trained.variables, strict=True) if trained else ()
        return [(spec.name, v()) for spec, v in pairs if v() is not None]

    def step(
        self,
        slot: Slot,
        gradient: dict[TensorSpec, Array],
        out: dict[TensorSpec, Array],
        units: Mapping[str, Any],
        how: dict[str, Any],
        process_set: Any,
    ) -> Step[Any]:
        """One step of a set of tensors. Before the first of all, the ranks compare notes."""
        meet = process_set not in self._met
        update = yield from slot.step(gradient, out, units, how, meet, process_set.rank(), process_set.size())
        self._met.add(process_set)
        return update

    # How it is done

    def _digests(self, key: Any) -> dict[str, int]:
        """Digests of the variables of a slot, by their names in its layout."""
        pairs = self._variables_of(key)
        return {name: crc32(np.ascontiguousarray(v.numpy()).data.cast("B")) for name, v in pairs}

    def _exchanges(self) -> list[Exchange]:
        return [slot.exchange for slot in self.slots.values()] + self._waiting

    def _compress(self, tensor: Any) -> tuple[Any, Any]:
        call = find_call(tensor)
        if not tensor.dtype.is_floating:
            return tensor, None
        # Stock Horovod calls `compress` for all tensors of a group, before anything else.
        if not any(member is tensor for member, _ in self._group):
            self._group = self._compress_group(call)
        i = next(i for i, (member, _) in enumerate(self._group) if member is tensor)
        _, reduced = self._group.pop(i)
        if reduced is None:  # Horovod knows no bfloat16
            return (tf.cast(tensor, tf.float32), tensor.dtype) if tensor.dtype == tf.bfloat16 else (tensor, None)
        return tf.cast(tf.reshape(reduced, [-1])[:1], tf.float32), reduced

    def _compress_group(self, call: Call) -> list[tuple[Any, Any]]:
        """The floating tensors of a group, with the reduced ones; None for what Horovod shall reduce itself."""
        floating = [i for i, tensor in enumerate(call.tensors) if tensor.dtype.is_floating]
        tensors, variables = [call.tensors[i] for i in floating], [call.variables[i] for i in floating]
        call = call._replace(tensors=tensors, variables=variables)
        specs = specs_of(call)
        if sum(spec.numel for spec in specs) < self.small:
            if call.graph is not None:
                self._parts(call.graph).dense.update((spec.name, spec) for spec in specs)
            return [(tensor, None) for tensor in tensors]
        return list(zip(tensors, self._reduce(call), strict=True))

    def _parts(self, graph: Any) -> Parts:
        return self._models.setdefault(graph, Parts([], {}))

    def _reduce(self, call: Call) -> list[Any]:
        method = type(self).__name__
        if call.op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{method} does not work with op={operation(hvd, call.op)}: use op=hvd.Average or op=hvd.Sum, or "
                "compression=hvd.Compression.fp16"
            )
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(
                f"{method} cannot work in a function that XLA compiles, as Horovod cannot: pass jit_compile=False to "
                "model.compile() or tf.function()"
            )
        if call.learning_rate is None and self.settings.get("follow_learning_rate"):
            raise ValueError(
                "follow_learning_rate=True: only the DistributedOptimizer of horovod_sparse.tensorflow.keras knows the "
                "learning rate. Use that, or leave follow_learning_rate out"
            )
        specs = specs_of(call)
        for spec in specs:
            if spec.dtype not in FLOATING:
                raise ValueError(
                    f"{spec}: {method} compresses {', '.join(FLOATING)}: give the variable one of these dtypes, or use "
                    "compression=hvd.Compression.none"
                )
        self._process_set = call.process_set
        alone = not call.process_set.included() or call.process_set.size() == 1
        if not specs or (alone and not _elastic_job() and not self._waiting):
            return [tensor if call.factor == 1 else tensor * call.factor for tensor in call.tensors]
        kind = (specs, call.process_set, call.op, call.factor)
        if kind not in self._reductions:
            self._reductions[kind] = Reduction(self, *kind)
        reduction = self._reductions[kind]
        if call.graph is not None and reduction not in self._parts(call.graph).reductions:
            self._parts(call.graph).reductions.append(reduction)
        if not call.name and any(v is None for v in call.variables):
            self._warn_of_no_name(call.place)
        key = key_of(call.variables, call.name or call.place)
        first = None
        if all(v is not None for v in call.variables):
            variables = [tf_variable(v) for v in call.variables]
            trained = Trained(reduction, [*map(weakref.ref, variables)], self._slot_key(variables, specs))
            self._trained[tuple(map(id, variables))] = trained
            first = self._before_reduction(trained, key, variables)
        with tf.control_dependencies([] if first is None else [first]):
            return reduction(key, call.tensors, call.learning_rate, call.loss_scale)

    def _warn_of_no_name(self, place: str) -> None:
        """Called where a tensor is told from others only by the place that reduces it."""

    def _slot_key(self, variables: list[Any], specs: tuple[TensorSpec, ...]) -> Any:
        """The key of these variables' slot, which is forgotten with them; None for variables of TensorFlow 1."""
        if is_for_session():
            return None
        with tf.init_scope():
            key = key_of(variables).numpy()
        if (key, specs) not in self._mortal:
            self._mortal.add((key, specs))
            weakref.finalize(variables[0], _forget, weakref.ref(self), key, specs)
        return key, specs

    def _before_reduction(self, trained: Trained, key: Any, variables: list[Any]) -> Any:
        """What has to be done before these variables' gradients are reduced: a tensor that waits for it, or None."""


def _forget(compressor_ref: weakref.ref[SparseCompressor], key: bytes, specs: tuple[TensorSpec, ...]) -> None:
    compressor = compressor_ref()
    if compressor:
        compressor.slots.pop((key, specs), None)
        compressor._mortal.discard((key, specs))
        if not any(specs == others for _, others in compressor._mortal):
            for kind in [kind for kind in compressor._reductions if kind[0] == specs]:
                compressor._reductions.pop(kind).release()
        for ids in [ids for ids, trained in compressor._trained.items() if trained.variables[0]() is None]:
            del compressor._trained[ids]


class ResidualCompressor(SparseCompressor):
    """What the compressors share that hold something back."""

    small = SMALL

    def _warn_of_no_name(self, place: str) -> None:
        warn(
            hvd,
            f"hvd.allreduce(..., compression={type(self).__name__}) without name=, at {place.split()[0]}: all tensors "
            "of this shape that are reduced there share what it holds back. Give each tensor a name of its own",
            stacklevel=2,
        )


class MiCROCompressor(MiCROSettings, ResidualCompressor):
    __doc__ = MiCROSettings.__doc__


class TopKCompressor(TopKSettings, ResidualCompressor):
    __doc__ = TopKSettings.__doc__


class QSGDCompressor(QSGDSettings, SparseCompressor):
    __doc__ = QSGDSettings.__doc__

    small = SMALL


class A2SGDCompressor(A2SGDSettings, SparseCompressor):
    __doc__ = A2SGDSettings.__doc__

    def _digests(self, key: Any) -> dict[str, int]:
        return {}  # the replicas differ, by design

    @property
    def averaging_due(self) -> bool:
        """Whether the last step was one of each `sync_every`, and the parameters have not been averaged since."""
        return any(exchange.averaging_due for exchange in self._exchanges() if isinstance(exchange, A2SGDExchange))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def synchronize_parameters(self, variables: Sequence[Any] | None = None) -> None:
        """Average the parameters over the ranks: bitwise the same on all of them afterwards. To be called on all.

        Args:
            variables: the parameters; None: all whose gradients this compressor has reduced.

        Raises:
            RuntimeError: the parameters are not known.
        """
        every = list(self._trained.values())
        if variables is None:
            if not every or len(every) < len(self.slots):
                if not _elastic_job() and hvd.size() == 1:
                    return
                raise RuntimeError(
                    "synchronize_parameters() does not know all parameters: call it after the first step, or as "
                    "synchronize_parameters(model.trainable_variables)"
                )
            given = [v() for trained in every for v in trained.variables if v() is not None]
        else:
            given = [tf_variable(v) for v in variables]
        ids = set(map(id, given))
        among = [trained for trained in every if ids.issuperset(id(v()) for v in trained.variables)]
        of_set: dict[Any, list[Any]] = {}
        for variable in {id(v): v for v in given}.values():
            sets = [t.reduction.process_set for t in every if any(v() is variable for v in t.variables)]
            of_set.setdefault(sets[0] if sets else self._process_set, []).append(variable)
        for process_set, members in of_set.items():
            if process_set.included() and process_set.size() > 1:
                average(members, process_set, self._count)
        for trained in among:
            slot = self.slots.get(trained.slot)
            if slot and isinstance(slot.exchange, A2SGDExchange):
                slot.exchange.averaging_due = False

    def _count(self, nbytes: int) -> None:
        if self.last and self.last.slot:
            count(self.last.slot.exchange, nbytes)

    def average_if_due(self, variables: Sequence[Any]) -> None:
        variables = [tf_variable(v) for v in variables]
        known = self._trained.get(tuple(map(id, variables)))
        if known:
            known.reduction.average_if_due(key_of(variables), variables)

    def _before_reduction(self, trained: Trained, key: Any, variables: list[Any]) -> Any:
        # Still due if nobody has averaged them since the last step was applied.
        return trained.reduction.average_if_due(key, variables)


_defaults: dict[type, SparseCompressor] = {}


def working(compression: Any) -> Any:
    """What does the work where `compression=` was given one of our classes; else what it was given."""
    if isinstance(compression, type) and issubclass(compression, SparseCompressor):
        if compression not in _defaults:
            _defaults[compression] = compression()  # type: ignore[call-arg]
        return _defaults[compression]
    return compression


def _elastic_job() -> bool:
    return os.environ.get("HOROVOD_ELASTIC", "0") != "0"


def tf_variable(variable: Any) -> Any:
    """TensorFlow's own variable, where Keras 3 has wrapped it."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def name_of(variable: Any) -> str:
    """The variable's name, with all of its path; "tensor" for a tensor that a tape watches."""
    if isinstance(variable, tf.Tensor):
        return "tensor"
    return str(getattr(variable, "path", variable.name)).removesuffix(":0")


def specs_of(call: Call) -> tuple[TensorSpec, ...]:
    """The tensors' entries in a layout, each with a name of its own.

    Raises:
        ValueError: the shape of a tensor is not known.
    """
    names = [call.name or "tensor" if variable is None else name_of(variable) for variable in call.variables]
    seen: Counter[str] = Counter()
    specs = []
    for tensor, variable, name in zip(call.tensors, call.variables, _without_common_scope(names), strict=True):
        # In a graph, a gradient's shape may be unknown where its variable's is not.
        shape = tf.TensorShape((tensor if variable is None else variable).shape)
        if not shape.is_fully_defined():
            raise ValueError(
                f"the shape of {name!r} has to be known when it is traced; it is {shape}: fix it, for example with "
                "tf.ensure_shape()"
            )
        seen[name] += 1
        specs.append(TensorSpec(name if seen[name] == 1 else f"{name}#{seen[name]}", tuple(shape), tensor.dtype.name))
    return tuple(specs)


def _without_common_scope(names: list[str]) -> list[str]:
    """The names without the scopes that all are in: Keras 3 leaves the model's name out once it has loaded a model."""
    common = posixpath.commonpath(map(posixpath.dirname, names)) if len(set(names)) > 1 else ""
    return [name[len(common) :].removeprefix("/") for name in names]


def key_of(variables: Sequence[Any], otherwise: str = "") -> Any:
    """A string tensor that is different for different variables, also where they share a graph.

    Where a variable is not known, it is `otherwise`.
    """
    if any(v is None for v in variables):
        return tf.constant(otherwise)
    handles = [v.handle for v in variables if hasattr(v, "handle")]
    if len(handles) < len(variables):  # variables of TensorFlow 1
        return tf.constant(" ".join(name_of(v) for v in variables))
    return tf.raw_ops.StringFormat(inputs=handles, template="{}" * len(handles), placeholder="{}", summarize=3)


def get_compressor(optimizer_or_tape: Any) -> Any:
    """The compressor of `horovod_sparse` at work in a distributed optimizer or tape.

    It may also be given what the tape was given as `compression`: the class, or the instance.

    Raises:
        TypeError: it uses none of them.
    """
    distributed = optimizer_or_tape
    if isinstance(working(distributed), SparseCompressor):
        return working(distributed)
    if not hasattr(distributed, "_allreduce_grads") and hasattr(distributed, "inner_optimizer"):
        distributed = distributed.inner_optimizer  # of a LossScaleOptimizer
    compression = getattr(distributed, "_compression", None)
    if compression is None and hasattr(distributed, "_allreduce_grads"):  # stock Horovod's
        function = distributed._allreduce_grads
        function = getattr(function, "python_function", function)
        compression = inspect.getclosurevars(function).nonlocals["compression"]
    if compression is None or not is_or_makes(compression, SparseCompressor):
        raise TypeError(
            "get_compressor takes an optimizer or a tape that was given compression=MiCROCompressor, or another of "
            f"horovod_sparse, not a {type(optimizer_or_tape).__name__} with compression={compression!r}"
        )
    return working(compression)
