"""GPT-2 as in Garg et al. 2022 (arXiv 2208.01066), trained on linear regression until it is close
to ridge.

    python -m analyses.algorithms.garg_gpt2 --out FOLDER    (45 minutes on one core; resumes if
    stopped) python -m analyses.algorithms.garg_gpt2                 (seconds: numbers of the
    shipped model for docs/results/algorithms.md)

x and y are alternating tokens. GPT-2 with learned positions, norms and MLPs stands between two
linear maps and predicts y at each x. Size (64 wide, 3 layers, 2 heads), batches of 64 prompts and
the loss over all prefixes follow the smallest model of their code. d_x is 4, responses have noise
of standard deviation 1 as theirs, prompts have 2 d_x pairs and a query. The output uses the names
of their code: state.pt with the state dict of the model, and config.yaml. checkpoints/garg-gpt2 has
the result."""

import argparse
import math
from collections.abc import Callable, Collection
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from analyses.lib import RESULTS
from analyses.lib.measured import ROOT
from mechinterp import Prompts, TaskConfig, load
from mechinterp.analysis.stats import r2_and_sem, ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import draw_prompts, generator_for

D_X = 4
NOISE_STD = 1.0
TASK = TaskConfig(d_x=D_X, context_length=2 * D_X, noise_var=NOISE_STD**2, beta_var=1.0)
LENGTHS = (D_X // 2, D_X, 2 * D_X)
BATCH, WARM_UP = 64, 500
DESCENTS = (
    (14_000, 10_000, 1e-3),
    (18_500, 4_500, 4e-4),
    (38_500, 20_000, 1e-3),
    (50_500, 12_000, 8e-4),
)
"""Cycles of the learning rate: last step, length, and rate at the start of each cosine decay to 0.
The rate rises linearly during warm-up, and is constant until the first decay begins."""
STEPS = DESCENTS[-1][0]
LOG_EVERY = 500
N_PROMPTS = 16_384
STATE = "state.pt"
CONFIG = f"""\
model:
  family: gpt2
  n_dims: {D_X}
  n_positions: {TASK.context_length + 1}
  n_embd: 64
  n_layer: 3
  n_head: 2
training:
  task: noisy_linear_regression
  task_kwargs: {{"noise_std": {NOISE_STD}}}
  data: gaussian
  batch_size: {BATCH}
  learning_rate: {DESCENTS[0][2]}
  train_steps: {STEPS}
  curriculum:
    dims: {{start: {D_X}, end: {D_X}}}
    points: {{start: {TASK.context_length + 1}, end: {TASK.context_length + 1}}}
"""


class GargModel(nn.Module):
    """The paper's `TransformerModel` with its names; y is the first entry of its token."""

    def __init__(self) -> None:
        super().__init__()
        self._read_in = nn.Linear(D_X, 64)
        config = GPT2Config(
            n_positions=2 * (TASK.context_length + 1),
            n_embd=64,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            vocab_size=1,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel
        )
        self._backbone = GPT2Model(config)
        self._read_out = nn.Linear(64, 1)

    def forward(self, prompts: Prompts) -> Tensor:
        """Predictions [batch, pair] at each x; the query's comes last."""
        y = nn.functional.pad(prompts.y, (0, D_X - 1))
        pairs = torch.stack([prompts.x, y], 2).flatten(1, 2)
        tokens = torch.cat([pairs, prompts.x_query[:, None]], 1)
        stream = self._backbone(inputs_embeds=self._read_in(tokens)).last_hidden_state
        return self._read_out(stream[:, ::2])[..., 0]


def rate(step: int) -> float:
    """Learning rate of a step."""
    end, length, start = next(descent for descent in DESCENTS if step < descent[0])
    remaining = min(1.0, (end - step) / length)
    return start * min(1.0, (step + 1) / WARM_UP) * (1 - math.cos(math.pi * remaining)) / 2


def train(
    folder: Path,
    task: TaskConfig,
    rate: Callable[[int], float],
    *,
    until: int,
    seed: int = 0,
    kept: Collection[int] = (),
) -> None:
    """Train a model until a step; training resumes from the state in the folder.

    Args:
        rate: Function from a step to its learning rate.
        kept: Steps whose weights are saved in steps/<step>.pt.
    """
    torch.manual_seed(seed)
    model = GargModel()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    start = 0
    if (folder / STATE).exists():
        state = torch.load(folder / STATE)
        model.load_state_dict(state["model_state_dict"])
        optimizer.load_state_dict(state["optimizer_state_dict"])
        start = state["train_step"]
    elif 0 in kept:
        keep(model, folder, 0)
    for step in range(start, until):
        # Covariates and noise of a step are the same for every pool.
        prompts = draw_prompts(task, BATCH, generator=generator_for(seed, "train", step))
        y = torch.cat([prompts.y, prompts.y_query[:, None]], 1)[..., 0]
        loss = (model(prompts) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        done = step + 1
        if done in kept:
            keep(model, folder, done)
        if done % LOG_EVERY == 0 or done == until:
            save(model, optimizer, folder, done)
            print(done, f"loss {loss.item():.4f}", flush=True)


def keep(model: GargModel, folder: Path, step: int) -> None:
    """Save the weights of a step."""
    file = folder / "steps" / f"{step}.pt"
    file.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), file)


def save(model: GargModel, optimizer: torch.optim.Adam, folder: Path, step: int) -> None:
    """Write the state for resuming; if the process is killed, the old or the new state remains."""
    state = {"model_state_dict": model.state_dict(), "train_step": step}
    state["optimizer_state_dict"] = optimizer.state_dict()
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / STATE)


def over_ridge(checkpoint: Checkpoint) -> pd.DataFrame:
    """Excess risk and risk relative to the best ridge on the same prompts, with standard errors, by
    number of pairs."""
    rows, task = [], checkpoint.task
    for length in LENGTHS:
        drawn = {"context_length": length, "dtype": torch.float64}
        prompts = draw_prompts(task, N_PROMPTS, seed=7, **drawn)
        best = ridge(prompts, penalty=task.noise_var / task.beta_variance)
        found = checkpoint.predictor.predict(prompts).double()
        error, least = ((p - prompts.y_query_clean).square().mean(1).numpy() for p in (found, best))
        noisy = ratio_and_sem(error + task.noise_var, least + task.noise_var)
        rows.append((length, *map(float, (*ratio_and_sem(error, least), *noisy))))
    return pd.DataFrame(rows, columns=["pairs", "excess", "excess_sem", "risk", "risk_sem"])


def nearest_ridge(checkpoint: Checkpoint) -> dict[str, float]:
    """Penalty of the ridge regression closest to the model, and its R² on other prompts."""
    (algorithm,) = (one for one in ALGORITHMS if one.name == "ridge")
    fitted, scored = (draw_prompts(checkpoint.task, N_PROMPTS, seed=seed) for seed in (2, 3))
    moments, target = PromptMoments(fitted, checkpoint.task), checkpoint.predictor.predict
    fit = fit_algorithm(algorithm, moments, target(moments.prompts), n_layers=3)
    penalty = float(fit.scalars[0])
    return {"penalty": penalty, "r2": r2_and_sem(ridge(scored, penalty=penalty), target(scored))[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder to train in; without it, the shipped model is measured"
    )
    folder = parser.parse_args().out
    torch.set_num_threads(1)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(CONFIG)
        train(folder, TASK, rate, until=STEPS)
        return
    shipped = load(ROOT / "checkpoints" / "garg-gpt2")
    table = over_ridge(shipped).assign(**nearest_ridge(shipped))
    table.to_csv(RESULTS / "algorithms" / "garg_gpt2.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
