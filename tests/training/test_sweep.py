"""Sweeps: what a sweep file names, what a run leaves behind, and how it goes on after a stop or a kill."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError, safe_open

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.native import Checkpoint, load, save
from mechinterp.config import (
    ExperimentConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    override,
    preset,
)
from mechinterp.models.functional import NAMES
from mechinterp.training.sweep import load_sweep, train_models
from mechinterp.training.trainer import Pack, Progress

SMALL = ExperimentConfig(
    task=TaskConfig(d_x=2, context_length=4),
    model=ModelConfig(n_heads=2),
    train=TrainConfig(steps=20, batch_size=8, log_every=10, snapshot_every=10, n_eval_prompts=16),
)
MODELS = {
    "two": SMALL,
    "one": override(SMALL, "model.n_heads=1", "seed=3"),
    "longer": override(SMALL, "task.context_length=6"),
}


def write(folder: Path, document: object) -> Path:
    file = folder / "sweep.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and modification time of every file below a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in files}


def assert_same_run(actual: Checkpoint, expected: Checkpoint):
    """Equal bits: weights, snapshots and history."""
    model = "model.safetensors"
    assert (actual.path / model).read_bytes() == (expected.path / model).read_bytes()
    assert actual.step == expected.step
    assert list(actual.snapshots) == list(expected.snapshots)
    for step, weights in expected.snapshots.items():
        for name in NAMES:
            assert torch.equal(getattr(actual.snapshots[step], name), getattr(weights, name))
    pd.testing.assert_frame_equal(actual.history, expected.history, check_exact=True)


# The sweep file.


def test_entries_are_expanded_in_the_order_of_the_file(tmp_path: Path):
    file = write(
        tmp_path,
        [
            {
                "preset": "softmax-h2",
                "set": {"train.steps": 7, "task.noise_var": 0},
                "grid": {"model.n_heads": [2, 1], "seed": [0, 4]},
                "name": "h{model.n_heads}-s{seed}",
            },
            {"config": {"task": {"d_x": 3}, "seed": 9}, "name": "third"},
        ],
    )
    models = load_sweep(file)
    base = override(preset("softmax-h2"), "train.steps=7", "task.noise_var=0")
    assert list(models.items()) == [
        ("h2-s0", base),
        ("h2-s4", override(base, "seed=4")),
        ("h1-s0", override(base, "model.n_heads=1")),
        ("h1-s4", override(base, "model.n_heads=1", "seed=4")),
        ("third", ExperimentConfig(task=TaskConfig(d_x=3), seed=9)),
    ]


def test_a_file_may_hold_one_entry_and_names_itself_after_the_grid(tmp_path: Path):
    file = write(tmp_path, {"preset": "softmax-h1", "grid": {"seed": [0, 1]}})
    assert list(load_sweep(str(file))) == ["softmax-h1-seed0", "softmax-h1-seed1"]


PRESET = {"preset": "softmax-h1"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (PRESET | {"gird": {}}, ["preset, config, set, grid, name", "gird"]),
        (["softmax-h1"], ["an entry must be an object", "softmax-h1"]),
        (PRESET | {"config": {}}, ["either a preset or a config", "both"]),
        ({"name": "x"}, ["either a preset or a config", "neither"]),
        ({"preset": "softmax-h5"}, ["Preset must be one of", "'softmax-h5'"]),
        ({"preset": ["softmax-h1"]}, ["preset must be text", "['softmax-h1']"]),
        (PRESET | {"name": 3}, ["name must be text", "3"]),
        ({"config": {"modle": {}}}, ["Unknown field 'modle'", "task, model, train, seed"]),
        ({"config": 3}, ["must be a JSON object", "3"]),
        (PRESET | {"set": {"task.dx": 3}}, ["Unknown field 'task.dx'", "task.d_x"]),
        (PRESET | {"set": {"task.d_x": "3"}}, ["task.d_x must be an integer", "'3'"]),
        (PRESET | {"set": ["task.d_x=3"]}, ["set must be an object", "['task.d_x=3']"]),
        (PRESET | {"grid": {"seed": 3}}, ["grid must give a list", "{'seed': 3}"]),
        (PRESET | {"grid": [1]}, ["grid must give a list", "[1]"]),
        (PRESET | {"grid": {"seed": [-1]}}, ["seed must be >= 0", "-1"]),
        ([PRESET, PRESET], ["names must differ", "'softmax-h1' twice"]),
        (PRESET | {"grid": {"seed": [0, 1]}, "name": "x"}, ["names must differ", "'x' twice"]),
        (PRESET | {"name": "../x"}, ["a name must consist of", "'../x'"]),
        (PRESET | {"name": "a/b"}, ["a name must consist of", "'a/b'"]),
        (PRESET | {"name": ""}, ["a name must consist of", "''"]),
        (PRESET | {"name": ".hidden"}, ["a name must consist of", "'.hidden'"]),
        (PRESET | {"name": "x\n"}, ["a name must consist of", r"'x\n'"]),
        (PRESET | {"name": "h{heads}"}, ["Unknown field 'heads'", "known:"]),
        ([], ["at least one entry", "none"]),
        (PRESET | {"grid": {"seed": []}}, ["at least one entry", "none"]),
        ("{", ["not a readable JSON file"]),
        ("\n", ["not a readable JSON file"]),
    ],
    ids=str,
)
def test_a_bad_sweep_file_is_refused_on_one_line(tmp_path: Path, document, words: list[str]):
    file = write(tmp_path, document)
    with pytest.raises(ValueError, match=r"sweep\.json: ") as error:
        load_sweep(file)
    message = str(error.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_sweep_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"missing\.json: not a readable JSON file \(does not exist\)"
    ):
        load_sweep(tmp_path / "missing.json")
    with pytest.raises(ValueError, match=r"not a readable JSON file \(.*Is a directory"):
        load_sweep(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"preset": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.json: not a readable JSON file"):
        load_sweep(tmp_path / "latin.json")


# A run.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MODELS, trained without a stop; to be read only."""
    folder = tmp_path_factory.mktemp("finished")
    train_models(MODELS, folder)
    return folder


def test_a_run_leaves_one_checkpoint_per_model_and_nothing_else(tmp_path: Path):
    summary = train_models(MODELS, tmp_path / "run")
    assert summary.checkpoints == tuple(tmp_path / "run" / name for name in MODELS)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(MODELS)
    checkpoints = [load(folder) for folder in summary.checkpoints]
    assert [checkpoint.config for checkpoint in checkpoints] == list(MODELS.values())
    assert [checkpoint.step for checkpoint in checkpoints] == [20, 20, 20]
    assert summary.steps == 40  # two packs of 20 updates
    assert summary.seconds > 0
    finals = [checkpoint.history["eval_loss"].iloc[-1] for checkpoint in checkpoints]
    assert summary.loss == pytest.approx(sum(finals) / 3)


def test_models_of_different_tasks_go_into_different_packs(tmp_path: Path):
    seen = []

    def look(progress: Progress):
        states = [file.name for file in tmp_path.glob("training-*")]
        seen.append((progress.step, progress.n_models, states))

    train_models(MODELS, tmp_path, on_log=look)
    assert seen == [
        (10, 2, ["training-0.safetensors"]),
        (20, 2, ["training-0.safetensors"]),
        (10, 1, ["training-1.safetensors"]),
        (20, 1, ["training-1.safetensors"]),
    ]


@pytest.mark.parametrize(
    "occupant", ["two/config.json", "two/notes.txt", "two", "training-3.safetensors"]
)
def test_an_occupied_folder_is_refused_and_left_alone(tmp_path: Path, occupant: str):
    (tmp_path / occupant).parent.mkdir(exist_ok=True)
    (tmp_path / occupant).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="already exists and is not overwritten") as error:
        train_models(MODELS, tmp_path)
    assert str(tmp_path / Path(occupant).parts[0]) in str(error.value)
    assert contents(tmp_path) == before


def test_resume_skips_finished_models_and_trains_added_ones(tmp_path: Path):
    first = {name: MODELS[name] for name in ("two", "longer")}
    train_models(first, tmp_path)
    before = contents(tmp_path)
    summary = train_models(first, tmp_path, resume=True)
    assert (summary.steps, summary.seconds) == (0, 0)
    assert contents(tmp_path) == before

    seen = []
    summary = train_models(MODELS, tmp_path, resume=True, on_log=seen.append)
    assert {progress.n_models for progress in seen} == {1}
    assert summary.steps == 20
    assert summary.checkpoints == tuple(tmp_path / name for name in MODELS)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parts[0] for name in after} == set(MODELS)
    assert load(tmp_path / "one").config == MODELS["one"]


def test_a_finished_model_is_not_resumed_with_another_config(tmp_path: Path, finished: Path):
    before = contents(finished)
    changed = MODELS | {"one": override(MODELS["one"], "task.noise_var=0.5"), "new": SMALL}
    with pytest.raises(CheckpointError) as error:
        train_models(changed, finished, resume=True)
    assert str(error.value) == (
        f"{finished / 'one'}: cannot be resumed with another config: "
        "task.noise_var is 0.1 there, 0.5 here."
    )
    assert contents(finished) == before


def stop_at_step_10(models: dict[str, ExperimentConfig], folder: Path):
    """A run whose first pack was stopped after 10 updates."""
    pack = Pack({"two": models["two"], "one": models["one"]})
    pack.advance()
    pack.save(folder / "training-0.safetensors")


def test_a_stopped_run_is_not_resumed_with_another_config_or_without_a_model(tmp_path: Path):
    stop_at_step_10(MODELS, tmp_path)
    before = contents(tmp_path)
    changed = MODELS | {"two": override(SMALL, "train.batch_size=9")}
    with pytest.raises(CheckpointError, match=r"train\.batch_size is 8 there, 9 here\."):
        train_models(changed, tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"holds 'one', which is not part of this run\."):
        train_models({"two": SMALL}, tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_stopped(tmp_path: Path, finished: Path):
    stop_at_step_10(MODELS, tmp_path)
    summary = train_models(MODELS, tmp_path, resume=True)
    assert summary.steps == 10 + 20
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MODELS)
    for name in MODELS:
        assert_same_run(load(tmp_path / name), load(finished / name))


def test_a_run_killed_while_it_wrote_its_checkpoints_goes_on(tmp_path: Path, finished: Path):
    pack = Pack({name: MODELS[name] for name in ("two", "one")})
    while not pack.finished:
        pack.advance()
    pack.save(tmp_path / "training-0.safetensors")
    trained = pack.results()["two"]
    parts = {"step": 20, "history": trained.history, "snapshots": trained.snapshots}
    save(tmp_path / "two", SMALL, trained.weights, **parts)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"half of it")
    before = contents(tmp_path / "two")
    summary = train_models(MODELS, tmp_path, resume=True)
    assert summary.steps == 20  # those of "longer"
    assert contents(tmp_path / "two") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MODELS)
    for name in MODELS:
        assert_same_run(load(tmp_path / name), load(finished / name))


def test_a_diverging_model_is_named_and_the_others_are_saved(tmp_path: Path):
    models = {"wild": override(SMALL, "train.learning_rate=1e30"), "tame": SMALL}
    with pytest.raises(CheckpointError) as error:
        train_models(models, tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}: weights must stay finite")
    assert "wild (train.learning_rate 1e+30)" in message
    assert "tame" not in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["tame"]
    assert load(tmp_path / "tame").step == 20

    mended = models | {"wild": override(SMALL, "train.learning_rate=1e-2")}
    assert train_models(mended, tmp_path, resume=True).steps == 20
    assert load(tmp_path / "wild").config == mended["wild"]


# A kill.

DRIVER = """
import sys
from mechinterp import cli
from mechinterp.training import trainer

trainer.SAVE_SECONDS = 0.0
sys.argv = ["mechinterp", *sys.argv[1:]]
cli.main()
"""
LONG = {
    "config": {
        "task": {"d_x": 2, "context_length": 4},
        "train": {"steps": 3000, "batch_size": 8, "log_every": 20, "n_eval_prompts": 16},
    },
    "grid": {"task.noise_var": [0.1, 0.3], "model.n_heads": [1, 2]},
    "name": "n{task.noise_var}-h{model.n_heads}",
}


def saved_step(file: Path) -> int:
    try:
        with safe_open(file, framework="pt") as stored:
            return int(stored.metadata()["step"])
    except (OSError, SafetensorError):
        return 0


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path: Path):
    sweep, driver = write(tmp_path, LONG), tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), "sweep", str(sweep), "--device", "cpu", "--out"]
    # The first kill is in the first pack, the second in the second one.
    for state, options in (("training-0", []), ("training-1", ["--resume"])):
        file = tmp_path / "killed" / f"{state}.safetensors"
        process = subprocess.Popen(
            [*command, str(tmp_path / "killed"), *options], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 120
        while saved_step(file) == 0 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        _, complaints = process.communicate()
        assert process.returncode == -signal.SIGKILL, complaints
        assert 0 < saved_step(file) < 3000
    resumed = [*command, str(tmp_path / "killed"), "--resume"]
    straight = [*command, str(tmp_path / "straight")]
    for full in (resumed, straight):
        subprocess.run(full, check=True, capture_output=True)
    names = list(load_sweep(sweep))
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == sorted(names)
    for name in names:
        assert_same_run(load(tmp_path / "killed" / name), load(tmp_path / "straight" / name))
