"""Recovery of trained models of sparse regression when they are trained further with one head in
each later layer.

All heads of layer 1 and the best head of each later layer are kept, as in sparse/pruning.py. The
pruned model, and the full model as a control, are trained for another tenth of their training, with
the same step size, prompt lengths and half cosine.
Run: python -m analyses sparse/fine_tuning (15 minutes; --quick one minute)"""

import pandas as pd

from analyses.lib import Measured, Record, record
from analyses.sparse import setting as at
from analyses.sparse.setting import ratio
from mechinterp import Prompts, fine_tune
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import MODELS as MODELS_TUNED
from mechinterp.analysis.ablation.pruning import FineTuning
from mechinterp.analysis.stats import halves
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.run.general import predict_deep

STEPS = 5000


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
