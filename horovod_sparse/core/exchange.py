"""A method at work on one model: its state, and what the ranks have to agree on before they rely on it.

A step begins with a round in which each rank sends the method's first numbers, and before them a 1, for its presence,
and a flag: "I have something to say". It is raised in a first step, after a state was loaded or reset, for a flush, and
for an error. If any rank raises it, all ranks compare notes, then go on together or raise the same error: so an error
on one rank is an error on all of them, in the same step, and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.core import a2sgd, micro, qsgd
from horovod_sparse.core.a2sgd import A2SGD
from horovod_sparse.core.agreement import Notes, agree
from horovod_sparse.core.collectives import Allreduce, Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout, TensorSpec, first_difference
from horovod_sparse.core.micro import MiCRO
from horovod_sparse.core.qsgd import QSGD
from horovod_sparse.core.stats import StepStats
from horovod_sparse.core.step import SettingError, Step, Update, check_density
from horovod_sparse.core.topk import TopK


def check_present(present: float, world_size: int) -> None:
    """Raise RuntimeError, on all ranks left, if some have called `hvd.join()`: Horovod sends zeros in their place."""
    if present < world_size - 0.5:
        raise RuntimeError(
            f"{world_size - round(present)} of {world_size} ranks have called hvd.join(), which no compressor of "
            "horovod_sparse supports: give all ranks the same number of steps, or use compression=hvd.Compression.fp16"
        )


class Exchange:
    """What the methods share. A front end drives `step`, and hands on `stats`.

    Attributes:
        method: its name.
        settings: what it was made with, which has to be the same on all ranks.
        circumstances: what else a front end wants to be the same on all ranks, by name.
        stats: figures of the last step; None before the first.
    """

    method: str

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.circumstances: Mapping[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all state, as if no step had been taken; on all ranks."""
        self.stats: StepStats | None = None
        self.algorithm: Any = None
        self.problem: str | None = None
        self._loaded: Mapping[str, Any] | None = None
        self.something_to_say = True

    def note(self, problem: str) -> None:
        """Keep what is wrong until all ranks meet: an error on one rank alone would leave the others waiting."""
        self.problem = self.problem or problem
        self.something_to_say = True

    def state(self) -> dict[str, Any]:
        """This rank's state as arrays, numbers and strings."""
        if self.algorithm is None:
            return dict(self._loaded) if self._loaded else {"method": self.method, "step": 0}
        return {"method": self.method, "step": self.algorithm.t, **self._save()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned on the same rank; on all ranks.

        The next step finds out whether it fits the model: if it does not, all ranks raise the same error.

        Raises:
            ValueError: the state is not one of this method.
        """
        method = state.get("method") if isinstance(state, Mapping) else type(state).__name__
        if method != self.method:
            raise ValueError(f"load_state_dict: the state is of {method!r}, not of {self.method!r}")
        self.reset()
        self._loaded = state

    def meet(self, specs: Sequence[TensorSpec]) -> Step[None]:
        """Before the first step: do all ranks have the same settings, and train the same tensors?

        Raises:
            RuntimeError: they do not, or some rank has a problem; the same error on all ranks.
        """
        yield from agree(self._notes(specs, None))

    def step(
        self,
        gradient: Mapping[TensorSpec, Array],
        rank: int,
        world_size: int,
        out: Mapping[TensorSpec, Array] | None = None,
        rates: Mapping[TensorSpec, float] | None = None,
    ) -> Step[Update | None]:
        """One step on one rank.

        Args:
            gradient: the flattened gradients of all tensors.
            rank, world_size: this rank's number, and the number of ranks.
            out: memory for as many elements, which is the step's from now on; see `MiCRO.step`.
            rates: the learning rates, if what is held back is to follow them.

        Returns:
            The update, its tensors sorted; None if the gradient of some rank was not finite.

        Raises:
            RuntimeError: some rank has a problem, or the ranks disagree; the same error on all ranks.
        """
        specs = sorted(gradient)
        arrays = [gradient[spec] for spec in specs]
        memory = out and [out[spec] for spec in specs]
        if self.algorithm is None:
            self._begin(FlatLayout(specs), arrays)
        else:
            difference = first_difference(specs, self.algorithm.layout.tensors)
            if difference:
                self.note(
                    f"the model has {difference[0]} where it had {difference[1]} in the steps before. If it was "
                    "changed on purpose, call reset() on the compressor of every rank"
                )
        kernels = kernels_for(arrays[0])
        algorithm = self.algorithm  # this step's, even if the state is reset before the step has ended
        following = {} if rates is None else {"rates": [rates[spec] for spec in specs]}
        method_step = algorithm.step(arrays, rank, world_size, memory, **following)
        request: Array | None = None
        if self.something_to_say:
            size, dtype = algorithm.first_round
            first = kernels.numbers([1, 1] + [0] * size, arrays[0], dtype)
        else:
            request = next(method_step).array
            head = kernels.numbers([1, 0], request, str(request.dtype).removeprefix("torch."))
            first = kernels.join([head, request])
        answer = yield Allreduce(first)
        present, flags = answer[:2].tolist()
        check_present(present, world_size)
        if flags:
            all_notes = yield from agree(self._notes(specs, algorithm))
            if self.algorithm is algorithm:
                self.something_to_say = False
                self._loaded = None
                self._heed(all_notes)
            answer = yield next(method_step) if request is None else Allreduce(request)
        else:
            answer = answer[2:]
        update: Update | None = yield from continued(method_step, answer)
        self.stats = self._make_stats(algorithm, update)
        return update

    def _begin(self, layout: FlatLayout, arrays: Sequence[Array]) -> None:
        self.algorithm = self._make_algorithm(layout)
        if self._loaded:
            try:
                self.algorithm.t = int(self._loaded["step"])
                self._restore(self._loaded, arrays)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                self.note(f"the loaded state does not fit: {error}")

    def _notes(self, specs: Sequence[TensorSpec], algorithm: Any) -> Notes:
        settings = {**self.settings, **self.circumstances}
        notes = {"problem": self.problem, "method": self.method, "settings": settings, "tensors": specs}
        return {**notes, **self._state_notes(algorithm)} if algorithm else notes

    def _state_notes(self, algorithm: Any) -> Notes:
        """What the ranks have to agree on once there is a state."""
        return {"step": algorithm.t}

    # What differs between the methods

    def _make_algorithm(self, layout: FlatLayout) -> Any:
        raise NotImplementedError

    def _make_stats(self, algorithm: Any, update: Update | None) -> StepStats:
        """Figures of a step; those of a method that selects no elements."""
        return StepStats(
            step=algorithm.t,
            numel=algorithm.layout.numel,
            target_density=None,
            density=None,
            selected=None,
            threshold=None,
            bytes_sent=0,
            skipped=update is None,
        )

    def _save(self) -> dict[str, Any]:
        """The algorithm's state, besides its step."""
        return {}

    def _restore(self, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Undo `_save`, next to the gradients `arrays`; raise ValueError if the state does not fit."""

    def _heed(self, all_notes: list[Notes]) -> None:
        """Act on the notes of all ranks, which agree."""


def continued(step: Step[Any], answer: Array) -> Step[Any]:
    """The rest of a step whose first request was made, and answered, elsewhere."""
    while True:
        try:
            request = step.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield request


class ResidualExchange(Exchange):
    """A method that selects elements, and keeps the others back in a residual.

    Raises:
        SettingError: follow_learning_rate is none of True, False and None, which leaves it to the front end.
    """

    def __init__(self, follow_learning_rate: bool | None, **settings: Any) -> None:
        if not isinstance(follow_learning_rate, bool | None):
            raise SettingError(
                "follow_learning_rate", follow_learning_rate, "True, False, or None (with SGD without momentum)"
            )
        super().__init__(follow_learning_rate=follow_learning_rate, **settings)

    def _make_stats(self, algorithm: MiCRO | TopK, update: Update | None) -> StepStats:
        numel = algorithm.layout.numel
        selected = 0 if update is None else numel if update.indices is None else len(update.indices)
        stats = super()._make_stats(algorithm, update)
        return stats._replace(
            target_density=algorithm.density,
            density=selected / max(numel, 1),
            selected=selected,
            threshold=update.threshold if update else None,
        )

    def _save(self) -> dict[str, Any]:
        layout, residual = self.algorithm.layout, self.algorithm.residual
        if residual.vector is None:
            return {"residual": {}}
        parts = kernels_for(residual.vector).split(residual.vector, layout)
        named = {spec.name: part.reshape(spec.shape) for spec, part in zip(layout.tensors, parts, strict=True)}
        rates = dict(zip(named, residual.rates.tolist(), strict=True))
        return {"residual": named, "rates": rates}

    def _restore(self, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        residual: Mapping[str, Array] = state.get("residual", {})
        if not residual:  # saved before the first step
            return
        layout = self.algorithm.layout
        saved = [TensorSpec(name, tuple(residual[name].shape), layout.dtype) for name in sorted(residual)]
        difference = first_difference(saved, [spec._replace(dtype=layout.dtype) for spec in layout.tensors])
        if difference:
            raise ValueError(f"it has {difference[0]} where the model has {difference[1]}")
        kernels = kernels_for(arrays[0])
        parts = [kernels.beside(residual[spec.name], arrays[0], layout.dtype).reshape(-1) for spec in layout.tensors]
        if not all(kernels.all_finite(part) for part in parts):
            raise ValueError("its residual is not finite")
        rates = np.array([float(state.get("rates", {}).get(spec.name, 0.0)) for spec in layout.tensors])
        if not ((rates >= 0) & np.isfinite(rates)).all():
            raise ValueError("its learning rates are not numbers >= 0")
        self.algorithm.residual.vector = kernels.flat_vector(parts, layout.dtype)
        self.algorithm.residual.rates = rates


class MiCROExchange(ResidualExchange):
    """MiCRO at work.

    Raises:
        SettingError: MiCRO cannot work with these settings.
    """

    method = "micro"

    def __init__(
        self, density: float, threshold: str, value_dtype: str | None, follow_learning_rate: bool | None = None
    ) -> None:
        micro.check_settings(density, threshold, value_dtype)
        super().__init__(follow_learning_rate, density=float(density), threshold=threshold, value_dtype=value_dtype)

    def reset(self) -> None:
        super().reset()
        self._flush = False

    def flush(self) -> None:
        """Make the next step send everything that is held back, on all ranks; one of them may ask for all."""
        self._flush = True
        self.something_to_say = True

    def _make_algorithm(self, layout: FlatLayout) -> MiCRO:
        return MiCRO(layout, *(self.settings[name] for name in ("density", "threshold", "value_dtype")))

    def _make_stats(self, algorithm: MiCRO | TopK, update: Update | None) -> StepStats:
        stats = super()._make_stats(algorithm, update)
        return stats if update else stats._replace(threshold=self.algorithm.estimator.threshold)

    def _save(self) -> dict[str, Any]:
        return {"threshold": self.algorithm.estimator.state(), **super()._save()}

    def _restore(self, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        self.algorithm.estimator.load(state.get("threshold", {}))
        super()._restore(state, arrays)

    def _state_notes(self, algorithm: MiCRO) -> Notes:
        return {**super()._state_notes(algorithm), "threshold": algorithm.estimator.state(), "flush": self._flush}

    def _heed(self, all_notes: list[Notes]) -> None:
        self.algorithm.flushing |= any(notes["flush"] for notes in all_notes)
        self._flush = False


class A2SGDExchange(Exchange):
    """A2SGD at work.

    Attributes:
        averaging_due: the parameters are to be averaged over the ranks once the last step has been applied.

    Raises:
        SettingError: A2SGD cannot work with these settings.
    """

    method = "a2sgd"

    def __init__(self, granularity: str, sync_every: int | None) -> None:
        a2sgd.check_settings(granularity, sync_every)
        super().__init__(granularity=granularity, sync_every=None if sync_every is None else int(sync_every))

        self.averaging_due = False  # not for `reset` to change: other ranks may wait for it

    def _make_algorithm(self, layout: FlatLayout) -> A2SGD:
        return A2SGD(layout, self.settings["granularity"])

    def _make_stats(self, algorithm: A2SGD, update: Update | None) -> StepStats:
        step, sync_every = algorithm.t, self.settings["sync_every"]
        self.averaging_due = self.averaging_due or (sync_every is not None and step % sync_every == 0)
        return super()._make_stats(algorithm, update)


class TopKExchange(ResidualExchange):
    """Top-k at work.

    Raises:
        SettingError: top-k cannot work with this density.
    """

    method = "topk"

    def __init__(self, density: float, follow_learning_rate: bool | None = None) -> None:
        check_density(density)
        super().__init__(follow_learning_rate, density=float(density))

    def _make_algorithm(self, layout: FlatLayout) -> TopK:
        return TopK(layout, self.settings["density"])


class QSGDExchange(Exchange):
    """QSGD at work.

    Raises:
        SettingError: QSGD cannot work with this number of bits.
    """

    method = "qsgd"

    def __init__(self, bits: int) -> None:
        qsgd.check_settings(bits)
        super().__init__(bits=int(bits))

    def _make_algorithm(self, layout: FlatLayout) -> QSGD:
        return QSGD(layout, **self.settings)
