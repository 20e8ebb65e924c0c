"""devinterp's sampler on the entries with a known learning coefficient, at the settings of its README and at others.

It needs the environment of `make test-trainers`. Run there: python -m analyses.known.devinterp_sampler"""

from collections.abc import Mapping
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from analyses.lib.measured import RESULTS, Measured, write
from mechinterp.known import Entry, judge_sampler, suite

README = {"lr": 1e-3, "n_beta": 30.0, "num_chains": 4, "num_draws": 200}
SETTINGS: Mapping[str, Mapping[str, float | int]] = {
    "devinterp, README": README,
    "devinterp, batch 1,024": README | {"batch_size": 1024},
    "devinterp, batch 1,024, localised, burn-in": README
    | {"batch_size": 1024, "localization": 1.0, "num_burnin_steps": 500, "num_draws": 500},
    "devinterp, n_beta 1,000": {
        **{"lr": 1e-4, "n_beta": 1000.0, "localization": 1.0, "batch_size": 1024},
        **{"num_chains": 4, "num_draws": 500, "num_burnin_steps": 500},
    },
}
N_PROMPTS = 8192


def sampled(
    entry: Entry, seed: int, *, settings: Mapping[str, float | int], n_prompts: int = N_PROMPTS
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

    found = llc(entry.module, numbers, {}, loss_fn=loss, init_seed=seed, device="cpu", **settings)
    chains = found["llc_per_chain"].values
    return float(chains.mean()), float(chains.std(ddof=1) / len(chains) ** 0.5)


def main() -> None:
    torch.set_num_threads(1)
    frames = []
    for name, settings in SETTINGS.items():
        found = judge_sampler(
            partial(sampled, settings=settings), suite(trained="none"), seeds=range(2)
        )
        frames.append(found.to_frame().assign(method=name))
        print(name, found, flush=True)
    write(Measured(pd.concat(frames, ignore_index=True)), "known_devinterp_sampler", RESULTS)


if __name__ == "__main__":
    main()
