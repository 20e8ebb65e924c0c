"""Known answers about a model of the suite."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

KINDS = ("in", "out", "zero", "mean", "resample")
"""Replacements of the output of a head: "in" is the clean value in a run on the corrupted prompts (denoising), "out" the
corrupted value in a run on the clean prompts (noising). "zero", "mean" and "resample" replace it in a run on the clean
prompts by zero, by its mean over the prompts, or by its value on another prompt."""
MOST_SUBSETS = 12
"""Largest number of heads of a model whose subsets are all known."""


@dataclass(frozen=True, eq=False)
class Known:
    """A known answer."""

    value: Any
    how: str
    """"proved", "computed exactly" or "by construction"."""
    error: float = 0.0
    """Largest difference between two ways of computing the value, in its unit; 0 if nothing was computed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth:
    """Known answers about a model; None where an answer is not known.

    An effect is the change of the metric on the 32 pairs of prompts of the entry, in y^2. The metric is minus the squared
    distance to the model's own prediction on the clean prompts, mean over prompts.
    """

    edges: Known | None = None
    """Version 1: effect of each edge between two heads, patched in alone: an array [input, layer, head, later_layer,
    later_head]; NaN where there is no edge."""
    heads: Known | None = None
    """Version 1: effect of each head, patched in alone: an array [layer, head]."""
    shapley: Known | None = None
    """Version 1: Shapley value of each head of one layer for the excess risk, in y^2: an array [layer, head]."""
    edges_in: Known | None = None
    """Effect of each edge of `Entry.edges()` that alone carries the clean value in a run on the corrupted prompts."""
    edges_out: Known | None = None
    """Effect of each edge that alone carries the corrupted value in a run on the clean prompts."""
    heads_in: Known | None = None
    """Effect of each head patched in alone: an array [layer, head]. So are all truths of heads below."""
    heads_out: Known | None = None
    """Effect of each head patched out alone."""
    heads_zero: Known | None = None
    """Effect of each head set to zero alone."""
    heads_mean: Known | None = None
    """Effect of each head set to its mean over the clean prompts, by position, alone."""
    heads_resample: Known | None = None
    """Effect of each head set to its value on the neighbouring prompt (0 and 1 change places, 2 and 3, ...), alone."""
    subsets_in: Known | None = None
    """Effect of each set of heads patched in: an array [2^heads]. Bit i of the index stands for head i, counted from
    layer 0 on; index 0 is the empty set. Known for at most 12 heads."""
    subsets_out: Known | None = None
    """Effect of each set of heads patched out."""
    shapley_in: Known | None = None
    """Shapley value of each head for `subsets_in`."""
    shapley_out: Known | None = None
    """Shapley value of each head for `subsets_out`."""
    shapley_zero: Known | None = None
    """Shapley value of each head for the effects of sets of heads set to zero."""
    shapley_mean: Known | None = None
    """Shapley value of each head for the effects of sets of heads set to their means."""
    shapley_resample: Known | None = None
    """Shapley value of each head for the effects of sets of heads set to their values on the neighbouring prompt."""
    variables: Known | None = None
    """Basis of the subspace that holds each variable of `Entry.variables`, by its name: an array [vector, width]."""
    algorithm: Known | None = None
    """Label, as `name_algorithm` and `classify` give it."""
    learning_coefficient: Known | None = None
    """Local learning coefficient of `Entry.module` for `Entry.loss`."""
    components: Known | None = None
    """Unit vectors of the stream that heads read or write one by one: an array [component, d_model]; signs and order
    have no meaning."""


TRUTH_NAMES = tuple(each.name for each in fields(Truth))


def truth_from(
    document: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray] | None = None
) -> Truth:
    """The truth of an entry from its JSON document, where null stands for NaN.

    Args:
        arrays: Values that the document does not hold, by the name of the answer; for a variable "variables/" and its name.
    """
    known, arrays = {}, arrays or {}
    for name, stated in document.items():
        value = stated["value"] if "value" in stated else arrays.get(name)
        if name == "variables":
            value = {
                key.removeprefix("variables/"): basis
                for key, basis in arrays.items()
                if key.startswith("variables/")
            }
        if isinstance(value, list):
            value = np.array(value, dtype=float)
        known[name] = Known(value, stated["how"], stated["error"])
    return Truth(**known)
