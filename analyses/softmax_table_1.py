"""Table 1: omega, mu and their product for eight score functions, two heads.

He et al. 2025, arXiv 2503.12734, table 1; C0 = f'(0). Losses share 200,000 prompts.
Run: python analyses/softmax_table_1.py (a minute; --quick fewer prompts)
"""

from functools import partial

import pandas as pd
from measured import SETTING, Claim, Measured, checkpoint, numbers, run, shipped

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd
from mechinterp.models.scores import score_derivative_at_zero
from mechinterp.theory.softmax import debiased_risk, debiased_step_size

# Name: C0, omega, mu and 2 C0 omega mu of the published table.
PAPER = {
    "softmax": (1.0, 0.1267, 3.5006, 0.8871),
    "tanh": (1.0, 0.1504, 3.3362, 1.0035),
    "affine-0.5": (0.5, 0.3677, 2.3963, 0.8810),
    "affine-0.8": (0.8, 0.2411, 2.2819, 0.8802),
    "affine-1.0": (1.0, 0.1979, 2.2221, 0.8794),
    "square-0.5": (1.0, 0.2882, 1.7561, 1.0122),
    "square-0.8": (1.6, 0.1810, 1.7487, 1.0128),
    "square-1.0": (2.0, 0.1452, 1.7448, 1.0132),
}


def row(name: str) -> dict:
    """A model's scales, averaged over the last 20 logged steps; 0 where its two heads have one sign."""
    model = checkpoint(name)
    last = model.history[model.history.step > model.history.step.max() - 20_000]
    omega, mu = (last.groupby("head")[column].mean().abs() for column in ("omega", "mu"))
    slope = score_derivative_at_zero(
        model.config.model.score, model.config.model.score_slope, context_length=40
    )
    sums = {"omega": omega.mean(), "mu": mu.mean(), "product": slope * float((omega * mu).sum())}
    return {"model": name, "pattern": classify(model).pattern} | sums


def measure(quick: bool) -> Measured:
    frames, eta = [], debiased_step_size(**SETTING)
    best = debiased_risk(eta, **SETTING)
    for score in PAPER:
        names = shipped(f"{score}-h2-s[0-2]")
        models = {"step": partial(debiased_gd, eta=eta)} | {n: checkpoint(n) for n in names}
        found = shared_losses(models, TaskConfig(), n_prompts=10_000 if quick else 200_000)
        frame = pd.DataFrame([row(name) for name in names]).assign(score=score)
        frames.append(
            frame.assign(gap=found.gap[0, 1:] / best, gap_sem=found.gap_sem[0, 1:] / best)
        )
    data = pd.concat(frames)
    claims = []
    for score, (_, omega, mu, product) in PAPER.items():
        found = data[(data.score == score) & (data.pattern == "debiased_gd")]
        off = max((abs(found[k] / v - 1)).max() for k, v in (("omega", omega), ("mu", mu)))
        within = abs(found["product"] / product - 1).max()
        gap = f"{found.gap.min():+.2%} to {found.gap.max():+.2%} ± {found.gap_sem.max():.2%}, same prompts"
        claims += [
            Claim("A1", f"{score}: omega and mu within 8%", f"{score}-h2-*", f"{omega}, {mu}", f"{numbers(found.omega, 4)}, {numbers(found.mu, 3)}", bool(off < 0.08)),
            Claim("A1", f"{score}: 2 C0 omega mu within 2%", f"{score}-h2-*", f"{product}", numbers(found["product"]), bool(within < 0.02)),
            Claim("A1", f"{score}: the loss is that of the best debiased step within 1%", f"{score}-h2-*", f"{best:.4f} (exact)", gap, bool(found.gap.abs().max() < 0.01)),
        ]  # fmt: skip
    paired = data.pattern == "debiased_gd"
    claims.append(Claim("A1", "a positive and a negative head for every score function", "all of them", "always", f"{paired.sum()} of {len(data)} models", bool(paired.all())))  # fmt: skip
    return Measured(data, {}, claims)


if __name__ == "__main__":
    run(measure, __file__)
