"""Reading of external files: names become parts, open choices are tried, and the best reading
becomes the checkpoint.

Settings come from the file and from a config beside it (`names.toml` has their spellings). What neither the file nor the
user states is assumed, and listed by name in `Checkpoint.assumed`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
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
from mechinterp.checkpoints.foreign.doubts import doubt_of, tied
from mechinterp.checkpoints.foreign.folded import PER_HEAD, folded, repacked
from mechinterp.checkpoints.foreign.formats import BARE, LAYERED, OWN_LAYERS, Format
from mechinterp.checkpoints.foreign.layout import Layout
from mechinterp.checkpoints.foreign.names import TABLE, Tensors
from mechinterp.checkpoints.foreign.options import JOINS, ORIENTATIONS, PACKINGS, Hints, option
from mechinterp.checkpoints.foreign.parts import Parts, parts_of
from mechinterp.checkpoints.foreign.proof import Proof, prove
from mechinterp.checkpoints.foreign.recognised import recognised
from mechinterp.checkpoints.foreign.recorded import Recording, read_recording, require_one_task
from mechinterp.checkpoints.foreign.refusals import of_file
from mechinterp.checkpoints.foreign.renaming import mapped, unused_names
from mechinterp.checkpoints.foreign.score import (
    LazyReadings,
    Reading,
    Tried,
    better_packing,
    try_cases,
)
from mechinterp.checkpoints.io.files import CheckpointError, naming, read_json, read_yaml
from mechinterp.checkpoints.io.tensor_files import SAVED_TIMES
from mechinterp.checkpoints.native.folder import OWN
from mechinterp.config import ExperimentConfig
from mechinterp.config.model import SCORES
from mechinterp.fields import flatten

TASK_KEY = "mechinterp_task"
"""Key of the task's fields, in the config.json that a `Monitor` writes."""
COUNTS, WORDS, FLAGS, NUMBERS = (
    {name: spellings.split() for name, spellings in TABLE[kind].items()}
    for kind in ("counts", "words", "flags", "numbers")
)
"""Spellings of settings by the kind of their values, from names.toml."""
POSITIONS = {word: name for name, words in TABLE["positions"].items() for word in words.split()}
"""Names of positions, by their spellings."""
ALIASES = {"swish": "silu", "gelu_tanh": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""Other names of activations."""
ONLY = {
    **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    **{"add_cross_attention": False},
}
"""Required values of settings of GPT-2, as other values make another model."""


EMPTY = ("null", "Null", "NULL", "~", "")
"""Texts that mean no value in YAML, whose values are all read as texts."""


def settings_of(path: Path, inside: Mapping[str, object]) -> dict[str, object]:
    """Settings that a file of weights, and config.json or config.yaml beside it, state.

    Args:
        inside: Settings in the file, under any name.
    Raises:
        CheckpointError: If a value is not possible, or two of these places differ.
    """
    stated: dict[str, tuple[object, str]] = {}
    for file, raw in ((path, inside), *_beside(path)):
        with naming(file):
            for name, value in settled(raw).items():
                known, place = stated.setdefault(name, (value, file.name))
                if known != value:
                    raise ValueError(f"{name} must be {known}, as in {place}, got {value}.")
    return {name: value for name, (value, _) in stated.items()}


def _lora_scale(raw: Mapping[str, object]) -> dict[str, object]:
    """Factor on the product of LoRA's matrices, if its config states it."""
    alpha, rank = raw.get("lora_alpha"), raw.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        return {}
    return {"lora_scale": float(alpha) / (rank**0.5 if raw.get("use_rslora") is True else rank)}


def settled(raw: Mapping[str, object]) -> dict[str, object]:
    """Settings under the names of this package; unknown settings are left out.

    If a file states several numbers of heads, they are listed in `several_heads`, a text.

    Raises:
        ValueError: If a value is not possible, or makes another model.
    Example:
        >>> settled({"n_head": 4, "use_rope": True, "lr": 0.1})
        {'n_heads': 4, 'positions': 'rotary'}
    """
    for key, value in ONLY.items():
        if str(raw.get(key, value)).lower() != str(value).lower():
            raise ValueError(f"{key} must be {value}, got {raw[key]!r}.")
    known: dict[str, object] = {TASK_KEY: raw.get(TASK_KEY), **_lora_scale(raw)}
    known[SAVED_TIMES] = raw.get(SAVED_TIMES)
    raw = {_in_snake_case(key): value for key, value in raw.items()} | dict(raw)
    for name, spellings in (COUNTS | WORDS | FLAGS | NUMBERS).items():
        values = [(key, raw[key]) for key in spellings if raw.get(key) is not None]
        read = {key: _value(name, key, value) for key, value in values}
        different = {value for value in read.values() if value is not None}
        if len(different) == 1:
            known[name] = different.pop()
        elif different and name == "n_heads":
            listed = ", ".join(f"{key} = {value}" for key, value in read.items())
            known["several_heads"] = listed
    if known.pop("rotary", None):
        known["positions"] = "rotary"
    if isinstance(first := known.pop("norm_first", None), bool):
        known["norm"] = "before" if first else "after"
    return {name: value for name, value in known.items() if value is not None}


def _in_snake_case(key: str) -> str:
    """A key such as numHeads as num_heads."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()


def _value(name: str, key: str, value: object) -> object:
    """Value of a setting, also from text; None if it has no meaning here."""
    text = str(value).strip().lower()[:80]
    if name in COUNTS:
        least = 2 if name == "n_points" else 1
        whole = not isinstance(value, bool) and text.isdecimal() and len(text) < 10
        if whole and int(text) >= least:
            return int(text)
        if whole or name in ("n_heads", "n_points"):
            raise ValueError(f"{key} must be an integer >= {least}, got {value!r:.42}.")
        return None
    if name in FLAGS:
        if name == "attend_to_self" and text not in ("true", "false"):
            raise ValueError(f"{key} must be true or false, got {value!r:.42}.")
        return {"true": True, "false": False}.get(text)
    if name in NUMBERS:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} must be a number >= 0, got {value!r:.42}.")
        return number
    if not isinstance(value, str):
        return None
    if name == "positions":
        if text not in POSITIONS:
            known = ", ".join(TABLE["positions"])
            raise ValueError(f"{key} must be one of {known}, got {value!r:.42}.")
        return None if POSITIONS[text] == "learned" else POSITIONS[text]
    if name == "activation":
        return ALIASES.get(text, text)
    # "linear" does not decide if scores are divided by the number of keys.
    possible = {"score": set(SCORES) - {"linear"}, **JOINS}[name]
    return text if text in possible else None


def _beside(path: Path) -> list[tuple[Path, Mapping[str, object]]]:
    """Settings in config.json and in config.yaml beside a file: at the top, and under `model`.

    The training's numbers of points and noise are those of the code of Garg et al.
    """
    json_file, yaml_file = path.with_name("config.json"), path.with_name("config.yaml")
    stated: list[tuple[Path, Mapping[str, object]]] = []
    for file, read in ((json_file, read_json), (yaml_file, read_yaml)):
        document = read(file) if file.is_file() else None
        if not isinstance(document, dict) or (file == json_file and OWN & set(document)):
            continue
        points = _within(document, "training", "curriculum", "points", "end")
        noise = _within(document, "training", "task_kwargs", "noise_std")
        model = _within(document, "model")
        trained = {"n_points": points, "noise_std": noise} if read is read_yaml else {}
        for part in (document, model if isinstance(model, dict) else {}, trained):
            stated.append((file, {n: None if v in EMPTY else v for n, v in part.items()}))
    adapter = path.with_name("adapter_config.json")
    document = read_json(adapter) if adapter.is_file() else None
    if isinstance(document, dict) and _lora_scale(document):
        names = ("r", "lora_alpha", "use_rslora")
        stated.append((adapter, {name: document.get(name) for name in names}))
    return stated


def _within(document: object, *names: str) -> object:
    """Entry of nested mappings; None if missing."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


OF_POSITIONS = ("positions", "rotary_base", "rotary_adjacent_pairs")
"""Choices about positions that a single layer of attention has too."""
PLAIN_TRIED: Tried = {"positions": "none", "passes": 1, "rms_norm": False}
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
    recordings = [read_recording(file) for file in hints.recorded]
    if recordings and len(run) > 1:
        raise CheckpointError(
            f"{last.file}: predictions are of one model, got a run of {len(run)}."
        )
    with of_file(last.file):
        return _read(run, replace(hints, task=_stated_task(last.settings, hints)), recordings)


def read_proven(
    tensors: Tensors,
    recordings: Sequence[Recording],
    hints: Hints,
    *,
    shown: Sequence[Tried] = (),
    most: int | None = None,
) -> Checkpoint:
    """Checkpoint of a state dict in memory, by the reading that gives recorded predictions.

        The state dict is copied, so that later edits of it do not count.

        Args:
            recordings: As `recording_of` makes them.
            hints: What is known besides, such as the number of heads and the task.
            shown: Settings that the running module shows; several if it leaves open which of them holds.
            most: Largest number of readings to try; None: no limit.
        Raises:
            NotUnderstoodError: If no reading gives the predictions.
            ValueError: If the tensors fit no format, or the predictions another task.
        Example:
            >>> from mechinterp import sample_prompts
            >>> from mechinterp.checkpoints.foreign.recognised import recognised
    from mechinterp.checkpoints.foreign.recorded import recording_of
            >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
            >>> from mechinterp.models.run.predictor import predictor_of
            >>> weights = debiased_gradient_step(0.88, 0.1, d_x=2)
            >>> prompts = sample_prompts(weights, 32)
            >>> predicted = predictor_of(weights).predict(prompts)
            >>> record = recording_of(prompts.x, prompts.y, prompts.x_query, predicted)
            >>> state = {f"W_{x}": getattr(weights, f"W_{x}")[0] for x in "QKVO"}
            >>> read_proven(state, [record], Hints()).proven["model.score"]
            'softmax'
    """
    copied = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    stored = Stored(Path("state dict"), copied, {})
    proving = partial(prove, recordings=recordings, shown=shown, most=most)
    return _read([stored], replace(hints, task=dict(hints.task or {})), recordings, proving)


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


def _read(
    run: Sequence[Stored],
    hints: Hints,
    recordings: Sequence[Recording] = (),
    proving: Callable[..., Proof] | None = None,
) -> Checkpoint:
    last, length = run[-1], None
    if recordings:
        hints, length = _sizes_of_recordings(recordings, hints), recordings[0].length
    known_files = []
    for each in run:
        with of_file(each.file):
            known_files.append(
                recognised(mapped(folded(each.tensors, each.settings), hints.map or {}), hints)
            )
    form, layout, _ = known_files[-1]
    settings = dict(last.settings)
    # A setting such as norm_first is left over in a model without norms.
    if not any("norm" in piece.part for piece in layout.pieces):
        settings.pop("norm", None)
    given = rotary_of(last.tensors) | given_choices(hints, settings)
    stated_axes = form.fixed.get("orientation", hints.orientation)
    usual_axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    packings = _packings(known_files[-1], given, hints, settings)
    all_axes = usual_axes if stated_axes is None else (str(stated_axes),)
    by_packing: dict[str | None, list[Case]] = {}
    faults: list[ValueError] = []
    for packing, axes in product(packings, all_axes):
        try:
            files = [_packed(each, packing, hints, settings) for each in known_files]
            parts = _parts_of_run(run, files, axes, hints)[-1]
            form = _own(form, parts, hints)
            choices = choices_of(parts, form, given, hints)
        except ValueError as error:
            faults.append(error)
            continue
        own = {"orientation": axes} | ({} if packing is None else {"packing": packing})
        source = Source(form, choices, given, hints, last.settings, length)
        for chosen in combinations(choices, given):
            try:
                case = case_of(source, parts, {**own, **chosen})
                by_packing.setdefault(packing, []).append(case)
            except ValueError as error:
                faults.append(error)
    if not by_packing:
        raise faults[0]
    if recordings:
        every = [case for some in by_packing.values() for case in some]
        proving = proving or partial(prove, recordings=recordings)
        return _proven(last, proving(every, file=last.file))
    cases = better_packing(list(by_packing.values()))
    readings: Sequence[Reading]
    names: list[str]
    if len(cases) == 1 and not cases[0].refined():
        # Nothing is open: the loss is computed where it is shown.
        case, readings, names = cases[0], LazyReadings(partial(_readings_of, cases)), []
    else:
        case, readings, names = try_cases(cases)
    names = [*names, *(("packing",) if len(packings) > 1 else ())]
    checkpoint = _checkpoint(last, case, readings, names)
    if len(run) == 1:
        return checkpoint
    kept, axes = {}, str(case.tried["orientation"])
    packing = str(case.tried["packing"]) if "packing" in case.tried else None
    files = [_packed(each, packing, hints, settings) for each in known_files]
    for each, parts in zip(run, _parts_of_run(run, files, axes, hints), strict=True):
        with of_file(each.file):
            kept[each.step] = replace(case, parts=parts).weights()
    return replace(checkpoint, kept=kept)


Known = tuple[Format, Layout, dict[str, Tensor]]
"""Format of a file, its parts, and its tensors by name."""


def _packings(
    known: Known, given: Mapping[str, object], hints: Hints, settings: Mapping[str, object]
) -> tuple[str | None, ...]:
    """Orders of rows to try for packed qkv matrices; None if there is no such matrix, or one head."""
    form, layout, _ = known
    packed = [piece.name for piece in layout.pieces if piece.part == "qkv"]
    heads = hints.n_heads or settings.get("n_heads")
    if not packed or heads in (None, 1) or form.name != LAYERED.name:
        return (None,)
    if "packing" in given:
        return (str(given["packing"]),)
    return ("per_head",) if any(PER_HEAD in name for name in packed) else PACKINGS


def _packed(
    known: Known, packing: str | None, hints: Hints, settings: Mapping[str, object]
) -> Known:
    """A file's tensors, with matrices that are packed per head in the usual order."""
    form, layout, tensors = known
    if packing != "per_head":
        return known
    names = [piece.name for piece in layout.pieces if piece.part == "qkv"]
    heads = hints.n_heads or settings.get("n_heads")
    return form, layout, repacked(tensors, names, int(str(heads)))


def _readings_of(cases: Sequence[Case]) -> Sequence[Reading]:
    return try_cases(cases)[1]


def _sizes_of_recordings(recordings: Sequence[Recording], hints: Hints) -> Hints:
    """The options, with d_x and d_y of the recorded prompts.

    Raises:
        ValueError: If an option contradicts the prompts.
    """
    sizes: dict = dict(zip(("d_x", "d_y"), require_one_task(recordings), strict=True))
    lengths = [each.length for each in recordings]
    task = hints.task or {}
    for name, size in sizes.items():
        for given in (hints.given.get(name, size), task.get(name, size)):
            if given != size:
                raise ValueError(
                    f"{name} must be {size}, as in the recorded predictions, got {given}."
                )
    length = task.get("context_length", lengths[0])
    if length not in lengths:
        listed = " or ".join(map(str, lengths))
        raise ValueError(
            f"context_length must be {listed}, as in the recorded predictions, got {length}."
        )
    return replace(hints, **sizes)


def _proven(stored: Stored, proof: Proof) -> Checkpoint:
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
    checkpoint = _checkpoint(stored, first, (), names)
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
    assumed = {n: v for n, v in checkpoint.assumed.items() if n in open_ones}
    unused = {n: v for n, v in checkpoint.assumed.items() if n == "unused"}
    assumed = {**task, **assumed, **unused, "step": stored.step}
    if names:
        assumed["undetermined"] = (
            f"the recorded predictions leave open {' and '.join(map(option, names))}: "
            f"{len(readings)} readings give them; predictions for prompts of another length or size may decide (--predictions twice)"
        )
    known = {n: v for n, v in checkpoint.known.items() if n not in proven and n not in open_ones}
    return replace(
        checkpoint, assumed=assumed, known=known, proven=proven, readings=readings, doubting=None
    )


def _parts_of_run(
    run: Sequence[Stored],
    known_files: Sequence["Known"],
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
    of_layers = [name for name in hints.model or {} if name not in (*OF_POSITIONS, "packing")]
    if parts.alone and of_layers:
        raise ValueError(
            f"model ({', '.join(of_layers)}) needs layers with norms or MLPs, got one layer of attention alone."
        )
    if form is not LAYERED or not parts.alone:
        return form
    return OWN_LAYERS if "attn.W_O" in parts.layers[0] else BARE


def _checkpoint(
    stored: Stored, case: Case, readings: Sequence[Reading], names: Sequence[str]
) -> Checkpoint:
    """Checkpoint of the chosen reading, with what was assumed."""
    weights, form, closed = case.weights(), case.source.form, case.source.closed
    config = ExperimentConfig(task=case.task, model=weights.model)
    kinds = ("task.", "train.", "seed") if case.parts.alone else ("task.",)
    values = flatten(config.to_dict()).items()
    assumed = {n: v for n, v in values if n.startswith(kinds) and n not in case.known}
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
    assumed |= {**form.beside, **_left_out(case), "step": stored.step}
    if not isinstance(readings, LazyReadings) and readings:
        assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
        if open_between := tied(readings):
            assumed["undetermined"] = open_between
    if (times := case.source.settings.get(SAVED_TIMES, 1)) != 1:
        assumed["weights"] = f"the last of {times} that were saved"
    if unused := unused_names(stored.tensors, case.source.hints.map or {}):
        assumed["unused"] = unused
    stated: dict[str, object] = {
        f"model.{n}": case.value_of(n) for n in case.source.given if n in case.tried
    }
    stated |= {n: v for n, v in values if n in case.known & case.stated}
    rest = [n for n in case.tried if f"model.{n}" not in assumed | stated and n != "scale"]
    known = {n: v for n, v in values if n in case.known - case.stated}
    known |= {f"model.{name}": case.value_of(name) for name in rest}
    if "attn_scale" not in assumed and "model.scale" not in stated:
        known["model.scale"] = case.scale
    return Checkpoint(
        path=stored.file,
        config=config,
        step=stored.step,
        weights=weights,
        format=form.name,
        assumed=assumed,
        stated=stated,
        known=known,
        readings=readings,
        doubting=partial(doubt_of, case, readings),
    )


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
