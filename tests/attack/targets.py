"""What is attacked: files of every format that are read, and folders with a user's files that are written into.

A subject is a folder and two functions: what makes a case of a copy of it, and what must end in an answer or in
one line.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from shutil import copytree

import pandas as pd
import torch

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.result import Table
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io import locks as claims
from mechinterp.checkpoints.load import TARGETS, convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.checkpoints.native.tables import MARK, write_own_table
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.report.page import write_page
from mechinterp.report.to_csv import write_table
from mechinterp.report.to_html import Section
from mechinterp.training.one_layer.step import Pack
from mechinterp.training.run_folder import RESULTS, pack_jobs
from mechinterp.training.state import read_state
from mechinterp.training.train import train_models
from tests.attack.mutations import MUTATIONS
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    LAYOUTS,
    attention_module,
    biased,
    haiku,
    merged,
    random_heads,
    separate,
    softmax_paper_state,
    three_axes,
)
from tests.checkpoints.test_generated_files import write
from tests.conftest import by_head
from tests.models.test_layered_models import encoder, garg

SHORT = ExperimentConfig(
    task=TaskConfig(d_x=2, context_length=4),
    model=ModelConfig(n_heads=2),
    train=TrainConfig(steps=4, batch_size=4, log_every=2, n_eval_prompts=4, snapshot_every=2),
)
CLASSIFIED = 16
"""Number of prompts on which a model that could be loaded is classified."""


@dataclass(frozen=True)
class Subject:
    """A folder that is copied, spoilt and then used."""

    folder: Path
    spoil: Callable[[Path, Random], object]
    """Makes a case of the copy."""
    use: Callable[[Path], object]
    """Ends in an answer, or in a ValueError of one line."""
    writes: bool = False
    """Whether it writes into the folder; a reader leaves it as it is."""


def subjects(folder: Path) -> dict[str, Subject]:
    """All of them, with their folders made inside this one."""
    readers = {
        # Alone in its folder.
        name: Subject(path.parent, _mutates, partial(_loads, name=path.name))
        for name, path in _files(folder / "files").items()
    }
    runs = folder / "runs"
    train_models({"model": SHORT}, runs / "done")
    _stopped(runs / "stopped")
    native = Subject(runs / "done" / "model", _mutates, _reads_all)
    state = Subject(runs / "stopped", _mutates, _resumes)
    readers |= {"history-and-snapshots": native, "training-state": state}
    return readers | _writers(folder / "writers", load(native.folder))


def _files(folder: Path) -> dict[str, Path]:
    """A valid file of each format, alone in its folder."""
    torch.manual_seed(0)
    square, narrow, two = random_heads(), random_heads(d_head=2, d_y=2), {"n_heads": 2}
    lens, module = hooked_state(narrow, n_ctx=6), attention_module(0, width=4, n_heads=2, bias=True)
    states: dict[str, tuple[dict[str, torch.Tensor], str, Mapping[str, object]]] = {
        "softmax-paper": (softmax_paper_state(square), ".pth", {}),
        "linear-merged": (merged(square), ".pt", {}),
        "linear-separate": (separate(random_heads(d_head=1)), ".bin", {}),
        "transformer-lens": (lens, ".pt", {}),
        "transformer-lens-safetensors": (lens, ".safetensors", {}),
        "torch-attention": (module.state_dict(), ".pt", two),
        "hugging-face": (module.state_dict(), "shards", {"num_heads": 2}),
        "linear-layers": (LAYOUTS["modules {word}"](square), ".pt", two),
        "names": (LAYOUTS["modules of heads"](square), ".ckpt", {}),
        "gpt2": (garg().state_dict(), ".pt", {"n_heads": 4}),
        "torch-encoder": (encoder(6).state_dict(), ".pt", two),
        "arrays": (by_head(biased(narrow)), ".npz", {}),
        "arrays-safetensors": (by_head(narrow), ".safetensors", {}),
        "circuits": ({"QK": square.QK, "OV": square.OV}, ".npz", {}),
        "haiku": (haiku(square), "arrays", two),
        "flax": (three_axes(square), ".msgpack", {}),
    }
    files = {}
    for name, (state, container, stated) in states.items():
        (folder / name).mkdir(parents=True)
        files[name] = write(folder / name, state, container, dict(stated))
    checkpoint = load(files["transformer-lens"])
    for target in TARGETS:
        name = f"folder-{target}"
        (folder / name).mkdir()
        files[name] = folder / name / ("x.npz" if target == "npz" else "x")
        convert(checkpoint, target, files[name])
    return files


def _stopped(folder: Path) -> None:
    """A run of one model that was stopped after two steps."""
    ((file, models),) = pack_jobs({"model": SHORT}, folder).items()
    pack = Pack(models)
    pack.advance()
    pack.save(file)


def _mutates(folder: Path, random: Random) -> None:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix != ".py")
    random.choice(MUTATIONS)(random.choice(files), random)


def _loads(folder: Path, *, name: str) -> None:
    checkpoint = load(folder / name)
    model, weights = checkpoint.config.model, checkpoint.weights
    assert weights.W_Q.shape[:2] == (model.n_layers, model.n_heads)
    if model.one_attention:  # several layers take longer than a case may
        assert weights.OV.shape[2] == checkpoint.config.task.d_y
        answer = classify(checkpoint, n_prompts=CLASSIFIED)
        assert answer.label in repr(answer)


def _reads_all(folder: Path) -> None:
    checkpoint = load(folder)
    assert checkpoint.history is None or len(checkpoint.history)
    assert all(step >= 0 for step in checkpoint.snapshots)


def _resumes(folder: Path) -> None:
    file = folder / "training-0.safetensors"
    _, step, _ = read_state(file)
    assert step <= SHORT.train.steps
    Pack.restore(file)


# A user's files in the way of what is written.

NAMES = (
    *("config.json", "model.safetensors", "history.parquet", "snapshots.safetensors", "snapshots/1.safetensors"),
    *("index.html", "circuits.csv", "results.parquet", "table.csv", "x.npz", "load.py", "transformer_lens.json"),
    *(".lock", ".mechinterp", ".training-0.lock", "training-0.safetensors", "notes.txt", "model/config.json"),
    *("model/model.safetensors", "model/notes.txt", ".config.json.abcdef-1-00000000.tmp", ".x.tmp"),
)  # fmt: skip
CONTENTS = (b"mine", b"", b"{}", claims.LOCK_MARK.encode()[:-3], b"PAR1", b"\x80\x02}.", bytes(100))


def _writers(folder: Path, checkpoint: Checkpoint) -> dict[str, Subject]:
    folder.mkdir()
    section = Section(
        "Circuits", "text", "method", tables={"circuits": Table(pd.DataFrame({"a": [1]}))}
    )
    frame, document = pd.DataFrame({"name": ["model"]}), {"path": "x", "error": "y"}
    page = partial(write_page, name="n", about="a", verdict="v", parts=[section])
    writers: Mapping[str, Callable[[Path], object]] = {
        **{f"convert-{target}": partial(_converts, checkpoint, target) for target in TARGETS},
        "save": checkpoint.save_pretrained,
        "page": page,
        "page-overwrite": partial(page, overwrite=True),
        "table": lambda out: write_table(out / "table.csv", [document]),
        "results": lambda out: write_own_table(out / RESULTS, frame),
        "train": partial(train_models, {".": SHORT}),
        "train-resume": partial(train_models, {".": SHORT}, resume=True),
        "sweep": partial(train_models, {"model": SHORT}),
        "sweep-resume": partial(train_models, {"model": SHORT}, resume=True),
    }
    return {f"in-the-way-{n}": Subject(folder, _fills, use, True) for n, use in writers.items()}


def _converts(checkpoint: Checkpoint, target: str, out: Path) -> None:
    convert(checkpoint, target, out / "x.npz" if target == "npz" else out)


def _fills(folder: Path, random: Random) -> None:
    """Files, links, folders and pipes of a user, under the names that commands write."""
    for name in random.sample(NAMES, random.choice((1, 1, 2, 5))):
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        kind = random.randrange(8)
        if kind == 0:
            place.mkdir()
            (place / "inside.txt").write_bytes(b"mine")
        elif kind == 1:
            place.symlink_to(random.choice(("nowhere", "notes.txt", "/dev/null", ".")))
        elif kind == 2:
            os.mkfifo(place)
        else:
            place.write_bytes(random.choice(CONTENTS))


def users_files(folder: Path) -> dict[str, object]:
    """What lies in a folder, without that which carries our mark or that no user's name could be."""
    files: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            files[name] = ("link", os.readlink(path))
        elif path.is_file():
            files[name] = path.read_bytes()
        else:
            files[name] = "a folder" if path.is_dir() else "a pipe"
    return files


def is_marked(content: object) -> bool:
    """Whether a file of these bytes is one of ours, which a command may replace."""
    marks = (claims.LOCK_MARK.encode(), *MARK.values())
    return isinstance(content, bytes) and any(mark in content for mark in marks)


def copied(subject: Subject, place: Path, random: Random) -> dict[str, object]:
    """A case in a new folder; what lies in it."""
    copytree(subject.folder, place)
    subject.spoil(place, random)
    return users_files(place)
