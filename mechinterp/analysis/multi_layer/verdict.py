"""What the layers of a model compute, how sure that is, and what it is not."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.labels import ALGORITHMS
from mechinterp.analysis.learners.nearest import Nearby
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_labels import OWN, AlgorithmLimits
from mechinterp.analysis.number_format import beside, digits, explained
from mechinterp.analysis.verdict import (
    NOTHING_EXCLUDED,
    Verdict,
    calibration_text,
    chance_text,
    is_behind,
    nearest_learners,
    none_of,
)


def layers_verdict(
    pattern: str,
    reason: str,
    algorithm: AlgorithmEvidence | None,
    near: Nearby,
    doubt: str = "",
) -> Verdict:
    """The verdict on a model that its circuits do not describe.

    Args:
        algorithm: Evidence of several layers; None of a single one.
        near: What simple learners explain.
        doubt: Why the task may be another one.
    """
    if algorithm is None or algorithm.best is None:
        return nearest_learners(_none(pattern, reason), near, doubt=doubt)
    best = algorithm.best
    number = explained(algorithm.r2[best, OWN], algorithm.r2_sem[best, OWN])
    if pattern == algorithm.members[best]:
        label = ALGORITHMS[pattern]
        walked = algorithm.has_path[best] and algorithm.path_answered
        values = (algorithm.path_scalars if walked else algorithm.scalars)[best]
        numbers = _numbers(label.numbers, values, algorithm.n_layers)
        computes = f"{label.text} ({pattern})" + (f"; {numbers}" if numbers else "")
        fitted = "its numbers fitted on other prompts" if numbers else "with nothing fitted"
        sure = f"this formula, {fitted}, explains {number} of the predictions"
    else:
        computes = _none(pattern, reason)
        sure = f"the nearest is {ALGORITHMS[algorithm.members[best]].name}, {number}"
    sure += f"; {_share(algorithm, pattern)}{_chance(algorithm)}"
    if pattern in ALGORITHMS:
        sure += calibration_text(ALGORITHMS[pattern])
    return Verdict(computes, sure, *_others(algorithm, best), doubt)


def _numbers(letters: Sequence[str], values: Float[np.ndarray, " _"], n_layers: int) -> str:
    """The fitted numbers, layer by layer."""
    if not letters:
        return ""
    counts = [n_layers] + [len(values) - n_layers] * (len(letters) - 1)
    parts = np.split(values, np.cumsum(counts)[:-1]) if len(letters) > 1 else [values]
    named = zip(letters, parts, strict=True)
    return ", ".join(f"{letter} = {', '.join(map(digits, part))}" for letter, part in named)


def _share(algorithm: AlgorithmEvidence, pattern: str) -> str:
    """How often resampled prompts give the label."""
    shares = dict(zip(algorithm.resampled, algorithm.frequency, strict=True))
    if algorithm.why == "frequency":
        listed = [f"{label} in {share:.0%}" for label, share in shares.items()]
        return f"{', '.join(listed)} of resamples"
    return f"{pattern} in {shares.get(pattern, 0.0):.0%} of resamples"


def _chance(algorithm: AlgorithmEvidence) -> str:
    """How often the same weights in random order are as good at the task."""
    n = len(algorithm.null_risk)
    if not n:
        return ""
    p = (int((algorithm.null_risk <= algorithm.relative_risk[OWN]).sum()) + 1) / (n + 1)
    return f"; {chance_text(p, n, 'weights of the same singular values')}"


def _others(algorithm: AlgorithmEvidence, best: int) -> tuple[str, str]:
    """The nearest algorithm that explains clearly less, and those that do not, by the rule of the labels."""
    r2 = algorithm.r2[:, OWN]
    order = np.argsort(-np.nan_to_num(r2, nan=-np.inf), kind="stable").tolist()
    others, tie = [m for m in order if m != best], AlgorithmLimits().tie
    leads = {m: algorithm.lead(best, m) for m in others}
    behind = [m for m in others if is_behind(*leads[m], tie)]
    said = {
        m: f"{ALGORITHMS[algorithm.members[m]].name}, R² = {r2[m]:.4f}, {beside(*leads[m])}"
        for m in others
    }
    is_not = said[behind[0]] if behind else NOTHING_EXCLUDED
    return is_not, "; ".join(said[m] for m in others if m not in behind)


def _none(pattern: str, reason: str) -> str:
    """That it is no known algorithm, and why; what comes nearest has a line of its own."""
    return f"{none_of('algorithms', pattern)}: {reason}"
