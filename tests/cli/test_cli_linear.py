"""The commands on linear attention: training, shipped models, and jumps foretold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import convert, load
from mechinterp.config import override
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.presets import preset
from mechinterp.report.page import PAGE
from tests.checkpoints.files import read
from tests.conformance.check import check_conformance
from tests.conftest import CHECKPOINTS, Run, assert_close_to_rounding, assert_same, sampled

MERGED = CHECKPOINTS / "linear-merged-s0"
SHIPPED = sorted(file.parent for file in CHECKPOINTS.glob("linear-[mrs]*/config.json"))
JUMPS = ("predict-jumps", "linear-separate")


# Merged heads as checkpoints.


def test_a_merged_checkpoint_holds_the_matrix_and_comes_back(tmp_path: Path):
    before = load(MERGED)
    shapes = {name: tuple(t.shape) for name, t in load_file(MERGED / "model.safetensors").items()}
    assert shapes == {f"blocks.0.attn.{name}": (8, 5, 5) for name in ("W_QK", "W_V", "W_O")}
    for target, out in (("native", tmp_path / "native"), ("npz", tmp_path / "plain.npz")):
        convert(before, target, out)
        back = load(out)
        assert_same(back.weights, before.weights)
        assert back.config == before.config
    model = tmp_path / "native" / "model.safetensors"
    assert model.read_bytes() == (MERGED / "model.safetensors").read_bytes()
    with np.load(tmp_path / "plain.npz") as arrays:
        assert sorted(arrays) == ["W_O", "W_QK", "W_V", "config"]


@pytest.mark.slow
@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_linear_models_pass_all_checks(folder: Path):
    assert check_conformance(load(folder).model).failures == {}


def test_the_state_dict_of_the_hooked_model_is_that_of_the_file():
    checkpoint = load(MERGED)
    state = checkpoint.model.state_dict()
    assert {n: torch.equal(t, state[n]) for n, t in load_file(MERGED / "model.safetensors").items()}
    assert state.keys() == load_file(MERGED / "model.safetensors").keys()


def test_merged_and_separate_are_not_taken_for_each_other(tmp_path: Path):
    checkpoint = load(MERGED)
    circuits = checkpoint.weights.circuits
    separate = replace(circuits, merged_qk=False)
    with pytest.raises(CheckpointError, match="merged_qk must be the config's True, got False"):
        save(tmp_path / "new", checkpoint.config, separate, step=0)
    spoiled: AttentionWeights = replace(circuits, W_K=2 * circuits.W_K)
    with pytest.raises(ValueError, match="W_K of merged heads must be the identity"):
        save(tmp_path / "new", checkpoint.config, spoiled, step=0)
    assert not (tmp_path / "new").exists()


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
    assert torch.equal(there.weights.circuits.W_K, torch.eye(6).expand(2, 6, 6))
    assert_close_to_rounding(there.weights.circuits.QK, model.weights.circuits.QK)


def test_the_linear_papers_merged_files_are_merged(tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    state = {f"{n}.weight": torch.randn(12, 4, generator=generator) / 9 for n in ("kq", "value")}
    torch.save(state, tmp_path / "m.pt")
    found = read(tmp_path / "m.pt")
    assert found.weights.circuits.merged_qk
    assert found.config.model.merged_qk
    assert "model.merged_qk" not in found.assumed
    convert(found, "native", tmp_path / "native")
    assert_same(read(tmp_path / "native").weights, found.weights)


# Commands on shipped models.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(["linear-merged-s0", "linear-separate-s2"], keep=lambda name: "merged" in name),
)
def test_commands_take_linear_models(run: Run, name: str, tmp_path: Path):
    path = CHECKPOINTS / name
    count = {"linear-merged-s0": 4, "linear-separate-s2": 3}[name]
    (document,) = run("classify", path, "--json").document
    assert (document["pattern"], document["evidence"]["n_components"]) == ("linear_gd", count)
    table = tmp_path / "table.csv"
    said = " ".join(run("classify", path, "--out", table).out.split())
    assert f"it uses {count} of {document['d_x']} principal directions of x" in said
    assert ",n_components," in table.read_text().splitlines()[0]
    assert len(run("ablate", path, "--n-prompts", 256, "--json").document["heads"]) == 3 * (
        8 if count == 4 else 5
    )
    weights = run("info", path, "--json").document["weights"]
    assert ("blocks.0.attn.W_QK" in weights) == (count == 4)
    run("info", path).done()
    run("report", path, "--out", tmp_path / "page", "--n-prompts", 128).done()
    page = (tmp_path / "page" / PAGE).read_text(encoding="utf-8")
    for words in ("Exact gradient flow on the population", "principal components used"):
        assert words in page
    assert "fresh prompts a step" not in page


@pytest.mark.slow
def test_train_makes_the_shipped_model_again(run: Run, tmp_path: Path):
    ran = run("train", "linear-merged", "--device", "cpu", "--out", tmp_path / "run", "--json")
    assert ran.document["steps"] == 8000
    assert ran.document["loss"] == pytest.approx(0.1359952, abs=1e-6)
    again, shipped = load(tmp_path / "run"), load(MERGED)
    assert again.config == shipped.config
    assert torch.allclose(again.weights.circuits.QK, shipped.weights.circuits.QK, rtol=0, atol=1e-5)


def test_adam_refuses_what_it_does_not_train(run: Run, tmp_path: Path):
    out = tmp_path / "run"
    adam = ("--set", "train.optimizer=adam", "--out", out)
    run("train", "linear-merged", *adam).assert_refused("train.init_std is not used by", "5.56")
    assert not out.exists()


# Jumps foretold.


def test_predict_jumps_prints_a_table(run: Run):
    ran = run(*JUMPS).done(silent=True)
    _, header, *rows, levels = ran.out.splitlines()
    assert header.split()[:6] == ["jump", "step", "time", "direction", "eigenvalue", "head"]
    assert [row.split()[3] for row in rows] == ["0", "1", "2", "3"]
    assert levels == "loss levels (y²): 1.0000, 0.6406, 0.3774, 0.2098, 0.1360"


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
    assert "note: 3 head(s) of rank 1 learn at most 3" in run(*JUMPS, *few).out


def test_predict_jumps_takes_the_config_of_a_checkpoint(run: Run):
    file = CHECKPOINTS / "linear-separate-s1" / "config.json"
    of_file = run("predict-jumps", file, "--json").document["jumps"]
    of_preset = run(*JUMPS, "--set", "seed=1", "--json").document["jumps"]
    assert [row["step"] for row in of_file] == [row["step"] for row in of_preset]


EIGENVALUES = "task.covariance.eigenvalues"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["softmax-h2"], ['model.score must be "linear/L"', "softmax"]),
        (["linear-merged"], ["separate heads of rank one", "model.merged_qk must be false"]),
        (["linear-rank-2"], ["model.d_head must be 1, got 2"]),
        (["nothing"], ["nothing", "linear-separate", "or a config file is needed"]),
        ([*JUMPS[1:], "--set", f"{EIGENVALUES}=[0.3,0.3,0.3,0.1]"], ["Eigenvalues repeat"]),
        ([*JUMPS[1:], "--set", f"{EIGENVALUES}=[0.3,0.2,0.1,-0.1]"], ["must be positive", "-0.1"]),
        ([*JUMPS[1:], "--set", "task.context_length=0"], ["task.context_length", ">= 1", "got 0"]),
        ([*JUMPS[1:], "--set", "train.init_std=0"], ["train.init_std must be > 0, got 0.0"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_predict_jumps_refuses_on_one_line(run: Run, arguments: list[str], words: list[str]):
    run("predict-jumps", *arguments).assert_refused(*words)
