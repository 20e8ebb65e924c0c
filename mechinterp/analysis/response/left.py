"""Part of a response that is left as columns are added."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.measures import AGE_BINS, KNOTS, SIMILARITY_KNOTS, Shrinkage
from mechinterp.analysis.response.projection import (
    Projection,
    PromptArrays,
    jackknife,
    quantile_knots,
    ratio,
    solve,
    spline,
)


@dataclass(frozen=True, eq=False)
class Left:
    """Part of the squared predictions that is left as columns are added, and what it consists of."""

    frame: pd.DataFrame
    mean_of_x: Estimate
    """Coefficient of the mean of x: 1 for a filter on x - mean(x), 0 for a filter on x."""
    linear: Estimate
    """Share that is linear in y but no filter, NaN where y given x is not Gaussian."""
    even: Estimate
    """Share that does not change its sign with y."""


def left_of(
    sample: PromptArrays,
    shrunk: Shrinkage,
    again: Float[np.ndarray, "batch context"] | None,
    posterior: Float[np.ndarray, " batch"] | None,
) -> Left:
    """Part left by the filter, then with columns for the mean of x, similarity, position and order.

    Args:
        again: Weights of the pairs at independent y on the same x; None: unknown.
        posterior: Predictions of the posterior mean over the pool of tasks, a last column; None: no pool.
    """
    context = sample.x.shape[1]
    knots = quantile_knots(sample.modes.s, KNOTS)
    u_knots = quantile_knots(sample.similarity, SIMILARITY_KNOTS)
    phi, _ = Projection.of_filters(
        sample, spline(sample.modes.s, knots, shrunk.c[0])
    ).coefficients()
    groups = {
        "filter": lambda p: p.modes.weights(p, spline(p.modes.s, knots, shrunk.c[0])),
        "+ mean of x": _mean_column,
        "+ similarity": lambda p: spline(p.similarity, u_knots) / context,
        "+ position": lambda p: _by_position(p, spline(p.modes.s, knots, shrunk.c[0])),
        "+ order": _by_order,
    }
    widths = [columns(sample.parts[0]).shape[2] for columns in groups.values()]
    fit = Projection.of_columns(
        sample, lambda part: np.concatenate([columns(part) for columns in groups.values()], 2)
    )
    ends = np.cumsum(widths)
    rows = [(name, *fit.left(int(end))) for name, end in zip(groups, ends, strict=True)]
    if posterior is not None:
        rows.append(("+ posterior", *_with_posterior(sample, shrunk, knots, posterior)))
    centred = jackknife(partial(_centred, n=int(ends[0])), fit.gram, fit.inner)
    linear: tuple = (np.nan, np.nan)
    if again is not None and sample.by_gradient:
        own = sample.modes.weights(sample, spline(sample.modes.s, knots, shrunk.c[0])) @ phi
        product = _metric(sample, sample.a - own, again - own)
        linear = jackknife(ratio, sample.sums(product), sample.sums(sample.f**2))
    even = jackknife(ratio, sample.sums(sample.even**2), sample.sums(sample.f**2))
    return Left(
        pd.DataFrame(rows, columns=["columns", "left", "left_sem"]),
        *((float(value), float(sem)) for value, sem in (centred, linear, even)),
    )


def _centred(gram: np.ndarray, inner: np.ndarray, n: int) -> float:
    """Coefficient of the mean of x, in units of the mean size of the filter fitted with it."""
    fitted = solve(gram[: n + 1, : n + 1], inner[: n + 1])
    return float(ratio(-fitted[n], np.abs(fitted[:n]).mean()))


def _mean_column(part: PromptArrays) -> Float[np.ndarray, "batch context 1"]:
    """<q, mean(x)> / L for every pair."""
    context = part.x.shape[1]
    mean = np.einsum("ni,ni->n", part.x_query, part.x.mean(1))
    return np.broadcast_to(mean[:, None, None], (len(part), context, 1)) / context


def _by_position(
    part: PromptArrays, basis: np.ndarray
) -> Float[np.ndarray, "batch context column"]:
    """The filter's columns times hat functions over the positions."""
    context = part.x.shape[1]
    ends = np.linspace(0, context - 1, AGE_BINS)
    hats = np.stack([np.interp(np.arange(context), ends, e) for e in np.eye(AGE_BINS)], 1)
    columns = part.modes.weights(part, basis)
    return np.einsum("njb,jc->njbc", columns, hats).reshape(len(part), context, -1)


def _by_order(part: PromptArrays) -> Float[np.ndarray, "batch context column"]:
    """<q, x_i> <x_i, x_j> / L^2 summed over pairs i by bins of i and of j."""
    context = part.x.shape[1]
    bins = np.eye(AGE_BINS)[np.arange(context) * AGE_BINS // context]
    products = np.einsum("nli,nki->nlk", part.x, part.x) * (1 - np.eye(context))
    weighted = (part.similarity[:, :, None] * products).transpose(0, 2, 1) @ bins
    columns = np.einsum("njb,jc->njbc", weighted, bins).reshape(len(part), context, -1)
    return columns / context**2


def _metric(
    sample: PromptArrays, left: np.ndarray, right: np.ndarray
) -> Float[np.ndarray, " batch"]:
    """Inner product of two weights in the metric of y given x."""
    through = (np.einsum("nli,nl->ni", sample.x, each) for each in (left, right))
    return sample.beta_var * np.multiply(*through).sum(1) + sample.noise_var * (left * right).sum(1)


def _with_posterior(
    sample: PromptArrays, shrunk: Shrinkage, knots: np.ndarray, posterior: np.ndarray
) -> Estimate:
    """Part left by the filter and the posterior mean together, fitted to the predictions."""
    modes = sample.modes
    basis = spline(modes.s, knots, shrunk.c[0]) * modes.query[:, :, None]
    columns = np.c_[np.einsum("nkb,nk->nb", basis, modes.y), posterior]
    squares = sample.sums(columns[:, :, None] * columns[:, None])
    cross = sample.sums(columns * sample.f[:, None])
    return Projection(squares, cross, squares, cross, sample.sums(sample.f**2)).left()
