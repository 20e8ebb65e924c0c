r"""One layer of linear attention on a pool of tasks, in closed form.

The loss of y_hat = b^T M x_query is quadratic in M and depends on the pool through T = (1/M) sum_i beta_i beta_i^T alone.
Heads of this form (keys read x, values read y) can therefore memorise second moments only. This module gives the best M
and its loss on tasks of the pool and on new tasks. Heads whose values also read x have the further term
x_query^T Q (X^T X / L) v, which acts like a fixed vector, and can do better on a small pool.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import Covariance, Moments, TaskCovariance, population_moments


@dataclass(frozen=True, eq=False, repr=False)
class PoolOptimum:
    """Best one-layer linear attention on a pool, for heads whose keys read x and whose values read y."""

    M: Float[np.ndarray, "d_x d_x"]
    """M in y_hat = b^T M x_query with b = (1/L) sum_l y_l x_l. The A in x_query^T A b is its transpose."""
    pool_risk: float
    """Excess risk on tasks of the pool, unit y^2."""
    new_risk: float
    """Excess risk on new tasks, unit y^2."""
    zero_risk: float
    """Excess risk of the prediction 0 on tasks of the pool, unit y^2."""

    def __repr__(self) -> str:
        risks = f"{self.pool_risk:.4g} on the pool, {self.new_risk:.4g} on new tasks"
        return f"PoolOptimum(risk {risks})"


def pool_optimum(
    pool: Float[np.ndarray, "task d_x"],
    covariance: Covariance,
    *,
    context_length: int,
    noise_var: float = 0.0,
    new_tasks: TaskCovariance | None = None,
) -> PoolOptimum:
    r"""M with the smallest loss on a pool, M = B^-1 Lambda T, and its excess risk on the pool and on new tasks.

    B = (1 + 1/L) Lambda T Lambda + ((tr(T Lambda) + noise_var) / L) Lambda, with T the pool's second moment. For Lambda = I
    the risk on the pool is tr T - tr(T B^-1 T).

    Args:
        pool: Task vectors for one response.
        covariance: Covariance Lambda of x, or its eigenvalues.
        noise_var: Variance of the responses' noise, unit y^2.
        new_tasks: E beta beta^T of new tasks, or its diagonal; None means the identity.
    Raises:
        ValueError: If sizes differ, the pool is all 0 or not finite, or as in `population_moments`.
    Source:
        Derived here: `population_moments` with T as the task covariance.
    Example:
        >>> pool_optimum(np.eye(2), np.ones(2), context_length=10)
        PoolOptimum(risk 0.2308 on the pool, 0.4615 on new tasks)
    """
    if not np.isfinite(pool).all():
        raise ValueError("pool must be finite, got NaN or an infinite number.")

    def moments_of(tasks: TaskCovariance | None) -> Moments:
        return population_moments(
            covariance, context_length=context_length, task_covariance=tasks, noise_var=noise_var
        )

    # zz = B (x) Lambda and yz = Lambda T Lambda: zz M = B M Lambda = yz, so that M = B^-1 Lambda T.
    here = moments_of(second_moment(pool))
    lam = np.diag(covariance) if np.ndim(covariance) == 1 else np.asarray(covariance)
    B = np.einsum("ijkl,jl->ik", here.zz, np.linalg.inv(lam)) / len(lam)
    M = np.linalg.solve(B, lam @ second_moment(pool))
    return PoolOptimum(
        M=M,
        pool_risk=float(here.loss(M)),
        new_risk=float(moments_of(new_tasks).loss(M)),
        zero_risk=here.yy,
    )


def second_moment(pool: Float[np.ndarray, "task d_x"]) -> Float[np.ndarray, "d_x d_x"]:
    """Second moment of a pool, T = (1/M) sum_i beta_i beta_i^T.

    Example:
        >>> second_moment(np.array([[2.0, 0.0], [0.0, 0.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    return pool.T @ pool / len(pool)
