"""Estimates over prompts with their standard errors."""

from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

FOLDS = 5
"""Number of parts of the prompts in a cross-validation; each is predicted from the others."""
LARGEST_PREDICTION = torch.finfo(torch.float32).max ** 0.5
"""Largest prediction whose square is finite in float32."""
RESAMPLES = 200
Samples = TypeVar("Samples", Prompts, np.ndarray)


def require_moderate(predictions: Tensor) -> None:
    """Refuse predictions that overflow.

    Raises:
        ValueError: If a prediction is not finite, or its square overflows float32.
    """
    largest = predictions.detach().abs().max().item()  # NaN if any is
    if not largest <= LARGEST_PREDICTION:
        raise ValueError(
            f"The model's predictions overflow: they must lie within ±{LARGEST_PREDICTION:.2g}, got {largest:.2g}."
        )


def require_finite(stream: np.ndarray) -> None:
    """Refuse a stream with entries that are not finite.

    Raises:
        ValueError: If an entry is NaN or infinite.
    """
    if not np.isfinite(stream).all():
        raise ValueError("The model's stream must be finite, got NaN or infinite entries.")


def mean_and_sem(
    values: Float[np.ndarray, " prompt *axes"],
) -> tuple[Float[np.ndarray, "*axes"], Float[np.ndarray, "*axes"]]:
    """Mean over the first axis and its standard error, which is NaN for one value.

    Example:
        >>> mean, sem = mean_and_sem(np.array([1.0, 2.0, 3.0]))
        >>> float(mean), round(float(sem), 4)
        (2.0, 0.5774)
    """
    if len(values) == 1:
        return np.asarray(values[0]), np.full(values.shape[1:], np.nan)
    sem = values.std(0, ddof=1) / len(values) ** 0.5
    return np.asarray(values.mean(0)), np.asarray(sem)


def estimates(**pairs: tuple[np.ndarray | float, np.ndarray | float]) -> dict[str, Any]:
    """Each estimate by name, and its standard error by the name with `_sem`; single numbers become
    floats.

    Example:
        >>> estimates(loss=mean_and_sem(np.array([1.0, 1.0])))
        {'loss': 1.0, 'loss_sem': 0.0}
    """
    named = {
        f"{n}{end}": v
        for n, pair in pairs.items()
        for end, v in zip(("", "_sem"), pair, strict=True)
    }
    return {name: value if np.ndim(value) else float(value) for name, value in named.items()}


def ratio_and_sem(
    numerator: Float[np.ndarray, " prompt *axes"], denominator: Float[np.ndarray, " prompt"]
) -> tuple[Float[np.ndarray, "*axes"], Float[np.ndarray, "*axes"]]:
    """Ratio of two means over prompts and its standard error (delta method); NaN if the mean of the denominator is 0.

    Example:
        >>> ratio, sem = ratio_and_sem(np.array([1.0, 2.0]), np.array([2.0, 4.0]))
        >>> float(ratio), float(sem)
        (0.5, 0.0)
    """
    columns = np.column_stack([numerator.reshape(len(numerator), -1), denominator])
    means = columns.mean(0)  # one call, so that equal columns have equal means
    if means[-1] == 0:
        return np.full(numerator.shape[1:], np.nan), np.full(numerator.shape[1:], np.nan)
    ratio = means[:-1] / means[-1]
    _, sem = mean_and_sem(columns[:, :-1] - ratio * denominator[:, None])
    return ratio.reshape(numerator.shape[1:]), (sem / abs(means[-1])).reshape(numerator.shape[1:])


def r2_and_sem(
    predicted: Float[Tensor, "prompt d_y"], expected: Float[Tensor, "prompt d_y"]
) -> tuple[float, float]:
    """1 - mean (predicted - expected)^2 / mean expected^2, and its standard error over prompts.

    Example:
        >>> line = torch.tensor([[1.0], [2.0]])
        >>> r2_and_sem(line / 2, line)
        (0.75, 0.0)
    """
    return loss_and_r2(predicted.numpy(), expected.numpy())[2:]


def loss_and_r2(
    predicted: Float[np.ndarray, "prompt d_y"], expected: Float[np.ndarray, "prompt d_y"]
) -> tuple[float, float, float, float]:
    """Mean (predicted - expected)^2, and R^2 = 1 - that / mean expected^2, each with its standard
    error over prompts.

    Example:
        >>> line = np.array([[1.0], [2.0]])
        >>> loss_and_r2(line / 2, line)[::2]
        (0.625, 0.75)
    """
    errors, squares = (np.square(values).mean(1) for values in (predicted - expected, expected))
    loss, loss_sem = mean_and_sem(errors)
    unexplained, sem = ratio_and_sem(errors, squares)
    return float(loss), float(loss_sem), 1 - float(unexplained), float(sem)


def best_factor(
    prediction: Float[Tensor, "prompt d_y"] | Float[np.ndarray, "prompt d_y"],
    target: Float[Tensor, "prompt d_y"] | Float[np.ndarray, "prompt d_y"],
) -> tuple[float, float]:
    """Factor c that minimises mean (c prediction - target)^2, and its standard error over prompts.

    If training can scale the output of a model, c = 1 at the optimum of its task: c f is a model
    too, and E (c f - y)^2 is smallest at c = 1. NaN if all predictions are 0.

    Example:
        >>> line = torch.tensor([[1.0], [2.0]])
        >>> best_factor(line / 2, line)
        (2.0, 0.0)
    """
    means = ((prediction * target).mean(1), (prediction**2).mean(1))
    factor, sem = ratio_and_sem(*(np.asarray(each, dtype=np.float64) for each in means))
    return float(factor), float(sem)


def average_ranks(values: Float[np.ndarray, " unit"]) -> Float[np.ndarray, " unit"]:
    """Rank of each value from 1; equal values share the mean of their ranks. One NaN makes all ranks NaN.

    Example:
        >>> average_ranks(np.array([0.5, 0.1, 0.5])).tolist()
        [2.5, 1.0, 2.5]
    """
    # scipy.stats has this, and takes a second to import.
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return np.full_like(ranks, np.nan) if np.isnan(values).any() else ranks


def rank_correlation(
    first: Float[np.ndarray, " unit"], second: Float[np.ndarray, " unit"]
) -> float:
    """Spearman's correlation; NaN if one of the inputs is constant.

    Example:
        >>> round(rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0])), 12)
        1.0
    """
    ranks = average_ranks(first), average_ranks(second)
    constant = any(np.ptp(rank) == 0 for rank in ranks)
    return float("nan") if constant else float(np.corrcoef(*ranks)[0, 1])


def resampled(n_units: int) -> list[Float[np.ndarray, " unit"]]:
    """Bootstrap: shares of the units in `RESAMPLES` samples of the same size, drawn with
    replacement.

    Example:
        >>> shares = resampled(5)
        >>> len(shares), float(shares[0].sum())
        (200, 1.0)
    """
    generator, even = np.random.default_rng(0), np.full(n_units, 1 / n_units)
    return [generator.multinomial(n_units, even) / n_units for _ in range(RESAMPLES)]


def carried_by_few(values: Float[np.ndarray, " prompt *axes"]) -> Bool[np.ndarray, "*axes"]:
    """True if the largest 1% of the values, by size, make up more than half of the sum of all
    sizes.

    The mean then describes a few prompts. Always False for fewer than 100 values.

    Example:
        >>> carried_by_few(np.array([[1.0, 200.0], *[[1.0, 1.0]] * 99])).tolist()
        [False, True]
    """
    sizes = np.sort(np.abs(values), axis=0)
    few = len(values) // 100
    return np.asarray(sizes[len(values) - few :].sum(0) > sizes.sum(0) / 2)


def without_worst(
    sizes: Float[np.ndarray, " prompt"], one_in: int = 1000
) -> Bool[np.ndarray, " prompt"]:
    """Mask that drops the prompts with the largest sizes, one in `one_in`; it keeps all of fewer
    prompts.

    The mean of a heavy-tailed quantity may not exist: it then grows with the number of prompts. The
    mean over the kept prompts has a limit, so that more prompts give a better estimate. NaN counts
    as the largest size.

    Example:
        >>> without_worst(np.array([9.0, 1.0, 2.0, 3.0]), one_in=4).tolist()
        [False, True, True, True]
    """
    stay = np.ones(len(sizes), bool)
    stay[np.argsort(sizes, kind="stable")[len(sizes) - len(sizes) // one_in :]] = False
    return stay


def halves(samples: Samples) -> tuple[Samples, Samples]:
    """First half of the samples, to choose on, and second half, to measure on.

    Raises:
        ValueError: If there are fewer than four.
    Example:
        >>> halves(np.arange(5))
        (array([0, 1]), array([2, 3, 4]))
    """
    if len(samples) < 4:
        raise ValueError(f"Choosing and measuring need at least 4 prompts, got {len(samples)}.")
    middle = len(samples) // 2
    return samples[:middle], samples[middle:]
