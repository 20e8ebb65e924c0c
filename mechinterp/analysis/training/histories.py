"""Training history of a checkpoint: logged rows, and weights of earlier steps."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.models.run.predictor import Source

MAX_NUMBERS = 100_000  # entries of all circuits together: a page with them stays small


def with_snapshots(source: Source, analysis: str) -> Checkpoint | HookedModule:
    """A checkpoint, or a module that a monitor watched, that has weights of earlier steps.

    Raises:
        ValueError: If it has none, or is another model.
    """
    if not getattr(source, "snapshots", None):
        raise ValueError(f"{analysis} needs a checkpoint with snapshots, got {_told(source)}.")
    return source  # type: ignore[return-value]


def snapshots_of(source: Source, analysis: str) -> Checkpoint:
    """A checkpoint that has weights of earlier steps.

    Raises:
        ValueError: If it is another model, or has none.
    """
    return checkpoint_of(with_snapshots(source, analysis), analysis)


def with_history(source: Source, analysis: str) -> pd.DataFrame:
    """The history of a checkpoint.

    Raises:
        ValueError: If there is none.
    """
    history = getattr(source, "history", None)
    if history is None:
        raise ValueError(f"{analysis} needs a checkpoint with a history, got {_told(source)}.")
    return history


def _told(source: Source) -> str:
    path = getattr(source, "path", None)
    return type(source).__name__ if path is None else f"{path} without"


def kept_steps(checkpoint: Checkpoint) -> list[int]:
    """Steps of the snapshots; of very many large ones every second, third, ... and the last."""
    steps = list(checkpoint.snapshots)
    stride = -(-len(steps) * checkpoint.weights.circuits.QK.numel() // MAX_NUMBERS)
    return steps[::-stride][::-1]


def loss_curve(checkpoint: Checkpoint | HookedModule) -> Float[np.ndarray, "row 2"]:
    """Step and eval_loss of a checkpoint's history; no rows if there is none."""
    if checkpoint.history is None:
        return np.zeros((0, 2))
    rows = checkpoint.history.drop_duplicates("step")
    return rows[["step", "eval_loss"]].to_numpy(dtype=np.float64)


def loss_at(curve: Float[np.ndarray, "row 2"], steps: list[int]) -> Float[np.ndarray, " snapshot"]:
    """The loss of the last logged step up to each of the steps; NaN where there is none."""
    rows = np.searchsorted(curve[:, 0], steps, side="right") - 1
    return np.array([curve[row, 1] if row >= 0 else np.nan for row in rows])
