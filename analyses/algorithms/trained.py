"""Labels of models trained from scratch, over seeds of the weights and of the prompts.

    python -m analyses.algorithms.trained    (about ten minutes on one core)

Two and three layers of linear and of softmax attention, three models of each, 3,000 updates of 64
prompts, labelled with three seeds. Their right labels are unknown: the analysis checks whether a
model gets the same label for every seed of the prompts. Models that the file already has are not
trained again. Writes analyses/results/algorithms/algorithm_trained.csv, one row per model and seed
of the prompts; docs/results/algorithms.md shows it."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pandas as pd
import torch

from analyses.algorithms.calibration import append, known_rows
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.training.train import train

ROOT = Path(__file__).parents[2]
FILE = "algorithms/algorithm_trained.csv"
TASK = TaskConfig(d_x=4, context_length=16, noise_var=0.1)
STEPS, WEIGHT_SEEDS, PROMPT_SEEDS = 3000, range(3), range(3)


def config_of(score: str, n_layers: int, seed: int, steps: int = STEPS) -> ExperimentConfig:
    model = ModelConfig(
        n_layers=n_layers, n_heads=2, d_head=8, d_model=32, score=score, context_only=True
    )
    training = TrainConfig(
        steps=steps,
        batch_size=64,
        learning_rate=0.003,
        data_seed=seed,
        log_every=steps,
        n_eval_prompts=1024,
        schedule="cosine",
        clip_norm=1.0,
    )
    return ExperimentConfig(task=TASK, model=model, train=training, seed=seed)


def rows_of(score: str, n_layers: int, seed: int, steps: int = STEPS) -> list[dict[str, object]]:
    """Labels of a model, by seed of the prompts."""
    with TemporaryDirectory() as folder:
        checkpoint = train(config_of(score, n_layers, seed, steps), out=Path(folder) / "model")
        found = [name_algorithm(checkpoint, seed=each) for each in PROMPT_SEEDS]
    return [
        {
            "model": f"{score}, {n_layers} layers",
            "seed": seed,
            "prompt_seed": prompt_seed,
            "label": each.label,
            "function": each.function,
            "frequency": max(each.frequency.values()),
            "n_prompts": each.n_prompts,
            "relative_risk": each.measured.relative_risk,
            "reason": each.reason,
        }
        for prompt_seed, each in zip(PROMPT_SEEDS, found, strict=True)
    ]


def trained_table(results: Path) -> str:
    """Table with one row per model on docs/results/algorithms.md."""
    rows = pd.read_csv(results / FILE)
    lines = ["| model | seed of its weights | excess risk | labels over 3 seeds of the prompts |"]
    lines.append("|---|---|---|---|")
    for (name, seed), each in rows.groupby(["model", "seed"]):
        counts = each.label.value_counts()
        labels = ", ".join(f"`{label}` {count}" for label, count in counts.items())
        lines.append(f"| {name} | {seed} | {each.relative_risk.iloc[0]:.3f} | {labels} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit")
    arguments = parser.parse_args()
    (arguments.out / FILE).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    file, until = arguments.out / FILE, monotonic() + 60 * arguments.minutes
    for seed in WEIGHT_SEEDS:
        for score in ("linear/L", "softmax"):
            for n_layers in (2, 3):
                name = f"{score}, {n_layers} layers"
                if monotonic() < until and (name, seed) not in known_rows(file, "model"):
                    for row in rows_of(score, n_layers, seed):
                        append(file, row)
                        print(name, seed, row["label"], row["n_prompts"], sep=" | ", flush=True)
    print(trained_table(arguments.out))


if __name__ == "__main__":
    main()
