"""What the shipped softmax models are: labels, scales, fits, and losses on a million shared prompts.

He et al. 2025, arXiv 2503.12734, section 3 and theorem 4.2. Run: python analyses/shipped_models.py (five minutes; --quick
a hundredth of the prompts)
"""

import numpy as np
import pandas as pd
from measured import Claim, Measured, checkpoint, numbers, run, shipped

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.learners.fits import LEARNERS, fit_learners
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import TaskConfig


def row(checkpoint: Checkpoint, *, n_prompts: int) -> dict:
    """One model: its label, its scales and its distance from debiased gradient descent."""
    found = classify(checkpoint)
    omega, mu = found.circuits.omega_mean, found.circuits.mu[:, 0]
    fits = fit_learners(checkpoint, context_lengths=[40], n_prompts=n_prompts)
    debiased = LEARNERS.index("debiased_gd")
    return {
        "model": checkpoint.name,
        "pattern": found.pattern,
        "active_heads": sum(label != "dummy" for label in found.labels),
        "omega": np.average(np.abs(omega), weights=np.abs(mu)),
        "positive_mu": mu[mu > 0].sum(),
        "negative_mu": mu[mu < 0].sum(),
        "zero_sum": found.scales.zero_sum,
        "omega_spread": found.scales.omega_spread,
        "eta": found.scales.eta[0],
        "eta_optimal": found.scales.eta_optimal,
        "manifold_distance": found.scales.manifold_distance,
        "closest": fits.best,
        "fitted_eta": fits.factor[0, debiased],
        "fitted_eta_sem": fits.factor_sem[0, debiased],
        "r2_debiased_gd": fits.r2[0, debiased],
        "r2_sem": fits.r2_sem[0, debiased],
        "r2_vanilla_gd": fits.r2[0, LEARNERS.index("vanilla_gd")],
    }


def measure(quick: bool) -> Measured:
    scale = 100 if quick else 1
    models = {name: checkpoint(name) for name in shipped("softmax-h*-s*")}
    losses = shared_losses(models, TaskConfig(), n_prompts=1_000_000 // scale, seed=1)
    rows = [row(model, n_prompts=100_000 // scale) for model in models.values()]
    data = pd.DataFrame(rows).assign(loss=losses.loss[0], loss_sem=losses.loss_sem[0])
    paired, single = data[data.pattern == "debiased_gd"], data[data.model.str.contains("-h1-")]
    several, sem = "those of both signs", paired.loss_sem.max()
    gap = paired.loss.max() - paired.loss.min()
    ahead = (paired.closest == "debiased_gd").sum()
    two = data[data.model.str.contains("-h2-")]
    opposite = (two.pattern == "debiased_gd").sum()
    claims = [
        ("", "one head: loss at L = 40", "softmax-h1-*", "0.404", f"{numbers(single.loss, 4)} ± {single.loss_sem.max():.4f}", bool(abs(single.loss - 0.404).max() < 0.001 + 3 * single.loss_sem.max())),
        ("", "two heads end with both signs after 500,001 steps (seeds 8 to 11 were added to ship models that do not)", "softmax-h2-*", "always", f"{opposite} of {len(two)}", bool(opposite == len(two))),
        ("", "both signs: sum mu omega is the best debiased step 1/(1 + (1 + s^2) d/L)", several, f"{paired.eta_optimal.iloc[0]:.4f}", numbers(paired.eta), bool(abs(paired.eta / paired.eta_optimal - 1).max() < 0.02)),
        ("", "both signs: loss at L = 40", several, "0.243", f"{numbers(paired.loss, 4)} ± {sem:.4f}", bool(abs(paired.loss - 0.243).max() < 0.001 + 3 * sem)),
        ("", "both signs: the model is one debiased gradient step", several, "coincide", f"closest to it in {ahead} of {len(paired)}: R^2 at least {paired.r2_debiased_gd.min():.4f} (vanilla step {paired.r2_vanilla_gd.max():.4f})", bool(ahead == len(paired) and paired.r2_debiased_gd.min() > 0.99)),
        ("", "both signs: the loss does not depend on the number of heads", several, "equal", f"within {gap:.5f} on shared prompts", bool(gap < 0.001)),
    ]  # fmt: skip
    return Measured(data, {}, [Claim(*claim) for claim in claims])


if __name__ == "__main__":
    run(measure, __file__)
