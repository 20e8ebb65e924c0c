"""Downloads from the Hugging Face hub through its own library, with its revisions, cache and
offline mode."""

import re
from pathlib import Path
from types import ModuleType

from mechinterp.checkpoints.io.files import CheckpointError, one_line
from mechinterp.checkpoints.native.folder import CONFIG_FILE, SNAPSHOTS, WEIGHTS_FILE

WANTED = (
    CONFIG_FILE,
    "config.yaml",
    WEIGHTS_FILE,
    SNAPSHOTS,
    "history.parquet",
    "state.pt",
    "*.bin",
)
"""Files of a repository that define a model; no others are downloaded."""
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FILE = re.compile(r"\.[a-z][a-z0-9]*$")
"""End of a name that is a file's, and no repository's."""


def is_repository(path: str | Path) -> bool:
    """True for "owner/repository" if there is no folder `owner` here.

    Example:
        >>> is_repository("owner/model"), is_repository("checkpoints/model"), is_repository("model")
        (True, False, False)
    """
    name = Path(path).as_posix()
    named = REPOSITORY.fullmatch(name) is not None and FILE.search(name) is None
    return named and not Path(name).parent.exists()


def downloaded(name: str, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Folder with the files of a repository, in the cache of the hub's library.

    Args:
        revision: Branch, tag or commit; None: the main branch.
        token: Account token for private repositories; None: that of the current login.
    Raises:
        CheckpointError: If it cannot be downloaded, or the extra `hub` is not installed.
    """
    hub = hub_library(name)
    try:
        folder = hub.snapshot_download(
            name, revision=revision, token=token, allow_patterns=list(WANTED)
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: neither a path here nor downloaded from the hub ({one_line(error)})."
        ) from None
    return Path(folder)


def hub_library(name: str = "A repository of the hub") -> ModuleType:
    """The library huggingface_hub, from the extra `hub`.

    Raises:
        CheckpointError: If it is not installed.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"{name}: does not exist here; a repository of the hub needs huggingface_hub: "
            "pip install 'mechinterp-icl[hub]'."
        ) from None
    return huggingface_hub
