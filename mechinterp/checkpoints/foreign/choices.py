"""What names and shapes leave open, as choices with what each can be, the most usual first."""

from collections.abc import Iterator, Mapping
from itertools import product

from mechinterp.checkpoints.foreign.formats import BARE, CAUSAL, Format
from mechinterp.checkpoints.foreign.options import COLUMNS, JOINS, SIGNS, Hints, settle
from mechinterp.checkpoints.foreign.parsed import Parts
from mechinterp.checkpoints.foreign.readings import Said
from mechinterp.config.model import LAYOUTS, NORMS

DOUBTED: dict[str, tuple[str | bool, ...]] = {
    "columns": COLUMNS,
    "sign": SIGNS,
    "norm": NORMS,
    "layout": LAYOUTS,
    "attend_to_self": (True, False),
}
"""What a format settles by convention, and names and shapes do not say."""
SETTINGS = {
    "activation": ("activation_function", "activation"),
    "norm_eps": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    **{name: (name,) for name in (*JOINS, "attend_to_self") if name != "activation"},
}
"""Settings beside weights that state a choice."""
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings of GPT-2 that would make it another model."""
Choices = Mapping[str, tuple[object, ...]]


def given_choices(hints: Hints, settings: Mapping[str, object]) -> dict[str, object]:
    """What the reader or a file beside the weights says of choices.

    Raises:
        ValueError: If it contradicts what the format settles, or settings are those of another model.
    """
    for key, value in ONLY.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{key} must be {value}, got {settings[key]!r}.")
    beside = {
        name: next((settings[k] for k in keys if k in settings), None)
        for name, keys in SETTINGS.items()
    }
    if isinstance(first := settings.get("norm_first"), bool):
        beside["norm"] = "before" if first else "after"
    beside |= hints.model or {}
    choices = {name: value for name, value in beside.items() if value is not None}
    stated = ("score", "scale", "columns", "attend_to_self", "sign", "orientation", "output_column")
    for name in stated:
        if (value := getattr(hints, name)) is not None:
            choices[name] = settle(name, choices.get(name), value)
    return choices


def choices_of(parts: Parts, form: Format, given: Mapping[str, object], hints: Hints) -> Choices:
    """What names and shapes leave open, with what it can be, the most usual first; one value where it is settled.

    Raises:
        ValueError: If the reader contradicts what the format settles.
    """
    tries = _of_attention(parts, form) if parts.alone else _of_layers(parts, form)
    if not parts.has("read_out.weight"):
        tries["output_column"] = _output_columns(parts, hints)
    elif hints.output_column is not None:
        column = hints.output_column
        raise ValueError(f"output_column is for layers without a read-out, got {column}.")
    tries |= {n: values for n, values in form.tries.items() if n in tries and len(tries[n]) > 1}
    closed = {**form.usual, **form.settled}.items()
    tries |= {n: (value,) for n, value in closed if n in tries or n == "norm_eps"}
    for name, value in given.items():
        if name not in (*tries, "norm_eps") or (name == "norm" and tries[name] == (None,)):
            continue
        fixed = form.settled.get(name, value)
        if name == "scale" and fixed is None:
            fixed = parts.d_head**-0.5
        if name not in DOUBTED or name == "attend_to_self":
            value = settle(name, fixed, value)  # type: ignore[type-var]
        tries[name] = (value,)
    return tries


def _output_columns(parts: Parts, hints: Hints) -> tuple[int | None, ...]:
    """Entries of the output that can be the first of the prediction; None: that of y.

    Where columns of positions stand behind (x, y), code reads the entry of y or the last one.
    """
    last, column = parts.written - (hints.d_y or 1), hints.output_column
    if column is not None and parts.written < parts.width:
        got = f"one that writes {parts.written} of {parts.width} entries"
        raise ValueError(f"output_column is for layers that write whole tokens, got {got}.")
    if column is not None and column > last:
        raise ValueError(f"output_column must lie in 0 to {last}, got {column}.")
    wide = None not in (hints.d_x, hints.d_y)
    wide = wide and (hints.d_x or 0) + (hints.d_y or 0) < parts.d_token
    return (None, last) if wide and parts.written == parts.width else (None,)


def _of_attention(parts: Parts, form: Format) -> dict[str, tuple[object, ...]]:
    bare = form is BARE
    return {
        "score": ("linear", "linear/L", "softmax") if bare else ("softmax", "linear/L"),
        "scale": (1.0, None) if bare else (None, 1.0),
        "columns": COLUMNS,
        "attend_to_self": (False, True),
        "sign": SIGNS,
    }


def _of_layers(parts: Parts, form: Format) -> dict[str, tuple[object, ...]]:
    normed, mlps = parts.has("norm1.weight"), parts.has("mlp_in.weight")
    read_in, bare = parts.has("read_in.weight"), not parts.has("read_out.weight")
    plain, final = not (normed or mlps), parts.has("final_norm.weight")
    bent = mlps and any(bool(layer["mlp_in.weight"].any()) for layer in parts.layers)
    open_positions = read_in and not plain and not parts.has("positions.weight")
    return {
        "norm": ("before", "after") if normed else (None,),
        "activation": ("relu", "gelu") if bent or parts.has("read_mlp.weight") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        # In one layer the query alone matters, which reads the whole context either way.
        "context_only": (False, True) if len(parts.layers) > 1 else (False,),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (None, 1.0) if plain and parts.d_head > 1 else (None,),
        "residual": (True, False) if len(parts.layers) == 1 and not (normed or final) else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "columns": COLUMNS[:1],
        "sign": SIGNS if bare else SIGNS[:1],
    }


def combinations(choices: Choices, given: Mapping[str, object]) -> Iterator[Said]:
    """Every combination of choices that people use, or that was said."""
    for values in product(*choices.values()):
        chosen: dict[str, object] = dict(zip(choices, values, strict=True))
        if _is_usual(chosen, choices, given):
            yield chosen  # type: ignore[misc]


def _is_usual(chosen: Mapping[str, object], choices: Choices, given: Mapping[str, object]) -> bool:
    """Whether a way to read and join the parts is one that people use, or was said."""
    if "layout" not in chosen:
        # Only softmax is tried with the query among its keys; the published linear code has it.
        own = chosen["score"] != "softmax" and len(choices["attend_to_self"]) > 1
        return not own or chosen["attend_to_self"] is (choices["score"][0] == "linear")
    odd = [n for n, value in CAUSAL.items() if chosen[n] != value and n not in given]
    if chosen["layout"] == "in_turn" and any(len(choices[n]) > 1 for n in odd):
        return False
    numbered = chosen["positions"] == "sinusoidal" and chosen["context_only"] is True
    return not numbered or {"positions", "context_only"} <= given.keys()
