"""Training that starts from the published construction, in a task where its mechanism is expected.

d_x 24, one entry of +-1, 48 pairs, noise variance 0.4: two steps of Algorithm 1 have less risk than
three of gradient descent there (sparse/fairness.py), yet models trained from random weights descend
on x (sparse/settings.py). Does training keep what it does not find? The first layer's 24 heads
write r_j x_j and one head in each later layer takes a step of its best fixed size; then 20,000
steps by the plan of sparse/plan.md: alone; with the other heads of later layers at half of the
size they would start with; and, as a control, the same shape with nothing of it. One seed each. The
last row of each is measured as the models of the plan are, C10 to C12 among it. The table that is
there was trained from two equal sizes, the best of those; --train starts from the best of all.
Run: python -m analyses.sparse.start_expected (a minute: the records of the results that are there),
and with --train to train again (an hour and a quarter on one core; with --quick two minutes).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from analyses.lib.measured import RESULTS, Measured, name_of, write
from analyses.lib.records import Record, record
from analyses.sparse import questions as ask
from analyses.sparse.fairness import PLAN
from analyses.sparse.settings import PROMPTS, claims_of, renewed
from analyses.sparse.start import ARMS, start_of
from analyses.sparse.steps import FIT, of_task
from mechinterp import figures
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import ExperimentConfig
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.training.general.trainer import DeepRun
from mechinterp.training.sweep_file import load_sweep

PLANNED = "d24s1-linear-h24x25-l3-noise0.4-s0"
"""The model of the plan whose task and training these have."""
FOLLOWED = 512


def config_of(steps: int) -> ExperimentConfig:
    """That of the plan, with the shape of the construction."""
    plan = load_sweep(PLAN)[PLANNED]
    d_x = plan.task.d_x
    train = replace(plan.train, steps=steps, log_every=max(1, steps // 20), snapshot_every=steps)
    model = replace(plan.model, n_heads=d_x, d_head=d_x, d_model=2 * d_x + 1)
    return replace(plan, model=model, train=train)


def step_sizes(config: ExperimentConfig, n_prompts: int = FIT) -> list[float]:
    """The fixed sizes of Algorithm 1's steps with the least mean risk, on prompts not measured on."""
    found = of_task("algorithm", config.task, config.model.n_layers, n_prompts)
    return found.flatten().tolist()


def follow(
    arm: str, config: ExperimentConfig, etas: Sequence[float], n_prompts: int
) -> pd.DataFrame:
    """What becomes of the construction, at 21 steps of training; the claims at the first and last."""
    run, rows = DeepRun({arm: config}, start=start_of(arm, config, etas)), []
    prompts = ask.prompts_of(config.task, FOLLOWED)
    while True:
        model = ICLTransformer.from_weights(run.weights, task=config.task)
        risk, sem = map(float, mean_and_sem(ask.risks(model, prompts)))
        row = {"arm": arm, "step": run.step, "followed_risk": risk, "followed_risk_sem": sem}
        if run.finished or not run.step:
            row |= claims_of(model, None, config, n_prompts)
        rows.append(row)
        if run.finished:
            return pd.DataFrame(rows)
        run.advance()
        print(f"{arm}: {run.step} of {config.train.steps} steps", flush=True)


def train(quick: bool) -> pd.DataFrame:
    config, n_prompts = config_of(200 if quick else 20_000), 128 if quick else PROMPTS
    etas = step_sizes(config)
    return pd.concat([follow(arm, config, etas, n_prompts) for arm in ARMS])


def records(ends: pd.DataFrame) -> list[Record]:
    """What the last rows of all arms say."""
    rows = {row.arm: row for _, row in ends.iterrows()}
    values = {"writes": {f"{arm}, {row.step:,} steps": row["r2_R x"] for arm, row in rows.items()}}
    for name in ("ridge", "gd"):
        values[name] = {
            f"{arm}, {row.step:,} steps": (row[f"to_{name}"], row[f"to_{name}_sem"])
            for arm, row in rows.items()
        }
    values["pattern"] = {
        f"{arm}, {row.step:,} steps": float(row[["C10", "C11", "C12"]].astype(bool).sum())
        for arm, row in rows.items()
    }
    return [record(f"sparse-start-expected-{name}", one) for name, one in values.items()]


def again(file: Path, quick: bool) -> pd.DataFrame:
    """The table that is there, with what needs no model measured again."""
    config = config_of(1)
    known = (config.task, config.model.n_layers, 128 if quick else PROMPTS)
    rows = pd.read_csv(file).to_dict("records")
    return pd.DataFrame([row if pd.isna(row["risk"]) else renewed(row, *known) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train again")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "sparse_start_expected.csv"
    data = train(arguments.quick) if arguments.train else again(file, arguments.quick)
    found = records(data.groupby("arm", sort=False).tail(1))
    page = figures.lines(
        data.step.unique(),
        {arm: one.followed_risk.to_numpy() for arm, one in data.groupby("arm", sort=False)},
        errors={
            arm: one.followed_risk_sem.to_numpy() for arm, one in data.groupby("arm", sort=False)
        },
        title="Excess risk from the construction on, d_x 24, one entry, noise variance 0.4",
        x_title="step",
        y_title="excess risk (y²)",
        log_y=True,
    )
    note = "" if arguments.train else "records of a table measured earlier"
    write(Measured(data, {"risk": page}, found), name_of(__file__), arguments.out, note=note)


if __name__ == "__main__":
    main()
