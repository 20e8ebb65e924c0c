"""Training of sparse regression that starts from the published construction.

Trained models do not find the construction; the question is whether they keep it. In the first
layer as many heads as coordinates write r_j x_j, and one head in each later layer descends on that.
Three arms are trained further: the construction alone, whose zero heads stay zero; with the other
heads of later layers at half of their usual initial size; and, as a control, the same shape from
random weights. One seed each, in two tasks. The first is that of the shipped models (noise variance
0.1, steps of 0.5, 50,000 training steps). The second is one where the mechanism should win
(fairness.py: d_x 24, one entry of +-1, 48 pairs, noise variance 0.4; 20,000 steps by plan.md),
measured as the models of the plan are. Its table was trained from two equal sizes, the best equal
ones; --train starts from the best of all sizes.
Run: python -m analyses.sparse.start (seconds: records from the existing tables), or with --train to
    train again (two hours on one core; with --quick a few minutes)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch

from analyses.lib import RESULTS, Measured, Record, record
from analyses.lib.measured import parsed, parser_of, write
from analyses.sparse import questions as ask
from analyses.sparse import setting as at
from analyses.sparse.fairness import FIT, PLAN, of_task
from analyses.sparse.settings import PROMPTS, claims_of
from mechinterp import ExperimentConfig, ICLTransformer, ModelConfig, figures, probe
from mechinterp.analysis.probing.targets import STRUCTURES
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.sweep_file import load_sweep

NOISE, ETA, SIZE = 0.1, 0.5, 0.5
ARMS = ("built, alone", "built, with other heads", "at random")
TRAINED = at.named(8, NOISE, 0)
RIVALS = ("trained", "ridge", "algorithm")
"""The shipped model of 8 heads, and ridge and Algorithm 1 at their best."""
PLANNED = "d24s1-linear-h24x25-l3-noise0.4-s0"
"""The model of the plan with the task and training of the second part."""
FOLLOWED = 512
HEADS = ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O")
FILES = {"shipped": "sparse_start.csv", "expected": "sparse_start_expected.csv"}
Measure = Callable[[ICLTransformer, bool], dict[str, object]]
"""Function from a model to its numbers; the flag asks for more of them, at the first and last step.
"""


def start_of(arm: str, config: ExperimentConfig, etas: Sequence[float]) -> Weights:
    """Weights of an arm: the construction with these steps, alone or with small random other heads;
    or random weights only."""
    drawn = initial_deep_weights(config)
    if arm == "at random":
        return drawn
    built = preprocess_then_optimise_model(etas, d_x=config.task.d_x).to(torch.float32)
    if arm == "built, alone":
        return built
    live = (built.W_V @ built.W_O).flatten(2).any(-1)[..., None, None]
    return built.with_tensors(
        {name: torch.where(live, built.tensors[name], SIZE * drawn.tensors[name]) for name in HEADS}
    )


def shipped_config(steps: int) -> ExperimentConfig:
    base = at.trained(TRAINED).config
    model = ModelConfig(
        n_layers=4, n_heads=16, d_head=16, d_model=33, score=base.model.score, context_only=True
    )
    train = replace(
        base.train, steps=steps, log_every=max(1, steps // 20), snapshot_every=steps, data_seed=1000
    )
    return replace(base, model=model, train=train)


def config_of(steps: int) -> ExperimentConfig:
    """The config of the plan with the shape of the construction."""
    plan = load_sweep(PLAN)[PLANNED]
    d_x = plan.task.d_x
    train = replace(plan.train, steps=steps, log_every=max(1, steps // 20), snapshot_every=steps)
    model = replace(plan.model, n_heads=d_x, d_head=d_x, d_model=2 * d_x + 1)
    return replace(plan, model=model, train=train)


def step_sizes(config: ExperimentConfig, n_prompts: int = FIT) -> list[float]:
    """Fixed step sizes of Algorithm 1 with the smallest mean risk, on prompts that are not measured
    on."""
    found = of_task("algorithm", config.task, config.model.n_layers, n_prompts)
    return found.flatten().tolist()


def follow(config: ExperimentConfig, etas: Sequence[float], measure: Measure) -> pd.DataFrame:
    """Numbers of each arm at 21 steps of training."""
    rows: list[dict[str, object]] = []
    for arm in ARMS:
        run = DeepRun({arm: config}, start=start_of(arm, config, etas))
        while True:
            model = ICLTransformer.from_weights(run.weights, task=config.task)
            at_end = run.finished or not run.step
            rows.append({"arm": arm, "step": run.step} | measure(model, at_end))
            if run.finished:
                break
            run.advance()
            print(f"{arm}: {run.step} of {config.train.steps} steps", flush=True)
    return pd.DataFrame(rows)


def train_shipped(quick: bool) -> pd.DataFrame:
    prompts = at.prompts_of(NOISE, 512 if quick else 4096)
    path = preprocess_then_optimise(prompts, steps=128)
    risks = (
        ask.risks(at.trained(TRAINED).model, prompts),
        at.best_ridge(prompts),
        at.best(path, prompts),
    )

    def measure(model: ICLTransformer, at_end: bool) -> dict[str, object]:
        errors = ask.risks(model, prompts)
        risk, sem = map(float, mean_and_sem(errors))
        row: dict[str, object] = {"risk": risk, "risk_sem": sem}
        for name, target in STRUCTURES.items():
            found = probe(model, prompts, targets={name: target}).probes[name]
            row[f"r2 {name}"] = float(found.r2[1, -1])
            row[f"r2 {name} sem"] = float(found.r2_sem[1, -1])
        for name, theirs in zip(RIVALS, risks, strict=True) if at_end else ():
            row[f"to {name}"], row[f"to {name} sem"] = at.ratio(errors, theirs)
        return row

    return follow(shipped_config(500 if quick else 50_000), [ETA] * 3, measure)


def train_expected(quick: bool) -> pd.DataFrame:
    config, n_prompts = config_of(200 if quick else 20_000), 128 if quick else PROMPTS
    prompts = at.unseen(config.task, FOLLOWED)

    def measure(model: ICLTransformer, at_end: bool) -> dict[str, object]:
        risk, sem = map(float, mean_and_sem(ask.risks(model, prompts)))
        row: dict[str, object] = {"followed_risk": risk, "followed_risk_sem": sem}
        return row | (claims_of(model, None, config, n_prompts) if at_end else {})

    return follow(config, step_sizes(config), measure)


def records(shipped: pd.DataFrame, expected: pd.DataFrame) -> list[Record]:
    """Records from the last rows of all arms."""
    first, _ = (f"r2 {name}" for name in STRUCTURES)
    ends = ends_of(shipped)
    asked = {"writes": paired(ends, first, f"{first} sem")}
    asked |= {name: paired(ends, f"to {name}", f"to {name} sem") for name in RIVALS}
    ends = ends_of(expected)
    asked["expected-writes"] = {name: row["r2_R x"] for name, row in ends.items()}
    for name in ("ridge", "gd"):
        asked[f"expected-{name}"] = paired(ends, f"to_{name}", f"to_{name}_sem")
    asked["expected-pattern"] = {
        name: float(row[["C10", "C11", "C12"]].astype(bool).sum()) for name, row in ends.items()
    }
    return [record(f"sparse-start-{name}", values) for name, values in asked.items()]


def ends_of(data: pd.DataFrame) -> dict[str, pd.Series]:
    last = data.groupby("arm", sort=False).tail(1)
    return {f"{row.arm}, {row.step:,} steps": row for _, row in last.iterrows()}


def paired(ends: dict[str, pd.Series], value: str, error: str) -> dict[str, ask.Pair]:
    return {name: (row[value], row[error]) for name, row in ends.items()}


def main() -> None:
    parser = parser_of(__doc__, quick="a hundredth of the steps")
    parser.add_argument("--train", action="store_true", help="train again")
    arguments = parsed(parser)
    if arguments.train:
        tables = [train_shipped(arguments.quick), train_expected(arguments.quick)]
    else:
        tables = [pd.read_csv(RESULTS / file) for file in FILES.values()]
    tables[1].to_csv(arguments.out / FILES["expected"], index=False, float_format="%.6g")
    pages = {}
    for task, column, data in zip(FILES, ("risk", "followed_risk"), tables, strict=True):
        wide = data.pivot(index="step", columns="arm", values=[column, f"{column}_sem"])
        curves = {arm: (wide[column][arm], wide[f"{column}_sem"][arm]) for arm in ARMS}
        title = f"Excess risk from the construction on, task: {task}"
        axes = {"x_title": "step"} | at.RISK_AXIS
        pages[task] = figures.lines(wide.index.to_numpy(), curves, title=title, **axes)
    note = "" if arguments.train else "records of tables measured earlier"
    found = Measured(tables[0], pages, records(*tables))
    write(found, "sparse_start", arguments.out, note=note)


if __name__ == "__main__":
    main()
