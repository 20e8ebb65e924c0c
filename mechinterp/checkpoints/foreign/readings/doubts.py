"""Doubts about how an external file was read, computed when a command or an analysis shows them."""

from collections.abc import Sequence

import torch
from einops import einsum
from torch import Tensor

from mechinterp.checkpoints.foreign.options import flag_of, stated_option
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.losses import (
    AGAIN,
    ERRORS,
    MARGIN,
    N_OF_LAYERS,
    Reading,
    below,
    n_prompts_for,
)
from mechinterp.config import ModelConfig
from mechinterp.models.layers import AVERAGE, attention_pattern
from mechinterp.models.run.attend import Keys, Queries, attend, scores_of
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.general import predictions_in_chunks
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights

REST = 0.85
"""A file is doubted if less than this fraction of its loss remains after a fit of one factor per
tensor.

Set after 15 files of known models had been read: 8 correct readings had 0.95 or more, 6 wrong ones
0.80 or less. A larger value doubts more correct readings.
"""
ALIBI = "ALiBi (a slope times the distance in the scores)"
SOFTMAX1 = "softmax1 (one more logit, which is 0)"
BETTER = {ALIBI: MARGIN, SOFTMAX1: 0.1}
"""A file is doubted if this kind of attention lowers its loss by more than this fraction.

Set after 25 trained test models had been read: the extra logit lowered the loss of correctly read models by up to 0.07,
and that of models with it by 0.01 to 0.42; ALiBi never lowered the loss of correctly read models. Larger values doubt
fewer files.
"""
_STEP, LEAST_AT_REST = 0.02, 64
"""Relative change of a tensor for its slope, and least number of prompts for the fit of factors."""


LAW = ("context_length", "covariance.kind", "beta_var", "noise_var", "query_noise")
"""Fields of a task that decide the loss."""
SCALES = tuple(2.0 ** (n / 8) for n in range(-24, 25))
"""Factors on the scores that are tried."""
IN_DOUBT = "the task of this file, or how it was read, is in doubt"
READ_IN_DOUBT = "how this file was read is in doubt"
"""Doubt about a file whose task the user states whole."""
PROVE = "prove the reading by --predictions"
_MOST_NAMED = 2
"""Number of readings in a message that none predicts."""


def doubt_of(case: Case, readings: Sequence[Reading] = ()) -> str:
    """Why the reading of a file is doubted; empty if nothing suggests it.

    Args:
        readings: Readings that were tried, that of the case first; empty if there is one.
    """
    if readings and not readings[0].predicts:
        return predicts_nothing(case, readings)
    left = 1.0 if case.parts.alone else left_by_factors(case)
    if (case.parts.alone or left < REST) and (factor := score_factor(case)):
        return (
            f"the scale of the scores is in doubt: with --scale {factor[0] * case.scale:.4g} instead of {case.scale:.4g} the loss is "
            f"{factor[1]:.2f} times as large on other prompts; state --scale, or {PROVE}"
        )
    if left < REST:
        return (
            f"{in_doubt(case)}: one factor on each tensor lowers the loss by {1 - left:.0%} on other "
            f"prompts, and training sets such factors; {_state(case, ('--task', '--model', '--scale'))}, or hook the module in "
            "memory (mechinterp.hook_module)"
        )
    if better := better_with(case):
        return (
            f"how this file was read is in doubt: with {better[0]}, which leaves no trace in a file and is not read from one, its loss is "
            f"{better[1]:.2f} times as large; if it has it, hook the module in memory (mechinterp.hook_module)"
        )
    return ""


def in_doubt(case: Case) -> str:
    """Subject of the doubt: the task only if the user does not state it whole."""
    return READ_IN_DOUBT if _law_is_stated(case) else IN_DOUBT


def _law_is_stated(case: Case) -> bool:
    return {f"task.{name}" for name in LAW} <= case.known


def _state(case: Case, options: Sequence[str]) -> str:
    """The options that neither the file nor the user states, and a proof."""
    hints, closed = case.source.hints, case.source.closed
    stated = {
        "--task": _law_is_stated(case),
        "--output-scale": hints.output_scale is not None,
        **{flag_of(name): True for name in closed},
    }
    left = [each for each in dict.fromkeys(options) if not stated.get(each, False)]
    return f"state {', '.join(left)}, or {PROVE}" if left else PROVE


def predicts_nothing(case: Case, readings: Sequence[Reading]) -> str:
    """Message that no reading predicts, or not the chosen one, with options that decide."""
    if any(each.predicts for each in readings):
        what = f"read as its format states, it does not predict clearly better than 0 ({readings[0]!r})"
        return f"{in_doubt(case)}: {what}; {advice(readings)}"
    best = sorted(readings, key=lambda each: each.loss)[:_MOST_NAMED]
    losses = "; ".join(map(repr, best))
    more = ("--task", "--score", "--scale", "--output-scale", "--model")
    return (
        f"{in_doubt(case)}: on prompts of the {'stated' if _law_is_stated(case) else 'assumed'} task no reading predicts better "
        f"than 0 by more than {MARGIN:.0%} and {ERRORS:.0f} standard errors (loss over that of 0: {losses}); "
        f"{_state(case, (*map(flag_of, readings[0].tried), *more))}"
    )


def tied(readings: Sequence[Reading]) -> str:
    """Message that other readings predict as well as the first, with the options that decide; empty
    if none does."""
    alike = [each.tried for each in readings[1:] if each.ties and each.predicts]
    named = [
        n
        for n in (readings[0].tried if alike else ())
        if any(tried.get(n) != readings[0].tried[n] for tried in alike)
    ]
    if not named:
        return ""
    return f"{len(alike) + 1} readings predict equally well within errors; state {' and '.join(map(flag_of, named))}"


def advice(readings: Sequence[Reading]) -> str:
    """Options under which a file predicts, although it does not as its format states."""
    fixed, predicting = readings[0].tried, [each for each in readings[1:] if each.predicts]
    best = min(predicting, key=lambda each: each.loss)
    changed = {n: v for n, v in best.tried.items() if v != fixed.get(n)}
    named = ", ".join(f"{name} {value}" for name, value in changed.items())
    options = " ".join(stated_option(name, value) for name, value in changed.items())
    n_more = len(predicting) - 1
    more = ["", "; so does another reading"][n_more] if n_more < 2 else f"; so do {n_more} others"
    return f"{named} predicts ({best.loss:.3g}): {options}{more}"


def score_factor(case: Case) -> tuple[float, float] | None:
    """Factor on the softmax scores of all layers, of an unstated scale, that lowers the loss by more than three standard errors,
    and not by clearly less than a factor on the output does; with the fraction of the loss that it leaves. None if there is none.

    The factor is found on one half of the prompts, and the loss is measured on the other.
    """
    source = case.source
    if case.tried["score"] != "softmax" or "scale" in source.closed:
        return None
    count = n_prompts_for([case] * len(SCALES), AGAIN)
    prompts = evaluation_prompts(case.task, n_prompts=count)
    half, wanted = len(prompts) // 2, prompts.y_query.double()

    def error(prediction: Tensor) -> Tensor:
        return (prediction - wanted).square().mean(1)

    by_factor = {
        factor: error(each.predicted(prompts))
        for factor in SCALES
        for each in case.changed([{"scale": factor * case.scale}])
    }
    if 1.0 not in by_factor:
        return None
    best = min(
        by_factor, key=lambda factor: float(by_factor[factor][:half].mean().nan_to_num(1e30))
    )
    plain, scaled = by_factor[1.0][half:], by_factor[best][half:]
    own = case.predicted(prompts)
    output = (own[:half] * wanted[:half]).sum() / own[:half].square().sum().clamp(min=1e-300)
    by_output = error(output * own)[half:]
    if not below(scaled, plain, 0.0) or below(by_output, scaled, 0.0):
        return None
    return best, float(scaled.mean() / plain.mean())


def better_with(case: Case) -> tuple[str, float] | None:
    """Kind of attention without a trace in a file that predicts clearly better, and the fraction of
    the loss that it leaves; None if there is none.

    ALiBi takes 2^(-8 (h + 1) / H) times the distance of query and key from the scores of head h of H. Softmax1 has one
    more logit, which is 0, so that a head can read nothing.

    Source:
        Press et al. 2022, arXiv 2108.12409, section 3; Miller 2023, "Attention is off by one".
    """
    weights, task = case.weights(), case.task
    config = weights.model
    if config.score != "softmax" or config.rotary_dim is not None:
        return None
    count = n_prompts_for([case] * 3, AGAIN)
    if count < LEAST_AT_REST:
        return None
    prompts = evaluation_prompts(task, n_prompts=min(count, N_OF_LAYERS * 4)).to(weights.dtype)
    errors = {}
    for name, way in {"": attend, ALIBI: _slanted, SOFTMAX1: _with_a_logit}.items():
        rest = predictions_in_chunks(weights, prompts, attend=way) - prompts.y_query
        errors[name] = rest.double().square().mean(1)
    plain = errors.pop("")
    better = {n: e for n, e in errors.items() if below(e, plain, BETTER[n])}
    left = {name: float(error.mean() / plain.mean()) for name, error in better.items()}
    return min(left.items(), key=lambda each: each[1]) if left else None


def _slanted(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
    """Averages of the values under ALiBi."""
    n_heads, n_pos = q.shape[2], k.shape[1]
    slopes = 2.0 ** (-8 * torch.arange(1, n_heads + 1, device=q.device) / n_heads)
    at = torch.arange(n_pos, device=q.device)
    away = (at[rows, None] - at).abs()
    scores = scores_of(q, k, model, rows) - slopes[:, None, None].to(q) * away
    return einsum(attention_pattern(scores), v, AVERAGE)


def _with_a_logit(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
    """Averages of the values under softmax1."""
    share = scores_of(q, k, model, rows).logsumexp(-1).sigmoid()
    return attend(q, k, v, model, rows) * share.mT[..., None]


def left_by_factors(case: Case) -> float:
    """Fraction of a case's loss that remains after a fit of one factor per tensor, on other prompts.

    Training has optimised these factors, so about 1 remains for a trained model. A wrong reading
    or task leaves less. The fit is linear in the factors. Each half of the prompts is used once
    for the fit and once for the loss.
    """
    weights, task = case.weights(), case.task
    named = weights.by_name
    scaled = [n for n, t in named.items() if t.any() and (t.ndim > 1 or n.endswith(".w"))]
    count = n_prompts_for([case] * (4 * len(scaled) + 4), AGAIN)
    if count < LEAST_AT_REST:
        return 1.0
    prompts = evaluation_prompts(task, n_prompts=min(count, N_OF_LAYERS * 4))

    def predicted(changed: dict[str, Tensor]) -> Tensor:
        other = Weights.of_names(weights.model, task.d_x, task.d_y, {**named, **changed})
        return predictor_of(other).predict(prompts.to(weights.dtype)).double().flatten()

    base = predicted({})
    error = prompts.y_query.double().flatten() - base
    slopes = [(predicted({n: named[n] * (1 + _STEP)}) - base) / _STEP for n in scaled]
    design, half = torch.stack(slopes, 1), len(error) // 2
    if not torch.isfinite(design).all():
        return 1.0
    left = []
    for fit, held in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        A = design[fit]
        inverse = torch.linalg.pinv(A.T @ A, rtol=1e-3, hermitian=True)
        rest = error[held] - design[held] @ (inverse @ (A.T @ error[fit]))
        left.append(float(rest.square().sum() / error[held].square().sum().clamp(min=1e-300)))
    return sum(left) / 2
