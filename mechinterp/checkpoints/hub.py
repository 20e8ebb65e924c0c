"""Checkpoints from the Hugging Face hub through its own library, with its revisions, cache and
offline mode."""

import re
from pathlib import Path
from types import ModuleType

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.files import CheckpointError, one_line
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.native.folder import SNAPSHOTS, WEIGHTS
from mechinterp.checkpoints.shipped import shipped_path

WANTED = ("config.json", "config.yaml", WEIGHTS, SNAPSHOTS, "history.parquet", "state.pt", "*.bin")
"""Files of a repository that define a model; no others are downloaded."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> Checkpoint:
    """Checkpoint in a folder, of a shipped model, or in a repository of the hub.

    Args:
        name: Name of an existing folder or file, else of a shipped model, else "owner/repository".
        revision: Branch, tag or commit of the repository.
        cache_dir: Folder for downloads; None means that of the hub's library.
        local_files_only: True: use the cache only, without network, as HF_HUB_OFFLINE=1 does.
        token: Account token for private repositories; None means that of the current login.
    Raises:
        CheckpointError: If there is no such model, or it cannot be downloaded or read.
    See also:
        `load`, `push_to_hub`.
    Example:
        >>> from_pretrained("softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = shipped_path(name)
    if path.exists() or not REPOSITORY.fullmatch(str(name)):
        if revision is not None:
            raise CheckpointError(
                f"{path}: revision needs a repository of the hub, got {revision!r} for a local path."
            )
        return load(path)
    hub = hub_library()
    try:
        folder = hub.snapshot_download(
            str(name),
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            token=token,
            allow_patterns=list(WANTED),
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: cannot be downloaded from the hub ({one_line(error)})."
        ) from None
    return load(folder)


def hub_library() -> ModuleType:
    """The library huggingface_hub, from the extra `hub`.

    Raises:
        CheckpointError: If it is not installed.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            "Repositories of the hub need huggingface_hub: pip install 'mechinterp-icl[hub]'."
        ) from None
    return huggingface_hub
