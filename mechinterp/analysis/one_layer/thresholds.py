"""Thresholds of the definitions of the patterns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Limits of the classifier; analyses/calibration/errors.py says how often each leads astray."""

    share: float = 0.01
    """A head is active if its share of the heads' output is above this."""
    equal: float = 0.05
    """Heads whose QK circuits differ by less than this, relative to their norm, count as one."""
    qk_diagonal: float = 0.8
    """Least cosine of a head's QK x block with its form; 99.9% of random heads (d_x = 5) have less than 0.8."""
    qk_clear: float = 0.9
    """Where a head's cosine is below this, idealised heads must explain `clear_r2`."""
    clear_r2: float = 0.98
    """Least R^2 of idealised heads that makes up for a QK x block which is not clearly of its form."""
    ov_last_entry: float = 0.9
    """Least `ov_last_entry` of a head that is not unstructured."""
    sign_entry: float = 0.1
    """Entries of omega or mu below this fraction of the largest have no sign."""
    omega_spread: float = 0.25
    """Most `omega_spread` of homogeneous heads."""
    zero_sum: float = 0.05
    """Most `zero_sum` of heads whose mu cancel."""
    isotropy: float = 0.98
    """Least cosine to I of a common matrix that counts as I."""
    shared: float = 0.85
    """Least part of the heads' deviation from I that must be common for the matrix to count as common."""
    task_leak: float = 0.25
    """Most `task_leak` of a head that serves one response; half of it is too little for one that serves all."""
    support_leak: float = 0.15
    """Most `support_leak` of theta that is confined to its supports."""
    theta_spread: float = 0.25
    """Most that theta may vary on a support, max/min - 1."""
    theta_even: float = 0.06
    """Most that theta may vary where all responses weigh all coordinates alike."""
    off_diagonal: float = 0.05
    """Most `off_diagonal` of a step of linear attention that has components."""
    substitution_r2: float = 0.9
    """Least R^2 with which idealised heads, and the closed form, must stand in for the model."""
    p_value: float = 0.01
    """Most p-value of a number that random weights do not reach."""
