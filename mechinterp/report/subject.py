"""The model a page is about, its prompts, and results that several sections show."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mechinterp.analysis.circuits.patterns import (
    N_LAYERED_PROMPTS,
    Classification,
    classify,
    classify_attention,
)
from mechinterp.analysis.heads.ablation import HeadAblation, ablate_heads
from mechinterp.analysis.heads.masking import subsets_where_possible
from mechinterp.analysis.heads.pruning_curves import RulePruning, prune_by_rules
from mechinterp.analysis.heads.subsets import SubsetAblation
from mechinterp.analysis.learners.baselines import Baselines, baselines
from mechinterp.analysis.learners.fits import LearnerFits, fit_learners
from mechinterp.analysis.learners.layered import LayeredClassification
from mechinterp.analysis.probing.probes import streams
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.predictor import Predictor
from mechinterp.progress import ProgressCallback, no_progress

METHODS = ("zero", "mean")
LEAST_PROMPTS = 8
LEAST_PART = 64
"""Prompts that no part of them goes below, if there are as many."""
PER_FEATURE = 2
"""Prompts behind a probe, or a new read-out, for each feature of the stream, at least."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The model a page is about; what its sections share is computed when the first of them asks for it."""

    checkpoint: Checkpoint
    n_prompts: int
    """Prompts behind the excess risk; what needs many runs takes a part of them."""
    seed: int = 0
    progress: ProgressCallback = no_progress

    def __post_init__(self):
        if not self.one_attention and self.n_prompts < LEAST_PROMPTS:
            raise ValueError(
                f"n_prompts must be >= {LEAST_PROMPTS} to choose heads on and to measure on, got {self.n_prompts}."
            )

    @property
    def one_attention(self) -> bool:
        """Whether the model is one layer of attention, which its circuits describe."""
        return self.checkpoint.config.model.one_attention

    @property
    def score(self) -> str:
        """The score function of its attention."""
        return self.checkpoint.config.model.score

    @property
    def predictor(self) -> Predictor:
        return self.checkpoint.predictor

    @cached_property
    def size(self) -> int:
        """Number of prompts; fewer of a model with norms and MLPs, whose layers cannot be taken apart."""
        if self.checkpoint.config.model.attention_only:
            return self.n_prompts
        return max(self.n_prompts // 8, min(self.n_prompts, 256))

    @cached_property
    def prompts(self) -> Prompts:
        """Evaluation prompts of the model's own task, more in the second half where probes need them."""
        if self.one_attention:
            return self._drawn(self.size)
        return self._drawn(self.size // 2 + max(self.size - self.size // 2, self._wide))

    @property
    def scored(self) -> Prompts:
        """Those that heads are chosen on."""
        return self.prompts[: self.size // 2]

    @property
    def measured(self) -> Prompts:
        """Those that the choice is measured on."""
        return self.prompts[self.size // 2 :]

    @property
    def probed(self) -> Prompts:
        """Those that probes are fitted to."""
        return self.measured[: max(len(self.measured) // 2, self._wide)]

    @cached_property
    def classification(self) -> Classification | LayeredClassification:
        """The pattern, of one layer of attention on as many prompts as the page has."""
        if self.one_attention:
            return self.pattern
        n_prompts = min(self.size, N_LAYERED_PROMPTS)
        return classify(self.checkpoint, n_prompts=n_prompts, seed=self.seed)

    @cached_property
    def pattern(self) -> Classification:
        """The pattern of one layer of attention."""
        return classify_attention(self.checkpoint, n_prompts=self.n_prompts, seed=self.seed)

    @cached_property
    def fits(self) -> LearnerFits:
        """Closed-form learners fitted to the model, on five times as many prompts per context length."""
        n_prompts = 5 * self.size
        return fit_learners(
            self.checkpoint, n_prompts=n_prompts, seed=self.seed, progress=self.progress
        )

    @cached_property
    def single(self) -> list[HeadAblation]:
        """Single heads masked, by each of `METHODS`."""
        return [
            ablate_heads(self.checkpoint, self.prompts, method=method, progress=self.progress)
            for method in METHODS
        ]

    @cached_property
    def subsets(self) -> SubsetAblation | None:
        """Subsets of heads of one layer of attention."""
        return subsets_where_possible(self.checkpoint, self.prompts)

    @cached_property
    def zero(self) -> HeadAblation:
        """Zero ablation on the prompts that heads are chosen on."""
        return ablate_heads(self.predictor, self.scored, progress=self.progress)

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

    @cached_property
    def _wide(self) -> int:
        return PER_FEATURE * streams(self.predictor, self._drawn(1)).shape[3]

    def _drawn(self, n_prompts: int) -> Prompts:
        dtype = self.checkpoint.weights.dtype
        return sample_prompts(self.checkpoint.task, n_prompts, seed=self.seed, dtype=dtype)


def some(prompts: Prompts, part: int) -> Prompts:
    """The first of the prompts, one in `part` but no fewer than LEAST_PART; an even number, as they may swap."""
    size = min(max(len(prompts) // part, LEAST_PART), len(prompts))
    return prompts[: size // 2 * 2]
