r"""One layer of linear attention: its loss in closed form, and the functions at which training can stop.

The prediction is y_hat = b^T M x_query with b = (1/N) sum_n y_n x_n, so the squared error is quadratic in M and a few
moments determine it. This module gives the moments of a Gaussian task, the fixed points of training, and the losses at
these points. A head adds v_i b^T U_i x_query; U_i is its own matrix or K_i^T Q_i of rank R. The module computes M from
the heads, and their motion under a force on M.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

Covariance = Float[np.ndarray, " d_x"] | Float[np.ndarray, "d_x d_x"]
TaskCovariance = Float[np.ndarray, " d_task"] | Float[np.ndarray, "d_task d_task"]
ROUNDING = 1e-9
"""Moments couple directions if their coupling exceeds this fraction of the largest moment."""
REPEATED = 1e-6
"""Neighbouring eigenvalues closer than this, relative to the larger one, count as repeated."""


@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Second moments of y_query and of z = b x_query^T, as expectations or over a training set."""

    yy: float
    """E y_query^2, unit y^2."""
    yz: Float[np.ndarray, "d_x d_x"]
    """E y_query z."""
    zz: Float[np.ndarray, "d_x d_x d_x d_x"]
    """E z_ij z_kl."""

    def __repr__(self) -> str:
        return f"Moments(d_x={len(self.yz)}, yy={self.yy:.4g})"

    def loss(self, M: Float[np.ndarray, "*stack d_x d_x"]) -> Float[np.ndarray, "*stack"]:
        """Squared error of y_hat = b^T M x_query, unit y^2: yy - 2 <yz, M> + <M, zz M>."""
        return np.asarray(self.yy + _inner(M, self._zz(M) - 2 * self.yz))

    def gradient(
        self, M: Float[np.ndarray, "*stack d_x d_x"]
    ) -> Float[np.ndarray, "*stack d_x d_x"]:
        """G = -(1/2) dL/dM = yz - zz M, the force that training exerts on M."""
        return self.yz - self._zz(M)

    def squared_norm(self, M: Float[np.ndarray, "*stack d_x d_x"]) -> Float[np.ndarray, "*stack"]:
        """E (b^T M x_query)^2. For a difference of two M, the squared distance of their predictions."""
        return _inner(M, self._zz(M))

    def minimiser(self) -> Float[np.ndarray, "d_x d_x"]:
        """M with the smallest loss: zz^-1 yz."""
        return np.linalg.solve(self._square, self.yz.ravel()).reshape(self.yz.shape)

    def _zz(self, M: np.ndarray) -> Float[np.ndarray, "*stack d_x d_x"]:
        """zz M; zz is symmetric."""
        return (M.reshape(*M.shape[:-2], -1) @ self._square).reshape(M.shape)

    @cached_property
    def _square(self) -> Float[np.ndarray, "entry entry"]:
        """zz as a matrix."""
        return self.zz.reshape(self.yz.size, -1)


def population_moments(
    covariance: Covariance,
    *,
    context_length: int | Sequence[int],
    task_covariance: TaskCovariance | None = None,
    noise_var: float = 0.0,
    count_query: bool = False,
) -> Moments:
    r"""Moments of x ~ N(0, Lambda), w ~ N(0, Omega), y_n = w^T x_n + noise, y_query = w^T x_query.

    yy = tr(Omega Lambda), yz = r Lambda Omega Lambda, zz = B (x) Lambda with
    B = r^2 [ (1 + 1/N) Lambda Omega Lambda + (tr(Omega Lambda) + noise_var) Lambda / N ], r = 1.

    Args:
        covariance: Lambda, or its eigenvalues in the basis of the eigenvectors.
        context_length: N. For several lengths, r and B are averages over them.
        task_covariance: Omega = E w w^T, or its diagonal; may be singular; w need not be Gaussian. None: the identity.
        noise_var: Variance of the noise on the context's responses, unit y^2.
        count_query: True: sums are divided by the N + 1 tokens, so that r = N / (N + 1).
    Raises:
        ValueError: If a matrix is not symmetric and positive, a length is below 1 or noise_var below 0.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (15) for E[Lhat^2]; the loss is derived here.
    Example:
        >>> moments = population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31)
        >>> round(float(moments.loss(moments.minimiser())), 10)
        0.1359950716
    """
    # y_query - y_hat = w^T (I - Lhat M) x_query without noise, Lhat = (1/N) sum x x^T; average over x_query,
    # then w. N Lhat is Wishart: E[Lhat Omega Lhat] = (1 + 1/N) Lambda Omega Lambda + tr(Omega Lambda) Lambda / N.
    lam = _matrix("covariance", covariance)
    omega = np.eye(len(lam))
    if task_covariance is not None:
        omega = _matrix("task_covariance", task_covariance, singular=True)
    if len(omega) != len(lam):
        raise ValueError(
            f"task_covariance must be of size {len(lam)} as covariance is, got {len(omega)}."
        )
    if noise_var < 0:
        raise ValueError(f"noise_var must be >= 0, got {noise_var}.")
    length = _lengths(context_length)
    ratio = length / (length + 1) if count_query else np.ones_like(length)
    signal, variance = lam @ omega @ lam, float(np.trace(omega @ lam))
    bb = np.mean(ratio**2 * (1 + 1 / length)) * signal
    bb = bb + np.mean(ratio**2 / length) * (variance + noise_var) * lam
    zz = np.einsum("ik,jl->ijkl", bb, lam)
    return Moments(yy=variance, yz=ratio.mean() * signal, zz=zz)


@dataclass(frozen=True, eq=False, repr=False)
class Modes:
    """Directions that training learns, in the order in which small initial weights learn them."""

    variance: float
    """Loss of the constant prediction 0, unit y^2."""
    rates: Float[np.ndarray, " mode"]
    """Growth rate g_d near zero, descending; lambda_d^2 for w ~ N(0, I). Unit y^2 / m, where m is the unit of M."""
    targets: Float[np.ndarray, " mode"]
    """Eigenvalue m_d of M once the direction is learned; 1 / (lambda_d a_d) for w ~ N(0, I)."""
    vectors: Float[np.ndarray, "d_x mode"]
    """Eigenvectors e_d, as columns."""

    def __repr__(self) -> str:
        return f"Modes({len(self.rates)} directions, loss {self.levels[0]:.4g} to {self.levels[-1]:.4g})"

    @property
    def gains(self) -> Float[np.ndarray, " mode"]:
        """Drop of the loss when a direction is learned, unit y^2: g_d m_d, or lambda_d / a_d for w ~ N(0, I)."""
        return self.rates * self.targets

    @property
    def levels(self) -> Float[np.ndarray, " level"]:
        """Loss after learning the first m directions, m = 0 ... D, unit y^2."""
        return self.variance - np.concatenate([[0.0], np.cumsum(self.gains)])

    def learned(self, M: Float[np.ndarray, "*stack d_x d_x"]) -> Float[np.ndarray, "*stack mode"]:
        """Learned fraction f_d = e_d^T M e_d / m_d: 0 before a direction is learned, 1 after."""
        along = np.einsum("id,...ij,jd->...d", self.vectors, M, self.vectors, optimize=True)
        return along / self.targets

    def diagonal_loss(
        self, learned: Float[np.ndarray, "*stack mode"]
    ) -> Float[np.ndarray, "*stack"]:
        """Loss of M = sum_d f_d m_d e_d e_d^T, unit y^2: variance - sum_d gain_d (1 - (1 - f_d)^2)."""
        return np.asarray(self.variance - (1 - (1 - learned) ** 2) @ self.gains)


def modes(moments: Moments) -> Modes:
    """Directions in which the moments of a population are independent of each other.

    Directions without any task are never learned and are left out.

    Raises:
        ValueError: If the moments couple the eigenvectors of E y_query z. This holds for moments of a training set, and
            for a task covariance that does not commute with the covariance of x.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.2; with noise and task covariance derived here.
    Example:
        >>> directions = modes(population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31))
        >>> directions.levels.round(10).tolist()
        [1.0, 0.6405797101, 0.377372163, 0.2098045954, 0.1359950716]
    """
    rates, vectors = np.linalg.eigh((moments.yz + moments.yz.T) / 2)
    rates, vectors = rates[::-1].copy(), vectors[:, ::-1].copy()
    vectors *= np.where(vectors.sum(0) < 0, -1, 1)
    bend = np.einsum("ijkl,ia,jb,kc,ld->abcd", moments.zz, *[vectors] * 4, optimize=True)
    curvature = np.einsum("abab->ab", bend).copy()
    np.einsum("abab->ab", bend)[...] = 0
    skew = np.abs(moments.yz - moments.yz.T).max() / rates[0]
    coupling = max(np.abs(bend).max() / curvature.max(), skew)
    if coupling > ROUNDING:
        raise ValueError(
            f"The moments must share one eigenbasis; they couple directions by {coupling:.2g}."
        )
    live = rates > ROUNDING * rates[0]
    rates, bends = rates[live], np.diag(curvature)[live]
    return Modes(
        variance=moments.yy, rates=rates, targets=rates / bends, vectors=vectors[:, live].copy()
    )


def require_positive(**values: float) -> None:
    """Refuses numbers, given by name, that are not above 0.

    Raises:
        ValueError: If a number is not positive.
    Example:
        >>> require_positive(scale=1.0, tau=2.0)
    """
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}: nothing would ever move.")


def require_counts(**values: int) -> None:
    """Refuses numbers, given by name, that are below 1.

    Raises:
        ValueError: If a number is below 1.
    Example:
        >>> require_counts(rank=1, n_heads=2)
    """
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")


def _inner(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """<A, B> over the last two axes."""
    flat = (each.reshape(*each.shape[:-2], -1) for each in (one, other))
    return np.asarray(np.vecdot(*flat))


def require_eigenvalues(
    values: np.ndarray, name: str = "eigenvalues", *, singular: bool = False
) -> np.ndarray:
    """Eigenvalues in float64, checked for their signs.

    Args:
        singular: True: some eigenvalues may be 0.
    Raises:
        ValueError: If an eigenvalue is negative, or 0 without `singular`.
    Example:
        >>> require_eigenvalues(np.array([2, 1]))
        array([2., 1.])
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size or not np.all(np.isfinite(values)):
        holds = False
    elif singular:
        holds = values.max() > 0 and values.min() >= -ROUNDING * values.max()
    else:
        holds = values.min() > 0
    if not holds:
        rule = "positive numbers or 0, not all 0" if singular else "positive numbers"
        raise ValueError(f"{name} must be {rule}, got {values.tolist()}.")
    return values


def _matrix(name: str, covariance: np.ndarray, *, singular: bool = False) -> np.ndarray:
    covariance = np.asarray(covariance, dtype=np.float64)
    label = f"eigenvalues of {name}"
    if covariance.ndim == 1:
        return np.diag(require_eigenvalues(covariance, label, singular=singular))
    if not np.allclose(covariance, covariance.T, rtol=0, atol=1e-12 * np.abs(covariance).max()):
        raise ValueError(f"{name} must be symmetric, got {covariance.tolist()}.")
    require_eigenvalues(np.linalg.eigvalsh(covariance), label, singular=singular)
    return covariance


def _lengths(context_length: int | Sequence[int]) -> np.ndarray:
    lengths = np.atleast_1d(np.asarray(context_length, dtype=np.float64))
    if not lengths.size or lengths.min() < 1:
        raise ValueError(f"context_length must be >= 1, got {context_length}.")
    return lengths


Force = Callable[[np.ndarray], np.ndarray]
"""Function from M to the force on it, G = -(1/2) dL/dM."""


@dataclass(frozen=True, eq=False, repr=False)
class MergedHeads:
    """Heads with one matrix for key and query; leading axes, such as time, are allowed."""

    v: Float[np.ndarray, "*stack head"]
    """Value weights."""
    U: Float[np.ndarray, "*stack head d_x d_x"]
    """Key-query matrices."""

    def __repr__(self) -> str:
        return f"MergedHeads(n_heads={self.v.shape[-1]}, d_x={self.U.shape[-1]})"

    @property
    def M(self) -> Float[np.ndarray, "*stack d_x d_x"]:
        """sum_i v_i U_i."""
        M = self.v[..., None, :] @ self.U.reshape(*self.v.shape, -1)
        return M.reshape(*self.v.shape[:-1], *self.U.shape[-2:])

    def velocity(self, force: Float[np.ndarray, "*stack d_x d_x"]) -> "MergedHeads":
        """tau d/dt of the weights under G: v_i' = tr(U_i^T G), U_i' = v_i G.

        Source:
            Zhang et al. 2025, arXiv 2501.16265, eq. (8), with G in place of its sums.
        """
        d_x, U = self.U.shape[-1], self.U.reshape(*self.v.shape, -1)
        v, U = merged_motion(self.v, U, lambda M: force.reshape(*self.v.shape[:-1], -1))
        return MergedHeads(v=v, U=U.reshape(*self.v.shape, d_x, d_x))


@dataclass(frozen=True, eq=False, repr=False)
class SeparateHeads:
    """Heads with keys and queries of rank R; leading axes, such as time, are allowed."""

    v: Float[np.ndarray, "*stack head"]
    """Value weights."""
    K: Float[np.ndarray, "*stack head rank d_x"]
    """Keys k_r as rows."""
    Q: Float[np.ndarray, "*stack head rank d_x"]
    """Queries q_r as rows."""

    def __repr__(self) -> str:
        n_heads, rank, d_x = self.K.shape[-3:]
        return f"SeparateHeads(n_heads={n_heads}, rank={rank}, d_x={d_x})"

    @property
    def M(self) -> Float[np.ndarray, "*stack d_x d_x"]:
        """sum_i v_i K_i^T Q_i."""
        pairs = (*self.v.shape[:-1], -1, self.K.shape[-1])
        weighted = (self.v[..., None, None] * self.K).reshape(pairs)
        return weighted.mT @ self.Q.reshape(pairs)

    def velocity(self, force: Float[np.ndarray, "*stack d_x d_x"]) -> "SeparateHeads":
        """tau d/dt of the weights under G: v_i' = sum_r k_r^T G q_r, k_r' = v_i G q_r, q_r' = v_i G^T k_r.

        Source:
            Zhang et al. 2025, arXiv 2501.16265, eq. (14) for rank one.
        """
        pairs = (*self.v.shape[:-1], -1, self.K.shape[-1])
        K, Q = (rows.reshape(pairs) for rows in (self.K, self.Q))
        v = np.repeat(self.v, self.K.shape[-2], axis=-1)[..., None]
        read, K, Q = separate_motion(v, K, Q, lambda M: force)
        by_head = self.K.shape[:-1]
        return SeparateHeads(
            v=read.reshape(by_head).sum(-1), K=K.reshape(self.K.shape), Q=Q.reshape(self.K.shape)
        )


Heads = MergedHeads | SeparateHeads


def merged_motion(
    v: Float[np.ndarray, "*stack head"], U: Float[np.ndarray, "*stack head entry"], force: Force
) -> tuple[np.ndarray, np.ndarray]:
    """`MergedHeads.velocity` for matrices as rows of entries: tau d/dt of v and U, with the force as a function of M."""
    G = force((v[..., None, :] @ U)[..., 0, :])
    return np.vecdot(U, G[..., None, :]), v[..., None] * G[..., None, :]


def separate_motion(
    v: Float[np.ndarray, "*stack pair 1"],
    K: Float[np.ndarray, "*stack pair d_x"],
    Q: Float[np.ndarray, "*stack pair d_x"],
    force: Force,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`SeparateHeads.velocity` for pairs k_r, q_r: k_r^T G q_r, and tau d/dt of k_r and q_r."""
    weighted = v * K
    G = force(weighted.mT @ Q)
    key = Q @ G.mT
    return np.vecdot(K, key), v * key, weighted @ G


def merged_heads(n_heads: int, d_x: int, *, std: float, seed: int) -> MergedHeads:
    """Random merged heads with entries from N(0, std^2).

    Raises:
        ValueError: If std is not positive: zero weights never move.
    Example:
        >>> merged_heads(2, 3, std=0.1, seed=0).U.shape
        (2, 3, 3)
    """
    v, U = _draw(n_heads, (d_x, d_x), 1, std, seed)
    return MergedHeads(v=v, U=U[0])


def separate_heads(
    n_heads: int, d_x: int, *, std: float, seed: int, rank: int = 1
) -> SeparateHeads:
    """Random heads of rank `rank` with entries from N(0, std^2).

    Raises:
        ValueError: If std is not positive: zero weights never move.
    Example:
        >>> separate_heads(2, 3, std=0.1, seed=0, rank=2).K.shape
        (2, 2, 3)
    """
    v, (K, Q) = _draw(n_heads, (rank, d_x), 2, std, seed)
    return SeparateHeads(v=v, K=K, Q=Q)


def _draw(
    n_heads: int, shape: tuple[int, int], copies: int, std: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    if std <= 0:
        raise ValueError(f"std must be > 0, got {std}: zero weights never move.")
    require_counts(n_heads=n_heads, **{"rank and d_x": min(shape)})
    rng = np.random.default_rng(seed)
    v = std * rng.standard_normal(n_heads)
    matrices = std * rng.standard_normal((copies, n_heads, *shape))
    return v, matrices
