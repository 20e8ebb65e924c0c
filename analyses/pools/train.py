"""GPT-2 as in Garg et al. 2022, trained on a pool of M tasks as in Raventos et al. 2023 (arXiv
2306.15063).

    python -m analyses.pools.train 16 --out FOLDER --steps 20000 [--until 5000]    (resumes if
    stopped)

The smallest size of Garg's code, as in algorithms/garg_gpt2.py: d_x 4, 64 wide, 3 layers, 2 heads,
8 pairs and a query, 64 prompts per step, the loss over all prefixes. The noise variance is 0.25.
`plan.md` states the pools, the training length and the questions. The step size rises over 500
steps and falls to 0 along half a cosine. FOLDER has state.pt and config.yaml, with the names of
their code, and steps/<step>.pt, the weights during training."""

import argparse
import math
from functools import partial
from pathlib import Path

import torch

from analyses.algorithms.garg_gpt2 import CONFIG, D_X, WARM_UP, train
from mechinterp import TaskConfig

NOISE_VAR = 0.25
RATE = 1e-3
STEPS = 20_000
KEPT = (0, 250, 500, 1000, 1500)
"""Early steps whose weights are saved; later every 1,000th step is."""


def pool_task(n_tasks: int | None) -> TaskConfig:
    """Task with a pool of this size, or with fresh task vectors."""
    return TaskConfig(
        d_x=D_X, context_length=2 * D_X, noise_var=NOISE_VAR, beta_var=1.0, n_tasks=n_tasks
    )


def rate(step: int, steps: int) -> float:
    """Learning rate of a step."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pool", help='number of tasks, or "none"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--until", type=int, help="stop at this step; learning rates follow --steps"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task = pool_task(None if given.pool == "none" else int(given.pool))
    given.out.mkdir(parents=True, exist_ok=True)
    config = CONFIG.replace("train_steps: 50500", f"train_steps: {given.steps}")
    (given.out / "config.yaml").write_text(config.replace('"noise_std": 1.0', '"noise_std": 0.5'))
    torch.set_num_threads(1)
    until = min(given.until or given.steps, given.steps)
    kept = {*KEPT, *range(1000, until + 1, 1000)}
    rates = partial(rate, steps=given.steps)
    train(given.out, task, rates, until=until, seed=given.seed, kept=kept)


if __name__ == "__main__":
    main()
