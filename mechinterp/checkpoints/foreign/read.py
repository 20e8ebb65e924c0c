"""Reading of external files: names become parts, open choices are tried, and the best reading
becomes the checkpoint.

Settings come from the file and from a config beside it. What neither the file nor the user states is
assumed, and listed by name in `Checkpoint.assumed`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.described import (
    OF_POSITIONS,
    checkpoint_of_case,
    proven_checkpoint,
)
from mechinterp.checkpoints.foreign.options import ORIENTATIONS, PACKINGS, Hints
from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.case import Case, FileFacts, case_of
from mechinterp.checkpoints.foreign.readings.choices import (
    choices_of,
    combinations,
    given_choices,
    rotary_of,
)
from mechinterp.checkpoints.foreign.readings.losses import LazyReadings, Reading
from mechinterp.checkpoints.foreign.readings.proof import Proof, prove
from mechinterp.checkpoints.foreign.readings.recorded import (
    Recording,
    read_recording,
    require_one_task,
)
from mechinterp.checkpoints.foreign.readings.search import better_packing, try_cases
from mechinterp.checkpoints.foreign.settings import TASK_KEY, Stored
from mechinterp.checkpoints.foreign.tensors.folded import PER_HEAD, folded, repacked
from mechinterp.checkpoints.foreign.tensors.formats import BARE, LAYERED, OWN_LAYERS, Format
from mechinterp.checkpoints.foreign.tensors.layout import Layout
from mechinterp.checkpoints.foreign.tensors.names import Tensors
from mechinterp.checkpoints.foreign.tensors.parts import Parts, parts_of
from mechinterp.checkpoints.foreign.tensors.recognised import recognised
from mechinterp.checkpoints.foreign.tensors.refusals import of_file
from mechinterp.checkpoints.foreign.tensors.renaming import mapped
from mechinterp.checkpoints.io.files import CheckpointError

KnownFile = tuple[Format, Layout, dict[str, Tensor]]
"""Format of a file, its parts, and its tensors by name."""


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
        >>> from mechinterp.checkpoints.foreign.readings.recorded import recording_of
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
    task: dict[str, object] = {
        n: settings[n] for n in ("d_x", "d_y") if n in settings and n not in hints.given
    }
    noise, noise_var = settings.get("noise_std"), settings.get("noise_var")
    if isinstance(noise, float):
        task["noise_var"] = noise**2
    if isinstance(noise_var, float):
        task["noise_var"] = noise_var
    stated = settings.get(TASK_KEY)
    return task | {**(stated if isinstance(stated, Mapping) else {}), **(hints.task or {})}


@dataclass(frozen=True, eq=False)
class _Files:
    """The files of a run, recognised, with what is stated about them."""

    run: Sequence[Stored]
    known: Sequence[KnownFile]
    hints: Hints
    settings: Mapping[str, object]
    """Settings of the last file that its model can have."""

    def parts(self, axes: str, packing: str | None) -> list[Parts]:
        """Parts of every file of a run; all have biases if any file has nonzero ones."""
        every = []
        for each, known in zip(self.run, self.known, strict=True):
            with of_file(each.file):
                form, layout, tensors = _packed(known, packing, self.hints, self.settings)
                more = (self.hints, each.settings, form.wide_heads)
                every.append(parts_of(tensors, layout, axes, *more))
        biases = any(parts.biases for parts in every)
        return [replace(parts, biases=biases) for parts in every]


def _read(
    run: Sequence[Stored],
    hints: Hints,
    recordings: Sequence[Recording] = (),
    proving: Callable[..., Proof] | None = None,
) -> Checkpoint:
    last, length = run[-1], None
    if recordings:
        hints, length = _sizes_of_recordings(recordings, hints), recordings[0].length
    files = _recognised(run, hints)
    by_packing = _cases(files, length)
    if recordings:
        every = [case for some in by_packing.values() for case in some]
        proving = proving or partial(prove, recordings=recordings)
        return proven_checkpoint(last, proving(every, file=last.file))
    case, readings, names = _chosen(better_packing(list(by_packing.values())))
    open_packing = ["packing"] if len(by_packing) > 1 else []
    checkpoint = checkpoint_of_case(last, case, readings, [*names, *open_packing])
    if len(run) == 1:
        return checkpoint
    axes, packing = case.tried["orientation"], case.tried.get("packing")
    every_parts = files.parts(str(axes), None if packing is None else str(packing))
    kept = {}
    for each, parts in zip(run, every_parts, strict=True):
        with of_file(each.file):
            kept[each.step] = replace(case, parts=parts).weights()
    return replace(checkpoint, kept=kept)


def _recognised(run: Sequence[Stored], hints: Hints) -> _Files:
    known = []
    for each in run:
        with of_file(each.file):
            plain = mapped(folded(each.tensors, each.settings), hints.map or {})
            known.append(recognised(plain, hints))
    settings = dict(run[-1].settings)
    # A setting such as norm_first is left over in a model without norms.
    if not any("norm" in piece.part for piece in known[-1][1].pieces):
        settings.pop("norm", None)
    return _Files(run, known, hints, settings)


def _cases(files: _Files, length: int | None) -> dict[str | None, list[Case]]:
    """Usual readings of the last file, by the packing of its qkv matrices.

    Args:
        length: Number of pairs to assume; None: that of the format's paper.
    Raises:
        ValueError: If there is none.
    """
    last, hints = files.run[-1], files.hints
    named_form, layout, _ = files.known[-1]
    given = rotary_of(last.tensors) | given_choices(hints, files.settings)
    stated_axes = named_form.fixed.get("orientation", hints.orientation)
    usual_axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    all_axes = usual_axes if stated_axes is None else (str(stated_axes),)
    cases: dict[str | None, list[Case]] = {}
    faults: list[ValueError] = []
    packings = _packings(files.known[-1], given, hints, files.settings)
    for packing, axes in product(packings, all_axes):
        try:
            parts = files.parts(axes, packing)[-1]
            form = _own(named_form, parts, hints)
            choices = choices_of(parts, form, given, hints)
        except ValueError as error:
            faults.append(error)
            continue
        own = {"orientation": axes} | ({} if packing is None else {"packing": packing})
        source = FileFacts(form, choices, given, hints, last.settings, length)
        for chosen in combinations(choices, given):
            try:
                case = case_of(source, parts, {**own, **chosen})
                cases.setdefault(packing, []).append(case)
            except ValueError as error:
                faults.append(error)
    if not cases:
        raise faults[0]
    return cases


def _chosen(cases: Sequence[Case]) -> tuple[Case, Sequence[Reading], list[str]]:
    """The reading that predicts best, all that were tried, and the choices in which they differ."""
    if len(cases) == 1 and not cases[0].refined():
        # Nothing is open: the loss is computed where it is shown.
        return cases[0], LazyReadings(partial(_readings_of, cases)), []
    return try_cases(cases)


def _packings(
    known: KnownFile, given: Mapping[str, object], hints: Hints, settings: Mapping[str, object]
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
    known: KnownFile, packing: str | None, hints: Hints, settings: Mapping[str, object]
) -> KnownFile:
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
