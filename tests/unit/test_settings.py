"""Bad settings are refused at construction; warnings and errors say what they should."""

import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from horovod_sparse._compressor import operation, warn
from horovod_sparse.core import A2SGD, QSGD, FlatLayout, MiCRO, TensorSpec, TopK, WarmUp, a2sgd, micro, qsgd, virtual
from horovod_sparse.core.exchange import A2SGDExchange, MiCROExchange, QSGDExchange, TopKExchange

LAYOUT = FlatLayout.flat(10)


def refusal(make, name, value):
    with pytest.raises(ValueError, match=name) as refused:
        make()
    text = str(refused.value)
    assert repr(value) in text
    return text


@pytest.mark.parametrize(
    "density", [0, 0.0, -1, -0.01, 1.5, float("nan"), float("inf"), "x", "0.5", True, None, [0.1], 1j, np.complex64(1)]
)
def test_density_outside_0_to_1_is_refused(density):
    assert "(0, 1]" in refusal(lambda: MiCRO(LAYOUT, density=density), "density", density)
    refusal(lambda: micro.check_settings(density, "adaptive", None), "density", density)
    assert "(0, 1]" in refusal(lambda: TopK(LAYOUT, density), "density", density)


@pytest.mark.parametrize("threshold", ["foo", "Adaptive", "", None, 0.1, np.array(["adaptive", "paper"])])
def test_unknown_threshold_is_refused(threshold):
    text = refusal(lambda: MiCRO(LAYOUT, threshold=threshold), "threshold", threshold)
    assert "adaptive" in text
    assert "paper" in text


@pytest.mark.parametrize("value_dtype", ["int8", "float32", "bf16", "", 16, np.float16, np.dtype("float16")])
def test_unknown_value_dtype_is_refused(value_dtype):
    text = refusal(lambda: MiCRO(LAYOUT, value_dtype=value_dtype), "value_dtype", value_dtype)
    assert '"float16"' in text
    assert "None" in text


@pytest.mark.parametrize("granularity", ["layer", "", None, 1])
def test_unknown_granularity_is_refused(granularity):
    text = refusal(lambda: A2SGD(LAYOUT, granularity), "granularity", granularity)
    assert "model" in text
    assert "tensor" in text


@pytest.mark.parametrize("sync_every", [0, -5, 1.5, 2.0, True, False, "100", float("nan")])
def test_sync_every_that_is_not_a_positive_whole_number_is_refused(sync_every):
    text = refusal(lambda: a2sgd.check_settings("model", sync_every), "sync_every", sync_every)
    assert ">= 1" in text
    assert "None" in text


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 32, -4, 4.0, "4", True, None, float("nan"), [4], np.float32(4)])
def test_bits_other_than_2_4_and_8_are_refused(bits):
    assert "2, 4 or 8" in refusal(lambda: QSGD(LAYOUT, bits), "bits", bits)
    refusal(lambda: qsgd.check_settings(bits), "bits", bits)


@pytest.mark.parametrize("follow", [0, 1, "sgd", 0.5])
@pytest.mark.parametrize("make", [lambda f: MiCROExchange(0.1, "adaptive", None, f), lambda f: TopKExchange(0.1, f)])
def test_follow_learning_rate_other_than_true_false_and_none_is_refused(make, follow):
    assert "SGD" in refusal(lambda: make(follow), "follow_learning_rate", follow)


@pytest.mark.parametrize("schedule", [0.5, 100, "warm-up", (1, 0.1), {"steps": 5}])
@pytest.mark.parametrize("make", [partial(MiCROExchange, 0.1, "adaptive", None), partial(TopKExchange, 0.1)])
def test_schedule_that_is_neither_a_warm_up_nor_a_function_is_refused(make, schedule):
    assert "WarmUp(steps)" in refusal(lambda: make(density_schedule=schedule), "density_schedule", schedule)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "10", True, None, float("nan")])
def test_warm_up_of_no_steps_is_refused(steps):
    assert ">= 1" in refusal(lambda: WarmUp(steps), "WarmUp", steps)


def test_warm_up_goes_evenly_in_the_logarithm_of_the_density():
    densities = [WarmUp(4).density(step, 0.0001) for step in range(7)]
    assert densities == pytest.approx([1, 0.1, 0.01, 0.001, 0.0001, 0.0001, 0.0001])


@pytest.mark.parametrize("verify_every", [0, -5, 1.5, 2.0, True, False, "100", float("nan")])
@pytest.mark.parametrize(
    "make",
    [
        partial(MiCROExchange, 0.1, "adaptive", None),
        partial(TopKExchange, 0.1),
        partial(A2SGDExchange, "model", 100),
        partial(QSGDExchange, 4),
    ],
)
def test_verify_every_that_is_not_a_positive_whole_number_is_refused(make, verify_every):
    text = refusal(lambda: make(verify_every=verify_every), "verify_every", verify_every)
    assert ">= 1" in text
    assert "None" in text


@pytest.mark.parametrize("density", [1, 1.0, 1e-9, np.float32(0.5), np.float64(0.01)])
@pytest.mark.parametrize("threshold", ["adaptive", "paper"])
@pytest.mark.parametrize("value_dtype", [None, "float16", "bfloat16"])
def test_good_settings_of_micro_are_taken(density, threshold, value_dtype):
    assert MiCRO(LAYOUT, density, threshold, value_dtype).k == pytest.approx(max(10 * density, 1))


@pytest.mark.parametrize("granularity", ["model", "tensor"])
@pytest.mark.parametrize("sync_every", [1, 100, np.int64(5), None])
def test_good_settings_of_a2sgd_are_taken(granularity, sync_every):
    a2sgd.check_settings(granularity, sync_every)
    assert A2SGD(LAYOUT, granularity).granularity == granularity


@pytest.mark.parametrize(("density", "k"), [(1, 10), (1.0, 10), (1e-9, 1), (np.float32(0.5), 5), (0.26, 3)])
def test_good_settings_of_topk_are_taken(density, k):
    assert TopK(LAYOUT, density).k == k


@pytest.mark.parametrize("bits", [2, 4, 8, np.int64(4)])
def test_good_settings_of_qsgd_are_taken(bits):
    assert QSGD(LAYOUT, bits).bits == bits


HVD = SimpleNamespace(is_initialized=lambda: True, rank=lambda: 0, Average=0, Sum=1, Adasum=2, Min=3, Max=4, Product=5)
BEFORE_INIT = SimpleNamespace(is_initialized=lambda: False)


@pytest.mark.parametrize(
    ("hvd", "environment", "warns"),
    [
        (HVD, {}, True),
        (HVD, {"HOROVOD_RANK": "3"}, True),
        (SimpleNamespace(is_initialized=lambda: True, rank=lambda: 1), {"HOROVOD_RANK": "0"}, False),
        (BEFORE_INIT, {}, True),
        (BEFORE_INIT, {"HOROVOD_RANK": "0"}, True),
        (BEFORE_INIT, {"HOROVOD_RANK": "1"}, False),
        (BEFORE_INIT, {"OMPI_COMM_WORLD_RANK": "10"}, False),
        (BEFORE_INIT, {"PMI_RANK": "2"}, False),
    ],
)
def test_rank_0_alone_warns_and_once(hvd, environment, warns, monkeypatch):
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("horovod_sparse._compressor._warned_of", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn(hvd, "text", stacklevel=1)
    assert [(str(warning.message), warning.filename) for warning in caught] == ([("text", __file__)] if warns else [])


@pytest.mark.parametrize(("op", "name"), [(0, "hvd.Average"), (1, "hvd.Sum"), (3, "hvd.Min"), ("sum", "'sum'")])
def test_operations_have_the_names_that_users_give_them(op, name):
    assert operation(HVD, op) == name


def test_loaded_state_without_a_step_says_what_is_missing():
    exchange = MiCROExchange(0.1, "adaptive", None)
    exchange.load({"method": "micro"})
    gradient = {TensorSpec("w", (4,), "float32"): np.ones(4, np.float32)}
    with pytest.raises(RuntimeError, match="the loaded state does not fit: it has no 'step'"):
        virtual.run([exchange.step(gradient, 0, 1)])
