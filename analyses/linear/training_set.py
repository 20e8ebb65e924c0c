"""Finite training sets: descent has plateaus close to the levels of the population, and closer to
those of the set.

Zhang et al. 2025, arXiv 2501.16265, section 4, in the setting of the published code for figure 3: 5
separate heads of rank one from N(0, 0.01^2), full-batch descent at rate 0.02 without 1/N on 80,000
and on 5,000 sequences. The levels of a set are its losses at the plateaus M_m of the population.
Run: python -m analyses linear/training_set (a minute; --quick 2 sets of each size)"""

import pandas as pd

from analyses.lib import Measured, records
from analyses.lib.plateaus import plateaus
from analyses.lib.theory.linear import fixed_point
from analyses.linear.setting import FACTOR, FOUND, MOMENTS, TAU, named, set_moments
from mechinterp.theory.linear import separate_heads
from mechinterp.training.linear import Flow, full_batch_descent

SIZES, STEPS, EVERY = (80_000, 5000), 60_000, 10


def descent(size: int, seed: int) -> Flow:
    heads = separate_heads(5, 4, std=1e-2 * FACTOR, seed=seed)
    options = {"learning_rate": 1 / (2 * TAU), "steps": STEPS, "every": EVERY}
    return full_batch_descent(heads, set_moments(size, seed), FOUND, **options)


def rests(found: Flow, size: int, seed: int) -> pd.DataFrame:
    """Losses of the plateaus, and their distances from the levels of the population and of the set."""
    own = [set_moments(size, seed).loss(fixed_point(FOUND, range(count))) for count in range(5)]
    loss = plateaus(found, MOMENTS).loss
    columns = {"level": range(5), "loss": loss, "off": loss - FOUND.levels, "off_own": loss - own}
    return pd.DataFrame(columns | {"size": size, "set": seed})


def measure(quick: bool) -> Measured:
    sets = range(2 if quick else 10)
    runs = {(size, seed): descent(size, seed) for size in SIZES for seed in sets}
    data = pd.concat([rests(found, *key) for key, found in runs.items()])
    wide = data.pivot(index=["size", "set"], columns="level", values=["off", "off_own"])
    off, own = ({size: wide.loc[size][name] for size in SIZES} for name in ("off", "off_own"))
    nearer = {
        f"{size:,}, set {place}": value
        for size in SIZES
        for place, value in (own[size].abs().mean(axis=1) / off[size].abs().mean(axis=1)).items()
    }
    bias = {
        f"{size:,}, level {level}": abs(one)
        for size in SIZES
        for level, one in (off[size].mean() / off[size].sem()).items()
    }
    large, small = (off[size].abs().to_numpy() for size in SIZES)
    large_own, small_own = (named(own[size].abs().to_numpy(), "set", "rest") for size in SIZES)
    asked = {"first": named(large[:, 0], "set"), "later": named(large[:, 1:], "set", "rest")}
    asked |= {"bias": bias, "end": named(small[:, 4], "set"), "nearer": nearer}
    asked |= {"own": large_own, "own-small": small_own}
    claims = records("linear-19-", asked, over={"sets": len(sets)})
    return Measured(data, claims=claims)
