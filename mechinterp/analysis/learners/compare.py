"""A model beside simple learners on the same prompts: one row per number of pairs and learner, the model first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechinterp.analysis.learners.learner_comparison import LearnerComparison
from mechinterp.analysis.learners.learner_rows import mean_losses, rows_at
from mechinterp.analysis.learners.simple import CROSS_VALIDATED, FOR_SOME_TASKS, LEARNERS
from mechinterp.analysis.stats import LARGEST_PREDICTION, mean_and_sem, require_moderate
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.figures import MODEL
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import law_in_force, prompts_and_law
from mechinterp.models.run.predictor import Learner, Source, is_learner, learner_of, predictor_of
from mechinterp.progress import progress

ANALYSIS = "compare_learners"
OFF_CENTRE = 0.1
"""The mean of x or y is clearly not 0 if it exceeds this fraction of the root mean square, and `CLEARLY_OFF` standard errors."""
CLEARLY_OFF = 5.0
OVERFLOW = "the model's predictions overflow"
DEFAULT = tuple(
    name for name in LEARNERS if name not in FOR_SOME_TASKS and not LEARNERS[name].without
)
"""Learners for any task. A task with a pool adds dmmse, one that drifts the Kalman filter, several
noise levels adaptive ridge regression; prompts whose x or y have a mean add learners with an intercept."""


def compare_learners(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    learners: Sequence[str] = DEFAULT,
    context_lengths: Sequence[int] | None = None,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> LearnerComparison:
    """Loss, excess risk and distance to the model of simple learners on the same prompts.

    Step sizes and mu are least squares on the model's predictions, and omega of the kernel head is
    a line search over either sign. Ridge has the penalty of the task's law, which makes it the
    Bayes predictor of a Gaussian task; `best_ridge`, `gd` and `algorithm_1` have the penalty, or
    the number of steps up to 128, that is best on these prompts, which favours them. GD descends
    from zero with the step 1/λ_max of each prompt; Algorithm 1 does so on x reweighted by its
    correlations with y. After k pairs the next x of the prompt is predicted.

    Args:
        source: A model, or a function from prompts to predictions; of predictions after every layer the last count.
        prompts: None draws `n_prompts` of the task with `seed`, the same as for every analysis.
        learners: Names in `LEARNERS`. A task with a pool adds dmmse. Prompts whose x or y have a
            mean add ridge and least squares with an intercept.
        context_lengths: Numbers of pairs, from 0; None means all pairs of the prompts. A causal
            model whose tokens come in turn is run once for all of them.
        task: Law of the prompts; None means the model's own. If it is unknown, the penalty of ridge
            is cross-validated over the prompts, for each number of pairs.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
    Raises:
        ValueError: If there is no task to draw prompts from, a learner is unknown, a number of
            pairs is not in 0 to L, there are too few prompts, or all predictions overflow.
    Source:
        He et al. 2025, arXiv 2503.12734, section 4 and eq. (4.12), for gradient steps and kernel
        head. Algorithm 1 is our reading of Chen, Zhao and Zou 2024, arXiv 2408.04532.
    See also:
        `error_curve`, `classify`, `name_algorithm`, `compare_priors`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
        >>> found = compare_learners(debiased_gradient_step(0.88, 0.05, d_x=5))
        >>> found.best, round(float(found.at_trained.factor["debiased_gd"]), 2)
        ('debiased_gd', 0.88)
    """
    require_learners(learners)
    own = law_in_force(source, task, ANALYSIS, prompts)
    used, law = prompts_and_law(
        source,
        prompts,
        analysis=ANALYSIS,
        task=task,
        n_prompts=n_prompts,
        seed=seed,
        context_length=longer(own, context_lengths) if prompts is None else None,
        fitted=2 if any(LEARNERS[name].is_fitted for name in learners) else 0,  # omega and mu
    )
    lengths = require_lengths(context_lengths, used.x.shape[1])
    centre = off_centre(used) if prompts is not None else ""
    names = with_companions(learners, law, intercepts=bool(centre))
    notes = [centre, law_note(law, names)]
    return _Comparison(source, used, law, names).at(lengths, notes)


def longer(law: TaskConfig | None, lengths: Sequence[int] | None) -> int | None:
    """Pairs of drawn prompts if they are more than the task's own; None: the task's own, so that
    shorter prompts are the first pairs of those of every analysis."""
    longest = max(lengths or [0])
    return longest if law is not None and longest > law.context_length else None


def require_learners(learners: Sequence[str]) -> None:
    """Refuse unknown learners.

    Raises:
        ValueError: If there is none, or a name is not in `LEARNERS`.
    """
    if isinstance(learners, str) or not learners or not {*learners} <= LEARNERS.keys():
        got = learners if isinstance(learners, str) else list(learners)
        raise ValueError(f"learners must be a list of {', '.join(LEARNERS)}, got {got!r}.")


def require_lengths(given: Sequence[int] | None, longest: int) -> list[int]:
    """Numbers of pairs, rising; None: that of the prompts.

    Raises:
        ValueError: If a number is not in 0 to the number of pairs of the prompts.
    """
    if given is None:
        return [longest]
    if not len(given) or min(given) < 0 or max(given) > longest:
        raise ValueError(f"context_lengths must lie in 0 to {longest}, got {list(given)}.")
    return sorted({int(length) for length in given})


def with_companions(
    learners: Iterable[str], law: TaskConfig | None, *, intercepts: bool
) -> tuple[str, ...]:
    """Learners, and the Bayes learner of a task with a pool, a drift or several noise levels.

    Args:
        intercepts: True: learners with an intercept are added, too."""
    names = [*learners]
    if law is None and (unknown := [name for name in names if name in FOR_SOME_TASKS]):
        raise ValueError(f"{unknown[0]} needs the law of the prompts: state it by task= (--task).")
    if law is not None:
        names += [name for name, applies in FOR_SOME_TASKS.items() if applies(law)]
    if intercepts:
        names += [name for name, each in LEARNERS.items() if each.without in names]
    return tuple(dict.fromkeys(names))


def off_centre(prompts: Prompts) -> str:
    """Sentence that the mean of x or y is clearly not 0; empty if it is not.

    Example:
        >>> x = torch.randn(8, 5, 2)
        >>> off_centre(Prompts.from_arrays(x, x[..., 0], x[:, 0], x[:, 0, 0])), off_centre(
        ...     Prompts.from_arrays(x + 9, x[..., 0], x[:, 0] + 9, x[:, 0, 0]))[:37]
        ('', 'The mean of x is clearly not 0, so th')
    """
    tokens = {"x": prompts.every_x, "y": prompts.y_of_every_x}
    off = []
    for name, each in tokens.items():
        values = each.double().numpy(force=True)
        mean, sem = mean_and_sem(values.mean(1))
        size = np.sqrt(np.square(values).mean((0, 1)))
        if (np.abs(mean) > np.maximum(OFF_CENTRE * size, CLEARLY_OFF * sem)).any():
            off.append(name)
    if not off:
        return ""
    return (
        f"The mean of {' and of '.join(off)} is clearly not 0, so that ridge and least squares with "
        "an intercept are compared too."
    )


def law_note(law: TaskConfig | None, names: Sequence[str]) -> str:
    """Sentence on the penalty of ridge regression if the law of the prompts is unknown."""
    if law is not None or not set(names) & set(CROSS_VALIDATED):
        return ""
    return (
        "The law of the prompts is unknown: the penalty of ridge is chosen by cross-validation over "
        "prompts, for each number of pairs. State the law by task=."
    )


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A model and learners on given prompts of a law."""

    source: Source | Learner
    prompts: Prompts
    law: TaskConfig | None
    names: Sequence[str]

    def at(self, lengths: Sequence[int], notes: Iterable[str]) -> LearnerComparison:
        """Rows at several numbers of pairs, and means over the trained ones."""
        every = None
        if not is_learner(self.source):
            every = predictor_of(self.source).predict_at_every(self.prompts)
        longest = self.law.context_length if self.law else self.prompts.x.shape[1]
        trained = trained_lengths(self.source, lengths, longest)
        rows, losses, wild = list[dict[str, object]](), dict[int, np.ndarray](), list[int]()
        for length in progress(lengths, "learners at each number of pairs"):
            some = self.prompts.prefix(length)
            own = learner_of(self.source)(some) if every is None else every[:, length]
            if not moderate(own):
                if len(lengths) == 1:
                    require_moderate(own)
                wild.append(length)
                own = torch.full_like(own, torch.nan)
            at_length, losses[length] = rows_at(own, some.to(torch.float64), self.law, self.names)
            note = OVERFLOW if length in wild else ""
            rows += [{"n_pairs": length} | row | {"note": note} for row in at_length]
        if len(wild) == len(lengths):
            require_moderate(torch.tensor(torch.inf))
        kept = [n for n in trained if n not in wild] or [n for n in lengths if n not in wild][-1:]
        return LearnerComparison(
            rows=pd.DataFrame(rows),
            means=mean_losses([losses[n] for n in kept], (MODEL, *self.names)),
            trained=(kept[0], kept[-1]),
            n_prompts=len(self.prompts),
            one_pass=every is not None,
            notes=tuple(filter(None, [*notes, overflow_note(wild)])),
        )


def moderate(predictions: Tensor) -> bool:
    """True if all predictions are finite and their squares do not overflow."""
    return bool(predictions.detach().abs().max() <= LARGEST_PREDICTION)


def overflow_note(lengths: Sequence[int]) -> str:
    """Sentence on the numbers of pairs at which predictions overflow; empty if there are none.

    Example:
        >>> overflow_note([1, 2])
        "The model's predictions overflow after 1, 2 pairs, which have no numbers and enter no mean."
    """
    after = ", ".join(map(str, lengths))
    start = OVERFLOW[0].upper() + OVERFLOW[1:]
    return f"{start} after {after} pairs, which have no numbers and enter no mean." if after else ""


def trained_lengths(source: Source | Learner, lengths: Sequence[int], longest: int) -> list[int]:
    """Numbers of pairs within those of a checkpoint's training; the largest if there are none.

    A model without a known training counts as trained up to `longest`, the task's own number.
    """
    shortest = min(getattr(source, "shortest_trained", None) or 0, longest)
    inside = [length for length in lengths if shortest <= length <= longest]
    return inside or list(lengths[-1:])
