"""Rate of doubts about the assumed task, under a shipped model's own task, under changed tasks, and
with random weights.

    python -m analyses.algorithms.task_doubt    (about four minutes on one core)

A model runs on prompts whose noise, task vectors, length or covariates differ from those of its
training, as if they were assumed for its file. Number of prompts as in `classify`, several seeds.
Writes analyses/results/algorithms/task_doubt.csv, one row per kind of model and change: number of
doubts, and the best factor on the predictions. docs/results/labels.md shows the counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.lib.measured import RESULTS, ROOT, parsed, parser_of
from analyses.lib.result_tables import markdown
from mechinterp import Prompts, TaskConfig, load, predictor_of
from mechinterp.analysis.learners.nearest import task_doubt, task_loss
from mechinterp.analysis.one_layer.classify import N_LAYER_PROMPTS, N_LAYERED_PROMPTS
from mechinterp.analysis.stats import best_factor
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.layers import is_normalised
from mechinterp.training.one_layer.step import initial_weights

FILE = "task_doubt.csv"
SEEDS, N_RANDOM = range(4), 20
CHANGES = {"own task": {}} | {
    f"{name} {'twice' if factor > 1 else 'half'} that of training": {name: factor}
    for name in ("noise_var", "beta_var", "context_length", "covariance")
    for factor in (2.0, 0.5)
}
"""Factors on the variances and the length of the prompts."""


def changed(
    task: TaskConfig,
    n_prompts: int,
    seed: int,
    *,
    noise_var: float = 1.0,
    beta_var: float = 1.0,
    context_length: float = 1.0,
    covariance: float = 1.0,
) -> Prompts:
    """Prompts of a task with these factors on its variances and on its length."""
    task = replace(task, context_length=round(task.context_length * context_length))
    drawn = draw_prompts(task, n_prompts, seed=seed, dtype=torch.float64)
    signal, noise = (beta_var * covariance) ** 0.5, noise_var**0.5
    clean = torch.einsum("blx,bxn->bln", drawn.x, drawn.beta)
    rest = drawn.y_query - drawn.y_query_clean
    return Prompts(
        x=covariance**0.5 * drawn.x,
        y=signal * clean + noise * (drawn.y - clean),
        x_query=covariance**0.5 * drawn.x_query,
        y_query=signal * drawn.y_query_clean + noise * rest,
        y_query_clean=signal * drawn.y_query_clean,
        beta=beta_var**0.5 * drawn.beta,
    )


def kind_of(checkpoint: Checkpoint) -> str:
    model = checkpoint.config.model
    if model.d_mlp is not None:
        return "several layers with MLPs"
    if not model.one_attention:
        return "several layers"
    return f"one layer, {'scores that are averaged' if is_normalised(model.score) else 'linear scores'}"


def rows_of(folder: Path) -> list[dict[str, object]]:
    """One row per change and seed of a model."""
    checkpoint, rows = load(folder), []
    model, length = checkpoint.config.model, checkpoint.task.context_length
    n_prompts = N_LAYER_PROMPTS if model.one_attention else N_LAYERED_PROMPTS
    for change, factors in CHANGES.items():
        most = model.longest_context or np.inf
        if factors.get("context_length", 1) * length > most:
            continue
        if "noise_var" in factors and not checkpoint.task.noise_var:
            continue
        for seed in SEEDS:
            prompts = changed(checkpoint.task, n_prompts, seed, **factors)
            prediction = checkpoint.predictor.run(prompts)[0].double()
            about = {"kind": kind_of(checkpoint), "checkpoint": folder.name, "change": change}
            rows.append(about | judged(prediction, prompts))
    return rows


def rows_of_random_weights(folder: Path) -> list[dict[str, object]]:
    """One row per set of initial weights of a one-layer model, under its own task."""
    checkpoint = load(folder)
    if not checkpoint.config.model.one_attention:
        return []
    found = {"kind": "random weights", "checkpoint": folder.name, "change": "own task"}
    prompts = changed(checkpoint.task, N_LAYER_PROMPTS, 0)
    rows = []
    for seed in range(N_RANDOM):
        weights = initial_weights(replace(checkpoint.config, seed=seed)).to(torch.float64)
        rows.append(found | judged(predictor_of(weights).predict(prompts), prompts))
    return rows


def judged(prediction: Tensor, prompts: Prompts) -> dict[str, object]:
    """Best factor of a prediction, and whether it raises a doubt about the task."""
    factor = best_factor(prediction, prompts.y_query_clean)
    loss = task_loss(prediction, torch.zeros_like(prompts.y_query), prompts)
    doubt = task_doubt(factor, (loss.scaled_r2, loss.scaled_r2_sem))
    return {"factor": factor[0], "scaled_r2": loss.scaled_r2, "doubted": bool(doubt)}


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Number of doubts, by kind and change."""
    grouped = rows.groupby(["kind", "change"], sort=False)
    return grouped.agg(
        models=("checkpoint", "nunique"),
        asked=("doubted", "size"),
        doubted=("doubted", "sum"),
        factor_median=("factor", "median"),
        factor_low=("factor", lambda values: values.quantile(0.05)),
        factor_high=("factor", lambda values: values.quantile(0.95)),
        scaled_r2_median=("scaled_r2", "median"),
    ).reset_index()


def doubt_table(results: Path) -> str:
    """Number of doubts for each change, by kind of model."""
    found = pd.read_csv(results / "algorithms" / FILE)
    found["cell"] = [f"{row.doubted} of {row.asked:,}" for row in found.itertuples()]
    wide = found.pivot(index="change", columns="kind", values="cell").fillna("")
    kinds = list(dict.fromkeys(found["kind"]))
    rows = [(change, *wide.loc[change, kinds]) for change in CHANGES]
    return markdown(("assumed task", *kinds), rows)


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS / "algorithms")
    parser.add_argument("--only", nargs="*", help="only these models, for a trial")
    arguments = parsed(parser)
    names = arguments.only or [f.name for f in (ROOT / "checkpoints").iterdir() if f.is_dir()]
    folders = [ROOT / "checkpoints" / name for name in sorted(names)]
    rows = [row for folder in folders for row in rows_of(folder)]
    rows += [row for folder in folders for row in rows_of_random_weights(folder)]
    every = pd.DataFrame(rows)
    table = summary(every)
    table.to_csv(arguments.out / FILE, index=False, float_format="%.4g")
    print(table.to_string(index=False))
    alarms = every[(every["change"] == "own task") & every["doubted"]]
    print(alarms.groupby(["kind", "checkpoint"])["factor"].agg(["size", "median"]))


if __name__ == "__main__":
    main()
