"""Predictions that the owner of a model recorded, and their comparison with those of a reading."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.foreign.readings.case import predicted_by
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.io.tensor_files import read_file
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run import general
from mechinterp.models.weights import Weights

_ARRAYS = ("x", "y", "x_query", "prediction")
_WRITTEN = "write it by np.savez('batch.npz', x=x, y=y, x_query=x_query, prediction=prediction)"
_LEAST_DISTINCT = 32
"""Smallest number of distinct prompts that prove a reading."""
EXACT, _EXACT_HALF = 1e-3, 2e-2
"""Largest difference of a proven reading, in standard deviations of the prediction: of recordings in
single precision and in half precision."""
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Recording:
    """Prompts with the predictions that the owner's model made for them."""

    prompts: Prompts
    """In double precision; the targets are the recorded predictions."""
    prediction: Float[Tensor, "batch row d_y"]
    """One row: at the query. L + 1 rows: at every x, the query last."""
    half: bool
    """True: the predictions are numbers in half precision."""

    @property
    def length(self) -> int:
        """Number of pairs in each prompt."""
        return self.prompts.x.shape[1]

    @property
    def at_every_x(self) -> bool:
        return self.prediction.shape[1] > 1

    @property
    def tolerance(self) -> float:
        """Largest difference of a proven reading, in standard deviations of the prediction."""
        return _EXACT_HALF if self.half else EXACT

    @property
    def spread(self) -> Float[Tensor, "row d_y"]:
        """Standard deviation over the prompts; where it is 0, that of the output at all positions."""
        spread = self.prediction.std(0)
        return torch.where(spread > 0, spread, self.prediction.flatten(0, 1).std(0))

    def difference(self, predicted: Float[Tensor, "batch row d_y"]) -> float:
        """Largest difference over prompts, positions and outputs, in standard deviations."""
        gap = ((predicted - self.prediction).abs() / self.spread).max()
        return float(gap.nan_to_num(torch.inf, torch.inf))

    def r2(self, predicted: Float[Tensor, "batch row d_y"]) -> float:
        """Fraction of the variance of the recorded predictions that others explain."""
        rest = (predicted - self.prediction).square().sum()
        around = self.prediction - self.prediction.mean(0)
        return float(1 - rest / around.square().sum())

    def rows(self, rows: slice) -> "Recording":
        """Some of the prompts."""
        return Recording(self.prompts[rows], self.prediction[rows], self.half)


def read_recording(file: str | Path) -> Recording:
    """Recorded predictions in an .npz file of x, y, x_query and prediction.

    Args:
        file: x is [batch, L, d_x], y [batch, L] or [batch, L, d_y], x_query [batch, d_x], prediction [batch], [batch, d_y]
            or, at every x with the query last, [batch, L + 1, d_y].
    Raises:
        CheckpointError: If the file is another one, its shapes do not fit together, it has fewer than 32 distinct
            prompts, or all its predictions are equal.
    """
    file = Path(file)
    if file.suffix != ".npz" or not file.is_file():
        got = "another file" if file.exists() else "nothing"
        raise CheckpointError(f"{file}: predictions must be an .npz file, got {got}; {_WRITTEN}.")
    arrays, numbers = read_file(file)
    if missing := [name for name in _ARRAYS if name not in arrays]:
        named = ", ".join([*arrays, *numbers][:8]) or "nothing"
        raise CheckpointError(
            f"{file}: predictions need the arrays {', '.join(_ARRAYS)}; {missing[0]} is missing, got {named}; {_WRITTEN}."
        )
    with np.load(file, allow_pickle=False) as stored:
        half = stored["prediction"].dtype == np.float16
    try:
        return recording_of(*(arrays[name] for name in _ARRAYS), half=half)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def recording_of(
    x: Tensor, y: Tensor, x_query: Tensor, prediction: Tensor, *, half: bool = False
) -> Recording:
    """Recorded predictions from tensors, checked.

    Args:
        half: True: the predictions were computed in half precision; numbers that are exact in half precision count so,
            too.
    Raises:
        ValueError: As `read_recording`.
    Example:
        >>> x, x_query = torch.randn(32, 8, 2), torch.randn(32, 2)
        >>> recording_of(x, x.sum(-1), x_query, x_query.sum(-1)).length
        8
    """
    x, y, x_query, prediction = (each.detach().double() for each in (x, y, x_query, prediction))
    y = y[..., None] if y.ndim == 2 else y
    if x.ndim != 3 or y.ndim != 3 or y.shape[:2] != x.shape[:2]:
        got = f"got x {list(x.shape)}, y {list(y.shape)}"
        raise ValueError(f"x must be [batch, L, d_x] and y [batch, L, d_y], {got}.")
    n_prompts, length, d_x = x.shape
    if x_query.shape != (n_prompts, d_x):
        raise ValueError(f"x_query must be {[n_prompts, d_x]}, got {list(x_query.shape)}.")
    rows = _rows(prediction, n_prompts, length, y.shape[2])
    for name, tensor in (("x", x), ("y", y), ("x_query", x_query), ("prediction", rows)):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} must be finite.")
    distinct = torch.cat([x.flatten(1), y.flatten(1), x_query], 1).unique(dim=0)
    if len(distinct) < _LEAST_DISTINCT:
        raise ValueError(
            f"predictions must be for at least {_LEAST_DISTINCT} distinct prompts, got {len(distinct)}."
        )
    if not (rows.flatten(0, 1).std(0) > 1e-12 * rows.abs().amax().clamp(min=1e-300)).all():
        raise ValueError("predictions must differ between prompts; equal ones prove nothing.")
    half = half or any(torch.equal(rows.to(kind).double(), rows) for kind in HALVES)
    query = rows[:, -1]
    return Recording(Prompts(x, y, x_query, query, query, None), rows, half)


def _rows(
    prediction: Tensor, n_prompts: int, length: int, d_y: int
) -> Float[Tensor, "batch row d_y"]:
    """Predictions at the query alone, or at every x."""
    shape = tuple(prediction.shape)
    if shape == (n_prompts,) and d_y == 1:
        return prediction[:, None, None]
    if shape == (n_prompts, d_y):
        return prediction[:, None]
    if shape == (n_prompts, length + 1) and d_y == 1:
        return prediction[..., None]
    if shape == (n_prompts, length + 1, d_y):
        return prediction
    raise ValueError(
        f"prediction must be {[n_prompts, d_y]} or, at every x, {[n_prompts, length + 1, d_y]}, got {list(shape)}."
    )


def require_one_task(recordings: Sequence[Recording]) -> tuple[int, int]:
    """d_x and d_y of the recordings.

    Raises:
        ValueError: If they differ.
    """
    sizes = {(each.prompts.x.shape[2], each.prompts.y.shape[2]) for each in recordings}
    if len(sizes) > 1:
        raise ValueError(f"predictions must have one d_x and one d_y, got {sorted(sizes)}.")
    return next(iter(sizes))


def predictions_of(weights: Weights, recording: Recording) -> Float[Tensor, "batch row d_y"]:
    """Predictions of a model for recorded prompts, in double precision.

    Raises:
        ValueError: If the model has no predictions at every x, or the prompts do not fit it.
    """
    if recording.at_every_x:
        if weights.model.layout != "in_turn":
            raise ValueError(
                "predictions at every x need tokens x and y in turn; joined tokens (x, y) see their own y: record those at the query alone."
            )
        return general.predict_at_every(weights, recording.prompts.to(weights.dtype)).double()
    return predicted_by(weights, recording.prompts)[:, None]
