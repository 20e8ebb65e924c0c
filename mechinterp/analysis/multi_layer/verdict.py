"""Verdict on a model that its circuits do not describe: what it computes, how sure that is, and what it is not."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.classified import (
    NOTHING_EXCLUDED,
    Verdict,
    calibration_text,
    is_behind,
    nearest_learners,
    none_of,
)
from mechinterp.analysis.labels import ALGORITHMS, NO_LABEL
from mechinterp.analysis.learners.nearest import Nearby
from mechinterp.analysis.multi_layer.naming import UNSTRUCTURED, Limits, Naming
from mechinterp.analysis.number_format import beside, digits, explained


def layers_verdict(
    pattern: str, reason: str, algorithm: Naming | None, near: Nearby, doubt: str = ""
) -> Verdict:
    """The verdict on a model that its circuits do not describe.

    Args:
        algorithm: Name of the algorithm of several layers; None for a single layer.
        near: R² of simple learners.
        doubt: Why the task may be another one.
    """
    computes = f"{none_of('algorithms', pattern)}: {reason}" if pattern in NO_LABEL else ""
    if pattern == UNSTRUCTURED:
        computes = f"nothing that helps on its task ({pattern}): {reason}"
    if algorithm is None or not algorithm.nearest:
        return nearest_learners(computes, near, doubt=doubt)
    nearest, share = algorithm.nearest, algorithm.frequency.get(pattern, 0.0)
    number = explained(*algorithm.explained(nearest))
    if computes:
        sure = f"the nearest is {ALGORITHMS[nearest].name}, {number}"
    else:
        label = ALGORITHMS[pattern]
        numbers = _numbers(label.numbers, algorithm.scalars(pattern), algorithm.n_layers)
        computes = f"{label.text} ({pattern})" + (f"; {numbers}" if numbers else "")
        fitted = "its numbers fitted on other prompts" if numbers else "with nothing fitted"
        sure = f"this formula, {fitted}, explains {number} of the predictions"
    sure += f"; {pattern} in {share:.0%} of resamples"
    if pattern in ALGORITHMS:
        sure += calibration_text(ALGORITHMS[pattern])
    return Verdict(computes, sure, *_others(algorithm), doubt)


def _numbers(letters: Sequence[str], values: Float[np.ndarray, " _"], n_layers: int) -> str:
    """The fitted numbers, layer by layer."""
    if not letters:
        return ""
    counts = [n_layers] + [len(values) - n_layers] * (len(letters) - 1)
    parts = np.split(values, np.cumsum(counts)[:-1]) if len(letters) > 1 else [values]
    named = zip(letters, parts, strict=True)
    return ", ".join(f"{letter} = {', '.join(map(digits, part))}" for letter, part in named)


def _others(algorithm: Naming) -> tuple[str, str]:
    """The nearest algorithm that explains clearly less, and those that explain as much, by the rule of the labels."""
    others = [name for name in algorithm.order if name != algorithm.nearest]
    leads = {name: algorithm.lead(algorithm.nearest, name) for name in others}
    behind = [name for name in others if is_behind(*leads[name], Limits().tie)]
    said = {
        name: f"{ALGORITHMS[name].name}, R² = {algorithm.explained(name)[0]:.4f}, {beside(*leads[name])}"
        for name in others
    }
    is_not = said[behind[0]] if behind else NOTHING_EXCLUDED
    return is_not, "; ".join(said[name] for name in others if name not in behind)
