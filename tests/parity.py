"""One front end on known gradients: what it selects and applies. `mpirun -np N python tests/parity.py FRAMEWORK FILE`

Rank 0 writes the update, the indices and the threshold of each step into the file. test_parity.py compares the files.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

# In another order than that of the names, and of several dtypes.
TENSORS = {"c": ((30, 40), "float32"), "a": ((700,), "float32"), "b": ((8, 3, 20), "float16"), "d": ((), "float32")}
STEPS = 12
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "micro": ("MiCROCompressor", {"density": 0.02}),
    "micro, paper": ("MiCROCompressor", {"density": 0.02, "threshold": "paper"}),
    "micro, float16": ("MiCROCompressor", {"density": 0.05, "value_dtype": "float16"}),
    "micro, bfloat16": ("MiCROCompressor", {"density": 0.05, "value_dtype": "bfloat16"}),
    "a2sgd": ("A2SGDCompressor", {}),
    "a2sgd, tensor": ("A2SGDCompressor", {"granularity": "tensor"}),
    "topk": ("TopKCompressor", {"density": 0.02}),
    "qsgd": ("QSGDCompressor", {}),
}


def gradient(rank: int, step: int, index: int) -> NDArray[Any]:
    """What each rank's backward pass gives; of another scale from step 6 on, and not finite on rank 1 in step 8."""
    shape, dtype = list(TENSORS.values())[index]
    values = (1 if step < 6 else 5) * np.random.default_rng((rank, step, index)).standard_normal(shape)
    if (rank, step, index) == (1, 8, 0):
        values[0, 0] = np.inf
    return np.asarray(values, dtype)


def flat(tensors: list[NDArray[Any]]) -> NDArray[np.float64]:
    """In the order of the names."""
    named = sorted(zip(TENSORS, tensors, strict=True))
    return np.concatenate([np.asarray(tensor, np.float64).ravel() for _, tensor in named])


def with_torch() -> dict[str, NDArray[Any]]:
    import horovod.torch as hvd
    import torch

    import horovod_sparse.torch as front_end

    hvd.init()
    results = {}
    for key, (name, settings) in SETTINGS.items():
        parameters = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
            for name, (shape, dtype) in TENSORS.items()
        }
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=1.0),
            named_parameters=parameters.items(),
            compression=getattr(front_end, name)(**settings),
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            gradients = [torch.from_numpy(gradient(hvd.rank(), step, i)) for i in range(len(TENSORS))]
            pairs = zip(parameters.values(), gradients, strict=True)
            sum((p.float() * g.float()).sum() for p, g in pairs).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            results[f"{key}/{step}"] = flat([p.grad.numpy() for p in parameters.values()])
            stats = front_end.get_compressor(optimizer).stats
            results[f"{key}/{step}/stats"] = of_interest(stats)
    return results


def with_tensorflow() -> dict[str, NDArray[Any]]:
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    hvd.init()
    results = {}
    for key, (name, settings) in SETTINGS.items():
        parameters = [tf.Variable(tf.zeros(shape, dtype), name=name) for name, (shape, dtype) in TENSORS.items()]
        compressor = getattr(hvd, name)(**settings)

        @tf.function
        def reduce(gradients: Any, parameters: Any = parameters, compressor: Any = compressor) -> Any:
            with tf.GradientTape() as tape:
                pairs = zip(parameters, gradients, strict=True)
                loss = tf.add_n([tf.reduce_sum(tf.cast(p, tf.float32) * tf.cast(g, tf.float32)) for p, g in pairs])
            return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, parameters)

        for step in range(STEPS):
            gradients = [tf.constant(gradient(hvd.rank(), step, i)) for i in range(len(TENSORS))]
            results[f"{key}/{step}"] = flat([g.numpy() for g in reduce(gradients)])
            results[f"{key}/{step}/stats"] = of_interest(compressor.stats)
    return results


def of_interest(stats: Any) -> NDArray[np.float64]:
    return np.array([stats.step, stats.numel, stats.selected or 0, stats.threshold or 0, stats.skipped], np.float64)


if __name__ == "__main__":
    framework, file = sys.argv[1:]
    results = with_torch() if framework == "torch" else with_tensorflow()
    module = sys.modules[f"horovod.{framework}"]
    if module.rank() == 0:
        np.savez(file, **results)
