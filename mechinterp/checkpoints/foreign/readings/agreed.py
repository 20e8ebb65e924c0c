"""Results for a file that leaves settings open: the label on which all its possible readings agree, and a note on the readings
for results that are numbers."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Protocol, TypeVar, runtime_checkable

from mechinterp.checkpoints.foreign.options import flag_of
from mechinterp.checkpoints.foreign.readings.losses import Reading, open_readings


@runtime_checkable
class Labelled(Protocol):
    """A result with a label and the reason for it."""

    @property
    def label(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def relabelled(self, label: str, reason: str) -> Any:
        """The result of the first reading, with the label and the reason of the whole file."""
        ...


L = TypeVar("L", bound=Labelled)


def over_readings(
    source: object, labelled: Callable[[object], L], sizes: tuple[int, int] | None = None
) -> L:
    """Result for a source; of a file that leaves settings open, the result for its first possible reading, with the label
    on which all possible readings agree.

    Args:
        source: A checkpoint, or any other source of an analysis, which has no readings.
        labelled: The analysis, as a function of a source.
        sizes: d_x and d_y of the prompts; readings of other sizes are left out. None: all readings count.
    """
    readings: Sequence[Reading] = getattr(source, "readings", ())
    if not readings:
        return labelled(source)
    fitting = [e for e in readings if sizes in (None, (e.weights.d_x, e.weights.d_y))]
    possible = [each for each in fitting if each.stands]
    # If no reading predicts, one result is enough.
    if not any(each.predicts for each in possible):
        fitting = list(readings)
        possible = fitting[:1]
    results = [labelled(source.under(each)) for each in possible]  # type: ignore[attr-defined]
    # The doubt of a file that predicts is computed where it is shown.
    doubt = "" if fitting[0].predicts else source.doubt  # type: ignore[attr-defined]
    labels = [each.label for each in results]
    label, reason = agreed_label(labels, results[0].reason, fitting, doubt)
    return results[0].relabelled(label, reason)


def agreed_label(
    patterns: Sequence[str], reason: str, readings: Sequence[Reading], doubt: str = ""
) -> tuple[str, str]:
    """Label on which the readings of a file agree; otherwise `undetermined`, with the option that
    decides.

    Args:
        patterns: Labels of the remaining readings, in their order.
        reason: Reason of the first label.
        doubt: Doubt about a file, for readings of which none predicts.
    """
    if not readings[0].predicts:
        return "undetermined", doubt
    possible = [reading for reading in readings if reading.stands]
    if len(set(patterns)) == 1:
        first, *others = dict.fromkeys(str(each.tried.get("score")) for each in possible)
        if patterns[0] == "undetermined" and others:
            reason += (
                f" with score {first}; undetermined with {' and '.join(others)} too; state --score"
            )
        return patterns[0], reason
    labelled = list(zip(patterns, possible, strict=True))
    best = {pattern: reading for pattern, reading in reversed(labelled)}
    named = "; ".join(f"{pattern} for {reading!r}" for pattern, reading in reversed(best.items()))
    apart = [(one, other) for (a, one), (b, other) in combinations(labelled, 2) if a != b]
    why = f"the file does not state {_deciding(apart)}, which decides the label"
    return "undetermined", f"{why}: {named} (loss / loss of predicting 0)"


def _deciding(pairs: Sequence[tuple[Reading, Reading]]) -> str:
    """Options in which the readings of each pair differ; one that differs alone is preferred."""
    differing = [
        {name for name, _ in one.tried.items() ^ other.tried.items()} for one, other in pairs
    ]
    alone = [names for names in differing if len(names) == 1]
    return " and ".join(map(flag_of, sorted(set.union(*(alone or differing)))))


def readings_note(source: object) -> str:
    """Sentence on the reading that numbers without a label belong to, if several readings of a file predict; else empty.

    Args:
        source: A checkpoint, or any other source of an analysis, which has no readings.
    """
    readings = open_readings(getattr(source, "readings", ()))
    possible = [each for each in readings if each.stands and each.predicts]
    if len(possible) < 2:
        return ""
    first, *others = possible
    options = _deciding([(first, other) for other in others])
    return (
        f"The file does not state {options}: the numbers are those of {first!r}; {others[0]!r} predicts too "
        "(loss / loss of predicting 0)."
    )
