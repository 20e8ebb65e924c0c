"""C9 to C16 of sparse regression in every setting of the plan, sparse/plan.md: one row per model.

Each row has the verdicts on the claims and the numbers behind them; "layer 1" is the first.
Run: python -m analyses.sparse.settings FOLDER, where FOLDER has checkpoints from `mechinterp sweep
    analyses/sweeps/sparse_settings.json --out FOLDER` (a minute per model; --quick seconds). Not
    part of `make analyses`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.lib import claims
from analyses.lib.measured import parsed, parser_of, provenance
from analyses.lib.records import save
from analyses.sparse import questions as ask
from analyses.sparse.fairness import LEARNERS, TASK, moments, of_task
from analyses.sparse.setting import best, best_lasso, best_ridge, ratio, told, typical_ratio, unseen
from mechinterp import ExperimentConfig, ICLTransformer, Prompts, TaskConfig
from mechinterp.analysis.ablation.pruning_rules import best_head_first, best_head_later
from mechinterp.analysis.probing.p_probe import IDEAL, RAW
from mechinterp.analysis.stats import halves, mean_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.sparse_predictors import gradient_descent, preprocess_then_optimise

PROMPTS, OVER_TRAINING = 8192, 1024
"""Numbers of prompts. Heads are chosen on the first half of PROMPTS and measured on the second half; earlier rows have half as
many. OVER_TRAINING is the number at each saved step."""
MODEL = ("score", "n_heads", "d_head", "d_model", "n_layers")
Row = dict[str, object]
LASSO_PROMPTS = 512
FIXED = {"gd_fixed": "gd", "algorithm_fixed": "algorithm", "lista": "lista"}
"""Learners with as many steps as layers allow; their sizes are fitted on separate prompts."""


@cache
def learners(task: TaskConfig, layers: int, n_prompts: int) -> Mapping[str, np.ndarray]:
    """Excess risk of each measured prompt, by learner; lasso uses the last prompts only."""
    _, prompts = halves(unseen(task, n_prompts).to(torch.float64))
    found = {"ridge": best_ridge(prompts), "lasso": best_lasso(prompts[-LASSO_PROMPTS:])}
    found["gd"] = best(gradient_descent(prompts, steps=128), prompts)
    found["algorithm"] = best(preprocess_then_optimise(prompts, steps=128), prompts)
    return found | fixed(task, layers, n_prompts)


@cache
def fixed(task: TaskConfig, layers: int, n_prompts: int) -> Mapping[str, np.ndarray]:
    """Excess risk of each measured prompt for the learners of FIXED."""
    _, prompts = halves(unseen(task, n_prompts).to(torch.float64))
    gram, r, _ = moments(prompts)
    found = {}
    for column, name in FIXED.items():
        w = LEARNERS[name].path(gram, r, of_task(name, task, layers))
        found[column] = best([(w * prompts.x_query).sum(1, keepdim=True)], prompts)
    return found


def same_but_steps(one: Checkpoint, own: ExperimentConfig) -> bool:
    train = replace(one.config.train, steps=own.train.steps)
    return replace(one.config, train=train) == own


def shorter_of(own: ExperimentConfig, models: list[Checkpoint]) -> Checkpoint | None:
    """The model of the same setting and seed with fewer steps; the longest of these runs."""
    same = [one for one in models if same_but_steps(one, own)]
    fewer = [one for one in same if one.config.train.steps < own.train.steps]
    return max(fewer, key=lambda one: one.step, default=None)


def single_of(own: ExperimentConfig, models: list[Checkpoint]) -> Checkpoint | None:
    """The one-head model of width d_x + 1 with the same settings; of the same number of steps, or
    else of the most steps."""
    model = replace(own.model, n_heads=1, d_head=own.task.d_x + 1)
    same = [one for one in models if same_but_steps(one, replace(own, model=model))]
    return max(same, key=lambda one: (one.step == own.train.steps, one.step), default=None)


def against(own: np.ndarray, rivals: Mapping[str, np.ndarray]) -> Row:
    """Risk, and its ratio to each rival on the same prompts."""
    risk, sem = mean_and_sem(own)
    row: Row = {"risk": float(risk), "risk_sem": float(sem)}
    for name, theirs in rivals.items():
        row |= told(f"to_{name}", ratio(own[-len(theirs) :], theirs))
    return row


def several_help(model, single, task: TaskConfig, n_prompts: int) -> Row:
    """C9: risk relative to a single head, for contexts of 2 d_x pairs."""
    prompts = unseen(task, n_prompts, length=2 * task.d_x)
    pair, how = typical_ratio(ask.risks(model, prompts), ask.risks(single, prompts))
    row = told("to_single_2d", pair) | {"to_single_2d_by": how}
    return row | {"C9": claims()["sparse-C9-twice"].holds(*pair)}


def spread(model, rise: np.ndarray, measured: Prompts) -> Row:
    """Effective heads and share of the best head, by layer."""
    found, shares = ask.spread(model, rise, measured)
    effective = ask.effective_heads(ask.rises_of(model, measured))
    row: Row = {}
    for at, share in enumerate(shares):
        row |= told(f"n_eff_{at + 1}", (effective.number[at], effective.sem[at]))
        row[f"n_eff_{at + 1}_median"] = effective.of_medians[at]
        row |= {f"top_share_{at + 1}": share}
        row[f"importance_{at + 1}"] = ask.as_text(found.importance[at])
    return row


def pruned(model, gone: Mapping[str, list[ask.Head]], full: np.ndarray, measured: Prompts) -> Row:
    """Risk with one head or pair in each later layer, or one head in the first."""
    row: Row = {}
    for name, heads in gone.items():
        errors, refit = ask.risks(model, measured, heads), ask.refit_risks(model, measured, heads)
        row |= told(f"{name}", ratio(errors, full)) | told(f"{name}_refit", ratio(refit, full))
        row |= {f"{name}_median": float(np.median(errors) / np.median(full))}
    return row


def probes(model, gone: list[ask.Head], measured: Prompts) -> Row:
    """C14, and the output of the first layer."""
    full, less = (ask.probe_risks(model, measured, heads) for heads in ([], gone))
    rise = max(float((one[1:] / one[:-1]).max()) for one in (full, less))
    same = claims()["sparse-C14-first-layer"].holds(abs(full[1] - less[1]))
    row: Row = {f"probe_{layer}": float(risk) for layer, risk in enumerate(full)}
    r2 = {f"r2_{name}": value for name, value in ask.first_layer(model, measured).items()}
    return row | r2 | {"C14": same and claims()["sparse-C14-full"].holds(rise)}


def descends(model, single, measured: Prompts) -> Row:
    """C15: descent on the output of the first layer."""
    phis = ask.features({"own": model, "single": single}, measured)
    row: Row = {}
    raw, alone = (ask.area(phis, measured, of="own", over=over) for over in (RAW, "single"))
    row |= told("area_to_raw", raw) | told("area_to_single", alone)
    at, base = ask.risk_at(phis["own"], measured), ask.risk_at(phis[RAW], measured)
    row |= told("step_16_to_raw", ratio(at, base))
    row |= told("step_16_to_ideal", ratio(at, ask.risk_at(phis[IDEAL], measured)))
    asked = {"raw": raw, "single": alone, "end": (row["step_16_to_raw"], 0.0)}
    return row | {
        "C15": all(claims()[f"sparse-C15-{name}"].holds(*one) for name, one in asked.items())
    }


def one_model(
    checkpoint: Checkpoint, single: Checkpoint | None, shorter: Checkpoint | None, n_prompts: int
) -> tuple[Row, pd.DataFrame]:
    """Row of a model, and its first layer over training.

    Args:
        single: The one-head model to compare with, if there is one.
        shorter: The same model with fewer training steps, if there is one.
    """
    config, model = checkpoint.config, checkpoint.model
    _, measured = halves(unseen(config.task, n_prompts))
    row: Row = {"model": checkpoint.name, "prompts": len(measured)} | described(config)
    if shorter is not None:
        errors = (ask.risks(one.model, measured) for one in (checkpoint, shorter))
        row |= told("to_fewer_steps", ratio(*errors))
    row |= claims_of(model, single and single.model, config, n_prompts)
    history = pd.DataFrame(ask.over_training(checkpoint, measured[:OVER_TRAINING]))
    return row, history.assign(model=checkpoint.name)


def claims_of(
    model: ICLTransformer, single: ICLTransformer | None, config: ExperimentConfig, n_prompts: int
) -> Row:
    """Risks, C9 to C15 and the numbers behind them; C9, C13 and C15 need the one-head model."""
    scored, measured = halves(unseen(config.task, n_prompts))
    full = ask.risks(model, measured)
    row = against(full, learners(config.task, config.model.n_layers, n_prompts))
    row["algorithm_to_gd"] = row["to_gd_fixed"] / row["to_algorithm_fixed"]
    if config.model.n_heads > 1:
        rise = ask.rises(model, scored)
        gone = {
            "later": ask.without(best_head_later, rise),
            "pairs": ask.best_pairs(model, rise.shape, scored),
            "first": ask.without(best_head_first, rise),
        }
        row |= spread(model, rise, measured) | pruned(model, gone, full, measured)
    else:
        gone = {"later": []}
    row |= probes(model, gone["later"], measured)
    if config.model.n_heads > 1 and single is not None:
        row |= several_help(model, single, config.task, n_prompts)
        theirs = ask.risks(single, measured)
        kept = ratio(ask.risks(model, measured, gone["later"]), theirs)
        row |= told("to_single", ratio(full, theirs)) | told("later_to_single", kept)
        row |= descends(model, single, measured)
    if config.model.n_heads > 1:
        row |= ask.of_row(row | {"n_layers": config.model.n_layers})
    return row


def judged(row: Row) -> Row:
    """A row with the verdicts that follow from its numbers."""
    return row | ask.of_row(row) if row["n_heads"] > 1 else row


def over_noise(table: pd.DataFrame) -> list[object]:
    """C16: whether C11 to C13 hold at noise variances 0.1, 0.4 and 0.8; "not tested" if one is
    missing."""
    same = [name for name in (*MODEL, *TASK) if name != "noise_var"]
    same += ["norm", "mlp", "seed", "steps"]
    found: dict[object, object] = {}
    for _, group in table[table.noise_var > 0].groupby(same):
        known = group.dropna(subset=["C11", "C12", "C13"])
        held = known[["C11", "C12", "C13"]].astype(bool).all(axis=1)
        missing = {0.1, 0.4, 0.8} - set(known.noise_var)
        verdict: object = False if not held.all() else "not tested" if missing else True
        found |= dict.fromkeys(known.index, verdict)
    return [found.get(index) for index in table.index]


def described(config: ExperimentConfig) -> Row:
    """Settings of a training, as columns."""
    row: Row = {name: getattr(config.model, name) for name in MODEL}
    row |= {"d_head": config.d_head, "d_model": config.d_model}
    row |= {name: getattr(config.task, name) for name in TASK}
    row |= {"norm": config.model.norm is not None, "mlp": config.model.d_mlp is not None}
    train = config.train
    return row | {"seed": config.seed, "steps": train.steps, "learning_rate": train.learning_rate}


def joined(file: Path, new: pd.DataFrame) -> pd.DataFrame:
    """A table in which these rows replace those of the same models."""
    old = pd.read_csv(file)
    return pd.concat([old[~old.model.isin(new.model)], new], ignore_index=True)


def measured(folder: Path, n_prompts: int) -> dict[str, pd.DataFrame]:
    """Tables of the models in a folder."""
    checkpoints = ask.trained(sorted(folder.iterdir()))
    rows, histories = [], []
    for checkpoint in checkpoints:
        partners = (of(checkpoint.config, checkpoints) for of in (single_of, shorter_of))
        row, history = one_model(checkpoint, *partners, n_prompts)
        rows.append(row)
        histories.append(history)
        print(row["model"], flush=True)
    return {"sparse_settings": pd.DataFrame(rows), "sparse_settings_training": pd.concat(histories)}


def main() -> None:
    parser = parser_of(__doc__, quick="fewer prompts")
    parser.add_argument("folder", type=Path, help="folder with one folder per checkpoint")
    parser.add_argument("--add", action="store_true", help="add the rows to the tables in --out")
    arguments = parsed(parser)
    n_prompts = 512 if arguments.quick else PROMPTS
    files = measured(arguments.folder, n_prompts)
    if arguments.add:
        files = {name: joined(arguments.out / f"{name}.csv", new) for name, new in files.items()}
    table = files["sparse_settings"].sort_values("model", ignore_index=True)
    table = pd.DataFrame([judged(row) for row in table.to_dict("records")])
    if "C13" in table:
        table["C16"] = over_noise(table)
    for name, frame in (files | {"sparse_settings": table}).items():
        frame.to_csv(arguments.out / f"{name}.csv", index=False, float_format="%.6g")
    save(arguments.out, "sparse_settings", [], provenance(table, [], None))


if __name__ == "__main__":
    main()
