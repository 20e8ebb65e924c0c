"""The one error of reading and writing checkpoints, and texts that are safe to show."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LENGTH = 2000


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, the rule and the value."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NotUnderstoodError(CheckpointError):
    """No reading of a file predicts better than 0; the message says what to try."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts the file's name before what is refused inside, unless it names a file already."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def nothing_at(path: Path) -> CheckpointError:
    """The error for a path at which nothing lies, or a name that no model has."""
    from mechinterp.checkpoints.shipped import bundled_names

    rule = f"{path}: a checkpoint is a folder with config.json and model.safetensors"
    if path.name != str(path):
        return CheckpointError(f"{rule}; this does not exist.")
    return CheckpointError(
        f"{rule}, or a file; this does not exist, and is not the name of a model that comes with the package "
        f"({', '.join(bundled_names())}; a clone has all trained ones)."
    )


def printable(text: str) -> str:
    r"""The text on one line of at most 2000 characters, what is not printable written as an escape.

    Example:
        >>> printable("a\x1b[2J\n")
        'a\\x1b[2J\\n'
    """
    escaped = visible(text[: MAX_LENGTH + 1]).replace("\n", r"\n")
    return escaped if len(escaped) <= MAX_LENGTH else escaped[: MAX_LENGTH - 3] + "..."


SIGNS = str.maketrans(
    {
        **{"ŷ": "y_hat", "\u0304": "_mean", "Σ": "sum", "∝": "~", "·": "*", "−": "-", "±": "+-"},
        **{"²": "^2", "ᵀ": "^T ", "⁻": "^-", "¹": "1", "←": "<-", "×": "x", "–": "-"},
        **{"Θ": "Theta", "Γ": "Gamma", "Ω": "Omega", "β": "beta", "γ": "gamma", "η": "eta"},
        **{"λ": "lambda", "μ": "mu", "ω": "omega", "α": "alpha", "⟨": "<", "⟩": ">"},
    }
)
"""Signs of formulas in letters."""


def spelled(text: str, encoding: str | None) -> str:
    """The text with those signs of formulas in letters that a stream's encoding lacks.

    Example:
        >>> spelled("ŷ = x̄·x, 1 ± 0.1 y²", "ascii")
        'y_hat = x_mean*x, 1 +- 0.1 y^2'
    """
    lacking = {
        sign: letters
        for sign, letters in SIGNS.items()
        if not chr(sign).encode(encoding or "utf-8", "ignore")
    }
    return text.translate(lacking)


def visible(text: str) -> str:
    r"""The text in which what is not printable, but for the ends of lines, is written as an escape.

    What is shown goes through here: names of files can hold what moves the cursor or turns the direction of writing.

    Example:
        >>> print(visible("a\x1b[2J\nb"))
        a\x1b[2J
        b
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(error: Exception) -> str:
    """The message of somebody else's exception on one line, of the system's without its number."""
    if isinstance(error, OSError) and error.strerror:
        named = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{named}"
    return " ".join(str(error).split()) or type(error).__name__
