"""Choices that names and shapes of a file leave open, with the values that are tried for each."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from itertools import product

from mechinterp.checkpoints.foreign.options import COLUMNS, JOINS, SIGNS, Hints, stated_or_given
from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.tensors.formats import BARE, Format
from mechinterp.checkpoints.foreign.tensors.names import ROTARY, Tensors
from mechinterp.checkpoints.foreign.tensors.parts import Parts
from mechinterp.config.model import LAYOUTS, MLP_NORM, NORMS

DOUBTED: dict[str, tuple[str | bool, ...]] = {
    "columns": COLUMNS,
    "sign": SIGNS,
    "norm": NORMS,
    "layout": LAYOUTS,
    "attend_to_self": (True, False),
}
"""Choices that a format fixes by convention, but names and shapes do not show."""
CAUSAL = {"attend_to_self": True, "context_keys": False}
"""Mask of tokens x and y in turn, unless another is stated."""
STATED = (*JOINS, "norm_eps", "attend_to_self", "score", "rotary_base", "rotary_adjacent_pairs")
"""Settings of a file that fix a choice."""
ROTARY_BASE = 10000.0
REFINED: tuple[Tried, ...] = (
    {"positions": "rotary", "rotary_base": ROTARY_BASE, "rotary_adjacent_pairs": False},
    {"positions": "rotary", "rotary_base": ROTARY_BASE, "rotary_adjacent_pairs": True},
    {"positions": "sinusoidal_halves"},
    {"rms_norm": True},
    {"rotary_adjacent_pairs": True},
    {"norm": "before"},
    {"norm": "before", "rms_norm": True},
)
"""Choices that leave no trace in names and shapes, tried on the best readings."""
REFINED_NAMES = {*(name for change in REFINED for name in change), "scale", "activation"}
PLAIN = ("none", False, None)
"""Values of these choices that are no refinement."""
BASES = (100.0, 1000.0, ROTARY_BASE)
"""Bases of rotary positions, tried on variations of the best reading."""
FINER_BASES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, ROTARY_BASE, 30000.0, 1e5, 5e5, 1e6)
"""Bases of which the neighbours of the best one so far are tried as well."""
Choices = Mapping[str, tuple]


def given_choices(hints: Hints, settings: Mapping[str, object]) -> dict[str, object]:
    """Choices that the user or the file's settings state.

    Raises:
        ValueError: If they contradict each other.
    """
    choices = {name: settings[name] for name in STATED if name in settings}
    choices |= hints.model or {}
    if choices.get("norm") == "none":
        choices["norm"] = None
    stated = ("score", "scale", "columns", "attend_to_self", "sign", "orientation", "output_column")
    for name in stated:
        if (value := getattr(hints, name)) is not None:
            choices[name] = stated_or_given(name, choices.get(name), value)
    return choices


def rotary_of(tensors: Tensors) -> dict[str, object]:
    """Rotary positions and their base, if the file has a table of their angles; else empty."""
    tables = [name for name in tensors if ROTARY.fullmatch(name)]
    if not tables:
        return {}
    found: dict[str, object] = {"positions": "rotary"}
    for name in tables:
        turns = tensors[name]
        if name.endswith("inv_freq") and turns.ndim == 1 and len(turns) > 1 and 0 < turns[1] < 1:
            found["rotary_base"] = float(turns[1].double() ** -len(turns))
    return found


def choices_of(parts: Parts, form: Format, given: Mapping[str, object], hints: Hints) -> Choices:
    """Choices with their possible values, the most common first; a single value if the choice is
    fixed.

    Raises:
        ValueError: If the user contradicts what the format fixes.
    """
    tries = _of_attention(form) if parts.alone else _of_layers(parts, form, given)
    tries["score_slope"] = (hints.score_slope or 1.0,)
    if not parts.has("unembed.W_U"):
        tries["output_column"] = _output_columns(parts, hints)
    elif hints.output_column is not None:
        column = hints.output_column
        raise ValueError(f"output_column needs a file without a read-out, got {column}.")
    tries |= {n: values for n, values in form.tries.items() if n in tries and len(tries[n]) > 1}
    closed = {**form.assumed, **form.fixed}.items()
    tries |= {n: (value,) for n, value in closed if n in tries or n == "norm_eps"}
    if given.get("positions") == "rotary":
        tries |= {"rotary_adjacent_pairs": (False,), "rotary_base": (ROTARY_BASE,)}
    for name, value in given.items():
        if name not in (*tries, "norm_eps"):
            continue
        fixed = form.fixed.get(name, value)
        if name == "scale" and fixed is None:
            fixed = parts.d_head**-0.5
        if name not in DOUBTED or name == "attend_to_self":
            value = stated_or_given(name, fixed, value)  # type: ignore[type-var]
        tries[name] = (value,)
    return tries


def _output_columns(parts: Parts, hints: Hints) -> tuple[int | None, ...]:
    """Entries of the output that may be the first of the prediction; None: the entry of y.

    If columns of positions follow (x, y), code reads the entry of y or the last entry.
    """
    last, column = parts.written - (hints.d_y or 1), hints.output_column
    if column is not None and parts.written < parts.width:
        got = f"one that writes {parts.written} of {parts.width} entries"
        raise ValueError(f"output_column needs a layer that writes whole tokens, got {got}.")
    if column is not None and column > last:
        raise ValueError(f"output_column must lie in 0 to {last}, got {column}.")
    wide = None not in (hints.d_x, hints.d_y)
    wide = wide and (hints.d_x or 0) + (hints.d_y or 0) < parts.d_token
    return (None, last) if wide and parts.written == parts.width else (None,)


def _of_attention(form: Format) -> dict[str, tuple[object, ...]]:
    bare = form is BARE
    return {
        "score": ("linear", "linear/L", "softmax") if bare else ("softmax", "linear/L"),
        "scale": (1.0, None) if bare else (None, 1.0),
        "columns": COLUMNS,
        "attend_to_self": (False, True),
        "sign": SIGNS,
        "positions": ("none",),
    }


def _of_layers(
    parts: Parts, form: Format, given: Mapping[str, object]
) -> dict[str, tuple[object, ...]]:
    normed, mlps = parts.has("ln1.w"), parts.has("mlp.W_in")
    read_in, bare = parts.has("W_in"), not parts.has("unembed.W_U")
    of_mlps = mlps and parts.has("ln2.w")
    plain, final = not (normed or mlps), parts.has("ln_final.w")
    bent = mlps and any(bool(layer["mlp.W_in"].any()) for layer in parts.layers)
    several = len(parts.layers) > 1 or given.get("passes", 1) != 1
    open_positions = read_in and not plain and not parts.has("pos_embed.W_pos")
    return {
        "norm": ("before", "after") if normed else (MLP_NORM if of_mlps else None,),
        "activation": ("relu", "gelu") if bent or parts.has("W_read") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        # In a single layer that runs once only the query matters, and it attends to the whole
        # context in both cases.
        "context_keys": (False, True) if several else (False,),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (None, 1.0) if plain and parts.d_head > 1 else (None,),
        "residual": (True, False) if len(parts.layers) == 1 and not (normed or final) else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "passes": (1,),
        "rms_norm": (False,),
        "columns": COLUMNS[:1],
        "sign": SIGNS if bare else SIGNS[:1],
    }


def combinations(choices: Choices, given: Mapping[str, object]) -> Iterator[Tried]:
    """Every combination of choices that is common, or was stated."""
    for values in product(*choices.values()):
        chosen: dict[str, object] = dict(zip(choices, values, strict=True))
        if _is_usual(chosen, choices, given):
            yield chosen  # type: ignore[misc]


def _is_usual(chosen: Mapping[str, object], choices: Choices, given: Mapping[str, object]) -> bool:
    """True if a combination of choices is common, or was stated."""
    if "layout" not in chosen:
        # Only softmax is tried with a query that attends to itself; the published linear code does
        # so too.
        own = chosen["score"] != "softmax" and len(choices["attend_to_self"]) > 1
        return not own or chosen["attend_to_self"] is (choices["score"][0] == "linear")
    odd = [n for n, value in CAUSAL.items() if chosen[n] != value and n not in given]
    if chosen["layout"] == "in_turn" and any(len(choices[n]) > 1 for n in odd):
        return False
    numbered = chosen["positions"] == "sinusoidal" and chosen["context_keys"] is True
    return not numbered or {"positions", "context_keys"} <= given.keys()


def refinements(chosen: Tried, parts: Parts, form: Format, closed: Collection[str]) -> list[Tried]:
    """Changes of a reading to rotary positions or RMS norms.

    Several runs through the layers are not tried: every further run continues a descent, so that more runs always look better.

    Args:
        closed: Names of choices that the file or the user states.
    """
    turns = form.turns and not parts.merged and not parts.has("pos_embed.W_pos")
    possible = {
        "positions": turns,
        "rms_norm": parts.bare_norms,
        "rotary_adjacent_pairs": chosen.get("positions") == "rotary",
        "norm": bool(chosen.get("residual")) and not parts.has("ln1.w"),
    }
    numbered = parts.has("W_in") and not parts.has("pos_embed.W_pos")
    # Linear scores of a wrong size can predict better than softmax scores of the right one.
    possible["scale"] = chosen["score"] == "softmax" and parts.d_head > 1
    scales = [1 / parts.d_head]
    if "layout" in chosen and parts.d_head != parts.width:
        scales.append(parts.width**-0.5)
    return [
        change
        for change in (*REFINED, *({"scale": scale} for scale in scales))
        for name in list(change)[:1]
        if possible[name] and chosen.get(name) in PLAIN and name not in closed
        if numbered or change.get(name) != "sinusoidal_halves"
    ]


def near_values(chosen: Tried, parts: Parts, closed: Collection[str]) -> dict[str, tuple]:
    """Less common values of choices, tried on variations of the best reading only.

    Args:
        closed: Names of choices that the file or the user states.
    """
    values: dict[str, tuple] = {}
    if "activation" in chosen and parts.has("mlp.W_in"):
        values["activation"] = ("silu", "tanh")
    if chosen.get("positions") == "rotary":
        at = bisect_left(FINER_BASES, float(chosen["rotary_base"] or 0))
        values["rotary_base"] = (*BASES, *FINER_BASES[max(at - 1, 0) : at + 2])
    return {name: more for name, more in values.items() if name not in closed}
