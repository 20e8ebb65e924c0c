"""Symmetries of a learner: how much its predictions change under changes of the prompt that keep its law."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from mechinterp.analysis.response.pair_weights import values
from mechinterp.analysis.response.projection import jackknife, ratio
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner


def symmetries_frame(
    functions: Mapping[str, Learner], prompts: Prompts, group: np.ndarray, output: int, seed: int
) -> pd.DataFrame:
    """Mismatch E (f - f')^2 / (2 E f^2) of each symmetry: 0 if it is kept, 1 for unrelated predictions.

    Args:
        functions: The model, and the Bayes learner as "bayes" if it is known.
    """
    columns = {}
    for name, function in functions.items():
        pairs = _transformed(function, prompts, output, seed)
        rows = {}
        for symmetry, (left, right, plain) in pairs.items():
            sums = [_grouped(each, group) for each in ((left - right) ** 2, plain**2)]
            rows[symmetry] = jackknife(lambda e, s: ratio(e, 2 * s), *sums)
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
    function: Learner, prompts: Prompts, output: int, seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Predictions on the transformed prompts, what they should be, and the plain predictions."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x, y, query = prompts.x, prompts.y, prompts.x_query
    order = torch.randperm(x.shape[1], generator=generator, device="cpu")
    shape = (x.shape[2], x.shape[2])
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    rotation = torch.linalg.qr(normal)[0].to(x)
    spread = float(y.std())
    half = 0.5**0.5

    def run(**changed: torch.Tensor) -> np.ndarray:
        return values(function, replace(prompts, **changed), output)

    f = run()
    turned = query.roll(1, 0)
    tests = {
        "order of pairs": (run(x=x[:, order], y=y[:, order]), f),
        "rotation of x": (run(x=x @ rotation, x_query=query @ rotation), f),
        "sign of y": (-run(y=-y), f),
        "y / 2": (2 * run(y=y / 2), f),
        "2 y": (run(y=2 * y) / 2, f),
        "sum of two queries": (
            run(x_query=(query + turned) * half),
            (f + run(x_query=turned)) * half,
        ),
        "shift of x": (run(x=x + 1, x_query=query + 1), f),
        "shift of y": (run(y=y + spread) - spread, f),
    }
    if prompts.knows_task_vectors:
        other = second_y(prompts)
        tests["sum of two y"] = (run(y=(y + other) * half), (f + run(y=other)) * half)
    return {name: (*pair, f) for name, pair in tests.items()}


def second_y(prompts: Prompts) -> torch.Tensor:
    """Responses of another task vector and other noise on the same x."""
    return prompts.with_next_task("a second y").y
