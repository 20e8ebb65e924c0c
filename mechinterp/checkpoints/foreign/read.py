"""Reading of external files: names become parts, open choices are tried, and the best reading
becomes the checkpoint.

What neither the file nor the user states is assumed, and listed by name in `Checkpoint.assumed`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.candidates import (
    Case,
    Source,
    case_of,
    choices_of,
    combinations,
    given_choices,
    refinements,
    rotary_of,
)
from mechinterp.checkpoints.foreign.formats import BARE, LAYERED, OWN_LAYERS, Format, recognised
from mechinterp.checkpoints.foreign.names import Tensors, is_harmless
from mechinterp.checkpoints.foreign.options import ORIENTATIONS, Hints
from mechinterp.checkpoints.foreign.score import (
    Reading,
    Said,
    doubt_of,
    not_understood,
    tied,
    tried,
)
from mechinterp.checkpoints.foreign.settings import TASK_KEY
from mechinterp.checkpoints.foreign.tensors import Layout, Parts, mapped, of_file, parts_of
from mechinterp.config import ExperimentConfig
from mechinterp.fields import flatten

OF_POSITIONS = ("positions", "rotary_base", "rotary_adjacent_pairs")
"""Choices that a single layer of attention has too."""
PLAIN_SAID: Said = {"positions": "none", "passes": 1, "rms_norm": False}
UNTRACED = "none (rotary ones leave no trace in a file)"
"""Assumption about positions of which the file has no trace."""
NO_BIASES = "none (ALiBi and sinks leave no trace in a file)"
"""Assumption about terms of the scores that a file does not show."""
MOST_SHOWN = 24
"""Number of readings listed in `assumed`; the checkpoint has all."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Tensors of a file whose format is not known yet, with the settings beside it."""

    file: Path
    tensors: Tensors
    settings: Mapping[str, object]
    """Settings of config.json or config.yaml beside the file; empty if there is none."""
    step: int = 0
    """Number of updates of the weights, if the file's name shows it, else 0."""


def read_foreign(run: Sequence[Stored], hints: Hints) -> Checkpoint:
    """Checkpoint of a file, or of the last file of a run; the other files of a run are read in the
    same way.

    Raises:
        CheckpointError: If the tensors fit no format, are not those of a known model, or leave
            too much open.
    Example:
        >>> import torch
        >>> state = torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict()
        >>> read_foreign([Stored(Path("x.pt"), state, {})], Hints(n_heads=2))
        Checkpoint(x.pt: 1 layer of 2 heads with MLPs, d_x=5, context_length=40)
    """
    last = run[-1]
    with of_file(last.file):
        return _read(run, replace(hints, task=_stated_task(last.settings, hints)))


def _stated_task(settings: Mapping[str, object], hints: Hints) -> dict[str, object]:
    """Fields of the task that the file's settings or the user state; the user's come first."""
    task: dict[str, object] = {n: settings[n] for n in ("d_x", "d_y") if n in settings and n not in hints.given}  # fmt: skip
    noise, noise_var = settings.get("noise_std"), settings.get("noise_var")
    if isinstance(noise, float):
        task["noise_var"] = noise**2
    if isinstance(noise_var, float):
        task["noise_var"] = noise_var
    stated = settings.get(TASK_KEY)
    return task | {**(stated if isinstance(stated, Mapping) else {}), **(hints.task or {})}


def _read(run: Sequence[Stored], hints: Hints) -> Checkpoint:
    last = run[-1]
    known_files = []
    for each in run:
        with of_file(each.file):
            known_files.append(recognised(mapped(each.tensors, hints.map or ()), hints))
    form, layout, _ = known_files[-1]
    settings = dict(last.settings)
    # A setting such as norm_first is left over in a model without norms.
    if not any("norm" in piece.part for piece in layout.pieces):
        settings.pop("norm", None)
    given = rotary_of(last.tensors) | given_choices(hints, settings)
    stated_axes = form.fixed.get("orientation", hints.orientation)
    usual_axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    cases: list[Case] = []
    faults: list[ValueError] = []
    for axes in usual_axes if stated_axes is None else (str(stated_axes),):
        try:
            parts = _parts_of_run(run, known_files, axes, hints)[-1]
            form = _own(form, parts, hints)
            choices = choices_of(parts, form, given, hints)
        except ValueError as error:
            faults.append(error)
            continue
        source = Source(form, choices, given, hints, last.settings)
        for chosen in combinations(choices, given):
            try:
                cases.append(case_of(source, parts, {"orientation": axes, **chosen}))
            except ValueError as error:
                faults.append(error)
    if not cases:
        raise faults[0]
    case, readings, names = tried(cases)
    checkpoint = _checkpoint(last, case, readings, names)
    if len(run) == 1:
        return checkpoint
    kept, axes = {}, str(case.said["orientation"])
    for each, parts in zip(run, _parts_of_run(run, known_files, axes, hints), strict=True):
        with of_file(each.file):
            kept[each.step] = replace(case, parts=parts).weights()
    return replace(checkpoint, kept=kept)


def _parts_of_run(
    run: Sequence[Stored],
    known_files: Sequence[tuple[Format, Layout, dict[str, Tensor]]],
    axes: str,
    hints: Hints,
) -> list[Parts]:
    """Parts of every file of a run; all have biases if any file has nonzero ones."""
    every = []
    for each, (form, layout, tensors) in zip(run, known_files, strict=True):
        with of_file(each.file):
            every.append(parts_of(tensors, layout, axes, hints, each.settings, form.wide_heads))
    biases = any(parts.biases for parts in every)
    return [replace(parts, biases=biases) for parts in every]


def _own(form: Format, parts: Parts, hints: Hints) -> Format:
    """Format of a file; if its names fit no format, one that fits its parts."""
    of_layers = [name for name in hints.model or {} if name not in OF_POSITIONS]
    if parts.alone and of_layers:
        raise ValueError(
            f"model ({', '.join(of_layers)}) needs layers with norms or MLPs, got one layer of attention alone."
        )
    if form is not LAYERED or not parts.alone:
        return form
    return OWN_LAYERS if "out.weight" in parts.layers[0] else BARE


def _checkpoint(
    stored: Stored, case: Case, readings: tuple[Reading, ...], names: Sequence[str]
) -> Checkpoint:
    """Checkpoint of the chosen reading, with what was assumed."""
    weights, form, closed = case.weights(), case.source.form, case.source.closed
    config = ExperimentConfig(task=case.task, model=weights.model)
    kinds = ("task.", "train.", "seed") if case.parts.alone else ("task.",)
    values = flatten(config.to_dict()).items()
    assumed = {n: v for n, v in values if n.startswith(kinds) and n not in case.known}
    names = [*form.assumed, *names]
    if case.said["positions"] == "rotary":
        names += OF_POSITIONS
    names += [n for n in PLAIN_SAID if n in _without_trace(case)]
    unsaid = [n for n in dict.fromkeys(names) if n not in closed and n in case.said]
    assumed |= {f"model.{name}": case.value_of(name) for name in unsaid if name != "scale"}
    if assumed.get("model.positions") == "none":
        assumed["model.positions"] = UNTRACED
    if base := assumed.get("model.rotary_base"):
        assumed["model.rotary_base"] = f"{base:g} (the loss hardly shows which)"
    if form.turns and case.said["score"] == "softmax":
        assumed["model.attention_biases"] = NO_BIASES
    if "score" in form.assumed and "score" not in closed:
        assumed["model.score_slope"] = 1.0
    if "scale" not in closed:
        assumed["attn_scale"] = 1 / case.scale
    assumed |= {**form.beside, **_left_out(case), "step": stored.step}
    if readings:
        assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
    if open_between := tied(readings):
        assumed["undetermined"] = open_between
    if readings and not readings[0].predicts:
        assumed |= {"understood": False, "doubt": not_understood(readings)}
    elif doubt := doubt_of(case):
        assumed["doubt"] = doubt
    ignored = [name for name, tensor in stored.tensors.items() if is_harmless(name, tensor.ndim)]
    if ignored and form.name != "transformer-lens":
        assumed["ignored"] = ignored
    named = (form.name, assumed)
    return Checkpoint(stored.file, config, stored.step, weights, *named, readings=readings)


def _without_trace(case: Case) -> set[str]:
    """Choices that leave no trace in files and may matter for this one: positions, passes, RMS
    norms."""
    refined = refinements({**case.said, **PLAIN_SAID}, case.parts, case.source.form, ())
    changed = (item for each in refined for item in each.items())
    return {name for name, value in changed if value != PLAIN_SAID.get(name, value)}


def _left_out(case: Case) -> dict[str, object]:
    """Number of columns of tokens that are not read, and their largest share in the norm of
    queries, keys and values."""
    parts, task = case.parts, case.task
    if case.said.get("layout") == "in_turn" or task.d_x + task.d_y == parts.d_token:
        return {}
    read = task.d_x + task.d_y
    left_out: dict[str, object] = {"model.position_columns_left_out": parts.d_token - read}
    if not parts.has("read_in.weight"):
        first = [parts.layers[0][f"{name}.weight"] for name in ("query", "key", "value")]
        rest = [t[read:].norm() / t.norm().clamp(min=1e-30) for t in first]
        left_out["model.position_columns_share"] = max(each.item() for each in rest)
    return left_out
