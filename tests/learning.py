"""More minima of linear attention that are made by hand, a saddle and curved directions, for tests of the learning
coefficient."""

import numpy as np

from mechinterp.analysis.training.sampler import LocalLoss
from mechinterp.theory.linear import MergedHeads, Moments, SeparateHeads, modes


def saddle(moments: Moments, n_heads: int) -> SeparateHeads:
    """The first direction learned by head 0; all other weights are 0, and so is the gradient."""
    found = modes(moments)
    heads = SeparateHeads(
        v=np.zeros(n_heads),
        K=np.zeros((n_heads, 1, len(moments.yz))),
        Q=np.zeros((n_heads, 1, len(moments.yz))),
    )
    heads.v[0] = found.targets[0]
    heads.K[0] = heads.Q[0] = found.vectors[:, 0]
    return heads


def merged_at(moments: Moments, n_heads: int) -> MergedHeads:
    """Merged heads at the minimum, which share it."""
    shares = np.random.default_rng(0).uniform(0.5, 1.5, n_heads)
    U = shares[:, None, None] * moments.minimiser() / shares.sum()
    return MergedHeads(v=np.ones(n_heads), U=U)


def curved_directions(loss: LocalLoss) -> int:
    """Rank of the Hessian, from central differences of the gradient."""
    step, eye = 1e-5, np.eye(loss.at.size)
    up, down = (loss.function(loss.at + sign * step * eye)[1] for sign in (1, -1))
    values = np.linalg.svd((up - down) / (2 * step), compute_uv=False)
    return int((values > 1e-6 * values[0]).sum())
