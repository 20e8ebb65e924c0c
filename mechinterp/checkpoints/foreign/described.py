"""Checkpoints of a reading: what was assumed, and what is stated, known or proven."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import flag_of
from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.choices import refinements
from mechinterp.checkpoints.foreign.readings.doubts import doubt_of, tied
from mechinterp.checkpoints.foreign.readings.losses import Reading, open_readings
from mechinterp.checkpoints.foreign.readings.proof import Proof
from mechinterp.checkpoints.foreign.settings import Stored
from mechinterp.checkpoints.foreign.tensors.renaming import unused_names
from mechinterp.checkpoints.io.trees import SAVED_TIMES
from mechinterp.config import ExperimentConfig
from mechinterp.fields import flatten

OF_POSITIONS = ("positions", "rotary_base", "rotary_adjacent_pairs")
"""Choices about positions that a single layer of attention has too."""
PLAIN_TRIED: Tried = {"positions": "none", "passes": 1, "rms_norm": False}
"""Plain values of choices that leave no trace in a file."""
UNTRACED = "none (rotary ones leave no trace in a file)"
"""Assumption about positions of which the file has no trace."""
NO_BIASES = "none (ALiBi and sinks leave no trace in a file)"
"""Assumption about terms of the scores that a file does not show."""
MOST_READINGS_SHOWN = 24
"""Number of readings listed in `assumed`; the checkpoint has all."""


def checkpoint_of_case(
    stored: Stored, case: Case, readings: Sequence[Reading], names: Sequence[str]
) -> Checkpoint:
    """Checkpoint of the chosen reading, with what was assumed."""
    weights = case.weights()
    config = ExperimentConfig(task=case.task, model=weights.model)
    values = flatten(config.to_dict())
    assumed = _assumed(case, names, values) | {"step": stored.step}
    if several := open_readings(readings):
        assumed["readings"] = [each.to_document() for each in several[:MOST_READINGS_SHOWN]]
        if open_between := tied(several):
            assumed["undetermined"] = open_between
    if (times := case.source.settings.get(SAVED_TIMES, 1)) != 1:
        assumed["weights"] = f"the last of {times} that were saved"
    if unused := unused_names(stored.tensors, case.source.hints.map or {}):
        assumed["unused"] = unused
    stated, known = _stated_and_known(case, values, assumed)
    return Checkpoint(
        path=stored.file,
        config=config,
        step=stored.step,
        weights=weights,
        format=case.source.form.name,
        assumed=assumed,
        stated=stated,
        known=known,
        readings=readings,
        doubting=partial(doubt_of, case, readings),
    )


def _assumed(case: Case, names: Sequence[str], values: Mapping[str, object]) -> dict[str, object]:
    """Settings of a reading that neither the file nor the user states, by dotted name.

    Args:
        names: Choices in which the readings differ.
        values: All fields of the checkpoint's config.
    """
    form, closed = case.source.form, case.source.closed
    kinds = ("task.", "train.", "seed") if case.parts.alone else ("task.",)
    assumed = {n: v for n, v in values.items() if n.startswith(kinds) and n not in case.known}
    names = [*form.assumed, *names]
    if case.tried["positions"] == "rotary":
        names += OF_POSITIONS
    names += [n for n in PLAIN_TRIED if n in _without_trace(case)]
    not_stated = [n for n in dict.fromkeys(names) if n not in closed and n in case.tried]
    assumed |= {f"model.{name}": case.value_of(name) for name in not_stated if name != "scale"}
    if assumed.get("model.positions") == "none":
        assumed["model.positions"] = UNTRACED
    if base := assumed.get("model.rotary_base"):
        assumed["model.rotary_base"] = f"{base:g} (the loss hardly shows which)"
    if form.turns and case.tried["score"] == "softmax":
        assumed["model.attention_biases"] = NO_BIASES
    if "score" in form.assumed and "score" not in closed:
        assumed["model.score_slope"] = 1.0
    if "scale" not in closed:
        assumed["attn_scale"] = 1 / case.scale
    return {**assumed, **form.beside, **_left_out(case)}


def _stated_and_known(
    case: Case, values: Mapping[str, object], assumed: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Settings that the file or the user states, and those that the format's code or shapes fix."""
    stated: dict[str, object] = {
        f"model.{n}": case.value_of(n) for n in case.source.given if n in case.tried
    }
    stated |= {n: v for n, v in values.items() if n in case.known & case.stated}
    said = assumed.keys() | stated.keys()
    rest = [n for n in case.tried if f"model.{n}" not in said and n != "scale"]
    known = {n: v for n, v in values.items() if n in case.known - case.stated}
    known |= {f"model.{name}": case.value_of(name) for name in rest}
    if "attn_scale" not in assumed and "model.scale" not in stated:
        known["model.scale"] = case.scale
    return stated, known


def _without_trace(case: Case) -> set[str]:
    """Choices that leave no trace in files and may matter for this one: positions, passes, RMS
    norms."""
    refined = refinements({**case.tried, **PLAIN_TRIED}, case.parts, case.source.form, ())
    changed = [item for each in refined for item in each.items()]
    if case.tried.get("residual") and "passes" in case.tried:
        changed.append(("passes", None))
    return {name for name, value in changed if value != PLAIN_TRIED.get(name, value)}


def _left_out(case: Case) -> dict[str, object]:
    """Number of columns of tokens that are not read, and their largest share in the norm of
    queries, keys and values."""
    parts, task = case.parts, case.task
    if case.tried.get("layout") == "in_turn" or task.d_x + task.d_y == parts.d_token:
        return {}
    read = task.d_x + task.d_y
    left_out: dict[str, object] = {"model.position_columns_left_out": parts.d_token - read}
    if not parts.has("W_in"):
        first = [parts.layers[0][f"attn.W_{x}"] for x in "QKV"]
        rest = [t[read:].norm() / t.norm().clamp(min=1e-30) for t in first]
        left_out["model.position_columns_share"] = max(each.item() for each in rest)
    return left_out


def proven_checkpoint(stored: Stored, proof: Proof) -> Checkpoint:
    """Checkpoint of the reading that gives recorded predictions."""
    first, names = proof.cases[0], proof.open
    readings = tuple(
        Reading(
            tried={name: case.value_of(name) for name in names},
            build=case.weights,
            loss=0.0,
            loss_sem=0.0,
            predicts=True,
            ties=True,
            stands=True,
        )
        for case in proof.cases
        if len(proof.cases) > 1
    )
    checkpoint = checkpoint_of_case(stored, first, (), names)
    closed = first.source.closed
    proven = {
        f"model.{name}": first.value_of(name)
        for name in first.tried
        if name not in (*names, "score_slope") and closed.get(name, object()) != first.tried[name]
    }
    proven["predictions"] = proof.in_words
    open_ones = {f"model.{name}" for name in names} | (
        {"attn_scale"} if "scale" in names else set()
    )
    task = {
        n: v for n, v in checkpoint.assumed.items() if n.startswith(("task.", "train.", "seed"))
    }
    kept = {n: v for n, v in checkpoint.assumed.items() if n in open_ones | {"unused"}}
    assumed = {**task, **kept, "step": stored.step}
    if names:
        assumed["undetermined"] = (
            f"the recorded predictions leave open {' and '.join(map(flag_of, names))}: "
            f"{len(readings)} readings give them; predictions for prompts of another length or size may decide (--predictions twice)"
        )
    known = {n: v for n, v in checkpoint.known.items() if n not in proven and n not in open_ones}
    return replace(
        checkpoint, assumed=assumed, known=known, proven=proven, readings=readings, doubting=None
    )
