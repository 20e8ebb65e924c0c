"""All measurements of one response, frame by frame."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from mechinterp.analysis.response import measures, reading
from mechinterp.analysis.response.against_bayes import against_bayes
from mechinterp.analysis.response.beside import learners_beside
from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.left import Left, left_of
from mechinterp.analysis.response.order import ORDER_COLUMNS, Order, order_of
from mechinterp.analysis.response.pair_weights import function_of, pair_weights, values
from mechinterp.analysis.response.projection import (
    Projection,
    PromptArrays,
    jackknife,
    solve,
    spline,
)
from mechinterp.analysis.response.sample import Measuring, require_effective, sample_of
from mechinterp.analysis.response.symmetries import second_y, symmetries_frame

SWAPPED = 128
"""Number of prompts for the order of the pairs."""
SYMMETRIC = 512
"""Number of prompts for the symmetries."""
ROTATED = 0.01
"""Mismatch under a rotation of x above which other coordinates are looked for."""
MOST_COORDINATES = 16
"""Largest d_x at which other coordinates are looked for, as M has d_x^2 entries."""


@dataclass(frozen=True, eq=False)
class OfOneOutput:
    """Frames of one response."""

    frames: dict[str, pd.DataFrame]
    root: np.ndarray | None
    notes: list[str]


def measured(setting: Measuring, output: int) -> OfOneOutput:
    """All frames of one response."""
    notes: list[str] = []
    plain = sample_of(setting, setting.function, output)
    effective = require_effective(plain.f)
    if not np.isfinite(plain.a).all():
        raise ValueError("Gradients with respect to y must be finite, got NaN or infinite ones.")
    symmetries = _symmetries(setting, output)
    root = _root(setting, plain, symmetries)
    sample = plain if root is None else measures.in_coordinates(plain, root)
    shrunk = measures.shrinkage(sample)
    phi, fit = measures.filter_frame(sample, shrunk)
    against = against_bayes(setting, sample, root, phi.s.to_numpy(), fit, shrunk, output)
    position, alpha = measures.position_frame(sample)
    left = _left(setting, sample, shrunk, output)
    order = _order(setting, plain, root, output, notes)
    scalars = {
        "effective prompts": (effective, np.nan),
        "amplitude": shrunk.amplitude,
        "c": shrunk.c,
        "alpha": alpha,
        "mean of x": left.mean_of_x,
        "linear in y, no filter": left.linear,
        "disagreement": _disagreement(sample, fit, phi.s.to_numpy(), shrunk),
        **against.scalars,
    }
    if setting.law is None or setting.law.n_tasks is None:
        scalars["even in y"] = left.even
    if order is not None:
        scalars |= {"later": order.later, "earlier": order.earlier}
        online = order.earlier[0] < reading.ONLINE * order.later[0]
        scalars["eta"] = order.eta if online else (np.nan, np.nan)
        scalars["gate"] = _gate(alpha, order.eta) if online else alpha
    if setting.prompts.y.shape[2] > 1:
        scalars["cross"] = _cross(setting, plain, output)
    rows = [(name, *pair) for name, pair in scalars.items()]
    frames = {
        "symmetries": symmetries,
        "filter": _with_layers(setting, phi, against.phi, root, shrunk, output),
        "differences": against.differences,
        "beside": learners_beside(sample, phi.s.to_numpy(), setting.law, setting.descents),
        "forms": measures.forms_frame(sample, shrunk, fit),
        "position": position,
        "similarity": measures.similarity_frame(sample),
        "order": pd.DataFrame(columns=list(ORDER_COLUMNS)) if order is None else order.frame,
        "left": left.frame,
        "scalars": pd.DataFrame(rows, columns=["name", "value", "sem"]),
    }
    return OfOneOutput(frames, root, notes)


def _symmetries(setting: Measuring, output: int) -> pd.DataFrame:
    few = slice(SYMMETRIC if setting.by_gradient else SWAPPED)
    functions = {"model": setting.function}
    if setting.bayes is not None:
        functions["bayes"] = setting.bayes
    with np.errstate(over="ignore", invalid="ignore"):
        return symmetries_frame(
            functions, setting.prompts[few], setting.group[few], output, setting.seed
        )


def _root(setting: Measuring, sample: PromptArrays, symmetries: pd.DataFrame) -> np.ndarray | None:
    """Coordinates of x in which the filter is measured."""
    if not isinstance(setting.coordinates, str):
        given = setting.coordinates
        d_x = sample.x.shape[2]
        if given is not None and np.shape(given) != (d_x, d_x):
            raise ValueError(
                f"coordinates must be a matrix of shape [{d_x}, {d_x}], got {list(np.shape(given))}."
            )
        return given
    rotated = symmetries.set_index("symmetry").mismatch["rotation of x"]
    if rotated <= ROTATED or not 1 < sample.x.shape[2] <= MOST_COORDINATES:
        return None
    return measures.coordinates_of(sample)


def _left(
    setting: Measuring, sample: PromptArrays, shrunk: measures.Shrinkage, output: int
) -> Left:
    """Part left as columns are added, in the coordinates of the sample."""
    again, posterior = None, None
    if setting.prompts.knows_task_vectors and setting.by_gradient:
        other = replace(setting.prompts, y=second_y(setting.prompts))
        again = pair_weights(setting.function, other, output)
    if setting.law is not None and setting.law.n_tasks is not None and setting.bayes is not None:
        posterior = values(setting.bayes, setting.prompts, output)
    return left_of(sample, shrunk, again, posterior)


def _order(
    setting: Measuring, plain: PromptArrays, root: np.ndarray | None, output: int, notes: list[str]
) -> Order | None:
    """Order of the pairs on a few prompts; None with a note if fresh pairs cannot be made."""
    if not setting.prompts.knows_task_vectors:
        notes.append(
            "The order of the pairs was not measured: the prompts have no task vectors (beta)."
        )
        return None
    if plain.x.shape[1] < 2:
        notes.append("The order of the pairs was not measured: there is one pair.")
        return None
    few = slice(SWAPPED)
    prompts = setting.prompts[few]
    chosen = plain.rows(np.arange(len(plain)) < SWAPPED)
    return order_of(setting.function, prompts, chosen, root, output)


def _gate(alpha: Estimate, eta: Estimate) -> Estimate:
    """Gate of an online learner, alpha / (1 - eta), with the errors of both added in squares."""
    keep = 1 - eta[0]
    gate = alpha[0] / keep
    return gate, float(np.hypot(alpha[1] / keep, gate * eta[1] / keep))


def _cross(setting: Measuring, plain: PromptArrays, output: int) -> Estimate:
    """Part of the squared weights that falls on the other responses' y."""
    others = [n for n in range(setting.prompts.y.shape[2]) if n != output]
    squares = sum(
        np.square(pair_weights(setting.function, setting.prompts, output, of=n)).sum(1)
        for n in others
    )
    own = np.square(plain.a).sum(1)
    value, sem = jackknife(measures.ratio, plain.sums(squares), plain.sums(squares + own))
    return float(value), float(sem)


def _disagreement(
    sample: PromptArrays, fit: Projection, knots: np.ndarray, shrunk: measures.Shrinkage
) -> Estimate:
    """Root mean square, in standard errors, of the difference between phi by gradients and by predictions."""
    other = Projection.of_filters(
        replace(sample, by_gradient=not sample.by_gradient),
        spline(sample.modes.s, knots, shrunk.c[0]),
    )
    value, sem = jackknife(
        lambda g, i, h, j: solve(g, i) - solve(h, j), fit.gram, fit.inner, other.gram, other.inner
    )
    used = sem > 1e-9 * np.abs(fit.coefficients()[0]).max()
    if not used.any():
        return 0.0, np.nan
    return float(np.sqrt(np.square(value[used] / sem[used]).mean())), np.nan


def _with_layers(
    setting: Measuring,
    phi: pd.DataFrame,
    bayes: np.ndarray,
    root: np.ndarray | None,
    shrunk: measures.Shrinkage,
    output: int,
) -> pd.DataFrame:
    """The filter frame with the Bayes learner's; with layers, one block per layer and `layer` last."""
    frame = phi.assign(bayes=bayes)
    if not setting.n_layers:
        return frame
    blocks = []
    for layer in range(setting.n_layers):
        sample = sample_of(setting, function_of(setting.source, layer + 1), output)
        sample = sample if root is None else measures.in_coordinates(sample, root)
        own = measures.shrinkage(sample)
        after, _ = measures.filter_frame(sample, own, phi.s.to_numpy())
        blocks.append(after.assign(bayes=bayes, layer=layer))
    return pd.concat(blocks, ignore_index=True)
