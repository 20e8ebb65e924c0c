"""Cost of the chains of a local learning coefficient: time and memory, estimated before they run."""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mechinterp.analysis.training.sampler import Chains, LocalLoss

LONG = 600.0
"""Longest drawing without stated chains, in seconds; longer drawing with stated chains gives a warning."""


@dataclass(eq=False)
class Cost:
    """Time of drawing, measured on gradients before the first draw."""

    loss: LocalLoss
    chains: Chains
    stated: bool
    """True if the chains were given: long drawing then gives a warning, else it is refused."""
    parts: Callable[[], Iterable[LocalLoss]]
    """Function that gives losses of parts of the weights, which may be quicker."""
    checked: bool = False

    def check(self) -> None:
        """Warn of long drawing, or refuse it if no chains are stated; the time is measured once.

        Raises:
            ValueError: If it takes more than ten minutes and no chains are stated.
        """
        if self.checked:
            return
        self.checked = True
        seconds = seconds_of(self.loss, self.chains)
        if seconds < LONG:
            return
        count = self.chains.n_gradients * (1 + len(self.chains.other_nbeta))
        entries = self.loss.sampled.split(":")[0]
        takes = f"drawing takes about {seconds / 60:.0f} minutes, {count:,} gradients of {entries} on {self.loss.over}"
        if self.stated:
            warnings.warn(
                f"{takes}; fewer prompts (n_prompts=), entries (weights=) or draws (chains=) take less.",
                stacklevel=4,
            )
            return
        raise ValueError(
            f"{takes}: state chains=Chains(...) (--n-draws) to draw as long{self._shorter()}, or take fewer prompts (n_prompts=)."
        )

    def _shorter(self) -> str:
        """A part of the weights for which drawing takes less than ten minutes; empty if none was found."""
        for part in self.parts():
            seconds = seconds_of(part, part.chains)
            if seconds < LONG:
                entries, _, pattern = part.sampled.partition(": ")
                takes = f"{entries}, about {math.ceil(seconds / 60)} minutes"
                fewer = "" if part.over == self.loss.over else f" on {part.over}"
                return f", or a part of the weights, such as weights={pattern!r}{fewer} ({takes})"
        return ""


def seconds_of(loss: LocalLoss, chains: Chains) -> float:
    """Seconds of drawing, from the time of one gradient of all chains."""
    points = np.repeat(loss.at[None], chains.n_chains, axis=0)
    count = chains.n_gradients * (1 + len(chains.other_nbeta))
    seconds = math.inf
    for _ in range(2):  # the first call may also compile and import
        start = time.perf_counter()
        (loss.in_float32 or loss.function)(points)
        seconds = min(seconds, count * (time.perf_counter() - start))
        if seconds < LONG:
            return seconds
    return seconds
