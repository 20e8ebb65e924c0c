"""Writes the golden files: `python -m tests.golden.write [PART...]`, all parts if none is named.

Run it only where a difference is meant, and read the difference before it is committed. Files of
weights in `files/`
are written once (`python -m tests.golden.write files`): they stand for what other people have.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.training.train import train_models
from tests.attack.targets import write_originals
from tests.checkpoints.foreign_files import (
    LAYOUTS,
    attention_module,
    random_heads,
    softmax_paper_state,
)
from tests.golden import subjects
from tests.golden.store import (
    DATA,
    KINDS,
    METHODS,
    SLOW_STEPS,
    SNAPSHOT_PROMPTS,
    STEPS,
    masks_of,
    read_json,
    read_tensors,
    stored_prompts,
    write_json,
)
from tests.models.test_layered_models import encoder, garg

N_PROMPTS = 64
FIXTURES = (
    "softmax_h3_run",
    "softmax_multitask_h4_run",
    "linear_merged_h8",
    "linear_separate_h5_r1",
)


def write_files() -> None:
    """A file of every layout that is read, and folders of kinds that no checkpoint is of."""
    shutil.rmtree(subjects.FILES, ignore_errors=True)
    subjects.FILES.mkdir()
    listed = {name: given for name, given in _layouts(subjects.FILES).items()}
    write_json(
        "files", {str(path.relative_to(subjects.ROOT)): hints for path, hints in listed.values()}
    )


def write_predictions() -> None:
    """The list of subjects, their prompts and their predictions."""
    names: dict[str, dict] = {f"checkpoints/{f.name}": {} for f in _checkpoints()}
    names |= {f"fixtures/{name}.pth": {} for name in FIXTURES} | read_json("files")
    tasks: dict[TaskConfig, str] = {}
    listed, prompts, found = {}, {}, {}
    for name, hints in names.items():
        task = subjects.task_of(name, hints)
        if task not in tasks:
            tasks[task] = Path(name).name
            drawn = subjects.drawn_prompts(task, N_PROMPTS)
            prompts |= {f"{tasks[task]}/{field}": tensor for field, tensor in drawn.items()}
        listed[name] = {"prompts": tasks[task], "hints": hints}
    write_json("subjects", listed)
    _write_tensors("prompts", prompts)
    for name, each in listed.items():
        given = stored_prompts(each["prompts"])
        values = subjects.predictions(name, each["hints"], given, torch.float64)
        found[name] = torch.from_numpy(values)
    _write_tensors("predictions", found)


def write_masks() -> None:
    """Predictions of a model of each kind, unmasked and with each head masked alone."""
    found = {}
    for name in KINDS.values():
        each = read_json("subjects")[name]
        given, hints = stored_prompts(each["prompts"]), each["hints"]
        for method in METHODS:
            values = subjects.masked_at_once(
                name, hints, given, torch.float64, masks_of(name, hints), method
            )
            found[f"{name}/{method}"] = torch.from_numpy(values)
    _write_tensors("masks", found)


def write_snapshots() -> None:
    """Predictions of all snapshots of models of linear attention, of several layers too."""
    found = {}
    for folder in _checkpoints():
        name = f"checkpoints/{folder.name}"
        if folder.name.startswith(("linear-", "sparse-")):
            prompts = stored_prompts(read_json("subjects")[name]["prompts"], SNAPSHOT_PROMPTS)
            values = subjects.snapshot_predictions(name, prompts, torch.float64)
            found[name] = torch.from_numpy(values)
    _write_tensors("snapshots", found)


def write_training() -> None:
    """Weights of each preset after a few steps."""
    found = {}
    for preset in subjects.presets():
        with tempfile.TemporaryDirectory() as folder:
            weights = subjects.trained(preset, SLOW_STEPS.get(preset, STEPS), Path(folder))
        found |= {f"{preset}/{name}": tensor for name, tensor in weights.items()}
    _write_tensors("training", found)


def _layouts(folder: Path) -> dict[str, tuple[Path, dict]]:
    files = write_originals(folder)
    (folder / "gpt2.pt").unlink()
    bare = {n: t for n, t in garg().state_dict().items() if not n.endswith("wte.weight")}
    del files["gpt2"]
    own = [
        (name.replace("_backbone.", "transformer.").replace("_read", "read"), tensor)
        for name, tensor in bare.items()
    ]
    module = attention_module(0, width=4, n_heads=2, bias=True).state_dict()
    parts = dict(zip("qkv", module.pop("in_proj_weight").chunk(3), strict=True))
    unpacked = module | {f"{x}_proj_weight": part.clone() for x, part in parts.items()}
    ours = random_heads()
    more: dict[str, tuple[dict[str, Tensor], dict]] = {
        "garg.pt": (bare, {"n_heads": 4}),
        "garg-other-names.pt": (dict(own), {"n_heads": 4}),
        "encoder-layer.pt": (encoder(6).layers[0].state_dict(), {"n_heads": 2}),
        "torch-unpacked.pt": (unpacked, {"n_heads": 2}),
        "layers-other-names.pt": (LAYOUTS["modules {x}_proj"](ours), {"n_heads": 2}),
        "paper-state.pt": (softmax_paper_state(ours), {}),
        "paper-prefix.pt": ({f"module.{n}": t for n, t in softmax_paper_state(ours).items()}, {}),
    }
    for name, (state, hints) in more.items():
        torch.save(state, folder / name)
        files[name] = (folder / name, hints)
    config = folder / "hugging-face-one-file"
    config.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in bare.items()}, config / "model.safetensors"
    )
    (config / "config.json").write_text(json.dumps({"n_head": 4, "activation_function": "relu"}))
    files[config.name] = (config, {})
    first_norm = folder / "encoder-first-norm"
    first_norm.mkdir()
    save_file(encoder(6, norm_first=True).state_dict(), first_norm / "model.safetensors")
    settings = {"nhead": 2, "norm_first": True, "attend_to_self": False}
    (first_norm / "config.json").write_text(json.dumps(settings))
    files[first_norm.name] = (first_norm, {})
    for name, config in _configs().items():
        train_models({name: config}, folder)
        files[name] = (folder / name, {})
    pruned = folder / "pruned"
    arguments = (folder / "deep-softmax", "--out", pruned, "--n-prompts", 64)
    assert subjects.answer("prune", *arguments) is not None
    files["pruned"] = (pruned, {})
    return files


def _configs() -> dict[str, ExperimentConfig]:
    """Kinds of our own models that no checkpoint is of."""
    task = TaskConfig(d_x=3, context_length=8)
    train = TrainConfig(steps=20, batch_size=16, n_eval_prompts=64)
    models = {
        "deep-softmax": ModelConfig(n_layers=3, n_heads=2, context_only=True),
        "deep-wide": ModelConfig(n_layers=2, n_heads=2, d_model=8, d_head=3, context_only=True),
        "narrow-heads": ModelConfig(n_heads=2, d_head=2),
    }
    return {name: ExperimentConfig(task, model, train) for name, model in models.items()}


def _checkpoints() -> list[Path]:
    return sorted(f.parent for f in (subjects.ROOT / "checkpoints").glob("*/config.json"))


def _write_tensors(name: str, tensors: dict[str, Tensor]) -> None:
    file = DATA / f"{name}.safetensors"
    save_file({key: t.contiguous() for key, t in tensors.items()}, file)
    file.chmod(0o644)
    read_tensors.cache_clear()


PARTS: dict[str, Callable[[], None]] = {
    "predictions": write_predictions,
    "masks": write_masks,
    "snapshots": write_snapshots,
    "training": write_training,
}

if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        (PARTS | {"files": write_files})[part]()
