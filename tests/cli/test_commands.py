"""The command line: one JSON document on standard output, one line for each mistake, and the exit code."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.cli import interrupts
from mechinterp.cli.printing import about_paths, is_out_of_memory
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.presets import PRESETS
from mechinterp.report.page import PAGE_FILE
from tests.conftest import CHECKPOINTS, Run, started

SCRIPT = Path(sys.executable).with_name("mechinterp")
SHORT = (
    *("--set", "train.steps=300", "--set", "train.log_every=100"),
    *("--set", "train.batch_size=16", "--set", "train.n_eval_prompts=256"),
    *("--device", "cpu"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-head model after 300 steps, trained by the console script; read only."""
    folder = tmp_path_factory.mktemp("trained") / "h2"
    words = ("train", "softmax-h2", *SHORT, "--set", "seed=1", "--out", folder, "--json")
    ran = started(SCRIPT, *words).done()
    document = ran.document
    assert list(document) == ["checkpoint", "steps", "seconds", "steps_per_second", "loss"]
    assert (document["checkpoint"], document["steps"]) == (str(folder), 300)
    assert document["steps_per_second"] == pytest.approx(300 / document["seconds"])
    assert document["loss"] == load(folder).history["eval_loss"].iloc[-1]
    assert "300/300" in ran.err  # the progress bar
    return folder


def hand_built(folder: Path) -> Path:
    config = override(ExperimentConfig(), "task.d_x=3")
    weights = diagonal_heads([0.1, -0.1], [4.0, -4.0], d_x=3)
    save(folder, config, weights, step=0)
    return folder


# What a command prints.


def test_train_lists_its_presets(run: Run):
    assert run("train", "--list").out.split() == list(PRESETS)
    assert run("train", "--list", "--json").document == list(PRESETS)


def test_train_names_its_folder_and_set_changes_fields(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    fields = ("seed=4", "task.d_x=2", "task.covariance.kind=kms", "task.covariance.rho=0.5")
    assignments = [word for field in fields for word in ("--set", field)]
    ran = run("train", "softmax-h1", *SHORT, *assignments, "--set", "train.steps=3", "--json")
    assert ran.document["checkpoint"] == "runs/softmax-h1-s4"
    config = load("runs/softmax-h1-s4").config
    expected = override(PRESETS["softmax-h1"], *SHORT[1:8:2], *fields, "train.steps=3")
    assert config == expected
    assert (config.train.steps, config.task.covariance.rho) == (3, 0.5)


@pytest.mark.slow
def test_sweep_trains_all_models_of_a_file(run: Run, tmp_path: Path):
    config = {"task": {"d_x": 2}, "train": {"steps": 30, "batch_size": 8, "n_eval_prompts": 64}}
    file, out = tmp_path / "sweep.json", tmp_path / "run"
    file.write_text(json.dumps({"config": config, "grid": {"model.n_heads": [1, 2]}}))
    ran = run("sweep", file, "--out", out, "--json", "--device", "cpu")
    assert list(ran.document) == ["checkpoint", "steps", "seconds", "steps_per_second", "loss"]
    assert (ran.code, ran.document["checkpoint"], ran.document["steps"]) == (0, str(out), 30)
    assert "2 models" in ran.err
    losses = [load(file.parent).history["eval_loss"].iloc[-1] for file in out.glob("*/config.json")]
    assert len(losses) == 2
    assert ran.document["loss"] == pytest.approx(sum(losses) / 2)


@pytest.mark.slow
def test_report(run: Run, trained: Path, tmp_path: Path):
    out = tmp_path / "report"
    command = ("report", trained, "--out", out, "--n-prompts", 64, "--analysis", "circuits")
    ran = run(*command, "--json").done(silent=True)
    assert list(ran.document) == ["path", "page", "tables", "verdict"]
    assert (ran.document["path"], ran.document["page"]) == (str(trained), str(out / PAGE_FILE))
    files = {Path(ran.document["page"]), *map(Path, ran.document["tables"])}
    assert set(out.iterdir()) == files
    assert ran.document["verdict"].startswith("What it computes: ")

    ran = run(*command, "--overwrite").done()
    assert ran.out.splitlines()[-1] == f"Report: {out / PAGE_FILE}"


@pytest.mark.slow
def test_info(run: Run, trained: Path):
    document = run("info", trained, "--json").done(silent=True).document
    assert (document["step"], document["name"], document["snapshots"]) == (300, "h2", [0])
    assert document["experiment"] == json.loads(load(trained).config.to_json())
    assert document["weights"] == {f"blocks.0.attn.W_{name}": [2, 6, 6] for name in "QKVO"}
    assert document["eval_loss"] == load(trained).history["eval_loss"].iloc[-1]
    assert [hook["name"] for hook in document["hooks"]] == list(load(trained).model.hook_dict)
    text = run("info", trained).out
    assert text.startswith("h2: 2 heads")
    assert "hook_pattern" not in text
    assert "hook_pattern" in run("info", trained, "--wide").out


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train softmax-h5", ["softmax-h5", "softmax-h1"]),
        ("train", ["preset or a config file", "softmax-h1"]),
        ("train softmax-h1 --set seed", ["field=value", "'seed'"]),
        ("train softmax-h1 --set model.n_heads=0", ["model.n_heads", ">= 1", "got 0"]),
        ("train softmax-h1 --device tpu", ["--device", "'auto', 'cpu', 'cuda'", "'tpu'"]),
        ("train softmax-h1 --set", ["--set"]),
        ("train softmax-h1 --colour", ["--colour"]),
        ("sweep here.json", ["--out"]),
        ("report x", ["--out", "mechinterp report --help"]),
        ("sweep here.json --out run", ["here.json", "does not exist"]),
        ("classify", ["MODEL"]),
        ("classify --n-prompts 1 softmax-h1-s0", ["n_prompts", ">= 8", "got 1."]),
        ("compare-learners gone --context-length 0", ["--context-length", "1", "0"]),
        ("compare-learners gone --seed -1", ["--seed", "0", "-1"]),
        ("compare-learners gone --seed x", ["--seed", "integer", "x"]),
        ("report gone --out page", ["gone", "does not exist"]),
        ("info one two", ["two"]),
        ("convert x --to native", ["--out"]),
        ("convert x --out new", ["--to"]),
        ("clasify x", ["'classify'", "mechinterp --help"]),
    ],
)
def test_a_mistake_is_one_line(run: Run, tmp_path: Path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    run(*arguments.split()).assert_refused(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_value_is_shown_in_quotes(run: Run, blank: str):
    run("classify", "softmax-h1-s0", "--seed", blank).assert_refused("'--seed'", f" {blank!r}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["classify softmax-h1-s0", "train softmax-h1 --out run"])
def test_a_gpu_that_is_not_there_is_refused(run: Run, tmp_path: Path, monkeypatch, command: str):
    monkeypatch.chdir(tmp_path)
    ran = run(*command.split(), "--device", "cuda")
    ran.assert_refused("--device cuda needs a GPU that PyTorch can use; there is none.")
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_full_is_told_as_memory_that_is_full():
    words = r"^model: needs more memory than is available\.$"
    with pytest.raises(ValueError, match=words), about_paths(Path("model")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_library_that_does_not_fit_into_memory_is_told_as_memory_that_is_full():
    assert is_out_of_memory(ImportError("x.so: failed to map segment from shared object"))
    assert not is_out_of_memory(ImportError("x.so: cannot open shared object file"))


def test_bad_config_files_are_refused(run: Run, tmp_path: Path):
    run("train", tmp_path).assert_refused(tmp_path, "a config file", "a folder")
    for text, word in (
        ("{", "JSON"),
        ('{"task": {"d_x": 0}}', "task.d_x must be >= 1, got 0"),
        ('{"experiment": {"seed": "a"}}', "seed must be an integer, got 'a'"),
    ):
        file = tmp_path / "config.json"
        file.write_text(text)
        run("train", file, "--out", tmp_path / "run").assert_refused(file, word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("convert", "--to", "native"), "native"),
        (("convert", "--to", "npz"), "there.npz"),
        (("prune",), "native"),
        (("classify",), "there.csv"),
    ],
    ids=str,
)
def test_a_refusal_to_overwrite_says_what_to_type_next(
    run: Run, tmp_path: Path, command: tuple[str, ...], name: str
):
    pair = hand_built(tmp_path / "native")
    for file in ("there.npz", "there.csv"):
        (tmp_path / file).write_text("mine")
    out, (command, *options) = tmp_path / name, command
    ran = run(command, pair, *options, "--out", out)
    ran.assert_refused(out, "it is not overwritten; choose another --out.\n")
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_a_diverged_training_is_one_clear_line(run: Run, tmp_path: Path):
    wild = ("--set", "train.learning_rate=1e30", "--set", "train.steps=3")
    ran = run("train", "softmax-h1", *SHORT, *wild, "-q", "--out", tmp_path / "run", "--json")
    assert (ran.code, ran.out) == (2, "")
    (complaint,) = ran.err.splitlines()
    for words in (str(tmp_path / "run"), "must stay finite", "train.learning_rate 1e+30", "step 3"):
        assert words in complaint
    assert "other models" not in complaint
    assert list((tmp_path / "run").iterdir()) == []


# A shell that starts a command in the background has it ignore Ctrl-C.
LISTENING = """
import signal
from mechinterp import cli

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.main()
"""


@pytest.mark.slow
def test_ctrl_c_at_any_moment_ends_in_one_line():
    """From the handler of ours on: a process says that it has one, and is stopped a little later each time."""
    said = """
own = signal.signal

def saying(*arguments):
    before = own(*arguments)
    print(end="x" if arguments[0] == signal.SIGINT else "", flush=True)
    return before

signal.signal = saying
cli.main()"""
    listening = LISTENING.replace("cli.main()", said)
    for delay in (0, 0.2, 0.6):
        with subprocess.Popen(
            [sys.executable, "-c", listening, "classify", CHECKPOINTS / "softmax-h2-s0", "-q"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout.read(1) == b"x"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            _, complaints = process.communicate()
        assert time.monotonic() - start < 2
        assert (process.returncode, complaints) == (130, b"mechinterp: interrupted.\n"), delay


def test_ctrl_c_waits_for_the_end_of_an_import_during_work(monkeypatch: pytest.MonkeyPatch):
    """An exception in an import leaves a library half loaded."""
    waits: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _, seconds: waits.append(seconds))
    monkeypatch.setattr(interrupts, "outermost_importer", lambda _: "mechinterp.training.train")
    interrupts.interrupt(signal.SIGINT, None)
    assert len(waits) == 1
    monkeypatch.setattr(interrupts, "outermost_importer", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt(signal.SIGINT, None)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path):
    out = tmp_path / "run"
    options = (*SHORT, "--set", "train.steps=1000000", "--out", str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, "train", "softmax-h1", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(out.glob("training-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, printed) == (130, "")
    assert "Traceback" not in complaints
    last = complaints.splitlines()[-1]
    assert last == "mechinterp: interrupted; to continue, add --resume."
    assert [file.name for file in out.iterdir()] == ["training-0.safetensors"]
