"""A metric of a model under masks: one number for each prompt and mask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.ablation.contrasts import FULL, Contrast, Mask
from mechinterp.analysis.learners.simple import LEARNERS
from mechinterp.analysis.stats import carried_by_few, mean_and_sem, ratio_and_sem, require_moderate
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

MASKS_AT_ONCE = 256
"""Number of masks in one run."""
Metric = Callable[[Tensor, Prompts], Tensor]
"""Function from predictions [batch, d_y] and prompts to one number per prompt."""


def squared_error(predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
    """Squared error against the clean target, mean over responses; its mean is the excess risk."""
    return (predictions.double() - prompts.y_query_clean.to(predictions)).square().mean(1)


@dataclass(frozen=True)
class Measure:
    """A metric with its name and unit."""

    function: Metric = squared_error
    name: str = "excess risk"
    unit: str = "y²"
    """Empty if unknown."""

    def values(self, predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
        """The metric for each prompt.

        Raises:
            ValueError: If it is not one finite number per prompt.
        """
        values = self.function(predictions, prompts)
        if not isinstance(values, Tensor):
            values = torch.as_tensor(values, device="cpu")
        if values.shape != (len(prompts),):
            raise ValueError(
                f"metric must give one number per prompt, [{len(prompts)}], got {list(values.shape)}."
            )
        if not values.isfinite().all():
            raise ValueError(f"metric must be finite, got {values[~values.isfinite()][0]}.")
        return values.double()


EXCESS = Measure()
"""The excess risk: mean of (y_hat - y_query_clean)^2."""


def measure_of(metric: Metric | str | None, task: TaskConfig | None) -> Measure:
    """A metric by its name, or a function with the name that it has in Python.

    Args:
        task: Law of the prompts, for "ridge" and "dmmse".
    Raises:
        ValueError: If there is no such metric, or it needs a task, or a pool.
    """
    if metric is None:
        return EXCESS
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        # A function without a name is called <lambda>.
        return Measure(metric, "metric" if "<" in name else name.replace("_", " "), "")
    if metric not in ("ridge", "dmmse"):
        raise ValueError(
            f"metric must be a function of predictions and prompts, 'ridge' or 'dmmse', got {metric!r}."
        )
    if task is None:
        raise ValueError(f"metric={metric!r} needs a task for given prompts, got none; pass task=.")
    if metric == "dmmse" and task.n_tasks is None:
        raise ValueError("metric='dmmse' needs a task with a pool (n_tasks), got one without.")

    def distance(predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
        learned = LEARNERS[metric].predict(prompts, task)
        return (predictions - learned.to(predictions)).square().mean(1)

    return Measure(distance, f"distance to {metric}")


def values_under(
    predictor: Predictor,
    prompts: Prompts,
    masks: Sequence[Mask],
    measure: Measure = EXCESS,
    method: str = "zero",
) -> Float[np.ndarray, "unit mask"]:
    """A metric under each mask, for independent units.

    A unit is a prompt; for resample ablation, where two prompts swap, it is the mean of a pair.

    Args:
        method: "zero"; "mean" over the prompts at each position; or "resample", the value of another prompt.
    """
    n_units = len(prompts) // 2 if method == "resample" else len(prompts)
    found = np.empty((len(masks), n_units)).T  # the values of a mask lie side by side
    chunks = _chunks(masks)
    # A single run has a bar of its own.
    for columns in chunks if len(chunks) == 1 else progress(chunks, "masks"):
        some = [masks[n] for n in columns]
        # A list of MLPs, even of none, has the model run with hooks; full and masked model are run in the same way.
        layers = [mask.mlps for mask in some] if any(mask.mlps for mask in masks) else None
        heads = [mask.heads for mask in some]
        predictions = predictor.run(prompts, heads, mlps=layers, at=some[0].at, method=method)
        require_moderate(predictions)
        values = torch.stack([measure.values(each, prompts) for each in predictions], 1)
        values = values.unflatten(0, (-1, 2)).mean(1) if method == "resample" else values
        found[:, columns] = values.numpy(force=True)
    return found


def _chunks(masks: Sequence[Mask]) -> list[list[int]]:
    """Numbers of the masks that are run together: those at one position, not too many."""
    by_position: dict[int | None, list[int]] = {}
    for n, mask in enumerate(masks):
        by_position.setdefault(mask.at, []).append(n)
    return [
        some[i : i + MASKS_AT_ONCE]
        for some in by_position.values()
        for i in range(0, len(some), MASKS_AT_ONCE)
    ]


def masked_errors(
    source: object, prompts: Prompts, masks: Sequence[Sequence[Head]]
) -> Float[np.ndarray, "prompt mask"]:
    """Squared error against the clean target under each mask, zero ablation, mean over responses."""
    return values_under(predictor_of(source), prompts, [Mask(tuple(heads)) for heads in masks])


@dataclass(frozen=True, eq=False)
class Estimates:
    """Contrasts of each row, as estimates over prompts."""

    columns: Mapping[str, Float[np.ndarray, " row"]]
    """Each contrast, with its standard error as `NAME_sem`; of the last one also `median_NAME`; beside "risk" its "ratio"
    to that of the full model."""
    carried_by_few: Bool[np.ndarray, " row"]
    """For the last contrast."""
    full: tuple[float, float]
    """Metric of the full model, and its standard error."""


def estimated(
    predictor: Predictor,
    prompts: Prompts,
    rows: Mapping[tuple, Mapping[str, Contrast]],
    measure: Measure = EXCESS,
    method: str = "zero",
) -> Estimates:
    """Contrasts of each row; all rows have contrasts of the same names.

    Raises:
        ValueError: If there are fewer than two prompts, or pairs of prompts that swap.
    """
    used = (mask for row in rows.values() for contrast in row.values() for mask in contrast)
    place = {mask: n for n, mask in enumerate(dict.fromkeys([FULL, *used]))}
    values = values_under(predictor, prompts, [*place], measure, method)
    if len(values) < 2:
        raise ValueError(f"At least 2 prompts (or pairs of prompts) are needed, got {len(values)}.")
    names = list(next(iter(rows.values())))
    columns: dict[str, np.ndarray] = {}
    # Values of one row lie side by side, as the sums over prompts read them.
    costs = np.empty((len(rows), len(values)))
    for name in names:
        for cost, row in zip(costs, rows.values(), strict=True):
            weights = {place[mask]: weight for mask, weight in row[name].items()}
            cost[:] = np.ascontiguousarray(values[:, [*weights]]) @ np.array([*weights.values()])
        columns[name], columns[f"{name}_sem"] = mean_and_sem(costs.T)
        if name == "risk":
            ratios = [ratio_and_sem(cost, values[:, 0]) for cost in costs]
            columns["ratio"], columns["ratio_sem"] = np.array(ratios, dtype=float).T
    columns[f"median_{names[-1]}"] = np.median(costs, axis=1)
    mean, sem = mean_and_sem(values[:, 0])
    return Estimates(columns, carried_by_few(costs.T), (float(mean), float(sem)))
