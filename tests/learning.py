"""Minima of linear attention that are made by hand, for tests of the learning coefficient."""

import numpy as np

from mechinterp.analysis.training.local_losses import LocalLoss
from mechinterp.theory.linear import Moments, fixed_point, modes, population_moments
from mechinterp.theory.linear_heads import MergedHeads, SeparateHeads

SPECTRA = ("distinct", "equal")


def moments_of(d_x: int, spectrum: str) -> Moments:
    """Of x ~ N(0, I), 20 pairs and noise .1, with tasks of distinct or equal variances; d_x 4: those of the fact
    sheet."""
    variances = np.linspace(1, 0.3, d_x) if spectrum == "distinct" else np.full(d_x, 0.6)
    if spectrum == "distinct" and d_x == 4:
        variances = np.array([1, 0.7, 0.5, 0.3])
    return population_moments(
        np.ones(d_x), context_length=20, task_covariance=variances, noise_var=0.1
    )


def heads_at(
    moments: Moments, n_heads: int, rank: int, *, M: np.ndarray | None = None
) -> SeparateHeads:
    """Heads at the minimum, or at a matrix: M = A C cut into heads. Heads that are left over have random keys and no
    queries."""
    d_x, rng = len(moments.yz), np.random.default_rng(0)
    rows = n_heads * rank
    M = fixed_point(modes(moments), range(min(rows, d_x))) if M is None else M
    left, values, right = np.linalg.svd(M)
    m = min(rows, d_x)
    turn = np.linalg.qr(rng.standard_normal((m, m)))[0]
    keys = rng.standard_normal((rows, d_x))
    queries = np.zeros((rows, d_x))
    keys[:m] = turn @ (left[:, :m] * values[:m] ** 0.5).T
    queries[:m] = turn @ (values[:m, None] ** 0.5 * right[:m])
    shape = (n_heads, rank, d_x)
    return SeparateHeads(v=np.ones(n_heads), K=keys.reshape(shape), Q=queries.reshape(shape))


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
