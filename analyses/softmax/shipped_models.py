"""Labels, scales, fits and losses (on a million shared prompts) of the shipped softmax models.

He et al. 2025, arXiv 2503.12734, section 3 and theorem 4.2.
Run: python -m analyses softmax/shipped_models (five minutes; --quick a hundredth of the prompts)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, checkpoint, record, records, trained
from analyses.lib.shared_losses import shared_losses
from analyses.softmax.setting import BOTH_SIGNS
from mechinterp import TaskConfig, classify, compare_learners
from mechinterp.checkpoints.checkpoint import Checkpoint


def row(checkpoint: Checkpoint, *, n_prompts: int) -> dict:
    """Row of a model: its label, its scales and its distance from debiased gradient descent."""
    found = classify(checkpoint)
    omega, mu = found.circuits.omega_mean[0], found.circuits.mu[0, :, 0]
    names = ("vanilla_gd", "debiased_gd", "kernel_head", "ridge")
    fits = compare_learners(checkpoint, learners=names, n_prompts=n_prompts)
    debiased = fits.at_trained.loc["debiased_gd"]
    return {
        "model": checkpoint.name,
        "pattern": found.label,
        "active_heads": sum(label != "dummy" for label in found.labels),
        "omega": np.average(np.abs(omega), weights=np.abs(mu)),
        "positive_mu": mu[mu > 0].sum(),
        "negative_mu": mu[mu < 0].sum(),
        "zero_sum": found.scales.zero_sum,
        "omega_spread": found.scales.omega_spread,
        "eta": found.scales.eta[0],
        "eta_optimal": found.scales.eta_optimal,
        "closest": fits.best,
        "fitted_eta": debiased.factor,
        "fitted_eta_sem": debiased.factor_sem,
        "r2_debiased_gd": debiased.r2,
        "r2_sem": debiased.r2_sem,
        "r2_vanilla_gd": fits.at_trained.r2["vanilla_gd"],
    }


def measure(quick: bool) -> Measured:
    scale = 100 if quick else 1
    models = {name: checkpoint(name) for name in trained("softmax-h*-s*")}
    losses = shared_losses(models, TaskConfig(), n_prompts=1_000_000 // scale, seed=1)
    rows = [row(model, n_prompts=100_000 // scale) for model in models.values()]
    data = pd.DataFrame(rows).assign(loss=losses.loss[0], loss_sem=losses.loss_sem[0])
    data["lead"] = data.r2_debiased_gd - data.r2_vanilla_gd
    n_prompts = {"prompts": 1_000_000 // scale, "prompts' seed": 1}
    return Measured(data, {}, [*loss_records(data, n_prompts), *step_records(data, scale)])


def loss_records(data: pd.DataFrame, n_prompts: dict[str, int]) -> list[Record]:
    """Losses at L = 40, compared with the paper's."""
    found = data.set_index("model")
    paired, one = found[found.pattern == "debiased_gd"], found[found.index.str.contains("-h1-")]
    least = paired.loss.min()
    return [
        record(f"softmax-million-{name}", rows.loss, errors=rows.loss_sem, over=n_prompts | over)
        for name, rows, over in (("one-head", one, {}), ("both-signs", paired, BOTH_SIGNS))
    ] + [record("softmax-million-heads", paired.loss - least, over=n_prompts | BOTH_SIGNS)]


def step_records(data: pd.DataFrame, scale: int) -> list[Record]:
    """Records of the step that models of both signs take."""
    paired = data[data.pattern == "debiased_gd"].set_index("model")
    over = {"prompts": 100_000 // scale} | BOTH_SIGNS
    closest = (paired.closest == "debiased_gd").astype(float)
    asked = {"size": paired.eta, "closest": closest, "vanilla": paired.lead}
    r2 = record("softmax-step-r2", paired.r2_debiased_gd, errors=paired.r2_sem, over=over)
    return [*records("softmax-step-", asked, over=over), r2]
