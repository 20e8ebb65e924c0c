"""Limits of the labels of one layer of attention."""

from dataclasses import dataclass

from mechinterp.analysis.one_layer.linear_components import EQUAL


@dataclass(frozen=True)
class Thresholds:
    """Limits of the classifier; analyses/calibration/ measures how often labels are wrong under the
    defaults."""

    share: float = 0.01
    """A head is active if its share of the heads' output exceeds this. A larger limit ignores more
    heads."""
    qk_diagonal: float = 0.8
    """Smallest `qk_diagonal` of a structured head, or cosine of its QK x block with the heads' common matrix; 99.9% of
    random heads (d_x = 5) are below 0.8. It is also the smallest fraction of the heads' deviation from I that a common
    matrix must explain."""
    ov_last_entry: float = 0.9
    """Smallest `ov_last_entry` of a structured head. It is also the smallest cosine of a QK x block
    with its form, unless idealised heads explain all but the fraction `equal`."""
    omega_spread: float = 0.25
    """Largest spread (max/min - 1) of sizes that count as alike: |omega| of heads, theta on a support, singular values of
    a rotation."""
    zero_sum: float = 0.05
    """Largest `zero_sum` of heads whose mu cancel."""
    leak: float = 0.25
    """Parts below this fraction of the largest count as zero. Such entries of omega and mu have no
    sign, a head with such a `task_leak` serves one response, and theta with such a `support_leak`
    is confined to its supports."""
    equal: float = EQUAL
    """Relative difference below which two things count as equal: QK circuits of heads; a common
    matrix and I (squared sine of their angle); a metric and its symmetric part; theta on all
    coordinates; a step and its part along the principal components of x."""
    substitution_r2: float = 0.9
    """Smallest R^2 of the idealised heads, and of the closed form, against the model."""
    p_value: float = 0.01
    """Largest p-value at which a number counts as beyond random weights."""
