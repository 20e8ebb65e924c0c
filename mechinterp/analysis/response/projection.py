"""Projection of a learner on columns that are linear in y, with standard errors over prompts.

The prediction of a learner is f, and the weight of pair j is a_j = df/dy_j. A column is a family of
weights A_j. If y given x is Gaussian, Stein's lemma says that E[a | x] is the best linear map from
y to f, so the regression of a on A in the metric E_y (r . y)^2 = tau^2 |X^T r|^2 + sigma^2 |r|^2 is
the L^2 projection of f. For any other law f itself is regressed on A . y.

Every statistic is a function of sums over groups of prompts. Its standard error is the jackknife
that leaves out one group at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from scipy.interpolate import CubicSpline

GROUPS = 32
"""Number of groups of prompts. More groups make the errors smoother and cost more."""
JITTER = 1e-10
"""Relative size of the ridge that keeps the normal equations solvable."""
WeightColumns = Callable[["PromptArrays"], Float[np.ndarray, "batch context column"]]
"""Weights A of all columns on a part of the prompts."""


class FewPromptsError(ValueError):
    """Error: too few prompts, or a few of them decide all numbers, so that no error can be stated."""


@dataclass(frozen=True, eq=False)
class PromptArrays:
    """Prompts as arrays, with the predictions of a learner and the weights of the pairs in them."""

    x: Float[np.ndarray, "batch context d_x"]
    y: Float[np.ndarray, "batch context"]
    x_query: Float[np.ndarray, "batch d_x"]
    f: Float[np.ndarray, " batch"]
    """Predictions."""
    f_reversed: Float[np.ndarray, " batch"]
    """Predictions at -y."""
    a: Float[np.ndarray, "batch context"]
    """Weights of the pairs, df/dy_j."""
    group: Int[np.ndarray, " batch"]
    """Group of each prompt."""
    beta_var: float
    """Variance tau^2 of y given x per unit of x^2."""
    noise_var: float
    """Variance sigma^2 of the noise of y, unit y^2."""
    by_gradient: bool
    """True: a is regressed on A. False: f is regressed on A . y."""

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, chosen: np.ndarray) -> "PromptArrays":
        """The chosen prompts."""
        names = ("x", "y", "x_query", "f", "f_reversed", "a", "group")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @property
    def even(self) -> Float[np.ndarray, " batch"]:
        """Part of the predictions that does not change its sign with y."""
        return (self.f + self.f_reversed) / 2

    @cached_property
    def parts(self) -> list["PromptArrays"]:
        """The groups of prompts."""
        return [self.rows(self.group == group) for group in np.unique(self.group)]

    @cached_property
    def similarity(self) -> Float[np.ndarray, "batch context"]:
        """Inner products of the query with each covariate."""
        return np.einsum("ni,nli->nl", self.x_query, self.x)

    @cached_property
    def modes(self) -> "SampleModes":
        """The prompts in the eigenvectors of S = X^T X / L."""
        return SampleModes.of(self)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over each group of an array with one row per prompt, [group, ...]."""
        return np.stack([values[self.group == group].sum(0) for group in np.unique(self.group)])


@dataclass(frozen=True, eq=False)
class SampleModes:
    """Eigenvalues s_k of S = X^T X / L, and the query, y and a in its eigenvectors v_k."""

    s: Float[np.ndarray, "batch mode"]
    query: Float[np.ndarray, "batch mode"]
    """<v_k, q>."""
    y: Float[np.ndarray, "batch mode"]
    """<v_k, X^T y> / L."""
    a: Float[np.ndarray, "batch mode"]
    """<v_k, X^T a>."""
    vectors: Float[np.ndarray, "batch d_x mode"]

    @classmethod
    def of(cls, sample: PromptArrays) -> "SampleModes":
        context = sample.x.shape[1]
        kept = min(sample.x.shape[1:])
        s, vectors = np.linalg.eigh(sample.x.transpose(0, 2, 1) @ sample.x / context)
        vectors = vectors[:, :, -kept:]

        def along(values: np.ndarray) -> np.ndarray:
            return np.einsum("nik,ni->nk", vectors, values)

        return cls(
            s=np.maximum(s[:, -kept:], 0),
            query=along(sample.x_query),
            y=along(np.einsum("nli,nl->ni", sample.x, sample.y)) / context,
            a=along(np.einsum("nli,nl->ni", sample.x, sample.a)),
            vectors=vectors,
        )

    def weights(
        self, sample: PromptArrays, basis: Float[np.ndarray, "batch mode column"]
    ) -> Float[np.ndarray, "batch context column"]:
        """Weights of filters: sum_k basis_k <v_k, q> <v_k, x_j> / L."""
        along = np.einsum("nik,nk,nkb->nib", self.vectors, self.query, basis, optimize=True)
        return sample.x @ along / sample.x.shape[1]


def jackknife(
    statistic: Callable[..., np.ndarray | float], *sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A statistic of the sums over all groups, and its standard error.

    Example:
        >>> value, error = jackknife(lambda total: total / 4, np.array([1.0, 2.0, 3.0, 4.0]))
        >>> float(value), round(float(error), 4)
        (2.5, 0.4841)
    """
    totals = [each.sum(0) for each in sums]
    n = len(sums[0])
    each = np.stack(
        [
            np.asarray(statistic(*(t - part[g] for t, part in zip(totals, sums, strict=True))))
            for g in range(n)
        ]
    )
    spread = ((each - each.mean(0)) ** 2).sum(0)
    return np.asarray(statistic(*totals)), np.asarray(np.sqrt((n - 1) / n * spread))


def ratio(numerator: np.ndarray | float, denominator: np.ndarray | float) -> np.ndarray:
    """Quotient; NaN where the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator == 0, np.nan, np.divide(numerator, denominator))


def solve(
    gram: Float[np.ndarray, "*axes column column"], inner: Float[np.ndarray, "*axes column"]
) -> Float[np.ndarray, "*axes column"]:
    """Solution of the normal equations, with columns scaled to unit length first."""
    size = np.diagonal(gram, axis1=-2, axis2=-1)
    scale = 1 / np.sqrt(np.maximum(size, 1e-300))
    scaled = gram * scale[..., None, :] * scale[..., :, None] + JITTER * np.eye(gram.shape[-1])
    return scale * np.linalg.solve(scaled, (inner * scale)[..., None])[..., 0]


def spline(
    at: np.ndarray, knots: Float[np.ndarray, " knot"], c: float = np.inf
) -> Float[np.ndarray, "*axes knot"]:
    """Natural cubic splines divided by (s + c); a coefficient is the value at its knot.

    The first and last piece go on linearly, so that a point outside the knots is not extrapolated
    by a cubic.
    """
    if len(knots) == 1:
        basis = np.ones((*np.shape(at), 1))
    else:
        curve = CubicSpline(knots, np.eye(len(knots)), bc_type="natural")
        inside = np.clip(at, knots[0], knots[-1])
        basis = curve(inside) + curve(inside, 1) * (at - inside)[..., None]
    return basis if np.isinf(c) else basis * (knots + c) / (at[..., None] + c)


def quantile_knots(values: np.ndarray, n: int) -> Float[np.ndarray, " knot"]:
    """Smallest and largest value, and quantiles between them; equal ones are one knot."""
    return np.unique(np.quantile(values, np.r_[0, np.linspace(0.02, 0.98, n - 2), 1]))


@dataclass(frozen=True, eq=False)
class Projection:
    """Least squares on columns as sums over groups: for the fit, and for the score on f."""

    gram: Float[np.ndarray, "group column column"]
    inner: Float[np.ndarray, "group column"]
    squares: Float[np.ndarray, "group column column"]
    """Products of the columns' predictions A . y."""
    cross: Float[np.ndarray, "group column"]
    """Products of the columns' predictions with f."""
    total: Float[np.ndarray, " group"]
    """Squares of f."""

    @classmethod
    def of_columns(cls, sample: PromptArrays, columns: WeightColumns) -> "Projection":
        """Projection on columns of weights [batch, context, column], one group of prompts at a time."""

        def of_part(part: PromptArrays) -> Iterator[np.ndarray]:
            A = columns(part)
            predicted = (part.y[:, None] @ A)[:, 0]
            if part.by_gradient:
                XA = (part.x.transpose(0, 2, 1) @ A).reshape(-1, A.shape[2])
                Xa = np.einsum("nli,nl->ni", part.x, part.a).reshape(-1)
                flat = A.reshape(-1, A.shape[2])
                yield part.beta_var * XA.T @ XA + part.noise_var * flat.T @ flat
                yield part.beta_var * Xa @ XA + part.noise_var * part.a.reshape(-1) @ flat
            else:
                yield predicted.T @ predicted
                yield part.f @ predicted
            yield predicted.T @ predicted
            yield part.f @ predicted
            yield np.square(part.f).sum()

        each = zip(*(of_part(part) for part in sample.parts), strict=True)
        return cls(*(np.stack(sums) for sums in each))

    @classmethod
    def of_filters(
        cls, sample: PromptArrays, basis: Float[np.ndarray, "batch mode column"]
    ) -> "Projection":
        """Projection on filters sum_k basis_k <v_k, q> <v_k, x_j> / L, without the weights themselves.

        The columns X v_k of different modes are orthogonal, so all products are sums over modes.
        """
        modes = sample.modes
        directed = basis * modes.query[:, :, None]
        predicted = np.einsum("nkb,nk->nb", directed, modes.y)
        squares = sample.sums(predicted[:, :, None] * predicted[:, None])
        cross = sample.sums(predicted * sample.f[:, None])
        gram, inner = squares, cross
        if sample.by_gradient:
            metric = sample.beta_var * modes.s + sample.noise_var / sample.x.shape[1]
            gram = sample.sums(
                np.einsum("nkb,nk,nkc->nbc", directed, modes.s * metric, directed, optimize=True)
            )
            inner = sample.sums(np.einsum("nkb,nk->nb", directed, metric * modes.a))
        return cls(gram, inner, squares, cross, sample.sums(sample.f**2))

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Coefficient of each column and its standard error."""
        return jackknife(solve, self.gram, self.inner)

    def left(self, n: int | None = None) -> tuple[float, float]:
        """E (f - fit)^2 / E f^2 for the first n columns, cross-validated over groups, and its error."""
        gram = (self.gram.sum(0) - self.gram)[:, :n, :n]
        c = solve(gram, (self.inner.sum(0) - self.inner)[:, :n])
        missed = (
            self.total
            - 2 * (c * self.cross[:, :n]).sum(1)
            + np.einsum("gb,gbc,gc->g", c, self.squares[:, :n, :n], c)
        )
        value, error = jackknife(ratio, missed, self.total)
        return float(value), float(error)
