"""Exceptions to the theory of linear attention: repeated eigenvalues, too few heads, heads of higher rank."""

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import REPEATED, require_counts, require_eigenvalues


def claims_not_applying(
    eigenvalues: Float[np.ndarray, " mode"], *, rank: int, n_heads: int
) -> tuple[str, ...]:
    """Sentences on claims of the theory that fail for these eigenvalues or heads.

    Args:
        rank: Rank R of a head's key and query.
    Raises:
        ValueError: If an eigenvalue is not positive, or rank or n_heads is below 1.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.2 (R H >= D); repeated eigenvalues derived here.
    Example:
        >>> claims_not_applying(np.array([0.4, 0.3]), rank=1, n_heads=1)
        ('1 head(s) of rank 1 learn at most 1 of 2 directions: training ends at the level of 1.',)
    """
    values = np.sort(require_eigenvalues(eigenvalues))[::-1]
    require_counts(rank=rank, n_heads=n_heads)
    sentences = []
    if np.any(values[:-1] - values[1:] < REPEATED * values[:-1]):
        sentences.append(
            "Eigenvalues repeat: fixed points form a continuum instead of 2^D functions, and which direction "
            "of a shared eigenspace is learned first is not determined; the levels of the loss still hold."
        )
    if n_heads * rank < len(values):
        reach = n_heads * rank
        sentences.append(
            f"{n_heads} head(s) of rank {rank} learn at most {reach} of {len(values)} directions: "
            f"training ends at the level of {reach}."
        )
    if rank > 1:
        sentences.append(
            f"Heads have rank {rank}: only levels whose number of learned directions divides by {rank} last "
            "longer in proportion to 1/init; the others are short, and the one-head equation does not hold."
        )
    return tuple(sentences)
