"""Observations 1 and 2: how exact the pattern is in every shipped model of both signs, and of one head.

He et al. 2025, arXiv 2503.12734, section 3. Run: python analyses/softmax_patterns.py (half a minute)
"""

import numpy as np
import pandas as pd
from measured import SETTING, Claim, Measured, checkpoint, run, shipped

from mechinterp import figures
from mechinterp.analysis.circuits.patterns import Classification, classify
from mechinterp.analysis.dynamics.training import training_dynamics
from mechinterp.theory.softmax import debiased_step_size, manifold_mu


def head_rows(name: str, found: Classification) -> pd.DataFrame:
    """The heads of a model, strong ones (|mu| > 1) marked."""
    frame = found.to_frame().assign(model=name, strong=abs(found.circuits.mu[:, 0]) > 1)
    return frame.assign(used=[label != "dummy" for label in found.labels])


def sums(name: str) -> dict[str, float]:
    """Scales averaged over the last 20 logged steps."""
    dynamics = training_dynamics(checkpoint(name).history)
    omega, mu = dynamics.omega[-20:].mean(0), dynamics.mu[-20:].mean(0)
    used = abs(mu * omega) > 0.01 * abs(mu * omega).sum()
    gamma = np.average(abs(omega), weights=abs(mu))
    return {
        "model": name,
        "spread": abs(omega[used]).max() / abs(omega[used]).min(),
        "zero_sum": abs(mu.sum()) / abs(mu).sum(),
        "eta": mu @ omega / debiased_step_size(**SETTING) - 1,
        "group": mu.clip(min=0).sum() / manifold_mu(gamma, **SETTING) - 1,
    }


def measure(quick: bool) -> Measured:
    found = {name: classify(checkpoint(name)) for name in shipped("softmax-h*-s*")}
    paired = [name for name, one in found.items() if one.pattern == "debiased_gd"]
    single = shipped("softmax-h1-s*")
    heads = pd.concat([head_rows(name, found[name]) for name in single + paired])
    strong, used, dummies = heads[heads.strong], heads[heads.used], heads[~heads.used]
    leak = strong.qk_y_leak / abs(strong.omega_mean)
    matching = sum(found[name].sign_matching for name in single + paired)
    scale = np.maximum(abs(dummies.omega_mean), abs(dummies.mu_0))
    totals = pd.DataFrame([sums(name) for name in paired])
    n, models = len(single + paired), "softmax-h1-*, those of both signs"
    rows = [
        ("", "several heads end with both signs", "softmax-h[2348]-*", "always", f"{len(paired)} of {len(found) - len(single)}", len(paired) == len(found) - len(single)),
        ("O1a", "QK is diagonal: cosine with its diagonal", models, "0.99 for |mu| > 1, 0.95 for all", f"at least {strong.qk_diagonal.min():.3f}, {used.qk_diagonal.min():.3f}", bool(strong.qk_diagonal.min() >= 0.99 and used.qk_diagonal.min() >= 0.95)),
        ("O1b", "no query looks at a y: entry relative to omega", models, "at most 5%", f"at most {leak.max():.1%}", bool(leak.max() <= 0.05)),
        ("O1c", "only y is read: part of OV's norm", models, "0.999 for |mu| > 1", f"at least {strong.ov_last_entry.min():.4f}, {used.ov_last_entry.min():.3f} for all", bool(strong.ov_last_entry.min() >= 0.998)),
        ("O1d", "omega and mu have one sign in every active head at the end", models, "always", f"{matching} of {n}", matching == n),
        ("O1e", "dummy heads have no scales", f"{len(dummies)} dummy heads", "tend to 0", f"|omega|, |mu| at most {scale.max():.3f}; below 0.02 in {(scale < 0.02).sum()}", bool((scale < 0.02).all())),
        ("O2a", "|omega| is the same for all heads", "those of both signs", "max/min at most 1.12", f"at most {totals.spread.max():.3f}", bool(totals.spread.max() <= 1.12)),
        ("O2b", "mu sums to zero at the end", "those of both signs", "at most 3% of the sum of |mu|", f"at most {totals.zero_sum.max():.2%}", bool(totals.zero_sum.max() <= 0.03)),
        ("O2c", "on the solution manifold: step and group sum", "those of both signs", "within 2% and 3%", f"within {abs(totals.eta).max():.1%} and {abs(totals.group).max():.1%}", bool(abs(totals.eta).max() <= 0.02 and abs(totals.group).max() <= 0.03)),
    ]  # fmt: skip
    means = heads[heads.used].groupby("model", sort=False)[["qk_diagonal", "ov_last_entry"]].min()
    bars = {"QK diagonal": means.qk_diagonal.to_numpy(), "OV last entry": means.ov_last_entry.to_numpy()}  # fmt: skip
    none = {name: np.zeros(len(means)) for name in bars}
    page = figures.bars(list(means.index), bars, title="Least cosine of an active head with the pattern", y_title="part of the norm", errors=none)  # fmt: skip
    return Measured(heads, {"metrics": page}, [Claim(*row) for row in rows])


if __name__ == "__main__":
    run(measure, __file__)
