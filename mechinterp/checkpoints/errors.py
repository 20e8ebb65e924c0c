"""The one error of reading and writing checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, the rule and the value."""
