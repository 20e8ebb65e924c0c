"""What training makes of the published construction of sparse regression, when it starts from it.

Trained models do not find it; would they keep it? The first layer's 16 heads write r_j x_j and one
head in each later layer descends on that, noise variance 0.1, with steps of 0.5. Trained as the
shipped models are, 50,000 steps: alone, where its zero heads stay zero; with the other heads of
later layers at half of the size they would start with; and, as a control, a model of the same shape
with nothing of it. One seed each. Run: python -m analyses.sparse.start (seconds: the records of the
results that are there), and with --train to train again (half an hour on one core; with --quick one
minute).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from analyses.lib.measured import RESULTS, Measured, name_of, write
from analyses.lib.records import Record, record
from analyses.sparse.models import named, prompts_of, trained
from analyses.sparse.setting import best, best_ridge, ratio
from mechinterp import figures
from mechinterp.analysis.probing.linear import STRUCTURES, probe_layers
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import ExperimentConfig, ModelConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import excess_risk, preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from mechinterp.models.stacks import DeepWeights
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights

NOISE, ETA, SIZE = 0.1, 0.5, 0.5
STEPS = 50_000
ARMS = ("built, alone", "built, with other heads", "at random")
TRAINED = named(8, NOISE, 0)
RIVALS = ("trained", "ridge", "algorithm")
"""The shipped model of 8 heads; ridge and Algorithm 1 at their best."""
HEADS = ("W_Q", "W_K", "W_V", "W_O")


def start_of(arm: str, config: ExperimentConfig, etas: Sequence[float]) -> DeepWeights:
    """The construction with these steps, its zero heads as they are or smaller than PyTorch would
    start them; or nothing of it."""
    drawn = initial_deep_weights(config).stack
    if arm == "at random":
        return drawn
    built = preprocess_then_optimise_model(etas, d_x=config.task.d_x).to(torch.float32)
    if arm == "built, alone":
        return built
    live = (built.W_V @ built.W_O).flatten(2).any(-1)[..., None, None]
    return built.with_tensors(
        {
            name: torch.where(live, getattr(built, name), SIZE * getattr(drawn, name))
            for name in HEADS
        }
    )


def config_of(steps: int) -> ExperimentConfig:
    base = trained(TRAINED).config
    model = ModelConfig(
        n_layers=4, n_heads=16, d_head=16, d_model=33, score=base.model.score, context_only=True
    )
    train = replace(
        base.train, steps=steps, log_every=max(1, steps // 20), snapshot_every=steps, data_seed=1000
    )
    return replace(base, model=model, train=train)


def told(weights: DeepWeights, prompts: Prompts) -> dict[str, float]:
    """Risk, and R^2 of what the first layer writes at the query."""
    risk, sem = map(float, mean_and_sem(errors(weights, prompts)))
    model = ICLTransformer.from_weights(weights, task=trained(TRAINED).task)
    found = {
        name: probe_layers(model, prompts, target=target) for name, target in STRUCTURES.items()
    }
    r2 = {f"r2 {name}": float(one.r2[1, -1]) for name, one in found.items()}
    return (
        {"risk": risk, "risk_sem": sem}
        | r2
        | {f"{key} sem": float(found[key[3:]].r2_sem[1, -1]) for key in r2}
    )


def errors(weights: DeepWeights, prompts: Prompts):
    with torch.no_grad():
        return excess_risk(predict_deep(weights, prompts), prompts).double().numpy()


def follow(arm: str, steps: int, prompts: Prompts) -> tuple[pd.DataFrame, DeepWeights]:
    """What becomes of it, at 21 steps of training, and its last weights."""
    config = config_of(steps)
    run, rows = DeepRun({arm: config}, start=start_of(arm, config, [ETA] * 3)), []
    while True:
        rows.append({"arm": arm, "step": run.step} | told(run.weights, prompts))
        if run.finished:
            return pd.DataFrame(rows), run.results()[arm].weights.stack
        run.advance()
        print(f"{arm}: {run.step} of {steps} steps", flush=True)


def rivals(last: DeepWeights, prompts: Prompts) -> dict[str, float]:
    """Ratios of the last risk to those of RIVALS, with their standard errors."""
    risks = (
        errors(trained(TRAINED).weights.stack, prompts),
        best_ridge(prompts),
        best(preprocess_then_optimise(prompts, steps=128), prompts),
    )
    found = {}
    for name, risk in zip(RIVALS, risks, strict=True):
        found[f"to {name}"], found[f"to {name} sem"] = ratio(errors(last, prompts), risk)
    return found


def records(ends: pd.DataFrame) -> list[Record]:
    """What the last rows of all arms say."""
    found = {f"{row.arm}, {row.step:,} steps": row for _, row in ends.iterrows()}
    first, _ = (f"r2 {name}" for name in STRUCTURES)
    made = [
        record(
            "sparse-start-writes",
            {name: (row[first], row[f"{first} sem"]) for name, row in found.items()},
        )
    ]
    for name in RIVALS:
        ratios = {arm: (row[f"to {name}"], row[f"to {name} sem"]) for arm, row in found.items()}
        made.append(record(f"sparse-start-{name}", ratios))
    return made


def train(quick: bool) -> pd.DataFrame:
    """All arms, followed through their training."""
    prompts, frames = prompts_of(NOISE, 512 if quick else 4096), []
    for arm in ARMS:
        found, last = follow(arm, STEPS // 100 if quick else STEPS, prompts)
        for name, value in rivals(last, prompts).items():
            found.loc[found.index[-1], name] = value
        frames.append(found)
    return pd.concat(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train again")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "sparse_start.csv"
    data = train(arguments.quick) if arguments.train else pd.read_csv(file)
    pages = {
        arm: figures.lines(
            one.step.to_numpy(),
            {"excess risk": one.risk.to_numpy()},
            errors={"excess risk": one.risk_sem.to_numpy()},
            title=f"Excess risk from the construction on, {arm}",
            x_title="step",
            y_title="excess risk (y²)",
            log_y=True,
        )
        for arm, one in data.groupby("arm", sort=False)
    }
    found = records(data.groupby("arm", sort=False).tail(1))
    note = "" if arguments.train else "records of a table measured earlier"
    write(Measured(data, pages, found), name_of(__file__), arguments.out, note=note)


if __name__ == "__main__":
    main()
