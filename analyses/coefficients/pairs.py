"""Number of directions in which the loss of softmax heads is curved, and its change while the
pattern forms.

A head without biases is its two circuits: the x rows of QK and the y column of OV, d (d + 1) + d +
1 numbers. At a minimum, half the number of curved directions is the learning coefficient. In the
paper's approximate loss two heads are four numbers, omega_1, omega_2, mu_1, mu_2, and can be
sampled.
Run: python -m analyses coefficients/pairs (a minute; --quick: one step, few prompts)"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.lib import SETTING, Measured, checkpoint
from analyses.lib.theory.approximate_loss import approximate_loss, loss_gradients, optimal_mu
from mechinterp import Prompts
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.analysis.training.learning_coefficient import local_learning_coefficient
from mechinterp.analysis.training.sampler import NBETA, Chains, LocalLoss
from mechinterp.config import override
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import Pack

STEPS = {"softmax-h1-s0": (500_000,), "softmax-h2-s0": (0, 1000, 500_000)}
EARLY = range(0, 1001, 100)
"""Steps before the first saved one, trained anew: batches depend on (data seed, step) only."""
DRAWN = (500_000,)
"""Steps whose omega are used to sample the approximate loss."""
N_PROMPTS, N_SETS = 2048, 3
"""Number of prompts in a set, and number of sets for the curvatures."""
RESOLVED = 100 / NBETA
"""Curvature above which a direction counts as 1/2 to within 1%, at n_beta 30,000 and a pull of 1.
"""
CHAINS = Chains(n_chains=8, n_draws=1000, n_warmup=300, n_leapfrog=60)
SHORT = Chains(n_chains=2, n_draws=20, n_warmup=10, n_leapfrog=10)


def curvatures(weights: Weights, prompts: Prompts) -> np.ndarray:
    """Eigenvalues of the Hessian of the loss in the circuits of all heads, smallest first."""
    heads = weights.to(torch.float64)
    QK, OV = heads.QK[:, : heads.d_x], heads.OV[:, :, 0]
    tokens = torch.cat([prompts.x, prompts.y], 2)

    def loss(flat: Tensor) -> Tensor:
        qk, ov = flat[: QK.numel()].view_as(QK), flat[QK.numel() :].view_as(OV)
        scores = torch.einsum("bi,hij,blj->bhl", prompts.x_query, qk, tokens)
        predicted = torch.einsum("bhl,hj,blj->b", scores.softmax(2), ov, tokens)
        return (predicted - prompts.y_query[:, 0]).square().mean()

    at = torch.cat([QK.flatten(), OV.flatten()]).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
    rows = [torch.autograd.grad(entry, at, retain_graph=True)[0] for entry in gradient]
    second = torch.stack(rows)
    return torch.linalg.eigvalsh((second + second.T) / 2).numpy()


def circuits(
    name: str, step: int, weights: Weights, n_sets: int, n_prompts: int
) -> dict[str, object]:
    """Number of curved directions of a model's circuits, on independent sets of prompts."""
    task = checkpoint(name).task
    sets = [
        curvatures(weights, draw_prompts(task, n_prompts, seed=seed, dtype=torch.float64))
        for seed in range(n_sets)
    ]
    values = np.array(sets)
    mean, sem = mean_and_sem(values)
    return {
        **{"part": "circuits", "model": name, "step": step, "numbers": values.shape[1]},
        "curved": int(np.median((values > RESOLVED).sum(1))),
        "negative": int(np.median((values < -RESOLVED).sum(1))),
        **{"second": mean[1], "least": mean[0], "least_sem": sem[0]},
    }


def early(name: str, steps: range, n_sets: int, n_prompts: int) -> list[dict[str, object]]:
    """Number of curved directions while the pattern forms, with the state of the pattern."""
    settings = ("steps", steps[-1]), ("snapshot_every", steps.step), ("log_every", steps.step)
    config = override(checkpoint(name).config, *(f"train.{key}={value}" for key, value in settings))
    pack = Pack({name: config})
    while not pack.finished:
        pack.advance()
    trained = pack.results()[name]
    rows = []
    for step in steps:
        heads = trained.history[trained.history.step == step]
        rows.append(
            circuits(name, step, trained.snapshots[step], n_sets, n_prompts)
            | {"part": "early", "omega": heads.omega.abs().mean()}
            | {"qk_diagonal": heads.qk_diagonal.min(), "eval_loss": heads.eval_loss.mean()}
            | {"signs_differ": bool(np.prod(heads.omega) < 0)}
        )
    return rows


def closed_form(omega: np.ndarray, *, held: bool) -> LocalLoss:
    """Approximate loss of two heads at the best mu for these omega; omega_1 is fixed if `held`,
    else all four are free."""
    first = 1 if held else 0
    mu = optimal_mu(omega, **SETTING)

    def function(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        full = np.concatenate([np.tile(omega[:first], (len(points), 1)), points], 1)
        values = [approximate_loss(row[:2], row[2:], **SETTING) for row in full]
        slopes = [np.concatenate(loss_gradients(row[:2], row[2:], **SETTING)) for row in full]
        return np.array(values), np.array(slopes)[:, first:]

    at = np.concatenate([omega, mu])[first:]
    return LocalLoss(function, at, f"{len(at)} numbers", "the approximate loss")


def pairs(name: str, step: int, chains: Chains) -> list[dict[str, object]]:
    """Coefficient of the approximate loss at the omega of a step, with all four numbers and with
    omega_1 fixed."""
    history = checkpoint(name).history
    omega = history[history.step == step].sort_values("head").omega.to_numpy(np.float64)
    rows = []
    for held in (False, True):
        found = local_learning_coefficient(
            closed_form(omega, held=held), settle=held, chains=chains
        )
        measured = {key: getattr(found, key) for key in ("estimate", "sem", "fall", "moved")}
        what = {"part": "omega_1 held" if held else "all four", "model": name, "step": step}
        rows.append(what | {"omega": np.abs(omega).mean(), "numbers": 4 - held} | measured)
    return rows


def measure(quick: bool) -> Measured:
    chosen = {"softmax-h2-s0": (500_000,)} if quick else STEPS
    n_sets, n_prompts = (2, 128) if quick else (N_SETS, N_PROMPTS)
    rows = []
    for name, steps in chosen.items():
        model = checkpoint(name)
        for step in steps:
            weights = model.snapshots.get(step, model.weights)
            rows.append(circuits(name, step, weights, n_sets, n_prompts))
        for step in set(steps) & set(DRAWN) if "h2" in name else ():
            rows += pairs(name, step, SHORT if quick else CHAINS)
    rows += early("softmax-h2-s0", EARLY[:2] if quick else EARLY, n_sets, n_prompts)
    return Measured(pd.DataFrame(rows))
