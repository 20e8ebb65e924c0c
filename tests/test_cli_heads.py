"""The commands ablate, prune and probe on a model of several layers, and what they refuse."""

from pathlib import Path

import pytest
import torch

from mechinterp.analysis.heads import ablate_heads
from mechinterp.analysis.pruning import prune
from mechinterp.checkpoints.deep import load_saved, save_deep
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import WIDE, random_model

TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    model = ModelConfig(n_layers=3, n_heads=4, context_only=True, d_model=12, d_head=3)
    weights = random_model(**WIDE).deep_weights
    save_deep(tmp_path / "deep", ExperimentConfig(task=TASK, model=model), weights, step=5)
    return tmp_path / "deep"


def prompts(n_prompts: int):
    generator = generator_for(0, "eval", 0)
    return sample_prompts(TASK, n_prompts, generator=generator, dtype=torch.float64)


def test_ablate(run: Run, deep: Path):
    ran = run("ablate", deep, "--n-prompts", 40, "--json")
    assert ran.code == 0
    found = ran.document
    expected = ablate_heads(load_saved(deep).model, prompts(40))
    assert found["excess_risk"] == expected.full_risk
    assert [row["rise"] for row in found["heads"][:12]] == expected.rise.ravel().tolist()
    assert [row["method"] for row in found["heads"][::12]] == ["zero", "mean"]
    assert [row["effective_heads"] for row in found["layers"][:3]] == (
        expected.effective_heads.tolist()
    )
    text = run("ablate", deep, "--n-prompts", 40).out
    assert "excess risk " in text
    assert "effective_heads" in text


def test_prune(run: Run, deep: Path, tmp_path: Path):
    out = tmp_path / "pruned"
    ran = run("prune", deep, "--n-prompts", 80, "--out", out, "--json")
    assert ran.code == 0, ran.err
    expected = prune(load_saved(deep).model, prompts(80))
    assert ran.document["ratio"] == expected.ratio
    assert ran.document["heads_per_layer"] == [4, 1, 1]
    assert ran.document["checkpoint"] == str(out)
    assert [len(heads) for heads in load_saved(out).weights.heads_per_layer] == [4, 1, 1]
    run("prune", deep, "--n-prompts", 80, "--out", out).assert_refused(out, "already holds")
    first = run("prune", deep, "--n-prompts", 80, "--rule", "best-first", "--sequential")
    assert "Pruning(1, 4, 4 heads kept" in first.out


def test_probe(run: Run, deep: Path):
    ran = run("probe", deep, "--n-prompts", 60, "--json")
    assert ran.code == 0, ran.err
    assert [row["layer"] for row in ran.document["response"]] == [0, 1, 2, 3]
    assert len(ran.document["structure"]) == 4
    names = ["raw x", "reweighted x", "after layer 0"]
    assert [row["features"] for row in ran.document["areas"]] == names
    assert len(ran.document["descent"]) == 3 * 33
    assert "log_area" in run("probe", deep, "--n-prompts", 60).out


def test_what_is_refused(run: Run, deep: Path, tmp_path: Path):
    run("prune", deep, "--rule", "all").assert_refused("--rule must be one of best-later", "'all'")
    run("prune", CHECKPOINTS / "softmax-h2-s0").assert_refused("prune takes context-only models")
    run("probe", deep, "--n-prompts", 12).assert_refused(deep, "A probe of 12 features needs more")
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    for command in ("ablate", "prune", "probe"):
        ran = run(command, tmp_path / "layer.pt", "--n-heads", 2)
        assert ran.code == 2
        assert "takes attention-only models, got format torch-encoder" in ran.err
