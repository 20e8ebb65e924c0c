"""The map of plan.md: models that memorise a pool of M tasks, models that learn ridge, their path
and their heads.

    python -m analyses.pools.map RUNS [--out DIR] [--n-prompts N] [--models DIR]

RUNS contains gpt2-m16, gpt2-mnone, gpt2-m16-s1, ... of pools/train.py and linear/linear-l3-m16-s0,
... of sweeps/pool_linear.json. Rows of missing models stay as they are. Writes results/pool_map.csv
(the last step), pool_steps.csv (every saved step), pool_heads.csv (each head masked),
pool_probes.csv (linear probes for the posterior) and, with --models, the GPT-2s as checkpoints of
this package, with snapshots."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.lib import RESULTS
from analyses.lib.measured import parsed, parser_of
from analyses.pools.prior_heads import prior_heads
from analyses.pools.probes import probes
from analyses.pools.train import STEPS, pool_task
from mechinterp import compare_priors, load, over_steps
from mechinterp.analysis.learners.priors import CLEAR_DISTANCE, PriorComparison
from mechinterp.analysis.over_steps import OverSteps
from mechinterp.checkpoints.checkpoint import Checkpoint, save
from mechinterp.icl.predictors import Pool

OTHERS = (16, 1024)
"""Numbers of tasks of the pools that models without a pool are compared with; the plan names the
largest, which is close to ridge."""
MOST_PROBED = 16
"""Largest number of tasks of a pool whose posterior is probed."""
ONLY_FULL = 8
"""Pairs at which linear stacks are compared."""
EARLIEST = 1000
"""Step from which a stretch near to ridge counts."""
ORIGIN = {"trained by": "analyses/pools/train.py", "loss": "all prefixes, 0 to 8 pairs"}


def as_checkpoint(run: Path, out: Path) -> Checkpoint:
    """A run of pools/train.py as a checkpoint of this package, with the weights of every saved
    step."""
    pool, _, seed = run.name.removeprefix("gpt2-m").partition("-s")
    task = pool_task(None if pool == "none" else int(pool))
    with tempfile.TemporaryDirectory() as folder:
        kept = {}
        for file in sorted((run / "steps").glob("*.pt"), key=lambda file: int(file.stem)):
            state = {"model_state_dict": torch.load(file), "train_step": int(file.stem)}
            torch.save(state, Path(folder) / "state.pt")
            (Path(folder) / "config.yaml").write_text((run / "config.yaml").read_text())
            found = load(folder)
            kept[int(file.stem)] = found.weights
    last = max(kept)
    train = replace(
        found.config.train, steps=max(last, 1), batch_size=64, schedule="cosine", shortest_context=1
    )
    config = replace(found.config, task=task, train=train, seed=int(seed or 0))
    save(out, config, kept[last], step=last, snapshots=kept, origin=ORIGIN)
    return load(out)


def models(runs: Path, out: Path) -> dict[str, Checkpoint]:
    """All available models, by name: size of the pool and kind."""
    found = {}
    for run in sorted(runs.glob("gpt2-m*")):
        if not (run / "steps" / f"{STEPS}.pt").exists():
            print(f"{run.name} is left out: its training is not complete.")
            continue
        target = out / run.name
        found[run.name] = load(target) if target.exists() else as_checkpoint(run, target)
    for folder in sorted((runs / "linear").glob("linear-*")):
        if (folder / "config.json").exists():
            found[folder.name] = load(folder)
    return found


def about(name: str, checkpoint: Checkpoint) -> dict[str, object]:
    """Columns that identify the model of a row."""
    kind = re.split(r"-m(?:\d|none)|-none", name)[0]
    config = checkpoint.config
    return {
        "model": name,
        "kind": kind,
        "n_tasks": config.task.n_tasks,
        "seed": config.seed,
        "steps": checkpoint.step,
    }


def measured(name: str, checkpoint: Checkpoint, n_prompts: int) -> list[dict[str, pd.DataFrame]]:
    """Tables of one model, one set for each pool that it is compared with."""
    task = checkpoint.task
    if task.n_tasks is not None:
        return [tables_of(name, checkpoint, task.pool(), n_prompts, own=True)]
    pools = [replace(task, n_tasks=n_tasks).pool() for n_tasks in OTHERS]
    return [tables_of(name, checkpoint, pool, n_prompts, own=False) for pool in pools]


def tables_of(
    name: str, checkpoint: Checkpoint, pool: Pool, n_prompts: int, *, own: bool
) -> dict[str, pd.DataFrame]:
    """Tables of one model and pool."""
    given: dict[str, Any] = {
        "pool": None if own else pool,
        "context_lengths": [ONLY_FULL] if name.startswith("linear") else None,
    }
    last = compare_priors(checkpoint, **given, n_prompts=n_prompts)
    path = over_steps(checkpoint, "compare-priors", **given, n_prompts=n_prompts // 4)
    print(name, last, path, sep="\n  ", flush=True)
    found = {
        "pool_map": _of_trimmed(last).assign(transient=transient(path)),
        "pool_steps": pd.concat(
            [
                each.trimmed.assign(step=step)
                for step, each in zip(path.step, path.results, strict=True)
            ]  # type: ignore[attr-defined]
        ),
    }
    if own:
        found |= inside(checkpoint, pool, given, n_prompts)
    identity = about(name, checkpoint) | {"compared_with": len(pool)}
    return {table: frame.assign(**identity) for table, frame in found.items()}


def _of_trimmed(found: PriorComparison) -> pd.DataFrame:
    """The means that decide, and what they decide; rows of before have no `prompts` and are means over all."""
    return found.summary_frame().query("prompts == 'trimmed'").assign(strategy=found.strategy)


def transient(path: OverSteps) -> int | None:
    """The first step clearly nearer to ridge on new tasks, of a model that ends clearly nearer to dMMSE there; else None.

    "Clearly" is by two standard errors from 0.5. Steps before `EARLIEST` do not count: predictions near 0 are nearer to
    ridge, which shrinks too.
    """
    new = [each.trimmed for each in path.results]  # type: ignore[attr-defined]
    relative, sem = (
        np.array([getattr(each, name)[1] for each in new]) for name in ("relative", "relative_sem")
    )
    above = (relative - CLEAR_DISTANCE * sem > 0.5) & (path.step >= EARLIEST)
    if not above.any() or not relative[-1] + CLEAR_DISTANCE * sem[-1] < 0.5:
        return None
    return int(path.step[above.argmax()])


def inside(
    checkpoint: Checkpoint, pool: Pool, given: dict[str, Any], n_prompts: int
) -> dict[str, pd.DataFrame]:
    """Tables of masked heads and of probes."""
    heads = prior_heads(checkpoint, **given, n_prompts=n_prompts // 4)
    print(f"  {heads}", flush=True)
    rows = heads.to_frame()
    at = list(zip(rows["layer"], rows["head"], strict=True))
    named = {
        "memorises": [head in heads.memorises for head in at],
        "generalises": [head in heads.generalises for head in at],
    }
    read = probes(checkpoint.predictor, pool[:MOST_PROBED], n_prompts=n_prompts)
    return {"pool_heads": rows.assign(**named), "pool_probes": read}


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS / "pools")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--n-prompts", type=int, default=4096)
    given = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        every = models(given.runs, given.models or Path(folder))
        tables = [
            each for name, model in every.items() for each in measured(name, model, given.n_prompts)
        ]
    for name in ("pool_map", "pool_steps", "pool_heads", "pool_probes"):
        found = pd.concat([each[name] for each in tables if name in each], ignore_index=True)
        file = given.out / f"{name}.csv"
        if file.exists():
            stored = pd.read_csv(file)
            found = pd.concat([stored[~stored.model.isin(found.model)], found])
        found = found.sort_values(["model", "compared_with"], kind="stable")
        found.to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
