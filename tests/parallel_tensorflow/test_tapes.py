"""Everything that Horovod's users do with a tape, or without one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from training import MLP, assert_close, batch, keras_model, known_gradient, mean_over_ranks, same_on_all_ranks

import horovod_sparse.tensorflow as hvd

STEPS = 5
TAPES = {"drop-in": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}
FUNCTIONS = {"in a function": tf.function, "eagerly": lambda function: function}
COMPRESSIONS = {
    "micro": hvd.MiCROCompressor,
    "a2sgd": hvd.A2SGDCompressor,
    "topk": hvd.TopKCompressor,
    "qsgd": hvd.QSGDCompressor,
}

in_tapes = pytest.mark.parametrize("wrap", TAPES.values(), ids=TAPES)
in_functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def train(
    model: MLP, wrap: Callable[..., Any], function: Callable[..., Any], compression: Any, rank: int, **options: Any
) -> None:
    @function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        tape = wrap(tape, compression=compression, **options)
        gradients = tape.gradient(loss, model.parameters)
        for p, gradient in zip(model.parameters, gradients, strict=True):
            p.assign_sub(tf.cast(0.1, p.dtype) * gradient)

    for i in range(STEPS):
        step(*map(tf.constant, batch(rank, i, size=16 if i < STEPS - 1 else 7)))  # the last batch is smaller: a retrace


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"groups": 1},
    "two groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 1.7},
    "sparse as dense": {"sparse_as_dense": True},
    "num_groups": {"num_groups": 2},
}


@in_tapes
@in_functions
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tape(options: dict[str, Any], function: Callable[..., Any], wrap: Callable[..., Any]) -> None:
    dense = MLP()
    train(dense, stock.DistributedGradientTape, tf.function, hvd.Compression.none, hvd.rank())

    model, compressor = MLP(), hvd.MiCROCompressor(density=1.0)
    train(model, wrap, function, compressor, hvd.rank(), **options)
    assert_close(model.parameters, dense.parameters)
    assert same_on_all_ranks(model.parameters)
    assert compressor.stats.step == STEPS

    model, compressor = MLP(), hvd.MiCROCompressor(density=0.02)
    train(model, wrap, function, compressor, hvd.rank(), **options)
    assert same_on_all_ranks(model.parameters)
    assert compressor.stats.step == STEPS
    assert compressor.stats.numel == sum(int(tf.size(p)) for p in model.parameters)

    alone, model = MLP(), MLP()
    train(alone, lambda tape, **_: tape, tf.function, None, 0)
    train(model, wrap, function, hvd.A2SGDCompressor(sync_every=2), 0, **options)
    assert_close(model.parameters, alone.parameters)


@in_tapes
@in_functions
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype: str, function: Callable[..., Any], wrap: Callable[..., Any]) -> None:
    dense, model = MLP(), MLP(dtype=dtype)
    train(dense, stock.DistributedGradientTape, tf.function, hvd.Compression.none, hvd.rank())
    train(model, wrap, function, hvd.MiCROCompressor(density=1.0), hvd.rank())
    tolerance = {"float64": 1e-5, "float16": 0.01, "bfloat16": 0.05}[dtype]
    assert_close(model.parameters, dense.parameters, rtol=tolerance, atol=tolerance)
    assert same_on_all_ranks(tf.cast(p, tf.float64) for p in model.parameters)


@in_tapes
def test_what_half_precision_cannot_hold_becomes_its_largest(wrap: Callable[..., Any]) -> None:
    p = tf.Variable(tf.zeros(2000, tf.float16))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(p * tf.constant(60000, tf.float16))
    compressor = hvd.MiCROCompressor(density=1.0)
    (gradient,) = wrap(tape, compression=compressor, op=hvd.Sum).gradient(loss, [p])
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient) == np.finfo(np.float16).max).all() or hvd.size() == 1


@in_tapes
@in_functions
def test_op_sum(function: Callable[..., Any], wrap: Callable[..., Any]) -> None:
    p = tf.Variable(tf.zeros((40, 50)), name="p")
    constant = tf.constant(known_gradient((40, 50), hvd.rank(), 0), tf.float32)

    @function
    def reduce() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(p * constant)
        return wrap(tape, compression=hvd.MiCROCompressor(density=1.0), op=hvd.Sum).gradient(loss, [p])[0]

    total = hvd.size() * mean_over_ranks(lambda rank: known_gradient((40, 50), rank, 0))
    np.testing.assert_allclose(reduce(), total, rtol=1e-5, atol=1e-5)


@in_tapes
@in_functions
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_indexed_slices(sparse_as_dense: bool, function: Callable[..., Any], wrap: Callable[..., Any]) -> None:
    table = tf.Variable(tf.ones((30, 50)), name="table")
    kernel = tf.Variable(tf.ones((50, 30)), name="kernel")
    words = tf.constant(np.random.default_rng(hvd.rank()).integers(0, 30, 8))
    compressor = hvd.MiCROCompressor(density=1.0)

    def reduce(wrap: Callable[..., Any], compression: Any) -> list[Any]:
        @function
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, words) @ kernel)
            tape = wrap(tape, compression=compression, sparse_as_dense=sparse_as_dense)
            return tape.gradient(loss, [table, kernel])

        return step()

    reference = reduce(stock.DistributedGradientTape, hvd.Compression.none)
    ours = reduce(wrap, compressor)
    assert isinstance(ours[0], tf.IndexedSlices) != sparse_as_dense
    assert_close([tf.convert_to_tensor(g) for g in ours], [tf.convert_to_tensor(g) for g in reference])
    assert compressor.stats.numel == (3000 if sparse_as_dense else 1500)


@in_functions
@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_two_models_of_one_shape_do_not_share_a_residual(compression: Any, function: Callable[..., Any]) -> None:
    """Stock Horovod traces one graph for both, eagerly, if it is given a class."""
    for wrap in (stock.DistributedGradientTape, hvd.DistributedGradientTape):
        alone = MLP(1)
        train(alone, wrap, function, compression(), hvd.rank())
        first, second = MLP(0), MLP(1)
        shared = compression()
        for i in range(2):
            train((first, second)[i], wrap, function, shared, hvd.rank())
        if compression is not hvd.A2SGDCompressor:
            assert_close(second.parameters, alone.parameters, 0, 0)
        third = MLP(1)
        train(first, wrap, function, compression, hvd.rank())
        train(third, wrap, function, compression, hvd.rank())
        if compression is not hvd.A2SGDCompressor:
            assert_close(third.parameters, alone.parameters, 0, 0)


@in_functions
def test_state_is_kept_no_longer_than_the_variables(function: Callable[..., Any]) -> None:
    compressor = hvd.A2SGDCompressor(sync_every=2)
    for _ in range(3):
        train(MLP(), hvd.DistributedGradientTape, function, compressor, hvd.rank())
        gc.collect()
    assert not compressor.slots
    assert not compressor._reductions
    assert not compressor._trained


def test_state_survives_another_trace() -> None:
    model, compressor = MLP(), hvd.MiCROCompressor(density=0.05)
    for _ in range(3):  # a new function each, with two traces
        train(model, hvd.DistributedGradientTape, tf.function, compressor, hvd.rank())
    assert compressor.stats.step == 3 * STEPS
    assert len(compressor.slots) == 1


@in_functions
def test_variables_of_keras(function: Callable[..., Any]) -> None:
    """Keras 3's, which stock Horovod cannot take, or the legacy Keras's."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.MiCROCompressor, hvd.A2SGDCompressor):
        model = keras_model()
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        @function
        def step(
            x: Any, y: Any, model: Any = model, compression: Any = compression, optimizer: Any = optimizer
        ) -> None:
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x))
                loss = tf.reduce_mean(losses)
            return tape.gradient(loss, model.trainable_variables)

        for i in range(STEPS):
            gradients = step(*map(tf.constant, batch(hvd.rank(), i)), model, compression)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if compression is hvd.A2SGDCompressor:
            tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=compression)
            hvd.get_compressor(tape).synchronize_parameters(model.trainable_variables)
        assert same_on_all_ranks(model.get_weights())


def test_sources_in_a_structure_without_a_gradient_and_local() -> None:
    p = {"a": tf.Variable(tf.ones(2000), name="a"), "b": [tf.Variable(tf.ones(3000), name="b"), tf.Variable(1.0)]}
    unused = tf.Variable(2.0)
    rank = float(hvd.rank())
    for compression in (hvd.Compression.none, hvd.MiCROCompressor(density=1.0)):
        with tf.GradientTape(persistent=True) as tape:
            loss = rank * (tf.reduce_sum(p["a"]) + tf.reduce_sum(p["b"][0]) + p["b"][1])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        tape.register_local_source(p["b"][1])
        sources = {**p, "unused": unused}
        mean = (hvd.size() - 1) / 2
        for _ in range(2):  # persistent
            gradients = tape.gradient(loss, sources)
            assert gradients["unused"] is None
            np.testing.assert_allclose(gradients["a"], mean)
            np.testing.assert_allclose(gradients["b"][0], mean)
            np.testing.assert_allclose(gradients["b"][1], rank / hvd.size())
        local, reduced = tape.get_local_and_global_gradients(loss, [p["a"], p["b"][1]])
        assert [source is p["b"][1] for source, _ in local] == [True]
        assert [source is p["a"] for source, _ in reduced] == [True]
        single = tape.gradient(loss, p["a"])
        np.testing.assert_allclose(single, mean)


def test_partial_tape_leaves_layers_to_each_rank() -> None:
    model = keras_model()
    with tf.GradientTape() as tape:
        loss = float(hvd.rank()) * tf.reduce_sum(model(tf.ones((1, 20))))
    layer = model.layers[-1]
    tape = hvd.PartialDistributedGradientTape(
        tape, compression=hvd.MiCROCompressor(density=1.0), local_layers=layer, scale_local_gradients=False
    )
    gradients = tape.gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(gradients[-1], float(hvd.rank()))
    assert same_on_all_ranks(gradients[:2])


def test_variables_of_one_name() -> None:
    p = [tf.Variable(tf.fill([1000], float(i))) for i in range(3)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([(i + 1.0) * tf.reduce_sum(v) for i, v in enumerate(p)])
    compressor = hvd.MiCROCompressor(density=1.0)
    gradients = hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, p)
    assert_close(gradients, [np.full(1000, i + 1.0) for i in range(3)])


@in_functions
@pytest.mark.parametrize("named", [False, True])
def test_allreduce_of_a_tensor(named: bool, function: Callable[..., Any]) -> None:
    """Twice in a step, tensors of the same shape, in two lines: each has a residual of its own."""
    compressor = hvd.MiCROCompressor(density=0.02)
    shape = (40, 50)

    @function
    def reduce(a: Any, b: Any) -> list[Any]:
        return [
            hvd.allreduce(a, compression=compressor, name="test.a" if named else None),
            hvd.allreduce(b, compression=compressor, name="test.b" if named else None),
        ]

    applied, wanted = [np.zeros(shape)] * 2, [np.zeros(shape)] * 2
    for step in range(6):
        tensors = [tf.constant(known_gradient(shape, hvd.rank(), step, i)) for i in range(2)]
        reduced = reduce(*tensors)
        assert same_on_all_ranks(reduced)
        applied = [sum_ + np.asarray(r) for sum_, r in zip(applied, reduced, strict=True)]
        wanted = [
            sum_ + mean_over_ranks(lambda rank, step=step, i=i: known_gradient(shape, rank, step, i))
            for i, sum_ in enumerate(wanted)
        ]
    states = compressor.state_dict()["exchanges"]
    for i in range(2):
        (residual,) = states[i]["residual"].values()
        held_back = stock.allreduce(tf.constant(residual), name=f"test.{i}").numpy()
        np.testing.assert_allclose(applied[i] + held_back, wanted[i], rtol=0, atol=1e-10)


def test_allreduce_in_functions_of_the_users_with_horovods_names() -> None:
    compressor = hvd.MiCROCompressor(density=1.0)

    def allreduce_grads(grads: Any) -> list[Any]:
        return [hvd.allreduce(g, compression=compressor, name=f"test.{i}") for i, g in enumerate(grads)]

    def grouped_allreduce(tensors: Any) -> list[Any]:
        return allreduce_grads(tensors)

    x = tf.ones(2000)
    assert_close(grouped_allreduce([x, 2 * x]), [x, 2 * x])


def test_allreduce_without_a_name_warns() -> None:
    """Once for each place, on rank 0."""
    compressor = hvd.MiCROCompressor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            hvd.allreduce(tf.ones(2000), compression=compressor)
        hvd.allreduce(tf.ones(2000), compression=compressor, name="test.named")
    assert ["without name=" in str(warning.message) for warning in caught].count(True) == (hvd.rank() == 0)


def test_watched_tensor_as_a_source() -> None:
    x, v = tf.ones(2000), tf.Variable(tf.ones(2000))
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(x * v) * (hvd.rank() + 1.0)
    gradients = hvd.DistributedGradientTape(tape, compression=hvd.MiCROCompressor(density=1.0)).gradient(loss, [v, x])
    assert_close(gradients, [np.full(2000, (hvd.size() + 1) / 2)] * 2)


def test_allreduce_multiplies_as_it_is_told_and_leaves_what_is_not_a_gradient() -> None:
    compressor = hvd.MiCROCompressor(density=1.0)
    x = tf.ones(2000) * (hvd.rank() + 1.0)
    mean = (hvd.size() + 1) / 2
    kwargs = {"compression": compressor, "prescale_factor": 2.0, "postscale_factor": 3.0}
    np.testing.assert_allclose(hvd.allreduce(x, name="x", **kwargs), 6 * mean)
    np.testing.assert_allclose(hvd.allreduce(x, name="y", op=hvd.Sum, compression=compressor), hvd.size() * mean)
    whole = hvd.allreduce(tf.range(2000), op=hvd.Sum, name="z", compression=compressor)
    np.testing.assert_array_equal(whole, hvd.size() * np.arange(2000))
    alone = hvd.add_process_set([0]), hvd.add_process_set([hvd.size() - 1])
    np.testing.assert_allclose(hvd.allreduce(x, name="w", process_set=alone[hvd.rank() > 0], **kwargs), 6 * x)
    for process_set in alone:
        hvd.remove_process_set(process_set)
    grouped = hvd.grouped_allreduce([x, tf.ones(3)], name="g", compression=compressor)
    assert_close(grouped, [np.full(2000, mean), np.ones(3)])


@pytest.mark.laws
@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_process_sets(compression: Any) -> None:
    """Ranks 0 and 1 train one model, the last rank another; of two ranks, each its own."""
    ranks = [[0, 1], [hvd.size() - 1]] if hvd.size() > 2 else [[0], [1]]
    sets = [hvd.add_process_set(r) for r in ranks]
    try:
        compressor = compression()
        for process_set in sets:
            for wrap in TAPES.values():
                model = MLP()
                train(model, wrap, tf.function, compressor, hvd.rank(), process_set=process_set)
                reference = MLP()
                if compression is hvd.A2SGDCompressor and process_set.included():
                    compressor.synchronize_parameters([*model.parameters, tf.Variable(0.0)])
                if process_set.included() and process_set.size() > 1:
                    assert compressor.stats.step == STEPS
                    if compression is not hvd.A2SGDCompressor:
                        flat = np.concatenate([p.numpy().ravel() for p in model.parameters])
                        every = stock.allgather(tf.constant(flat[None]), process_set=process_set, name="test.set")
                        assert (every.numpy() == every.numpy()[0]).all()
                else:
                    train(reference, lambda tape, **_: tape, tf.function, None, hvd.rank())
                    assert_close(model.parameters, reference.parameters)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, stock.DistributedOptimizer])
@in_functions
def test_optimizers_of_tensorflow_1(function: Callable[..., Any], make: Callable[..., Any]) -> None:
    def train(compression: Any, rank: int) -> tuple[MLP, Any]:
        model = MLP()
        optimizer = make(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=compression)

        @function
        def step(x: Any, y: Any) -> None:
            pairs = optimizer.compute_gradients(lambda: model.loss(x, y), model.parameters)
            optimizer.apply_gradients(pairs)

        for i in range(STEPS):
            step(*map(tf.constant, batch(rank, i)))
        return model, optimizer

    dense, _ = train(hvd.Compression.none, hvd.rank())
    model, _ = train(hvd.MiCROCompressor(density=1.0), hvd.rank())
    assert_close(model.parameters, dense.parameters)
    model, optimizer = train(hvd.MiCROCompressor, hvd.rank())
    assert same_on_all_ranks(model.parameters)
    assert hvd.get_compressor(optimizer).stats.step == STEPS


@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, stock.DistributedOptimizer])
@pytest.mark.parametrize("passes", [1, 2])
def test_session_of_tensorflow_1(passes: int, make: Callable[..., Any]) -> None:
    def train(compression: Any) -> list[Any]:
        v1 = tf.compat.v1
        with tf.Graph().as_default(), v1.Session() as session:
            x, y = v1.placeholder(tf.float32, (None, 20)), v1.placeholder(tf.int64, (None,))
            model = MLP()
            optimizer = make(
                v1.train.GradientDescentOptimizer(0.1), compression=compression, backward_passes_per_step=passes
            )
            step = optimizer.apply_gradients(optimizer.compute_gradients(model.loss(x, y), model.parameters))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for i in range(STEPS):
                session.run(step, dict(zip((x, y), batch(hvd.rank(), i), strict=True)))
            return session.run(model.parameters)

    assert_close(train(hvd.MiCROCompressor(density=1.0)), train(hvd.Compression.none))
    assert same_on_all_ranks(train(hvd.MiCROCompressor(density=0.05)))
    drifted = [
        np.ptp(stock.allgather(tf.constant(p[None]), name=f"test.{i}"), axis=0).max()
        for i, p in enumerate(train(hvd.A2SGDCompressor(sync_every=1)))
    ]
    assert 0 < max(drifted) < 0.1  # by the last step alone, whose averaging would come with the next one


def test_namespace_is_horovods_with_ours() -> None:
    for name, thing in vars(stock).items():
        assert hasattr(hvd, name) or name[0] == "_" or isinstance(thing, ModuleType)
    assert hvd.Compression.none is stock.Compression.none
    assert (hvd.Compression.micro, hvd.Compression.a2sgd) == (hvd.MiCROCompressor, hvd.A2SGDCompressor)
    assert issubclass(hvd.MiCROCompressor, stock.compression.Compressor)
