"""Upload of a model to the Hugging Face hub, with its model card."""

from tempfile import TemporaryDirectory

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.hub import REPOSITORY, hub_library
from mechinterp.checkpoints.io.files import CheckpointError, one_line
from mechinterp.version import __version__


def card_with_verdict(
    checkpoint: Checkpoint, *, source: str | None = None, licence: str = "mit", seed: int = 0
) -> str:
    """Model card with the label of the model, the numbers behind it, and its loss.

    Args:
        source: Argument for `load` in the card; None: the checkpoint's name.
        seed: Seed of the evaluation prompts.
    Example:
        >>> from mechinterp import load
        >>> card = card_with_verdict(load("softmax-h2-s0"))
        >>> print(card.splitlines()[-9])
        | trained | 500,001 steps of 256 prompts at learning rate 0.001, seed 0 |
    """
    try:
        answer = classify(checkpoint, seed=seed)
        texts = (answer.label, "\n\n".join(str(answer.verdict).splitlines()), str(answer.loss))
    except ValueError as error:  # such as predictions that overflow
        texts = ("not classified", str(error), "not known")
    pattern, verdict, loss = texts
    about = f" What `mechinterp` {__version__} says of it:\n**{pattern}**.\n\n{verdict}"
    return checkpoint.card(source=source, licence=licence, verdict=about, loss=loss)


def push_to_hub(
    checkpoint: Checkpoint,
    repository: str,
    *,
    revision: str | None = None,
    private: bool = False,
    licence: str = "mit",
    token: str | bool | None = None,
) -> str:
    """Upload a checkpoint with a card that has its label to a repository of the hub, which is created if needed.

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
        ValueError: If the model is no checkpoint, such as a hooked module, or the name is none of a repository.
    See also:
        `load`.
    """
    checkpoint = checkpoint_of(checkpoint, "push_to_hub")
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise ValueError(f"repository must be 'owner/repository', got {repository!r}.")
    hub = hub_library()
    api = hub.HfApi(token=token)
    with TemporaryDirectory() as folder:
        card = card_with_verdict(checkpoint, source=repository, licence=licence)
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
