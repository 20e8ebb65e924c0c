"""Recovery of trained models of sparse regression when they are trained further with one head in
each later layer.

All heads of layer 1 and the best head of each later layer are kept, as in sparse/pruning.py. The
pruned model, and the full model as a control, are trained for another tenth of their training, with
the same step size, prompt lengths and half cosine.
Run: python -m analyses sparse/fine_tuning (15 minutes; --quick one minute)"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib import Measured, Record, record
from analyses.sparse import setting as at
from analyses.sparse.setting import ratio
from mechinterp import Prompts, figures, train
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruned import pruned_weights
from mechinterp.analysis.stats import halves, mean_and_sem, ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.display import frame_of, with_sem
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.run.general import predict_deep
from mechinterp.models.weights import Weights

STEPS = 5000
MODELS_TUNED = ("pruned", "full")
ROWS = 5
"""Number of measurements during further training, the first and the last step included."""
DATA_SEED = 1000
"""Seed of the prompts of further training; the first training uses another seed."""


@dataclass(frozen=True, eq=False)
class FineTuning:
    """Excess risk of the pruned and of the full model while both are trained further on the same prompts."""

    step: np.ndarray
    """Number of updates since pruning, [row]."""
    risk: np.ndarray
    """Excess risk, unit y^2, [model, row]; one row for each of `MODELS_TUNED`."""
    risk_sem: np.ndarray
    ratio: np.ndarray
    """Risk divided by the risk of the full model before further training, [model, row]."""
    ratio_sem: np.ndarray
    """Standard error of `ratio`, paired over prompts."""
    weights: Weights
    """Weights of the pruned model after the last step."""

    def to_frame(self) -> pd.DataFrame:
        """One row per model and step."""
        return frame_of(self, *with_sem("risk", "ratio"), model=MODELS_TUNED, step=self.step)

    def plot(self) -> go.Figure:
        """The ratio over steps."""
        return figures.lines(
            self.step,
            figures.named(MODELS_TUNED, self.ratio, self.ratio_sem),
            title="Excess risk during further training, relative to the full model",
            x_title="steps since pruning",
            y_title="ratio",
        )


def fine_tune(
    checkpoint: Checkpoint, kept: np.ndarray, prompts: Prompts, *, steps: int
) -> FineTuning:
    """The pruned and the full model trained further as in their training, and measured on the prompts."""
    starts = (pruned_weights(checkpoint.weights, kept), checkpoint.weights)
    trained = [weights_by_step(checkpoint, start, steps) for start in starts]
    errors = np.array(
        [[masked_errors(w, prompts, [[]])[:, 0] for w in run.values()] for run in trained]
    )
    by_prompt = np.moveaxis(errors, -1, 0)
    risk, risk_sem = mean_and_sem(by_prompt)
    ratio, ratio_sem = ratio_and_sem(by_prompt, errors[1, 0])
    made = trained[0]
    return FineTuning(np.array([*made]), risk, risk_sem, ratio, ratio_sem, [*made.values()][-1])


def weights_by_step(checkpoint: Checkpoint, start: Weights, steps: int) -> dict[int, Weights]:
    """Weights by step of a training that starts from these weights."""
    every = max(1, steps // (ROWS - 1))
    settings = replace(
        checkpoint.config.train,
        steps=steps,
        data_seed=DATA_SEED,
        log_every=every,
        snapshot_every=every,
        n_eval_prompts=1,
    )
    config = replace(checkpoint.config, model=start.model, train=settings)
    with TemporaryDirectory() as folder:
        at_start = replace(checkpoint, config=config, weights=start)
        found = train(config, out=Path(folder) / "longer", start=at_start)
        return dict(found.snapshots) | {found.step: found.weights}


def to_single(name: str, tuned: FineTuning, measured: Prompts) -> tuple[float, float]:
    """Final risk of the pruned model relative to the single head of the same seed."""
    pruned = excess_risk(predict_deep(tuned.weights, measured), measured).double().numpy()
    single = masked_errors(at.trained(at.single_of(name)).model, measured, [[]])[:, 0]
    return ratio(pruned, single)


def pairs(rows: pd.DataFrame, column: str) -> dict[str, tuple[float, float]]:
    return {row.model: (row[column], row[f"{column}_sem"]) for _, row in rows.iterrows()}


def records(data: pd.DataFrame) -> list[Record]:
    """Records from the last rows of all models."""
    last = data[data.step == data.step.max()]
    pruned, full = (last[last.heads == which] for which in MODELS_TUNED)
    over = {"selection": "heads chosen on other prompts, one split"}
    return [
        record("sparse-fine-tuning-pruned", pairs(pruned, "ratio"), over=over),
        record("sparse-fine-tuning-full", pairs(full, "ratio")),
        record("sparse-C13-fine-tuning", pairs(pruned, "to_single"), over=over, note=at.NOTE),
    ]


def measure(quick: bool) -> Measured:
    frames, pages, steps = {}, {}, 40 if quick else STEPS
    for noise in at.NOISES:
        scored, measured = halves(at.prompts_of(noise, 256 if quick else 4096))
        for name in at.shipped(noise, at.SEVERAL).values():
            found = fine_tune(
                at.trained(name), at.best_later_on(name, scored), measured, steps=steps
            )
            frame = found.to_frame().rename(columns={"model": "heads"})
            end = (frame.heads == MODELS_TUNED[0]) & (frame.step == frame.step.max())
            frame.loc[end, ["to_single", "to_single_sem"]] = to_single(name, found, measured)
            frames[name], pages[name] = frame, found.plot()
    data = at.frames_of(frames)
    return Measured(data, pages, records(data))
