"""Compressors in elastic jobs (`hvd.elastic.run`), for all front ends.

Each elastic `State` of Horovod saves what it has with `commit()`, and goes back to that when ranks have failed. Then,
as when hosts come or go, it begins anew in another world. Compressors do the same, each for its own rank: from the
import of this module on, whatever an elastic state does, they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from horovod.common.elastic import ObjectState, State


class Follower(Protocol):
    def commit(self) -> Any:
        """A copy of the state."""

    def restore(self, committed: Any) -> None:
        """Go back to what `commit` returned; None: to how it was made."""

    def rejoin(self) -> None:
        """Horovod was shut down, and has begun anew: forget what was under way, and meet the other ranks again."""


followers: WeakSet[Any] = WeakSet()

# What each elastic state has saved of each compressor.
_committed: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def _then(cls: type, method: str, act: Callable[[Any], None]) -> None:
    """Have a method do something more, with the elastic state whose method it is."""
    original = getattr(cls, method)

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        act(self)
        return result

    setattr(cls, method, extended)


def _commit(state: Any) -> None:
    _committed[state] = WeakKeyDictionary({follower: follower.commit() for follower in tuple(followers)})


def _restore(state: Any) -> None:
    for follower in tuple(followers):
        follower.restore(_committed.get(state, {}).get(follower))


def _rejoin(state: Any) -> None:
    for follower in tuple(followers):
        follower.rejoin()


_then(ObjectState, "__init__", _commit)
_then(ObjectState, "save", _commit)
_then(ObjectState, "restore", _restore)
_then(State, "on_reset", _rejoin)
