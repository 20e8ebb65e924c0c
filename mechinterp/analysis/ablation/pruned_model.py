"""The smaller model without pruned heads: its weights, its checkpoint, and its further training beside the full model."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int

from mechinterp import figures
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import estimates, mean_and_sem, ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.config import ExperimentConfig
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.training.general.trainer import DeepRun

MODELS = ("pruned", "full")
ROWS = 5
"""Number of measurements during further training, the first and the last step included."""
DATA_SEED = 1000
"""Seed of the prompts of further training; the first training uses another seed."""
SAVED_WITHIN = 1e-5
"""Largest difference between the saved and the masked model, relative to the largest prediction."""


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """Heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of kept heads, checked.

    Raises:
        ValueError: If it is not a boolean array of this shape, or keeps no head.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must return a boolean array of shape {shape}, got {kept.dtype} of shape {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"A rule must keep at least one of {kept.size} heads, got none.")
    return kept


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """Weights without the dropped heads, with as many heads per layer as the largest layer needs.

    Raises:
        ValueError: If `kept` does not have the model's shape, or keeps no head.
    """
    kept = checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
) -> Checkpoint:
    """Save the pruned model as a checkpoint, and check that it predicts as the masked model.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts on which both predictions are compared.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model does not predict as the masked model.
    """
    checkpoint = checkpoint_of(checkpoint, "save_pruned")
    weights = pruned_weights(checkpoint.weights, kept)
    _save(checkpoint, weights, kept, path)
    saved = load(path, anyway=True)  # its predictions are checked below
    own = saved.predictor.run(prompts)[0]
    expected = checkpoint.predictor.run(prompts, [masked_by(kept)])[0]
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((own - expected).abs().max() / size).item()
    if not error <= SAVED_WITHIN:
        raise ValueError(
            f"{path}: the saved model must predict as the masked model to {SAVED_WITHIN}, got a difference of {error:.2g}."
        )
    return saved


def _save(
    checkpoint: Checkpoint,
    weights: Weights,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    steps: int = 0,
) -> None:
    """Write a pruned model, after `steps` further steps; its heads are renumbered in the order of `kept_heads`."""
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    origin = {"pruned_from": checkpoint.name, "kept_heads": heads}
    save(
        path,
        replace(checkpoint.config, model=weights.model),
        weights,
        step=checkpoint.step + steps,
        assumed=checkpoint.assumed,
        origin=origin | ({"fine_tuned_steps": steps} if steps else {}),
    )


@dataclass(frozen=True, eq=False, repr=False)
class FineTuning(Result):
    """Excess risk of the pruned and of the full model while both are trained further on the same prompts."""

    step: Int[np.ndarray, " row"]
    """Number of updates since pruning."""
    risk: Float[np.ndarray, "model row"]
    """Excess risk, unit y^2; one row for each of `MODELS`."""
    risk_sem: Float[np.ndarray, "model row"]
    ratio: Float[np.ndarray, "model row"]
    """Risk divided by the risk of the full model before further training."""
    ratio_sem: Float[np.ndarray, "model row"]
    """Standard error of `ratio`, paired over prompts."""
    checkpoint: Checkpoint
    """The full model before further training."""
    kept: Bool[np.ndarray, "layer head"]
    weights: Weights
    """Weights of the pruned model after the last step."""

    def __repr__(self) -> str:
        ends = zip(self.ratio[:, -1], self.ratio_sem[:, -1], strict=True)
        pruned, full = (with_error(*pair) for pair in ends)
        return (
            f"FineTuning({self.step[-1]} steps: {self.ratio[0, 0]:.3g} to {pruned} times the full model's risk; "
            f"full model {full})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per model and step."""
        return frame_of(self, *with_sem("risk", "ratio"), model=MODELS, step=self.step)

    def plot(self) -> go.Figure:
        """The ratio over steps."""
        return figures.lines(
            self.step,
            figures.named(MODELS, self.ratio, self.ratio_sem),
            title="Excess risk during further training, relative to the full model",
            x_title="steps since pruning",
            y_title="ratio",
        )

    def save(self, path: str | Path) -> None:
        """Write the pruned model after the last step as a checkpoint.

        Raises:
            CheckpointError: If the folder is not empty or cannot be written.
        """
        _save(self.checkpoint, self.weights, self.kept, path, steps=int(self.step[-1]))


@torch.inference_mode(False)
def fine_tune(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    prompts: Prompts,
    *,
    steps: int = 400,
    learning_rate: float | None = None,
    progress: ProgressCallback = no_progress,
) -> FineTuning:
    """Train a pruned model further as in its training: context lengths, clipping, and the decay of
    the step size.

    Pruned heads stay zero and get no gradient. The full model is trained the same way as a control.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts to measure risks on; they must not have selected the heads.
        learning_rate: Learning rate of the first step; None means that of the training.
        progress: Optional progress callback.
    Raises:
        ValueError: If this package has not trained the model, no head is kept, or steps or learning_rate
            are out of range.
    Source:
        A choice made here; the full model is trained as long, as a control.
    See also:
        `prune`.
    Example:
        >>> from mechinterp import load, prune, sample_prompts
        >>> checkpoint = load("checkpoints/sparse-h4-noise0.1-s0")
        >>> prompts = sample_prompts(checkpoint.task, 400)
        >>> found = fine_tune(checkpoint, prune(checkpoint.model, prompts[:200]).kept, prompts[200:], steps=5)
        >>> bool(found.risk[0, -1] < found.risk[0, 0])
        True
    """
    checkpoint = checkpoint_of(checkpoint, "fine_tune")
    if checkpoint.format != "native":
        raise ValueError(
            f"fine_tune needs a model that this package trained, got one of format {checkpoint.format}."
        )
    train, every = checkpoint.config.train, max(1, steps // (ROWS - 1))
    train = replace(
        train,
        steps=steps,
        learning_rate=train.learning_rate if learning_rate is None else learning_rate,
        data_seed=DATA_SEED,
        log_every=every,
        snapshot_every=every,
        n_eval_prompts=1,
    )
    config = replace(checkpoint.config, train=train)
    starts = (pruned_weights(checkpoint.weights, kept), checkpoint.weights)
    trained = [_trained(config, start, progress) for start in starts]
    errors = np.array(
        [[masked_errors(w, prompts, [[]])[:, 0] for w in run.values()] for run in trained]
    )
    before = errors[1, 0]  # the full model before further training
    by_prompt = np.moveaxis(errors, -1, 0)
    steps_made, weights = zip(*trained[0].items(), strict=True)
    return FineTuning(
        step=np.array(steps_made),
        checkpoint=checkpoint,
        kept=kept,
        weights=weights[-1],
        **estimates(risk=mean_and_sem(by_prompt), ratio=ratio_and_sem(by_prompt, before)),
    )


def _trained(
    config: ExperimentConfig, start: Weights, progress: ProgressCallback
) -> dict[int, Weights]:
    """Weights by step."""
    run = DeepRun({"": replace(config, model=start.model)}, start=start)
    for _ in progress(range(-(-config.train.steps // config.train.log_every)), "training on"):
        run.advance()
    (trained,) = run.results().values()
    return trained.snapshots | {trained.step: trained.weights}
