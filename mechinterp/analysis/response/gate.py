"""Gate of names: which algorithms the response of a learner lets `name_algorithm` ask, and where their fits start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.response.frames import KindFrames
from mechinterp.analysis.response.reading import CLEAR_ERRORS, kind
from mechinterp.icl.algorithm import Algorithm, PromptMoments

ALONG = frozenset(
    {"no interaction with forgetting", "forgetting", "online", "recursive least squares"}
)
"""Readings of learners that take the pairs one after another: their weights depend on age."""


@dataclass(frozen=True)
class Gate:
    """Class of a learner, and first scalars of fits."""

    reading: str
    """Class of the first response; see docs/response.md."""
    along: bool
    """True: the learner of every response takes the pairs one after another."""
    context_length: int
    """Number of pairs."""
    starts: Mapping[str, float] = field(default_factory=dict)
    """First values of scalars by name, those that were measured: eta, alpha, gate, c, and penalty = c times the number of
    pairs."""

    def asked(self, algorithms: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
        """Algorithms along the pairs, and those that they contain, if the learner is one; else those for which the pairs are
        a set; all, if none is left."""
        within = {each.contains for each in algorithms if each.along_pairs and self.along}
        chosen = tuple(
            each for each in algorithms if each.along_pairs == self.along or each.label in within
        )
        return chosen or tuple(algorithms)

    def largest_fall(self, alpha: float, sem: float) -> float:
        """Fall of the weight from the newest pair to the oldest, the largest that the error of alpha leaves open.

        Above `FORGETS` the pairs' age matters, as in the response; below, it does not.
        """
        least = max(alpha - CLEAR_ERRORS * sem, 0.0)
        return float(1 - least ** (self.context_length - 1))

    def first_scalars(
        self, algorithms: Sequence[Algorithm], moments: PromptMoments
    ) -> dict[str, Float[np.ndarray, " scalar"]]:
        """First scalars of fits by label, of algorithms without layers that have a measured one; the natural first value
        stands for the others."""
        return {
            str(each.label): np.array(
                [
                    max(self.starts.get(scalar.name, scalar.start(moments)), scalar.lower)
                    for scalar in each.scalars
                ]
            )
            for each in algorithms
            if not each.has_path and any(scalar.name in self.starts for scalar in each.scalars)
        }


def gate_of(found: KindFrames) -> Gate:
    """Gate of a response.

    Example:
        >>> from functools import partial
        >>> from mechinterp import TaskConfig, response
        >>> from mechinterp.icl import ridge
        >>> learner = partial(ridge, penalty=0.5)
        >>> gate = gate_of(response(learner, task=TaskConfig(d_x=3), n_prompts=256))
        >>> gate.reading, gate.along, round(gate.starts["penalty"], 2)
        ('batch', False, 0.5)
    """
    outputs = sorted(set(found.scalars.output)) if "output" in found.scalars else [0]
    readings = [kind(found, output) for output in outputs]
    along = all(reading in ALONG for reading in readings)
    return Gate(readings[0], along, found.context_length, _starts(found, readings[0]))


def _starts(found: KindFrames, reading: str) -> dict[str, float]:
    """First values of scalars, measured on the first response."""
    known = set(found.scalars.name)
    values = {n: found.scalar(n)[0] for n in ("eta", "alpha", "gate", "c") if n in known}
    if reading in ("no interaction with forgetting", "forgetting"):
        newest = found.of_output(found.position).sort_values("age").weight
        values["eta"] = float(newest.iloc[0])
    if "c" in values:
        values["penalty"] = values["c"] * found.context_length
    return {name: value for name, value in values.items() if np.isfinite(value)}
