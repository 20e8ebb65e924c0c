"""Closed forms for one-layer softmax attention and for the gradient steps it is compared with.

All functions take and return numbers. They assume x ~ N(0, I) and signal variance 1 (beta ~ N(0, I/d_x)); `noise_var` is
the noise variance in units of the signal variance.
"""


def debiased_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one debiased gradient step: 1 / (1 + (1 + s^2) d / L).

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.3) and (4.11) with the factor 1/L.
    Example:
        >>> round(debiased_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8791
    """
    return 1 / (1 + (1 + noise_var) * d_x / context_length)
