"""How graphs run what is ours: in which order, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

_written: list[tf.Variable] = []


def is_for_session() -> bool:
    """Whether the graph that is being built is one of TensorFlow 1, for a session."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def in_program_order() -> None:
    """To be called while a graph is traced; eagerly, it changes nothing.

    The graph then runs in the order of the program, among all that called this.

    TensorFlow keeps that order among graphs that write to the same variable, but not among graphs that merely have
    side effects: so they all write to one. A session runs in any order, and at once, what may be.
    """
    if is_for_session():
        return
    with tf.init_scope():
        if not _written:
            _written.append(tf.Variable(0, trainable=False, name="horovod_sparse_order"))
    _written[0].assign_add(1)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method, for a graph to call. TensorFlow keeps what graphs call for ever: so not the object, too."""
    weak = WeakMethod(method)

    def call(*args: Any) -> Any:
        strong = weak()
        assert strong, "the graph has outlived what it calls"
        return strong(*args)

    return call


def keep_while_traced_graphs_live(thing: object) -> None:
    """Let the graphs that are being traced keep an object that they call weakly."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph) or (graph is not None and is_for_session()):
        graph._horovod_sparse = (*getattr(graph, "_horovod_sparse", ()), thing)
        graph = getattr(graph, "outer_graph", None)
