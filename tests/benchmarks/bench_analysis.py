"""Analyses of the shipped models: losses on shared prompts, masking, classification."""

from pathlib import Path

import numpy as np
import plain
import torch
from torch import nn

from analyses.lib.shared_losses import shared_losses
from mechinterp import Monitor, TaskConfig
from mechinterp.analysis.ablation.subsets import ablate_subsets
from mechinterp.analysis.learners import nearest
from mechinterp.analysis.one_layer import random_null as null
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.report.to_json import to_json

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def test_evaluation(versus):
    """Standard errors and paired differences included in ours."""
    names = [f"softmax-h{h}-s{seed}" for h in (1, 2, 4, 8) for seed in (0, 1)]
    models = {name: load(CHECKPOINTS / name) for name in names}
    task = models[names[0]].config.task
    layers = [plain.attention(checkpoint.weights) for checkpoint in models.values()]

    def one_by_one() -> None:
        for layer in layers:
            for _ in range(10):
                query, context, y_query = plain.sample(2000)
                (layer(query, context) - y_query).square().mean().item()

    name = "losses of 8 models on 20,000 prompts"
    versus(name, lambda: shared_losses(models, task, n_prompts=20_000), one_by_one, rounds=3)


def test_masking(versus):
    """Plain: one forward pass for each subset."""
    checkpoint = load(CHECKPOINTS / "softmax-h8-s0")
    generator = generator_for(0, "eval", 0)
    prompts = sample_prompts(checkpoint.config.task, 512, generator=generator)
    layer = plain.attention(checkpoint.weights)
    batch = (prompts.tokens[:, -1:], prompts.context_tokens, prompts.y_query_clean)
    risks, expected = ablate_subsets(checkpoint, prompts).risk, plain.subset_risks(layer, batch)
    np.testing.assert_allclose(np.sort(risks), np.sort(expected), rtol=1e-3)
    versus(
        "all 256 subsets of 8 heads on 512 prompts",
        lambda: ablate_subsets(checkpoint, prompts),
        lambda: plain.subset_risks(layer, batch),
        rounds=3,
    )


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
            prompts = sample_prompts(TaskConfig(), 64, seed=step)
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
