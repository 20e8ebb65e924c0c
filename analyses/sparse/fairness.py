"""Tasks in which a few layers leave Algorithm 1 room to win: its fitted steps compared with those
of GD.

No training. A model of n layers can compute the correlations r in its first layer and n - 1 steps
on R x, or n steps on x. Each step has one size for all prompts, as fixed weights do. The sizes are
fitted on 8,192 prompts and measured on 20,000 others. Standard errors cover both: a jackknife of
the fit over eight blocks is added to the errors of the prompts. If the ratio of the risks is above
0.9, training is not expected to find the published mechanism. For comparison: Algorithm 1 with x
kept (`both`), which a model can also compute, and LISTA with n steps.

Exchanging two steps of descent does not change the result. From equal sizes the gradients therefore
stay equal, and a search never finds that the best sizes differ. Every search here starts from
several rows of distinct sizes, and the best result on the fitted prompts is used. Run: python -m
analyses sparse/fairness (half an hour; --quick half a minute)"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.lib import Measured
from analyses.lib.measured import ROOT
from analyses.sparse.setting import SMALL, WIDE, ratio
from mechinterp import Prompts, TaskConfig
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.training.sweep_file import load_sweep

FIT, SCORED, BLOCKS = 8192, 20_000, 8
SIZES, SPREADS, SECOND = np.geomspace(0.05, 20, 24), (0.5, 1.0, 1.5), 0.05
ORDERS, KEPT = 6, 2
SCREENED = 1024
"""Number of prompts of the first searches."""
Moments = tuple[Tensor, Tensor, Tensor]
"""G = (1/L) X^T X, r = (1/L) X^T y and the task vector of each prompt."""
Path = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function from G, r and a row of numbers per step to task vectors."""
LIMIT = 0.9
PLAN = ROOT / "analyses" / "sweeps" / "sparse_settings.json"
OTHERS = (
    SMALL,
    replace(SMALL, sparsity=2, noise_var=0.1),
    *(replace(WIDE, noise_var=noise) for noise in (0.1, 0.4)),
)
"""Tasks for which no model is trained at present."""
LAYERS = (3, 4)
TASK = ("d_x", "sparsity", "context_length", "nonzeros", "noise_var")


def descent(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after gradient descent on x, w <- w - eta_t (G w - r)."""
    return _descent(gram, r, sizes, torch.ones_like(r))


def algorithm_1(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after gradient descent on R x, w <- w - eta_t R^2 (G w - r)."""
    return _descent(gram, r, sizes, r.square())


def both(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after one step on x, which also computes r, and then steps on x and R x
    together.

    w <- w - (eta_t + kappa_t R^2) (G w - r) with kappa = 0 in the first step: Algorithm 1 with x
    kept."""
    w = sizes[0, 0] * r
    for eta, kappa in sizes[1:]:
        w = w - (eta + kappa * r.square()) * ((gram @ w[..., None])[..., 0] - r)
    return w


def lista(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after steps of descent, each followed by a fitted soft threshold."""
    w = torch.zeros_like(r)
    for eta, threshold in sizes:
        w = w - eta * ((gram @ w[..., None])[..., 0] - r)
        w = w.sign() * (w.abs() - threshold.abs()).relu()
    return w


@dataclass(frozen=True)
class Learner:
    """A path, the number of steps that it lacks compared with layers, and whether steps have a
    second number."""

    path: Path
    fewer: int = 0
    second: bool = False


LEARNERS = {
    "gd": Learner(descent),
    "algorithm": Learner(algorithm_1, fewer=1),
    "both": Learner(both, second=True),
    "lista": Learner(lista, second=True),
}


def fitted(learner: Learner, target: Moments, n_layers: int) -> Tensor:
    """Numbers [step, 1 or 2] with the smallest mean error that searches from distinct starts find.

    The first searches use some of the prompts; the best of them are continued on all prompts."""
    few = tuple(part[:SCREENED] for part in target)
    begins = [_best(learner, group, few)[0] for group in _starts(learner, n_layers)]
    near = _best(learner, [refined(learner, begin, few) for begin in begins], few)[:KEPT]
    return _best(learner, [refined(learner, begin, target) for begin in near], target)[0]


def refined(learner: Learner, begin: Tensor, target: Moments, *, steps: int = 100) -> Tensor:
    """Numbers at the end of an L-BFGS search."""
    sizes = begin.clone().requires_grad_()
    search = torch.optim.LBFGS([sizes], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        loss = risk(learner, sizes, target)
        loss.backward()
        return loss

    search.step(closure)
    return sizes.detach()


def left_out(learner: Learner, sizes: Tensor, target: Moments) -> list[Tensor]:
    """Fitted numbers when each of BLOCKS blocks of the prompts is left out."""
    block = torch.arange(len(target[0])) % BLOCKS
    parts = (tuple(part[block != b] for part in target) for b in range(BLOCKS))
    return [refined(learner, sizes, part, steps=20) for part in parts]


def jackknife(values: Iterable[float]) -> float:
    """Standard error of an estimate from its values without each of several equal blocks.

    Example:
        >>> jackknife([1.0, 3.0])  # the mean of 3 and 1: half of their difference
        1.0
    """
    found = np.array(list(values))
    return float(np.sqrt((len(found) - 1) / len(found) * ((found - found.mean()) ** 2).sum()))


def risk(learner: Learner, sizes: Tensor, target: Moments) -> Tensor:
    return errors(learner.path, sizes, *target).mean()


def errors(path: Path, sizes: Tensor, gram: Tensor, r: Tensor, beta: Tensor) -> Tensor:
    """Excess risk of each prompt, averaged over queries x ~ N(0, 1): |w - beta|^2."""
    return (path(gram, r, sizes) - beta).square().sum(1)


def moments(prompts: Prompts) -> Moments:
    length = prompts.x.shape[1]
    r = (prompts.x.mT @ prompts.y)[..., 0] / length
    return prompts.x.mT @ prompts.x / length, r, prompts.beta[..., 0]


def drawn(task: TaskConfig, n_prompts: int, *, step: int) -> Moments:
    """Moments of prompts in float64; step 0 is for fitting, step 1 for scoring."""
    generator = generator_for(0, "eval", step)
    counts = [min(SCREENED, n_prompts - first) for first in range(0, n_prompts, SCREENED)]
    parts = [
        moments(draw_prompts(task, count, generator=generator, dtype=torch.float64))
        for count in counts
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@cache
def of_task(name: str, task: TaskConfig, n_layers: int, n_prompts: int = FIT) -> Tensor:
    """Numbers of a learner for a task, fitted on prompts that are never scored."""
    return fitted(LEARNERS[name], drawn(task, n_prompts, step=0), n_layers)


def _starts(learner: Learner, n_layers: int) -> Iterator[list[Tensor]]:
    """Distinct sizes around each of SIZES, by spread and order.

    If steps have a second number, the order matters; the second numbers are in reverse order."""
    steps = n_layers - learner.fewer
    orders = list(permutations(range(steps)))
    for spread in SPREADS:
        factors = torch.linspace(-spread, spread, steps, dtype=torch.float64).exp()
        for order in orders[:: max(1, len(orders) // ORDERS)] if learner.second else orders[:1]:
            first, second = factors[list(order)], SECOND * factors.flip(0)[list(order)]
            if not learner.second:
                yield [size * first[:, None] for size in SIZES]
            else:
                yield [torch.stack([size * first, second], dim=1) for size in SIZES]


def _best(learner: Learner, sizes: Iterable[Tensor], target: Moments) -> list[Tensor]:
    """The same numbers, sorted by risk, the smallest first."""
    return sorted(sizes, key=lambda one: risk(learner, one, target).nan_to_num(torch.inf).item())


def _descent(gram: Tensor, r: Tensor, sizes: Tensor, weight: Tensor) -> Tensor:
    w = torch.zeros_like(r)
    for (eta,) in sizes:
        w = w - eta * weight * ((gram @ w[..., None])[..., 0] - r)
    return w


@dataclass(frozen=True)
class Fair:
    """A learner with its fitted numbers for a task."""

    sizes: str
    """Fitted numbers step by step; the second number of a step follows a slash."""
    errors: np.ndarray
    """Excess risk of each measured prompt."""
    without: np.ndarray
    """Mean excess risk with each block of prompts left out of the fit."""

    @property
    def risk(self) -> tuple[float, float]:
        mean, sem = mean_and_sem(self.errors)
        return float(mean), float(np.hypot(sem, jackknife(self.without)))

    def over(self, other: "Fair") -> tuple[float, float]:
        """Ratio of the risks, with its standard error."""
        value, sem = ratio(self.errors, other.errors)
        return value, float(np.hypot(sem, jackknife(self.without / other.without)))


def fair(name: str, n_layers: int, fit: Moments, scored: Moments) -> Fair:
    learner = LEARNERS[name]
    sizes = fitted(learner, fit, n_layers)
    without = [risk(learner, one, scored).item() for one in left_out(learner, sizes, fit)]
    texts = ["/".join(f"{value:.3g}" for value in step) for step in sizes.tolist()]
    found = errors(learner.path, sizes, *scored).numpy()
    return Fair(" ".join(texts), found, np.array(without))


def tasks() -> list[TaskConfig]:
    """Tasks of the plan, each once, and then the others."""
    return list(dict.fromkeys([config.task for config in load_sweep(PLAN).values()] + [*OTHERS]))


def rows(task: TaskConfig, n_fit: int, n_scored: int) -> Iterator[dict[str, object]]:
    """One row per number of layers."""
    fit, scored = (drawn(task, n, step=step) for step, n in enumerate((n_fit, n_scored)))
    law = {name: getattr(task, name) for name in TASK}
    for layers in LAYERS:
        row = law | {"n_layers": layers}
        found = {name: fair(name, layers, fit, scored) for name in LEARNERS}
        for name, one in found.items():
            row[name], row[f"{name}_sem"] = one.risk
        for name in ("algorithm", "both", "lista"):
            row[f"{name}_to_gd"], row[f"{name}_to_gd_sem"] = found[name].over(found["gd"])
        row["expected"] = row["algorithm_to_gd"] <= LIMIT
        yield row | {f"{name}_sizes": one.sizes for name, one in found.items()}
        print(*row.values(), flush=True)


def measure(quick: bool) -> Measured:
    counts = (512, 512) if quick else (FIT, SCORED)
    return Measured(pd.DataFrame([row for task in tasks() for row in rows(task, *counts)]))
