"""The model a page is about, its prompts, and results that several sections show."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mechinterp.analysis.ablation.methods import Ablations, ablate
from mechinterp.analysis.ablation.pruning_curves import RulePruning, prune_by_rules
from mechinterp.analysis.ablation.single import HeadAblation
from mechinterp.analysis.ablation.subsets import SubsetAblation
from mechinterp.analysis.learners.baselines import Baselines, baselines
from mechinterp.analysis.learners.fits import N_PROMPTS as N_FITTED
from mechinterp.analysis.learners.fits import LearnerFits, fit_learners
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.one_layer.classify import (
    N_LAYERED_PROMPTS,
    N_PROMPTS,
    Classification,
    classify,
    classify_attention,
)
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, least_number, usual_number
from mechinterp.models.run.predictor import Predictor
from mechinterp.progress import ProgressCallback, no_progress

LEAST_PROMPTS = 8
LEAST_PART = 64
"""Prompts that no part of them goes below, if there are as many."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The model a page is about; what its sections share is computed when the first of them asks for it."""

    checkpoint: Checkpoint | HookedModule
    n_prompts: int | None
    """Evaluation prompts; None: as many as each analysis takes by itself."""
    seed: int = 0
    progress: ProgressCallback = no_progress

    def __post_init__(self):
        if self.n_prompts is None or self.one_attention:
            return
        if self.n_prompts < LEAST_PROMPTS:
            raise ValueError(
                f"n_prompts must be >= {LEAST_PROMPTS} to choose heads on and to measure on, got {self.n_prompts}."
            )

    @property
    def one_attention(self) -> bool:
        """Whether the model is one layer of attention, which its circuits describe."""
        return self.predictor.is_one_attention

    @property
    def score(self) -> str:
        """The score function of its attention."""
        return self.predictor.circuits.score

    @property
    def predictor(self) -> Predictor:
        return self.checkpoint.predictor

    @cached_property
    def size(self) -> int:
        """Number of evaluation prompts; those of several layers are enough for probes of the stream."""
        if self.n_prompts is None:
            return usual_number(self.checkpoint)
        return max(self.n_prompts, 0 if self.one_attention else least_number(self.checkpoint))

    def at_most(self, usual: int) -> int:
        """Prompts of what takes many runs: as many as it takes by itself, if the page has them."""
        return usual if self.n_prompts is None else min(usual, self.size)

    @cached_property
    def prompts(self) -> Prompts:
        """Evaluation prompts of the model's own task, those that its analyses draw by themselves."""
        return evaluation_prompts(self.checkpoint, n_prompts=self.size, seed=self.seed)

    @property
    def scored(self) -> Prompts:
        """The half of them that orders of heads are chosen on."""
        return self.prompts[: self.size // 2]

    @property
    def measured(self) -> Prompts:
        """The half that those orders are measured on."""
        return self.prompts[self.size // 2 :]

    @cached_property
    def classification(self) -> Classification | LayeredClassification:
        """What the model computes."""
        if self.one_attention:
            return self.pattern
        n_prompts = self.at_most(N_LAYERED_PROMPTS)
        return classify(self.checkpoint, n_prompts=n_prompts, seed=self.seed)

    @cached_property
    def pattern(self) -> Classification:
        """The pattern of one layer of attention."""
        n_prompts = self.n_prompts or N_PROMPTS
        return classify_attention(self.checkpoint, n_prompts=n_prompts, seed=self.seed)

    @cached_property
    def fits(self) -> LearnerFits:
        """Closed-form learners fitted to the model; of prompts that are counted five times as many per context length."""
        n_prompts = N_FITTED if self.n_prompts is None else 5 * self.size
        return fit_learners(
            self.checkpoint, n_prompts=n_prompts, seed=self.seed, progress=self.progress
        )

    @cached_property
    def ablations(self) -> Ablations:
        """Single heads masked by every method, and subsets of heads."""
        return ablate(self.checkpoint, self.prompts, progress=self.progress)

    @property
    def single(self) -> list[HeadAblation]:
        """Single heads masked, by each method as `ablate` has them."""
        return list(self.ablations.methods)

    @property
    def subsets(self) -> SubsetAblation | None:
        """Subsets of heads of one layer of attention."""
        return self.ablations.subsets

    @cached_property
    def baselines(self) -> Baselines:
        """The model's risk beside that of learners at their best."""
        return baselines(self.predictor, self.prompts)

    @cached_property
    def rules(self) -> RulePruning:
        """Pruning by rules."""
        return prune_by_rules(self.predictor, self.prompts, progress=self.progress)

    def squared_errors(self) -> np.ndarray:
        """Mean squared distance from the target without noise, prompt by prompt."""
        with torch.no_grad():
            error = self.predictor.predict(self.prompts) - self.prompts.y_query_clean
        return error.square().mean(1).numpy()


def some(prompts: Prompts, part: int) -> Prompts:
    """The first of the prompts, one in `part` but no fewer than LEAST_PART; an even number, as they may swap."""
    size = min(max(len(prompts) // part, LEAST_PART), len(prompts))
    return prompts[: size // 2 * 2]
