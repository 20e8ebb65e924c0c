"""Figure 5: with softmax instead of linear scores, the loss of merged heads still drops once, and
that of separate heads several times.

Zhang et al. 2025, arXiv 2501.16265, figure 5, which states neither rates nor steps. The setting is
ours: full-batch descent on 1,000 sequences, scores x^T U x_query without a scale, the query among
the keys, value weights on y only; 8 merged heads from N(0, 0.001^2) at rate 0.1, and 5 separate
heads of rank one from N(0, 0.05^2) at rate 0.3.
Run: python -m analyses linear/figure_5_softmax (two minutes; --quick 1 seed)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured, records
from analyses.linear.setting import named, page, task
from mechinterp.theory.linear import Heads, MergedHeads, merged_heads, separate_heads
from mechinterp.training.linear_models import training_set


def descent(start: Heads, *, rate: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses of softmax heads, and their final value weights."""
    (found,) = training_set(task(), 1000, seed=1)
    found = found.to(torch.float32)
    x, y = found.tokens.split([4, 1], dim=-1)
    matrices = (start.U,) if isinstance(start, MergedHeads) else (start.K[:, 0], start.Q[:, 0])
    weights = [torch.from_numpy(one).float().requires_grad_() for one in (start.v, *matrices)]
    losses = []
    for _ in range(steps):
        v, *rest = weights
        if len(rest) == 1:
            keys = torch.einsum("bj,hij->bhi", found.x_query, rest[0])
        else:
            keys = (found.x_query @ rest[1].T)[..., None] * rest[0]
        read = torch.softmax(keys @ x.mT, -1) @ y
        loss = (found.y_query - read[..., 0] @ v[:, None]).square().mean()
        losses.append(loss.item())
        with torch.no_grad():
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= rate * slope
    return np.array(losses), weights[0].detach().numpy()


def drops(losses: np.ndarray) -> tuple[np.ndarray, float]:
    """Steps at which the loss falls fastest (above 5% of the maximum), and the slowest fall between
    the first two."""
    fall = -np.gradient(losses)
    middle = fall[1:-1]
    top = (middle > fall[:-2]) & (middle >= fall[2:]) & (middle > 0.05 * fall.max())
    steps = 1 + np.flatnonzero(top)
    rest = fall[steps[0] : steps[1]].min() / fall[steps[1]] if len(steps) > 1 else 1.0
    return steps, float(rest)


def measure(quick: bool) -> Measured:
    seeds = range(1 if quick else 5)
    starts = [merged_heads(8, 4, std=1e-3, seed=seed) for seed in seeds]
    merged = [descent(heads, rate=0.1, steps=600) for heads in starts]
    starts = [separate_heads(5, 4, std=5e-2, seed=seed) for seed in seeds]
    separate = [descent(heads, rate=0.3, steps=2500) for heads in starts]
    counts = [[len(drops(losses)[0]) for losses, _ in runs] for runs in (merged, separate)]
    rests = [drops(losses)[1] for losses, _ in separate]
    sums = [float(abs(v.sum()) / np.abs(v).sum()) for _, v in merged]
    found = {"merged-drops": counts[0], "merged-sum": sums}
    found |= {"separate-drops": counts[1], "separate-rest": rests}
    asked = {name: named(np.array(one, dtype=float), "seed") for name, one in found.items()}
    steps = np.arange(2500)
    curves = {
        f"{name} heads, seed {seed}": np.pad(
            runs[seed][0], (0, 2500 - len(runs[seed][0])), mode="edge"
        )
        for name, runs in (("merged", merged), ("separate", separate))
        for seed in seeds[:3]
    }
    data = pd.DataFrame({"step": steps} | curves)[::5]
    title = "Training loss of softmax heads, merged and separate, on 1,000 sequences"
    figure = page(steps, curves, title, x_title="step", levels=())
    return Measured(data, {"loss": figure}, records("linear-20-", asked))
