"""Analyses over steps: of the kept models of a run, and by a monitor inside a loop of somebody's own."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import Monitor, TaskConfig, hook_module, load
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.over_steps import OverSteps, over_steps
from mechinterp.checkpoints.checkpoint import Checkpoint, save
from mechinterp.checkpoints.runs import Run
from mechinterp.config import ExperimentConfig, override
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import stack
from mechinterp.models.run.evaluation import evaluation_prompts
from tests.conftest import CHECKPOINTS, refused


@pytest.fixture
def grown(tmp_path: Path) -> Checkpoint:
    """Two heads that are a kernel smoother at step 10 and a gradient step at step 20; no history."""
    kernel = stack([kernel_head(0.5, 1.5, d_x=5), zero_head(d_x=5)])
    pair = debiased_gradient_step(0.88, 0.02, d_x=5)
    config = override(ExperimentConfig(), "model.n_heads=2")
    save(tmp_path / "grown", config, pair, step=20, snapshots={10: kernel, 20: pair})
    return load(tmp_path / "grown")


@pytest.mark.slow
def test_each_step_is_classified_as_a_model_of_its_own(grown: Checkpoint):
    found = over_steps(grown, n_prompts=256)
    assert found.headlines == ["kernel_regression", "debiased_gd"]
    frame = found.to_frame()
    assert frame["step"].tolist() == [10, 10, 20, 20]
    assert frame["label"].tolist() == ["positive", "dummy", "positive", "negative"]
    assert frame["omega_mean"].tolist() == pytest.approx([0.5, 0, 0.02, -0.02])
    alone = classify(grown.at(10), n_prompts=256).to_frame()
    np.testing.assert_array_equal(frame["share"][:2], alone["share"])
    # Without a history there is no loss, and no figure of it.
    assert np.isnan(found.eval_loss).all()
    assert "classify_loss" not in found.figures()
    drawn = {trace.name: tuple(trace.y) for trace in found.plot_curve("omega_mean").data}
    assert drawn == {"H0": pytest.approx((0.5, 0.02)), "H1": pytest.approx((0, -0.02))}


def test_a_slider_holds_the_circuits_of_each_step_on_one_scale(grown: Checkpoint):
    figure = over_steps(grown, "circuits").plot()
    assert [frame.name for frame in figure.frames] == ["10", "20"]
    assert figure.layout.sliders[0].active == 1
    own = [circuits(grown.at(step)) for step in (10, 20)]
    drawn = [[*each.QK[0, :, :5], *each.OV[0].swapaxes(1, 2)] for each in own]
    for frame, matrices in zip(figure.frames, drawn, strict=True):
        for trace, matrix in zip(frame.data, matrices, strict=True):
            np.testing.assert_allclose(trace.z, matrix, rtol=1e-6)
    for kind in (slice(2), slice(2, 4)):  # QK, OV
        largest = max(np.abs(matrix).max() for matrices in drawn for matrix in matrices[kind])
        for trace in figure.data[kind]:
            assert trace.zmax == -trace.zmin == pytest.approx(largest)


def test_the_loss_between_logged_steps_is_that_of_the_last_one(tmp_path: Path):
    curve, step = np.array([[10.0, 3.0], [20.0, 2.0]]), np.array([5, 10, 19, 20, 99])
    found = OverSteps("classify", (), step, curve)
    np.testing.assert_array_equal(found.eval_loss, [np.nan, 3, 3, 2, 2])
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    assert checkpoint.at(5000).history["step"].max() == 5000
    config = override(ExperimentConfig(), "model.n_heads=1")
    save(tmp_path / "one", config, zero_head(d_x=5), step=0)
    with refused("classify over steps", "snapshots"):
        over_steps(load(tmp_path / "one"))


def test_arguments_of_the_analysis_are_passed_on():
    checkpoint = load(CHECKPOINTS / "pool-linear-m4-s0")
    found = over_steps(checkpoint, "compare-priors", n_prompts=64, context_lengths=[2, 5])
    for step, each in zip(found.step, found.results, strict=True):
        own = compare_priors(checkpoint.at(int(step)), n_prompts=64, context_lengths=[5, 2]).overall
        np.testing.assert_allclose(each.overall.relative, own.relative)
    with refused("compare-priors", "context_lengths", "steps"):
        over_steps(checkpoint, "compare-priors", steps=3)


ROOT = Path(__file__).parents[2]
SETTING = {"d_x": 2, "context_length": 6, "noise_var": 0.0, "beta_var": 1.0}
TASK = TaskConfig(**SETTING)
JOINED = {"norm": "after", "activation": "relu", "context_keys": True, "positions": "none"}


def module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))
        return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1))


def last(output: torch.Tensor) -> torch.Tensor:
    return output[:, -1]


def trained(*monitors: Monitor) -> nn.Module:
    """A plain loop, with dropout, which draws from the shared random numbers."""
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for step in range(11):
            for monitor in monitors:
                monitor(step, model)
            prompts = draw_prompts(TASK, 16, seed=step + 1)
            loss = (last(model(prompts.tokens)) - prompts.y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@pytest.mark.slow
def test_training_goes_on_as_without_it_and_it_logs_flat_rows(tmp_path: Path):
    rows: list[dict] = []
    given = {"task": TASK, "read": last, "every": 5, "n_prompts": 64}
    monitor = Monitor(**given, log=rows.append, labels=True)
    in_file = Monitor(**given, log=tmp_path / "log.jsonl", ablation=False)
    watched, alone = trained(monitor, in_file), trained()
    assert watched.training
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name
    assert monitor.run().steps == [row["icl/step"] for row in rows] == [0, 5, 10]
    history = monitor.run().history
    prompts = evaluation_prompts(monitor.run(), n_prompts=64)
    error = ridge(prompts, penalty=TASK.posterior_penalty) - prompts.y_query
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    for row, line in zip(rows, map(json.loads, lines), strict=True):
        at = history[history["step"] == row["icl/step"]].reset_index()
        assert row["icl/loss"] == line["icl/loss"] == at["eval_loss"][0]
        assert row["icl/L1H0/rise"] == at["rise"][2]
        assert row["icl/pattern"] == at["pattern"][0]
        assert row["icl/ridge"] == pytest.approx(error.square().mean().item())
        assert all(isinstance(value, int | float | str) for value in row.values())
    first = ["step", "layer", "head", "loss", "eval_loss", "eval_loss_sem"]
    assert in_file.run().history.columns.tolist() == first


@pytest.mark.slow
def test_what_it_keeps_is_what_the_analyses_say():
    monitor = Monitor(task=TASK, read=last, every=5, n_prompts=32)
    trained(monitor)
    run = monitor.run()
    first = hook_module(module(), task=TASK, read=last)
    prompts = evaluation_prompts(first, n_prompts=32)
    rows = run.history[run.history["step"] == 0]
    with torch.no_grad():
        error = (last(module().eval()(prompts.tokens)) - prompts.y_query).square().mean(1)
    found = ablate(first, prompts, what="heads")
    for name, expected in (
        ("eval_loss", error.mean().item()),
        ("eval_loss_sem", error.std().item() / 32**0.5),
        ("rise", found.rise.ravel()),
        ("rise_sem", found.rise_sem.ravel()),
    ):
        np.testing.assert_allclose(rows[name], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(rows.groupby("layer")["share"].sum(), 1, rtol=1e-6)
    rise = over_steps(run, "ablate", prompts, what="heads").to_frame()["rise"]
    np.testing.assert_allclose(rise, run.history["rise"], rtol=1e-4, atol=1e-7)


def test_a_head_that_writes_nothing_has_no_share():
    model = module()
    nn.init.zeros_(model[1].self_attn.out_proj.weight[:, :4].data)
    monitor = Monitor(task=TASK, read=last, n_prompts=32)
    monitor(0, model)
    rows = monitor.run().history
    assert rows["share"].tolist()[:2] == [0, 1]
    assert rows["rise"][0] == 0


def test_what_it_refuses():
    with refused("every", 1, 0):
        Monitor(every=0)
    with refused(1000):
        Monitor().run()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read_out = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.read_out(self.encoder(self.read_in(tokens)))


@pytest.mark.slow
def test_it_is_asked_and_kept_as_a_run_of_files(tmp_path: Path):
    """A run by a monitor in memory, by one in a folder, and by the files of the same loop."""
    kept = Monitor(task=TASK, every=5, n_prompts=1024, keep=tmp_path / "mine")
    memory = Monitor(task=TASK, every=5, n_prompts=1024)
    (tmp_path / "files").mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    for step in (0, 5, 10):
        with torch.no_grad():
            model.read_out.weight.mul_(1 + step / 10)
        for monitor in (kept, memory):
            monitor(step, model)
        torch.save(model.state_dict(), tmp_path / "files" / f"step_{step}.pt")
    assert len(kept.snapshots) == 1
    given = {"model": {**JOINED, "layout": "pairs"}}
    files = load(tmp_path / "files", n_heads=2, task=SETTING, **given)
    runs = (memory.run(), kept.run(), files, load(tmp_path / "mine", **given))
    prompts = evaluation_prompts(memory.run(), n_prompts=16)
    for run in runs:
        assert isinstance(run, Run)
        assert isinstance(run.at(5), type(run))
        assert (run.step, run.at(5).step, list(run.snapshots)) == (10, 5, [0, 5, 10])
        for step in run.steps:
            expected = memory.run().at(step).predictor.predict(prompts)
            torch.testing.assert_close(run.at(step).predictor.predict(prompts), expected)
        with refused("step", "0, 5, 10", 7):
            run.at(7)
    shared = ["step", "layer", "head", "loss", "eval_loss", "eval_loss_sem"]
    own, other = (run.history for run in (memory.run(), files))
    assert list(own)[:6] == list(other)[:6] == shared
    np.testing.assert_allclose(own[shared], other[shared], rtol=1e-5)
    own, other = (
        over_steps(run, "ablate", prompts, what="heads").to_frame() for run in (runs[0], files)
    )
    assert list(own) == list(other)
    one, two = (frame.select_dtypes("number") for frame in (own, other))
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    with refused("step_0.pt", "already exists"):
        Monitor(task=TASK, keep=tmp_path / "mine")(0, model)


@pytest.mark.exhaustive
def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs" / "how" / "monitor.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n(.*?)```", text, re.S)
    (example,) = (part for part in parts if "Monitor(" in part)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    losses = names["run"].history.groupby("step")["eval_loss"].first()
    assert names["run"].steps == [0, 100, 200, 300]
    assert losses[300] < losses[0]
    assert (tmp_path / "reports" / "training" / "index.html").is_file()
