"""Sweeps: what a sweep file names, what a run leaves behind, and how it goes on after a stop or a kill."""

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.io.atomic import MACHINE
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.locks import locked
from mechinterp.checkpoints.load import load as load_any
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.presets import preset
from mechinterp.training import run
from mechinterp.training.one_layer.pack import Pack
from mechinterp.training.run import Progress
from mechinterp.training.sweep_file import load_sweep
from mechinterp.training.train import LOCK, RESULTS, require_finite, train_models
from tests.checkpoints.killed import killed_while_writing
from tests.conftest import assert_same
from tests.training.test_trainer import finished as finished_pack
from tests.training.test_trainer import refused

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
        assert_same(actual.snapshots[step], weights)
    pd.testing.assert_frame_equal(actual.history, expected.history, check_exact=True)


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
    with pytest.raises(ValueError, match=rf"^{file}: [^\n]+$") as error:
        load_sweep(file)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_sweep_file_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "latin.json").write_bytes(b'{"preset": "\xe9"}')
    for name, words in (
        ("missing.json", r"missing\.json: not a readable JSON file \(does not exist\)"),
        (".", "must be a regular file, got a folder"),
        ("latin.json", r"latin\.json: not a readable JSON file"),
    ):
        with pytest.raises(ValueError, match=words):
            load_sweep(tmp_path / name)


# A run.


def test_a_training_that_is_not_finished_is_said_to_be_one(tmp_path: Path):
    Pack({"two": SMALL}).save(tmp_path / "training-0.safetensors")
    for path in (tmp_path, tmp_path / "training-0.safetensors"):
        with pytest.raises(CheckpointError, match=r"not finished.*--resume"):
            load_any(path)


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
    with refused(tmp_path / Path(occupant).parts[0], "already exists and is not overwritten"):
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


def test_of_a_finished_model_only_config_and_history_are_read(tmp_path: Path):
    models = {"two": SMALL}
    first = train_models(models, tmp_path)
    (tmp_path / "two" / "model.safetensors").unlink()
    assert train_models(models, tmp_path, resume=True).loss == first.loss


@pytest.mark.slow
def test_a_second_process_on_a_run_folder_is_refused(tmp_path: Path):
    code = f"""
import time
from pathlib import Path
from mechinterp.checkpoints.io.locks import locked
with locked(Path({str(tmp_path / LOCK)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    for resume in (False, True):
        with refused(f"{tmp_path}: ", "another process is training here."):
            train_models(MODELS, tmp_path, resume=resume)
    # Once more, the file being there: it is the process that holds the lock.
    process.kill()
    process.communicate()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path / LOCK):
        assert (tmp_path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_lock_gets_it_when_its_holder_is_done(tmp_path: Path):
    file, order = tmp_path / LOCK, []

    def work(name: str):
        with locked(file, wait=True):
            order.append(name)
            time.sleep(0.02)
            order.append(name)

    threads = [threading.Thread(target=work, args=(f"{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(order) == sorted(f"{i}" for i in range(8) for _ in range(2))
    assert order[::2] == order[1::2]  # nobody came between
    assert not file.exists()


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(CheckpointError, match=r"\.lock: cannot be locked \(.*Is a directory"):
        train_models(MODELS, tmp_path)


@pytest.mark.slow
def test_temporary_files_of_killed_processes_are_deleted(tmp_path: Path, finished: Path):
    stop_at_step_10(MODELS, tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    mark = f"{MACHINE}-{ended.pid}-01234567"
    (tmp_path / f".training-0.safetensors.{mark}.tmp").write_bytes(b"half")
    (tmp_path / f"..training-0.lock.{mark}.tmp").write_bytes(b"half")
    killed_while_writing(tmp_path / "one")
    train_models(MODELS, tmp_path, resume=True)
    assert set(contents(tmp_path)) == set(contents(finished))


def test_a_finished_model_is_not_resumed_with_another_config(tmp_path: Path, finished: Path):
    before = contents(finished)
    changed = MODELS | {"one": override(MODELS["one"], "task.noise_var=0.5"), "new": SMALL}
    words = "cannot be resumed with another config: task.noise_var is 0.1 there, 0.5 here."
    with refused(f"{finished / 'one'}: {words}"):
        train_models(changed, finished, resume=True)
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


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_its_checkpoints_goes_on(tmp_path: Path, finished: Path):
    pack = finished_pack(Pack({name: MODELS[name] for name in ("two", "one")}))
    pack.save(tmp_path / "training-0.safetensors")
    trained = pack.results()["two"]
    parts = {"step": 20, "history": trained.history, "snapshots": trained.snapshots}
    save(tmp_path / "two", SMALL, trained.weights, **parts)
    killed_while_writing(tmp_path / "one")
    before = contents(tmp_path / "two")
    summary = train_models(MODELS, tmp_path, resume=True)
    assert summary.steps == 20  # those of "longer"
    assert contents(tmp_path / "two") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MODELS)
    for name in MODELS:
        assert_same_run(load(tmp_path / name), load(finished / name))


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
    lost = (
        "wild (train.learning_rate 1e+30, noticed at step 10) did not; the other models are saved."
    )
    with refused(f"{tmp_path}: weights must stay finite, those of {lost} Try a smaller step size"):
        require_finite(models, tmp_path, summary)

    mended = models | {"wild": override(SMALL, "train.learning_rate=1e-2")}
    summary = train_models(mended, tmp_path, resume=True)
    assert (summary.steps, summary.diverged) == (20, {})
    require_finite(mended, tmp_path, summary)
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

    with full, refused(f"{file}: cannot be written at step 20 (", "; the state saved before it is"):
        train_models(MODELS, tmp_path, on_log=fill_disk)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert Pack.restore(file).step == 10

    assert train_models(MODELS, tmp_path, resume=True).steps == 10 + 20
    for name in MODELS:
        assert_same_run(load(tmp_path / name), load(finished / name))


def test_a_disk_that_is_full_from_the_start_is_named(tmp_path: Path):
    words = r"training-0\.safetensors: cannot be written at step 0 \([^\n]*\)\.$"
    with files_of_at_most(100), pytest.raises(CheckpointError, match=words):
        train_models(MODELS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_end_costs_no_training(tmp_path: Path, finished: Path):
    history = finished / "one" / "history.parquet"

    def fill_disk(progress: Progress):
        if progress.step == 20:
            full.enter_context(files_of_at_most(history.stat().st_size - 1))

    models = {"one": MODELS["one"]}  # its state is smaller than its history
    with ExitStack() as full, refused(f"{tmp_path / 'one'}: cannot be written ("):
        train_models(models, tmp_path, on_log=fill_disk)
    assert Pack.restore(tmp_path / "training-0.safetensors").finished
    assert train_models(models, tmp_path, resume=True).steps == 0
    assert_same_run(load(tmp_path / "one"), load(finished / "one"))


def test_a_state_that_was_cut_short_is_named(tmp_path: Path):
    stop_at_step_10(MODELS, tmp_path)
    file = tmp_path / "training-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    before = contents(tmp_path)
    words = "Delete it, and its models begin anew with --resume."
    with refused(f"{file}: not a training state that can be resumed (", words):
        train_models(MODELS, tmp_path, resume=True)
    assert contents(tmp_path) == before
    file.unlink()
    assert train_models(MODELS, tmp_path, resume=True).steps == 40


# A kill.

LONG = {
    "config": {
        "task": {"d_x": 2, "context_length": 4},
        "train": {"steps": 3000, "batch_size": 8, "log_every": 20, "n_eval_prompts": 16},
    },
    "grid": {"task.noise_var": [0.1, 0.3], "model.n_heads": [1, 2]},
    "name": "n{task.noise_var}-h{model.n_heads}",
}
KILLS = 12
# Processes are forked from one that has imported everything, so that their time goes into training. Every other one is
# killed a while after it has saved something, however long that took, so that the work goes on between the kills. Where
# a run ends before its kill, the kills go on in another folder: what each folder holds in the end is compared.
DRIVER = """
import os, pathlib, random, signal, sys, time
import mechinterp.analysis.comparison, mechinterp.cli.commands, mechinterp.cli.training, mechinterp.report.bars
import mechinterp.report.to_json, mechinterp.training.ray, mechinterp.training.one_layer.kernel, mechinterp.training.train
from mechinterp import cli
from mechinterp.training import run

run.SAVE_SECONDS = 0.0
file, root, kills = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])

def start(out, *options):
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{out}.json", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        sys.argv = ["mechinterp", "sweep", file, "--device", "cpu", "--out", str(out), "--json", *options]
        cli.main()
    return child

def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def saved(out):
    try:
        return {file.name: file.stat().st_mtime_ns for file in out.glob("training-*.safetensors")}
    except FileNotFoundError:  # deleted since it was listed: its models are finished
        return {}

begun = time.monotonic()
assert end(start(root / "straight")) == 0
whole = time.monotonic() - begun
moment, killed, folders, options = random.Random(0), 0, 1, []
while killed < kills:
    out = root / f"killed-{folders}"
    before = saved(out)
    child = start(out, *options)
    latest = time.monotonic() + whole
    while killed % 2 and saved(out) == before and time.monotonic() < latest:
        time.sleep(0.001)
    time.sleep(whole * moment.uniform(0, 1.5 / kills))
    os.kill(child, signal.SIGKILL)
    ended = end(child)
    assert ended in (0, -signal.SIGKILL)
    if ended:
        killed, options = killed + 1, ["--resume"]
    else:
        folders, options = folders + 1, []
assert end(start(root / f"killed-{folders}", *options)) == 0
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(tmp_path: Path):
    sweep = write(tmp_path, LONG)
    subprocess.run([sys.executable, "-c", DRIVER, sweep, tmp_path, str(KILLS)], check=True)
    folders = sorted(path for path in tmp_path.glob("killed-*") if path.is_dir())
    straight, *last = (
        json.loads(Path(f"{folder}.json").read_text())["steps"]
        for folder in [tmp_path / "straight", *folders]
    )
    assert straight == 2 * 3000
    # What was trained before the kills was not trained again.
    assert min(last) < straight
    names = list(load_sweep(sweep))
    table = pd.read_parquet(tmp_path / "straight" / RESULTS)
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == sorted([*names, RESULTS])
        for name in names:
            assert_same_run(load(folder / name), load(tmp_path / "straight" / name))
        pd.testing.assert_frame_equal(pd.read_parquet(folder / RESULTS), table, check_exact=True)
