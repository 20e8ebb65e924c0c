"""All measurements of one response, frame by frame."""

from collections.abc import Collection
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
from mechinterp.analysis.response.symmetries import (
    ROTATION,
    SUM_OF_Y,
    Symmetric,
    second_y,
    symmetries_frame,
)

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


@dataclass(frozen=True, eq=False)
class Core:
    """Measurements from which the class of a learner follows, and what the others are made of."""

    plain: PromptArrays
    """The prompts in their own coordinates."""
    sample: PromptArrays
    """The prompts in the coordinates of the filter."""
    root: np.ndarray | None
    shrunk: measures.Shrinkage
    symmetries: pd.DataFrame
    position: pd.DataFrame
    left: Left
    order: Order | None
    scalars: dict[str, Estimate]
    order_scalars: dict[str, Estimate]
    """Numbers of the order of the pairs, and the part that is even in y."""
    notes: list[str]


def measured(setting: Measuring, output: int) -> OfOneOutput:
    """All frames of one response."""
    bayes = None
    if setting.bayes is not None:
        bayes = sample_of(setting, setting.bayes, output, weights=setting.by_gradient)
    core = _core(setting, output, bayes)
    sample, shrunk, order = core.sample, core.shrunk, core.order
    phi, fit = measures.filter_frame(sample, shrunk)
    knots = phi.s.to_numpy()
    against = against_bayes(bayes, sample, core.root, knots, fit, shrunk)
    scalars = {
        **core.scalars,
        "disagreement": _disagreement(sample, fit, knots, shrunk),
        **against.scalars,
        **core.order_scalars,
    }
    if setting.prompts.y.shape[2] > 1:
        scalars["cross"] = _cross(setting, core.plain, output)
    frames = {
        **_core_frames(core, scalars),
        "filter": _with_layers(setting, phi, against.phi, core.root, shrunk, output),
        "differences": against.differences,
        "beside": learners_beside(sample, knots, setting.law, setting.descents),
        "forms": measures.forms_frame(sample, shrunk, fit),
        "similarity": measures.similarity_frame(sample),
        "order": pd.DataFrame(columns=list(ORDER_COLUMNS)) if order is None else order.frame,
    }
    return OfOneOutput(frames, core.root, core.notes)


def measured_for_kind(setting: Measuring, output: int) -> dict[str, pd.DataFrame]:
    """The frames of one response from which the class of the learner follows."""
    core = _core(setting, output, None, for_kind=True)
    return _core_frames(core, core.scalars | core.order_scalars)


def _core_frames(core: Core, scalars: dict[str, Estimate]) -> dict[str, pd.DataFrame]:
    rows = [(name, *pair) for name, pair in scalars.items()]
    return {
        "symmetries": core.symmetries,
        "position": core.position,
        "left": core.left.frame,
        "scalars": pd.DataFrame(rows, columns=["name", "value", "sem"]),
    }


def _core(
    setting: Measuring, output: int, bayes: PromptArrays | None, *, for_kind: bool = False
) -> Core:
    """Measurements from which the class of the learner follows.

    Args:
        bayes: Predictions of the Bayes learner; None: none are shown.
        for_kind: True: leave out the other symmetries, and the part that is linear in y without being a filter.
    """
    notes: list[str] = []
    plain = sample_of(setting, setting.function, output)
    effective = require_effective(plain.f)
    if not np.isfinite(plain.a).all():
        raise ValueError("Gradients with respect to y must be finite, got NaN or infinite ones.")
    only = (ROTATION, SUM_OF_Y) if for_kind else ()
    symmetries = _symmetries(setting, output, plain, bayes, only)
    root = _root(setting, plain, symmetries)
    sample = plain if root is None else measures.in_coordinates(plain, root)
    shrunk = measures.shrinkage(sample)
    position, alpha = measures.position_frame(sample)
    left = _left(setting, sample, shrunk, output, for_kind=for_kind)
    order = _order(setting, plain, root, output, notes)
    scalars = {
        "effective prompts": (effective, np.nan),
        "amplitude": shrunk.amplitude,
        "c": shrunk.c,
        "alpha": alpha,
        "mean of x": left.mean_of_x,
        "linear in y, no filter": left.linear,
    }
    numbers = _order_scalars(setting, left, order, alpha)
    return Core(
        plain, sample, root, shrunk, symmetries, position, left, order, scalars, numbers, notes
    )


def _order_scalars(
    setting: Measuring, left: Left, order: Order | None, alpha: Estimate
) -> dict[str, Estimate]:
    """Numbers of the order of the pairs, and the part that is even in y."""
    scalars = {}
    if setting.law is None or setting.law.n_tasks is None:
        scalars["even in y"] = left.even
    if order is not None:
        scalars |= {"later": order.later, "earlier": order.earlier}
        online = order.earlier[0] < reading.ONLINE * order.later[0]
        scalars["eta"] = order.eta if online else (np.nan, np.nan)
        scalars["gate"] = _gate(alpha, order.eta) if online else alpha
    return scalars


def _symmetries(
    setting: Measuring,
    output: int,
    plain: PromptArrays,
    bayes: PromptArrays | None,
    only: Collection[str],
) -> pd.DataFrame:
    few = slice(SYMMETRIC if setting.by_gradient else SWAPPED)
    learners = {"model": Symmetric(setting.function, plain.f[few], plain.f_reversed[few])}
    if bayes is not None and setting.bayes is not None:
        learners["bayes"] = Symmetric(setting.bayes, bayes.f[few], bayes.f_reversed[few])
    with np.errstate(over="ignore", invalid="ignore"):
        return symmetries_frame(
            learners, setting.prompts[few], setting.group[few], output, setting.seed, only
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
    rotated = symmetries.set_index("symmetry").mismatch[ROTATION]
    if rotated <= ROTATED or not 1 < sample.x.shape[2] <= MOST_COORDINATES:
        return None
    return measures.coordinates_of(sample)


def _left(
    setting: Measuring,
    sample: PromptArrays,
    shrunk: measures.Shrinkage,
    output: int,
    *,
    for_kind: bool,
) -> Left:
    """Part left as columns are added, in the coordinates of the sample."""
    again, posterior = None, None
    if setting.prompts.knows_task_vectors and setting.by_gradient and not for_kind:
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
