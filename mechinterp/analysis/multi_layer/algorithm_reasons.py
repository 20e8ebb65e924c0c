"""Why a model has its label, in one sentence: what decided, its value, and what to run next."""

import numpy as np

from mechinterp.analysis.multi_layer.algorithm_labels import (
    OWN,
    UNDETERMINED,
    Decision,
    Measured,
)
from mechinterp.analysis.number_format import with_error

NEXT = {
    "predictions only": "pass the model itself, whose stream shows what becomes of x",
    "covariates": "mechinterp probe shows what the stream holds after each layer",
    "steps": "intervene_on_steps(model) shows the layer whose step is another",
    "rival": "control_frame() has what each control explains",
    "learner": "control_frame() has what each control explains",
    "path": "mechinterp probe shows where the prediction is held after each layer",
    "no path": "give a function of prompts that predicts after every layer, or probe the layers (mechinterp probe)",
    "tie": "compare the settings in to_frame(), or ask at another length (--context-length)",
    "identity": "mechinterp fit compares learners over the context length",
    "far": "mechinterp fit compares learners over the context length",
    "frequency": "ask on more prompts (n_prompts, --n-prompts)",
}
"""What to run next, by the rule that decided; nothing for labels that stand."""


def reason_of(
    measured: Measured, decision: Decision, labels: tuple[str, ...], frequency: np.ndarray
) -> str:
    """The sentence."""
    parts = [_decided(measured, decision)]
    if decision.why == "frequency":
        listed = [f"{label} in {share:.0%}" for label, share in zip(labels, frequency, strict=True)]
        parts = [f"the label changes with the prompts: {', '.join(listed)} of resamples"]
    elif len(labels):
        own = dict(zip(labels, frequency, strict=True)).get(decision.label, 0.0)
        parts.append(f"{decision.label} in {own:.0%} of resamples")
    parts.append(_function(measured, decision))
    if decision.why in NEXT:
        parts.append(f"next: {NEXT[decision.why]}")
    return "; ".join(part for part in parts if part)


def _decided(measured: Measured, decision: Decision) -> str:
    value, limit, member, where = (
        decision.value,
        decision.limit,
        decision.member,
        decision.where,
    )
    match decision.why:
        case "useless":
            return f"the model's excess risk is {value:.3g} times that of predicting 0"
        case "null":
            return (
                f"of {len(measured.null_risk)} models with the same singular values in random directions one has an "
                f"excess risk of {limit:.3g} times that of predicting 0, the model {value:.3g}"
            )
        case "scale":
            scale = measured.scale
            return (
                f"the model's excess risk is {value:.3g} times that of predicting 0; with its predictions times "
                f"{scale.factor:.3g} it is {scale.risk:.3g} times (ridge regression {scale.ridge:.3g}): "
                "is the output scaled? (`read=`)"
            )
        case "mechanism":
            return f"{_member(measured, member)}, {_path(measured, member)}"
        case "function":
            return f"{_member(measured, member)}, path not identified{_why_no_path(measured)}"
        case "predictions only":
            return f"{member} by the path of predictions only ({_path(measured, member)}): what becomes of x is not seen"
        case "covariates":
            return f"{member} by the path of predictions ({_path(measured, member)}), but R² {value:.2f} (limit {limit:g}) of what it makes of x is in the stream"
        case "steps":
            return f"{member} by its path ({_path(measured, member)}), but with its steps in place of all layers R² is {value:.2f} (limit {limit:g})"
        case "rival":
            return f"{member}, but {decision.rival} is nearer: R² {value:.4f} against {_r2(limit)} ({where})"
        case "learner":
            return f"{_member(measured, member)}, but what it leaves is {_as_learner(measured, decision)}{_nearest_control(measured)}"
        case "path":
            if np.isnan(value):
                return f"{_member(measured, member)}, but not layer by layer"
            return f"{_member(measured, member)}, but not layer by layer: R² {value:.3f} after {where} (limit {limit:g})"
        case "no path":
            return f"{_member(measured, member)}, path not identified{_why_no_path(measured)}"
        case "tie":
            return f"{' and '.join(decision.candidates)} tie at {_number(measured, member)}"
        case "identity":
            return f"{member} would have R² {1 - value:.3f} at most, by the identity {where!r}: {value:.4f} of the prediction speaks against it (limit {limit:g})"
        case "far":
            return f"none explains the model, nearest: {_member(measured, member)} ({where}, limit {limit:g}){_nearest_control(measured)}"
    return ""


def _r2(value: float) -> str:
    return f"{value:.4f}" if value > -1 else "below -1"


def _member(measured: Measured, member: str) -> str:
    return f"{member} at {_number(measured, member)}"


def _number(measured: Measured, member: str) -> str:
    row = measured.function.names.index(member)
    r2, sem = measured.function.r2()[row, OWN], measured.function.r2_sem()[row, OWN]
    return f"R² {r2:.4f} ± {sem:.1g}"


def _path(measured: Measured, member: str) -> str:
    assert measured.path is not None
    row = measured.path.names.index(member)
    layers = [c for c, name in enumerate(measured.path.columns) if name.startswith("layer")]
    r2, sem = measured.path.r2()[row, layers], measured.path.r2_sem()[row, layers]
    at = int(r2.argmin())
    text = f"after every layer {with_error(r2[at], sem[at])} or more"
    held = measured.covariates_r2.get(member, np.nan)
    replaced = measured.replaced_r2.get(member, np.nan)
    text += "" if np.isnan(held) else f", x in the stream {held:.2f}"
    return text + ("" if np.isnan(replaced) else f", with its steps put in {replaced:.2f}")


def _as_learner(measured: Measured, decision: Decision) -> str:
    """How what is left is told from noise."""
    left = {**measured.left_of_path, **measured.left_of_function}[decision.member]
    if left.noise == 0:
        return "more than rounding, and the task has no symmetry that would tell noise from another learner"
    return (
        f"another learner and no noise: as noise would not, {decision.value:.0%} of it ({decision.where}) stays the same "
        f"when coordinates change their signs or order (limit {decision.limit:.0%})"
    )


def _why_no_path(measured: Measured) -> str:
    return f" ({measured.path_how})" if measured.path is None else ""


def _function(measured: Measured, decision: Decision) -> str:
    if decision.why in ("useless", "null", "function", "no path", "path"):
        return ""
    if decision.function in (UNDETERMINED, decision.label):
        return ""
    return f"as a function {decision.function}"


def _nearest_control(measured: Measured) -> str:
    """What comes nearer than every member."""
    r2, n = measured.function.r2()[:, OWN], len(measured.members)
    if len(r2) == n or not np.nanmax(r2[n:]) > np.nanmax(r2[:n]):
        return ""
    best = n + int(np.nanargmax(r2[n:]))
    return f"; nearer: {measured.function.names[best]} (R² {r2[best]:.3f})"
