"""Measurements of a learner: its filter over directions, its use of age, similarity and order of the
pairs, the symmetries that it keeps, and the part that none of these explain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.polynomial.legendre import legvander

from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.pair_weights import pair_weights, values
from mechinterp.analysis.response.projection import (
    Projection,
    PromptArrays,
    jackknife,
    quantile_knots,
    ratio,
    solve,
    spline,
)
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner

KNOTS = 10
"""Number of eigenvalues at which the filter is reported."""
SIMILARITY_KNOTS = 9
"""Number of similarities at which the weight of a pair is reported."""
MOST_STEPS = 6
"""Largest number of steps of descent among the forms."""
AGE_BINS = 4
"""Number of hat functions over the positions, and of bins of pairs for the order."""
MOST_SWAPS = 24
"""Largest number of positions whose pair is replaced."""
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
    """Best a / (s + c), on a grid of c that is refined once around the best one."""
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


@dataclass(frozen=True, eq=False)
class Order:
    """Change of the weight of a pair when another pair is exchanged for a fresh one."""

    frame: pd.DataFrame
    later: Estimate
    """Mean of L^2 D for the effect of a later pair on an earlier one's weight."""
    earlier: Estimate
    """Mean of L^2 D for the effect of an earlier pair on a later one's weight."""
    eta: Estimate
    """Step size of an online learner with these effects, for x of unit variance."""


ORDER_COLUMNS = ("changed", "pair", "size", "size_sem", "slope", "slope_sem")


def order_of(
    function: Learner, prompts: Prompts, sample: PromptArrays, root: np.ndarray | None, output: int
) -> Order:
    """Effect of a fresh pair i, of the same task vector and noise, on the weight of each pair j.

    size is L^2 D_ij with D_ij = E (change of a_j)^2 / (2 E a^2). slope is that of the change of
    a_j on the change of <q, x_i> <x_i, x_j> / L^2. No expansion is cut off: a zero is exact.

    Args:
        sample: The same prompts, in x's own coordinates.
        root: Coordinates of the slopes, x -> root x; None: those of x.
    """
    context = sample.x.shape[1]
    beta = prompts.task_vectors_at_every_x("order")[..., output]
    moved = sample if root is None else in_coordinates(sample, root)
    u = moved.similarity
    positions = np.unique(np.linspace(0, context - 1, min(context, MOST_SWAPS)).round().astype(int))
    size = sample.sums((sample.a**2).mean(1))
    others = np.arange(context)
    rows = []
    shares: dict[str, list[np.ndarray]] = {"later": [], "earlier": []}
    slopes = np.zeros(len(size))
    squares = np.zeros((len(size), context))
    for i in positions:
        x = prompts.x.clone()
        x[:, i] = prompts.x[:, i].roll(1, 0)
        y = prompts.y.clone()
        y[:, i, output] += ((x[:, i] - prompts.x[:, i]) * beta[:, i].to(x)).sum(1)
        change = pair_weights(function, replace(prompts, x=x, y=y), output) - sample.a
        own = moved.x[:, i]
        new = np.roll(own, 1, 0)
        product = (_through(moved, new) - _through(moved, own)) / context**2
        changes = sample.sums(change**2)
        along, length = sample.sums(change * product), sample.sums(product**2)
        D, D_sem = jackknife(lambda d, a: context**2 * ratio(d, 2 * a), changes, size)
        C, C_sem = jackknife(ratio, along, length)
        values_of = dict(zip(ORDER_COLUMNS, (i, others, D, D_sem, C, C_sem), strict=True))
        rows.append(pd.DataFrame(values_of)[others != i])
        shares["later"].append(changes[:, :i].sum(1))
        shares["earlier"].append(changes[:, i + 1 :].sum(1))
        slopes = slopes + along[:, :i].sum(1)
        squares = squares + length * (others < i)
    counts = {"later": positions.sum(), "earlier": (context - 1 - positions).sum()}

    def mean_size(which: str) -> Estimate:
        total = np.sum(shares[which], 0) / max(counts[which], 1)
        value, sem = jackknife(lambda d, a: context**2 * ratio(d, 2 * a), total, size)
        return float(value), float(sem)

    weight = sample.sums(u * sample.a)
    unit = sample.sums(u**2)

    def eta_of(
        slopes: np.floating, squares: np.ndarray, weight: np.ndarray, unit: np.ndarray
    ) -> float:
        # A delta rule changes a_j by -eta / (1 - eta) L c_j times <q, x_i> <x_i, x_j> / L^2.
        c = context * weight / unit
        rate = max(-float(slopes) / max(float((squares * c).sum()) * context, 1e-300), 0.0)
        return rate / (1 + rate)

    eta = jackknife(eta_of, slopes, squares, weight, unit)
    frame = pd.concat(rows, ignore_index=True)
    return Order(frame, mean_size("later"), mean_size("earlier"), (float(eta[0]), float(eta[1])))


def _through(sample: PromptArrays, covariate: np.ndarray) -> Float[np.ndarray, "batch context"]:
    """<q, x_i> <x_i, x_j> for each j."""
    similarity = np.einsum("ni,ni->n", sample.x_query, covariate)
    return similarity[:, None] * np.einsum("ni,nli->nl", covariate, sample.x)


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
    even = jackknife(ratio, sample.sums((sample.f - sample.odd) ** 2), sample.sums(sample.f**2))
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


def symmetries_frame(
    functions: Mapping[str, Learner], prompts: Prompts, group: np.ndarray, output: int, seed: int
) -> pd.DataFrame:
    """Mismatch E (f - f')^2 / (2 E f^2) of each symmetry: 0 if it is kept, 1 for unrelated predictions.

    Args:
        functions: The model, and the Bayes learner as "bayes" if it is known.
    """
    columns = {}
    for name, function in functions.items():
        pairs = _transformed(function, prompts, output, seed)
        rows = {}
        for symmetry, (left, right, plain) in pairs.items():
            sums = [_grouped(each, group) for each in ((left - right) ** 2, plain**2)]
            rows[symmetry] = jackknife(lambda e, s: ratio(e, 2 * s), *sums)
        columns[name] = rows
    model = columns["model"]
    bayes = columns.get("bayes", {})
    return pd.DataFrame(
        {
            "symmetry": list(model),
            "mismatch": [float(value) for value, _ in model.values()],
            "mismatch_sem": [float(sem) for _, sem in model.values()],
            "bayes": [float(bayes[name][0]) if name in bayes else np.nan for name in model],
        }
    )


def _grouped(each: np.ndarray, group: np.ndarray) -> np.ndarray:
    return np.stack([each[group == g].sum(0) for g in np.unique(group)])


def _transformed(
    function: Learner, prompts: Prompts, output: int, seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Predictions on the transformed prompts, what they should be, and the plain predictions."""
    generator = torch.Generator().manual_seed(seed)
    x, y, query = prompts.x, prompts.y, prompts.x_query
    order = torch.randperm(x.shape[1], generator=generator)
    normal = torch.randn(x.shape[2], x.shape[2], generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(normal)[0].to(x)
    spread = float(y.std())
    half = 0.5**0.5

    def run(**changed: torch.Tensor) -> np.ndarray:
        return values(function, replace(prompts, **changed), output)

    f = run()
    turned = query.roll(1, 0)
    tests = {
        "order of pairs": (run(x=x[:, order], y=y[:, order]), f),
        "rotation of x": (run(x=x @ rotation, x_query=query @ rotation), f),
        "sign of y": (-run(y=-y), f),
        "y / 2": (2 * run(y=y / 2), f),
        "2 y": (run(y=2 * y) / 2, f),
        "sum of two queries": (
            run(x_query=(query + turned) * half),
            (f + run(x_query=turned)) * half,
        ),
        "shift of x": (run(x=x + 1, x_query=query + 1), f),
        "shift of y": (run(y=y + spread) - spread, f),
    }
    if prompts.knows_task_vectors:
        other = second_y(prompts)
        tests["sum of two y"] = (run(y=(y + other) * half), (f + run(y=other)) * half)
    return {name: (*pair, f) for name, pair in tests.items()}


def second_y(prompts: Prompts) -> torch.Tensor:
    """Responses of another task vector and other noise on the same x."""
    return prompts.with_next_task("a second y").y
