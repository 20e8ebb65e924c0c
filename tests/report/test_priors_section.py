"""The section of a page on a model whose task has a pool, and its command."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.report.contents import default_names
from mechinterp.report.page import write_report
from mechinterp.training.one_layer.step import initial_weights

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=5, n_tasks=4), model=ModelConfig(n_heads=2)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = initial_weights(CONFIG)
    save(tmp_path / "pool", CONFIG, weights, step=0, snapshots={0: weights})
    return tmp_path / "pool"


@pytest.mark.slow
def test_a_page_has_the_section_where_the_task_has_a_pool(folder: Path, tmp_path: Path):
    checkpoint = load(folder)
    assert "priors" in default_names(checkpoint)
    plain = replace(checkpoint, config=replace(CONFIG, task=replace(CONFIG.task, n_tasks=None)))
    assert "priors" not in default_names(plain)
    names = ["priors", "priors-over-steps"]
    report = write_report(checkpoint, tmp_path / "page", n_prompts=64, analyses=names)
    text = report.page.read_text(encoding="utf-8")
    assert all(f"<h2>{title}</h2>" in text for title in ("Priors", "Priors, step by step"))
    frame = pd.read_csv(tmp_path / "page" / "priors.csv")
    expected = compare_priors(checkpoint, n_prompts=64).to_frame()
    assert frame.relative.to_numpy() == pytest.approx(expected.relative.to_numpy())
