"""Figures of one step."""

from __future__ import annotations

from typing import NamedTuple


class StepStats(NamedTuple):
    """What one step selected and sent.

    `density`, `target_density`, `selected` and `threshold` are None for a method that selects no elements: A2SGD, QSGD.
    """

    step: int
    """Steps taken so far, this one included."""
    numel: int
    """d: gradient elements of the whole model."""
    target_density: float | None
    density: float | None
    """selected / numel."""
    selected: int | None
    """Elements updated in this step, over all ranks."""
    threshold: float | None
    """Magnitude from which elements were selected, for top-k by this rank; 0.0 if MiCRO sent everything; None if there
    was none."""
    bytes_sent: int
    """Payload in bytes that this rank handed to Horovod in this step."""
    skipped: bool
    """True if a rank had a non-finite gradient: nothing was exchanged, and the residual is as it was."""
    dense_bytes: int = 0
    """What this rank would have handed to Horovod without compression, in bytes: the gradient itself."""
    selection_s: float = 0.0
    """Seconds in which this rank has selected and coded, and written the update; on a GPU, has asked for it."""
    exchange_s: float = 0.0
    """Seconds from each request to its answer, added up: the network, the ranks' waiting for one another, and, of the
    first round, whatever this rank did between the backward pass and the optimizer's step."""

    @property
    def bytes_saved(self) -> int:
        """Bytes that this rank did not hand to Horovod; negative in a step that averages A2SGD's parameters."""
        return self.dense_bytes - self.bytes_sent
