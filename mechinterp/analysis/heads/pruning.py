"""Which heads a model can do without: rules of what stays, the risk without the rest, and the smaller model itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float

from mechinterp import figures
from mechinterp.analysis.estimates import mean_and_sem, ratio_and_sem
from mechinterp.analysis.heads.errors import masked_errors
from mechinterp.analysis.heads.pairs import halves
from mechinterp.analysis.probing.probes import cross_validated, streams
from mechinterp.checkpoints.loading import load
from mechinterp.checkpoints.native import Checkpoint, checkpoint_of, save
from mechinterp.config import ExperimentConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.masks import Head
from mechinterp.models.predictor import Predictor, Source, predictor_of, prompts_for
from mechinterp.models.weights import Weights
from mechinterp.tracking import Track, untracked

Rule = Callable[[np.ndarray], np.ndarray]
"""From the rises [layer, head] of the excess risk to what is kept, a truth value for each head."""


@dataclass(frozen=True, eq=False, repr=False)
class Pruning(Result):
    """What a model costs and keeps when a rule masks some of its heads for good, nothing retrained."""

    kept: Bool[np.ndarray, "layer head"]
    rise: Float[np.ndarray, "layer head"]
    """What the rule saw: the rise of the excess risk when a head is masked, unit y^2."""
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float
    risk: float
    """Excess risk of the pruned model."""
    risk_sem: float
    ratio: float
    """`risk` over `full_risk`."""
    ratio_sem: float
    """Standard error of `ratio`, paired, by the delta method."""
    refit_risk: float
    """Excess risk of the pruned model with a new read-out: a ridge regression on the stream at the query,
    cross-validated."""
    refit_risk_sem: float
    refit_ratio: float
    """Risk with a new read-out over that of the full model as it is."""
    refit_ratio_sem: float
    """Standard error of `refit_ratio`, paired over prompts."""
    full_refit_risk: float
    """Excess risk of the full model with a new read-out."""
    full_refit_risk_sem: float

    @property
    def pruned_heads(self) -> list[Head]:
        """(layer, head) of the heads that are masked."""
        return masked_by(self.kept)

    def __repr__(self) -> str:
        per_layer = ", ".join(map(str, self.kept.sum(1)))
        return (
            f"Pruning({per_layer} heads kept: risk {self.full_risk:.3g} to {self.risk:.3g}, "
            f"{self.ratio:.3g} ± {self.ratio_sem:.2g} times; {self.refit_risk:.3g} with a new read-out)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        layer, head = (index.ravel() for index in np.indices(self.kept.shape))
        columns = {"layer": layer, "head": head, "kept": self.kept.ravel()}
        return pd.DataFrame({**columns, "rise": self.rise.ravel()})

    def plot(self) -> go.Figure:
        """Excess risk of the full and of the pruned model, as they are and with a new read-out."""
        risks = [self.full_risk, self.risk, self.full_refit_risk, self.refit_risk]
        errors = [self.full_risk_sem, self.risk_sem, self.full_refit_risk_sem, self.refit_risk_sem]
        return figures.bars(
            ["full", "pruned", "full, new read-out", "pruned, new read-out"],
            {"excess risk": np.array(risks)},
            errors={"excess risk": np.array(errors)},
            title=f"Excess risk with {self.kept.sum()} of {self.kept.size} heads",
            y_title="excess risk (y²)",
        )


def best_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Every head of the first layer, and of each later one the head that is missed most.

    Example:
        >>> best_head_later(np.array([[1.0, 2.0], [1.0, 2.0], [0.0, -1.0]])).tolist()
        [[True, True], [False, True], [True, False]]
    """
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Every head of the first layer, and of each later one the head that is missed least: a control."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Of the first layer the head that is missed most, and every head of the later ones: a control."""
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[1:] = True
    return kept


RULES: dict[str, Rule] = {
    "best-later": best_head_later,
    "least-later": least_head_later,
    "best-first": best_head_first,
}


def prune(
    source: Source,
    prompts: Prompts | None = None,
    *,
    rule: Rule = best_head_later,
    sequential: bool = False,
    n_prompts: int = 4096,
    seed: int = 0,
    track: Track = untracked,
) -> Pruning:
    """The model without the heads that a rule lets go, its risk and that with a new read-out.

    Heads are scored by zero ablation on the first half of the prompts; risks are those of the second.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        rule: From the rises to what is kept; `best_head_later` or any other.
        sequential: Whether the layers are pruned one after another from the first, the heads of each scored with
            those of the layers before it gone; else all are scored on the full model.
        track: Told of the progress.
    Raises:
        ValueError: If the rule keeps no head or its answer has another shape, or there are too few prompts.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532: all heads of the first layer and the best of each later
        one. What is scored how, and the read-out, are choices made here.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> from mechinterp.models.constructions_sparse import preprocess_then_optimise_model
        >>> from mechinterp.models.transformer import ICLTransformer
        >>> task = TaskConfig(d_x=4, context_length=16)
        >>> weights = preprocess_then_optimise_model([0.5], d_x=4)
        >>> model = ICLTransformer.from_weights(weights, task=task)
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = sample_prompts(task, 64, generator=generator, dtype=torch.float64)
        >>> prune(model, prompts).ratio
        1.0
    """
    prompts = prompts_for(source, prompts, n_prompts=n_prompts, seed=seed)
    predictor = predictor_of(source)
    scored, measured = halves(prompts)
    layers = range(predictor.n_layers)
    rise = _scores(predictor, scored, [], layers, track)
    kept = _checked(rule(rise), rise.shape)
    if sequential:
        for layer in layers:
            gone = [head for head in masked_by(kept) if head[0] < layer]
            if gone:
                rise[layer] = _scores(predictor, scored, gone, [layer], track)[0]
                kept = _checked(rule(rise), rise.shape)
    errors = masked_errors(predictor, measured, [[], masked_by(kept)])
    refits = [refit_errors(predictor, measured, heads) for heads in (masked_by(kept), [])]
    columns = np.column_stack([errors, *refits])
    (full_risk, risk, refit_risk, full_refit_risk), sems = mean_and_sem(columns)
    (_, ratio, refit_ratio, _), ratio_sems = ratio_and_sem(columns, columns[:, 0])
    return Pruning(
        kept=kept,
        rise=rise,
        full_risk=float(full_risk),
        full_risk_sem=float(sems[0]),
        risk=float(risk),
        risk_sem=float(sems[1]),
        ratio=float(ratio),
        ratio_sem=float(ratio_sems[1]),
        refit_risk=float(refit_risk),
        refit_risk_sem=float(sems[2]),
        refit_ratio=float(refit_ratio),
        refit_ratio_sem=float(ratio_sems[2]),
        full_refit_risk=float(full_refit_risk),
        full_refit_risk_sem=float(sems[3]),
    )


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """The heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> Float[np.ndarray, " prompt"]:
    """Squared error with heads masked and a new read-out, a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = streams(source, prompts, heads=gone)[-1, :, 0]
    prediction, _ = cross_validated(stream, prompts.y_query.double().numpy(force=True))
    return np.square(prediction - prompts.y_query_clean.double().numpy(force=True)).mean(1)


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """The weights of the model without the other heads, with as few heads per layer as the fullest one needs.

    Raises:
        ValueError: If `kept` is not of the model's shape or keeps no head.
    """
    kept = _checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


def pruned_config(config: ExperimentConfig, weights: Weights) -> ExperimentConfig:
    """The config of a pruned model."""
    return replace(config, model=weights.model)


def pruned_origin(
    checkpoint: Checkpoint, kept: Bool[np.ndarray, "layer head"]
) -> dict[str, object]:
    """What the checkpoint of a pruned model says of where it comes from; its heads are numbered anew, in this order."""
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    return {"pruned_from": checkpoint.name, "kept_heads": heads}


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
    tolerance: float = 1e-5,
) -> Checkpoint:
    """The pruned model as a checkpoint of its own; read back, it predicts as the masked one.

    Args:
        kept: As in `Pruning`.
        prompts: On which both are compared.
        tolerance: Of the largest difference, relative to the largest prediction.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model does not predict as the masked one.
    """
    predictor = checkpoint_of(checkpoint, "save_pruned").predictor
    gone = masked_by(_checked(kept, (predictor.n_layers, predictor.n_heads)))
    weights = pruned_weights(checkpoint.weights, kept)
    config, origin = pruned_config(checkpoint.config, weights), pruned_origin(checkpoint, kept)
    assumed = checkpoint.assumed
    save(path, config, weights, step=checkpoint.step, assumed=assumed, origin=origin)
    saved = load(path)
    found, expected = saved.predictor.run(prompts)[0], predictor.run(prompts, [gone])[0]
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((found - expected).abs().max() / size).item()
    if not error <= tolerance:
        raise ValueError(
            f"{path}: the saved model must predict as the masked one to {tolerance}, got {error:.2g}."
        )
    return saved


def _scores(
    predictor: Predictor,
    prompts: Prompts,
    gone: list[Head],
    layers: Sequence[int],
    track: Track,
) -> Float[np.ndarray, "layer head"]:
    """Rise of the excess risk when each head of some layers is masked beside those that are gone."""
    heads = [(layer, head) for layer in layers for head in range(predictor.n_heads)]
    masks = [gone, *([*gone, head] for head in heads)]
    errors = masked_errors(predictor, prompts, masks, track=track).mean(0)
    return (errors[1:] - errors[0]).reshape(len(layers), predictor.n_heads)


def _only(heads: np.ndarray, n_heads: int) -> np.ndarray:
    """One head per layer."""
    return heads[:, None] == np.arange(n_heads)


def _checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must give a truth value for each of {shape} heads, got {kept.dtype} of {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"At least one of {kept.size} heads must be kept, got none.")
    return kept
