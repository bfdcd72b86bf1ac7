"""The order in which a graph runs what Horovod tells apart by its order alone."""

from __future__ import annotations

import tensorflow as tf

_written: list[tf.Variable] = []


def is_for_session() -> bool:
    """Whether the graph that is being built is one of TensorFlow 1, for a session."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def in_program_order() -> None:
    """To be called while a graph is traced: it then runs in the order of the program, among all that called this.

    TensorFlow keeps that order among graphs that write to the same variable, but not among graphs that merely have
    side effects: so they all write to one. A session runs in any order, and at once, what may be.
    """
    if is_for_session():
        return
    with tf.init_scope():
        if not _written:
            _written.append(tf.Variable(0, trainable=False, name="horovod_sparse_order"))
    _written[0].assign_add(1)
