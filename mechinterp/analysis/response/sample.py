"""Model, prompts and settings that the measurements of a response share, and the arrays that they use."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from mechinterp.analysis.response.beside import bayes_of
from mechinterp.analysis.response.pair_weights import function_of, pair_weights, values
from mechinterp.analysis.response.projection import GROUPS, FewPromptsError, PromptArrays
from mechinterp.analysis.stats import require_moderate
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner, Source, is_learner, predictor_of

LEAST_DISTINCT = 2 * GROUPS
"""Smallest number of distinct prompts: two in each group of the jackknife."""
LEAST_EFFECTIVE = 30
"""Smallest effective number of prompts, (sum f^2)^2 / sum f^4. Below it a few prompts decide all numbers."""
LEAST_NOISE = 1e-6
"""Smallest noise of the metric of y given x, as a fraction of E y^2."""


@dataclass(frozen=True, eq=False)
class Measuring:
    """Model, prompts and settings that all measurements of a response share."""

    source: Source
    function: Learner
    prompts: Prompts
    group: np.ndarray
    """Group of each prompt."""
    law: TaskConfig | None
    bayes: Learner | None
    by_gradient: bool
    drifts: bool
    """True: Gaussian task vectors that change from pair to pair, and one noise level."""
    coordinates: str | np.ndarray | None
    n_layers: int
    """Number of layers after which the filter is measured; 0 without them."""
    descents: int
    """Number of steps of the descent beside the model."""
    seed: int

    @property
    def sums_follow_law(self) -> bool:
        """True: the sum of two y is again a response of the task, up to its size."""
        return self.by_gradient or self.drifts

    @classmethod
    def of(
        cls,
        source: Source | Learner,
        prompts: Prompts,
        law: TaskConfig | None,
        by: str,
        coordinates: str | np.ndarray | None,
        layers: bool,
        seed: int,
    ) -> "Measuring":
        function = function_of(source)
        depth = 1 if is_learner(source) else predictor_of(source).n_layers
        # The metric of the gradients is that of Gaussian y given x with one task vector and one noise level.
        normal = (
            law is not None
            and law.n_tasks is None
            and law.sparsity is None
            and len(law.noise_levels) == 1
        )
        gaussian = normal and law is not None and law.drift == 1
        return cls(
            source=source,
            function=function,
            prompts=prompts,
            group=_groups(prompts),
            law=law,
            bayes=None if law is None else bayes_of(law),
            by_gradient=gaussian if by == "auto" else by == "gradient",
            drifts=normal and not gaussian,
            coordinates=coordinates,
            n_layers=depth if layers else 0,
            descents=depth,
            seed=seed,
        )


def _groups(prompts: Prompts) -> np.ndarray:
    """Group of each prompt.

    Raises:
        FewPromptsError: If there are fewer than 64 prompts.
    """
    n = len(prompts)
    if n < LEAST_DISTINCT:
        raise FewPromptsError(
            f"response needs {LEAST_DISTINCT} distinct prompts (n_prompts), got {n}."
        )
    return np.arange(n) % GROUPS


def sample_of(
    setting: Measuring, function: Learner, output: int, *, weights: bool = True
) -> PromptArrays:
    """Prompts as arrays with the predictions of a function and the weights of the pairs."""
    prompts, law = setting.prompts, setting.law
    y = prompts.y[..., output].double().numpy(force=True)
    if not prompts.x.any():
        raise ValueError("response needs an x other than 0 among the pairs, got 0 alone.")
    f = values(function, prompts, output)
    require_moderate(torch.from_numpy(f))
    size = float(np.square(y).mean())
    noise = 0.0 if law is None else law.noise_variance
    x = prompts.x.double().numpy(force=True)
    noise_var = max(noise, LEAST_NOISE * size)
    return PromptArrays(
        x=x,
        y=y,
        x_query=prompts.x_query.double().numpy(force=True),
        f=f,
        f_reversed=values(function, replace(prompts, y=-prompts.y), output),
        a=pair_weights(function, prompts, output) if weights else np.zeros_like(y),
        group=setting.group,
        beta_var=max(size - noise_var, 0.0) / float(np.square(x).sum(2).mean()),
        noise_var=noise_var,
        by_gradient=setting.by_gradient and weights,
    )


def require_effective(f: np.ndarray) -> float:
    """Effective number of prompts.

    Raises:
        FewPromptsError: If all predictions are 0, or fewer than 30 prompts are effective.
    """
    squares = np.square(f)
    if not squares.any():
        raise FewPromptsError("response needs predictions that are not all 0.")
    scaled = squares / squares.max()
    effective = float(scaled.sum() ** 2 / np.square(scaled).sum())
    if effective < LEAST_EFFECTIVE:
        raise FewPromptsError(
            f"response needs {LEAST_EFFECTIVE} effective prompts, (sum f^2)^2 / sum f^4, got "
            f"{effective:.1f}: a few prompts decide all numbers. Leave out those with the "
            "largest x by trim=0.05, or draw more (n_prompts=)."
        )
    return effective
