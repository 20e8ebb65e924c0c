"""What a monitor returns is, in all that a user sees, what `load_run` makes of the files that the same loop wrote."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import Monitor, TaskConfig, evaluation_prompts, load_run, write_report
from mechinterp.analysis.training.deep_snapshots import deep_snapshots

ROOT = Path(__file__).parents[2]
TASK = {"d_x": 2, "context_length": 6, "noise_var": 0.0, "beta_var": 1.0}
JOINED = {"norm": "after", "activation": "relu", "context_only": True, "positions": "none"}


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
    monitor = Monitor(task=TaskConfig(**TASK), every=5, n_prompts=1024)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    for step in (0, 5, 10):
        with torch.no_grad():
            model.read_out.weight.mul_(1 + step / 10)
        monitor(step, model)
        torch.save(model.state_dict(), folder / f"step_{step}.pt")
    files = load_run(folder, n_heads=2, task=TASK, model={**JOINED, "layout": "pairs"})
    return monitor.run(), files


def test_it_is_asked_in_the_same_words(runs):
    watched, files = runs
    assert watched.steps == files.steps == [0, 5, 10]
    assert (watched.step, watched.at(5).step) == (files.step, files.at(5).step) == (10, 5)
    prompts = evaluation_prompts(watched, n_prompts=16)
    for step in watched.steps:
        torch.testing.assert_close(
            watched.at(step).predict(prompts), files.at(step).model.predict(prompts)
        )
    for run in runs:
        with pytest.raises(ValueError, match="step must be one of 0, 5, 10, got 7"):
            run.at(7)


def test_histories_begin_with_the_same_columns(runs):
    watched, files = (run.history for run in runs)
    shared = ["step", "layer", "head", "loss", "eval_loss", "eval_loss_sem"]
    assert list(watched)[:6] == list(files)[:6] == shared
    np.testing.assert_allclose(watched[shared], files[shared], rtol=1e-5)


def test_analyses_of_snapshots_agree(runs):
    prompts = evaluation_prompts(runs[0], n_prompts=64)
    watched, files = (deep_snapshots(run, prompts).to_frame() for run in runs)
    assert list(watched) == list(files)
    np.testing.assert_allclose(
        watched.select_dtypes("number"), files.select_dtypes("number"), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_pages_have_the_same_sections_and_tables(runs, tmp_path: Path):
    asked = ["head-snapshots", "training"]
    pages = [
        write_report(run, tmp_path / str(n), n_prompts=64, analyses=asked)
        for n, run in enumerate(runs)
    ]
    texts = [each.page.read_text(encoding="utf-8") for each in pages]
    titles = [re.findall(r"<h2[^>]*>(.*?)</h2>", text) for text in texts]
    assert titles[0] == titles[1]
    assert all("3 kept steps, 0 to 10" in text for text in texts)
    names = [{table.name for table in page.tables} for page in pages]
    assert names[0] == names[1] == {"snapshots.csv", "history.csv"}


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
