"""The hand-made models that version 2 of the suite adds, by name, and the names of its trained ones."""

from analyses.known.models import Made

TRAINED: tuple[str, ...] = ()


def made_2() -> dict[str, Made]:
    """All further hand-made models, by name."""
    return {}


def trained_2() -> tuple[str, ...]:
    """Trained models beyond those of version 1."""
    return TRAINED
