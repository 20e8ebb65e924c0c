"""Train the softmax models whose snapshots are among the confirming models, and store their
circuits.

python -m analyses.calibration.train  (a few minutes on one core); writes analyses/calibration/trained.safetensors.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from analyses.calibration.models import TRAINED
from mechinterp import load, override, preset
from mechinterp.training.train import train_models

SEEDS = {1: [1000], 2: [1000, 1001], 3: [1000, 1001], 4: [1000, 1001], 8: [1000]}
"""Seeds of weights and of prompts, by number of heads; no shipped model uses them."""
FIELDS = ("train.steps=30000", "train.log_every=5000")


def main() -> None:
    torch.set_num_threads(1)
    models = {
        f"softmax-h{heads}-s{seed}": override(
            preset(f"softmax-h{heads}"), f"seed={seed}", f"train.data_seed={seed}", *FIELDS
        )
        for heads, seeds in SEEDS.items()
        for seed in seeds
    }
    with tempfile.TemporaryDirectory() as folder:
        train_models(models, folder)
        keep(Path(folder), list(models))


def keep(folder: Path, names: list[str]) -> None:
    """Store the circuits of all snapshots of these models, in double precision."""
    tensors = {}
    for name in names:
        for step, weights in load(folder / name).snapshots.items():
            heads = weights.to(torch.float64)
            tensors[f"{name}/{step}/QK"] = heads.QK.contiguous()
            tensors[f"{name}/{step}/OV"] = heads.OV.contiguous()
    save_file(tensors, TRAINED)


if __name__ == "__main__":
    main()
