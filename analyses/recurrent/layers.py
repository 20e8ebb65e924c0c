"""Trained layers for the calibration of labels along the pairs.

    python -m analyses.recurrent.layers --out FOLDER --draw fourth  (five to ten minutes on one core)

Layers of random sizes and tasks; every second task drifts. The first draw has sixty, with 3,000 updates each; the second
has forty, the third and fourth fifty, with 1,500. A finished layer is kept, so that a second run goes on where the first stopped.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from analyses.lib.measured import parsed, parser_of
from mechinterp import TaskConfig
from mechinterp.config import ExperimentConfig, ModelConfig, TrainConfig
from mechinterp.training.train import train_models

SEEDS = {"first": 710, "second": 711, "third": 712, "fourth": 713}
"""First number of the seeds of each draw."""
FOLDER = Path("runs/recurrent-calibration")
STEPS = {"first": 3000, "second": 1500, "third": 1500, "fourth": 1500}
"""Number of updates of each draw."""
TRAIN = TrainConfig(
    batch_size=64,
    learning_rate=3e-3,
    loss="every",
    schedule="cosine",
    clip_norm=1.0,
)
PLAIN = TrainConfig(learning_rate=3e-3)
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
"""Number of layers of each family in the first draw, and their model."""
LATER = {
    "gated": 6,
    "delta": 6,
    "gated-delta": 8,
    "mesa": 12,
    "gated-two-heads": 2,
    "gated-delta-two-heads": 2,
    "gated-by-token": 2,
    "gated-delta-by-token": 2,
}
"""Number of layers of each family in the later draws; more of mesa layers, one of which had a wrong name in the first."""
COUNTS = {
    "first": {family: count for family, (count, _) in FAMILIES.items()},
    "second": LATER,
    "third": {**LATER, "mesa": 22},
    "fourth": {**LATER, "mesa": 22},
}
"""Number of layers of each family by draw. From the third on there are more mesa layers, which had all wrong names before."""


def drawn_task(random: np.random.Generator, *, drifts: bool) -> TaskConfig:
    """A task of random size and noise, with a random rho if it drifts."""
    return TaskConfig(
        d_x=int(random.integers(2, 9)),
        context_length=int(random.integers(8, 41)),
        noise_var=float(10 ** random.uniform(-2, -0.3)),
        drift=float(random.uniform(0.9, 0.99)) if drifts else 1.0,
    )


def configs(draw: str = "first") -> dict[str, ExperimentConfig]:
    """Configs of all layers of a draw by name."""
    found, first, steps = {}, SEEDS[draw], STEPS[draw]
    for index, (family, (_, model)) in enumerate(FAMILIES.items()):
        for number in range(COUNTS[draw].get(family, 0)):
            random = np.random.default_rng([first, index, number])
            task = drawn_task(random, drifts=number % 2 == 1)
            seed = first + 100 * index + number
            training = PLAIN if model.score == "linear/L" else TRAIN
            training = replace(training, data_seed=seed, steps=steps, log_every=steps // 6)
            found[f"{family}-{number}"] = ExperimentConfig(
                task=task, model=model, train=training, seed=seed
            )
    return found


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER)
    parser.add_argument(
        "--draw", choices=list(SEEDS), default="fourth", help="which draw of layers"
    )
    given = parsed(parser)
    train_models(configs(given.draw), given.out, resume=True)


if __name__ == "__main__":
    main()
