"""Averaging variables over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.core.exchange import check_present
from horovod_sparse.tensorflow._horovod import PREFIX, hvd
from horovod_sparse.tensorflow.graphs import in_program_order


def average(
    variables: Sequence[tf.Variable],
    process_set: Any,
    done: Callable[..., None],
    inputs: Sequence[Any] = (),
    name: str = PREFIX,
) -> Any:
    """Give each variable its mean over the ranks, which is then bitwise the same on all of them.

    Args:
        variables: the floating ones among them are averaged.
        process_set: the ranks that take part.
        done: called, when it is, with `inputs` and the payload in bytes that this rank has handed to Horovod.
        inputs: tensors.
        name: the prefix of the names by which Horovod matches the ranks' calls.

    Returns:
        A tensor that is there once it has been done.

    Raises:
        RuntimeError: some ranks have called `hvd.join()`.
    """
    in_program_order()
    options = {"ignore_name_scope": True, "process_set": process_set}
    # No constant: what depends on constants alone, TensorFlow computes in advance, with Horovod's operations.
    one = tf.ensure_shape(tf.numpy_function(lambda: np.ones(1, np.float32), [], tf.float32), [1])
    present = hvd.allreduce(one, op=hvd.Sum, name=f"{name}.present", **options)

    def check(present: Any) -> Any:
        check_present(float(present[0]), process_set.size(), "the others are to average the parameters")
        return np.float32(0)

    assignments = []
    nbytes = 4
    with tf.control_dependencies([tf.numpy_function(check, [present], tf.float32)]):
        floating = [v for v in variables if v.dtype.is_floating]
        for dtype in sorted({v.dtype.base_dtype for v in floating}, key=str):
            wide = tf.float32 if dtype.size < 4 else dtype  # 16 bits are few for a sum
            of_dtype = [v for v in floating if v.dtype.base_dtype == dtype]
            values = [tf.cast(v.read_value(), wide) for v in of_dtype]
            nbytes += sum(value.shape.num_elements() * wide.size for value in values)
            means = hvd.grouped_allreduce(values, op=hvd.Average, name=f"{name}.average.{dtype.name}", **options)
            assignments += [v.assign(tf.cast(mean, dtype)) for v, mean in zip(of_dtype, means, strict=True)]

    def report(*arrays: Any) -> Any:
        done(*arrays, nbytes)
        return np.float32(0)

    with tf.control_dependencies(assignments):
        return tf.numpy_function(report, list(inputs), tf.float32)
