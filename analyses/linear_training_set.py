"""Finite training sets: descent on them rests near the levels of the population, nearer to the set's own.

Zhang et al. 2025, arXiv 2501.16265, section 4, in the published code's setting of figure 3: 5 separate heads of rank
one from N(0, 0.01^2), full-batch descent at rate 0.02 without 1/N on 80,000 sequences; then on 5,000. A set's own levels
are its losses at the rests M_m of the population.
Run: python analyses/linear_training_set.py (a minute; --quick 2 sets of each size)
"""

import numpy as np
import pandas as pd
from linear_setting import FOUND, LENGTH, MOMENTS, losses, page, set_moments
from measured import Claim, Measured, run

from mechinterp.analysis.dynamics.plateaus import plateaus
from mechinterp.theory.linear import fixed_point
from mechinterp.theory.linear_dynamics import learning_rate_time
from mechinterp.theory.linear_heads import separate_heads
from mechinterp.training.descent import full_batch_descent
from mechinterp.training.flow import Flow

TAU, FACTOR = learning_rate_time(0.02, n_factors=3, context_length=LENGTH)
SIZES, STEPS, EVERY = (80_000, 5000), 60_000, 10


def descent(size: int, seed: int) -> Flow:
    heads = separate_heads(5, 4, std=1e-2 * FACTOR, seed=seed)
    options = {"learning_rate": 1 / (2 * TAU), "steps": STEPS, "every": EVERY}
    return full_batch_descent(heads, set_moments(size, seed), FOUND, **options)


def rests(found: Flow, size: int, seed: int) -> pd.DataFrame:
    """Where the loss rests, its distance from the population's levels and from the set's."""
    own = [set_moments(size, seed).loss(fixed_point(FOUND, range(count))) for count in range(5)]
    loss = plateaus(found, MOMENTS).loss
    columns = {"level": range(5), "loss": loss, "off": loss - FOUND.levels, "off_own": loss - own}
    return pd.DataFrame(columns | {"size": size, "set": seed})


def measure(quick: bool) -> Measured:
    sets = range(2 if quick else 10)
    runs = {(size, seed): descent(size, seed) for size in SIZES for seed in sets}
    data = pd.concat([rests(found, *key) for key, found in runs.items()])
    wide = data.pivot(index=["size", "set"], columns="level", values=["off", "off_own"])
    (large, small), models = (wide.loc[size] for size in SIZES), f"5 heads, {len(sets)} sets"
    first, later, end = large.off[0].abs(), large.off.iloc[:, 1:].abs(), small.off[4].abs().max()
    bias = pd.concat([one.off.mean() / one.off.sem() for one in (large, small)]).abs()
    own = {size: wide.loc[size].off_own.abs() for size in SIZES}
    within = (own[80_000] < 1e-3).to_numpy()
    claims = [
        Claim("L-19", "80,000 sequences: rests are off L(M_m) by less than 0.02 at m = 0", models, "on the levels", f"at most {first.max():.4f}", bool(first.max() < 0.02)),
        Claim("L-19", "80,000 sequences: later rests by less than 3e-3", models, "on the levels", f"at most {later.max(axis=None):.4f}, median {later.stack().median():.4f}", bool(later.max(axis=None) < 3e-3)),
        Claim("L-19", "over sets, rests are off by nothing on average: within 3 s.e.", models + " of 80,000 and of 5,000", "not asked", f"{bias.max():.1f} s.e. at most", bool(bias.max() < 3)),
        Claim("L-19", "80,000 sequences: rests are off the set's own level, its loss at M_m, by less than 1e-3", models, "not asked", f"at most {own[80_000].max(axis=None):.4f}; {within.sum()} of {within.size} within", bool(within.all())),
        Claim("L-19", "5,000 sequences: the last loss is off L(M_D) by less than 0.01", models, "not asked", f"at most {end:.4f}", bool(end < 0.01)),
        Claim("L-19", "5,000 sequences: rests are off the set's own level by less than 6e-3", models, "not asked", f"at most {own[5000].max(axis=None):.4f}", bool(own[5000].max(axis=None) < 6e-3)),
    ]  # fmt: skip
    steps = np.geomspace(100, STEPS, 400)
    curves = losses(steps / TAU, {f"{size:,} sequences, set {seed}": found for (size, seed), found in runs.items() if seed < 2})  # fmt: skip
    figure = page(steps, curves, "Descent on training sets; levels L(M_m) of the population dotted", x_title="step", log_x=True)  # fmt: skip
    return Measured(data, {"loss": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
