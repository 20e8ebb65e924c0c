"""Files: errors of reading and writing them, atomic writing (a kill leaves the old or the new file), and JSON and YAML."""

import hashlib
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb

MAX_LENGTH = 2000

_SIGNS = str.maketrans(
    {
        **{"ŷ": "y_hat", "\u0304": "_mean", "Σ": "sum", "∝": "~", "·": "*", "−": "-", "±": "+-"},
        **{"²": "^2", "ᵀ": "^T ", "⁻": "^-", "¹": "1", "←": "<-", "×": "x", "–": "-"},
        **{"Θ": "Theta", "Γ": "Gamma", "Ω": "Omega", "β": "beta", "γ": "gamma", "η": "eta"},
        **{"λ": "lambda", "μ": "mu", "ω": "omega", "α": "alpha", "⟨": "<", "⟩": ">"},
    }
)
"""Replacements of formula signs by ASCII letters."""
MAX_JSON, MAX_YAML = 2**22, 2**16
_KINDS = {"d": "a folder", "p": "a pipe", "s": "a socket"}
"""Kinds of files by the first letter of `ls -l`."""
MACHINE = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
TEMPORARY = re.compile(r"\.(.+)\.([0-9a-f]{6})-(\d+)-[0-9a-f]{8}\.tmp")
"""Name of a temporary file: the final name, the machine and the process that writes it."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, the rule and the value."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NotUnderstoodError(CheckpointError):
    """No reading of a file gives the recorded predictions; the message says what would."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turns errors raised inside into a one-line CheckpointError that names the file, unless they
    name one already."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({one_line(error)}).") from None
    except RecursionError:
        raise CheckpointError(f"{file}: cannot be read (nested too deeply).") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def nothing_at(path: Path) -> CheckpointError:
    """Error for a path without a file, or for an unknown model name."""
    from mechinterp.checkpoints.shipped import bundled_names

    rule = f"{path}: a checkpoint is a folder with config.json and model.safetensors"
    if path.name != str(path):
        return CheckpointError(f"{rule}; this does not exist.")
    return CheckpointError(
        f"{rule}, or a file; this does not exist, and is not the name of a model in this package "
        f"({', '.join(bundled_names())}; a clone of the repository has all trained models)."
    )


def printable(text: str) -> str:
    r"""The text on one line of at most 2000 characters, with non-printable characters escaped.

    Example:
        >>> printable("a\x1b[2J\n")
        'a\\x1b[2J\\n'
    """
    escaped = visible(text[: MAX_LENGTH + 1]).replace("\n", r"\n")
    return escaped if len(escaped) <= MAX_LENGTH else escaped[: MAX_LENGTH - 3] + "..."


def spelled(text: str, encoding: str | None) -> str:
    """The text with formula signs replaced by letters if a stream's encoding lacks them.

    Example:
        >>> spelled("ŷ = x̄·x, 1 ± 0.1 y²", "ascii")
        'y_hat = x_mean*x, 1 +- 0.1 y^2'
    """
    lacking = {
        sign: letters
        for sign, letters in _SIGNS.items()
        if not chr(sign).encode(encoding or "utf-8", "ignore")
    }
    return text.translate(lacking)


def visible(text: str) -> str:
    r"""The text with non-printable characters escaped, except line ends.

    Everything that is printed goes through here: file names can contain control sequences that move
    the cursor or reverse the writing direction.
    Example:
        >>> print(visible("a\x1b[2J\nb"))
        a\x1b[2J
        b
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(error: BaseException) -> str:
    """Message of an external exception on one line; for system errors without the error number."""
    if isinstance(error, OSError) and error.strerror:
        named = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{named}"
    return " ".join(str(error).split()) or type(error).__name__


def with_place(error: BaseException) -> str:
    """Kind and message of an external exception on one line, with the file and line that raised it."""
    *_, last = extract_tb(error.__traceback__)
    said = one_line(error).removesuffix(".")
    return f"{type(error).__name__}: {said} ({Path(last.filename).name}, line {last.lineno})"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk and rename it to `path`.

    A file at `path` is replaced: the caller must know that it may be."""
    with filled(path, write) as temporary:
        os.replace(temporary, path)


def write_new(path: Path, write: Callable[[Path], object]) -> None:
    """As `write_atomically`, but nothing may exist at `path`, not even a broken link.

    Raises:
        CheckpointError: If something exists there, also if it appears during the writing.
    """
    with filled(path, write) as temporary:
        link_new(temporary, path)


def delete_leftovers(folder: Path, ours: Callable[[str], bool]) -> None:
    """Delete temporary files of ended processes on this machine, if `ours` accepts the final name."""
    for file in folder.iterdir():
        if leftover := TEMPORARY.fullmatch(file.name):
            name, machine, process = leftover.groups()
            if ours(name) and machine == MACHINE and not _runs(int(process)):
                file.unlink(missing_ok=True)


def size_of(file: Path) -> int:
    """Size of a regular file in bytes. Every read checks this first, because reading a pipe would
    block.

    Raises:
        CheckpointError: If it is a folder, a pipe, a socket or a device.
        OSError: If it does not exist or cannot be accessed.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.filemode(status.st_mode)[0], "a device")
        raise CheckpointError(f"{file}: must be a regular file, got {kind}.")
    return status.st_size


def read_json(file: Path) -> object:
    """Content of a JSON file.

    Raises:
        CheckpointError: If it cannot be read, is larger than 4 MB or nested too deeply.
    """
    with readable(file, "JSON", MAX_JSON, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))


def read_yaml(file: Path) -> object:
    """Content of a YAML file, with all numbers as text.

    Raises:
        CheckpointError: If it cannot be read or is larger than 64 kB, also with its aliases written out.
    """
    import yaml

    with readable(file, "YAML", MAX_YAML, ValueError, yaml.YAMLError):
        # This loader makes texts, lists and dictionaries only.
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        if not _fits(document, MAX_YAML):
            raise ValueError(f"more than {MAX_YAML} characters with all aliases written out")
        return document


def _fits(document: object, most: int) -> bool:
    """True if the texts, lists and dictionaries of a document have at most this many characters, 1 for a list or an empty
    text; an alias counts each time."""
    size, ahead = 0, [document]
    while ahead and size <= most:
        value = ahead.pop()
        size += max(1, len(value)) if isinstance(value, str) else 1
        if isinstance(value, dict):
            ahead += [*value, *value.values()]
        elif isinstance(value, list):
            ahead += value
    return size <= most


@contextmanager
def readable(file: Path, kind: str, most: int | None, *faults: type[Exception]) -> Iterator[None]:
    """Refuses special and too large files, and turns errors during reading into a one-line
    CheckpointError."""
    known: tuple[type[Exception], ...] = (OSError, *faults)
    try:
        size = size_of(file)
        if most is not None and size > most:
            raise CheckpointError(f"{file}: must be at most {most} bytes, got {size}.")
        yield
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{file}: not a readable {kind} file (nested too deeply).") from None
    except known as error:
        reason = one_line(error).removesuffix(".") if os.path.lexists(file) else "does not exist"
        raise CheckpointError(f"{file}: not a readable {kind} file ({reason}).") from None


@contextmanager
def writing(path: Path, *faults: type[Exception]) -> Iterator[None]:
    """Turns errors during writing into a one-line CheckpointError.

    Args:
        faults: Errors of the writer, in addition to those of the system.
    Raises:
        CheckpointError: If writing fails.
    """
    known: tuple[type[Exception], ...] = (OSError, *faults)
    try:
        yield
    except CheckpointError:
        raise
    except known as error:
        raise CheckpointError(f"{path}: cannot be written ({one_line(error)}).") from None


@contextmanager
def filled(path: Path, write: Callable[[Path], object]) -> Iterator[Path]:
    """A temporary file beside a path, filled and flushed to disk; then the folder is flushed.

    Raises:
        OSError: If it cannot be written; the error names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{MACHINE}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name}.{mark}.tmp")
    try:
        try:
            write(temporary)
            _flush(temporary)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        yield temporary
    finally:
        with suppress(OSError):  # a read-only file system refuses this, too
            temporary.unlink(missing_ok=True)
    _flush(path.parent)


def link_new(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name, which nothing may have.

    Raises:
        CheckpointError: If something exists there.
    """
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            # A file system without hard links: create the file exclusively, then replace it.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.replace(temporary, path)
    except FileExistsError:
        raise CheckpointError(f"{path}: already exists; it is not overwritten.") from None


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
