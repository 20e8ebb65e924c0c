"""Further training of a pruned model: the same as by hand, pruned heads stay away, the full model is the control."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import fine_tune, pruned_weights
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.run.general import predict_deep
from tests.deep_models import WIDE, random_model

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=4, context_length=9),
    model=ModelConfig(n_layers=3, n_heads=4, context_only=True, d_model=12, d_head=3),
    train=TrainConfig(batch_size=64, shortest_context=5, schedule="cosine", clip_norm=0.5),
)
KEPT = np.array([[True] * 4, [True] + [False] * 3, [True] * 4])


@pytest.fixture
def checkpoint(tmp_path: Path):
    save(tmp_path / "full", CONFIG, random_model(**WIDE).weights, step=5)
    return load(tmp_path / "full")


@pytest.fixture
def fresh():
    generator = generator_for(1, "eval", 0)
    return sample_prompts(CONFIG.task, 500, generator=generator, dtype=torch.float64)


def by_hand(weights, steps: int):
    """Adam on prompts of lengths 5 to 9, gradients cut to norm 0.5, the step size along half a cosine."""
    trained = {name: t.detach().clone().requires_grad_() for name, t in weights.tensors.items()}
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    for step in range(steps):
        generator = generator_for(1000, "train", step)
        length = int(torch.randint(5, 10, (), generator=generator))
        drawn = sample_prompts(
            CONFIG.task, 64, generator=generator, context_length=length, dtype=torch.float64
        )
        optimizer.zero_grad()
        error = predict_deep(weights.with_tensors(trained), drawn) - drawn.y_query
        error.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + np.cos(np.pi * step / steps)) / 2
        optimizer.step()
    return weights.with_tensors({name: tensor.detach() for name, tensor in trained.items()})


def risks(weights, prompts):
    return (predict_deep(weights, prompts) - prompts.y_query_clean).square().mean(1).numpy()


@pytest.mark.slow
def test_it_is_training_by_hand(checkpoint, fresh):
    found = fine_tune(checkpoint, KEPT, fresh, steps=20, learning_rate=1e-2)
    assert found.step.tolist() == [0, 5, 10, 15, 20]
    starts = [pruned_weights(checkpoint.weights, KEPT), checkpoint.weights]
    few, full = (by_hand(start, 20) for start in starts)
    for name, tensor in few.tensors.items():
        torch.testing.assert_close(found.weights.tensors[name], tensor, rtol=1e-7, atol=1e-9)
    expected = [risks(weights, fresh) for weights in (starts[0], few, starts[1], full)]
    ends = found.risk[:, [0, -1]].ravel()
    np.testing.assert_allclose(ends, np.mean(expected, axis=1), rtol=1e-6)
    np.testing.assert_allclose(found.ratio[:, -1], found.risk[:, -1] / found.risk[1, 0], rtol=1e-9)
    assert (found.ratio[1, 0], found.ratio_sem[1, 0]) == (1, 0)
    masked = masked_errors(checkpoint.model, fresh, [[(1, 1), (1, 2), (1, 3)]])
    assert found.risk[0, 0] == pytest.approx(masked.mean(), rel=1e-9)


@pytest.mark.slow
def test_it_helps_and_pruned_heads_stay_away(checkpoint, fresh, tmp_path):
    found = fine_tune(checkpoint, KEPT, fresh, steps=60, learning_rate=1e-2)
    assert found.weights.heads_per_layer == ((0, 1, 2, 3), (0,), (0, 1, 2, 3))
    assert found.risk[0, -1] + 4 * found.risk_sem[0, -1] < found.risk[0, 0]
    found.save(tmp_path / "tuned")
    saved = load(tmp_path / "tuned")
    np.testing.assert_allclose(risks(saved.weights, fresh).mean(), found.risk[0, -1], rtol=1e-9)
    heads = [[0, 1, 2, 3], [0], [0, 1, 2, 3]]
    expected = {"pruned_from": "full", "kept_heads": heads, "fine_tuned_steps": 60}
    assert (saved.step, saved.origin) == (65, expected)
    assert repr(found).startswith("FineTuning(60 steps: ")
    assert found.to_frame()["model"].tolist() == ["pruned"] * 5 + ["full"] * 5
    assert [trace.name for trace in found.plot().data if trace.name in ("pruned", "full")]


def test_what_is_refused(checkpoint, fresh):
    with pytest.raises(ValueError, match=r"train.steps must be >= 1, got 0"):
        fine_tune(checkpoint, KEPT, fresh, steps=0)
    with pytest.raises(ValueError, match="must keep at least one of 12 heads, got none"):
        fine_tune(checkpoint, ~np.ones((3, 4), dtype=bool), fresh)
