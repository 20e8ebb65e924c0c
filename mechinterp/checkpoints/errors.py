"""The one error of reading and writing checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, the rule and the value."""


def one_line(error: Exception) -> str:
    """The message of somebody else's exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__
