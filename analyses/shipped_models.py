"""What the shipped softmax models are: labels, scales and losses on a million shared prompts.

    python analyses/shipped_models.py          (about five minutes on one core)
    python analyses/shipped_models.py --quick  (under a minute, a hundredth of the prompts)

Writes analyses/results/shipped_models.csv and prints it. The paper is He et al. 2025, arXiv 2503.12734.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from mechinterp.analysis.evaluation import shared_losses
from mechinterp.analysis.fits import LEARNERS, fit_learners
from mechinterp.analysis.patterns import classify
from mechinterp.checkpoints.native import Checkpoint, load

ROOT = Path(__file__).parents[1]
OUT = ROOT / "analyses" / "results" / "shipped_models.csv"


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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a hundredth of the prompts")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    scale = 100 if arguments.quick else 1
    folders = sorted(
        file.parent for file in (ROOT / "checkpoints").glob("softmax-h*-s*/config.json")
    )
    checkpoints = {folder.name: load(folder) for folder in folders}
    task = next(iter(checkpoints.values())).config.task
    losses = shared_losses(checkpoints, task, n_prompts=1_000_000 // scale, seed=1)
    rows = [row(checkpoint, n_prompts=100_000 // scale) for checkpoint in checkpoints.values()]
    table = pd.DataFrame(rows).assign(loss=losses.loss[0], loss_sem=losses.loss_sem[0])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.out, index=False, float_format="%.6g")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
