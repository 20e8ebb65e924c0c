"""Trained layers for the calibration of labels along the pairs.

    python -m analyses.recurrent.layers --out FOLDER  (a quarter of an hour on one core)

Sixty layers of random sizes and tasks, one training of 3,000 updates each; every second task drifts. A finished layer is
kept, so that a second run goes on where the first stopped.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from analyses.lib.measured import parsed, parser_of
from mechinterp import TaskConfig
from mechinterp.config import ExperimentConfig, ModelConfig, TrainConfig
from mechinterp.training.train import train_models

SEED = 710
FOLDER = Path("runs/recurrent-calibration")
STEPS = 3000
TRAIN = TrainConfig(
    steps=STEPS,
    batch_size=64,
    learning_rate=3e-3,
    loss="every",
    schedule="cosine",
    clip_norm=1.0,
    log_every=STEPS // 6,
)
PLAIN = TrainConfig(steps=STEPS, learning_rate=3e-3, log_every=STEPS // 6)
"""Training of linear attention, which predicts at the query alone."""
FAMILIES = {
    "gated": (10, ModelConfig(n_heads=1, score="gated")),
    "delta": (8, ModelConfig(n_heads=1, score="delta")),
    "gated-delta": (10, ModelConfig(n_heads=1, score="gated_delta")),
    "mesa": (10, ModelConfig(n_heads=1, score="mesa")),
    "linear": (6, ModelConfig(n_heads=1, score="linear/L")),
    "gated-two-heads": (4, ModelConfig(n_heads=2, score="gated")),
    "gated-delta-two-heads": (4, ModelConfig(n_heads=2, score="gated_delta")),
    "gated-by-token": (4, ModelConfig(n_heads=1, score="gated", gates="token")),
    "gated-delta-by-token": (4, ModelConfig(n_heads=1, score="gated_delta", gates="token")),
}
"""Number of layers of each family, and their model."""


def drawn_task(random: np.random.Generator, *, drifts: bool) -> TaskConfig:
    """A task of random size and noise, with a random rho if it drifts."""
    return TaskConfig(
        d_x=int(random.integers(2, 9)),
        context_length=int(random.integers(8, 41)),
        noise_var=float(10 ** random.uniform(-2, -0.3)),
        drift=float(random.uniform(0.9, 0.99)) if drifts else 1.0,
    )


def configs() -> dict[str, ExperimentConfig]:
    """Configs of all layers by name."""
    found = {}
    for index, (family, (count, model)) in enumerate(FAMILIES.items()):
        for number in range(count):
            task = drawn_task(np.random.default_rng([SEED, index, number]), drifts=number % 2 == 1)
            seed = SEED + 100 * index + number
            training = PLAIN if model.score == "linear/L" else TRAIN
            training = replace(training, data_seed=seed)
            found[f"{family}-{number}"] = ExperimentConfig(
                task=task, model=model, train=training, seed=seed
            )
    return found


def main() -> None:
    given = parsed(parser_of(__doc__, out=FOLDER))
    train_models(configs(), given.out, resume=True)


if __name__ == "__main__":
    main()
