"""devinterp's sampler on the entries with a known learning coefficient, beside what theory predicts for a run of its length.

It needs the environment of `make test-trainers`. Run there: python -m analyses.known.devinterp_sampler"""

from collections.abc import Mapping
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from analyses.known.chain_theory import curvatures, predicted
from analyses.lib.measured import RESULTS, Measured, write
from mechinterp.known import Entry, judge_sampler, suite

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
    | {"lr": 3e-4, "n_beta": 1000.0, "localization": 1.0, "num_init_loss_batches": 8}
    | {"num_burnin_steps": 2000, "num_draws": 2000},
}
"""Only GUIDE discards the burn-in: `llc` averages over it by design."""
N_PROMPTS = 8192


def averaged_from(name: str) -> int:
    """First step of the averages."""
    return int(SETTINGS[name]["num_burnin_steps"]) if name == GUIDE else 0


def sampled(
    entry: Entry, seed: int, *, name: str, n_prompts: int = N_PROMPTS
) -> tuple[float, float]:
    """Mean over chains and its standard error; the dataset is prompts by number."""
    from datasets import Dataset
    from devinterp.slt.llc import llc

    prompts = entry.sample(n_prompts, seed)
    numbers = Dataset.from_dict({"input_ids": [[n, n] for n in range(n_prompts)]}).with_format(
        "torch"
    )

    def loss(module: nn.Module, input_ids: Tensor) -> Tensor:
        batch = prompts[input_ids[:, 0]]
        return (module(batch)[:, -1] - batch.y_query).square()

    found = llc(
        entry.module, numbers, {}, loss_fn=loss, init_seed=seed, device="cpu", **SETTINGS[name]
    )
    later = found["loss_trace"].values[:, averaged_from(name) :].mean(1)
    chains = SETTINGS[name]["n_beta"] * (later - float(found["init_loss"]))
    return float(chains.mean()), float(chains.std(ddof=1) / len(chains) ** 0.5)


def with_theory(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `theory`: the estimate that theory predicts for exact gradients."""
    entries = suite(trained="none")
    hessians = {name: curvatures(entries[name]) for name in rows["entry"].unique()}
    theory = [
        predicted(hessians[entry], SETTINGS[name], first=averaged_from(name))
        for entry, name in zip(rows["entry"], rows["method"], strict=True)
    ]
    return rows.assign(theory=theory)


def main() -> None:
    torch.set_num_threads(1)
    frames = []
    for name in SETTINGS:
        found = judge_sampler(partial(sampled, name=name), suite(trained="none"), seeds=range(2))
        frames.append(found.to_frame().assign(method=name))
        print(name, found, flush=True)
    rows = with_theory(pd.concat(frames, ignore_index=True))
    write(Measured(rows), "known_devinterp_sampler", RESULTS)


if __name__ == "__main__":
    main()
