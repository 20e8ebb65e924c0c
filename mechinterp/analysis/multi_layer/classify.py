"""Cost of masking each head of a layered model, and the algorithm of its layers.

Between such heads and the prediction lie further layers, norms and MLPs, so that they are described by
what breaks when they are masked and not by their circuits.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.ablation import Ablation
from mechinterp.analysis.classified import (
    NOTHING_EXCLUDED,
    Classified,
    Verdict,
    calibration_text,
    is_behind,
    nearest_learners,
)
from mechinterp.analysis.labels import ALGORITHM_LABELS, ALGORITHMS_RANGE, NO_LABEL_TEXTS
from mechinterp.analysis.learners.nearest import NEAR_R2, evaluation, nearby, task_loss
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.multi_layer.naming_result import Naming
from mechinterp.analysis.multi_layer.naming_rules import UNSTRUCTURED, Limits
from mechinterp.analysis.number_format import beside, digits, explained, with_error
from mechinterp.analysis.result import HEAD_COLUMNS, Table, records, tables_of
from mechinterp.analysis.stats import best_factor
from mechinterp.config import ModelConfig, TaskLike
from mechinterp.display import frame_of, head_axes, head_names, with_sem
from mechinterp.icl.algorithms import ALGORITHMS as LEARNERS
from mechinterp.models.run.evaluation import task_for
from mechinterp.models.run.predictor import Source, predictor_of

MOST_UNCLEAR = 8
"""Most heads without a clear rise that are named."""
CONSTANT = 1e-8
"""Variance over prompts, relative to the mean square, below which a prediction is one number."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayeredClassification(Classified):
    """Rise of the excess risk when one head of a layered model is masked, and the nearest learner of the model.

    `label` is the algorithm that several layers carry out, a label of `icl.algorithms`, "undetermined" or
    "unstructured"; "undetermined" for a single layer.
    """

    needs_law: ClassVar = (
        "longer prompts, a wide spread of x, identities other than the order of pairs"
    )
    heads_title: ClassVar = """Heads: rise of the excess risk when one is masked
  head                    rise (y²)  share of its layer's rises"""

    algorithm: Naming | None
    """Evidence for the label of several layers; None for a single layer."""
    heads: Ablation
    """Excess risk of the full model, and its rise when a head is masked."""
    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "label": "Name of the head: its layer and its number, as in L0H0.",
        "importance": "Share of the head in the rises of its layer, negative rises counted as 0.",
        "rise": "Excess risk with the head masked minus that of the full model.",
        "rise_sem": "Standard error of rise, paired over prompts.",
    }
    UNITS: ClassVar = {"y²": ("rise",)}

    def relabelled(self, label: str, reason: str) -> "LayeredClassification":
        """This result and its algorithm with the label of the whole file, if the file has several readings."""
        algorithm = self.algorithm and self.algorithm.relabelled(label, reason)
        return replace(self, label=label, reason=reason, algorithm=algorithm)

    @property
    def verdict(self) -> Verdict:
        """Verdict: what the model computes, how sure that is, and what is excluded."""
        pattern, algorithm = self.label, self.algorithm
        computes = ""
        if pattern in NO_LABEL_TEXTS:
            none = "nothing that helps on its task (unstructured)"
            if pattern != UNSTRUCTURED:
                none = NO_LABEL_TEXTS[pattern].format(kind="algorithms")
            computes = f"{none}: {self.reason}"
        if algorithm is None or not algorithm.nearest:
            return nearest_learners(computes, self.near, doubt=self.task_doubt)
        number = explained(*algorithm.explained(algorithm.nearest))
        share = f"{pattern} in {algorithm.frequency.get(pattern, 0.0):.0%} of resamples"
        if computes:
            sure = f"the nearest is {ALGORITHM_LABELS[algorithm.nearest].name}, {number}; {share}"
        else:
            label = ALGORITHM_LABELS[pattern]
            numbers = _numbers(pattern, algorithm.scalars(pattern), algorithm.n_layers)
            computes = f"{label.text} ({pattern})" + (f"; {numbers}" if numbers else "")
            fitted = "its numbers fitted on other prompts" if numbers else "with nothing fitted"
            sure = f"this formula, {fitted}, explains {number} of the predictions; {share}"
            sure += calibration_text(label) if ALGORITHMS_RANGE.holds(self.task) else ""
        return Verdict(computes, sure, *_others(algorithm), self.task_doubt)

    @property
    def brief(self) -> str:
        """R² of the algorithm, or the reason that there is none."""
        if self.label in NO_LABEL_TEXTS:
            return f"; {self.reason}"
        if self.algorithm is None or not self.algorithm.nearest:
            return ""
        return f", {explained(*self.algorithm.explained(self.algorithm.nearest))}"

    def head_lines(self, rows: int) -> list[str]:
        """A line per head in the columns of `heads_title`, the largest rise first, and one line for all other heads.

        Heads with a line have a rise above two standard errors, or above the full model's excess risk: such a rise may have
        a large error because few prompts carry it.
        """
        frame = self.to_frame().sort_values("rise", ascending=False)
        size = frame["rise"].abs()
        clear = (size > 2 * frame["rise_sem"]) | (size > self.heads.full_risk)
        shown = frame[clear].head(rows)
        lines = [
            f"  {row.label:<6}  {with_error(row.rise, row.rise_sem):>25}  {digits(row.importance):>25}"
            for row in shown.itertuples()
        ]
        less, names = int(clear.sum()) - len(shown), sorted(frame[~clear]["label"])
        rest = [f"{less} more heads, of less"] if less else []
        if names:
            listed = ", ".join(names) if len(names) <= MOST_UNCLEAR else f"{len(names)} heads"
            rest.append(f"within two standard errors of 0: {listed}")
        if rest:
            lines.append(f"  {'; '.join(rest)}{' (--wide)' if less else ''}")
        return lines

    @property
    def heaviest(self) -> str:
        """Sentence on the head whose masking raises the excess risk most."""
        most = self.to_frame().nlargest(1, "rise").iloc[0]
        rise = with_error(most["rise"], most["rise_sem"])
        risk = with_error(self.heads.full_risk, self.heads.full_risk_sem)
        return f"masking {most['label']} raises the excess risk most, by {rise} y² on {risk}"

    def sentences(self) -> list[str]:
        """The verdict, the loss, the heaviest head, and the algorithm of the layers."""
        facts = [self.heaviest]
        if self.near.sentence not in self.verdict.sure:
            facts.append(self.near.sentence)
        sentences = [*self.summary, *(f"{each[0].upper()}{each[1:]}." for each in facts)]
        # Without a label the verdict has the reason already.
        if self.algorithm is not None and self.label not in NO_LABEL_TEXTS:
            sentences.append(self.algorithm.sentences()[0])
        return sentences

    def tables(self) -> dict[str, Table]:
        """Heads, and the tables of the algorithm."""
        heads = Table(
            self.to_frame(),
            "Rise of the excess risk when a head is masked",
            by="rise",
            quiet=("label",),
        )
        own = {} if self.algorithm is None else tables_of("name-algorithm", self.algorithm)
        return {"classify": heads, **own}

    def figures(self) -> dict[str, go.Figure]:
        """The path between algorithms, and the rises."""
        own = {} if self.algorithm is None else self.algorithm.figures()
        return own | {"classify": self.plot()}

    @property
    def evidence(self) -> dict[str, Any]:
        """Risk, R² of simple learners, and the numbers of the algorithm."""
        return {
            "excess_risk": self.heads.full_risk,
            "excess_risk_sem": self.heads.full_risk_sem,
            "context_length": self.task.context_length,
            "learner_r2": dict(zip(self.near.learners, self.near.r2, strict=True)),
            "learner_r2_sem": dict(zip(self.near.learners, self.near.r2_sem, strict=True)),
            **({} if self.algorithm is None else self.algorithm.evidence()),
        }

    def to_document(self) -> dict:
        """Pattern, heads by their ablation, evidence and verdict."""
        return self.document(records(self.to_frame()))

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        rise = self.heads.rise
        frame = frame_of(self.heads, *with_sem("rise"), "importance", **head_axes(rise))
        frame.insert(2, "label", head_names(rise.shape))
        return frame

    def plot(self) -> go.Figure:
        """Rise of the excess risk when a head is masked."""
        return self.heads.plot()


def layered_classification(
    source: Source,
    task: TaskLike | None = None,
    *,
    n_prompts: int = 256,
    seed: int = 0,
) -> LayeredClassification:
    """Rise of the excess risk when a head of a layered model is masked, and the algorithm that the
    layers run.

    A masked head writes nothing; nothing is retrained. All masks use the same prompts, and errors
    are those to the target without noise.

    Args:
        task: Law of the prompts; None: the checkpoint's.
        n_prompts: For the heads and the algorithm, which takes four and then sixteen times as many if resamples disagree.
    Raises:
        ValueError: If there are fewer prompts than 8 or twice the scalars of an algorithm of as many layers, or the
            task's prompts are of other sizes than the model's.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time; that outputs are zeroed
        and importances normalised within a layer is a choice made here.
    See also:
        `classify`, `ablate`, `name_algorithm`.
    Example:
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from mechinterp.checkpoints.foreign.options import Hints
        >>> from mechinterp.checkpoints.foreign.read import read_foreign
        >>> from mechinterp.checkpoints.foreign.settings import Stored
        >>> tensors = nn.TransformerEncoderLayer(6, 2, 8).state_dict()
        >>> hints = Hints(n_heads=2)
        >>> layer = read_foreign([Stored(Path("x.pt"), tensors, {})], hints)
        >>> layered_classification(layer, n_prompts=8).label
        'undetermined'
    """
    predictor = predictor_of(source)
    task = task_for(predictor, task, "classify")
    evaluated = evaluation(task, n_prompts, seed, attend_to_self=False)
    prompts = evaluated.prompts
    prediction = predictor.run(prompts)[0].double()
    weights = predictor.weights
    factor, factor_sem = best_factor(prediction, prompts.y_query_clean)
    algorithm = None
    if predictor.n_layers > 1 or (weights is not None and weights.model.recurrent):
        algorithm = name_algorithm(predictor, task=task, n_prompts=n_prompts, seed=seed)
    return LayeredClassification(
        label="undetermined" if algorithm is None else algorithm.label,
        reason=_reason(algorithm, prediction, None if weights is None else weights.model),
        algorithm=algorithm,
        heads=ablate(predictor, prompts, what="heads"),
        near=nearby(prediction, evaluated.families),
        loss=task_loss(prediction, evaluated.ridge, prompts),
        best_factor=factor,
        best_factor_sem=factor_sem,
        task=task,
        n_prompts=len(prompts),
        trained_here=predictor.trained_here,
        reading_doubt=predictor.doubt,
    )


def _between(model: ModelConfig | None) -> str:
    """Parts between the heads of one layer and the prediction."""
    if model is None:
        return "parts that are not known by name lie between the heads and the prediction"
    parts = {
        "RMSNorm" if model.rms_norm else "LayerNorm": model.norm is not None or model.final_norm,
        "an MLP": model.d_mlp is not None,
        "positions": model.rotary_dim is not None or model.n_positions is not None,
        "a read-in and a read-out": model.d_model is not None,
    }
    *first, last = [name for name, there in parts.items() if there] or ["more than attention"]
    verb = "lie" if first or last == "positions" else "lies"
    return f"{', '.join(first)}{' and ' if first else ''}{last} {verb} between the heads and the prediction"


def _reason(
    algorithm: Naming | None,
    prediction: Float[Tensor, "batch d_y"],
    model: ModelConfig | None,
) -> str:
    """Reason of the label; a model that predicts one number on every prompt is named as such."""
    why = _between(model) if algorithm is None else algorithm.reason
    size = float(prediction.square().mean())
    if not size:
        return f"{why}; the model predicts 0 on every prompt"
    if float(prediction.var(0).max()) < CONSTANT * size:
        return f"{why}; the model predicts the same number on every prompt: its heads do nothing"
    return why


def _numbers(label: str, values: Float[np.ndarray, " _"], n_layers: int) -> str:
    """The fitted numbers of an algorithm, each with a value for every layer that has one."""
    letters = ALGORITHM_LABELS[label].numbers
    if not letters:
        return ""
    scalars = next(each.scalars for each in LEARNERS if each.label == label)
    counts = [len(scalar.layers(n_layers)) for scalar in scalars]
    parts = np.split(values, np.cumsum(counts)[:-1])
    named = zip(letters, parts, strict=True)
    return ", ".join(
        f"{letter} = {', '.join(map(digits, part))}" for letter, part in named if len(part)
    )


def _others(algorithm: Naming) -> tuple[str, str]:
    """The nearest algorithm that explains clearly less, and those that explain as much, by the rule of the labels."""
    others = [name for name in algorithm.order if name != algorithm.nearest]
    leads = {name: algorithm.lead(algorithm.nearest, name) for name in others}
    behind = [name for name in others if is_behind(*leads[name], Limits().tie)]
    texts = {
        name: f"{ALGORITHM_LABELS[name].name}, R² = {algorithm.explained(name)[0]:.4f}, {beside(*leads[name])}"
        for name in others
    }
    is_not = texts[behind[0]] if behind else NOTHING_EXCLUDED
    near = [name for name in others if algorithm.explained(name)[0] >= NEAR_R2]
    return is_not, "; ".join(texts[name] for name in near if name not in behind)
