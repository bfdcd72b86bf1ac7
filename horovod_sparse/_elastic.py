"""Compressors in elastic jobs (`hvd.elastic.run`), for all front ends.

Each elastic `State` of Horovod saves what it has with `commit()`, and goes back to that when ranks have failed. Then,
as when hosts come or go, it begins anew in another world. Compressors do the same, each for its own rank: from the
import of this module on, whatever an elastic state does, they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

from horovod.common.elastic import ObjectState, State


class Follower(Protocol):
    def commit(self) -> None:
        """Save the state."""

    def restore(self) -> None:
        """Go back to what was saved; at least, to what was there when the elastic state was made."""

    def rejoin(self) -> None:
        """Horovod was shut down, and has begun anew: forget what was under way, and meet the other ranks again."""


followers: WeakSet[Any] = WeakSet()


def _then(cls: type, method: str, act: Callable[[Any], None]) -> None:
    original = getattr(cls, method)

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for follower in tuple(followers):
            act(follower)
        return result

    setattr(cls, method, extended)


_then(ObjectState, "__init__", lambda follower: follower.commit())
_then(ObjectState, "save", lambda follower: follower.commit())
_then(ObjectState, "restore", lambda follower: follower.restore())
_then(State, "on_reset", lambda follower: follower.rejoin())
