"""Best forgetting of learners along the pairs against the drift rho of the task, and their excess risk beside the Kalman filter.

Every learner is linear in y, and y and the target are jointly Gaussian given x, so that the risk at given covariates is in
closed form; it is averaged over prompts' covariates. The two scalars of each learner minimise it. d_x 4, 20 pairs, beta_var 1,
noise .1.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize

from analyses.lib.measured import Measured
from mechinterp import Prompts, TaskConfig
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import draw_prompts

TASK = TaskConfig(d_x=4, context_length=20, beta_var=1.0, noise_var=0.1)
RHOS = (1.0, 0.99, 0.98, 0.95, 0.9, 0.8, 0.5)
N_PROMPTS, QUICK = 512, 64
STARTS = {
    "forgetting_gd": (0.8, 0.95),
    "online_gd": (0.15, 0.98, 0.2),
    "recursive_least_squares": (0.95, 0.3),
}
"""First scalars of each learner at rho 1; at other rho, those of the last one."""
FORGETTING = {"forgetting_gd": "alpha", "online_gd": "gate", "recursive_least_squares": "alpha"}
"""Scalar of each learner by which older pairs count less."""


def covariances(prompts: Prompts, rho: float, task: TaskConfig) -> tuple[torch.Tensor, ...]:
    """Covariances given x: of y [batch, L, L], of y with the target [batch, L], and variance of the target [batch]."""
    places = torch.arange(task.context_length + 1, dtype=torch.float64)
    every = prompts.every_x
    signal = rho ** (places[:, None] - places).abs() * task.beta_variance * (every @ every.mT)
    noise = task.noise_variance * torch.eye(task.context_length, dtype=torch.float64)
    return signal[:, :-1, :-1] + noise, signal[:, :-1, -1], signal[:, -1, -1]


def risk(weights: torch.Tensor, law: tuple[torch.Tensor, ...]) -> float:
    """Mean excess risk of predictions that weigh the y of the pairs by `weights` [batch, L]."""
    of_y, with_target, of_target = law
    square = ((weights[:, None] @ of_y)[:, 0] * weights).sum(1)
    return float((square - 2 * (weights * with_target).sum(1) + of_target).mean())


def weights_of(learner: Algorithm, prompts: Prompts, scalars: np.ndarray) -> torch.Tensor:
    """Weight of each pair in the prediction of a learner that is linear in y."""
    n = prompts.x.shape[1]
    unit = torch.eye(n, dtype=torch.float64).expand(len(prompts), -1, -1)
    moments = PromptMoments(replace(prompts, y=unit), TASK)
    return learner.predictions(moments, scalars.tolist(), 1)[-1]


def best(
    learner: Algorithm, prompts: Prompts, law: tuple[torch.Tensor, ...], start: np.ndarray
) -> tuple[np.ndarray, float]:
    """Scalars of a learner with the smallest excess risk, and that risk; searched on the log scale, with factors per pair of
    at most 1."""

    def loss(logs: np.ndarray) -> float:
        return risk(weights_of(learner, prompts, np.exp(logs)), law)

    factor = FORGETTING[str(learner.label)]
    bounds = [(None, 0.0 if name == factor else None) for name in learner.names(1)]
    options = {"xatol": 1e-3, "fatol": 1e-6, "maxiter": 400}
    found = minimize(loss, np.log(start), method="Nelder-Mead", bounds=bounds, options=options)
    return np.exp(found.x), float(found.fun)


def measure(quick: bool) -> Measured:
    """A row for each rho and learner."""
    prompts = draw_prompts(TASK, QUICK if quick else N_PROMPTS, seed=0, dtype=torch.float64)
    by_label = {each.label: each for each in ALGORITHMS}
    starts = {label: np.array(start) for label, start in STARTS.items()}
    rows = []
    for rho in (1.0, 0.95) if quick else RHOS:
        law = covariances(prompts, rho, TASK)
        of_y, with_target, _ = law
        bayes = torch.linalg.solve(of_y, with_target[..., None])[..., 0]
        penalty = np.array([TASK.posterior_penalty])
        ridge = weights_of(by_label["ridge_like"], prompts, penalty)
        fixed = {"kalman": bayes, "ridge": ridge, "zero": torch.zeros_like(ridge)}
        for name, weights in fixed.items():
            rows.append({"rho": rho, "learner": name, "risk": risk(weights, law)})
        for label in STARTS:
            learner = by_label[label]
            starts[label], least = best(learner, prompts, law, starts[label])
            scalars = dict(zip(learner.names(1), starts[label], strict=True))
            row = {"rho": rho, "learner": label, "risk": least, **scalars}
            rows.append({**row, "forgetting": scalars[FORGETTING[label]]})
    return Measured(pd.DataFrame(rows))
