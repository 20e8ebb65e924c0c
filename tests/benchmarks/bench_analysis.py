"""Analyses: labels of the shipped models, and what a monitor of training measures."""

from pathlib import Path

import torch
from torch import nn

from mechinterp import Monitor, TaskConfig
from mechinterp.analysis.learners import nearest
from mechinterp.analysis.one_layer import random_null as null
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import draw_prompts
from mechinterp.report.to_json import to_json

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def test_classification(versus):
    """Plain: prompts and the null of random weights are drawn anew for each checkpoint."""
    folders = sorted(file.parent for file in CHECKPOINTS.glob("softmax-h*/config.json"))[::5]

    def ours() -> None:
        for folder in folders:
            checkpoint = load(folder)
            to_json("classify", checkpoint, classify(checkpoint))

    def without_caches() -> None:
        for folder in folders:
            nearest.evaluation.cache_clear()
            null.null_of.cache_clear()
            checkpoint = load(folder)
            to_json("classify", checkpoint, classify(checkpoint))

    name = f"classification of {len(folders)} checkpoint folders"
    versus(name, ours, without_caches, prepare=ours)


EVERY, TIMED = 1000, 20


def test_a_measurement_of_two_layers(versus):
    """A monitor's measurement, against the training steps between two of them: its share of a run is one over the ratio."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    module = nn.Sequential(nn.Linear(6, 32), *layers, nn.Linear(32, 1))
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)

    def steps() -> None:
        for step in range(TIMED):
            prompts = draw_prompts(TaskConfig(), 64, seed=step)
            loss = (module(prompts.tokens)[:, -1] - prompts.y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def measurement() -> None:
        Monitor(task=TaskConfig(), read=lambda output: output[:, -1])(0, module)

    versus(
        f"a monitor's measurement of 2 layers of 4 heads, against the {EVERY:,} plain training steps between two "
        f"(plain: {TIMED})",
        measurement,
        steps,
        work=EVERY / TIMED,
        rounds=3,
    )
