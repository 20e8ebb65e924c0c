"""Losses of several models and learners on the same prompts, over context lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import TaskConfig
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.run.predictor import Learner, Source, learner_of


@dataclass(frozen=True, eq=False, repr=False)
class SharedLosses(Result):
    """Mean squared error of models against the noisy query response, on shared prompts; unit y^2."""

    models: tuple[str, ...]
    context_length: Int[np.ndarray, " length"]
    n_prompts: int
    loss: Float[np.ndarray, "length model"]
    loss_sem: Float[np.ndarray, "length model"]
    gap: Float[np.ndarray, "length model"]
    """Loss minus the loss of the first model."""
    gap_sem: Float[np.ndarray, "length model"]
    """Standard error of `gap`, paired over prompts."""

    def __repr__(self) -> str:
        rows = zip(self.models, self.loss[0], self.loss_sem[0], strict=True)
        losses = "; ".join(f"{name} {loss:.4f} ± {sem:.4f}" for name, loss, sem in rows)
        return f"SharedLosses(L = {self.context_length[0]}: {losses})"

    def to_frame(self) -> pd.DataFrame:
        """One row per context length and model."""
        names = with_sem("loss", "gap")
        return frame_of(self, *names, context_length=self.context_length, model=self.models)

    def plot(self) -> go.Figure:
        """Loss of every model over the context length."""
        return figures.lines(
            self.context_length,
            figures.named(self.models, self.loss.T, self.loss_sem.T),
            title=f"Loss over context length, {self.n_prompts} shared prompts each",
            x_title="context length L",
            y_title="loss (y²)",
        )


def shared_losses(
    models: Mapping[str, Source | Learner],
    task: TaskConfig,
    *,
    context_lengths: Sequence[int] | None = None,
    n_prompts: int = 20_000,
    seed: int = 0,
) -> SharedLosses:
    """Losses of models on shared prompts, with paired differences from the first model.

    Args:
        models: By name: weights, checkpoints or hooked models of the task's d_x and d_y, or
            functions from prompts to predictions such as those of `icl.predictors`.
        context_lengths: Numbers of pairs; None means the task's own.
    Raises:
        ValueError: If there is no model.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> losses = shared_losses({"zero": zero_head(d_x=5)}, TaskConfig(noise_var=0.0), n_prompts=4096)
        >>> abs(losses.loss[0, 0] - 1.0) < 4 * losses.loss_sem[0, 0]
        np.True_
    """
    if not models:
        raise ValueError("shared_losses needs at least one model, got none.")
    learners = [learner_of(model) for model in models.values()]
    lengths = [task.context_length] if context_lengths is None else list(context_lengths)
    columns = []
    for length in lengths:
        squares = []
        for prompts in prompt_chunks(task, n_prompts, seed=seed, context_length=length):
            errors = [learner(prompts) - prompts.y_query for learner in learners]
            squares.append(torch.stack([error.square().mean(1) for error in errors], 1))
        losses = torch.cat(squares).double().numpy()
        columns.append([*mean_and_sem(losses), *mean_and_sem(losses - losses[:, :1])])
    loss, loss_sem, gap, gap_sem = (np.array(column) for column in zip(*columns, strict=True))
    return SharedLosses(tuple(models), np.array(lengths), n_prompts, loss, loss_sem, gap, gap_sem)
