"""Sweeps: what a sweep file names, what a run leaves behind, and how it goes on after a stop or a kill."""

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.checkpoints.io.files import MACHINE, CheckpointError
from mechinterp.checkpoints.io.locks import LOCK_MARK, locked
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.presets import preset
from mechinterp.training import run
from mechinterp.training.one_layer.step import Pack
from mechinterp.training.run import Progress
from mechinterp.training.run_folder import LOCK
from mechinterp.training.sweep_file import load_sweep
from mechinterp.training.train import require_no_divergence, train_models
from tests.checkpoints.killed import killed_while_writing
from tests.conftest import refused
from tests.training.test_trainer import finished as finished_pack

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


def assert_same_folders(actual: Path, expected: Path):
    """The same files of the same bytes; tables of equal numbers, since their containers may differ."""
    names = sorted(str(file.relative_to(expected)) for file in expected.rglob("*"))
    assert sorted(str(file.relative_to(actual)) for file in actual.rglob("*")) == names
    for name in names:
        if name.endswith(".parquet"):
            tables = (pd.read_parquet(folder / name) for folder in (actual, expected))
            pd.testing.assert_frame_equal(*tables, check_exact=True)
        elif (expected / name).is_file():
            assert (actual / name).read_bytes() == (expected / name).read_bytes()


# The sweep file.


def test_entries_are_expanded_in_the_order_of_the_file(tmp_path: Path):
    grid = {
        "preset": "softmax-h2",
        "set": {"train.steps": 7, "task.noise_var": 0},
        "grid": {"model.n_heads": [2, 1], "seed": [0, 4]},
        "name": "h{model.n_heads}-s{seed}",
    }
    third = {"config": {"task": {"d_x": 3}, "seed": 9}, "name": "third"}
    models = load_sweep(write(tmp_path, [grid, third]))
    base = override(preset("softmax-h2"), "train.steps=7", "task.noise_var=0")
    assert list(models.items()) == [
        ("h2-s0", base),
        ("h2-s4", override(base, "seed=4")),
        ("h1-s0", override(base, "model.n_heads=1")),
        ("h1-s4", override(base, "model.n_heads=1", "seed=4")),
        ("third", ExperimentConfig(task=TaskConfig(d_x=3), seed=9)),
    ]


PRESET = {"preset": "softmax-h1"}
BAD_SWEEPS = [
    (PRESET | {"gird": {}}, ["preset, config, set, grid, name", "gird"]),
    (["softmax-h1"], ["object", "softmax-h1"]),
    (PRESET | {"config": {}}, ["preset", "config", "both"]),
    ({"name": "x"}, ["preset", "config", "neither"]),
    ({"preset": "softmax-h5"}, ["Preset", "'softmax-h5'"]),
    ({"preset": ["softmax-h1"]}, ["preset", "['softmax-h1']"]),
    ({"config": {"modle": {}}}, ["'modle'", "task, model, train, seed"]),
    (PRESET | {"set": {"task.dx": 3}}, ["'task.dx'", "task.d_x"]),
    (PRESET | {"set": ["task.d_x=3"]}, ["set", "['task.d_x=3']"]),
    (PRESET | {"grid": {"seed": 3}}, ["grid", "list", "{'seed': 3}"]),
    (PRESET | {"grid": {"seed": [-1]}}, ["seed", ">= 0", "-1"]),
    ([PRESET, PRESET], ["names", "'softmax-h1' twice"]),
    (PRESET | {"grid": {"seed": [0, 1]}, "name": "x"}, ["names", "'x' twice"]),
    *((PRESET | {"name": name}, ["name", repr(name)]) for name in ("../x", "", ".x", "x\n", 3)),
    (PRESET | {"name": "h{heads}"}, ["'heads'", "known:"]),
    (PRESET | {"grid": {"seed": []}}, ["at least one entry", "none"]),
    ("{", ["not a readable JSON file"]),
    # Two hours of configs, refused before the first is built.
    (
        PRESET | {"grid": {"seed": list(range(10_000)), "task.d_x": list(range(10_000))}},
        ["at most 10000 models", "100000000"],
    ),
    ([PRESET] * 10_001, ["at most 10000 models", "10001"]),
]


@pytest.mark.parametrize(("document", "words"), BAD_SWEEPS, ids=str)
def test_a_bad_sweep_file_is_refused_on_one_line(tmp_path: Path, document, words: list[str]):
    file = write(tmp_path, document)
    with refused(file, *words, error=ValueError):
        load_sweep(file)


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


OCCUPANTS = ["two/config.json", "two/notes.txt", "two", "training-3.safetensors"]


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_an_occupied_folder_is_refused_and_left_alone(tmp_path: Path, occupant: str):
    (tmp_path / occupant).parent.mkdir(exist_ok=True)
    (tmp_path / occupant).write_text("mine")
    before = contents(tmp_path)
    with refused(tmp_path / Path(occupant).parts[0], "already exists", error=CheckpointError):
        train_models(MODELS, tmp_path)
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


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_folder_that_another_process_uses_is_refused(tmp_path: Path, resume: bool):
    (tmp_path / LOCK).write_text(LOCK_MARK)  # as a killed process leaves it, which keeps nobody out
    with locked(tmp_path / LOCK), refused(tmp_path, "another process", error=CheckpointError):
        train_models(MODELS, tmp_path, resume=resume)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_model_is_not_resumed_with_another_config(tmp_path: Path, finished: Path):
    before = contents(finished)
    changed = MODELS | {"one": override(MODELS["one"], "task.noise_var=0.5"), "new": SMALL}
    words = ("task.noise_var", "0.1 there", "0.5 here")
    with refused(finished / "one", *words, error=CheckpointError):
        train_models(changed, finished, resume=True)
    assert contents(finished) == before


def test_a_stopped_run_is_not_resumed_with_another_config_or_without_a_model(tmp_path: Path):
    pack = Pack({name: MODELS[name] for name in ("two", "one")})
    pack.advance()
    pack.save(tmp_path / "training-0.safetensors")
    before = contents(tmp_path)
    changed = MODELS | {"two": override(SMALL, "train.batch_size=9")}
    with refused("train.batch_size", "8 there", "9 here", error=CheckpointError):
        train_models(changed, tmp_path, resume=True)
    with refused("'one'", "not part of this run", error=CheckpointError):
        train_models({"two": SMALL}, tmp_path, resume=True)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_its_checkpoints_goes_on(tmp_path: Path, finished: Path):
    """What killed processes left half written is deleted."""
    pack = finished_pack(Pack({name: MODELS[name] for name in ("two", "one")}))
    pack.save(tmp_path / "training-0.safetensors")
    trained = pack.results()["two"]
    parts = {"step": 20, "history": trained.history, "snapshots": trained.snapshots}
    save(tmp_path / "two", SMALL, trained.weights, **parts)
    killed_while_writing(tmp_path / "one")
    ended = subprocess.Popen(["true"])
    ended.wait()
    mark = f"{MACHINE}-{ended.pid}-01234567"
    (tmp_path / f".training-0.safetensors.{mark}.tmp").write_bytes(b"half")
    (tmp_path / f"..training-0.lock.{mark}.tmp").write_bytes(b"half")
    before = contents(tmp_path / "two")
    assert train_models(MODELS, tmp_path, resume=True).steps == 20  # those of "longer"
    assert contents(tmp_path / "two") == before
    assert_same_folders(tmp_path, finished)


@pytest.mark.slow
def test_a_model_that_diverges_is_noticed_named_and_left_out(tmp_path: Path):
    models = {"wild": override(SMALL, "train.learning_rate=1e30"), "tame": SMALL}
    seen = []
    summary = train_models(models, tmp_path, on_log=seen.append)
    assert [(p.step, p.steps, p.diverged) for p in seen] == [
        (10, 20, ("wild",)),  # and no step more
        (10, 20, ()),
        (20, 20, ()),
    ]
    assert summary.diverged == {"wild": 10}
    assert summary.checkpoints == (tmp_path / "tame",)
    assert summary.steps == 10 + 20
    assert [path.name for path in tmp_path.iterdir()] == ["tame"]
    lost = ("wild", "train.learning_rate 1e+30", "step 10")
    with refused(tmp_path, *lost, error=CheckpointError):
        require_no_divergence(models, tmp_path, summary)

    mended = models | {"wild": override(SMALL, "train.learning_rate=1e-2")}
    summary = train_models(mended, tmp_path, resume=True)
    assert (summary.steps, summary.diverged) == (20, {})
    require_no_divergence(mended, tmp_path, summary)
    assert load(tmp_path / "wild").config == mended["wild"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full: the operating system refuses to write more than so many bytes into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_state_and_one_clear_line(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    file = tmp_path / "training-0.safetensors"
    full = ExitStack()

    def fill_disk(progress: Progress):
        if progress.step == 20:
            full.enter_context(files_of_at_most(100))

    with full, refused(file, "step 20", "the state saved before", error=CheckpointError):
        train_models(MODELS, tmp_path, on_log=fill_disk)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert Pack.restore(file).step == 10

    assert train_models(MODELS, tmp_path, resume=True).steps == 10 + 20
    assert_same_folders(tmp_path, finished)


def test_a_full_disk_at_the_end_costs_no_training(tmp_path: Path, finished: Path):
    history = finished / "one" / "history.parquet"

    def fill_disk(progress: Progress):
        if progress.step == 20:
            full.enter_context(files_of_at_most(history.stat().st_size - 1))

    models = {"one": MODELS["one"]}  # its state is smaller than its history
    with ExitStack() as full, refused(tmp_path / "one", error=CheckpointError):
        train_models(models, tmp_path, on_log=fill_disk)
    assert Pack.restore(tmp_path / "training-0.safetensors").finished
    assert train_models(models, tmp_path, resume=True).steps == 0
    assert_same_folders(tmp_path / "one", finished / "one")
