"""Summary of a checkpoint, as a JSON document and as a card."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mechinterp.analysis.number_format import digits
from mechinterp.checkpoints.native.folder import Outline
from mechinterp.config import ExperimentConfig
from mechinterp.display import counted
from mechinterp.fields import flatten
from mechinterp.report.grounds import doubts_in_words, in_words
from mechinterp.report.text import wrapped
from mechinterp.report.to_json import header

if TYPE_CHECKING:
    from mechinterp.checkpoints.checkpoint import Checkpoint


def info_document(source: "Checkpoint | Outline", *, hooks: bool = True) -> dict:
    """Document that `info` prints about a checkpoint.

    Args:
        hooks: True: list the hook points, which requires building the hooked model.
    """
    outline = source if isinstance(source, Outline) else _checkpoint(source).outline
    history, steps = source.history, source.steps
    document = {
        **header(source),
        "name": outline.name,
        "id": outline.config.id,
        "step": outline.step,
        "experiment": outline.config.to_dict(),
        "origin": dict(outline.origin),
        "history_rows": 0 if history is None else len(history),
        "snapshots": steps,
        "eval_loss": None if history is None else float(history["eval_loss"].iloc[-1]),
        "weights": {name: list(shape) for name, shape in outline.shapes.items()},
    }
    if hooks:
        from mechinterp.models.hooked.transformer import hook_map

        document["hooks"] = hook_map(_checkpoint(source).model).to_dict(orient="records")
    return document


def _checkpoint(source: object) -> "Checkpoint":
    from mechinterp.checkpoints.checkpoint import (
        checkpoint_of,  # loads torch, which an outline needs not
    )

    return checkpoint_of(source, "info")


def info_text(document: dict) -> str:
    """Card with the document of `info`: settings that differ from the default, and hooks if the document has them."""
    experiment = document["experiment"]
    task, model = experiment["task"], experiment["model"]
    layers = (
        f"{model['n_layers']} layers of " if model["n_layers"] > 1 or model["context_only"] else ""
    )
    title = (
        f"{document['name']}: {layers}{counted(model['n_heads'], 'head')}, {model['score']} attention, d_x {task['d_x']}, "
        f"context length {task['context_length']}"
    )
    known = "step" not in document["assumed"]
    if known:
        title += f", step {document['step']}, config {document['id']}"
    origin = (f"{name.replace('_', ' ')} {value}" for name, value in document["origin"].items())
    loss, snapshots = document["eval_loss"], document["snapshots"]
    card = {
        "format": document["format"],
        "origin": ", ".join(origin),
        "loss": "" if loss is None else f"{digits(loss)} y² on fixed prompts",
        "task": _settings(experiment, "task"),
        "model": _settings(experiment, "model"),
        "training": _settings(experiment, "train"),
        "seed": str(experiment["seed"]),
        "history": f"{document['history_rows']} rows" if document["history_rows"] else "",
        "snapshots": f"{len(snapshots)}, steps {snapshots[0]} to {snapshots[-1]}"
        if snapshots
        else "",
        "weights": ", ".join(_shapes(document["weights"])),
    }
    if not known:  # the training of external weights is unknown
        card |= {"training": "", "seed": ""}
        assumed = document["assumed"]
        grounds = {ground: document.get(ground, {}) for ground in ("stated", "proven", "known")}
        card |= {n: in_words(each, full=True) for n, each in ({"assumed": assumed} | grounds).items()}  # fmt: skip
        card |= doubts_in_words(assumed, str(assumed.get("doubt", "")))
    lines = [wrapped(title, "  ")]
    lines += [wrapped(f"  {name:<10} {text}", " " * 11) for name, text in card.items() if text]
    hooks = document.get("hooks")
    if hooks is None:
        return "\n".join([*lines, "  (--wide lists the hook points)"])
    lines.append("  hooks (name, shape, what turns it on):")
    return "\n".join([*lines, *_hook_lines(hooks)])


def _hook_lines(hooks: Sequence[Mapping]) -> list[str]:
    """Lines of the hook table, with columns as narrow as possible to stay below 80 characters."""
    shapes = [f"[{', '.join(map(str, hook['shape']))}]" for hook in hooks]
    names = max(len(hook["name"]) for hook in hooks)
    sizes = max(map(len, shapes))
    return [
        f"   {hook['name']:<{names}} {shape:<{sizes}} {hook['switch']}".rstrip()
        for hook, shape in zip(hooks, shapes, strict=True)
    ]


def _settings(experiment: dict, part: str) -> str:
    """Settings of a part that differ from the default, with their values."""
    usual = flatten(ExperimentConfig().to_dict()[part])
    changed = [
        f"{name.replace('.', ' ')} {digits(value) if isinstance(value, float) else value}"
        for name, value in flatten(experiment[part]).items()
        if value != usual.get(name)
    ]
    return ", ".join(changed) or "the default"


def _shapes(weights: Mapping[str, Sequence[int]]) -> list[str]:
    """Name and shape of each tensor; equal tensors of all layers share one entry."""
    layers_of: dict[str, list[str]] = {}
    for name, shape in weights.items():
        layer = re.search(r"blocks\.(\d+)", name)
        text = re.sub(r"blocks\.\d+", "blocks.*", name) + f" {'×'.join(map(str, shape))}"
        layers_of.setdefault(text, []).append(layer[1] if layer else "")
    return [
        text if len(layers) > 1 else text.replace("*", layers[0])
        for text, layers in layers_of.items()
    ]
