"""The commands ablate, prune and probe on models of several layers, ours and others', and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.multi_layer.classify import classify_layers
from mechinterp.analysis.number_format import with_error
from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.load import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from tests.checkpoints.files import read
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import WIDE, random_model
from tests.models.test_layered_models import encoder, garg

TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    model = ModelConfig(n_layers=3, n_heads=4, context_only=True, d_model=12, d_head=3)
    weights = random_model(**WIDE).weights
    save(tmp_path / "deep", ExperimentConfig(task=TASK, model=model), weights, step=5)
    return tmp_path / "deep"


def prompts(n_prompts: int, *, seed: int = 0):
    generator = generator_for(seed, "eval", 0)
    return sample_prompts(TASK, n_prompts, generator=generator, dtype=torch.float64)


@pytest.mark.slow
def test_ablate(run: Run, deep: Path):
    found = run("ablate", deep, "--n-prompts", 40, "--json").done().document
    expected = ablate_heads(load(deep).model, prompts(40))
    assert found["excess_risk"] == expected.full_risk
    assert [row["rise"] for row in found["heads"][:12]] == expected.rise.ravel().tolist()
    assert [row["method"] for row in found["heads"][::12]] == ["zero", "mean", "resample"]
    assert found["null_risk"] == expected.null_risk
    assert found["breaking"] == expected.breaking
    effective = [row["effective_heads"] for row in found["layers"][:3]]
    assert effective == expected.effective_heads.tolist()
    text = run("ablate", deep, "--n-prompts", 40).out
    assert "excess risk " in text
    assert "Layers (zero ablation)" in text


@pytest.mark.slow
def test_prune(run: Run, deep: Path, tmp_path: Path):
    out = tmp_path / "pruned"
    document = run("prune", deep, "--n-prompts", 80, "--out", out, "--json").done().document
    expected = prune(load(deep).model, prompts(80))
    assert (document["ratio"], document["ratio_sem"]) == (expected.ratio, expected.ratio_sem)
    assert [row["chosen"] for row in document["heads"]] == expected.chosen.ravel().tolist()
    assert document["carried_by_few"] is False
    assert (document["heads_per_layer"], document["checkpoint"]) == ([4, 1, 1], str(out))
    assert [len(heads) for heads in load(out).weights.heads_per_layer] == [4, 1, 1]
    text = " ".join(run("prune", deep, "--n-prompts", 80).out.split())
    for ratio, sem in (
        (expected.ratio, expected.ratio_sem),
        (expected.refit_ratio, expected.refit_ratio_sem),
    ):
        assert with_error(ratio, sem) in text


@pytest.mark.slow
def test_prune_trains_further(run: Run, deep: Path, gpt2: Path, tmp_path: Path):
    out, options = tmp_path / "pruned", ("--n-prompts", 80, "--fine-tune", 8)
    ran = run("prune", deep, *options, "--out", out, "--json").done()
    rows = ran.document["fine_tuning"]
    steps = [(row["model"], row["step"]) for row in rows[::4]]
    assert steps == [("pruned", 0), ("pruned", 8), ("full", 6)]
    assert all(row["ratio"] > 0 for row in rows)
    assert load(out).step == load(deep).step + 8
    assert load(out).origin["fine_tuned_steps"] == 8
    assert "origin     pruned from deep, kept heads [[" in run("info", out).out
    run("train", out / "config.json").assert_refused("it was pruned from another")
    words = "fine_tune_steps needs a model that this package trained"
    run("prune", gpt2, *OF_GPT2, *options).assert_refused(words, lines=2)


def assert_probed(document: dict, n_layers: int = 3):
    """A row after every number of layers."""
    layers = [row["layer"] for row in document["response"]]
    assert layers == list(range(n_layers + 1))
    targets = [row["target"] for row in document["structure"]]
    assert targets == [name for name in ("reweighted x", "preconditioned x") for _ in layers]


@pytest.mark.slow
def test_probe(run: Run, deep: Path):
    document = run("probe", deep, "--n-prompts", 60, "--json").done().document
    assert_probed(document)
    asked = ("analyse", "p-probe", deep, "--n-prompts", 60)
    document = run(*asked, "--json").done().document
    assert [row["features"] for row in document["areas"]] == [
        "raw x",
        "reweighted x",
        "model",
    ]
    assert len(document["rows"]) == 3 * 33
    assert "log area" in run(*asked).out


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.save(garg().state_dict(), tmp_path / "gpt2.pt")
    return tmp_path / "gpt2.pt"


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """Two encoder layers with two responses, which no read-out tells."""
    torch.save(encoder(4).state_dict(), tmp_path / "stack.pt")
    return tmp_path / "stack.pt"


OF_GPT2 = ("--n-heads", 4, "--anyway")
OF_STACK = ("--n-heads", 2, "--d-y", 2, "--context-only", "--anyway")


@pytest.mark.slow
def test_ablate_somebody_elses_layers(run: Run, gpt2: Path):
    found = run("ablate", gpt2, *OF_GPT2, "--n-prompts", 40, "--json").done().document
    checkpoint = read(gpt2, n_heads=4)
    assert (found["format"], found["n_layers"], found["n_heads"]) == ("gpt2", 3, 4)
    # What classify says of the same prompts, with masks of its own.
    expected = classify_layers(checkpoint, n_prompts=40)
    assert found["excess_risk"] == pytest.approx(expected.excess_risk, rel=1e-5)
    rises = [row["rise"] for row in found["heads"] if row["method"] == "zero"]
    assert rises == pytest.approx(expected.increase.ravel().tolist(), rel=1e-3, abs=1e-5)
    text = run("ablate", gpt2, *OF_GPT2, "--n-prompts", 40, "--quiet")
    assert "Layers (zero ablation)" in text.out
    assert text.err.count("\n") == 1  # what is assumed, and no bar


@pytest.mark.slow
def test_prune_somebody_elses_layers(run: Run, gpt2: Path, tmp_path: Path):
    out, options = tmp_path / "pruned", (*OF_GPT2, "--n-prompts", 80)
    ran = run("prune", gpt2, *options, "--out", out, "--json").done()
    assert ran.document["heads_per_layer"] == [4, 1, 1]
    gone = [(row["layer"], row["head"]) for row in ran.document["heads"] if not row["kept"]]
    before, after = read(gpt2, n_heads=4), read(out)
    assert after.task == before.task
    assert after.assumed == json.loads(json.dumps(dict(before.assumed)))
    assert (after.format, after.config.model) == ("native", before.config.model)
    assert after.origin["pruned_from"] == "gpt2.pt"
    drawn = sample_prompts(before.task, 16, generator=generator_for(1, "eval", 0))
    full, expected = before.predictor.run(drawn, [[], gone])
    torch.testing.assert_close(after.model.predict(drawn), expected)
    assert (expected - full).abs().max() > 1e-3


@pytest.mark.slow
def test_prune_an_encoder(run: Run, stack: Path, tmp_path: Path):
    out = tmp_path / "pruned"
    ran = run(
        "prune", stack, *OF_STACK, "--n-prompts", 40, "--out", out, "--rule", "best-first"
    ).done()
    assert "heads kept in layers 0 to 1: 1, 2 of 2" in ran.out
    model, task = read(out).config.model, read(out).task
    assert (model.n_heads, model.norm, model.attend_to_self) == (2, "after", False)
    assert (task.d_x, task.d_y) == (2, 2)


@pytest.mark.slow
def test_probe_somebody_elses_layers(run: Run, gpt2: Path, stack: Path):
    document = run("probe", gpt2, *OF_GPT2, "--n-prompts", 60, "--json").done().document
    assert_probed(document)
    assert {row["pos"] for row in document["response"]} == {6}
    document = run("probe", stack, *OF_STACK, "--n-prompts", 60, "--json").done().document
    assert_probed(document, n_layers=2)


@pytest.mark.slow
def test_what_is_refused(run: Run, deep: Path, gpt2: Path, tmp_path: Path):
    run("prune", deep, "--rule", "all").assert_refused("--rule", "'best-later'", "'all'")
    words = "prune needs a model of several layers, got one; use ablate to mask its heads."
    run("prune", CHECKPOINTS / "softmax-h2-s0").assert_refused(words)
    run("probe", deep, "--n-prompts", 12).assert_refused(deep, "n_prompts must be >= 24")
    torch.save(torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict(), tmp_path / "layer.pt")
    ran = run("prune", tmp_path / "layer.pt", "--n-heads", 2, "--anyway")
    ran.assert_refused(f"layer.pt: {words}\n", lines=2)
    length = (
        "--context-length",
        10,
        "context_length must be <= 9, the most that 20 positions allow",
    )
    few = ("--n-prompts", 16, "prompts must be >= 32")
    asked = (("ablate", length), ("prune", length), ("probe", few), ("prune", few))
    for command, (option, value, message) in asked:
        ran = run(command, gpt2, *OF_GPT2, option, value)
        ran.assert_refused(f"mechinterp: {gpt2}: ", message, lines=2)
    run("probe", gpt2).assert_refused("n_heads is not stated in the file")
