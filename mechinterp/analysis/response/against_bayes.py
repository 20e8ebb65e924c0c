"""The filter of the Bayes learner beside that of the model, and the share of the excess risk that the difference explains."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mechinterp.analysis.response import measures
from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.projection import (
    Projection,
    PromptArrays,
    jackknife,
    solve,
    spline,
)


@dataclass(frozen=True, eq=False)
class Against:
    """The filter of the Bayes learner on the same prompts, and the model's difference from it."""

    phi: np.ndarray
    differences: pd.DataFrame
    scalars: dict[str, Estimate]


def against_bayes(
    bayes: PromptArrays | None,
    sample: PromptArrays,
    root: np.ndarray | None,
    knots: np.ndarray,
    fit: Projection,
    shrunk: measures.Shrinkage,
) -> Against:
    """Filter of the Bayes learner, and the share of the excess risk that the difference explains.

    Args:
        bayes: Predictions of the Bayes learner on the prompts, in their own coordinates; None: it is unknown.
    """
    if bayes is None:
        nothing = pd.DataFrame(columns=["s", "difference", "difference_sem"], dtype=float)
        return Against(np.full(len(knots), np.nan), nothing, {})
    bayes = bayes if root is None else measures.in_coordinates(bayes, root)
    own = measures.shrinkage(bayes)
    phi, theirs = measures.filter_frame(bayes, own, knots)
    # Each filter in its own basis: that of the model cannot follow the Bayes learner's at small s.
    value, sem = jackknife(
        lambda g, m, h, b: solve(g, m) - solve(h, b), fit.gram, fit.inner, theirs.gram, theirs.inner
    )
    modes = sample.modes
    gap = (
        spline(modes.s, knots, shrunk.c[0]) @ fit.coefficients()[0]
        - spline(modes.s, knots, own.c[0]) @ phi.phi.to_numpy()
    )
    by_filter = (gap * modes.query * modes.y).sum(1)
    excess = (sample.f - bayes.f) ** 2
    share = jackknife(measures.ratio, sample.sums(by_filter**2), sample.sums(excess))
    mean = jackknife(measures.ratio, sample.sums(excess), sample.sums(np.ones(len(excess))))
    return Against(
        phi=phi.phi.to_numpy(),
        differences=pd.DataFrame({"s": knots, "difference": value, "difference_sem": sem}),
        scalars={
            "c of Bayes": own.c,
            "squared distance to Bayes": (float(mean[0]), float(mean[1])),
            "share of it in the filter": (float(share[0]), float(share[1])),
        },
    )
