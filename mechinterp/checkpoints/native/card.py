"""The model card README.md of a checkpoint folder: what the checkpoint itself knows."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mechinterp.checkpoints.io.files import visible
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.display import counted

CARD_TEXT = Path(__file__).with_name("card.md.txt").read_text(encoding="utf-8")


def card_of(
    name: str,
    model: ModelConfig,
    task: TaskConfig,
    trained: str,
    *,
    source: str,
    licence: str = "mit",
    verdict: str = "",
    loss: str = "",
) -> str:
    """Text of a card.

    Args:
        trained: Settings of the training, in words.
        source: Argument for `load` in the card: a path, the name of a model or a repository.
        licence: Licence of the weights, by the hub's short name.
        verdict: Text on what the model does, after the architecture; empty: none.
        loss: Loss in words; empty: the card has none.
    """
    return CARD_TEXT.format(
        licence=licence,
        name=_escaped(name),
        architecture=_architecture(model),
        verdict=verdict,
        task=task.in_words,
        loss=f"| loss | {loss} |\n" if loss else "",
        trained=trained,
        source=json.dumps(source),  # also a string of Python
    )


def training_in_words(
    config: ExperimentConfig, step: int | None, origin: Mapping[str, object], *, native: bool
) -> str:
    """Steps, batch size and learning rate of a run of this package; for other files, their stated
    origin."""
    train = config.train
    if origin:
        return "; ".join(f"{name}: {value}" for name, value in origin.items())
    if not native or not step:
        return "not recorded in the file"
    return (
        f"{step:,} steps of {train.batch_size:,} prompts at learning rate "
        f"{train.learning_rate:g}, seed {config.seed}"
    )


def _escaped(text: str) -> str:
    """Text on one line in which no character is a mark of Markdown or HTML.

    Example:
        >>> print(_escaped("a_b *<i>*"))
        a\\_b \\*\\<i\\>\\*
    """
    return re.sub(r"([\\`*_{}\[\]<>()#!|&~])", r"\\\1", visible(" ".join(text.split())))


def _architecture(model: ModelConfig) -> str:
    heads, mlps = counted(model.n_heads, "head"), f", MLPs of width {model.d_mlp}"
    text = f"{counted(model.n_layers, 'layer')} of {heads}, {model.score} scores"
    return text + ("" if model.d_mlp is None else mlps)
