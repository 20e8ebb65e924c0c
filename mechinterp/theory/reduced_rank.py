"""Exact learning coefficient of a product of two matrices (reduced rank regression), where the minimum is singular."""

from mechinterp.theory.linear import require_counts


def reduced_rank_coefficient(d_out: int, d_in: int, *, n_hidden: int, rank: int) -> float:
    """lambda of the loss |A B - T|^2 at A and B of the rank of T; A is [d_out, n_hidden], B is [n_hidden, d_in].

    At these A and B the spare part of both matrices is 0. The value is no half number of parameters, and the Hessian has a
    lower rank than twice the value.

    Args:
        rank: Rank of T, at most each of the sizes.
    Raises:
        ValueError: If a size is below 1, or the rank is negative or above a size.
    Source:
        Aoyagi and Watanabe 2005, "Stochastic complexities of reduced rank regression in Bayesian estimation", Neural
        Networks 18, 924-933; this shorter proof for the value at the most singular point is our own.
    Example:
        >>> [reduced_rank_coefficient(4, 4, n_hidden=h, rank=0) for h in (1, 2, 3, 4)]
        [2.0, 3.5, 5.0, 6.0]
        >>> reduced_rank_coefficient(4, 4, n_hidden=2, rank=1)
        5.0
    """
    # 1. Rank 0. Let V(e) be the volume of {|A B| <= e} near 0; lambda is half the power of e, since the loss is |A B|^2.
    # Let A have the singular values a_1 >= ... >= a_k, k = min(m, h), with m = d_out, h = n_hidden and n = d_in. Then
    # |A B| <= e says that row i of the rotated B, of n entries, is below e / a_i up to constants: the volume in B is
    # prod_i min(1, e / a_i)^n. The volume in A is prod_i a_i^|m-h| prod_{i<j} (a_i^2 - a_j^2) da.
    # With a_i = e^t_i, 0 <= t_1 <= ... <= t_k, and a_i^2 - a_j^2 of the order of a_i^2, V(e) is the integral over t of e to
    #     sum_i (|m-h| + 1 + 2 (k-i)) t_i + n sum_i max(1 - t_i, 0),
    # so that its power is the least value of this sum. It grows for t_i > 1, so that t_i <= 1, and is linear there:
    #     n k + sum_i (|m-h| + 1 + 2 (k-i) - n) t_i.
    # The factors fall with i. So the least value has t_i = 1 where the factor is negative, which are the last ones, and
    # 0 elsewhere, which respects the order. Hence 2 lambda = n k + sum_j min(0, |m-h| + 1 + 2 j - n), j = k - i. If a
    # factor is 0 the minimum is not unique, and V(e) has a logarithm too, which leaves lambda as it is.
    # 2. Rank r. In suitable bases T = A = B = diag(I_r, 0). Write A = [A1 A2; A3 A4] and B = [B1 B2; B3 B4], and the first
    # three blocks of A B - T as C11 = A1 B1 + A2 B3 - I, C12 = A1 B2 + A2 B4 and C21 = A3 B1 + A4 B3. As A1 and B1 are near
    # I, (C11, C12, C21) are coordinates in place of (B1, B2, A3). Modulo these, the last block A3 B2 + A4 B4 is
    # A4 G B4 with G = I + B3 (I - A2 B3)^-1 A2, which is invertible and goes into A4. So the loss is equivalent to
    # |C|^2 + |A4 B4|^2: the r (m + n - r) entries of C count 1/2 each, and A4 B4 is case 1 of sizes less r. QED
    require_counts(d_out=d_out, d_in=d_in, n_hidden=n_hidden)
    if not 0 <= rank <= min(d_out, d_in, n_hidden):
        raise ValueError(
            f"rank must lie in 0 to {min(d_out, d_in, n_hidden)}, the smallest size, got {rank}."
        )
    m, n, h = d_out - rank, d_in - rank, n_hidden - rank
    k = min(m, h)
    doubled = n * k + sum(min(0, abs(m - h) + 1 + 2 * j - n) for j in range(k))
    return (rank * (d_out + d_in - rank) + doubled) / 2
