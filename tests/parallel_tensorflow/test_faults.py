"""What goes wrong: one error, or the right result, on all ranks in the same step; never a hang."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from training import assert_close, known_gradient, same_on_all_ranks

import horovod_sparse.tensorflow as hvd

COMPRESSIONS = {
    "micro": hvd.MiCROCompressor,
    "a2sgd": hvd.A2SGDCompressor,
    "topk": hvd.TopKCompressor,
    "qsgd": hvd.QSGDCompressor,
}
LAST = hvd.size() - 1
each = pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
pytestmark = pytest.mark.laws


def variables(*shapes: Sequence[int], dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype), name=f"v{i}") for i, shape in enumerate(shapes or ((30, 50), (50,)))]


def reduce(
    parameters: Sequence[tf.Variable], gradients: Sequence[Any], compression: Any, wrap: Any = None
) -> list[Any]:
    with tf.GradientTape() as tape:
        pairs = zip(parameters, gradients, strict=True)
        loss = tf.add_n([tf.reduce_sum(p * tf.cast(g, p.dtype)) for p, g in pairs])
    tape = (wrap or hvd.DistributedGradientTape)(tape, compression=compression)
    return tape.gradient(loss, list(parameters))


def gradients(parameters: Sequence[tf.Variable], step: int = 0) -> list[Any]:
    return [known_gradient(p.shape, hvd.rank(), step, i) for i, p in enumerate(parameters)]


def error_on_all_ranks(act: Callable[[], Any]) -> str:
    """The error that every rank gets, which must be the same; stock Horovod's graphs wrap it in one of TensorFlow's."""
    with pytest.raises((RuntimeError, tf.errors.OpError)) as caught:
        act()
    text = re.sub(r"(?s).*\nRuntimeError: (.+?)\n.*", r"\1", str(caught.value))
    messages = stock.allgather_object(text, name="test.messages")
    assert len(set(messages)) == 1, messages
    return messages[0]


# Gradients that are not finite, or nothing


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", [hvd.DistributedGradientTape, stock.DistributedGradientTape])
@each
def test_one_ranks_non_finite_gradient_reaches_all_and_touches_no_residual(
    compression: Any, wrap: Any, value: float
) -> None:
    compressor = compression()
    parameters = variables((40, 50))
    for step in range(2):
        reduce(parameters, gradients(parameters, step), compressor, wrap)
    before = compressor.state_dict()
    spoiled = gradients(parameters, 2)
    if hvd.rank() == LAST:
        spoiled[0][3, 4] = value
    assert all(np.isnan(g).all() for g in reduce(parameters, spoiled, compressor, wrap))
    assert compressor.stats.skipped
    after = compressor.state_dict()
    for name, part in before.get("residual", {}).items():
        np.testing.assert_array_equal(part, after["residual"][name])
    for step in (3, 4):
        reduced = reduce(parameters, gradients(parameters, step), compressor, wrap)
        assert all(np.isfinite(g).all() for g in reduced)
        assert not compressor.stats.skipped


def test_gradients_of_zero_select_nothing() -> None:
    compressor = hvd.MiCROCompressor()
    parameters = variables()
    for step in range(4):
        zero = step in (0, 2)
        given = [0 * g if zero else g for g in gradients(parameters, step)]
        reduced = reduce(parameters, given, compressor)
        assert all(np.isfinite(g).all() for g in reduced)
        if step == 0:
            assert compressor.stats.selected == 0
            assert_close(reduced, given, 0, 0)
    assert same_on_all_ranks(reduced)


def test_flush_sends_everything_even_if_one_rank_alone_asks() -> None:
    compressor = hvd.MiCROCompressor(density=0.02)
    parameters = variables()
    for step in range(3):
        reduce(parameters, gradients(parameters, step), compressor)
    if hvd.rank() == 0:
        compressor.flush()
    reduce(parameters, gradients(parameters, 3), compressor)
    assert compressor.stats.density == 1.0
    assert all((part == 0).all() for part in compressor.state_dict()["residual"].values())
    reduce(parameters, gradients(parameters, 4), compressor)
    assert compressor.stats.density < 0.1


# Ranks that differ


SETTINGS = {
    "density": lambda: hvd.MiCROCompressor(density=0.1 if hvd.rank() == 0 else 0.2),
    "threshold": lambda: hvd.MiCROCompressor(threshold="paper" if hvd.rank() == 0 else "adaptive"),
    "value_dtype": lambda: hvd.MiCROCompressor(value_dtype="float16" if hvd.rank() == LAST else None),
    "granularity": lambda: hvd.A2SGDCompressor("tensor" if hvd.rank() == LAST else "model"),
    "sync_every": lambda: hvd.A2SGDCompressor(sync_every=10 + hvd.rank()),
    "bits": lambda: hvd.QSGDCompressor(2 if hvd.rank() == 0 else 8),
    "the method": lambda: hvd.MiCROCompressor() if hvd.rank() == 0 else hvd.A2SGDCompressor(),
}


@pytest.mark.parametrize(("setting", "make"), SETTINGS.items(), ids=SETTINGS)
@pytest.mark.parametrize("wrap", [hvd.DistributedGradientTape, stock.DistributedGradientTape])
def test_settings_that_differ(wrap: Any, setting: str, make: Callable[[], Any]) -> None:
    parameters, compressor = variables((40, 50)), make()
    message = error_on_all_ranks(lambda: reduce(parameters, gradients(parameters), compressor, wrap))
    assert f"the ranks disagree: {setting} is" in message


@each
def test_operations_that_differ(compression: Any) -> None:
    """From the beginning, and later."""
    for after in (0, 2):
        parameters, compressor = variables(), compression()

        def step(op: Any, parameters: Any = parameters, compressor: Any = compressor) -> None:
            wrap = partial(hvd.DistributedGradientTape, op=op)
            reduce(parameters, gradients(parameters), compressor, wrap)

        for _ in range(after):
            step(hvd.Average)
        message = error_on_all_ranks(lambda step=step: step(hvd.Sum if hvd.rank() == LAST else hvd.Average))
        assert "op is 'Average' on rank 0, but 'Sum'" in message


SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "deeper": lambda: [(30, 50), (50,), (50, 40)][: 3 if hvd.rank() == LAST else 2],
    "wider": lambda: [(30, 50), (50,)] if hvd.rank() == 0 else [(30, 60), (60,)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@each
def test_models_that_differ(compression: Any, shapes: Callable[[], list[tuple[int, ...]]]) -> None:
    parameters = variables(*shapes())
    message = error_on_all_ranks(lambda: reduce(parameters, gradients(parameters), compression()))
    assert "the next parameter is" in message
    assert "Build the same model" in message


@each
def test_dtypes_that_differ(compression: Any) -> None:
    parameters = variables(dtype="float64" if hvd.rank() == 0 else "float32")
    message = error_on_all_ranks(lambda: reduce(parameters, gradients(parameters), compression()))
    assert "float64" in message
    assert "float32" in message


@each
def test_graphs_that_begin_to_differ(compression: Any) -> None:
    """After some steps, one rank leaves a variable out."""
    parameters, compressor = variables((30, 50), (50,), (20, 10)), compression()
    for step in range(3):
        reduce(parameters, gradients(parameters, step), compressor)
    used = parameters[: 2 if hvd.rank() == LAST else 3]
    message = error_on_all_ranks(lambda: reduce(used, gradients(used, 3), compressor))
    assert "the next parameter is" in message


@each
def test_two_models_in_another_order(compression: Any) -> None:
    models, compressor = [variables((30, 50)), variables((30, 50))], compression()
    for step in range(2):
        for model in models:
            reduce(model, gradients(model, step), compressor)
    model = models[0 if hvd.rank() == LAST else 1]
    message = error_on_all_ranks(lambda: reduce(model, gradients(model, 2), compressor))
    assert "in another order" in message


@each
def test_models_that_are_right_again_go_on(compression: Any) -> None:
    parameters, compressor = variables((30, 50), (50,)), compression()
    used = parameters[: 1 if hvd.rank() == LAST else 2]
    error_on_all_ranks(lambda: reduce(used, gradients(used), compressor))
    for step in range(3):
        reduced = reduce(parameters, gradients(parameters, step), compressor)
    if compression is not hvd.A2SGDCompressor:
        assert same_on_all_ranks(reduced)
    assert compressor.stats.step == 3


def test_error_in_a_function_and_in_fit_tells_what_is_wrong() -> None:
    parameters, compressor = variables(), hvd.MiCROCompressor(density=0.1 + 0.1 * hvd.rank())
    with pytest.raises((tf.errors.OpError, RuntimeError), match="the ranks disagree: density"):
        tf.function(lambda: reduce(parameters, gradients(parameters), compressor))()


# State


@pytest.mark.parametrize("wrap", [hvd.DistributedGradientTape, stock.DistributedGradientTape])
@pytest.mark.parametrize(
    "make", [partial(hvd.MiCROCompressor, 0.05), partial(hvd.TopKCompressor, 0.05), hvd.QSGDCompressor]
)
def test_saved_state_goes_on_where_it_was(make: Callable[[], Any], wrap: Any) -> None:
    """Also where stock Horovod reduces the model in parts."""
    shapes = (40, 50), (2000,)

    def run(compressor: Any, parameters: Sequence[Any], steps: range) -> list[Any]:
        for step in steps:
            reduced = reduce(parameters, gradients(parameters, step), compressor, wrap)
        return reduced

    whole, parameters = make(), variables(*shapes)
    run(whole, parameters, range(4))
    state = whole.state_dict()
    expected = run(whole, parameters, range(4, 7))
    loaded, again = make(), variables(*shapes)
    loaded.load_state_dict(state)
    assert_close(run(loaded, again, range(4, 7)), expected, 0, 0)
    whole.load_state_dict(state)
    assert_close(run(whole, parameters, range(4, 7)), expected, 0, 0)
    assert whole.stats.step == 7


def test_state_that_does_not_fit() -> None:
    compressor, parameters, others = hvd.MiCROCompressor(), variables((30, 50)), variables((20, 50))
    reduce(parameters, gradients(parameters), compressor)
    loaded = hvd.MiCROCompressor()
    loaded.load_state_dict(compressor.state_dict())
    message = error_on_all_ranks(lambda: reduce(others, gradients(others), loaded))
    assert "the loaded state does not fit" in message
    with pytest.raises(ValueError, match="a2sgd"):
        loaded.load_state_dict(hvd.A2SGDCompressor().state_dict())
    with pytest.raises(ValueError, match="load_state_dict"):
        loaded.load_state_dict(None)


def test_reset_on_one_rank_alone() -> None:
    compressor, parameters = hvd.MiCROCompressor(), variables()
    for step in range(2):
        reduce(parameters, gradients(parameters, step), compressor)
    if hvd.rank() == LAST:
        compressor.reset()
    message = error_on_all_ranks(lambda: reduce(parameters, gradients(parameters, 2), compressor))
    assert "reset()" in message
    compressor.reset()
    reduce(parameters, gradients(parameters, 3), compressor)
    assert compressor.stats.step == 1


# What is not supported


@each
def test_functions_that_xla_compiles(compression: Any) -> None:
    parameters = variables()
    given = gradients(parameters)
    for wrap in (hvd.DistributedGradientTape, stock.DistributedGradientTape):
        with pytest.raises(ValueError, match="jit_compile=False"):
            tf.function(lambda wrap=wrap: reduce(parameters, given, compression(), wrap), jit_compile=True)()


@each
def test_operations_that_make_no_sense(compression: Any) -> None:
    x = tf.ones(2000)
    for op, name in ((hvd.Adasum, "Adasum"), (hvd.Min, "Min")):
        with pytest.raises(ValueError, match=f"^{compression.__name__} does not work with op=hvd.{name}: use op="):
            hvd.allreduce(x, op=op, compression=compression())
    with pytest.raises(ValueError, match="DistributedGradientTape"):
        hvd.reducescatter(x, compression=compression())
    with pytest.raises(ValueError, match="DistributedGradientTape"):
        compression.compress(x)


@each
def test_shapes_that_are_not_known(compression: Any) -> None:
    function = tf.function(
        lambda x: hvd.allreduce(x, compression=compression()), input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    with pytest.raises(ValueError, match=r"the shape of .+ is \(None,\): .+tf.ensure_shape"):
        function(tf.ones(2000))


def test_complex_gradients() -> None:
    parameters = [tf.Variable(tf.zeros(2000, tf.complex64), name="z")]
    with pytest.raises(ValueError, match="complex64"):
        reduce(parameters, [np.ones(2000)], hvd.MiCROCompressor())


def test_parameters_that_are_not_known() -> None:
    with pytest.raises(RuntimeError, match="first step"):
        hvd.A2SGDCompressor().synchronize_parameters()
    p = tf.Variable(tf.fill([10], float(hvd.rank())))
    hvd.A2SGDCompressor().synchronize_parameters([p])
    np.testing.assert_allclose(p, LAST / 2)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy, copy.copy])
def test_compressor_cannot_be_pickled_or_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^a TopKCompressor cannot be pickled or copied: save its state_dict\(\)"):
        duplicate(hvd.TopKCompressor())
    assert pickle.loads(pickle.dumps(hvd.TopKCompressor)) is hvd.TopKCompressor


def test_settings_that_cannot_be() -> None:
    tape = tf.GradientTape()
    for options, message in (
        ({"compression": "micro"}, "compression='micro'"),
        ({"compression": hvd.Compression.micro, "op": hvd.Adasum}, "MiCROCompressor does not work with op=hvd.Adasum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor=2.0: .+ with op=hvd.Sum:"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0: it must"),
        ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor='2': it must"),
        ({"groups": 0}, "groups=0: it must"),
        ({"groups": "all"}, "groups='all': it must"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.raises(TypeError, match=r"takes a tf\.GradientTape, not None"):
        hvd.DistributedGradientTape(None)
    hvd.DistributedGradientTape(tape, groups=np.int64(2), gradient_predivide_factor=np.float32(2))
    with pytest.raises(TypeError, match="get_compressor"):
        hvd.get_compressor(hvd.DistributedGradientTape(tape))
    with pytest.raises(TypeError, match="get_compressor"):
        hvd.get_compressor(stock.DistributedGradientTape(tape))
    compressor = hvd.MiCROCompressor()
    assert hvd.get_compressor(compressor) is compressor
    assert hvd.get_compressor(hvd.MiCROCompressor) is hvd.get_compressor(
        hvd.DistributedGradientTape(tape, compression=hvd.MiCROCompressor)
    )
    stocks = stock.DistributedGradientTape(tape, compression=hvd.MiCROCompressor)
    assert isinstance(hvd.get_compressor(stocks), hvd.MiCROCompressor)
