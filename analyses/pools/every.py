"""The second map of plan.md: GPT-2 on pools of tasks, trained on the loss at every position.

    python -m analyses.pools.every train map --out RUNS [--device cuda] [--seconds N]
    python -m analyses.pools.every finished FOLDER... [--out DIR]
    python -m analyses.pools.every tables RUNS [--out DIR]

`train` takes map, long or garg: the models of the plan, M = 16 with more steps, and the smallest
GPT-2 of Garg et al. on d_x 5. All models of a set train side by side; --seconds stops them early.
RUNS/NAME.npz has sums over prompts at a grid of steps, RUNS/NAME/MODEL the checkpoints. `finished`
measures models of the set "long" that `mechinterp train` trained to the end (folders m16-long-sSEED,
a snapshot every 10,000 steps) and adds them to the table as the set "long alone". `tables`
writes results/pools/pool_every.csv (losses and distances at every measured step) and
pool_every_law.csv (the law of two strategies)."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.optimize import least_squares
from torch import Tensor

from analyses.lib import RESULTS
from analyses.lib.deep_pack import DeepPack
from mechinterp import load, override, preset
from mechinterp.config import ExperimentConfig
from mechinterp.icl.predictors import dmmse, ridge
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.general import predict_at_every
from mechinterp.models.run.predictor import predictions_after

POOLS = (1, 4, 16, 64, 256, 1024, None)
COMPARED = 1024
"""Number of tasks of the pool that models without a pool are compared with."""
N_PROMPTS, BLOCKS = 4096, 32
GRID = {*range(0, 2000, 250), *range(2000, 4000, 500), *range(4000, 10_000, 1000)}
GRID |= {*range(10_000, 20_001, 2000)}
LONG_GRID = {*range(0, 10_000, 1000), *range(10_000, 200_001, 10_000)}
ALONE = "long alone"
"""Name of the set of models that `mechinterp train` trained."""
COLUMNS = ("to_dmmse", "to_ridge", "inner", "gap", "norm")
"""Sums for distances: |f - dMMSE|^2 / d_x, |f - ridge|^2 / d_x, <f - ridge, dMMSE - ridge>,
|dMMSE - ridge|^2, |f - ridge|^2."""
FIT_LOSSES = ("fit_loss", "fit_dmmse", "fit_ridge")
PREDICTORS = ("model", "dmmse", "ridge")
FITTED, TESTED = (1, 4, 64, 1024), (16, 256)
"""Numbers of tasks on which the law is fitted and tested."""
EARLIEST = 250
"""First step of the law: at step 0 a model is no mixture of the two predictors."""


def sets(name: str) -> dict[str, ExperimentConfig]:
    """Configs of a set of models, by name."""
    base = preset("pool-gpt2")
    if name == "map":
        named = {("none" if m is None else str(m)): "null" if m is None else m for m in POOLS}
        return {
            f"m{m}-s{seed}": override(base, f"task.n_tasks={value}", f"seed={seed}")
            for m, value in named.items()
            for seed in range(3)
        }
    if name == "long":
        steps = ("train.steps=200000", "train.batch_size=64", "train.log_every=1000")
        steps += ("train.n_eval_prompts=1024",)
        return {f"m16-long-s{seed}": override(base, f"seed={seed}", *steps) for seed in range(3)}
    sizes = ("task.d_x=5", "task.context_length=10", "task.n_tasks=null", "model.n_positions=22")
    return {f"garg-tiny-s{seed}": override(base, f"seed={seed}", *sizes) for seed in range(3)}


class Reference:
    """Evaluation prompts of a model with dMMSE and ridge at every position, on tasks of the pool and
    on new ones."""

    def __init__(self, config: ExperimentConfig, kind: str, device: str):
        task = config.task
        pooled = replace(task, n_tasks=task.n_tasks or COMPARED)
        of = task if kind == "new" and task.n_tasks is None else pooled
        prompts = draw_prompts(of, N_PROMPTS, dtype=torch.float64, new_tasks=kind == "new")
        self.prompts, pool = prompts.to(device), pooled.pool().to(device)
        learned = (
            partial(dmmse, pool=pool, noise_var=task.noise_var),
            partial(ridge, penalty=task.posterior_penalty),
        )
        lengths = range(self.prompts.x.shape[1] + 1)
        self.dmmse, self.ridge = (predictions_after(f, self.prompts, lengths) for f in learned)

    def sums(self, f: Float[Tensor, "prompt n 1"]) -> Float[np.ndarray, "block n column"]:
        """Means over blocks of prompts of `COLUMNS`, then excess risks and losses of `PREDICTORS`."""
        D, R, d_x = self.dmmse, self.ridge, self.prompts.x.shape[2]
        clean, y = self.prompts.every_x @ self.prompts.beta, self.prompts.y_of_every_x
        columns = [(f - D) ** 2 / d_x, (f - R) ** 2 / d_x, (f - R) * (D - R), (D - R) ** 2]
        columns += [
            (f - R) ** 2,
            *((each - target) ** 2 for target in (clean, y) for each in (f, D, R)),
        ]
        squares = torch.stack([each.mean(2) for each in columns], 2)
        return squares.view(BLOCKS, -1, *squares.shape[1:]).mean(1).float().numpy(force=True)


def train(name: str, out: Path, device: str, seconds: float) -> None:
    """Train a set of models side by side and measure them at the grid of steps."""
    models, grid = sets(name), LONG_GRID if name == "long" else GRID
    pack, start = DeepPack(models, device=device), time.monotonic()
    references: dict[object, Reference] = {}
    steps, sums = [], []

    @torch.no_grad()
    def measure() -> None:
        rows = []
        for index, config in enumerate(models.values()):
            weights = pack.of(index)
            for kind in ("pool", "new"):
                key = (config.task, kind)
                if key not in references:
                    references[key] = Reference(config, kind, device)
                of = references[key]
                f = predict_at_every(weights, of.prompts.to(torch.float32)).double()
                rows.append(of.sums(f))
        shape = (len(models), 2, *rows[0].shape)
        sums.append(np.stack(rows).reshape(shape))
        steps.append(pack.step)

    measure()
    while not pack.finished and time.monotonic() - start < seconds:
        pack.advance()
        if pack.step in grid or pack.finished:
            measure()
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / f"{name}.npz", records=sums, steps=steps, models=list(models))
    for model, trained in pack.results().items():
        trained.save(out / name / model)


def rows_of(name: str, file: Path) -> pd.DataFrame:
    """One row per model, measured step and kind of tasks: means over 1 to L pairs."""
    stored, configs = np.load(file), sets(name)
    rows = []
    for at, step in enumerate(stored["steps"]):
        for index, model in enumerate(stored["models"]):
            config = configs[str(model)]
            for kind, blocks in zip(("pool", "new"), stored["records"][at, index], strict=True):
                rows.append(row_of(name, str(model), config, step, kind, blocks))
    return pd.DataFrame(rows)


def row_of(
    name: str,
    model: str,
    config: ExperimentConfig,
    step: int,
    kind: str,
    blocks: Float[np.ndarray, "block n column"],
) -> dict[str, object]:
    """Numbers of a model at a step, on tasks of the pool or on new ones."""
    about = {"set": name, "model": model, "n_tasks": config.task.n_tasks}
    about |= {"seed": config.seed, "step": step, "tasks": kind}
    every = blocks.mean((0, 1))[len(COLUMNS) + 3 :]
    losses = dict(zip(FIT_LOSSES, every, strict=True))
    return about | estimates(blocks[:, 1:].mean(1).astype(float)) | losses


def finished(folders: Sequence[Path], out: Path) -> None:
    """Add the snapshots of models that were trained alone to the table."""
    rows = []
    for folder in folders:
        trained = load(folder)
        train = replace(trained.config.train, snapshot_every=None)
        assert replace(trained.config, train=train) == sets("long")[folder.name], folder
        for kind in ("pool", "new"):
            of = Reference(trained.config, kind, "cpu")
            for step, weights in {**trained.snapshots, trained.step: trained.weights}.items():
                with torch.no_grad():
                    f = predict_at_every(weights, of.prompts.to(torch.float32)).double()
                rows.append(row_of(ALONE, folder.name, trained.config, step, kind, of.sums(f)))
    put(pd.DataFrame(rows).sort_values(["seed", "step"], kind="stable"), out)


def put(rows: pd.DataFrame, out: Path) -> None:
    """Rows of some sets, in the table in place of earlier rows of these sets."""
    table = out / "pool_every.csv"
    kept = rows.drop(columns=list(FIT_LOSSES))
    text = kept.to_csv(index=False, float_format="%.4g", lineterminator="\n")
    header, *new = text.splitlines(True)
    old = table.read_text().splitlines(True)[1:] if table.exists() else []
    replaced = tuple(f"{name}," for name in rows["set"].unique())
    others = (line for line in old if not line.startswith(replaced))
    table.write_text("".join([header, *others, *new]))


def estimates(blocks: Float[np.ndarray, "block column"]) -> dict[str, float]:
    """Estimates from block means, each with its standard error by the jackknife over blocks."""
    total, n = blocks.sum(0), len(blocks)
    whole = _numbers(total / n)
    left_out = pd.DataFrame([_numbers((total - block) / (n - 1)) for block in blocks])
    sems = ((n - 1) * left_out.var(ddof=0)) ** 0.5
    both = [(name, value, f"{name}_sem", sems[name]) for name, value in whole.items()]
    return {key: value for a, b, c, d in both for key, value in ((a, b), (c, d))}


def _numbers(means: Float[np.ndarray, " column"]) -> dict[str, float]:
    to_dmmse, to_ridge, inner, gap, norm, *rest = means
    risks, losses = (dict(zip(PREDICTORS, part, strict=True)) for part in (rest[:3], rest[3:]))
    weight = inner / gap
    return {
        "relative": to_dmmse / (to_dmmse + to_ridge),
        "weight_dmmse": weight,
        "unexplained": (norm - 2 * weight * inner + weight**2 * gap) / gap,
        "risk": risks["model"],
        "risk_over_ridge": risks["model"] / risks["ridge"],
        "loss": losses["model"],
        "loss_over_dmmse": losses["model"] / losses["dmmse"],
        "loss_over_ridge": losses["model"] / losses["ridge"],
    }


def law(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured and predicted weights and relative distances on prompts of the pool, by M and step."""
    of_map = rows.query(f"set == 'map' and tasks == 'pool' and step >= {EARLIEST}")
    columns = ["weight_dmmse", "relative", "fit_dmmse", "fit_ridge"]
    means = (
        of_map.dropna(subset="n_tasks").groupby(["n_tasks", "step"])[columns].mean().reset_index()
    )
    gain = means.fit_ridge - means.fit_dmmse
    bits = 32.0 * 4 * means.n_tasks

    def weight(logs: Float[np.ndarray, " parameter"]) -> np.ndarray:
        alpha, beta, gamma = np.exp(logs)
        evidence = gamma * means.step ** (1 - alpha) * gain
        odds = evidence - np.log(2) * (bits**beta - 64.0**beta)
        return 1 / (1 + np.exp(-np.clip(odds, -500, 500)))

    fitted = means.n_tasks.isin(FITTED)

    def residual(logs: np.ndarray) -> np.ndarray:
        return (weight(logs) - means.weight_dmmse)[fitted].to_numpy()

    starts = [np.log([a, b, g]) for a in (0.1, 0.5) for b in (0.2, 0.5) for g in (0.01, 1.0)]
    best = min((least_squares(residual, start) for start in starts), key=lambda fit: fit.cost)
    w = weight(best.x)
    named = dict(zip(("alpha", "beta", "gamma"), np.exp(best.x), strict=True))
    predicted = (1 - w) ** 2 / ((1 - w) ** 2 + w**2)
    return means.assign(predicted_weight=w, predicted_relative=predicted, fitted=fitted, **named)


def tables(runs: Path, out: Path) -> None:
    """Write the rows of the sets in a folder; with the map among them the law, too, and print what it gives on the tested M."""
    found = [rows_of(file.stem, file) for file in sorted(runs.glob("*.npz"))]
    rows = pd.concat(found, ignore_index=True)
    put(rows, out)
    if "map" not in set(rows["set"]):
        return
    of_law = law(rows)
    of_law.to_csv(out / "pool_every_law.csv", index=False, float_format="%.4g")
    tested = of_law[of_law.n_tasks.isin(TESTED)]
    difference = (tested.relative - tested.predicted_relative).abs().mean()
    print(tested.relative.corr(tested.predicted_relative), difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_train = commands.add_parser("train")
    of_train.add_argument("name", choices=("map", "long", "garg"))
    of_train.add_argument("--out", type=Path, required=True)
    of_train.add_argument("--device", default="cpu")
    of_train.add_argument("--seconds", type=float, default=float("inf"))
    of_finished = commands.add_parser("finished")
    of_finished.add_argument("folders", type=Path, nargs="+")
    of_finished.add_argument("--out", type=Path, default=RESULTS / "pools")
    of_tables = commands.add_parser("tables")
    of_tables.add_argument("runs", type=Path)
    of_tables.add_argument("--out", type=Path, default=RESULTS / "pools")
    given = parser.parse_args()
    if given.command == "train":
        train(given.name, given.out, given.device, given.seconds)
    elif given.command == "finished":
        finished(given.folders, given.out)
    else:
        tables(given.runs, given.out)


if __name__ == "__main__":
    main()
