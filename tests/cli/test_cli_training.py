"""The commands that train, one model or many: where they train, what they leave behind, and jumps that they predict."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io.files import read_yaml
from mechinterp.checkpoints.native.document import named_config
from mechinterp.config import override
from mechinterp.presets import preset
from tests.conftest import CHECKPOINTS, Run, python, refused

CONFIG = {"task": {"d_x": 2}, "train": {"steps": 30, "batch_size": 8, "n_eval_prompts": 64}}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    file = tmp_path / "sweep.json"
    rates = {"train.learning_rate": [1e-3, 1e30]}
    entry = {"config": CONFIG, "grid": rates, "name": "lr{train.learning_rate}"}
    file.write_text(json.dumps(entry))
    return file


@pytest.mark.slow
def test_a_sweep_leaves_a_table_that_says_what_diverged(run, sweep: Path, tmp_path: Path):
    out = tmp_path / "run"
    ran = run("sweep", sweep, "--out", out, "--device", "cpu", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "lr1e+30 has diverged: its loss is not finite at step 30" in ran.err
    assert "those of lr1e+30 (train.learning_rate 1e+30, noticed at step 30) did not" in ran.err
    table = pd.read_parquet(out / "results.parquet")
    assert table["name"].tolist() == ["lr0.001", "lr1e+30"]
    assert table["train.learning_rate"].tolist() == [1e-3, 1e30]
    assert table["diverged"].tolist() == [False, True]
    checkpoint = load(out / "lr0.001")
    last = checkpoint.history.iloc[-1]
    assert table["loss"][0] == pytest.approx(last["loss"])
    assert table["eval_loss"][0] == pytest.approx(last["eval_loss"])
    assert table["mu"][0].tolist() == pytest.approx(checkpoint.weights.mu[:, 0].tolist())
    assert sorted(path.name for path in out.iterdir()) == ["lr0.001", "results.parquet"]


def test_a_table_that_is_there_is_not_overwritten(run, sweep: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    table = tmp_path / "run" / "results.parquet"
    table.write_text("mine")
    run("sweep", sweep, "--out", tmp_path / "run").assert_refused(table, "already exists")
    assert table.read_text() == "mine"
    again = ("sweep", sweep, "--out", tmp_path / "run", "--resume")
    run(*again).assert_refused(table, "must be a table written by a sweep of this version")
    pd.DataFrame({"mine": [1]}).to_parquet(table)
    before = table.read_bytes()
    run(*again).assert_refused(table, "it is not overwritten")
    assert table.read_bytes() == before
    assert list((tmp_path / "run").iterdir()) == [table]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "slurm"], ["--engine", "'local', 'ray'", "'slurm'"]),
        (["--address", "auto"], ["--address is used by --engine ray only", "'auto'"]),
        (["--engine", "ray", "--device", "tpu"], ["--device", "'tpu'"]),
        (["--memory", "2"], ["--memory must be a number of MB or GB", "'2'"]),
        (["--memory", "1MB"], ["training-0.safetensors: may need ", "--memory allows 0.00 GB"]),
    ],
    ids=["engine", "address", "device", "unit", "memory"],
)
def test_bad_options_are_refused(run, sweep: Path, tmp_path: Path, options, words):
    run("sweep", sweep, "--out", tmp_path / "run", *options).assert_refused(*words)
    assert list(tmp_path.glob("run/*")) == []


# A config in YAML, and rows for a log.

YAML = """
preset: softmax-h2
seed: 3
task: {d_x: 2, context_length: 4}
model:
  score: linear
train:
  steps: 20
  batch_size: 8
  learning_rate: 1e-3
  log_every: 10
  snapshot_every: null
  n_eval_prompts: 16
"""


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(YAML)
    return tmp_path / "mine.yaml"


def test_a_yaml_file_says_what_differs_from_its_preset(yaml_file: Path):
    given = ("seed=3", "task.d_x=2", "task.context_length=4", "model.score=linear")
    given += ("train.steps=20", "train.batch_size=8", "train.learning_rate=0.001")
    given += ("train.log_every=10", "train.snapshot_every=null", "train.n_eval_prompts=16")
    assert named_config(str(yaml_file)) == override(preset("softmax-h2"), *given)
    yaml_file.write_text("train: {step: 1}")
    with pytest.raises(ValueError, match=r"mine\.yaml: .*train\.step"):
        named_config(str(yaml_file))
    yaml_file.write_text("- 1")
    with pytest.raises(ValueError, match=r"mine\.yaml: must hold fields"):
        named_config(str(yaml_file))


NESTED = "a0: &a0 [1, 1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(20))
"""A list of 2^21 numbers, by 21 aliases."""


def test_aliases_of_a_yaml_file_count_each_time(yaml_file: Path):
    yaml_file.write_text(NESTED)
    with refused(yaml_file, "more than 65536 characters"):
        named_config(str(yaml_file))
    text = "x" * 30_000
    yaml_file.write_text(f"a: &a {text}\nb: [{', '.join(['*a'] * 5000)}]")
    with refused(yaml_file, "more than 65536 characters"):
        read_yaml(yaml_file)
    # As large as a file may be, without an alias: every entry takes two characters.
    yaml_file.write_text(f"{{{','.join(['a'] * (2**15 - 2))}}}")
    assert read_yaml(yaml_file) == {"a": ""}
    yaml_file.write_text("eigenvalues: &e [1, 2]\nothers: [*e, *e]")
    assert read_yaml(yaml_file)["others"] == [["1", "2"], ["1", "2"]]


RECURRENT_YAML = """
preset: gated-delta-h1
task:
  d_x: 2
  context_length: 4
  {law}
train: {{steps: 4, batch_size: 8, log_every: 2, n_eval_prompts: 16}}
"""


@pytest.mark.parametrize(
    ("yaml", "setting", "value"),
    [
        ("drift: 0.9", "drift", 0.9),
        ("noise_var: [[0.01, 0.5], [1, 0.5]]", "noise_var", ((0.01, 0.5), (1.0, 0.5))),
    ],
)
def test_laws_of_drift_and_of_noise_levels_are_stated_in_yaml_json_and_by_set(
    run, yaml: str, setting: str, value: object, tmp_path: Path
):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text(RECURRENT_YAML.format(law=yaml))
    run("train", file, "--out", out, "-q").done()
    assert getattr(load(out).task, setting) == value
    stored = json.loads((out / "config.json").read_text())["experiment"]["task"][setting]
    assert stored == json.loads(json.dumps(value))  # tuples are lists in JSON
    text = f"task.{setting}={json.dumps(value)}"
    few = ("task.d_x=2", "task.context_length=4", "train.steps=4", "train.batch_size=8")
    few += ("train.log_every=2", "train.n_eval_prompts=16")
    asked = [word for each in (text, *few) for word in ("--set", each)]
    run("train", "gated-delta-h1", "--out", tmp_path / "other", "-q", *asked).done()
    other, own = load(tmp_path / "other"), load(out)
    assert other.task == own.task
    assert torch.equal(other.weights.W_Q, own.weights.W_Q)
    document = json.loads(run("error-curve", out, "--n-prompts", "64", "--json").out)
    assert document


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("task.drift=1.5", ("drift", "(0, 1]", 1.5)),
        ("task.noise_var=[[0.1, 0.5], [1, 0.2]]", ("noise_var", "sum to 1")),
        ("task.noise_var=[[0.1, 1.0], [1]]", ("noise_var",)),
    ],
)
def test_a_wrong_law_of_drift_or_noise_is_one_line(run, text: str, words: tuple, tmp_path: Path):
    run("train", "gla-h1", "--out", tmp_path / "out", "--set", text).assert_refused(*words)


def test_training_from_yaml_logs_lines_of_json(run, yaml_file: Path, tmp_path: Path):
    log = tmp_path / "log.jsonl"
    run("train", yaml_file, "--out", tmp_path / "out", "--log", log, "-q").done()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["icl/step"] for row in rows] == [10, 20]
    assert rows[0].keys() == {"icl/step", "icl/training_loss", "icl/steps_per_second"}
    ran = run("train", yaml_file, "--out", tmp_path / "no", "--log", "here.txt", "-q")
    assert ran.code == 2
    assert "--log must be wandb or" in ran.err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_logs_to_wandb(yaml_file: Path, tmp_path: Path):
    pytest.importorskip("wandb")
    command = ("train", yaml_file, "--out", tmp_path / "out", "--log", "wandb", "-q")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    python("-W", "ignore", "-m", "mechinterp", *command, env=environment, cwd=ROOT).done()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


# Linear attention, and its jumps, which are predicted.

MERGED, JUMPS = CHECKPOINTS / "linear-merged-s0", ("predict-jumps", "linear-separate")


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
