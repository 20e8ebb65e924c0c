"""Thresholds of the definitions of the patterns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Limits of the classifier; analyses/calibration/ counts how often labels are wrong under the defaults."""

    share: float = 0.01
    """A head is active if its share of the heads' output is above this."""
    qk_diagonal: float = 0.8
    """Least `qk_diagonal` of a structured head; 99.9% of random heads (d_x = 5) have less than 0.8."""
    ov_last_entry: float = 0.9
    """Least `ov_last_entry` of a structured head. A QK x block whose cosine with its form is below this, too, is
    clear only if idealised heads explain all but `equal`."""
    omega_spread: float = 0.25
    """Most `omega_spread` of homogeneous heads, and most that theta may vary on a support (`theta_spread`)."""
    zero_sum: float = 0.05
    """Most `zero_sum` of heads whose mu cancel."""
    leak: float = 0.25
    """A part below this fraction of the largest counts as none: entries of omega and mu have no sign, a head serves
    one response (`task_leak`), theta is confined to its supports (`support_leak`)."""
    equal: float = 0.05
    """Relative difference below which two things count as one: QK circuits of heads; a common matrix and I (squared
    sine of their angle); theta on all coordinates; a step and its part along the principal components of x."""
    shared: float = 0.85
    """Least part of the heads' deviation from I that must be common for the matrix to count as common."""
    substitution_r2: float = 0.9
    """Least R^2 with which idealised heads, and the closed form, must stand in for the model."""
    p_value: float = 0.01
    """Most p-value of a number that random weights do not reach."""
