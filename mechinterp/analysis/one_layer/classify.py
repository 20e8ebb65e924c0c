"""Classifies a model: the pattern that the heads of one layer form, and the learner that the model
implements.

Every label comes with the numbers that decided it and their values under random weights. A model
without a clear label is `undetermined`, and the reason names the number that lies between two
answers.

If the prediction is nearly linear in the output of one attention layer at the query, a linear
read-out replaces what lies behind, and the heads have circuits to the prediction: W_O times the
direction of the read-out. It is fitted on one half of the prompts and scored on the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.analysis.circuits import circuits, require_weights
from mechinterp.analysis.labels import PATTERNS_RANGE
from mechinterp.analysis.learners.nearest import Evaluation, evaluation, nearby, task_loss
from mechinterp.analysis.multi_layer.classify import LayeredClassification, layered_classification
from mechinterp.analysis.one_layer.classification import HEAD_P_VALUES, Classification
from mechinterp.analysis.one_layer.head_statistics import HeadStatistics, read_heads
from mechinterp.analysis.one_layer.label_rules import (
    Decision,
    Evidence,
    assumed_covariance,
    head_decisions,
    model_decision,
)
from mechinterp.analysis.one_layer.linear_components import Components, components
from mechinterp.analysis.one_layer.qk_form import QKForm, form_of
from mechinterp.analysis.one_layer.random_null import (
    SMALL_IS_STRUCTURE,
    Null,
    is_bare,
    null_of,
    random_shape,
)
from mechinterp.analysis.one_layer.scales import Scales, scales_of
from mechinterp.analysis.one_layer.substitution import faithfulness, idealised
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.analysis.stats import best_factor
from mechinterp.checkpoints.foreign.readings.agreed import over_readings
from mechinterp.checkpoints.modules.weights import by_weights
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.icl.given import no_law
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import from_circuits
from mechinterp.models.heads import head_outputs, predict
from mechinterp.models.layers import is_normalised, kernel_text
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights

N_LAYER_PROMPTS = 512
"""Default number of prompts for one layer of attention."""
N_LAYERED_PROMPTS = 256
"""Default number of prompts for all other models."""
READ_PROMPTS = 1024
"""Number of prompts for a linear read-out of attention."""
READ_AT_ONCE = 64
"""Number of them that run at once: patterns of all at once are gigabytes."""


def classify(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Classification | LayeredClassification:
    """Label of a model: the pattern of one layer of attention, or the algorithm and head ablations
    of any other model.

    If a file leaves settings open, every reading with a low enough loss is labelled. If the labels
    differ, the model is `undetermined`. The pattern of one layer depends on QK and OV only. It does
    not depend on the order of heads, or on how a circuit is split into W_Q and W_K, or W_V and W_O.
    A head split into two with half of mu each counts as one. A hooked module is read by its weights
    if these predict as the module does.

    Args:
        source: A checkpoint, a hooked model, weights or a predictor.
        prompts: Given prompts, such as those of `Prompts.from_arrays`; None draws them.
        task: Law of the prompts: a TaskConfig, a dict of its fields or a JSON file. None: the law
            stated with the model. "unknown": given prompts have no known law, and `left_out` lists
            the parts that need it.
        n_prompts: Number of prompts; None means 512, or 256 for models of several layers.
    Raises:
        ValueError: If d_x or d_y of model and task differ, or if there are fewer than 8 prompts.
    Source:
        He et al. 2025, arXiv 2503.12734, for patterns of softmax attention; Zhang et al. 2025,
        arXiv 2501.16265, for linear attention; the limits are chosen and calibrated here.
    See also:
        `classify_circuits`, `name_algorithm`, `compare_learners`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
        >>> classify(debiased_gradient_step(0.88, 0.05, d_x=5)).label
        'debiased_gd'
    """
    source = by_weights(source)
    predictor = predictor_of(source)
    limits, one = Thresholds() if thresholds is None else thresholds, predictor.is_one_attention
    law = None
    if one or task is not None or prompts is not None:
        law = task_for(source, task, "classify", prompts)
    if n_prompts is None:
        n_prompts = N_LAYER_PROMPTS if one else N_LAYERED_PROMPTS

    def labelled(each: Source) -> Classification | LayeredClassification:
        if law is None or not one:
            return _classified_layers(each, law, n_prompts, seed, limits)
        return _classified(require_weights(each, "classify"), law, n_prompts, seed, limits)

    sizes = None if law is None else (law.d_x, law.d_y)
    found = over_readings(source, labelled, sizes)
    if not one:
        return found
    # The readings of one layer have no doubt of their own.
    doubt = "" if predictor.trained_here else predictor.doubt
    return replace(found, trained_here=predictor.trained_here, reading_doubt=doubt)


def _classified_layers(
    source: Source, task: TaskConfig | None, n_prompts: int, seed: int, limits: Thresholds
) -> Classification | LayeredClassification:
    """Classification of several layers, or of one layer with MLP or norm.

    One layer is read through a linear read-out of its attention if that explains the prediction.
    """
    layered = layered_classification(source, task, n_prompts=n_prompts, seed=seed)
    weights = predictor_of(source).weights
    if weights is None or not has_linear_way_in(weights):
        return layered
    through, r2 = read_through(weights, layered.task, seed=seed)
    if not r2 >= 1 - limits.equal:
        return layered
    quality = f"R² = {r2:.3f} of the prediction on held-out prompts"
    heads = _classified(through, layered.task, n_prompts, seed, limits)
    return replace(
        heads,
        reason=f"{heads.reason}; the heads are read through a linear read-out of attention, {quality}",
        calibrated=False,
        caveat=f"the prediction of a linear read-out of attention ({quality})",
        loss=layered.loss,
        best_factor=layered.best_factor,
        best_factor_sem=layered.best_factor_sem,
    )


def _classified(
    weights: Weights, task: TaskConfig, n_prompts: int, seed: int, limits: Thresholds
) -> Classification:
    """Classification of one layer of attention."""
    _require_sizes(weights, task)
    prompts = evaluation(task, n_prompts, seed, weights.model.attend_to_self)
    outputs, own = head_outputs(weights, prompts.prompts), circuits(weights)
    prediction = outputs.sum(1) + weights.output_bias
    heads, groups = read_heads(own, outputs), read_heads(own, outputs, tolerance=limits.equal)
    active = groups.where(groups.share > limits.share)
    form = form_of(active, weights.model.score, limits)
    of_groups = head_decisions(groups, form, limits)
    scales = scales_of(active, form, weights, task, limits)
    ideal = idealised(weights, form.fitted(heads.blocks), torch.from_numpy(heads.mu))
    substitute = predict(ideal, prompts.prompts)
    formula = _formula(weights, prompts, scales, of_groups, substitute)
    substitution = faithfulness(prediction, substitute)
    loss = task_loss(prediction, prompts.ridge, prompts.prompts)
    factor, factor_sem = best_factor(prediction, prompts.prompts.y_query_clean)
    null = _null(weights, task, form)
    compared = _compared(groups, scales, substitution.r2, loss.r2)
    evidence = Evidence(
        form=form,
        scales=scales,
        substitution=substitution,
        learner=faithfulness(prediction, formula),
        alignment=float(form.alignment(active.blocks).min(initial=1)),
        compared=compared,
        p_values={name: null.p_value(name, value) for name, value in compared.items()},
        components=_components(form, scales, task, limits),
        bare=is_bare(weights),
    )
    decision = model_decision(groups, of_groups, evidence, limits)
    return Classification(
        **vars(evidence),
        label=decision.label,
        reason=decision.reason + assumed_covariance(decision, task),
        checks=decision.checks,
        labels=tuple(each.label for each in head_decisions(heads, form, limits)),
        share=heads.share,
        circuits=own,
        omega_form=form.omega(heads.blocks).mean(1).numpy(),
        task_leak=heads.task_leak,
        head_p_values={
            name: np.array([null.p_value(name, value) for value in getattr(heads, name)])
            for name in HEAD_P_VALUES
        },
        random_ranges=null.ranges,
        n_random=null.n_models,
        kernel=kernel_text(weights.model.score, weights.model.score_slope),
        calibrated=limits == Thresholds() and PATTERNS_RANGE.holds(task),
        near=nearby(prediction, prompts.families, formula),
        loss=loss,
        best_factor=factor,
        best_factor_sem=factor_sem,
        task=task,
        n_prompts=len(prompts.prompts),
    )


def _require_sizes(weights: Weights, task: TaskConfig) -> None:
    for name in ("d_x", "d_y"):
        own, other = getattr(weights, name), getattr(task, name)
        if own != other:
            raise ValueError(
                f"The task must have the model's {name} = {own}, got {name} = {other}."
            )


def _formula(
    weights: Weights,
    prompts: Evaluation,
    scales: Scales,
    of_groups: Sequence[Decision],
    substitute: Float[Tensor, "batch d_y"],
) -> Float[Tensor, "batch d_y"]:
    """Predictions of the closed form: the idealised heads if they average with one sign, else one gradient step."""
    centred = is_normalised(weights.model.score)
    if centred and len({each.label for each in of_groups} - {"dummy"}) <= 1:
        return substitute
    return prompts.gradient_step(scales.step, centred=centred)


def _null(weights: Weights, task: TaskConfig, form: QKForm) -> Null:
    """Null distribution of models of the same shape."""
    model = weights.model
    law = (model.score, model.score_slope, model.attend_to_self)
    shape = random_shape(weights.n_heads, weights.d_head, *law)
    return null_of(task, shape, form=form.kind, bare=is_bare(weights))


def _compared(
    groups: HeadStatistics, scales: Scales, substitution_r2: float, task_r2: float
) -> dict[str, float]:
    """Numbers that are compared with random models, by name."""
    return {
        "qk_diagonal_best": float(groups.qk_diagonal.max()),
        "ov_last_entry_best": float(groups.ov_last_entry.max()),
        **{name: getattr(scales, name) for name in SMALL_IS_STRUCTURE},
        "substitution_r2": substitution_r2,
        "task_r2": task_r2,
    }


def _components(
    form: QKForm, scales: Scales, task: TaskConfig, limits: Thresholds
) -> Components | None:
    """Principal components that a step of linear attention uses, if the task has one response."""
    if form.kind != "matrix" or task.d_y > 1 or task.supports is not None or no_law(task):
        return None
    if task.drift != 1:
        return None
    return components(scales.step[0].mT.numpy(), task, limit=limits.equal)


def classify_circuits(
    QK: Float[np.ndarray | Tensor, "..."],
    OV: Float[np.ndarray | Tensor, "..."],
    d_y: int = 1,
    *,
    task: TaskLike | None = None,
    score: str = "softmax",
    score_slope: float = 1.0,
    attend_to_self: bool = False,
    n_prompts: int = N_LAYER_PROMPTS,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Classification:
    """Pattern of a one-layer model of which only the circuits are known.

    Args:
        QK: Scores between coordinates (x, then y), scale included, [head, query d_model, key
            d_model]; or with an axis of one layer before the heads, as `circuits` gives them.
        OV: Contribution of a token's coordinates to the predictions, [head, d_model, d_y]; or to
            all coordinates, [head, d_model, d_model], of which the last d_y are used; or with the
            same axis before.
    Raises:
        ValueError: If the shapes do not fit each other or the task, or an entry is NaN or infinite.
    Source:
        As for `classify`.
    See also:
        `classify`, `circuits`.
    Example:
        >>> QK = np.stack([np.diag([0.1, 0.1, 0.0]), np.diag([-0.1, -0.1, 0.0])])
        >>> OV = np.array([[0.0, 0.0, 4.0], [0.0, 0.0, -4.0]])[:, :, None]
        >>> classify_circuits(QK, OV).labels
        ('positive', 'negative')
    """
    tensors = [_circuit(name, circuit) for name, circuit in (("QK", QK), ("OV", OV))]
    if d_y < 1:
        raise ValueError(f"d_y must be >= 1, got {d_y}.")
    if tensors[1].shape[2] not in (d_y, tensors[1].shape[1]):
        raise ValueError(f"OV must have d_y = {d_y} or d_model columns, got {tensors[1].shape[2]}.")
    weights = from_circuits(
        tensors[0],
        tensors[1][:, :, -d_y:],
        score=score,
        score_slope=score_slope,
        attend_to_self=attend_to_self,
    )
    found = classify(weights, task=task, n_prompts=n_prompts, seed=seed, thresholds=thresholds)
    return cast("Classification", found)


def _circuit(name: str, circuit: np.ndarray | Tensor) -> Float[Tensor, "head d_model d_out"]:
    array = circuit.detach() if isinstance(circuit, Tensor) else np.ascontiguousarray(circuit)
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim != 3:
        raise ValueError(
            f"{name} must have three axes, heads first, or four with one layer, got shape {list(array.shape)}."
        )
    real = not array.is_complex() if isinstance(array, Tensor) else array.dtype.kind in "fiu"
    if not real:
        raise ValueError(f"{name} must hold real numbers, got {array.dtype}.")
    tensor = torch.as_tensor(array, dtype=torch.float64, device="cpu")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} must hold finite numbers, got NaN or infinite ones.")
    return tensor


def has_linear_way_in(weights: Weights) -> bool:
    """True if the model is one layer whose attention reads the tokens through linear maps only."""
    model = weights.model
    around = (model.norm, model.n_positions, model.d_read_in)
    plain = (around, model.layout) == ((None, None, None), "pairs")
    variants = (model.final_norm, model.context_only, model.recurrent)
    return model.n_layers == 1 and plain and not any(variants)


def read_through(weights: Weights, task: TaskConfig, *, seed: int = 0) -> tuple[Weights, float]:
    """The attention layer followed by the linear read-out, and the R^2 of the read-out.

    R^2 is 1 - mean (prediction - read-out)^2 / variance of the prediction, on the half that was not
    fitted.

    Args:
        weights: Weights of a model that satisfies `has_linear_way_in`.
        task: Law of the prompts.
    """
    # Imported here: TransformerLens is slow to import.
    from mechinterp.models.hooked.transformer import ICLTransformer

    weights = weights.to(torch.float64)
    model = ICLTransformer.from_weights(weights, task=task)
    prompts = evaluation_prompts(task, n_prompts=READ_PROMPTS, seed=seed)
    name, predicted, outputs = "blocks.0.hook_attn_out", [], []
    with torch.no_grad():
        for start in range(
            0, READ_PROMPTS, READ_AT_ONCE
        ):  # patterns of all prompts at once are gigabytes
            some = prompts[start : start + READ_AT_ONCE]
            predicted.append(model.predict(some))
            _, cache = model.run_with_cache(some.tokens, names_filter=name)
            outputs.append(cache[name][:, -1])
    prediction, written = torch.cat(predicted), torch.cat(outputs)
    half = READ_PROMPTS // 2
    known = torch.cat([written, written.new_ones(READ_PROMPTS, 1)], 1)
    solved = torch.linalg.pinv(known[:half], rtol=1e-8) @ prediction[:half]
    error = prediction[half:] - known[half:] @ solved
    spread = (prediction[half:] - prediction[half:].mean(0)).square().mean()
    r2 = float(1 - error.square().mean() / spread) if spread > 0 else float("nan")
    return _seen_through(weights, solved[:-1], solved[-1]), r2


def _seen_through(weights: Weights, direction: Tensor, constant: Tensor) -> Weights:
    """The attention layer on tokens (x, y), with the read-out multiplied into W_O."""
    tensors, into = weights.tensors, weights.tensors.get("W_in")
    seen = {"attn.W_O": weights.W_O[0] @ direction}
    for x in "QKV":
        matrix = getattr(weights, f"W_{x}")[0]
        seen[f"attn.W_{x}"] = matrix if into is None else into @ matrix
        if weights.model.biases:
            moved = tensors["b_in"] @ matrix if into is not None else 0
            seen[f"attn.b_{x}"] = tensors[f"attn.b_{x}"][0] + moved
    if weights.model.biases:
        seen["attn.b_O"] = tensors["attn.b_O"][0] @ direction + constant
    for name in {"attn.W_O", "attn.b_O"} & seen.keys():
        seen[name] = pad(seen[name], (weights.d_x, 0))
    # With a read-in, the keys of merged heads are no longer the tokens themselves.
    model = replace(weights.model, merged_qk=False, d_model=None, d_mlp=None, d_head=weights.d_head)
    named = {name: tensor[None] for name, tensor in seen.items()}
    return Weights(model, weights.d_x, weights.d_y, named, weights.scale)
