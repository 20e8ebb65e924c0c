"""Table 1 and figure 11: omega, mu and their product for eight score functions and two heads;
losses over the context length, next to debiased GD.

He et al. 2025, arXiv 2503.12734, table 1 and figure 11; C0 = f'(0). Losses of the table share
200,000 prompts, those of the figure 20,000 per length. In the figure debiased GD takes each model's
own step, 2 C0 omega mu, or the best step. Failed trainings are separate rows and count in no
clause.
Run: python -m analyses softmax/table_1_and_figure_11_scores (two minutes; --quick fewer prompts)"""

from functools import partial

import pandas as pd

from analyses.lib import SETTING, Measured, Record, checkpoint, failures, record, records, trained
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.softmax import debiased_risk
from mechinterp import TaskConfig, classify
from mechinterp.icl.predictors import debiased_gd
from mechinterp.models.layers import score_derivative_at_zero
from mechinterp.theory.softmax import debiased_step_size

FAMILIES, SLOPES = ("affine", "square"), (0.5, 0.8, 1.0)
SCORES = ("softmax", "tanh", *(f"{family}-{C}" for family in FAMILIES for C in SLOPES))
# The step of the first two is exact to first order.
NAMES = ("softmax-h2-s0", "affine-1.0-h2-s0", "tanh-h2-s0", "square-1.0-h2-s0")
LENGTHS = tuple(range(10, 101, 10))


def row(name: str) -> dict:
    """Sizes of omega, mu and their product for a model, from means over the last 20 logged steps."""
    model = checkpoint(name)
    last = model.history[model.history.step > model.history.step.max() - 20_000]
    omega, mu = (last.groupby("head")[column].mean().abs() for column in ("omega", "mu"))
    score = model.config.model
    slope = score_derivative_at_zero(score.score, score.score_slope, context_length=40)
    sums = {"omega": omega.mean(), "mu": mu.mean(), "product": slope * float((omega * mu).sum())}
    return {"model": name, "pattern": classify(model).label} | sums


def figure_11(quick: bool) -> Measured:
    """Losses of four score functions over the context length."""
    models = {name: checkpoint(name) for name in NAMES}
    steps = {name: float(classify(model).scales.eta[0]) for name, model in models.items()}
    own = {f"debiased GD, step of {name}": eta for name, eta in steps.items()}
    own["debiased GD, best step"] = debiased_step_size(**SETTING)
    models |= {name: partial(debiased_gd, eta=eta) for name, eta in own.items()}
    n_prompts = 1000 if quick else 20_000
    found = shared_losses(models, TaskConfig(), context_lengths=LENGTHS, n_prompts=n_prompts)
    at = LENGTHS.index(40)
    loss = dict(zip(found.models, found.loss[at], strict=True))
    own = {name: loss[name] / loss[f"debiased GD, step of {name}"] - 1 for name in steps}
    exact, others = NAMES[:2], NAMES[2:]
    asked = {
        "first-order": {name: abs(own[name]) for name in exact},
        "others": {name: abs(own[name]) for name in others},
        "below": {name: own[name] for name in others},
    }
    claims = records("softmax-A1-nominal-", asked, over={"prompts": n_prompts})
    return Measured(found.to_frame(), {"losses": found.plot()}, claims)


def measure(quick: bool) -> Measured:
    frames, made, eta = [], [], debiased_step_size(**SETTING)
    n_prompts = 10_000 if quick else 200_000
    best = debiased_risk(eta, **SETTING)
    for score in SCORES:
        names = trained(f"{score}-h2-s[0-2]")
        models = {"step": partial(debiased_gd, eta=eta)} | {n: checkpoint(n) for n in names}
        found = shared_losses(models, TaskConfig(), n_prompts=n_prompts)
        frame = pd.DataFrame([row(name) for name in names]).assign(score=score)
        gaps = {"gap": found.gap[0, 1:] / best, "gap_sem": found.gap_sem[0, 1:] / best}
        frames.append(frame.assign(**gaps))
        made += score_records(score, frames[-1], n_prompts)
    data = pd.concat(frames)
    both = {row.model: float(row.pattern == "debiased_gd") for row in data.itertuples()}
    apart = pd.concat([failures(f"{score}-h2-s[0-2]") for score in SCORES])
    signs = record("softmax-A1-signs", both, over={"failed": len(apart)})
    claims, more = [signs, *order_records(data), *made], figure_11(quick)
    parts = {"table 1": data, "figure 11": more.data, "failed training": apart}
    data = pd.concat([rows.assign(part=part) for part, rows in parts.items()])
    return Measured(data, more.figures, [*claims, *more.claims])


def score_records(score: str, rows: pd.DataFrame, n_prompts: int) -> list[Record]:
    """Clauses of A1 for one score function, for the models that ended with both signs."""
    found = rows[rows.pattern == "debiased_gd"].set_index("model")
    over = {"prompts": n_prompts, "selection": "models labelled debiased_gd"}
    gaps = {row.Index: (row.gap, row.gap_sem) for row in found.itertuples()}
    asked = {name: found[name] for name in ("omega", "mu", "product")} | {"loss": gaps}
    asked |= {"below": gaps} if score.startswith(("tanh", "square")) else {}
    named = {f"{name}-{score}": values for name, values in asked.items()}
    return records("softmax-A1-", named, over=over)


def order_records(data: pd.DataFrame) -> list[Record]:
    """Order of the products over families, and spread of C omega and mu within a family."""
    found = data[data.pattern == "debiased_gd"]
    family = found.score.str.partition("-")[0]
    low, high = found.groupby(family)["product"].min(), found.groupby(family)["product"].max()
    steps = (("softmax", "tanh"), ("affine", "tanh"), ("tanh", "square"))
    order = {f"{small} to {large}": low[large] - high[small] for small, large in steps}
    slope = found.score.str.partition("-")[2]
    inside = {}
    for name in FAMILIES:
        rows = found[family == name]
        scaled = rows.omega * slope[family == name].astype(float)
        inside |= {f"{name}, C omega": scaled.max() / scaled.min() - 1}
        inside |= {f"{name}, mu": rows.mu.max() / rows.mu.min() - 1}
    return records("softmax-A1-", {"order": order, "slope": inside})
