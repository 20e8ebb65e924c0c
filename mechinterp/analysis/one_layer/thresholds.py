"""Limits in the definitions of the patterns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Limits of the classifier; analyses/calibration/ measures how often labels are wrong under the
    defaults."""

    share: float = 0.01
    """A head is active if its share of the heads' output exceeds this. A larger limit ignores more
    heads."""
    qk_diagonal: float = 0.8
    """Smallest `qk_diagonal` of a structured head; 99.9% of random heads (d_x = 5) are below 0.8.
    """
    ov_last_entry: float = 0.9
    """Smallest `ov_last_entry` of a structured head. It is also the smallest cosine of a QK x block
    with its form, unless idealised heads explain all but the fraction `equal`."""
    omega_spread: float = 0.25
    """Largest `omega_spread` of homogeneous heads, and largest `theta_spread` on a support."""
    zero_sum: float = 0.05
    """Largest `zero_sum` of heads whose mu cancel."""
    leak: float = 0.25
    """Parts below this fraction of the largest count as zero. Such entries of omega and mu have no
    sign, a head with such a `task_leak` serves one response, and theta with such a `support_leak`
    is confined to its supports."""
    equal: float = 0.05
    """Relative difference below which two things count as equal: QK circuits of heads; a common
    matrix and I (squared sine of their angle); theta on all coordinates; a step and its part along
    the principal components of x."""
    shared: float = 0.85
    """Smallest fraction of the heads' deviation from I that one common matrix must explain."""
    substitution_r2: float = 0.9
    """Smallest R^2 of the idealised heads, and of the closed form, against the model."""
    p_value: float = 0.01
    """Largest p-value at which a number counts as beyond random weights."""
