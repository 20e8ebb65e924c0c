"""Gates and scalars of trained recurrent layers from their weights, beside those from their predictions.

results/recurrent_weights.csv, the tables of docs/results/recurrent.md. Weights give the gate alpha, the step eta of one
step of descent or of the delta rule, and the penalty of least squares, all in units of x; `name_algorithm` and `response`
see predictions alone.
"""

from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import softplus

from analyses.lib.measured import Measured, checkpoint, losses, shipped
from mechinterp import Checkpoint, name_algorithm, response, sample_prompts
from mechinterp.analysis.response import reading
from mechinterp.icl.predictors import kalman
from mechinterp.models.weights import Weights

PATTERNS = ("gla-h1-*", "gated-delta-h1-*", "mesa-h1-*")
LEARNER = {
    "gated": "forgetting_gd",
    "delta": "online_gd",
    "gated_delta": "online_gd",
    "mesa": "recursive_least_squares",
}
"""The algorithm that the layer's formula is if keys, queries and values read x and y as they should."""
SCALED = "with a scaled read-out"
NAMES = {
    "gated": ("eta", "alpha"),
    "gated_delta": ("eta", "alpha", "c"),
    "mesa": ("alpha", "penalty"),
}
"""Scalars of these algorithms, in their order; a scaled read-out adds the factor on the prediction."""
N_PROMPTS, QUICK = 1024, 256


def said_by_weights(weights: Weights) -> dict[str, float]:
    """Scalars of the layer's algorithm, from its weights alone."""
    weights, tensors = weights.to(torch.float64), weights.tensors
    d_x, score = weights.d_x, weights.model.score
    Q, K = (W[0, 0, :d_x].double() for W in (weights.W_Q, weights.W_K))
    copied = (weights.W_V @ weights.W_O)[0, 0, d_x, d_x].item()
    alpha = torch.sigmoid(tensors["attn.b_gate"]).item() if "attn.b_gate" in tensors else 1.0
    asked = weights.scale * Q @ K.mT
    if score == "gated":
        return {"alpha": alpha, "eta": _mean(asked) * copied}
    beta = torch.sigmoid(tensors["attn.b_beta"]).item()
    if score != "mesa":
        norm = _mean(K @ K.mT)
        return {"alpha": alpha, "eta": beta * norm, "factor": _mean(asked) / norm * copied}
    ridge = softplus(tensors["attn.b_ridge"])[0, 0].double()
    inner = torch.linalg.inv((K / ridge) @ K.mT)
    factor = weights.scale * (Q / ridge) @ K.mT @ inner * copied
    return {"alpha": alpha, "penalty": _mean(inner) / beta, "factor": _mean(factor)}


def _mean(matrix: Tensor) -> float:
    """Mean of the diagonal."""
    return matrix.diagonal().mean().item()


def said_by_predictions(name: str, n_prompts: int) -> dict[str, Any]:
    """Label and scalars of `name_algorithm`, and gate and step of `response`."""
    model = checkpoint(name)
    found, score = name_algorithm(model, n_prompts=n_prompts), model.config.model.score
    own = LEARNER[score]
    frame = found.to_frame().set_index("learner")
    # Twice the plain algorithm in a frame: with a scaled read-out it gives no label.
    row: dict[str, Any] = {
        "label": found.label,
        "r2": frame.r2[own],
        "scaled_r2": frame.r2[f"{own} {SCALED}"],
    }
    values = found.scalars(f"{own} {SCALED}").copy()
    # On tasks that drift the algorithm may multiply its estimate by rho; the scaled read-out comes on top.
    (member,) = [each for each in found.measured.last.learners if each.label == own]
    values[-1] *= member.factor
    row |= {f"named_{n}": v for n, v in zip((*NAMES[score], "factor"), values, strict=True)}
    seen = response(model, n_prompts=n_prompts)
    row["reading"] = reading.kind(seen)
    for scalar in ("alpha", "eta", "gate"):
        row[f"response_{scalar}"], row[f"response_{scalar}_sem"] = seen.scalar(scalar)
    return row


def loss_over_bayes(model: Checkpoint) -> dict[str, float]:
    """Excess risk at the query over that of the Bayes learner, on 4,096 prompts of the model's task, with its error."""
    prompts = sample_prompts(model, dtype=torch.float64)
    predictions = (
        model.predictor.predict(prompts.to(torch.float32)),
        kalman(prompts, task=model.task),
    )
    own, bayes = ((each - prompts.y_query_clean).square().sum(1) for each in predictions)
    ratio = (own.mean() / bayes.mean()).item()
    sem = ((own - ratio * bayes).std() / len(own) ** 0.5 / bayes.mean()).item()
    return {"over_bayes": ratio, "over_bayes_sem": sem}


def measure(quick: bool) -> Measured:
    """Scalars of every shipped recurrent model, by its weights and by its predictions."""
    names = [name for pattern in PATTERNS for name in shipped(pattern)]
    rows = []
    for name in names[:1] if quick else names:
        model = checkpoint(name)
        loss = losses(name)
        said = said_by_weights(model.weights)
        # One step of descent is eta / L times a sum over pairs.
        said |= {"eta": said["eta"] * model.task.context_length} if "factor" not in said else {}
        rows.append(
            {
                "model": name,
                "score": model.config.model.score,
                "drift": model.task.drift,
                "loss_half": loss.loc[model.config.train.steps // 2],
                "loss": loss.iloc[-1],
                **loss_over_bayes(model),
                **{f"weights_{n}": v for n, v in said.items()},
                **said_by_predictions(name, QUICK if quick else N_PROMPTS),
            }
        )
    return Measured(pd.DataFrame(rows))
