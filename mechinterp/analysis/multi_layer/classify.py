"""What the heads of a layered model are worth, and which algorithm its layers carry out.

Between such heads and the prediction lie further layers, norms and MLPs, so that they are described by
what breaks when they are masked and not by their circuits.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.ablation.masked_risk import layer_shares
from mechinterp.analysis.learners.baseline_comparison import (
    TaskLoss,
    standing_text,
    task_doubt,
    task_loss,
)
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.verdict import layers_verdict
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Table, figures_of, records, sentences_of, tables_of
from mechinterp.analysis.stats import best_factor, mean_and_sem, r2_and_sem
from mechinterp.analysis.verdict import Verdict
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.predictors import debiased_gd, ridge, vanilla_gd
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Predictor, Source, predictor_of
from mechinterp.models.run.task import assumed_of, task_for

CONSTANT = 1e-8
"""Variance over prompts, relative to the mean square, below which a prediction is one number."""
CLOSE = 0.5
"""Least R^2 of a learner that is called close."""


@dataclass(frozen=True, eq=False, repr=False)
class LayeredClassification(Result):
    """How much the excess risk rises when one head of a layered model is masked, and what the model is near to."""

    pattern: str
    """The algorithm that several layers carry out, a label of `icl.algorithms`, "undetermined" or
    "unstructured"; "undetermined" for a single layer."""
    reason: str
    """One sentence: why, and which learner is closest."""
    algorithm: AlgorithmEvidence | None
    """What earned the label of several layers; None for a single one."""
    excess_risk: float
    """Of the full model: mean (y_hat - y_query_clean)^2, unit y^2."""
    excess_risk_sem: float
    increase: Float[np.ndarray, "layer head"]
    """Excess risk with the head masked minus that of the full model."""
    increase_sem: Float[np.ndarray, "layer head"]
    """Standard error of `increase`, paired: the same prompts for every mask."""
    learners: tuple[str, ...]
    """Vanilla and debiased GD with the step size closest to the model, least squares, and ridge if there is noise."""
    learner_r2: Float[np.ndarray, " learner"]
    """1 - mean (model - learner)^2 / mean model^2."""
    learner_r2_sem: Float[np.ndarray, " learner"]
    loss: TaskLoss
    best_factor: float
    """The factor on the prediction with the least loss; 1 at the optimum of the task that a model was trained on."""
    best_factor_sem: float
    task: TaskConfig
    """Law of the prompts."""
    n_prompts: int
    assumed: tuple[str, ...] = ()
    """Fields of the task that nobody stated."""
    COLUMNS: ClassVar = {
        "excess_risk_increase": "Excess risk with the head masked minus that of the full model, unit y^2.",
        "sem": "Standard error of excess_risk_increase, paired over prompts.",
    }

    @property
    def importance(self) -> Float[np.ndarray, "layer head"]:
        """A head's share of its layer's increases, negative ones taken as 0; all 0 where none is positive."""
        return layer_shares(self.increase)

    @property
    def verdict(self) -> Verdict:
        """What the model computes, how sure that is, and what it is not."""
        return layers_verdict(
            self.pattern,
            self.reason,
            self.algorithm,
            learners=self.learners,
            r2=self.learner_r2,
            r2_sem=self.learner_r2_sem,
            doubt=self.task_doubt,
        )

    @property
    def task_doubt(self) -> str:
        """Why the task may be another one than was assumed; empty where nothing says so."""
        factor = (self.best_factor, self.best_factor_sem)
        r2 = (self.loss.scaled_r2, self.loss.scaled_r2_sem)
        return task_doubt(factor, r2, self.assumed)

    @property
    def heaviest(self) -> str:
        """Which head's masking raises the excess risk most."""
        layer, head = np.unravel_index(int(self.increase.argmax()), self.increase.shape)
        rise = with_error(self.increase[layer, head], self.increase_sem[layer, head])
        return (
            f"masking L{layer}H{head} raises the excess risk most, by {rise} y² on "
            f"{with_error(self.excess_risk, self.excess_risk_sem)}"
        )

    def __repr__(self) -> str:
        told = standing_text(self.loss, self.task, self.assumed)
        return f"LayeredClassification({self.pattern})\n{self.verdict}\n{told}"

    def sentences(self) -> list[str]:
        """The verdict, the loss, the heaviest head, and what the layers carry out."""
        told = [
            *str(self.verdict).splitlines(),
            *standing_text(self.loss, self.task, self.assumed).splitlines(),
            f"{self.heaviest[0].upper()}{self.heaviest[1:]}.",
        ]
        return told if self.algorithm is None else told + sentences_of(self.algorithm)

    def tables(self) -> dict[str, Table]:
        """Heads, and the tables of the algorithm."""
        heads = Table(self.to_frame(), "What the excess risk rises by", by="excess_risk_increase")
        own = {} if self.algorithm is None else tables_of("algorithms", self.algorithm)
        return {"classify": heads, **own}

    def figures(self) -> dict[str, go.Figure]:
        """The path between algorithms, and the rises."""
        own = {} if self.algorithm is None else figures_of("algorithm_path", self.algorithm)
        return own | {"classify": self.plot()}

    def to_document(self) -> dict:
        """Pattern, heads by their ablation, evidence and verdict."""
        evidence = {
            "excess_risk": self.excess_risk,
            "excess_risk_sem": self.excess_risk_sem,
            "n_prompts": self.n_prompts,
            "context_length": self.task.context_length,
            "learner_r2": dict(zip(self.learners, self.learner_r2.tolist(), strict=True)),
            "learner_r2_sem": dict(zip(self.learners, self.learner_r2_sem.tolist(), strict=True)),
            **({} if self.algorithm is None else self.algorithm.evidence()),
            "loss": asdict(self.loss),
            "task": self.task.in_words(self.assumed),
            "best_factor": self.best_factor,
            "best_factor_sem": self.best_factor_sem,
        }
        return {
            "pattern": self.pattern,
            "reason": self.reason,
            "heads": records(self.to_frame()),
            "evidence": evidence,
            "verdict": asdict(self.verdict),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        heads = list(np.ndindex(self.increase.shape))
        columns = {
            "layer": [layer for layer, _ in heads],
            "head": [head for _, head in heads],
            "label": [f"L{layer}H{head}" for layer, head in heads],
            "excess_risk_increase": self.increase.ravel(),
            "sem": self.increase_sem.ravel(),
            "importance": self.importance.ravel(),
        }
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Rise of the excess risk, layers by heads; colours end where a model is no better than one that predicts 0."""
        title = "Rise of the excess risk when a head is masked"
        limit, largest = self.loss.zero - self.loss.model, float(np.abs(self.increase).max())
        if not 0 < limit < largest:
            return figures.layers_by_heads(self.increase, title=title, unit="y²")
        title = f"{title} (full colour: no better than predicting 0)"
        return figures.layers_by_heads(self.increase, title=title, unit="y²", limit=limit)

    def plot_importance(self) -> go.Figure:
        """Importance within the layer, layers by heads."""
        title = "Importance: share of the layer's rise when a head is masked"
        return figures.layers_by_heads(self.importance, title=title, unit="share", signed=False)


def classify_layers(
    source: Source,
    task: TaskConfig | None = None,
    *,
    n_prompts: int = 256,
    seed: int = 0,
) -> LayeredClassification:
    """What each head of a layered model is worth, and the algorithm that several layers carry out.

    A head is masked by taking its share of the output projection as zero, nothing retrained; all masks see
    the same prompts and are held against the target without noise.

    Args:
        task: Law of the prompts; None: the checkpoint's.
        n_prompts: For the heads; the algorithm takes four and sixteen times as many where these do not decide.
    Raises:
        ValueError: If there are fewer than two prompts, 8 for several layers, or the task's prompts
            are of other sizes than the model's.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time; that outputs are zeroed
        and importances normalised within a layer is a choice made here.
    Example:
        >>> from pathlib import Path
        >>> from mechinterp.checkpoints.foreign.options import Hints
        >>> from mechinterp.checkpoints.foreign.read import Stored, read_foreign
        >>> tensors = torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict()
        >>> hints = Hints(n_heads=2)
        >>> layer = read_foreign([Stored(Path("x.pt"), tensors, {})], hints)
        >>> classify_layers(layer, n_prompts=8).pattern
        'undetermined'
    """
    predictor = predictor_of(source)
    assumed = assumed_of(source, task)
    task = task_for(predictor, task, "classify")
    if n_prompts < 2:
        raise ValueError(f"n_prompts must be >= 2 for a standard error, got {n_prompts}.")
    prompts = evaluation_prompts(task, n_prompts=n_prompts, seed=seed)
    prediction, full, rise = _masked_risks(predictor, prompts)
    excess_risk, excess_risk_sem = mean_and_sem(full.numpy())
    increase, increase_sem = mean_and_sem(rise.numpy())
    r2 = _learner_r2(prompts, prediction, task)
    factor, factor_sem = best_factor(prediction, prompts.y_query_clean)
    size = float(prediction.square().mean())
    constant = size > 0 and float(prediction.var(0).max()) < CONSTANT * size
    algorithm = None
    if predictor.n_layers > 1:
        algorithm = name_algorithm(predictor, task=task, n_prompts=n_prompts, seed=seed)
    pattern, reason = _verdict(
        algorithm, r2, constant=constant, by_name=predictor.weights is not None
    )
    return LayeredClassification(
        pattern=pattern,
        reason=reason,
        algorithm=algorithm,
        excess_risk=float(excess_risk),
        excess_risk_sem=float(excess_risk_sem),
        increase=increase,
        increase_sem=increase_sem,
        learners=tuple(r2),
        learner_r2=np.array([value for value, _ in r2.values()]),
        learner_r2_sem=np.array([sem for _, sem in r2.values()]),
        loss=task_loss(prediction, ridge(prompts, penalty=task.posterior_penalty), prompts),
        best_factor=factor,
        best_factor_sem=factor_sem,
        task=task,
        n_prompts=n_prompts,
        assumed=assumed,
    )


def _masked_risks(
    predictor: Predictor, prompts: Prompts
) -> tuple[
    Float[Tensor, "batch d_y"], Float[Tensor, " batch"], Float[Tensor, "batch n_layers n_heads"]
]:
    """What the model predicts, its squared error against the target without noise, and what masking each head adds."""
    masks = [[], *([head] for head in predictor.heads)]
    prediction, *each = predictor.run(prompts, masks).double()
    masked = torch.stack(each, 1).unflatten(1, (predictor.n_layers, predictor.n_heads))
    target = prompts.y_query_clean
    full = (prediction - target).square().mean(1)
    return prediction, full, (masked - target[:, None, None]).square().mean(3) - full[:, None, None]


def _learner_r2(
    prompts: Prompts, prediction: Float[Tensor, "batch d_y"], task: TaskConfig
) -> dict[str, tuple[float, float]]:
    """R^2 of each learner against the model's predictions, and its standard error."""
    learned = {}
    for name, step in (("vanilla_gd", vanilla_gd), ("debiased_gd", debiased_gd)):
        direction = step(prompts, eta=1.0)
        learned[name] = direction * (direction * prediction).sum() / direction.square().sum()
    learned["least_squares"] = ridge(prompts, penalty=0)
    if task.noise_var:
        learned["ridge"] = ridge(prompts, penalty=task.posterior_penalty)
    return {name: r2_and_sem(values, prediction) for name, values in learned.items()}


def _verdict(
    algorithm: AlgorithmEvidence | None,
    r2: dict[str, tuple[float, float]],
    *,
    constant: bool,
    by_name: bool,
) -> tuple[str, str]:
    best = max(r2, key=lambda name: r2[name][0])
    value, sem = r2[best]
    how = "closest learner" if value >= CLOSE else "no learner known here is close, the nearest"
    learner = f"{how}: {best.replace('_', ' ')} (R² = {value:.3f} ± {sem:.1g})"
    if np.isnan(value):
        learner = "the model predicts 0 on every prompt"
    if constant:
        learner = "the model predicts the same number on every prompt: its heads do nothing"
    if algorithm is not None:
        return algorithm.label, f"{algorithm.reason}; {learner}"
    between = "LayerNorm and MLP lie" if by_name else "what is not known by name lies"
    return "undetermined", f"{between} between the heads and the prediction; {learner}"
