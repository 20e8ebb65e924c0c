"""A monitor inside a training loop of somebody's own: it measures, and changes nothing. What it returns is, in all that a
user sees, what `load_run` makes of the files that the same loop wrote."""

import json
import re
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
    load_run,
    sample_prompts,
    write_report,
)
from mechinterp.analysis.over_steps import over_steps
from mechinterp.checkpoints.runs import Run
from mechinterp.icl.predictors import ridge
from tests.conftest import python

ROOT = Path(__file__).parents[2]
SETTING = {"d_x": 2, "context_length": 6, "noise_var": 0.0, "beta_var": 1.0}
TASK = TaskConfig(**SETTING)
JOINED = {"norm": "after", "activation": "relu", "context_only": True, "positions": "none"}


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
    np.testing.assert_allclose(rows["eval_loss"], error.mean().item(), rtol=1e-5)
    np.testing.assert_allclose(rows["eval_loss_sem"], error.std().item() / 32**0.5, rtol=1e-5)
    found = ablate_heads(first, prompts)
    np.testing.assert_allclose(rows["rise"], found.rise.ravel(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(rows["rise_sem"], found.rise_sem.ravel(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(rows.groupby("layer")["share"].sum(), 1, rtol=1e-6)
    rise = over_steps(run, "ablate-heads", prompts).to_frame()["rise"]
    np.testing.assert_allclose(rise, run.history["rise"], rtol=1e-4, atol=1e-7)


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


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read_out = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.read_out(self.encoder(self.read_in(tokens)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """A run by a monitor, and by the files of the same loop."""
    folder = tmp_path_factory.mktemp("run")
    monitor = Monitor(task=TASK, every=5, n_prompts=1024)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    for step in (0, 5, 10):
        with torch.no_grad():
            model.read_out.weight.mul_(1 + step / 10)
        monitor(step, model)
        torch.save(model.state_dict(), folder / f"step_{step}.pt")
    files = load_run(
        folder, n_heads=2, task=SETTING, model={**JOINED, "layout": "pairs"}, anyway=True
    )
    return monitor.run(), files


@pytest.mark.slow
def test_it_is_asked_in_the_same_words(runs):
    """Both are of one class; what that class does not define both have, and an analysis over steps takes both."""
    watched, files = runs
    assert watched.steps == files.steps == [0, 5, 10]
    prompts = evaluation_prompts(watched, n_prompts=16)
    for step in watched.steps:
        torch.testing.assert_close(
            watched.at(step).predict(prompts), files.at(step).model.predict(prompts)
        )
    for run in runs:
        assert isinstance(run, Run)
        assert isinstance(run.at(5), type(run))
        assert (run.step, run.at(5).step, list(run.snapshots)) == (10, 5, run.steps)
        assert run.predictor.predict(evaluation_prompts(run, n_prompts=4)).shape == (4, 1)
        assert type(run.model).run_with_cache
        with pytest.raises(ValueError, match="step must be one of 0, 5, 10, got 7"):
            run.at(7)


def test_histories_begin_with_the_same_columns(runs):
    watched, files = (run.history for run in runs)
    shared = ["step", "layer", "head", "loss", "eval_loss", "eval_loss_sem"]
    assert list(watched)[:6] == list(files)[:6] == shared
    np.testing.assert_allclose(watched[shared], files[shared], rtol=1e-5)


def test_analyses_of_snapshots_agree(runs):
    prompts = evaluation_prompts(runs[0], n_prompts=64)
    watched, files = (over_steps(run, "ablate-heads", prompts).to_frame() for run in runs)
    assert list(watched) == list(files)
    np.testing.assert_allclose(
        watched.select_dtypes("number"), files.select_dtypes("number"), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_pages_have_the_same_sections_and_tables(runs, tmp_path: Path):
    asked = ["ablate-heads-over-steps", "training"]
    pages = [
        write_report(run, tmp_path / str(n), n_prompts=64, analyses=asked)
        for n, run in enumerate(runs)
    ]
    texts = [each.page.read_text(encoding="utf-8") for each in pages]
    titles = [re.findall(r"<h2[^>]*>(.*?)</h2>", text) for text in texts]
    assert titles[0] == titles[1]
    assert all("3 logged steps, 0 to 10" in text for text in texts)
    names = [{table.name for table in page.tables} for page in pages]
    assert names[0] == names[1] == {"ablate_heads_over_steps.csv", "history.csv"}


@pytest.mark.slow
def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs" / "how" / "module.md").read_text(encoding="utf-8")
    (example,) = (
        part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "Monitor(" in part
    )
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    assert names["run"].steps == [0, 100, 200, 300]
    losses = names["run"].history.groupby("step")["eval_loss"].first()
    assert losses[300] < losses[0]
    assert (tmp_path / "reports" / "training" / "index.html").is_file()


# What it reports, and where it keeps.


@pytest.mark.slow
def test_it_logs_flat_rows():
    rows: list[dict] = []
    monitor = Monitor(task=TASK, read=last, every=5, n_prompts=64, log=rows.append, labels=True)
    trained(monitor)
    assert [row["icl/step"] for row in rows] == [0, 5, 10]
    history = monitor.run().history
    prompts = evaluation_prompts(monitor.run(), n_prompts=64)
    error = ridge(prompts, penalty=TASK.posterior_penalty) - prompts.y_query
    for row in rows:
        at = history[history["step"] == row["icl/step"]].reset_index()
        assert row["icl/loss"] == at["eval_loss"][0]
        assert row["icl/L1H0/rise"] == at["rise"][2]
        assert row["icl/pattern"] == at["pattern"][0]
        assert row["icl/ridge"] == pytest.approx(error.square().mean().item())
        assert all(isinstance(value, int | float | str) for value in row.values())


@pytest.mark.slow
def test_it_logs_lines_of_json(tmp_path: Path):
    rows: list[dict] = []
    for log in (rows.append, tmp_path / "log.jsonl"):
        trained(Monitor(task=TASK, read=last, every=5, n_prompts=32, log=log))
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.slow
def test_it_logs_to_wandb(tmp_path: Path):
    """Offline, in a process of its own, as wandb starts one and warns."""
    pytest.importorskip("wandb")
    code = """
import sys, wandb
from tests.analysis.test_monitor import *
run = wandb.init(project="x", mode="offline", dir=sys.argv[1])
trained(Monitor(task=TASK, read=last, every=5, n_prompts=32, log=wandb.log))
print(run.summary["icl/step"], "icl/L0H1/rise" in run.summary.keys())
"""
    ran = python("-W", "ignore", "-c", code, tmp_path, cwd=ROOT).done()
    assert "10 True" in ran.out


@pytest.mark.slow
def test_it_keeps_in_a_folder_what_it_would_keep_in_memory(tmp_path: Path):
    kept = Monitor(task=TASK, every=5, n_prompts=32, keep=tmp_path / "mine")
    memory = Monitor(task=TASK, every=5, n_prompts=32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    for step in (0, 5, 10):
        with torch.no_grad():
            model.read_out.weight.mul_(1 + step / 10)
        for monitor in (kept, memory):
            monitor(step, model)
    assert len(kept.snapshots) == 1
    run, other = kept.run(), memory.run()
    prompts = evaluation_prompts(run, n_prompts=16)
    for step in (0, 5, 10):
        assert torch.equal(run.at(step).predict(prompts), other.at(step).predict(prompts))
    files = load_run(tmp_path / "mine", model={**JOINED, "layout": "pairs"}, anyway=True)
    assert files.steps == run.steps == [0, 5, 10]
    with pytest.raises(ValueError, match=r"step_0\.pt: already exists"):
        Monitor(task=TASK, keep=tmp_path / "mine")(0, model)
