"""Draws of the learning coefficient with the loss in float32 and in float64, on the entries whose coefficient is known, and
the time and rounding of a gradient on prompts.

Run: python -m analyses known/precision (half an hour; --quick: short chains on one entry)"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analyses.lib import Measured, checkpoint
from mechinterp import local_learning_coefficient, sample_prompts
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.local_losses import population_loss
from mechinterp.analysis.training.module_losses import predictor_loss
from mechinterp.analysis.training.prompt_losses import prompts_loss
from mechinterp.analysis.training.sampler import (
    NBETA,
    BatchLoss,
    Chains,
    LocalLoss,
    Points,
    Tempered,
)
from mechinterp.known import Entry, suite
from mechinterp.theory.linear import Heads, Moments
from mechinterp.training.linear import flat_heads, unflatten
from mechinterp.training.linear_models import task_moments

CHAINS = Chains(n_chains=8, n_draws=500, n_warmup=250)
SHORT = Chains(n_chains=2, n_draws=10, n_warmup=8, n_leapfrog=5)
SEEDS = range(4)
PRECISIONS = ("float64", "float32")
DEEP = (
    *("garg-tiny-s0", "d8s2-softmax-h8x9-l3-noise0.1-s0"),
    *("d8s2-softmax-block-h8x9-l3-noise0.1-lr0.001-s0", "sparse-h4-noise0.1-s0"),
)
"""Models whose gradients are timed."""
N_PROMPTS, N_POINTS, N_TIMES = 256, 2, 5
"""Prompts and points of a gradient, and how often it is timed; the shortest time counts."""


def measure(quick: bool) -> Measured:
    known = suite(2, trained="none" if quick else "all")
    entries = [entry for entry in known.values() if entry.counted][: 1 if quick else None]
    seeds, chains = (SEEDS[:1], SHORT) if quick else (SEEDS, CHAINS)
    rows = [row for entry in entries for row in compared(entry, seeds, chains)]
    rows += [gradient_of(name) for name in DEEP[: 1 if quick else None]]
    drawn = pd.DataFrame(rows)
    return Measured(pd.concat([drawn, pd.DataFrame(summaries(drawn))], ignore_index=True))


def compared(entry: Entry, seeds: range, chains: Chains) -> Iterator[dict[str, Any]]:
    """Estimates of one entry in both precisions; a row per seed."""
    heads, moments = heads_of_linear(entry.checkpoint.weights), task_moments(entry.task)
    double = population_loss(heads, moments)
    losses = dict(zip(PRECISIONS, (double, with_float32(double, heads, moments)), strict=True))
    for seed in seeds:
        row = {
            "part": "estimate",
            "model": entry.name,
            "seed": seed,
            "exact": entry.truth.learning_coefficient.value,
        }
        for precision, loss in losses.items():
            found = local_learning_coefficient(loss, chains=chains, seed=seed)
            row |= {precision: found.estimate, f"{precision}_sem": found.sem}
        print(row, flush=True)
        yield row


def with_float32(loss: LocalLoss, heads: Heads, moments: Moments) -> LocalLoss:
    """The loss, with draws whose weights, moments, loss and gradient are in float32."""
    single = replace(loss, in_float32=loss_in_float32(heads, moments))
    law = Tempered(single, NBETA, 1.0)
    assert law.for_draws.loss.function is single.in_float32, "the draws stay in float64"
    return single


def loss_in_float32(heads: Heads, moments: Moments) -> BatchLoss:
    """Loss of a population and its gradient by arithmetic in float32."""
    single = Moments(*(np.float32(each) for each in (moments.yy, moments.yz, moments.zz)))

    def function(points: Points) -> tuple[np.ndarray, Points]:
        drawn = unflatten(heads, points.astype(np.float32))
        loss, force = single.loss(drawn.M), single.gradient(drawn.M)
        gradient = -2 * flat_heads(drawn.velocity(force))
        assert loss.dtype == gradient.dtype == np.float32
        return loss.astype(float), gradient.astype(float)

    return function


def gradient_of(name: str) -> dict[str, Any]:
    """Processor time of a gradient on prompts through the hooks and of training, and the rounding of the loss by float32."""
    model = checkpoint(name)
    prompts = sample_prompts(model, N_PROMPTS)
    loss = prompts_loss(model.weights, prompts)
    hooks = predictor_loss(model, prompts, weights="*")
    (exact,), (rounded,) = (
        each(loss.at[None])[0] for each in (loss.function, loss.in_float32 or loss.function)
    )
    return {
        "part": "gradient",
        "model": name,
        "hooks": seconds_of(hooks.function, hooks.at),
        "float64": seconds_of(loss.function, loss.at),
        "float32": seconds_of(loss.in_float32 or loss.function, loss.at),
        "rounding": abs(rounded / exact - 1),
    }


def seconds_of(function: BatchLoss, at: np.ndarray) -> float:
    """Shortest processor time of a call, in seconds."""
    points, times = np.repeat(at[None], N_POINTS, axis=0), []
    for _ in range(N_TIMES):
        start = time.process_time()
        function(points)
        times.append(time.process_time() - start)
    return min(times)


def summaries(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Mean relative error of each precision and of their difference in per cent, over minima without singularities; share
    of estimates within two standard errors; and the difference over all minima."""
    every = rows[rows["part"] == "estimate"]
    regular = every[~every["model"].str.startswith("singular")]
    for precision in PRECISIONS:
        error = regular[precision] - regular["exact"]
        within = 100 * (error.abs() <= 2 * regular[f"{precision}_sem"]).mean()
        yield mean_of(precision, error / regular["exact"]) | {"within": within}
    for part, chosen in (("difference", regular), ("difference, all", every)):
        yield mean_of(part, (chosen["float32"] - chosen["float64"]) / chosen["exact"])


def mean_of(name: str, errors: pd.Series) -> dict[str, Any]:
    sem = 100 * errors.sem()
    return {
        "part": "bias",
        "of": name,
        "bias": 100 * errors.mean(),
        "bias_sem": sem,
        "n": len(errors),
    }
