"""The page on the heads of models of many layers, ours and somebody else's: its numbers are those of the analyses."""

import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.checkpoints.checkpoint import Checkpoint, save
from mechinterp.checkpoints.load import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.report.page import PAGE, Report, write_report
from mechinterp.training.train import train_models
from tests.deep_models import WIDE, random_model, wide_checkpoint
from tests.models.test_layered_models import garg
from tests.report.test_page import EVIL, opened, unexplained_columns

pytestmark = pytest.mark.slow
N_PROMPTS = 160
TASK = TaskConfig(d_x=4, context_length=9)
MODEL = ModelConfig(n_layers=3, n_heads=4, context_only=True, d_model=12, d_head=3)
SECTIONS = [
    *("What it computes", "Circuits", "Attention on prompts", "Excess risk", "Head ablation"),
    *("Pruning", "Probes", "Read out by layer", "Edges between heads"),
]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 layers of 4 random heads, in a folder with a name that tries to be a tag."""
    return wide_checkpoint(tmp_path_factory.mktemp("deep") / EVIL).path


@pytest.fixture(scope="module")
def written(deep: Path) -> Report:
    return write_report(load(deep), deep.parent / "page", n_prompts=N_PROMPTS)


def test_the_page_is_whole_and_says_what_it_found(written: Report):
    page = opened(written)
    assert page.open == []
    assert page.headings == SECTIONS
    assert len(page.drawn) == len(page.figures) == 13
    assert all(figure["data"] for figure in page.drawn)
    assert written.page.stat().st_size < 6_000_000
    assert written.verdict.replace("\n", "") in page.text
    assert EVIL not in page.source
    assert html.escape(EVIL) in page.source
    assert "3 layers of 4 heads, softmax attention, width 12, d_x 4" in page.text
    assert unexplained_columns(written.page) == set()


def test_the_cost_of_a_layer_is_that_of_masking_its_heads(deep: Path, written: Report):
    prompts = sample_prompts(TASK, N_PROMPTS, seed=0, dtype=torch.float64)
    masks = [[], [(1, head) for head in range(4)]]
    full, masked = masked_errors(load(deep).model, prompts, masks).mean(0)
    layers = pd.read_csv(written.page.parent / "layers.csv")
    assert layers["layer_rise"][1] == pytest.approx(masked - full, rel=1e-9)


def test_a_head_may_cost_more_than_its_layer(tmp_path: Path):
    # Heads 0 and 1 of the last layer undo each other, and either alone ruins the prediction.
    weights = random_model(**WIDE).weights
    tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O"):
        tensors[name][2, 2:] = 0
        tensors[name][2, 1] = tensors[name][2, 0]
    tensors["attn.W_O"][2, 0] *= 100
    tensors["attn.W_O"][2, 1] *= -100
    config = ExperimentConfig(task=TASK, model=MODEL)
    save(tmp_path / "pair", config, weights.with_tensors(tensors), step=0)
    write_report(load(tmp_path / "pair"), tmp_path / "page", n_prompts=64, analyses=["ablate"])
    layers = pd.read_csv(tmp_path / "page" / "layers.csv")
    heads = pd.read_csv(tmp_path / "page" / "ablation.csv").query("layer == 2")
    assert abs(layers["layer_rise"][2]) < 1e-9 < heads["rise"].max()


def test_training_is_told_where_there_is_a_history(tmp_path: Path):
    model = replace(MODEL, n_layers=2, n_heads=2, score="linear/L")
    train = TrainConfig(steps=40, log_every=10, batch_size=8, n_eval_prompts=16)
    config = ExperimentConfig(task=TASK, model=model, train=train)
    train_models({".": config}, tmp_path / "model")
    checkpoint = load(tmp_path / "model")
    page = opened(write_report(checkpoint, tmp_path / "page", n_prompts=64))
    assert page.headings == [*SECTIONS, "Training", "Ablation of single heads, step by step"]
    history = pd.read_csv(tmp_path / "page" / "history.csv")
    np.testing.assert_allclose(history["qk_norm"], checkpoint.history["qk_norm"], rtol=1e-6)
    assert unexplained_columns(tmp_path / "page" / PAGE) == set()


def layered(file: Path, model: torch.nn.Module, n_heads: int) -> Checkpoint:
    torch.save(model.state_dict(), file)
    return load(file, n_heads=n_heads, anyway=True)


def test_somebody_elses_model_has_the_same_page(tmp_path: Path):
    checkpoint = layered(tmp_path / "garg.pt", garg(), 4)
    page = opened(write_report(checkpoint, tmp_path / "page", n_prompts=64))
    # A causal model has a loss at every position.
    assert set(page.headings) == {*SECTIONS, "Loss over the number of examples"}
    assert "3 layers of 4 heads, softmax attention, width 16, MLPs of 64" in page.text
    assert "assumed: context_length, covariance, beta_var, noise_var" in page.text
    # Without noise and with more pairs than coordinates, least squares is exact.
    assert "times that of ridge" not in page.text
