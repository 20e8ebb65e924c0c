"""Models built by hand whose circuits, labels and predictions are known: the fixtures of every test.

All have d_head = d_model and float64 weights, and read the y axis of the tokens only.
"""

from collections.abc import Sequence

import torch

from mechinterp.models.functional import AttentionWeights


def diagonal_heads(
    omega: Sequence[float], mu: Sequence[float], *, d_x: int, d_y: int = 1
) -> AttentionWeights:
    """Heads with QK = omega_h I on the x block and OV = mu_h I on the y block, zero elsewhere.

    Args:
        omega: Scale of each QK circuit, softmax scale included; unit 1/x^2.
        mu: Scale of each OV circuit.
    Raises:
        ValueError: If omega and mu have different lengths.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (3.1).
    Example:
        >>> diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=2).mu.flatten()
        tensor([ 3., -3.], dtype=torch.float64)
    """
    if len(omega) != len(mu):
        raise ValueError(
            f"omega and mu must have one entry per head, got {len(omega)} and {len(mu)}."
        )
    d_model = d_x + d_y
    on_x = torch.diag(torch.tensor([1.0] * d_x + [0.0] * d_y, dtype=torch.float64))
    on_y = torch.eye(d_model, dtype=torch.float64) - on_x
    scale = d_model**-0.5
    omegas = torch.tensor(omega, dtype=torch.float64)[:, None, None]
    mus = torch.tensor(mu, dtype=torch.float64)[:, None, None]
    return AttentionWeights(
        W_Q=omegas / scale * on_x,
        W_K=on_x.expand(len(omega), -1, -1).clone(),
        W_V=on_y.expand(len(omega), -1, -1).clone(),
        W_O=(mus * on_y)[:, :, d_x:].clone(),
        scale=scale,
    )


def debiased_gradient_step(eta: float, omega: float, *, d_x: int, d_y: int = 1) -> AttentionWeights:
    """Two heads, (omega, mu) and (-omega, -mu) with mu = eta / (2 omega).

    For omega -> 0 the prediction tends to one step of debiased gradient descent of size eta, with an
    error of order omega^2.

    Raises:
        ValueError: If omega is not positive.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.9)-(4.10).
    Example:
        >>> debiased_gradient_step(0.88, 0.01, d_x=5).mu.flatten()
        tensor([ 44., -44.], dtype=torch.float64)
    """
    if omega <= 0:
        raise ValueError(f"omega must be > 0, got {omega}.")
    mu = eta / (2 * omega)
    return diagonal_heads([omega, -omega], [mu, -mu], d_x=d_x, d_y=d_y)


def kernel_head(omega: float, mu: float, *, d_x: int, d_y: int = 1) -> AttentionWeights:
    """One head: the Nadaraya-Watson estimate with kernel exp(omega x . x_query), times mu.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.12).
    Example:
        >>> kernel_head(0.5, 1.5, d_x=5).n_heads
        1
    """
    return diagonal_heads([omega], [mu], d_x=d_x, d_y=d_y)


def zero_head(*, d_x: int, d_y: int = 1) -> AttentionWeights:
    """One head that attends uniformly and writes nothing.

    Example:
        >>> zero_head(d_x=5).OV.abs().max().item()
        0.0
    """
    return diagonal_heads([0.0], [0.0], d_x=d_x, d_y=d_y)
