"""Filter over directions, weights of pairs by age and similarity, and coordinates: frames of one response."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.polynomial.legendre import legvander

from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.projection import (
    Projection,
    PromptArrays,
    jackknife,
    quantile_knots,
    ratio,
    solve,
    spline,
)

KNOTS = 10
"""Number of eigenvalues at which the filter is reported."""
SIMILARITY_KNOTS = 9
"""Number of similarities at which the weight of a pair is reported."""
MOST_STEPS = 6
"""Largest number of steps of descent among the forms."""
AGE_BINS = 4
"""Number of hat functions over the positions, and of bins of pairs for the order."""
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Powers of M that are tried as coordinates; 0 keeps those of x."""
C_GRID = (1e-3, 30.0, 30)
"""Smallest and largest c in units of the median eigenvalue, and their number."""
NEAR_ZERO = 0.02
"""Weights below this fraction of the largest do not enter the fit of the decay with age."""


@dataclass(frozen=True)
class Shrinkage:
    """Best fit of the filter a / (s + c)."""

    amplitude: Estimate
    c: Estimate
    """c; infinite with an infinite error if the filter is flat. An upper limit without an error at the
    lower end of the grid: least squares has c = 0."""
    left: Estimate


def shrinkage(sample: PromptArrays) -> Shrinkage:
    """Best a / (s + c): its error from a grid around the best c, its value from a finer one."""
    s = sample.modes.s

    def at(c: float) -> Projection:
        return Projection.of_filters(sample, (1 / (s + c))[..., None])

    low, high, n = C_GRID
    scale = float(np.median(s)) or 1.0
    coarse = np.geomspace(low, high, n) * scale
    best, error = _best_on_grid(at, coarse)
    if best[1] > 0.8 * coarse[-1]:
        flat = Projection.of_filters(sample, np.ones((*s.shape, 1)))
        value, sem = flat.coefficients()
        amplitude = (float(value[0]), float(sem[0]))
        return Shrinkage(amplitude, (np.inf, np.inf), flat.left())
    if best[1] < 1.2 * coarse[0]:
        edge = at(coarse[0])
        value, sem = edge.coefficients()
        return Shrinkage((float(value[0]), float(sem[0])), (float(coarse[0]), np.nan), edge.left())
    best, error = _best_on_grid(at, best[1] * np.exp(0.02 * np.arange(-8, 9)))
    best, _ = _best_on_grid(at, best[1] * np.exp(4e-4 * np.arange(-1, 2)))
    return Shrinkage(
        amplitude=(float(best[0]), float(error[0])),
        c=(float(best[1]), float(error[1])),
        left=at(float(best[1])).left(),
    )


def _best_on_grid(at: Callable[[float], Projection], cs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Amplitude and c of the largest gain, by a parabola through the three best points, and their errors."""
    fits = [at(c) for c in cs]
    gram = np.stack([fit.gram[:, 0, 0] for fit in fits], 1)
    inner = np.stack([fit.inner[:, 0] for fit in fits], 1)
    log_c = np.log(cs)

    def top(gram: np.ndarray, inner: np.ndarray) -> np.ndarray:
        gain = inner**2 / np.maximum(gram, 1e-300)
        i = int(np.clip(gain.argmax(), 1, len(cs) - 2))
        below, middle, above = gain[i - 1 : i + 2]
        bend = min(below - 2 * middle + above, -1e-300)
        move = np.clip(0.5 * (below - above) / bend, -1, 1)
        best = log_c[i] + move * (log_c[1] - log_c[0])
        return np.array([np.interp(best, log_c, inner / np.maximum(gram, 1e-300)), np.exp(best)])

    return jackknife(top, gram, inner)


def filter_frame(
    sample: PromptArrays, shrunk: Shrinkage, knots: Float[np.ndarray, " knot"] | None = None
) -> tuple[pd.DataFrame, Projection]:
    """phi(s) at the knots: a natural cubic spline divided by (s + c)."""
    s = sample.modes.s
    knots = quantile_knots(s, KNOTS) if knots is None else knots
    fit = Projection.of_filters(sample, spline(s, knots, shrunk.c[0]))
    phi, sem = fit.coefficients()
    return pd.DataFrame({"s": knots, "phi": phi, "phi_sem": sem}), fit


def forms_frame(sample: PromptArrays, shrunk: Shrinkage, free: Projection) -> pd.DataFrame:
    """Part of the squared predictions that each form of the filter leaves.

    k steps of gradient descent are a polynomial of degree k - 1 in s, ridge regression is
    a / (s + c), and the free form is the spline.
    """
    s = sample.modes.s
    # Legendre polynomials: the powers of s are nearly dependent.
    powers = Projection.of_filters(sample, legvander(2 * s / s.max() - 1, MOST_STEPS - 1))
    rows = [(f"{k} step{'s' if k > 1 else ''}", *powers.left(k)) for k in range(1, MOST_STEPS + 1)]
    rows += [("a / (s + c)", *shrunk.left), ("free", *free.left())]
    return pd.DataFrame(rows, columns=["form", "left", "left_sem"])


def coordinates_of(sample: PromptArrays) -> Float[np.ndarray, "d_x d_x"] | None:
    """Square root of the metric on x whose filter leaves least; None if it is that of x itself.

    M is fitted in a_j = q^T M x_j / L, and powers of its symmetric part are tried.
    """
    context, d_x = sample.x.shape[1:]

    def columns(part: PromptArrays) -> np.ndarray:
        products = np.einsum("ni,nlj->nlij", part.x_query, part.x)
        return products.reshape(len(part), context, d_x * d_x) / context

    matrix = Projection.of_columns(sample, columns).coefficients()[0].reshape(d_x, d_x)
    scale, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    if scale[-1] <= 0:
        return None
    scale = np.maximum(scale / scale[-1], 1e-3)
    left = {}
    for power in POWERS:
        moved = in_coordinates(sample, vectors * scale ** (power / 2) @ vectors.T)
        left[power] = filter_frame(moved, shrinkage(moved))[1].left()[0]
    best = min(left, key=lambda power: left[power])
    return vectors * scale ** (best / 2) @ vectors.T if best else None


def in_coordinates(sample: PromptArrays, root: Float[np.ndarray, "d_x d_x"]) -> PromptArrays:
    """The sample with x -> root x, and beta_var in the new unit of x."""
    x = sample.x @ root
    unit = float(np.square(sample.x).sum() / np.square(x).sum())
    return replace(sample, x=x, x_query=sample.x_query @ root, beta_var=sample.beta_var * unit)


def position_frame(sample: PromptArrays) -> tuple[pd.DataFrame, Estimate]:
    """Weight of a pair per similarity by its age, and the factor per age of its decay.

    c_j = L sum a_j u_j / sum u_j^2 with u_j = <q, x_j>; alpha from c_j ~ alpha^age.
    """
    context = sample.x.shape[1]
    u = sample.similarity
    ages = np.arange(context - 1, -1, -1)
    squares = sample.sums(u**2)
    products = context * sample.sums(u * sample.a)
    weight, sem = jackknife(ratio, products, squares)

    def decay(products: np.ndarray, squares: np.ndarray) -> float:
        c = products / squares
        used = c > NEAR_ZERO * np.abs(c).max()
        if used.sum() < 3:
            return np.nan
        return float(np.exp(np.polyfit(ages[used], np.log(c[used]), 1, w=c[used])[0]))

    alpha, alpha_sem = jackknife(decay, products, squares)
    frame = pd.DataFrame({"age": ages, "weight": weight, "weight_sem": sem})
    return frame.sort_values("age", ignore_index=True), (float(alpha), float(alpha_sem))


def similarity_frame(sample: PromptArrays) -> pd.DataFrame:
    """Weight of a pair, L a_j, as a spline of its similarity u_j = <q, x_j>."""
    u = sample.similarity
    knots = quantile_knots(u, SIMILARITY_KNOTS)
    basis = spline(u, knots)
    gram = sample.sums(np.einsum("nlb,nlc->nbc", basis, basis))
    inner = sample.x.shape[1] * sample.sums(np.einsum("nlb,nl->nb", basis, sample.a))
    weight, sem = jackknife(solve, gram, inner)
    return pd.DataFrame({"u": knots, "weight": weight, "weight_sem": sem})
