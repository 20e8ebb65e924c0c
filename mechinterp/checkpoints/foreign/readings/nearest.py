"""Why no reading gives the recorded predictions: the nearest reading, and one factor that explains its difference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from mechinterp.checkpoints.foreign.options import stated_option
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.recorded import Recording, predictions_of
from mechinterp.models.weights import Weights

FACTORS = np.geomspace(0.01, 100, 81)
"""Factors that are tried before the best one is refined."""
N_FACTORED = 6
"""Number of readings, the nearest up to a factor on the output, for which a factor is sought."""


def why_unproven(by_misfit: Sequence[Case], by_shape: Sequence[Case], recording: Recording) -> str:
    """Message with the nearest reading, its R², and the factor that explains the difference.

    Args:
        by_misfit: All readings that were tried, the nearest to the recorded predictions first.
        by_shape: The same, the nearest up to a factor on the output first.
    """
    nearest = by_misfit[0]
    names = [
        n for n, v in nearest.tried.items() if n not in nearest.source.closed and v is not None
    ]
    stated = " ".join(stated_option(n, nearest.value_of(n)) for n in names if n != "score_slope")
    what = (
        f"no reading gives the recorded predictions ({len(by_misfit)} tried); the nearest ({stated or 'as its format states'}) has "
        f"R² = {recording.r2(predictions_of(nearest.weights(), recording)):.4f}"
    )
    for case in by_shape[:N_FACTORED]:
        if found := _one_factor(case, recording):
            name, factor = found
            options = {
                "output": f"--output-scale {factor * (case.source.hints.output_scale or 1):.6g}",
                "scores": f"--scale {factor * case.scale:.6g}",
                "x": "multiply x by it before the prompts are recorded",
            }
            other = "" if case is nearest else f", where {_differing(case, nearest)},"
            return f"{what}; a factor {factor:.4g} on the {name}{other} explains the difference, also on other prompts: {options[name]}."
    return f"{what}; no single factor on the output, the scores or x explains the difference; hook the module in memory (mechinterp.hook_module)."


def _differing(case: Case, nearest: Case) -> str:
    changed = [n for n, v in case.tried.items() if nearest.tried.get(n) != v]
    return " ".join(stated_option(n, case.value_of(n)) for n in changed)


def _one_factor(case: Case, recording: Recording) -> tuple[str, float] | None:
    """The factor on the output, the scores or x that makes a reading agree: found on one half of the prompts, and
    confirmed on the other."""
    half = len(recording.prediction) // 2
    fit, other = recording.rows(slice(half)), recording.rows(slice(half, None))
    weights = case.weights()
    ways: dict[str, Callable[..., Tensor]] = {
        "output": lambda factor, each: factor * predictions_of(weights, each),
        "scores": lambda factor, each: predictions_of(_scaled(case, factor), each),
        "x": lambda factor, each: predictions_of(weights, _with_x(each, factor)),
    }
    for name, predict in ways.items():
        factor = _fitted(partial(predict, each=fit), fit.prediction)
        if other.difference(predict(factor, other)) <= other.tolerance:
            return name, factor
    return None


def _fitted(predict: Callable[[float], Tensor], wanted: Tensor) -> float:
    """Factor with the least mean squared difference."""
    from scipy.optimize import minimize_scalar  # slow to import

    def loss(log: float) -> float:
        rest = predict(float(np.exp(log))) - wanted
        return float(rest.square().mean().nan_to_num(1e30, 1e30))

    logs = np.log(FACTORS)
    first = int(np.argmin([loss(log) for log in logs]))
    low, high = logs[max(first - 1, 0)], logs[min(first + 1, len(logs) - 1)]
    best = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return float(np.exp(best.x))


def _scaled(case: Case, factor: float) -> Weights:
    return replace(case, tried={**case.tried, "scale": factor * case.scale}).weights()


def _with_x(recording: Recording, factor: float) -> Recording:
    prompts = recording.prompts
    scaled = replace(prompts, x=factor * prompts.x, x_query=factor * prompts.x_query)
    return replace(recording, prompts=scaled)
