"""devinterp's sampler on the entries with a known learning coefficient, beside what theory predicts for a run of its length.

It needs the environment of `make test-trainers`. Run there: python -m analyses.known.devinterp_sampler"""

from collections.abc import Mapping
from itertools import product

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from analyses.known.chain_theory import curvatures, predicted
from analyses.lib.measured import RESULTS, Measured, write
from mechinterp.known import Entry, suite

SHORT = {"lr": 1e-3, "n_beta": 30.0, "num_chains": 4, "num_draws": 200, "batch_size": 1024}
"""Length and weight of the loss of devinterp's README."""
GUIDE = "devinterp, by its guide"
SETTINGS: Mapping[str, Mapping[str, float | int]] = {
    "devinterp, 200 steps": SHORT,
    "devinterp, localised, 1,000 steps": SHORT
    | {"localization": 1.0, "num_burnin_steps": 500, "num_draws": 500},
    "devinterp, n_beta 1,000, localised, 1,000 steps": SHORT
    | {"lr": 1e-4, "n_beta": 1000.0, "localization": 1.0}
    | {"num_burnin_steps": 500, "num_draws": 500},
    GUIDE: SHORT
    | {"lr": 3e-4, "n_beta": 1000.0, "localization": 1.0, "num_init_loss_batches": 64}
    | {"num_burnin_steps": 2000, "num_draws": 2000},
}
"""Only GUIDE discards the burn-in: `llc` averages over it by design."""
SEEDS = (0, 1)
N_PROMPTS = {GUIDE: 65536}
"""Number of prompts; 8,192 where a row is not named. A chain at a large n_beta goes to the minimum of its own prompts, so that few prompts make a bias."""


def averaged_from(name: str) -> int:
    """First step of the averages."""
    return int(SETTINGS[name]["num_burnin_steps"]) if name == GUIDE else 0


def estimates_by_step(
    entry: Entry, seed: int, settings: Mapping[str, float | int], n_prompts: int
) -> Float[np.ndarray, "chain step"]:
    """n_beta times the rise of the loss at each step; the dataset is prompts by number."""
    from datasets import Dataset
    from devinterp.slt.llc import llc

    prompts = entry.sample(n_prompts, seed)
    numbers = Dataset.from_dict({"input_ids": [[n, n] for n in range(n_prompts)]}).with_format(
        "torch"
    )

    def loss(module: nn.Module, input_ids: Tensor) -> Tensor:
        batch = prompts[input_ids[:, 0]]
        return (module(batch)[:, -1] - batch.y_query).square()

    found = llc(entry.module, numbers, {}, loss_fn=loss, init_seed=seed, device="cpu", **settings)
    return settings["n_beta"] * (np.asarray(found["loss_trace"].values) - float(found["init_loss"]))


def sampled(entry: Entry, seed: int, name: str) -> dict[str, float]:
    """Estimate of a row: the mean over chains and its standard error, and the same for both halves of the steps."""
    trace = estimates_by_step(entry, seed, SETTINGS[name], N_PROMPTS.get(name, 8192))
    trace = trace[:, averaged_from(name) :]
    chains = trace.mean(1)
    middle = trace.shape[1] // 2
    return {
        "estimate": float(chains.mean()),
        "sem": float(chains.std(ddof=1) / len(chains) ** 0.5),
        "first_half": float(trace[:, :middle].mean()),
        "second_half": float(trace[:, middle:].mean()),
    }


def main() -> None:
    torch.set_num_threads(1)
    entries = suite(1, trained="none")
    known = {
        name: entry
        for name, entry in entries.items()
        if entry.truth.learning_coefficient is not None
    }
    hessians = {name: curvatures(entry) for name, entry in known.items()}
    rows = []
    for method, (name, entry), seed in product(SETTINGS, known.items(), SEEDS):
        found = sampled(entry, seed, method)
        exact = entry.truth.learning_coefficient.value
        theory = predicted(hessians[name], SETTINGS[method], first=averaged_from(method))
        rows.append({"method": method, "entry": name, "seed": seed, "exact": exact} | found)
        rows[-1]["theory"] = theory
        print(rows[-1], flush=True)
    write(Measured(pd.DataFrame(rows)), "known_devinterp_sampler", RESULTS)


if __name__ == "__main__":
    main()
