"""The map of pool_plan.md: which models memorise a pool of M tasks, which learn ridge, on what path, and by which heads.

    python analyses/pool_map.py RUNS [--out DIR] [--n-prompts N] [--models DIR]

RUNS holds gpt2-m16, gpt2-mnone, ... of pool_train.py and linear/linear-l3-m16-s0, ... of sweeps/pool_linear.json; what is not there is not
measured. It writes results/pool_map.csv (the last step), pool_steps.csv (every kept step), pool_heads.csv (each head masked),
pool_probes.csv (linear probes for the posterior) and, with --models, the GPT-2s as checkpoints of this package, with their snapshots.
"""

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from pool_probes import probes
from pool_train import STEPS, pool_task

from mechinterp import load
from mechinterp.analysis.dynamics.prior_snapshots import prior_snapshots
from mechinterp.analysis.heads.prior_heads import prior_heads
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.checkpoints.native import Checkpoint, save
from mechinterp.icl.prompts import task_pool

ROOT = Path(__file__).parents[1]
LARGEST = 1024
"""Tasks of the pool that models without one are compared with."""
MOST_PROBED = 16
"""Tasks of a pool whose posterior is probed for."""
ONLY_FULL = 8
"""Pairs at which linear stacks are compared."""
ORIGIN = {"trained by": "analyses/pool_train.py", "loss": "all prefixes, 0 to 8 pairs"}


def as_checkpoint(run: Path, out: Path) -> Checkpoint:
    """A run of pool_train.py as a checkpoint of this package, with the weights of every kept step."""
    pool = run.name.removeprefix("gpt2-m")
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
    train = replace(found.config.train, steps=max(last, 1), batch_size=64, cosine=True)
    config = replace(found.config, task=task, train=train)
    save(out, config, kept[last], step=last, snapshots=kept, origin=ORIGIN)
    return load(out)


def models(runs: Path, out: Path) -> dict[str, Checkpoint]:
    """Every model that is there, by name: size of the pool and kind."""
    found = {}
    for run in sorted(runs.glob("gpt2-m*")):
        if not (run / "steps" / f"{STEPS}.pt").exists():
            print(f"{run.name} is not trained to the end, and left out.")
            continue
        target = out / run.name
        found[run.name] = load(target) if target.exists() else as_checkpoint(run, target)
    for folder in sorted((runs / "linear").glob("linear-*")):
        if (folder / "config.json").exists():
            found[folder.name] = load(folder)
    return found


def about(name: str, checkpoint: Checkpoint) -> dict[str, object]:
    """What a row says of its model."""
    kind = re.split(r"-m(?:\d|none)|-none", name)[0]
    config = checkpoint.config
    return {
        "model": name,
        "kind": kind,
        "n_tasks": config.task.n_tasks,
        "seed": config.seed,
        "steps": checkpoint.step,
    }


def measured(name: str, checkpoint: Checkpoint, n_prompts: int) -> dict[str, pd.DataFrame]:
    """Tables of one model."""
    task = checkpoint.task
    pool = None
    if task.n_tasks is None:
        pool = task_pool(replace(task, n_tasks=LARGEST))
    lengths = [ONLY_FULL] if name.startswith("linear") else None
    told = about(name, checkpoint)
    last = compare_priors(checkpoint, pool=pool, context_lengths=lengths, n_prompts=n_prompts)
    path = prior_snapshots(checkpoint, pool=pool, context_lengths=lengths, n_prompts=n_prompts // 4)
    heads = prior_heads(checkpoint, pool=pool, context_lengths=lengths, n_prompts=n_prompts // 4)
    print(name, last, path, heads, sep="\n  ", flush=True)
    given = task_pool(task) if pool is None else pool
    read = probes(checkpoint.predictor, given[:MOST_PROBED], n_prompts=n_prompts)
    extra = {"strategy": last.strategy, "transient": path.transient}
    return {
        "pool_map": last.summary_frame().assign(**told, **extra),
        "pool_steps": path.to_frame().assign(**told),
        "pool_probes": read.assign(**told),
        "pool_heads": heads.to_frame().assign(
            **told,
            memorises=[
                tuple(at) in heads.memorises
                for at in heads.to_frame()[["layer", "head"]].to_numpy()
            ],
            generalises=[
                tuple(at) in heads.generalises
                for at in heads.to_frame()[["layer", "head"]].to_numpy()
            ],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results" / "pools")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--n-prompts", type=int, default=4096)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        every = models(given.runs, given.models or Path(folder))
        tables = [measured(name, model, given.n_prompts) for name, model in every.items()]
    given.out.mkdir(parents=True, exist_ok=True)
    for name in tables[0]:
        frame = pd.concat([each[name] for each in tables], ignore_index=True)
        frame.to_csv(given.out / f"{name}.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
