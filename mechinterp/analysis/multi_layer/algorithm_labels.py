"""From the evidence to a label: which numbers decide, and where the limits lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_tests import USELESS

SMALLER = "gradient_descent"
LARGER = {"gd_plus_plus", "preconditioned_gd", "sparse_shrinkage"}
"""Members that contain gradient descent."""
ALIKE = {"gd_plus_plus", "newton", "ridge_like"}
"""Members whose tie is called ridge_like."""
OWN = 0
"""The setting of the model's own length."""


@dataclass(frozen=True)
class AlgorithmLimits:
    """Limits between labels.

    analyses/algorithms/calibration.py moves each of them, and counts wrong labels of built models.
    """

    holds: float = 0.98
    """R^2 of an identity from which on it holds."""
    fails: float = 0.9
    """R^2 of an identity below which it fails, which rules out members that satisfy it."""
    explained: float = 0.98
    """Least R^2 of the member that gives the label, at the model's own length."""
    path: float = 0.98
    """Least R^2 after every layer, of a member with a path."""
    tie: float = 0.005
    """Two members tie if their R^2 differ by less than this, or by less than two standard errors."""
    mixture: float = 0.5
    """Share of what a member leaves unexplained from which on a mixture explains the model better."""


Verdict = tuple[str, tuple[str, ...], str]
"""Label, candidates and reason."""


def verdict(found: AlgorithmEvidence, limits: AlgorithmLimits) -> Verdict:
    """The label that the numbers of the evidence earn."""
    risk = found.relative_risk[OWN]
    if not risk < USELESS:
        return (
            "unstructured",
            (),
            f"the model's excess risk is {risk:.3g} times that of predicting 0",
        )
    if len(found.null_risk) and risk >= found.null_risk.min():
        return (
            "unstructured",
            (),
            f"of {len(found.null_risk)} models of the same weights in random order one has an excess "
            f"risk of {found.null_risk.min():.3g} times that of predicting 0, the model {risk:.3g}",
        )
    left = not_ruled_out(found, limits)
    near = [m for m in range(len(found.members)) if found.r2[m, OWN] >= limits.explained]
    near = _undominated(near, _better(found, limits))
    kept = [m for m in near if m in left]
    if not kept:
        return "undetermined", (), f"{_nearest(found, left)}; {_told(found, limits)}"
    walked = [m for m in kept if found.has_path[m] and _walks(found, limits, m)]
    walked = _undominated(walked, _better_path(found, limits))
    return _decided(found, limits, walked, _smaller(walked or kept, found))


def answer(r2: float, limits: AlgorithmLimits) -> str:
    """What the R^2 of an identity says: "yes", "no", "unclear" or, if NaN, "not answered"."""
    if np.isnan(r2):
        return "not answered"
    return "yes" if r2 >= limits.holds else "no" if r2 < limits.fails else "unclear"


def not_ruled_out(found: AlgorithmEvidence, limits: AlgorithmLimits) -> list[int]:
    """Members that no test rules out.

    A "yes" rules out none: with small thresholds, ISTA is as good as linear.
    """
    fails = {
        start: any(
            answer(r2, limits) == "no"
            for name, r2 in zip(found.tests, found.test_r2, strict=True)
            if name.startswith(start)
        )
        for start in ("linear", "same")
    }
    ruled_out = (found.linear_in_y & fails["linear"]) | (found.equivariant & fails["same"])
    return np.flatnonzero(~ruled_out).tolist()


def _decided(
    found: AlgorithmEvidence, limits: AlgorithmLimits, walked: Sequence[int], kept: Sequence[int]
) -> Verdict:
    """What is said of the members that stay."""
    gains = np.nan_to_num(found.mixture_gain)
    unmixed = [m for m in kept if gains[m].max() <= limits.mixture]
    best = max(unmixed or kept, key=lambda m: found.r2[m, OWN])
    number = f"R² {found.r2[best, OWN]:.4f} ± {found.r2_sem[best, OWN]:.1g}"
    candidates = tuple(found.members[m] for m in unmixed or kept)
    told, tie = _told(found, limits), " and ".join(candidates)
    if not unmixed:
        other, gain = found.others[int(gains[best].argmax())], gains[best].max()
        rest = f"a mixture with {other} explains {gain:.0%} of the rest"
        return "undetermined", candidates, f"{tie} at {number}, but {rest}; {told}"
    if len(candidates) > 1 and "ridge_like" in candidates and set(candidates) <= ALIKE:
        return "ridge_like", candidates, f"{tie} tie at {number}, the path is open; {told}"
    if not walked and found.has_path[best]:
        return "undetermined", candidates, f"{tie} at {number}, but not layer by layer; {told}"
    if len(candidates) > 1:
        return "undetermined", candidates, f"{tie} tie at {number}; {told}"
    return candidates[0], candidates, f"{tie} at {number}; {told}"


def _smaller(kept: Sequence[int], found: AlgorithmEvidence) -> list[int]:
    """Without those that contain another that ties with them."""
    nested = SMALLER in [found.members[m] for m in kept]
    return [m for m in kept if not (nested and found.members[m] in LARGER)]


def _walks(found: AlgorithmEvidence, limits: AlgorithmLimits, member: int) -> bool:
    """Whether a member explains what is read after every layer."""
    return found.path_answered and bool((found.path_r2[member] >= limits.path).all())


def _better(found: AlgorithmEvidence, limits: AlgorithmLimits) -> Bool[np.ndarray, "member member"]:
    """Whether the first member is clearly nearer than the second, in some setting."""
    limit = np.maximum(limits.tie, 2 * found.difference_sem)
    return ((found.difference > limit) & found.answered).any(2)


def _better_path(
    found: AlgorithmEvidence, limits: AlgorithmLimits
) -> Bool[np.ndarray, "member member"]:
    """The same, after some layer."""
    limit = np.maximum(limits.tie, 2 * found.path_difference_sem)
    return (found.path_difference > limit).any(2)


def _undominated(kept: Sequence[int], better: Bool[np.ndarray, "member member"]) -> list[int]:
    """Without those that another is nearer than in some column, and further than in none."""
    return [m for m in kept if not any(better[o, m] and not better[m, o] for o in kept)]


def _told(found: AlgorithmEvidence, limits: AlgorithmLimits) -> str:
    """The answers on the two properties, each with the least R^2 of its tests."""
    told = []
    for start, what in (("linear", "linear in y"), ("same", "the same for rotated x")):
        each = [
            r2
            for name, r2 in zip(found.tests, found.test_r2, strict=True)
            if name.startswith(start) and not np.isnan(r2)
        ]
        least = min(each, default=np.nan)
        number = "" if np.isnan(least) else f" ({least:.3f})"
        told.append(f"{what}: {answer(least, limits)}{number}")
    return ", ".join(told)


def _nearest(found: AlgorithmEvidence, left: Sequence[int]) -> str:
    """Which member comes nearest, of those left and of all."""
    if not np.isfinite(found.r2[:, OWN]).all():
        return "none comes near"
    said = []
    for which, members in (("left", left), ("of all", range(len(found.members)))):
        if members:
            best = max(members, key=lambda m: found.r2[m, OWN])
            r2, sem = found.r2[best, OWN], found.r2_sem[best, OWN]
            said.append(f"nearest {which}: {found.members[best]} (R² {r2:.3f} ± {sem:.1g})")
    return f"none explains the model, {', '.join(said)}"
