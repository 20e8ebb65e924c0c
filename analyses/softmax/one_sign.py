"""Pairs of heads that ended with one sign: not one head split in two, but two that turn against
each other.

Not asked by He et al. 2025, arXiv 2503.12734. QK_h = omega_h (I + A_h) on x with A_h antisymmetric;
the sum weighted by mu omega is what the two compute together. Run: python -m analyses softmax/one_sign (a minute; --quick fewer prompts)
"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, checkpoint, record
from analyses.softmax.setting import label, several, single
from mechinterp import TaskConfig, circuits
from mechinterp.analysis.learners.losses import shared_losses


def twists(name: str) -> np.ndarray:
    """A_h: what QK has beside a multiple of the identity, over that multiple, [head, x, x]."""
    found = circuits(checkpoint(name))
    omega = found.omega_mean[:, None, None]
    return found.QK[:, :5, :5] / omega - np.eye(5)


def measure(quick: bool) -> Measured:
    names = [n for n in several() if label(n).pattern == "kernel_regression"]
    n_prompts, rows = 2_000 if quick else 200_000, []
    for name in names:
        first, second = twists(name)
        sizes = np.linalg.norm([first, second], axis=(1, 2))
        found = circuits(checkpoint(name))
        weight = found.mu[:, 0] * found.omega_mean
        left = np.linalg.norm((weight[:, None, None] * twists(name)).sum(0))
        (sign,) = set(label(name).labels)
        one = next(other for other in single() if label(other).labels == (sign,))
        models = {one: checkpoint(one), name: checkpoint(name)}
        losses = shared_losses(models, TaskConfig(), n_prompts=n_prompts, seed=1)
        row = {"model": name, "cosine": (first * second).sum() / sizes.prod()}
        row |= {"size_ratio": sizes.max() / sizes.min(), "left": left / (abs(weight) * sizes).sum()}
        rows.append(row | {"gap": losses.gap[0, 1], "gap_sem": losses.gap_sem[0, 1]})
    data = pd.DataFrame(rows)
    values, over = data.set_index("model"), {"prompts": n_prompts}
    claims = [
        record("softmax-one-sign-opposite", values.cosine),
        record("softmax-one-sign-loss", values.gap, errors=values.gap_sem, over=over),
    ]
    return Measured(data, claims=claims)
