"""A GPT-2 of the kind of Garg et al. 2022, trained on a pool of M tasks as Raventos et al. 2023 do (arXiv 2306.15063).

    python -m analyses.pools.train 16 --out FOLDER --steps 20000 [--until 5000]    (goes on where it was stopped)

The smallest size of Garg's code, as in algorithms/garg_gpt2.py: d_x 4, 64 wide, 3 layers, 2 heads, 8 pairs and a query, 64 prompts in a
step, the loss over all prefixes. The noise has variance 0.25. `plan.md` says which pools, how long and what is asked. The
step size rises over 500 steps and falls to 0 along half a cosine. FOLDER holds state.pt and config.yaml, by the names of their
code, and steps/<step>.pt, the weights on the way.
"""

import argparse
import math
import time
from pathlib import Path

import torch

from analyses.algorithms.garg_gpt2 import BATCH, CONFIG, D_X, STATE, WARM_UP, GargModel
from mechinterp import TaskConfig, generator_for, sample_prompts

NOISE_VAR = 0.25
RATE = 1e-3
STEPS = 20_000
EVERY = 500
"""Steps between two states."""
KEPT = (0, 250, 500, 1000, 1500)
"""Early steps whose weights are kept; after them every 1,000th."""


def pool_task(n_tasks: int | None) -> TaskConfig:
    """The task with a pool of so many, or with fresh task vectors."""
    return TaskConfig(
        d_x=D_X, context_length=2 * D_X, noise_var=NOISE_VAR, beta_var=1.0, n_tasks=n_tasks
    )


def rate(step: int, steps: int) -> float:
    """The step size of a step."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def train(task: TaskConfig, folder: Path, *, steps: int, until: int, seed: int) -> GargModel:
    """The model after `until` of the steps; what is in the folder is trained on."""
    torch.manual_seed(seed)
    model = GargModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    start = 0
    if (folder / STATE).exists():
        state = torch.load(folder / STATE)
        model.load_state_dict(state["model_state_dict"])
        optimizer.load_state_dict(state["optimizer_state_dict"])
        start = state["train_step"]
    else:
        keep(model, folder, 0)
    begun, losses = time.monotonic(), []
    for step in range(start, until):
        # Covariates and noise of a step are the same for every pool.
        prompts = sample_prompts(task, BATCH, generator=generator_for(seed, "train", step))
        y = torch.cat([prompts.y, prompts.y_query[:, None]], 1)[..., 0]
        loss = (model(prompts) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if done in KEPT or done % 1000 == 0:
            keep(model, folder, done)
        if done % EVERY == 0 or done == until:
            save(model, optimizer, folder, done)
            speed = (done - start) / (time.monotonic() - begun)
            print(done, f"loss {sum(losses) / len(losses):.4f}, {speed:.1f} steps/s", flush=True)
            losses = []
    return model


def keep(model: GargModel, folder: Path, step: int) -> None:
    """Write the weights of a step."""
    file = folder / "steps" / f"{step}.pt"
    file.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), file)


def save(model: GargModel, optimizer: torch.optim.Adam, folder: Path, step: int) -> None:
    """Write the state that training goes on from; a kill leaves the old one or the new one."""
    state = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "train_step": step,
    }
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / STATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pool", help='number of tasks, or "none"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--until", type=int, help="stop there; the rates stay those of --steps")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task = pool_task(None if given.pool == "none" else int(given.pool))
    given.out.mkdir(parents=True, exist_ok=True)
    config = CONFIG.replace("train_steps: 50500", f"train_steps: {given.steps}")
    (given.out / "config.yaml").write_text(config.replace('"noise_std": 1.0', '"noise_std": 0.5'))
    torch.set_num_threads(1)
    until = min(given.until or given.steps, given.steps)
    train(task, given.out, steps=given.steps, until=until, seed=given.seed)


if __name__ == "__main__":
    main()
