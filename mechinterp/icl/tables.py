"""Arrays and tables of a user's own data, checked, as the tensors of prompts."""

from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from mechinterp.config.vectors import generator_for

TEST_ROWS = 4
"""One row in this many of a table of data is for tests."""


def fitting_tensors(
    needed: Mapping[str, ArrayLike], further: Mapping[str, ArrayLike | None]
) -> dict[str, Tensor]:
    """Arrays of prompts as tensors of one dtype with all axes.

    Args:
        needed: x, y, x_query and y_query.
        further: beta and y_query_clean, or None.
    Raises:
        ValueError: If the shapes do not fit each other, or an entry is not finite.
    """
    given = {**needed, **{name: array for name, array in further.items() if array is not None}}
    tensors = {name: _tensor(name, array) for name, array in given.items()}
    shape = tensors["x"].shape
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"x must have shape [batch, L, d_x] without zeros, got {list(shape)}.")
    batch, length, d_x = shape
    start = {"y": (batch, length), "x_query": (batch, d_x), "beta": (batch, d_x)}
    for name, tensor in tensors.items():
        want = start.get(name, (batch,))
        if name in ("y", "y_query", "beta", "y_query_clean") and tensor.ndim == len(want):
            tensors[name] = tensor = tensor[..., None]
        d_y = tensors["y"].shape[2:3] if name != "y" else tensor.shape[2:]
        full = shape if name == "x" else want if name == "x_query" else (*want, *d_y)
        if tuple(tensor.shape) != tuple(full) or not tensor.numel():
            raise ValueError(
                f"{name} must have shape {[*full]} for x of shape {[*shape]}, got {list(tensor.shape)}."
            )
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(tensors["x"].device, dtype) for name, tensor in tensors.items()}


def rows_of_table(
    x: ArrayLike, y: ArrayLike, context_length: int, n_prompts: int, seed: int, standardise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, x_query and y_query of prompts of random rows of a table, as `Prompts.from_table` says."""
    table = {"x": _tensor("x", x).cpu(), "y": _tensor("y", y).cpu()}
    if table["y"].ndim == 1:
        table["y"] = table["y"][:, None]
    train, test = _split(table["x"], table["y"], context_length)
    if n_prompts < 1:
        raise ValueError(f"n_prompts must be >= 1, got {n_prompts}.")
    generator = generator_for(seed, "eval", 0)
    order = torch.randperm(train + test, generator=generator, device="cpu")
    pool = order[test:]
    if standardise:
        table = {name: _standardised(name, each, pool) for name, each in table.items()}
    places = torch.rand(n_prompts, train, generator=generator, device="cpu").argsort(1)
    pairs = pool[places[:, :context_length]]
    query = order[torch.randint(test, (n_prompts,), generator=generator, device="cpu")]
    x_all, y_all = table["x"], table["y"]
    return x_all[pairs], y_all[pairs], x_all[query], y_all[query]


def _tensor(name: str, values: ArrayLike) -> Tensor:
    """Real, finite tensor; whole numbers become float64, and half precision float32."""
    if np.ma.is_masked(values):
        raise ValueError(f"{name} must have no masked entries; leave these prompts out.")
    try:
        tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(_native(values))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of numbers, got {type(values).__name__}."
        ) from None
    if tensor.is_complex():
        raise ValueError(f"{name} must hold real numbers, got {tensor.dtype}.")
    if not tensor.is_floating_point():
        tensor = tensor.double()
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} must hold finite numbers, got NaN or infinite ones.")
    return tensor


def _native(values: ArrayLike) -> np.ndarray:
    """An array in the byte order, with strides and of a precision that torch takes."""
    array = np.ascontiguousarray(values)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _split(x: Tensor, y: Tensor, context_length: int) -> tuple[int, int]:
    """Numbers of rows of a table for pairs and for tests.

    Raises:
        ValueError: If the shapes do not fit, or there are too few rows.
    """
    shapes = [list(each.shape) for each in (x, y)]
    if any(len(shape) != 2 for shape in shapes) or len(x) != len(y):
        raise ValueError(
            f"x and y must have shapes [row, d_x] and [row, d_y], got {shapes[0]} and {shapes[1]}."
        )
    test = len(x) // TEST_ROWS
    train = len(x) - test
    if test < 1 or not 1 <= context_length <= train:
        raise ValueError(
            f"context_length must lie in 1 to {train}, the rows that are not for tests (1 in {TEST_ROWS} "
            f"is), got {context_length}."
        )
    return train, test


def _standardised(
    name: str, values: Float[Tensor, "row column"], rows: Int[Tensor, " some"]
) -> Float[Tensor, "row column"]:
    """Columns with mean 0 and variance 1 over some rows.

    Raises:
        ValueError: If a column is constant.
    """
    mean, std = values[rows].mean(0), values[rows].std(0, correction=0)
    if not (std > 0).all():
        raise ValueError(
            f"{name} must vary in every column to be standardised, got a constant one."
        )
    return (values - mean) / std
