"""The commands on linear attention: training, shipped models, and jumps foretold."""

from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.load import convert, load
from mechinterp.config import override
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.presets import preset
from tests.conftest import CHECKPOINTS, Run, assert_close_to_rounding

MERGED = CHECKPOINTS / "linear-merged-s0"
JUMPS = ("predict-jumps", "linear-separate")


# Merged heads as checkpoints.


def test_a_merged_softmax_model_goes_to_transformer_lens_with_keys_that_are_the_tokens(
    tmp_path: Path,
):
    config = override(preset("softmax-h2"), "model.merged_qk=true")
    generator = torch.Generator().manual_seed(0)
    model = ICLTransformer(config.model, d_x=5, d_y=1, n_ctx=42)
    for name in ("W_QK", "W_V", "W_O"):
        torch.nn.init.normal_(getattr(model.blocks[0].attn, name), std=0.3, generator=generator)
    with torch.no_grad():
        model.blocks[0].attn.W_O[..., :5] = 0
    save(tmp_path / "model", config, model.weights, step=0)
    convert(load(tmp_path / "model"), "transformer-lens", tmp_path / "lens")
    there = load(tmp_path / "lens")
    assert not there.config.model.merged_qk
    assert torch.equal(there.weights.W_K[0], torch.eye(6).expand(2, 6, 6))
    assert_close_to_rounding(there.weights.QK, model.weights.QK)


# Commands on shipped models.


@pytest.mark.slow
def test_train_makes_the_shipped_model_again(run: Run, tmp_path: Path):
    ran = run("train", "linear-merged", "--device", "cpu", "--out", tmp_path / "run", "--json")
    assert ran.document["steps"] == 8000
    assert ran.document["loss"] == pytest.approx(0.1359952, abs=1e-6)
    again, shipped = load(tmp_path / "run"), load(MERGED)
    assert again.config == shipped.config
    assert torch.allclose(again.weights.QK, shipped.weights.QK, rtol=0, atol=1e-5)


def test_adam_refuses_what_it_does_not_train(run: Run, tmp_path: Path):
    out = tmp_path / "run"
    adam = ("--set", "train.optimizer=adam", "--out", out)
    run("train", "linear-merged", *adam).assert_refused("train.init_std is not used by", "5.56")
    assert not out.exists()


# Jumps foretold.


@pytest.mark.slow
def test_predict_jumps_as_json_with_a_figure(run: Run, tmp_path: Path):
    page = tmp_path / "jumps.html"
    few = ("--set", "model.n_heads=3", "--set", "train.steps=10")
    document = run(*JUMPS, *few, "--json", "--out", page).document
    assert list(document) == [
        *("schema_version", "id", "steps", "jumps", "levels", "notes", "figure")
    ]
    assert len(document["jumps"]) == 3
    assert document["jumps"][0]["vector"] == [1, 0, 0, 0]
    assert document["notes"][0].endswith("training ends at the level of 3.")
    assert document["figure"] == str(page)
    html = page.read_text(encoding="utf-8")
    assert "plotly.js v" in html
    assert 'src="http' not in html
    assert "learns e0" in html
    words = "already exists; it is not overwritten; choose another --out."
    run(*JUMPS, "--out", page).assert_refused(page, words)
    run(*JUMPS, "--out", tmp_path / "x.png").assert_refused("x.png", "must end in .html")
    assert "3 head(s) of rank 1 learn at most 3" in run(*JUMPS, *few).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["linear-merged"], ["separate heads of rank one", "model.merged_qk must be false"]),
        (["nothing"], ["nothing", "linear-separate", "or a config file is needed"]),
        (
            [*JUMPS[1:], "--set", "task.covariance.eigenvalues=[0.3,0.3,0.3,0.1]"],
            ["Eigenvalues repeat"],
        ),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_predict_jumps_refuses_on_one_line(run: Run, arguments: list[str], words: list[str]):
    run("predict-jumps", *arguments).assert_refused(*words)
