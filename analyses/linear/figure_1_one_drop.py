"""Figure 1: the loss of merged heads drops once, as in the equivalent two-layer network on z =
vec(b x_query^T).

Zhang et al. 2025, arXiv 2501.16265, figure 1, in the setting of the published code: 8 heads, 5,000
sequences, full-batch descent at rate 0.001 without 1/N, weights from N(0, 1e-6^2). The paper's
numbers are read from an image.
Run: python -m analyses linear/figure_1_one_drop (seconds; --quick 4 flows instead of 40)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured, Record, record, records
from analyses.lib.plateaus import drops
from analyses.lib.records import span
from analyses.lib.theory.linear_dynamics import learning_rate_time
from analyses.linear import setting as at
from mechinterp import Prompts
from mechinterp.theory.linear import MergedHeads, merged_heads
from mechinterp.training.linear import full_batch_descent
from mechinterp.training.linear_models import sample_moments, training_set

TAU, FACTOR = learning_rate_time(1e-3, n_factors=2, context_length=at.LENGTH)
STEPS, EVERY, SETS = 6000, 20, 10


def products(prompts: Prompts) -> torch.Tensor:
    """z = vec(b x_query^T), [prompt, 16]."""
    b = torch.einsum("bnd,bn->bd", prompts.x, prompts.y[..., 0]) / at.LENGTH
    return torch.einsum("bi,bj->bij", b, prompts.x_query).flatten(1)


def explicit(prompts: Prompts, heads: MergedHeads) -> torch.Tensor:
    """Last entry of sum_i W_V X X^T W_KQ X / N, computed from whole token matrices."""
    X, y_hat = prompts.tokens.mT, torch.zeros(len(prompts), dtype=torch.float64)
    for v, U in zip(heads.v, heads.U, strict=True):
        W_V, W_KQ = torch.zeros(2, 5, 5, dtype=torch.float64)
        W_V[4, 4], W_KQ[:4, :4] = v, torch.from_numpy(U)
        y_hat = y_hat + (W_V @ X @ X.mT @ W_KQ @ X)[:, 4, -1] / at.LENGTH
    return y_hat


def network(prompts: Prompts, heads: MergedHeads) -> np.ndarray:
    """Losses of the network w_2^T W_1 z, trained on the prompts by automatic differentiation."""
    z, y, losses = products(prompts), prompts.y_query, []
    layers = [torch.from_numpy(part).reshape(8, -1).clone() for part in (heads.U, heads.v)]
    for _ in range(STEPS + 1):
        w_1, w_2 = (layer.requires_grad_() for layer in layers)
        loss = (y - z @ w_1.T @ w_2).square().mean()
        losses.append(loss.item())
        slopes = zip(layers, torch.autograd.grad(loss, layers), strict=True)
        layers = [(weight - slope / (2 * TAU)).detach() for weight, slope in slopes]
    return np.array(losses)[::EVERY]


def published(name: str, paper: float, ours: list[float], show: str) -> Record:
    """Record that compares a number read from a figure with those of our training sets."""
    part = {"part": float(np.mean(np.array(ours) < paper))}
    return record(f"linear-merged-{name}", part, text=f"{paper} among {span(ours, show)}")


def measure(quick: bool) -> Measured:
    options = {"learning_rate": 1 / (2 * TAU), "steps": STEPS, "every": EVERY}
    start = [merged_heads(8, 4, std=1e-6 * FACTOR, seed=seed) for seed in range(SETS)]
    sets = [at.set_moments(5000, seed) for seed in range(SETS)]
    runs = [full_batch_descent(*one, at.FOUND, **options) for one in zip(start, sets, strict=True)]
    (few,), large = training_set(at.task(), 500, seed=1), merged_heads(8, 4, std=1.0, seed=0)
    alone = full_batch_descent(
        start[0], sample_moments([few], basis=np.eye(4)), at.FOUND, **options
    )
    beside, y_hat = network(few, start[0]), explicit(few, large)
    same = abs(beside / alone.loss - 1).max()
    reduced = products(few).numpy() @ large.U.reshape(8, -1).T @ large.v
    off = np.abs(reduced - y_hat.numpy()).max() / float(y_hat.abs().max())
    starts = range(2 if quick else 20)
    flows = [[at.trained(merged_heads(8, 4, std=s, seed=i)) for s in at.INITS] for i in starts]
    counts = [[len(drops(one)) for one in row] for row in flows]
    ends = [[abs(one.loss[-1] - at.FOUND.levels[-1]) for one in row] for row in flows]
    steps = runs[0].time * TAU
    asked = {
        "1-explicit": {"500 prompts": off},
        "1-network": {f"{STEPS} steps": same},
        "5-merged-drops": at.named(np.array(counts), "seed", "init"),
        "5-merged-end": at.named(np.array(ends), "seed", "init"),
    }
    middle = published("middle", 990, [at.half_time(one) * TAU for one in runs], ".0f")
    claims = [*records("linear-", asked), middle]
    claims += [
        published(f"loss{at}", paper, [np.interp(at, steps, one.loss) for one in runs], ".3f")
        for at, paper in ((2000, 0.165), (4000, 0.136))
    ]
    curves = {"merged heads": alone.loss, "network on z": beside}
    curves |= {f"training set {i}": one.loss for i, one in enumerate(runs[:4])}
    title = "Merged heads and the network on z (500 sequences); sets of 5,000; L(M*) dotted"
    figure = at.page(steps, curves, title, x_title="step", levels=at.FOUND.levels[-1:])
    return Measured(pd.DataFrame({"step": steps} | curves), {"loss": figure}, claims)
