"""A monitor inside a training loop of somebody's own: it measures, and changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    Monitor,
    TaskConfig,
    ablate_heads,
    evaluation_prompts,
    hook_module,
    load,
    load_run,
    sample_prompts,
)
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.runs import Run

TASK = TaskConfig(d_x=2, context_length=6)


def module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))
        return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1))


def last(output: torch.Tensor) -> torch.Tensor:
    return output[:, -1]


def trained(monitor: Monitor | None) -> nn.Module:
    """A plain loop, with dropout, which draws from the shared random numbers."""
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for step in range(11):
            if monitor is not None:
                monitor(step, model)
            prompts = sample_prompts(TASK, 16, seed=step + 1)
            loss = (last(model(prompts.tokens)) - prompts.y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def test_training_goes_on_as_without_it():
    monitor = Monitor(task=TASK, read=last, every=5, n_prompts=32)
    watched, alone = trained(monitor), trained(None)
    assert watched.training
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name
    assert monitor.run().steps == [0, 5, 10]


def test_what_it_keeps_is_what_the_analyses_say():
    monitor = Monitor(task=TASK, read=last, every=5, n_prompts=32)
    trained(monitor)
    run = monitor.run()
    first = hook_module(module(), task=TASK, read=last)
    prompts = evaluation_prompts(first, n_prompts=32)
    rows = run.history[run.history["step"] == 0]
    with torch.no_grad():
        error = (last(module().eval()(prompts.tokens)) - prompts.y_query).square().mean(1)
    np.testing.assert_allclose(rows["eval_loss"], error.mean().item(), rtol=1e-5)
    np.testing.assert_allclose(rows["eval_loss_sem"], error.std().item() / 32**0.5, rtol=1e-5)
    found = ablate_heads(first, prompts)
    np.testing.assert_allclose(rows["rise"], found.rise.ravel(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(rows["rise_sem"], found.rise_sem.ravel(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(rows.groupby("layer")["share"].sum(), 1, rtol=1e-6)
    assert deep_snapshots(run, prompts).rise.shape == (3, 2, 2)
    np.testing.assert_allclose(
        deep_snapshots(run, prompts).rise.reshape(3, 4).ravel(),
        run.history["rise"],
        rtol=1e-4,
        atol=1e-7,
    )


def test_a_head_that_writes_nothing_has_no_share():
    model = module()
    with torch.no_grad():
        model[1].self_attn.out_proj.weight[:, :4] = 0
    monitor = Monitor(task=TASK, read=last, n_prompts=32)
    monitor(0, model)
    rows = monitor.run().history
    assert rows["share"].tolist()[:2] == [0, 1]
    assert rows["rise"][0] == 0


def test_labels_and_no_ablation():
    monitor = Monitor(task=TASK, read=last, n_prompts=64, ablation=False, labels=True)
    monitor(0, module())
    columns = monitor.run().history.columns.tolist()
    assert columns == ["step", "layer", "head", "loss", "eval_loss", "eval_loss_sem", "pattern"]
    assert monitor.run().history["pattern"][0] in ("undetermined", "unstructured", "other")


def test_what_it_refuses():
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        Monitor(every=0)
    with pytest.raises(ValueError, match="must be called at a multiple of 1000 steps first"):
        Monitor().run()


def test_its_run_is_asked_as_one_of_files_is(tmp_path: Path):
    """Both are of one class; what that class does not define both have, and an analysis over steps takes both."""
    monitor = Monitor(task=TASK, read=last, every=5, n_prompts=32)
    trained(monitor)
    for step in (1000, 2000):
        convert(load("softmax-h2-s0").at(step), "npz", tmp_path / f"step_{step}.npz")
    for run in (monitor.run(), load_run(tmp_path)):
        assert isinstance(run, Run)
        assert isinstance(run.at(run.steps[0]), type(run))
        assert run.at(run.steps[0]).step == run.steps[0]
        assert list(run.snapshots) == run.steps
        assert {"step", "head", "loss", "eval_loss"} <= set(run.history)
        assert run.predictor.predict(evaluation_prompts(run, n_prompts=4)).shape == (4, 1)
        assert type(run.model).run_with_cache
        assert deep_snapshots(run, evaluation_prompts(run, n_prompts=16)).step.tolist() == run.steps
        with pytest.raises(ValueError, match=r"step must be one of .*, got -1\."):
            run.at(-1)
