"""Numbers as text; the only file that decides how many digits are printed."""

import numpy as np

LEAST_P = 1e-12
Real = float | np.floating


def digits(value: Real) -> str:
    """Three significant digits; values that are 0 up to rounding print as 0.

    Example:
        >>> [digits(value) for value in (1.0026, 0.88664, 152.4, 20640.0, 1e-23)]
        ['1.00', '0.887', '152', '20640', '0']
    """
    value = float(value)
    if abs(value) < 1e-12:
        return "0"
    if 1000 <= abs(value) < 100_000:
        return f"{value:.0f}"
    return f"{value:#.3g}".replace(".e", "e").rstrip(".")


def with_error(value: Real, sem: Real) -> str:
    """A number rounded to the first digit of its standard error, with at most six decimals; powers
    of ten if large.

    Example:
        >>> with_error(0.24321, 0.0123), with_error(152.3, 12.0), with_error(float("nan"), 1.0)
        ('0.24 ± 0.01', '152 ± 12', 'not defined')
        >>> with_error(6.4e6, 4.7e6), with_error(-0.01, 0.1)
        ('(6 ± 5)·10^6', '0.0 ± 0.1')
    """
    value, sem = float(value), float(sem)
    if not np.isfinite(value) or np.isinf(sem):
        return "not defined"
    if abs(value) < 1e-12:
        return "0"
    if not sem > 5e-7:
        error = f" ± {sem:.0e}" if sem > 1e-15 else ""  # below is rounding
        return f"{value:.6f}".rstrip("0").rstrip(".") + error
    power = int(np.floor(np.log10(max(abs(value), sem)))) if sem >= 1000 else 0
    value, sem = value / 10.0**power, sem / 10.0**power
    decimals = int(np.clip(-np.floor(np.log10(sem)), 0, 6))
    value = round(value, decimals) + 0.0  # no -0.0
    text = f"{value:.{decimals}f} ± {sem:.{decimals}f}"
    return f"({text})·10^{power}" if power else text


def explained(r2: Real, sem: Real) -> str:
    """R^2 with its standard error, rounded to the first digit of the error.

    Example:
        >>> explained(0.99894, 0.00012), explained(1.0, 0.0)
        ('R² = 0.9989 ± 0.0001', 'R² = 1')
    """
    return f"R² = {with_error(r2, sem)}"


def beside(lead: Real, sem: Real) -> str:
    """Difference of an R^2 to a reference, in words.

    Example:
        >>> beside(0.0027, 0.0004), beside(-0.0003, 0.0002)
        ('lower by 0.0027 ± 0.0004', 'higher by 0.0003 ± 0.0002')
    """
    return f"{'lower' if lead >= 0 else 'higher'} by {with_error(abs(float(lead)), sem)}"


def p_text(p: Real, n_random: int) -> str:
    """A p-value from n_random random models; "p < 1/n" if none of them reaches the value.

    Example:
        >>> p_text(1 / 401, 400), p_text(0.2594, 400)
        ('p < 0.0025', 'p = 0.26')
    """
    if np.isnan(p):
        return "p is not defined"
    return f"p < {1 / n_random:.2g}" if p <= 1 / n_random else f"p = {p:.2g}"


def cell(value: object, column: str = "", least_p: float = LEAST_P) -> str:
    """Entry of a table: three digits, a dash for NaN, p-values no smaller than `least_p`.

    Example:
        >>> cell(0.12345), cell(float("nan"), "p_value"), cell(1e-30, "p_value"), cell("ridge"), cell(True)
        ('0.123', '–', '< 1e-12', 'ridge', 'True')
    """
    if not isinstance(value, float | np.floating):
        return str(value)
    if np.isnan(value):
        return "–"
    if column == "p_value" or column.endswith("_p"):
        return f"< {least_p:.2g}" if value <= least_p else f"{value:.2g}"
    return digits(float(value))


def narrow_cell(value: Real, sem: Real) -> str:
    """Entry of a table with its standard error, if there is one; a dash for NaN.

    Example:
        >>> narrow_cell(0.1234, 0.01), narrow_cell(0.1234, float("nan")), narrow_cell(float("nan"), 0.1)
        ('0.12 ± 0.01', '0.123', '–')
    """
    if not np.isfinite(value):
        return "–"
    return with_error(value, sem) if np.isfinite(sem) else digits(float(value))
