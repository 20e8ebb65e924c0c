"""The commands ablate, prune and probe on models of several layers, ours and others', and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import generator_for, sample_prompts
from tests.checkpoints.files import read
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import wide_checkpoint
from tests.models.test_layered_models import garg


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    return wide_checkpoint(tmp_path / "deep").path


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


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.save(garg().state_dict(), tmp_path / "gpt2.pt")
    return tmp_path / "gpt2.pt"


OF_GPT2 = ("--n-heads", 4, "--anyway")


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
def test_what_is_refused(run: Run, deep: Path, gpt2: Path):
    run("prune", deep, "--rule", "all").assert_refused("--rule", "'best-later'", "'all'")
    run("prune", CHECKPOINTS / "softmax-h2-s0").assert_refused("prune", "several layers")
    run("probe", deep, "--n-prompts", 12).assert_refused(deep, "n_prompts must be >= 24", "got 12")
    run("probe", gpt2).assert_refused("n_heads", "--n-heads")
    long, few = ("--context-length", 10, "<= 9"), ("--n-prompts", 16, ">= 32")
    for command, (option, value, rule) in (("ablate", long), ("prune", long), ("probe", few)):
        ran = run(command, gpt2, *OF_GPT2, option, value)
        ran.assert_refused(gpt2, rule, lines=2)
