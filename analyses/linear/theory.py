"""Moments, loss and force of linear attention in closed form, compared with samples and automatic
differentiation.

Zhang et al. 2025, arXiv 2501.16265, eq. (15) and section 3; no figure shows them.
Run: python -m analyses linear/theory (half a minute; --quick fewer sequences)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured, record
from analyses.lib.theory.linear import moment_ratio
from analyses.linear.setting import EIGENVALUES, LENGTH, MOMENTS, TURNED, named, set_moments, task
from mechinterp.training.linear_models import training_set

NAMES = ("E[y z]", "E[z z^T]", "E[Lhat^2]")


def moment_errors(n_sequences: int) -> list[float]:
    """Relative distance of sampled E y z, E z z^T and E[Lhat^2] from the closed forms."""
    scale, ratio = np.array(EIGENVALUES), moment_ratio(np.array(EIGENVALUES), context_length=LENGTH)
    x = np.random.default_rng(0).standard_normal((n_sequences // 4, LENGTH, 4)) * np.sqrt(scale)
    gram, sampled = np.matmul(x.mT, x) / LENGTH, set_moments(n_sequences)
    square = ((gram @ gram).mean(0), np.diag(scale**2 * ratio))
    pairs = ((sampled.yz, MOMENTS.yz), (sampled.zz, MOMENTS.zz), square)
    return [float(np.linalg.norm(ours - exact) / np.linalg.norm(exact)) for ours, exact in pairs]


def loss_errors(M: np.ndarray, n_sequences: int) -> dict[str, float]:
    """Distances of the sampled loss and force from the closed forms, in standard errors."""
    (prompts,) = training_set(task(), n_sequences, seed=1, chunk=n_sequences)
    b = torch.einsum("bnd,bn->bd", prompts.x, prompts.y[..., 0]).numpy() / LENGTH
    z = np.einsum("bi,bj->bij", b, prompts.x_query.numpy())
    rest, root = prompts.y_query[:, 0].numpy() - np.einsum("bij,ij->b", z, M), np.sqrt(n_sequences)
    square, pull = rest**2, rest[:, None, None] * z
    force = (pull.mean(0) - MOMENTS.gradient(M)) / pull.std(0) * root
    loss = abs(square.mean() - MOMENTS.loss(M)) / square.std() * root
    return {"loss": loss} | named(np.abs(force), "row", "column")


def autograd_error(M: np.ndarray) -> float:
    """Largest difference between the force and minus half the derivative of the loss, in axes that
    mix directions."""
    weight = torch.tensor(M, requires_grad=True)
    yz, zz = torch.from_numpy(TURNED.yz), torch.from_numpy(TURNED.zz)
    loss = TURNED.yy - 2 * (yz * weight).sum() + torch.einsum("ij,ijkl,kl->", weight, zz, weight)
    (slope,) = torch.autograd.grad(loss, weight)
    return float(np.abs(slope.numpy() / 2 + TURNED.gradient(M)).max())


def measure(quick: bool) -> Measured:
    n_sequences, M = 100_000 if quick else 400_000, np.random.default_rng(0).standard_normal((4, 4))
    moments = dict(zip(NAMES, moment_errors(n_sequences), strict=True))
    sampled, exact = loss_errors(M, n_sequences // 4), autograd_error(M)
    claims = [
        record("linear-2-moments", moments, over={"sequences": n_sequences}),
        record("linear-3-sampled", sampled, over={"sequences": n_sequences // 4}),
        record("linear-3-derivative", {"M": exact}),
    ]
    values = [*moments.values(), *sampled.values(), exact]
    units = ["relative"] * 3 + ["standard errors"] * len(sampled) + ["absolute"]
    names = [*moments, *sampled, "force beside the derivative"]
    return Measured(pd.DataFrame({"quantity": names, "error": values, "unit": units}), {}, claims)
