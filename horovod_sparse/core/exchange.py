"""A method at work on one model: its state, and what the ranks have to agree on before they rely on it.

A step begins with a round in which each rank sends the method's first numbers, and before them a 1, for its presence,
two flags, and a fingerprint of its state. One flag says "I have something to say": it is raised in a first step, after
a state was loaded or reset, and for an error; the other, as for a flush, can wait until all ranks are there. If a flag
is up, or the fingerprints differ, all ranks compare notes, then go on together or raise the same error: so an error on
one rank is an error on all of them, in the same step, and none is left waiting.

Ranks that have called `hvd.join()` send zeros, and take no part in an allgather. The others take steps all the same,
dense ones. Who comes back takes over their step and threshold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from horovod_sparse.core import a2sgd, micro, qsgd, virtual
from horovod_sparse.core.a2sgd import A2SGD
from horovod_sparse.core.agreement import Notes, agree, all_the_same, fingerprint
from horovod_sparse.core.checkpoint import State, checked, merged
from horovod_sparse.core.collectives import Allreduce, Array
from horovod_sparse.core.kernels import kernels_for
from horovod_sparse.core.layout import FlatLayout, TensorSpec, first_difference
from horovod_sparse.core.micro import MiCRO
from horovod_sparse.core.qsgd import QSGD
from horovod_sparse.core.schedule import DensitySchedule, WarmUp, check_schedule, density_of
from horovod_sparse.core.stats import StepStats
from horovod_sparse.core.step import SettingError, Step, Update, check_density
from horovod_sparse.core.topk import TopK


def check_present(present: float, world_size: int, purpose: str) -> None:
    """Raise RuntimeError, on all ranks left, if some have called `hvd.join()`: Horovod sends zeros in their place."""
    if present < world_size - 0.5:
        raise RuntimeError(
            f"{world_size - round(present)} of {world_size} ranks have called hvd.join(), and {purpose}, for which all "
            "ranks are needed: do that while all ranks still train"
        )


def check_verify_every(verify_every: int | None) -> None:
    """Raise SettingError unless it is a number of steps, or None."""
    whole = isinstance(verify_every, int | np.integer) and not isinstance(verify_every, bool)
    if verify_every is not None and not (whole and verify_every >= 1):
        raise SettingError("verify_every", verify_every, "a number of steps >= 1, or None to never compare the ranks")


class Exchange:
    """What the methods share. A front end drives `step`, and hands on `stats`.

    Attributes:
        method: its name.
        settings: what it was made with, which has to be the same on all ranks.
        circumstances: what else a front end wants to be the same on all ranks, by name.
        order: which of several exchanges of like tensors this is; the same on all ranks.
        digests: returns a digest of each parameter, by name, for `verify_every`; None where they may differ.
        place: this rank's number, and the number of ranks, as far as they are known before a step.
        stats: figures of the last step; None before the first.

    Args:
        verify_every: after each so many steps, compare the parameters, and all notes, between the ranks; None: never.

    Raises:
        SettingError: it is neither.
    """

    method: str

    def __init__(self, verify_every: int | None, **settings: Any) -> None:
        check_verify_every(verify_every)
        self.settings = {**settings, "verify_every": None if verify_every is None else int(verify_every)}
        self.circumstances: Mapping[str, Any] = {}
        self.order = 0
        self.digests: Callable[[], dict[str, int]] | None = None
        self.place = (0, 1)
        self.reset()

    def reset(self) -> None:
        """Forget all state, as if no step had been taken; on all ranks."""
        self.stats: StepStats | None = None
        self.algorithm: Any = None
        self.problem: str | None = None
        self._loaded: State | Sequence[State] | None = None
        self._leads = False  # what this rank knows of the state, others have missed
        self._outgrown: Any = None  # the algorithm before more tensors came, as long as not all ranks know of them
        self.something_to_say = True
        self._loss_scale: float | None = 1.0

    def note(self, problem: str) -> None:
        """Keep what is wrong until all ranks meet: an error on one rank alone would leave the others waiting."""
        self.problem = self.problem or problem
        self.something_to_say = True

    def rejoin(self) -> None:
        """The world has changed, as in an elastic job: meet the ranks anew. Those that are new take over our state."""
        self._leads = self.state()["step"] > 0
        self.problem = None
        self.something_to_say = True

    def state(self) -> dict[str, Any]:
        """This rank's state as arrays, numbers and strings."""
        if self.algorithm is None:
            return merged(self._loaded, *self.place) if self._loaded else {"method": self.method, "step": 0}
        rank, world_size = self.place
        where = {"rank": rank, "world_size": world_size, "leads": self._leads}
        return {"method": self.method, "step": self.algorithm.t, **where, **self._save()}

    def load(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, or from those of all ranks of another world: see `checkpoint.merged`; on all ranks.

        The next step finds out whether it fits the model: if it does not, all ranks raise the same error.

        Raises:
            ValueError: the state is not one of this method, or those of all ranks are not complete.
        """
        checked(state, self.method)
        leads = merged(state, *self.place).get("leads")  # saved before those that had joined were back
        self.reset()
        self._loaded = copy.deepcopy(state)
        self._leads = bool(leads)

    @property
    def holds_back(self) -> bool:
        """Whether there may be something that was not sent."""
        return False

    def alone(
        self,
        gradient: Mapping[TensorSpec, Array],
        out: Mapping[TensorSpec, Array] | None = None,
        rates: Mapping[TensorSpec, float] | None = None,
        loss_scale: float = 1.0,
    ) -> Update | None:
        """The step of a rank that is the only one left, or has loaded a state: all that is held back is applied."""
        raise NotImplementedError

    def meet(self, specs: Sequence[TensorSpec]) -> Step[None]:
        """Before the first step: do all ranks have the same settings, and train the same tensors?

        Raises:
            RuntimeError: they do not, or some rank has a problem; the same error on all ranks.
        """
        yield from agree(self._notes(specs, None))

    def residual_norm(self) -> float | None:
        """The 2-norm of what this rank holds back; None for a method that holds nothing back."""
        return None

    def step(
        self,
        gradient: Mapping[TensorSpec, Array],
        rank: int,
        world_size: int,
        out: Mapping[TensorSpec, Array] | None = None,
        rates: Mapping[TensorSpec, float] | None = None,
        loss_scale: float | None = 1.0,
    ) -> Step[Update | None]:
        """One step on one rank.

        Args:
            gradient: the flattened gradients of all tensors.
            rank, world_size: this rank's number, and the number of ranks.
            out: memory for as many elements, which is the step's from now on; see `MiCRO.step`.
            rates: the learning rates, if what is held back is to follow them.
            loss_scale: by what the loss was multiplied; None if this rank cannot know, for it has no gradients.

        Returns:
            The update, its tensors sorted; None if the gradient of some rank was not finite.

        Raises:
            RuntimeError: some rank has a problem, or the ranks disagree; the same error on all ranks.
        """
        times = Times()
        update: Update | None = yield from timed(self._step(gradient, rank, world_size, out, rates, loss_scale), times)
        assert self.stats
        self.stats = self.stats._replace(selection_s=times.working, exchange_s=times.waiting)
        return update

    def _step(
        self,
        gradient: Mapping[TensorSpec, Array],
        rank: int,
        world_size: int,
        out: Mapping[TensorSpec, Array] | None,
        rates: Mapping[TensorSpec, float] | None,
        loss_scale: float | None,
    ) -> Step[Update | None]:
        specs = sorted(gradient)
        arrays = [gradient[spec] for spec in specs]
        memory = out and [out[spec] for spec in specs]
        self.place = (rank, world_size)
        self._check_tensors(specs, arrays)
        kernels = kernels_for(arrays[0])
        algorithm = self.algorithm  # this step's, even if the state is reset before the step has ended
        self._loss_scale = loss_scale
        self._prepare(algorithm)
        method_step = algorithm.step(arrays, rank, world_size, memory, **self._units(specs, rates))
        size, dtype = (self._outgrown or algorithm).first_round
        request = None if self.something_to_say else next(method_step).array
        subject = (algorithm.layout.tensors, self._state_notes(algorithm), self.circumstances, self.order)
        flags = [self.something_to_say, self._wants_to_talk(algorithm)]
        head = kernels.numbers([1, *flags, *fingerprint(subject, world_size)], arrays[0], dtype)
        body = kernels.numbers([0] * size, arrays[0], dtype) if request is None else request
        answer = yield Allreduce(kernels.join([head, body]))
        present, urgent, other, *fingerprints = answer[: len(head)].tolist()
        answer = answer[len(head) :]
        agreed = all_the_same(fingerprints, round(present), world_size)
        joined = present < world_size - 0.5
        if joined:
            if urgent or not agreed:
                self._shrink()
                check_present(present, world_size, "the others have to compare notes, for a first step or an error")
            self._leads = True
            answer = self._without_joined(algorithm, answer, present / world_size)
        elif urgent or other or not agreed:
            yield from self._talk(specs, algorithm, differ=not (agreed or urgent))
            answer = yield next(method_step) if request is None else Allreduce(request)
        update: Update | None = yield from continued(method_step, answer)
        self.stats = self._make_stats(algorithm, update, joined)
        return update

    def _talk(self, specs: Sequence[TensorSpec], algorithm: Any, differ: bool) -> Step[None]:
        """Compare notes, and act on them; `differ`: the fingerprints do, and nobody has said why."""
        try:
            all_notes = yield from agree({**self._notes(specs, algorithm), "leads": self._leads})
        except RuntimeError:
            self._shrink()
            raise
        self._outgrown = None
        excused = any(notes["leads"] for notes in all_notes) or len({n.get("loss_scale") for n in all_notes}) > 1
        if differ and not excused:
            raise RuntimeError(
                "the ranks disagree: they reduce their models in another order. Run the same program on all ranks"
            )
        if self.algorithm is algorithm:  # else the state was reset in the meantime
            self.something_to_say = self._leads = False
            self._loaded = None
            self._heed(all_notes)

    def _check_tensors(self, specs: Sequence[TensorSpec], arrays: Sequence[Array]) -> None:
        """Make the algorithm in a first step; see whether the tensors are the same in a later one."""
        if self.algorithm is None:
            self._begin(FlatLayout(specs), arrays)
            return
        difference = first_difference(specs, self.algorithm.layout.tensors)
        if difference and set(specs).issuperset(self.algorithm.layout.tensors):
            self._extend(FlatLayout(specs), arrays)
        elif difference:
            self.note(
                f"the model has {difference[0]} where it had {difference[1]} in the steps before. If it was changed on "
                "purpose, call reset() on the compressor of every rank"
            )

    def _begin(self, layout: FlatLayout, arrays: Sequence[Array]) -> None:
        self.algorithm = self.make_algorithm(layout)
        if self._loaded:
            try:
                state = merged(self._loaded, *self.place)
                self.algorithm.t = int(state["step"])
                if self.algorithm.t < 0:
                    raise ValueError(f"its step is {self.algorithm.t}")
                self._restore(state, arrays)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else error
                self.note(f"the loaded state does not fit: {reason}. Load one of this model, or call reset()")

    def _extend(self, layout: FlatLayout, arrays: Sequence[Array]) -> None:
        """More tensors are trained from now on; whether on all ranks, is for all to see.

        Some may not know of it: so the first round is still that of the tensors so far.
        """
        state = self.state()
        if state.get("residual"):
            zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in layout.tensors}
            state["residual"] = {**zeros, **state["residual"]}
        self._loaded = state
        self._outgrown = self.algorithm
        self.something_to_say = True
        self._begin(layout, arrays)

    def _shrink(self) -> None:
        """Not all ranks know of more tensors: back to those so far."""
        self.algorithm, self._outgrown = self._outgrown or self.algorithm, None

    def _wants_to_talk(self, algorithm: Any) -> bool:
        """Whether there is something to say that can wait until all ranks are there."""
        return self._leads or self._verifies(algorithm)

    def _verifies(self, algorithm: Any) -> bool:
        every = self.settings["verify_every"]
        return every is not None and algorithm.t > 0 and algorithm.t % every == 0

    def _notes(self, specs: Sequence[TensorSpec], algorithm: Any) -> Notes:
        settings = {**self.settings, **self.circumstances}
        notes = {"problem": self.problem, "method": self.method, "settings": settings, "tensors": specs}
        if not algorithm:
            return notes
        digests = self.digests() if self.digests and self._verifies(algorithm) else None
        return {**notes, **self._state_notes(algorithm), "parameters": digests}

    def _state_notes(self, algorithm: Any) -> Notes:
        """What the ranks have to agree on once there is a state."""
        return {"step": algorithm.t}

    # What differs between the methods

    def make_algorithm(self, layout: FlatLayout) -> Any:
        """A new algorithm, with the settings, for the tensors of a model: the one that every method has to say."""
        raise NotImplementedError

    def _prepare(self, algorithm: Any) -> None:
        """Called before each step, and once more if another rank's step was taken over."""

    def _units(self, specs: Sequence[TensorSpec], rates: Mapping[TensorSpec, float] | None) -> dict[str, Any]:
        """What the method's step needs to know of the gradients' units, besides the loss scale."""
        return {}

    def _without_joined(self, algorithm: Any, answer: Array, share: float) -> Array:
        """The answer to the method's first request, where only a `share` of the ranks takes part in this step."""
        algorithm.dense = True
        return answer

    def _make_stats(self, algorithm: Any, update: Update | None, joined: bool) -> StepStats:
        """Figures of a step; those of a method that selects no elements.

        Args:
            joined: some ranks have called `hvd.join()`.
        """
        return StepStats(
            step=algorithm.t,
            numel=algorithm.layout.numel,
            target_density=None,
            density=None,
            selected=None,
            threshold=None,
            bytes_sent=0,
            skipped=update is None,
            dense_bytes=sum(spec.nbytes for spec in algorithm.layout.tensors),
        )

    def _save(self) -> dict[str, Any]:
        """The algorithm's state, besides its step."""
        return {}

    def _restore(self, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Undo `_save`, next to the gradients `arrays`; raise ValueError if the state does not fit."""

    def _heed(self, all_notes: list[Notes]) -> None:
        """Act on the notes of all ranks, which agree, or have a leader."""
        leaders = [notes for notes in all_notes if notes["leads"]]
        if leaders:
            self._take_over(max(leaders, key=lambda notes: notes["step"]))
            # What a rank has begun, it may have begun in a state of its own; a dense step does not mind.
            self.algorithm.dense = True

    def _take_over(self, notes: Notes) -> None:
        """Let the state be that of another rank, as its notes tell."""
        self.algorithm.t = notes["step"]
        self._prepare(self.algorithm)


@dataclass
class Times:
    """Seconds, in all."""

    working: float = 0.0
    waiting: float = 0.0


def timed(step: Step[Any], times: Times) -> Step[Any]:
    """A step that notes how long it works, and how long it waits for its answers."""
    answer = None
    while True:
        begin = perf_counter()
        try:
            request = step.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            asked = perf_counter()
            times.working += asked - begin
        answer = yield request
        times.waiting += perf_counter() - asked


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

    Args:
        density_schedule: the density of each step; None: that of the settings.

    Raises:
        SettingError: density or density_schedule are none, or follow_learning_rate is none of True, False and None,
            which leaves it to the front end.
    """

    def __init__(
        self,
        density: float,
        density_schedule: DensitySchedule,
        follow_learning_rate: bool | None,
        verify_every: int | None,
        **settings: Any,
    ) -> None:
        check_density(density)
        check_schedule(density_schedule)
        if not isinstance(follow_learning_rate, bool | None):
            raise SettingError(
                "follow_learning_rate", follow_learning_rate, "True, False, or None (with SGD without momentum)"
            )
        self._schedule = density_schedule
        # Functions cannot be compared; what they return is, in every step.
        schedule = repr(density_schedule) if isinstance(density_schedule, WarmUp | None) else "a function"
        settings = {"density": float(density), "density_schedule": schedule, **settings}
        super().__init__(verify_every, follow_learning_rate=follow_learning_rate, **settings)

    def reset(self) -> None:
        super().reset()
        self._flush = False

    def flush(self) -> None:
        """Make the next step send everything that is held back, on all ranks; one of them may ask for all."""
        self._flush = True

    def _wants_to_talk(self, algorithm: MiCRO | TopK) -> bool:
        return self._flush or super()._wants_to_talk(algorithm)

    def _prepare(self, algorithm: MiCRO | TopK) -> None:
        try:
            density = density_of(self._schedule, algorithm.t, self.settings["density"])
            check_density(density)
        except SettingError as error:
            self.note(f"density_schedule, for step {algorithm.t}: {error}")
        except Exception as error:  # of a function of the user's
            self.note(
                f"density_schedule, for step {algorithm.t}, raised {error!r}: it must return a density for each number "
                "of steps taken so far"
            )
        else:
            algorithm.density = float(density)
        algorithm.loss_scale = self._loss_scale or 1.0

    @property
    def holds_back(self) -> bool:
        if self.algorithm is None:
            return bool(self.state().get("residual"))
        return self.algorithm.residual.vector is not None

    def alone(
        self,
        gradient: Mapping[TensorSpec, Array],
        out: Mapping[TensorSpec, Array] | None = None,
        rates: Mapping[TensorSpec, float] | None = None,
        loss_scale: float = 1.0,
    ) -> Update | None:
        self.flush()
        (update,), _ = virtual.run([self.step(gradient, 0, 1, out, rates, loss_scale)])
        if update and (rates is None or all(rates.values())):  # else there may be tensors at rest
            self.algorithm.residual.vector = None
        self.stats = None
        return update

    def residual_norm(self) -> float:
        if self.algorithm is None:
            parts = self.state().get("residual", {}).values()
        else:
            vector, layout = self.algorithm.residual.vector, self.algorithm.layout
            parts = [] if vector is None else kernels_for(vector).split(vector, layout)
        return math.sqrt(sum(float(part.reshape(-1) @ part.reshape(-1)) for part in parts))

    def _units(self, specs: Sequence[TensorSpec], rates: Mapping[TensorSpec, float] | None) -> dict[str, Any]:
        return {"rates": rates and [rates[spec] for spec in specs]}

    def _state_notes(self, algorithm: MiCRO | TopK) -> Notes:
        return {**super()._state_notes(algorithm), "density": algorithm.density, "loss_scale": self._loss_scale}

    def _notes(self, specs: Sequence[TensorSpec], algorithm: Any) -> Notes:
        return {**super()._notes(specs, algorithm), "flush": self._flush}

    def _extend(self, layout: FlatLayout, arrays: Sequence[Array]) -> None:
        self._flush |= self.algorithm.dense  # by a step that was skipped
        super()._extend(layout, arrays)

    def _heed(self, all_notes: list[Notes]) -> None:
        # A rank without gradients learns from the others by what they are multiplied.
        self._loss_scale = next((notes["loss_scale"] for notes in all_notes if notes["loss_scale"]), None)
        self._prepare(self.algorithm)
        super()._heed(all_notes)
        if any(notes["flush"] for notes in all_notes):
            self.algorithm.dense = True
            self._flush = False

    def _make_stats(self, algorithm: MiCRO | TopK, update: Update | None, joined: bool) -> StepStats:
        numel = algorithm.layout.numel
        selected = 0 if update is None else numel if update.indices is None else len(update.indices)
        stats = super()._make_stats(algorithm, update, joined)
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
        self,
        density: float,
        threshold: str,
        value_dtype: str | None,
        follow_learning_rate: bool | None = None,
        density_schedule: DensitySchedule = None,
        verify_every: int | None = None,
    ) -> None:
        micro.check_settings(density, threshold, value_dtype)
        common = density, density_schedule, follow_learning_rate, verify_every
        super().__init__(*common, threshold=threshold, value_dtype=value_dtype)

    def make_algorithm(self, layout: FlatLayout) -> MiCRO:
        return MiCRO(layout, *(self.settings[name] for name in ("density", "threshold", "value_dtype")))

    def _make_stats(self, algorithm: MiCRO | TopK, update: Update | None, joined: bool) -> StepStats:
        stats = super()._make_stats(algorithm, update, joined)
        estimator = algorithm.estimator  # type: ignore[union-attr]
        return stats if update else stats._replace(threshold=estimator.threshold)

    def _save(self) -> dict[str, Any]:
        return {"threshold": self.algorithm.estimator.state(), **super()._save()}

    def _restore(self, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        self.algorithm.estimator.load(state.get("threshold", {}))
        super()._restore(state, arrays)

    def _state_notes(self, algorithm: Any) -> Notes:
        return {**super()._state_notes(algorithm), "threshold": algorithm.estimator.state()}

    def _take_over(self, notes: Notes) -> None:
        super()._take_over(notes)
        self.algorithm.estimator.load(notes["threshold"])


class A2SGDExchange(Exchange):
    """A2SGD at work.

    Attributes:
        averaging_due: the parameters are to be averaged over the ranks once the last step has been applied.

    Raises:
        SettingError: A2SGD cannot work with these settings.
    """

    method = "a2sgd"

    def __init__(self, granularity: str, sync_every: int | None, verify_every: int | None = None) -> None:
        a2sgd.check_settings(granularity, sync_every)
        sync_every = None if sync_every is None else int(sync_every)
        super().__init__(verify_every, granularity=granularity, sync_every=sync_every)

        self.averaging_due = False  # not for `reset` to change: other ranks may wait for it

    def make_algorithm(self, layout: FlatLayout) -> A2SGD:
        return A2SGD(layout, self.settings["granularity"])

    def rejoin(self) -> None:
        super().rejoin()
        self.averaging_due = False  # those that are new do not wait for it

    def _without_joined(self, algorithm: A2SGD, answer: Array, share: float) -> Array:
        return answer / share  # the means of the ranks that are left

    def _heed(self, all_notes: list[Notes]) -> None:
        super()._heed(all_notes)
        # Those that were away have missed the averagings, too.
        self.averaging_due |= self.settings["sync_every"] is not None and any(notes["leads"] for notes in all_notes)

    def _make_stats(self, algorithm: A2SGD, update: Update | None, joined: bool) -> StepStats:
        step, sync_every = algorithm.t, self.settings["sync_every"]
        self.averaging_due |= sync_every is not None and step % sync_every == 0 and not joined
        return super()._make_stats(algorithm, update, joined)


class TopKExchange(ResidualExchange):
    """Top-k at work.

    Raises:
        SettingError: top-k cannot work with this density.
    """

    method = "topk"

    def __init__(
        self,
        density: float,
        follow_learning_rate: bool | None = None,
        density_schedule: DensitySchedule = None,
        verify_every: int | None = None,
    ) -> None:
        super().__init__(density, density_schedule, follow_learning_rate, verify_every)

    def make_algorithm(self, layout: FlatLayout) -> TopK:
        return TopK(layout, self.settings["density"])


class QSGDExchange(Exchange):
    """QSGD at work.

    Raises:
        SettingError: QSGD cannot work with this number of bits.
    """

    method = "qsgd"

    def __init__(self, bits: int, verify_every: int | None = None) -> None:
        qsgd.check_settings(bits)
        super().__init__(verify_every, bits=int(bits))

    def make_algorithm(self, layout: FlatLayout) -> QSGD:
        return QSGD(layout, self.settings["bits"])
