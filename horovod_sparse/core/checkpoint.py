"""Saved states: of one rank, and of all ranks of a world that may have had another size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

State = Mapping[str, Any]


def merged(given: State | Sequence[State], rank: int, world_size: int) -> dict[str, Any]:
    """What a rank continues from.

    Given one state, that is its own, or another rank's: the latter for its step and threshold alone. The residual is
    left out, for it is of the gradients of that rank, which has it still; n copies would count n times.

    Given the states of all ranks of another world, in any order, that is one with the sum of the residuals of the old
    ranks `rank`, `rank` + `world_size`, and so on: over all ranks, the sum of the residuals is what it was.

    Raises:
        ValueError: they are not those of all ranks, of the same model.
    """
    place = {"rank": rank, "world_size": world_size}
    if isinstance(given, Mapping):
        own = given.get("rank", rank) == rank
        return {**(given if own else without_residual(given)), **place}
    states = given
    if any(not isinstance(state.get("step"), int) for state in states):
        raise ValueError("load_state_dict: there is a state without a step. Give what state_dict() returned")
    if not any(state["step"] for state in states):  # saved before the first step
        return {**states[0], **place}
    states = sorted(states, key=lambda state: state.get("rank", 0))
    ranks = [state.get("rank", 0) for state in states]
    old_size = states[0].get("world_size", 1)
    if ranks != list(range(old_size)):
        raise ValueError(
            f"load_state_dict: the states are of the ranks {ranks}, not of all of the {old_size} ranks. Give a list "
            "with one of each rank"
        )
    every = [state["residual"] for state in states if state.get("residual")]  # some ranks may hold back nothing
    latest = max(states, key=lambda state: state["step"])
    same_step = all(state["step"] == latest["step"] for state in states) or any(state.get("leads") for state in states)
    if not same_step or any(residual.keys() != every[0].keys() for residual in every):
        steps = sorted({state["step"] for state in states})
        raise ValueError(
            f"load_state_dict: the states, of steps {steps}, are not of the same step of the same model. Give those "
            "that all ranks saved together"
        )
    result = {**without_residual(latest), **place}
    if every:
        mine = [state for state in states[rank::world_size] if state.get("residual")]
        result["residual"] = {
            name: sum((_in_units_of(latest, state, name) for state in mine), start=0 * every[0][name])
            for name in every[0]
        }
    return result


def _in_units_of(latest: State, state: State, name: str) -> Any:
    """A part of the residual of one state, in those of the learning rate of another."""
    old, new = (s.get("rates", {}).get(name, 0.0) for s in (state, latest))
    return state["residual"][name] * (old / new if old > 0 and new > 0 else 1.0)


def checked(given: object, method: str) -> list[State]:
    """The states: one, or several; raise ValueError unless they are of this method."""
    states: list[Any] = list(given) if isinstance(given, list | tuple) and given else [given]
    for state in states:
        found = state.get("method") if isinstance(state, Mapping) else type(state).__name__
        if found != method:
            raise ValueError(
                f"load_state_dict: the state is of {found!r}, not of {method!r}. Give what the state_dict() of a "
                "compressor of this method returned, or a list of such"
            )
    return states


def without_residual(state: State) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "residual"}
