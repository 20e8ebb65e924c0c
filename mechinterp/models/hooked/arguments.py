"""Arguments with which a plain module is called, from the input that `embed` makes."""

from collections.abc import Callable

from torch import Tensor

Split = Callable[[Tensor], tuple[Tensor, ...]]
"""Function from an input [batch, pos, width] to the arguments of a module."""


def whole(tokens: Tensor) -> tuple[Tensor, ...]:
    """The input as the one argument."""
    return (tokens,)


def xs_and_ys(tokens: Tensor, d_x: int, *, flat: bool) -> tuple[Tensor, ...]:
    """Arguments of a module that is called as model(xs, ys).

    Args:
        flat: True: ys is [batch, n]; False: [batch, n, d_y].
    """
    ys = tokens[..., d_x:]
    return tokens[..., :d_x], ys[..., 0] if flat else ys
