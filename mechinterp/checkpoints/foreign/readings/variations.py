"""Values of a reading's choices that recorded predictions can decide between."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

from mechinterp.checkpoints.foreign.options import COLUMNS, SIGNS
from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.choices import BASES, FINER_BASES
from mechinterp.checkpoints.foreign.readings.recorded import Recording
from mechinterp.config.model import ACTIVATIONS, LAYOUTS, MLP_NORM, NORMS

_SCORES = ("softmax", "linear/L", "linear")
"""Scores that are tried; others must be stated."""
MOST_LAYERS = 3
"""Number of layers up to which a model may run through them several times; larger values try more readings."""
Groups = list[list[Tried]]
"""Choices that belong together, with their possible values, the most usual first."""


def possible(case: Case, recording: Recording, closed: Collection[str] = ()) -> Groups:
    """Values of a reading's choices that neither the file nor the user states.

    Args:
        closed: Names of further choices that are not varied.
    """
    tried, parts = case.tried, case.parts
    fixed = {**case.source.given, **{name: tried[name] for name in closed if name in tried}}
    plain: dict[str, Sequence] = {
        "columns": COLUMNS if tried.get("layout") != "in_turn" else (tried["columns"],),
        "sign": SIGNS,
        "attend_to_self": (True, False),
        "output_column": case.source.choices.get("output_column", ()),
        # In one layer that runs once only the query's keys count; `_passes` has the other cases.
        "context_keys": (False, True) if len(parts.layers) > 1 or "passes" in closed else (),
        "layout": LAYOUTS if parts.has("W_in") else (),
        "activation": ACTIVATIONS
        if len(case.source.choices.get("activation", ())) > 1
        or "activation" in case.source.form.assumed
        else (),
        "residual": case.source.choices.get("residual", ()),
    }
    groups: Groups = []
    for name, values in plain.items():
        if name in tried and name not in fixed:
            every = dict.fromkeys((tried[name], *values))
            groups.append([{name: value} for value in every])
    every_group = [*groups, _passes(case), _scores(case, recording), _norms(case), _positions(case)]
    kept = [[each for each in values if _fits(each, fixed, case)] for values in every_group]
    return [values for values in kept if len(values) > 1]


def _fits(change: Tried, fixed: Mapping[str, object], case: Case) -> bool:
    """False if a change contradicts what is stated or shown."""
    return all(
        fixed.get(name, value) == value for name, value in change.items() if name in case.tried
    )


def _passes(case: Case) -> list[Tried]:
    """Numbers of runs through the layers; for one layer also which keys a second run reads."""
    tried, n_layers = case.tried, len(case.parts.layers)
    if "passes" not in tried or "passes" in case.source.given or n_layers > MOST_LAYERS:
        return []
    names = ("passes", "context_keys") if n_layers == 1 else ("passes",)
    own: Tried = {name: tried[name] for name in names}
    rows = [(1, False), *product((2, 3, 4), (False, True))]
    changes = [own, *(dict(zip(names, row, strict=False)) for row in rows)]
    return _once(changes)


def _once(changes: Sequence[Tried]) -> list[Tried]:
    """The changes, each once, in their order."""
    return [each for i, each in enumerate(changes) if each not in changes[:i]]


def _scores(case: Case, recording: Recording) -> list[Tried]:
    """Scores with their factors; linear ones also with a fixed factor 1/L in place of the number of keys."""
    parts, tried = case.parts, case.tried
    scales = dict.fromkeys((tried["scale"], None, 1.0, 1 / parts.d_head, parts.width**-0.5))
    changes: list[Tried] = []
    for score in dict.fromkeys((tried["score"], *_SCORES)):
        changes += [{"score": score, "scale": scale} for scale in scales]
    if tried["score"] == "linear/L":
        factor, keys = case.scale, recording.length + (tried["attend_to_self"] is True)
        changes.append({"score": "linear", "scale": factor / keys})
    return changes


def _norms(case: Case) -> list[Tried]:
    """Places and kinds of norms."""
    parts, tried = case.parts, case.tried
    if "norm" not in tried:
        return []
    of_mlps = parts.has("ln2.w") and not parts.has("ln1.w")
    places: tuple[str | None, ...] = (MLP_NORM,) if of_mlps else NORMS
    if of_mlps or parts.has("ln1.w"):
        kinds = (False, True) if parts.bare_norms else (False,)
        rest: list[Tried] = []
    else:
        kinds = (False, True)
        rest = [{"norm": None, "rms_norm": False}]
    own: Tried = {"norm": tried["norm"], "rms_norm": tried["rms_norm"]}
    changes: list[Tried] = [
        own,
        *rest,
        *({"norm": p, "rms_norm": k} for p, k in product(places, kinds)),
    ]
    return _once(changes)


def _positions(case: Case) -> list[Tried]:
    """Kinds of positions that leave no trace in a file."""
    parts, tried = case.parts, case.tried
    names = ("positions", "rotary_base", "rotary_adjacent_pairs")
    own: Tried = {name: tried[name] for name in names if name in tried}
    changes: list[Tried] = [own, {"positions": "none"}] if own["positions"] != "none" else [own]
    if parts.has("pos_embed.W_pos"):
        return changes
    if parts.has("W_in"):
        changes += [{"positions": "sinusoidal"}, {"positions": "sinusoidal_halves"}]
    if case.source.form.turns and not parts.merged and parts.d_head % 2 == 0:
        finer = FINER_BASES if own["positions"] == "rotary" else BASES
        bases = [own["rotary_base"]] if "rotary_base" in case.source.given else finer
        changes += [
            {"positions": "rotary", "rotary_base": base, "rotary_adjacent_pairs": adjacent}
            for base in bases
            for adjacent in (False, True)
        ]
    return changes


def usual_first(groups: Groups) -> list[Tried]:
    """All combinations of choices, those with the fewest unusual values first."""
    rows = product(*(list(enumerate(values)) for values in groups))
    ordered = sorted(rows, key=lambda row: sum(number > 0 for number, _ in row))
    return list(merged(tuple(value for _, value in row) for row in ordered))


def merged(rows: Iterable[tuple[Tried, ...]]) -> Iterator[Tried]:
    """The changes of each row as one change."""
    for row in rows:
        yield {name: value for each in row for name, value in each.items()}
