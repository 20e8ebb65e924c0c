"""Runs: models with snapshots of their training, and histories measured on the same prompts at each
step."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import share_of
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights, circuit_norms

EVAL_PROMPTS = 1024
"""Number of evaluation prompts for the loss of each step."""
MOST_AT = 512
"""Largest number of positions whose loss is stored."""
Self = TypeVar("Self", bound="Run")


class Run:
    """A model with snapshots of its training, from files (`load`) or from a `Monitor`.

    Subclasses also have name, task, step, history (one row per step, layer and head), snapshots
    (models by step, which every analysis takes), model (with hooks) and predictor."""

    @property
    def history(self) -> pd.DataFrame | None:
        """One row per kept or logged step, layer and head."""
        raise NotImplementedError

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training."""
        raise NotImplementedError

    @property
    def loss_curve(self) -> Float[np.ndarray, "row 2"]:
        """Step and eval_loss of the history; no rows if there is none."""
        if self.history is None:
            return np.zeros((0, 2))
        rows = self.history.drop_duplicates("step")
        return rows[["step", "eval_loss"]].to_numpy(dtype=np.float64)

    def at(self: Self, step: int) -> Self:
        """The model after this number of updates.

        Raises:
            ValueError: If that step was not saved.
        Example:
            >>> from mechinterp import load
            >>> load("softmax-h2-s0").at(1000).step
            1000
        """
        if step not in self.steps:
            raise ValueError(f"step must be one of {', '.join(map(str, self.steps))}, got {step}.")
        return self._after(step)

    def _after(self: Self, step: int) -> Self:
        """The model at a saved step."""
        raise NotImplementedError


def run_history(source: Source, snapshots: Mapping[int, Weights]) -> pd.DataFrame:
    """One row per step, layer and head: eval_loss with its standard error, and numbers of the head.

    For one attention layer these are omega, mu (means), qk_diagonal, ov_last_entry, and the effects
    of masking (`head_rows`); for all models also the Frobenius norms of the QK and OV circuits.
    loss, the training loss, is NaN.
    """
    prompts = evaluation_prompts(source, n_prompts=EVAL_PROMPTS)
    frames = {}
    for step, weights in snapshots.items():
        scalars = circuit_norms(weights)
        if weights.model.one_attention:
            scalars |= {"omega": weights.omega.mean(1), "mu": weights.mu.mean(1)}
            scalars |= {name: getattr(weights, name) for name in ("qk_diagonal", "ov_last_entry")}
        numbers = {name: t.flatten().double().numpy(force=True) for name, t in scalars.items()}
        rows = head_rows(weights, prompts, masks=weights.model.one_attention)
        frames[step] = rows.assign(**numbers)
    return joined(frames)


def joined(frames: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """Rows of several steps as one history; its training loss is NaN."""
    rows = pd.concat(frames, names=["step", None]).reset_index("step").assign(loss=np.nan)
    first = ["step", "layer", "head", "loss", "eval_loss"]
    return rows[[*first, *(name for name in rows if name not in first)]].reset_index(drop=True)


def head_rows(source: Source, prompts: Prompts, *, masks: bool = True) -> pd.DataFrame:
    """One row per layer and head: the model's loss, and the effects of masking the head.

    eval_loss is the mean squared error against y_query. share is the standard deviation over
    prompts of the head's contribution to the prediction (its change under masking), divided by the
    sum over the layer's heads. rise is the rise of the excess risk. eval_loss_at_k is the loss after
    k pairs, if one pass gives it. Losses have unit y^2; _sem are standard errors over prompts,
    paired for rise.

    Args:
        masks: True: mask heads, with one run per head unless the model is one layer of attention.
    """
    predictor = predictor_of(source)
    masked = [[head] for head in predictor.heads] if masks else []
    predictions = predictor.run(prompts, [[], *masked]).double()
    error = (predictions[0] - prompts.y_query.to(predictions)).square().mean(1)
    layer, head = np.divmod(np.arange(len(predictor.heads)), predictor.n_heads)
    columns = {"layer": layer, "head": head, "eval_loss": float(error.mean())}
    columns["eval_loss_sem"] = float(error.std() / len(prompts) ** 0.5)
    if masks:
        outputs = (predictions[0] - predictions[1:]).unflatten(0, (predictor.n_layers, -1))
        columns["share"] = share_of(outputs.permute(2, 0, 1, 3)).flatten().numpy(force=True)
        risk = (predictions - prompts.y_query_clean.to(predictions)).square().mean(2)
        rise = risk[1:] - risk[0]
        columns["rise"] = rise.mean(1).numpy(force=True)
        columns["rise_sem"] = (rise.std(1) / len(prompts) ** 0.5).numpy(force=True)
    if (every := predictor.predict_at_every(prompts)) is not None:
        losses = (every - prompts.y_of_every_x.to(every)).double().square().mean((0, 2))
        columns |= {name: float(loss) for name, loss in named_by_pairs(losses).items()}
    return pd.DataFrame(columns)


def named_by_pairs(losses: Float[Tensor, "*model n_pairs"]) -> dict[str, Tensor]:
    """Columns of a history: the loss after each number of pairs, or after MOST_AT of them."""
    n = losses.shape[-1]
    at = sorted({round(each) for each in np.linspace(0, n - 1, min(n, MOST_AT))})
    return {f"eval_loss_at_{each}": losses[..., each] for each in at}
