"""Identities that some algorithms satisfy, such as linearity in y, and how far a model breaks them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.naming_prompts import (
    SCORED_PROMPTS,
    USELESS,
    NamingSetting,
    Predict,
    isotropic,
    kept,
    relative_risk,
    squares,
)
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.given import no_law
from mechinterp.icl.prompts import Prompts, generator_for

PAIR_ORDER = "same if the pairs change places"
TIMES = "linear in y: times"
ROOT = 0.5**0.5
"""Factor that keeps the variance of a sum of two independent values."""


@dataclass(frozen=True, eq=False)
class Identity:
    """Squared differences between the two sides of an identity, per prompt."""

    error: Float[np.ndarray, " prompt"]
    size: Float[np.ndarray, " prompt"]

    def mismatch(self, counts: Float[np.ndarray, " prompt"] | None = None) -> float:
        """Least fraction of the model that breaks the identity: half of the difference, since both sides hold an
        independent part of what changes."""
        counts = np.ones(len(self.size)) if counts is None else counts
        return float((self.error @ counts) / (self.size @ counts) / 2)

    def mismatch_sem(self) -> float:
        """Standard error of `mismatch` over prompts."""
        return float(ratio_and_sem(self.error, self.size)[1]) / 2


def satisfies(learner: Algorithm, identity: str) -> bool:
    """True if an algorithm satisfies an identity; all are linear in x_query."""
    if identity == PAIR_ORDER:
        return not learner.along_pairs
    if identity.startswith("linear in y"):
        return learner.linear_in_y
    return learner.equivariant if identity == "same if x is rotated" else True


def satisfies_all(learner: Algorithm) -> bool:
    """True if an algorithm satisfies every identity."""
    return learner.linear_in_y and learner.equivariant and not learner.along_pairs


def identities(
    predict: Predict, own: NamingSetting, task: TaskConfig, seed: int
) -> dict[str, Identity]:
    """Identities of predictions, on the prompts of the scores.

    An identity is tested only if the law of the task makes the changed prompts as likely as the given ones, and the model
    does its task on them. The sum of two sparse task vectors is not sparse, and entries of fixed size have no other scale.
    Sums are not tested on prompts without task vectors, as their targets are not known.
    """
    prompts = own.prompts[SCORED_PROMPTS]
    known = own.predictions[SCORED_PROMPTS]
    generator = generator_for(seed, "init", 2)
    order = torch.randperm(prompts.x.shape[1], generator=generator, device="cpu")
    made = {PAIR_ORDER: (replace(prompts, x=prompts.x[:, order], y=prompts.y[:, order]), known)}
    law_known, with_beta = not no_law(task), prompts.knows_task_vectors
    sparse_or_pool = task.sparsity is not None or task.n_tasks is not None
    if law_known and with_beta:
        beta = prompts.task_vectors_at_every_x("an identity")[:, -1]
        x = prompts.x_query.roll(1, 0)
        changed = {"x_query": x, "y_query_clean": _times(x, beta)}
        made["linear in x_query"] = _added(predict, prompts, known, changed)
    if law_known and task.nonzeros != "signs" and task.n_tasks is None:
        for factor in (0.5, 2.0):
            sides = {n: factor * getattr(prompts, n) for n in ("y", "y_query_clean")}
            made[f"{TIMES} {factor:g}"] = replace(prompts, **sides), factor * known
    if law_known and with_beta and not sparse_or_pool:
        other = prompts.with_next_task("an identity")
        changed = {name: getattr(other, name) for name in ("y", "y_query_clean")}
        made["linear in y: sum"] = _added(predict, prompts, known, changed)
    if law_known and not sparse_or_pool and task.supports is None and isotropic(task):
        made["same if x is rotated"] = _rotated(prompts, seed), known
    tests = {}
    for name, (changed_prompts, expected) in made.items():
        predictions = predict(changed_prompts)
        target = changed_prompts.y_query_clean
        stay = kept(predictions, target)
        if relative_risk(predictions[stay], target[stay]) < USELESS:
            error = np.where(stay, squares(predictions - expected), 0.0)
            tests[name] = Identity(error, np.where(stay, squares(expected), 0.0))
    return tests


def _added(
    predict: Predict, prompts: Prompts, known: Tensor, changed: Mapping[str, Tensor]
) -> tuple[Prompts, Tensor]:
    """Prompts whose fields are the sums, over root 2, of the given and the changed ones; and the sums of both predictions."""
    sums = {name: ROOT * (getattr(prompts, name) + value) for name, value in changed.items()}
    return replace(prompts, **sums), ROOT * (known + predict(replace(prompts, **changed)))


def _times(x: Float[Tensor, "batch d_x"], matrices: Float[Tensor, "batch d_x n"]) -> Tensor:
    """Product of a vector and a matrix for each prompt, [batch, n]."""
    return (x[:, None] @ matrices)[:, 0]


def _rotated(prompts: Prompts, seed: int) -> Prompts:
    shape, generator = (len(prompts), *2 * prompts.x.shape[2:]), generator_for(seed, "init", 0)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    R = torch.linalg.qr(noise).Q
    return replace(prompts, x=prompts.x @ R, x_query=_times(prompts.x_query, R))
