"""The error of reading and writing checkpoints, and texts that are safe to print."""

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


SIGNS = str.maketrans(
    {
        **{"ŷ": "y_hat", "\u0304": "_mean", "Σ": "sum", "∝": "~", "·": "*", "−": "-", "±": "+-"},
        **{"²": "^2", "ᵀ": "^T ", "⁻": "^-", "¹": "1", "←": "<-", "×": "x", "–": "-"},
        **{"Θ": "Theta", "Γ": "Gamma", "Ω": "Omega", "β": "beta", "γ": "gamma", "η": "eta"},
        **{"λ": "lambda", "μ": "mu", "ω": "omega", "α": "alpha", "⟨": "<", "⟩": ">"},
    }
)
"""Replacements of formula signs by ASCII letters."""


def spelled(text: str, encoding: str | None) -> str:
    """The text with formula signs replaced by letters if a stream's encoding lacks them.

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


def one_line(error: Exception) -> str:
    """Message of an external exception on one line; for system errors without the error number."""
    if isinstance(error, OSError) and error.strerror:
        named = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{named}"
    return " ".join(str(error).split()) or type(error).__name__
