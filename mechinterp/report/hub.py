"""Upload of a model to the Hugging Face hub, with its model card."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.hub import hub_library
from mechinterp.checkpoints.io.files import CheckpointError, one_line, visible
from mechinterp.display import counted
from mechinterp.version import __version__

CARD_TEXT = Path(__file__).with_name("card.md.txt").read_text(encoding="utf-8")


def model_card(
    checkpoint: Checkpoint, *, source: str | None = None, licence: str = "mit", seed: int = 0
) -> str:
    """Model card: task, architecture, classification with its numbers, loss, and how to load the model.

    Args:
        source: Argument for `from_pretrained` in the card; None: the checkpoint's name.
        licence: Licence of the weights, by the hub's short name.
        seed: Seed of the evaluation prompts.
    See also:
        `push_to_hub`.
    Example:
        >>> from mechinterp import load
        >>> card = model_card(load("softmax-h2-s0"))
        >>> print(card.splitlines()[-9])
        | trained | 500,001 steps of 256 prompts at learning rate 0.001, seed 0 |
    """
    try:
        answer = classify(checkpoint, seed=seed)
        texts = (answer.pattern, "\n\n".join(str(answer.verdict).splitlines()), str(answer.loss))
    except ValueError as error:  # such as predictions that overflow
        texts = ("not classified", str(error), "not known")
    pattern, verdict, loss = texts
    return CARD_TEXT.format(
        licence=licence,
        name=_escaped(checkpoint.name),
        architecture=_architecture(checkpoint),
        version=__version__,
        pattern=pattern,
        verdict=verdict,
        task=checkpoint.task.in_words,
        loss=loss,
        trained=_trained(checkpoint),
        source=json.dumps(source or checkpoint.name),  # also a string of Python
    )


def _escaped(text: str) -> str:
    """Text on one line in which no character is a mark of Markdown or HTML.

    Example:
        >>> print(_escaped("a_b *<i>*"))
        a\\_b \\*\\<i\\>\\*
    """
    return re.sub(r"([\\`*_{}\[\]<>()#!|&~])", r"\\\1", visible(" ".join(text.split())))


def _architecture(checkpoint: Checkpoint) -> str:
    model = checkpoint.config.model
    heads, mlps = counted(model.n_heads, "head"), f", MLPs of width {model.d_mlp}"
    text = f"{counted(model.n_layers, 'layer')} of {heads}, {model.score} scores"
    return text + ("" if model.d_mlp is None else mlps)


def _trained(checkpoint: Checkpoint) -> str:
    """Steps, batch size and learning rate of a run of this package; for other files, their stated origin."""
    train, seed = checkpoint.config.train, checkpoint.config.seed
    if checkpoint.origin:
        return "; ".join(f"{name}: {value}" for name, value in checkpoint.origin.items())
    if checkpoint.format != "native" or not checkpoint.step:
        return "not recorded in the file"
    return (
        f"{checkpoint.step:,} steps of {train.batch_size:,} prompts at learning rate "
        f"{train.learning_rate:g}, seed {seed}"
    )


def push_to_hub(
    checkpoint: Checkpoint,
    repository: str,
    *,
    revision: str | None = None,
    private: bool = False,
    licence: str = "mit",
    token: str | bool | None = None,
) -> str:
    """Upload a checkpoint with its card to a repository of the hub, which is created if needed.

    Args:
        repository: "owner/repository".
        revision: Branch to write to; None: the main branch.
        private: True: a new repository is private.
        licence: Licence of the weights, by the hub's short name.
        token: Access token of an account that may write there; None: the stored login.
    Returns:
        Address of the commit.
    Raises:
        CheckpointError: If the hub refuses, or the extra `hub` is not installed.
        ValueError: If the model is no checkpoint, such as a hooked module.
    See also:
        `model_card`, `from_pretrained`.
    """
    checkpoint = checkpoint_of(checkpoint, "push_to_hub")
    hub = hub_library()
    api = hub.HfApi(token=token)
    with TemporaryDirectory() as folder:
        card = model_card(checkpoint, source=repository, licence=licence)
        checkpoint.save_pretrained(folder, card=card)
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                revision=revision,
                commit_message=f"{checkpoint.name}, by mechinterp {__version__}",
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{repository}: not uploaded ({one_line(error)}).") from None
    return str(commit.commit_url)
