"""Where few layers leave Algorithm 1 anything to win: its fitted steps against those of GD.

No training. A model of n layers has room for the correlations r in its first layer and n - 1 steps
on R x, or for n steps on x. Each step has one size for all prompts, as fixed weights have it,
fitted on some prompts and measured on others; errors are averaged over the query exactly. Where
the ratio of the risks is above 0.9, the published mechanism is not expected of training. Beside
it: Algorithm 1 with x kept (`both`), which a model can do, too, and LISTA with n steps.
Run: python analyses/sparse_fairness.py (five minutes; --quick seconds)
"""

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import torch
from measured import ROOT, Measured, run
from sparse_setting import draw, ratio
from torch import Tensor

from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.training.sweep import load_sweep

LIMIT = 0.9
PLAN = ROOT / "analyses" / "sweeps" / "sparse_settings.json"
OTHERS = (
    TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4),
    TaskConfig(d_x=16, context_length=40, sparsity=2, nonzeros="signs", noise_var=0.1),
    TaskConfig(d_x=16, context_length=40, sparsity=1, nonzeros="signs", noise_var=0.4),
    TaskConfig(d_x=16, context_length=40, sparsity=1, nonzeros="signs", noise_var=0.8),
    TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.1),
    TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.4),
)
"""Tasks of which no model is trained now."""
LAYERS = (3, 4)
STARTS, SECOND = np.geomspace(0.05, 20, 32), 0.05
Path = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Moments G and correlations r of the contexts, and a row of numbers per step, to task vectors."""


def descent(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after gradient descent on x, w <- w - eta_t (G w - r)."""
    return _descent(gram, r, sizes, torch.ones_like(r))


def algorithm_1(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after gradient descent on R x, w <- w - eta_t R^2 (G w - r)."""
    return _descent(gram, r, sizes, r.square())


def both(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after one step on x, beside which r is formed, then steps on x and R x at once.

    w <- w - (eta_t + kappa_t R^2) (G w - r) with kappa = 0 in the first: Algorithm 1 with x kept.
    """
    w = sizes[0, 0] * r
    for eta, kappa in sizes[1:]:
        w = w - (eta + kappa * r.square()) * ((gram @ w[..., None])[..., 0] - r)
    return w


def lista(gram: Tensor, r: Tensor, sizes: Tensor) -> Tensor:
    """Task vectors after steps of descent, each followed by a soft threshold, fitted too."""
    w = torch.zeros_like(r)
    for eta, threshold in sizes:
        w = w - eta * ((gram @ w[..., None])[..., 0] - r)
        w = w.sign() * (w.abs() - threshold.abs()).relu()
    return w


def fitted(path: Path, prompts: Prompts, steps: int, *, second: bool = False) -> Tensor:
    """The numbers of each step with the least mean error, by L-BFGS from the best shared ones.

    Args:
        second: Whether a step has a number beside its size.
    """
    target = moments(prompts)

    def risk(sizes: Tensor) -> Tensor:
        return errors(path, sizes, *target).mean()

    rest = [SECOND] * second
    starts = [torch.tensor([[eta, *rest]] * steps, dtype=torch.float64) for eta in STARTS]
    sizes = min(starts, key=lambda start: risk(start).nan_to_num(torch.inf)).requires_grad_()
    search = torch.optim.LBFGS([sizes], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        loss = risk(sizes)
        loss.backward()
        return loss

    search.step(closure)
    return sizes.detach()


def moments(prompts: Prompts) -> tuple[Tensor, Tensor, Tensor]:
    """G = (1/L) X^T X, r = (1/L) X^T y and the task vector."""
    length = prompts.x.shape[1]
    r = (prompts.x.mT @ prompts.y)[..., 0] / length
    return prompts.x.mT @ prompts.x / length, r, prompts.beta[..., 0]


def errors(path: Path, sizes: Tensor, gram: Tensor, r: Tensor, beta: Tensor) -> Tensor:
    """Excess risk of each prompt, the mean over queries x ~ N(0, 1): |w - beta|^2."""
    return (path(gram, r, sizes) - beta).square().sum(1)


def tasks() -> list[TaskConfig]:
    """Those of the plan, each once, then the others."""
    return list(dict.fromkeys([config.task for config in load_sweep(PLAN).values()] + [*OTHERS]))


def rows(task: TaskConfig, n_prompts: int) -> Iterator[dict[str, object]]:
    """One row per number of layers."""
    prompts = draw(task, 2 * n_prompts)
    fit, measured = prompts[:n_prompts], moments(prompts[n_prompts:])
    names = ("d_x", "sparsity", "context_length", "nonzeros", "noise_var")
    for layers in LAYERS:
        found = {
            "gd": (descent, fitted(descent, fit, layers)),
            "algorithm": (algorithm_1, fitted(algorithm_1, fit, layers - 1)),
            "both": (both, fitted(both, fit, layers, second=True)),
            "lista": (lista, fitted(lista, fit, layers, second=True)),
        }
        risks = {name: errors(*one, *measured).numpy() for name, one in found.items()}
        row = {name: getattr(task, name) for name in names} | {"n_layers": layers}
        for name, values in risks.items():
            risk, sem = mean_and_sem(values)
            row |= {name: float(risk), f"{name}_sem": float(sem)}
        for name in ("algorithm", "both", "lista"):
            value, sem = ratio(risks[name], risks["gd"])
            row |= {f"{name}_to_gd": value, f"{name}_to_gd_sem": sem}
        yield row | {"expected": row["algorithm_to_gd"] <= LIMIT}


def measure(quick: bool) -> Measured:
    table = []
    for task in tasks():
        n_prompts = 64 if quick else min(4096, 2**16 // task.d_x)
        table += rows(task, n_prompts)
    return Measured(pd.DataFrame(table))


def _descent(gram: Tensor, r: Tensor, sizes: Tensor, weight: Tensor) -> Tensor:
    w = torch.zeros_like(r)
    for (eta,) in sizes:
        w = w - eta * weight * ((gram @ w[..., None])[..., 0] - r)
    return w


if __name__ == "__main__":
    run(measure, __file__)
