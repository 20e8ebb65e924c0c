"""Approximate loss of softmax attention in its reduced form: heads with scales omega and mu.

All functions assume x ~ N(0, I) and signal variance 1 (beta ~ N(0, I/d_x)). `noise_var` is the
noise variance s^2 in units of the signal variance; c stands for (1 + s^2) / L."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import factorial

Heads = Float[np.ndarray, " head"]


def approximate_loss(
    omega: Heads, mu: Heads, *, d_x: int, context_length: int, noise_var: float
) -> float:
    """1 + s^2 - 2 <mu, omega> + mu^T (omega omega^T + c exp(d omega omega^T)) mu, exp entrywise; unit y^2.

    Accurate for long contexts and small omega; `corrected_loss` adds the next term in 1/L.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.1).
    Example:
        >>> omega, mu = np.array([0.13, -0.13]), np.array([3.38, -3.38])
        >>> round(approximate_loss(omega, mu, d_x=5, context_length=40, noise_var=0.1), 4)
        0.221
    """
    quadratic = _quadratic(omega, d_x, context_length, noise_var)
    return float(1 + noise_var - 2 * mu @ omega + mu @ quadratic @ mu)


def loss_gradients(
    omega: Heads, mu: Heads, *, d_x: int, context_length: int, noise_var: float
) -> tuple[Heads, Heads]:
    """Gradients of the approximate loss in omega and in mu.

    Source:
        Derived here from He et al. 2025, arXiv 2503.12734, eq. (4.1).
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> zero = np.zeros(2)
        >>> [gradient.tolist() for gradient in loss_gradients(zero, zero, **setting)]
        [[0.0, 0.0], [0.0, 0.0]]
    """
    c = (1 + noise_var) / context_length
    kernel = np.exp(d_x * np.outer(omega, omega))
    d_mu = 2 * (_quadratic(omega, d_x, context_length, noise_var) @ mu - omega)
    d_omega = 2 * ((mu @ omega - 1) * mu + c * d_x * mu * (kernel @ (mu * omega)))
    return d_omega, d_mu


def taylor_terms(
    omega: Heads, mu: Heads, *, d_x: int, context_length: int, noise_var: float, n_terms: int = 30
) -> Float[np.ndarray, " term"]:
    """The terms c (d^k / k!) <mu, omega^k>^2, k = 0, 1, ..., that the loss adds to 1 + s^2 - 2 p +
    p^2.

    Here p = <mu, omega>. Term 0 is the cost of mu that do not sum to zero; even terms vanish if
    |omega| is the same for heads of both signs.

    Source:
        Derived here from He et al. 2025, arXiv 2503.12734, eq. (4.1).
    Example:
        >>> omega, mu = np.array([0.1, -0.1]), np.array([3.0, -3.0])
        >>> terms = taylor_terms(omega, mu, d_x=5, context_length=40, noise_var=0.1, n_terms=3)
        >>> [round(float(term), 4) for term in terms]
        [0.0, 0.0495, 0.0]
    """
    k = np.arange(n_terms)
    moments = (mu[:, None] * omega[:, None] ** k).sum(0)
    return (1 + noise_var) / context_length * d_x**k / factorial(k) * moments**2


@dataclass(frozen=True, eq=False)
class StepTerms:
    """Parts of one step of gradient descent on half the approximate loss, by cause."""

    sign_matching_mu: Heads
    """omega (1 - p), with p = <mu, omega>: mu grows along omega."""
    zero_sum: Heads
    """-c sum mu: all mu are driven towards a sum of 0."""
    rest_mu: Heads
    """-c sum over k >= 1 of (d^k / k!) <mu, omega^k> omega^k."""
    sign_matching_omega: Heads
    """mu (1 - p (1 + c d)): omega grows along mu until p reaches 1 / (1 + c d)."""
    homogenising: Heads
    """-c d mu sum over k >= 1 of (d^k / k!) <mu, omega^(k+1)> omega^k: |omega| becomes equal."""

    @property
    def mu(self) -> Heads:
        """Change of mu per unit of step size."""
        return self.sign_matching_mu + self.zero_sum + self.rest_mu

    @property
    def omega(self) -> Heads:
        """Change of omega per unit of step size."""
        return self.sign_matching_omega + self.homogenising


def step_terms(
    omega: Heads, mu: Heads, *, d_x: int, context_length: int, noise_var: float
) -> StepTerms:
    """Terms of a gradient step on half the approximate loss.

    Source:
        Derived here from the gradients of He et al. 2025, arXiv 2503.12734, eq. (4.1); its section 4.2.
    Example:
        >>> omega, mu = np.array([0.1, -0.1]), np.array([0.2, 0.1])
        >>> terms = step_terms(omega, mu, d_x=5, context_length=40, noise_var=0.1)
        >>> terms.zero_sum.round(5).tolist()
        [-0.00825, -0.00825]
    """
    c = (1 + noise_var) / context_length
    p = mu @ omega
    rest = np.expm1(d_x * np.outer(omega, omega))
    return StepTerms(
        sign_matching_mu=omega * (1 - p),
        zero_sum=np.full_like(mu, -c * mu.sum()),
        rest_mu=-c * rest @ mu,
        sign_matching_omega=mu * (1 - p * (1 + c * d_x)),
        homogenising=-c * d_x * mu * (rest @ (mu * omega)),
    )


def optimal_mu(omega: Heads, *, d_x: int, context_length: int, noise_var: float) -> Heads:
    """mu that minimise the approximate loss for given omega; the shortest one if there are several.

    Source:
        He et al. 2025, arXiv 2503.12734, section 4: the loss is quadratic in mu.
    Example:
        >>> mu = optimal_mu(np.array([0.13, -0.13]), d_x=5, context_length=40, noise_var=0.1)
        >>> mu.round(3).tolist()
        [3.381, -3.381]
    """
    quadratic = _quadratic(omega, d_x, context_length, noise_var)
    return np.linalg.lstsq(quadratic, omega, rcond=1e-13)[0]


def single_head(*, d_x: int, context_length: int, noise_var: float) -> tuple[float, float]:
    """The positive omega and mu that minimise the approximate loss of one head.

    omega = 1/sqrt(d), mu = sqrt(d) / (1 + e (1 + s^2) d / L). At L = 40 trained heads differ (omega
    0.52, mu 1.49), because the approximation is not accurate there.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.12).
    Example:
        >>> omega, mu = single_head(d_x=5, context_length=40, noise_var=0.1)
        >>> round(omega, 4), round(mu, 4)
        (0.4472, 1.6277)
    """
    return d_x**-0.5, d_x**0.5 / (1 + np.e * (1 + noise_var) * d_x / context_length)


def manifold_loss(gamma: float, *, d_x: int, context_length: int, noise_var: float) -> float:
    """Approximate loss on the solution manifold: 1 + s^2 - gamma^2 / (gamma^2 + c sinh(d gamma^2)).

    It increases with gamma from 1 + s^2 - 1 / (1 + c d); the true loss does not.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.6)-(4.8).
    Example:
        >>> round(manifold_loss(1e-6, d_x=5, context_length=40, noise_var=0.1), 4)
        0.2209
    """
    c = (1 + noise_var) / context_length
    return float(1 + noise_var - gamma**2 / (gamma**2 + c * np.sinh(d_x * gamma**2)))


def corrected_loss(
    omega: Heads, mu: Heads, *, d_x: int, context_length: int, noise_var: float
) -> float:
    """The approximate loss plus (2 p - kappa p^2) / L, with p = <mu, omega> and kappa = 1 + c d.

    The correction is the leading term, for small omega, of the approximation's error at finite L.

    Source:
        Derived here; checked against Monte Carlo in tests/theory.
    Example:
        >>> omega, mu = np.array([0.13, -0.13]), np.array([3.38, -3.38])
        >>> round(corrected_loss(omega, mu, d_x=5, context_length=40, noise_var=0.1), 3)
        0.243
    """
    p = float(mu @ omega)
    kappa = 1 + (1 + noise_var) * d_x / context_length
    loss = approximate_loss(omega, mu, d_x=d_x, context_length=context_length, noise_var=noise_var)
    return loss + (2 * p - kappa * p**2) / context_length


def _quadratic(omega: np.ndarray, d_x: int, context_length: int, noise_var: float) -> np.ndarray:
    inner = np.outer(omega, omega)
    return inner + (1 + noise_var) / context_length * np.exp(d_x * inner)
