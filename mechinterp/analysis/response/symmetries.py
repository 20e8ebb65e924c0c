"""Symmetries of a learner: how much its predictions change under changes of the prompt that keep its law."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from mechinterp.analysis.response.pair_weights import values
from mechinterp.analysis.response.projection import jackknife, ratio
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner

ROTATION, SUM_OF_Y = "rotation of x", "sum of two y"
"""Names of the symmetries that the class of a learner and the coordinates of x follow from."""


@dataclass(frozen=True, eq=False)
class Symmetric:
    """Learner whose symmetries are measured, and its predictions for the prompts and for -y."""

    function: Learner
    f: Float[np.ndarray, " batch"]
    f_reversed: Float[np.ndarray, " batch"]


def symmetries_frame(
    learners: Mapping[str, Symmetric],
    prompts: Prompts,
    group: np.ndarray,
    output: int,
    seed: int,
    only: Collection[str] = (),
) -> pd.DataFrame:
    """Mismatch E (f - f')^2 / (2 E f^2) of each symmetry: 0 if it is kept, 1 for unrelated predictions.

    Args:
        learners: The model as "model", and the Bayes learner as "bayes" if it is known.
        only: Names of the symmetries that are measured; empty: all.
    """
    columns = {}
    for name, learner in learners.items():
        rows = {}
        total = _grouped(learner.f**2, group)
        for symmetry, pair in _transformed(learner, prompts, output, seed).items():
            if not only or symmetry in only:
                left, right = pair()
                missed = _grouped((left - right) ** 2, group)
                rows[symmetry] = jackknife(lambda e, s: ratio(e, 2 * s), missed, total)
        columns[name] = rows
    model = columns["model"]
    bayes = columns.get("bayes", {})
    return pd.DataFrame(
        {
            "symmetry": list(model),
            "mismatch": [float(value) for value, _ in model.values()],
            "mismatch_sem": [float(sem) for _, sem in model.values()],
            "bayes": [float(bayes[name][0]) if name in bayes else np.nan for name in model],
        }
    )


def _grouped(each: np.ndarray, group: np.ndarray) -> np.ndarray:
    return np.stack([each[group == g].sum(0) for g in np.unique(group)])


def _transformed(
    learner: Symmetric, prompts: Prompts, output: int, seed: int
) -> dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """Functions that give the predictions on transformed prompts, and what they should be."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x, y, query = prompts.x, prompts.y, prompts.x_query
    order = torch.randperm(x.shape[1], generator=generator, device="cpu")
    shape = (x.shape[2], x.shape[2])
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    rotation = torch.linalg.qr(normal)[0].to(x)
    spread = float(y.std())
    half = 0.5**0.5

    def run(**changed: torch.Tensor) -> np.ndarray:
        return values(learner.function, replace(prompts, **changed), output)

    f = learner.f
    turned = query.roll(1, 0)
    tests = {
        "order of pairs": lambda: (run(x=x[:, order], y=y[:, order]), f),
        ROTATION: lambda: (run(x=x @ rotation, x_query=query @ rotation), f),
        "sign of y": lambda: (-learner.f_reversed, f),
        "y / 2": lambda: (2 * run(y=y / 2), f),
        "2 y": lambda: (run(y=2 * y) / 2, f),
        "sum of two queries": lambda: (
            run(x_query=(query + turned) * half),
            (f + run(x_query=turned)) * half,
        ),
        "shift of x": lambda: (run(x=x + 1, x_query=query + 1), f),
        "shift of y": lambda: (run(y=y + spread) - spread, f),
    }
    if prompts.knows_task_vectors:
        other = second_y(prompts)
        tests[SUM_OF_Y] = lambda: (run(y=(y + other) * half), (f + run(y=other)) * half)
    return tests


def second_y(prompts: Prompts) -> torch.Tensor:
    """Responses of another task vector and other noise on the same x."""
    return prompts.with_next_task("a second y").y
