"""Covariance of the covariates, as a setting."""

from dataclasses import dataclass
from typing import ClassVar

from mechinterp.fields import LARGEST_SETTING, Rules, set_checked

COVARIANCES = ("identity", "kms", "eigenvalues", "matrix")
MOST_NUMBERS = 8
"""Largest number of eigenvalues that are printed one by one."""


@dataclass(frozen=True)
class CovarianceConfig:
    """Covariance Sigma of the covariates: `scale` times a matrix of the given kind."""

    EXAMPLE: ClassVar = (
        '{"kind": "identity", "scale": 2} or {"kind": "matrix", "matrix": [[1, 0.5], [0.5, 1]]}'
    )

    kind: str = "identity"
    """"identity", "kms" (Kac-Murdock-Szego, rho^|i-j|), "eigenvalues" (a diagonal matrix) or "matrix"."""
    rho: float = 0.0
    """Correlation of neighbouring coordinates, for "kms"."""
    eigenvalues: tuple[float, ...] = ()
    """The d_x diagonal entries, for "eigenvalues"."""
    scale: float = 1.0
    """Factor on the matrix, for every kind."""
    matrix: tuple[tuple[float, ...], ...] = ()
    """The d_x rows with d_x entries each, for "matrix"."""

    @property
    def in_words(self) -> str:
        """The kind and its numbers, as text.

        Example:
            >>> CovarianceConfig("eigenvalues", eigenvalues=(1, 0.25)).in_words
            'diagonal (1, 0.25)'
            >>> CovarianceConfig(scale=2).in_words
            'identity times 2'
        """
        times = "" if self.scale == 1 else f" times {self.scale:.4g}"
        if self.kind == "kms":
            return f"kms with rho {self.rho:.4g}{times}"
        if self.kind == "identity":
            return f"{self.kind}{times}"
        kind = "diagonal" if self.kind == "eigenvalues" else "matrix with diagonal"
        values = self.diagonal(len(self.eigenvalues or self.matrix))
        if len(values) > MOST_NUMBERS:
            return f"{kind}, {len(values)} numbers from {min(values):.4g} to {max(values):.4g}"
        return f"{kind} ({', '.join(f'{value:.4g}' for value in values)})"

    def diagonal(self, d_x: int) -> tuple[float, ...]:
        """Variance of each coordinate.

        Example:
            >>> CovarianceConfig(scale=2).diagonal(3)
            (2.0, 2.0, 2.0)
        """
        own = tuple(row[i] for i, row in enumerate(self.matrix)) or self.eigenvalues
        return tuple(self.scale * value for value in own or (1.0,) * d_x)

    def __post_init__(self) -> None:
        set_checked(self, "task.covariance")
        rules = Rules("task.covariance", self)
        rules.one_of("kind", COVARIANCES)
        rules.positive("scale")
        rules.at_most(LARGEST_SETTING, "scale")
        for name, kind in (("rho", "kms"), ("eigenvalues", "eigenvalues"), ("matrix", "matrix")):
            unused = not getattr(self, name) or self.kind == kind
            rules.require(
                name, unused, f"{'is' if name == 'rho' else 'are'} used by kind {kind!r} only"
            )
        rules.require("rho", -1 < self.rho < 1, "must lie in (-1, 1)")
        values = self.eigenvalues
        positive = self.kind != "eigenvalues" or (bool(values) and min(values) > 0)
        rules.require("eigenvalues", positive, "must be positive numbers")
        holds = self.kind != "matrix" or _is_covariance(self.matrix)
        rules.require("matrix", holds, "must be a symmetric matrix with eigenvalues above 0")
        for name, entries in (("eigenvalues", values), ("matrix", sum(self.matrix, ()))):
            small = self.scale * max(entries, default=0.0) <= LARGEST_SETTING
            rules.require(name, small, f"must be at most {LARGEST_SETTING:g}, times scale")


def _is_covariance(matrix: tuple[tuple[float, ...], ...]) -> bool:
    """True if the rows form a symmetric matrix with positive eigenvalues."""
    import numpy as np  # needed for this kind only

    if not matrix or any(len(row) != len(matrix) for row in matrix):
        return False
    full = np.array(matrix)
    near = 1e-12 * np.abs(full).max()
    symmetric = np.allclose(full, full.T, rtol=0, atol=near)
    return bool(symmetric and np.linalg.eigvalsh(full).min() > near)
