"""`mechinterp convert`, and the other commands on files from outside."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mechinterp import cli
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import TaskConfig

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "softmax-h2-s0"
FEW = ("--n-prompts", "64")


@pytest.fixture
def run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Runs a command in this process: exit code, standard output, standard error."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mechinterp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def state(tmp_path: Path) -> Path:
    torch.save(hooked_state(load(CHECKPOINT).weights.circuits, n_ctx=50), tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_convert_there_and_back(run, tmp_path: Path):
    out = tmp_path / "exchange"
    code, printed, complaints = run(
        "convert", CHECKPOINT, "--to", "transformer-lens", "--out", out, "--json"
    )
    assert (code, complaints) == (0, "")
    document = json.loads(printed)
    assert list(document)[:4] == ["schema_version", "path", "format", "assumed"]
    assert (document["format"], document["to"], document["n_ctx"]) == (
        *("native", "transformer-lens", 1024),
    )
    assert document["left_out"] == ["history", "snapshots"]
    assert sorted(map(Path, document["files"])) == sorted(out.iterdir())
    code, printed, _ = run("convert", out, "--to", "native", "--out", tmp_path / "back", "--json")
    document = json.loads(printed)
    assert (document["format"], document["n_ctx"], document["left_out"]) == (
        *("transformer-lens", None, []),
    )
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (CHECKPOINT / file).read_bytes()


def test_convert_says_what_it_did(run, tmp_path: Path):
    out = tmp_path / "exchange"
    code, printed, complaints = run("convert", CHECKPOINT, "--to", "transformer-lens", "--out", out)
    assert (code, complaints) == (0, "")
    assert printed.splitlines() == [
        f"{out}: load.py, model.safetensors, transformer_lens.json",
        "n_ctx is 1024; read load.py, then run it with transformer-lens 2 or 3.",
        "Left out: history, snapshots.",
    ]


@pytest.mark.slow
def test_what_is_assumed_is_printed_and_stays_with_the_checkpoint(run, state: Path, tmp_path: Path):
    task, out = tmp_path / "task.json", tmp_path / "native"
    task.write_text(json.dumps({"noise_var": 0.2}))
    code, printed, complaints = run(
        "convert", state, "--to", "native", "--out", out, "--task", task, "--json"
    )
    assert code == 0
    assert complaints.startswith(f"mechinterp: {state}: assumed task.context_length = 40, ")
    assert complaints.count("\n") == 1
    assumed = json.loads(printed)["assumed"]
    assert assumed["task.context_length"] == 40
    assert "task.noise_var" not in assumed
    assert load(out).config.task == TaskConfig(noise_var=0.2)
    code, printed, _ = run("info", out, "--json")
    assert (code, json.loads(printed)["assumed"]) == (0, assumed)


def test_classify_says_the_same_of_such_a_file(run, state: Path):
    _, printed, _ = run("classify", state, CHECKPOINT, *FEW, "--json")
    there, here = json.loads(printed)
    assert (there["format"], here["format"]) == ("transformer-lens", "native")
    assert there["assumed"]["task.noise_var"] == 0.1
    assert (there["heads"], there["pattern"]) == (here["heads"], here["pattern"])


@pytest.mark.parametrize(
    "command",
    [
        ["ablate", *FEW],
        ["fit", "--context-length", "10", *FEW],
        ["info"],
        pytest.param(["report", *FEW], marks=pytest.mark.slow),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_take_such_a_file(run, state: Path, tmp_path: Path, command: list[str]):
    name, *options = command
    options += ["--out", tmp_path / "report"] if name == "report" else []
    code, printed, complaints = run(name, state, *options, "--json")
    assert code == 0, complaints
    assert complaints.startswith(f"mechinterp: {state}: assumed ")
    document = json.loads(printed)
    assert name == "report" or document["format"] == "transformer-lens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "onnx", "--out", "new"], "Format must be one of native, transformer-lens"),
        (["--to", "native", "--out", "full"], "full: already holds mine"),
        (["--to", "native", "--out", "new", "--task", "gone.json"], "gone.json: not a readable"),
        (["--to", "native"], "--out"),
        (["--out", "new"], "--to"),
    ],
)
def test_a_mistake_is_one_line(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, printed, complaints = run("convert", CHECKPOINT, *arguments)
    assert (code, printed, complaints.count("\n")) == (2, "", 1)
    assert words in complaints
    assert not (tmp_path / "new").exists()
