"""The config.json of a checkpoint: its experiment, step and grounds, and the SHA-256 of the other files; and configs by name or file."""

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from mechinterp.checkpoints.io.files import CheckpointError, naming, read_json, read_yaml, readable
from mechinterp.config import ExperimentConfig, from_dict, override
from mechinterp.presets import PRESETS, preset
from mechinterp.version import __version__

FORMAT_VERSION = 1
GROUNDS = ("known", "proven", "stated")
"""Grounds of the settings of a model of other code that are not assumed."""


def document_of(
    config: ExperimentConfig,
    *,
    step: int,
    assumed: Mapping[str, object] | None = None,
    origin: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    grounds: Mapping[str, Mapping[str, object]] | None = None,
) -> dict:
    """Content of config.json: the experiment, its step, the version of the code that wrote it, and the SHA-256 of each
    other file of the checkpoint."""
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "git_commit": git_commit(),
        "step": step,
        "experiment": config.to_dict(),
    }
    kept = {ground: dict(values) for ground, values in (grounds or {}).items() if values}
    stated = {"files": files, "assumed": assumed, "origin": origin, "grounds": kept}
    return document | {name: dict(value) for name, value in stated.items() if value}


def read_document(file: Path) -> tuple[dict, ExperimentConfig]:
    """Document and experiment in a file written from `document_of`.

    Raises:
        CheckpointError: If the file cannot be read, or a field is missing or wrong.
    """
    return document_parts(read_json(file), file)


def document_parts(document: object, file: Path) -> tuple[dict, ExperimentConfig]:
    """Checked document and experiment; "files", "assumed", "origin" and "grounds" default to empty.

    Raises:
        CheckpointError: If a field is missing or wrong.
    """
    with naming(file):
        if not isinstance(document, dict):
            raise ValueError(f"must hold a JSON object, got {type(document).__name__}.")
        for name in ("format_version", "step", "experiment"):
            if name not in document:
                raise ValueError(f"field {name!r} is missing.")
        version, step = document["format_version"], document["step"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}.")
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer >= 0, got {step!r}.")
        parts = ("files", "assumed", "origin", "grounds")
        nothing: dict[str, dict] = {name: {} for name in parts}
        document = nothing | document
        for name in parts:
            if not isinstance(document[name], dict):
                raise ValueError(f"{name} must be a JSON object, got {document[name]!r}.")
        for ground, values in document["grounds"].items():
            if ground not in GROUNDS or not isinstance(values, dict):
                rule = f"grounds must hold a JSON object for each of {', '.join(GROUNDS)}"
                raise ValueError(f"{rule}, got {ground}: {values!r}.")
        return document, from_dict(document["experiment"])


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, as config.json lists it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_stated(file: Path, files: Mapping[str, object]) -> None:
    """Refuse a file that is not the one listed under its name in the config; other names are not checked.

    Raises:
        CheckpointError: If it is missing or has another SHA-256.
    """
    if (stated := files.get(file.name)) is None:
        return
    rule = f"must be the file that was written with its config (SHA-256 {str(stated)[:12]})"
    if not file.exists():
        raise CheckpointError(f"{file}: {rule}, but it is missing: copy the whole folder.")
    with readable(file, "a file of a checkpoint", None):
        found = sha256_of(file)
    if found != stated:
        raise CheckpointError(
            f"{file}: {rule}, got another ({found[:12]}): copy the whole folder of one model."
        )


def named_config(what: str) -> ExperimentConfig:
    """The preset of this name, or the config in a file: a bare config or a checkpoint's
    config.json. A YAML file has the fields that differ from the default, or from its `preset`.

    Raises:
        ValueError: If it is neither, the file has no config, or its model was made from another.
    Example:
        >>> named_config("checkpoints/softmax-h2-s0/config.json") == preset("softmax-h2")
        True
    """
    file = Path(what)
    if what in PRESETS:
        return preset(what)
    if not file.is_file():
        rule = f"a preset ({', '.join(PRESETS)}) or a config file is needed"
        raise ValueError(f"{what}: {rule}, got {'a folder' if file.is_dir() else 'neither'}.")
    if file.suffix in (".yaml", ".yml"):
        with naming(file):
            return _from_yaml(read_yaml(file))
    document = read_json(file)
    if isinstance(document, dict) and document.get("origin"):
        raise ValueError(
            f"{file}: this model was made from another, which a config does not name: load it and give it as start "
            "(train --start)."
        )
    inner = document.get("experiment", document) if isinstance(document, dict) else document
    with naming(file):
        return from_dict(inner)


def _from_yaml(document: object) -> ExperimentConfig:
    """Config of a YAML document whose numbers are texts, so that 1e-3 is a number here too."""
    if not isinstance(document, dict):
        raise ValueError(f"must hold fields of a config, got {document!r}.")
    fields = dict(document)
    base = preset(fields.pop("preset")) if "preset" in fields else ExperimentConfig()
    return override(base, *(f"{name}={text}" for name, text in _assigned(fields)))


def _assigned(fields: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Fields by dotted name, with their values as `--set` takes them."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _assigned(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _listed(value)


def _listed(value: str | list) -> str:
    """A value of a YAML file as text: lists, of lists too, as in JSON."""
    return f"[{', '.join(map(_listed, value))}]" if isinstance(value, list) else value


@cache
def git_commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
