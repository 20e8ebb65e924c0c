"""The command line: argument parsing and exit codes; everything else is called.

Each command imports what it needs, so that `mechinterp --help` and `classify` start fast.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mechinterp.checkpoints.hints import Hints
    from mechinterp.checkpoints.layered import LayeredCheckpoint
    from mechinterp.checkpoints.native import Checkpoint
    from mechinterp.config import TaskConfig

app = typer.Typer(
    help="What attention models compute when they do in-context linear regression.",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130  # what the argument parser makes of Ctrl-C

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A checkpoint: a folder, or weights other code has written."
    ),
]
TaskOption = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FILE.json",
        help="Fields of the task, for files that do not state it; else the softmax paper's.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="The file's format, where it does not tell."),
]
XOption = Annotated[int | None, typer.Option("--d-x", min=1, help="Dimension of a covariate.")]
YOption = Annotated[int | None, typer.Option("--d-y", min=1, help="Number of responses.")]
HeadsOption = Annotated[
    int | None, typer.Option("--n-heads", min=1, help="Heads, for files that do not say.")
]
ScaleOption = Annotated[
    float | None, typer.Option("--scale", help="Factor on the scores, for files that do not say.")
]
SelfOption = Annotated[
    bool | None,
    typer.Option("--attend-to-self/--context-only", help="Whether the query is among its keys."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the evaluation prompts.")]
PromptsOption = Annotated[
    int, typer.Option("--n-prompts", min=2, help="Number of evaluation prompts.")
]
LengthOption = Annotated[
    int | None,
    typer.Option("--context-length", min=1, help="Pairs per prompt; the task's own if left out."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on where a stopped run left off.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a config field; may be repeated."),
]


def hints_of(
    task_file: TaskOption = None,
    format_name: FormatOption = None,
    d_x: XOption = None,
    d_y: YOption = None,
    n_heads: HeadsOption = None,
    scale: ScaleOption = None,
    attend_to_self: SelfOption = None,
) -> "Hints":
    """What the options say of files that do not say it."""
    from mechinterp.checkpoints.hints import Hints
    from mechinterp.checkpoints.loading import read_task

    task = None if task_file is None else read_task(task_file)
    return Hints(task, format_name, d_x, d_y, n_heads, scale, attend_to_self)


def reads_checkpoints(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `hints_of`, whose result it takes as its argument `hints`."""
    options = signature(hints_of).parameters
    own = [p for p in signature(command).parameters.values() if p.name != "hints"]

    @wraps(command)
    def run(**given: object) -> None:
        said = {name: given.pop(name) for name in options}
        command(**given, hints=hints_of(**said))  # type: ignore[arg-type]

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *options.values())]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def main() -> None:
    """Entry point of the console script: exit code 0, or 2 with one line on standard error."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:
            _complain("interrupted; a training goes on with --resume.")
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except Exception as error:
        # Errors of the argument parser; the class is not public in every version of typer.
        if not hasattr(error, "format_message"):
            raise
        _fail(_with_value(error.format_message(), error, arguments), 2)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def train(
    what: Annotated[
        str | None,
        typer.Argument(metavar="PRESET_OR_CONFIG", help="A preset's name or a config file."),
    ] = None,
    assignments: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The checkpoint folder; runs/<name> if left out.")
    ] = None,
    device: DeviceOption = "auto",
    resume: ResumeOption = False,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train one model. Example: mechinterp train softmax-h2 --set seed=1 --out runs/h2-s1"""
    from mechinterp.checkpoints.loading import named_config
    from mechinterp.config import PRESETS, override
    from mechinterp.report.documents import dumps, training_document
    from mechinterp.report.terminal import progress_bar
    from mechinterp.training.sweep import train_models

    if list_presets:
        print(dumps(list(PRESETS)) if as_json else "\n".join(PRESETS))
        return
    if what is None:
        raise ValueError(f"train needs a preset or a config file; presets: {', '.join(PRESETS)}.")
    config = override(named_config(what), *(assignments or []))
    file = Path(what)
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    folder = Path("runs") / f"{name}-s{config.seed}" if out is None else out
    chosen = _device(device)
    with progress_bar() as on_log:
        summary = train_models({".": config}, folder, resume=resume, device=chosen, on_log=on_log)
    document = training_document(summary, str(folder))
    text = f"{folder}: loss {summary.loss:.4f} after {config.train.steps} steps"
    print(dumps(document) if as_json else f"{text} ({document['steps_per_second']:.0f} steps/s)")


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="A list or grid of models.")],
    out: Annotated[
        Path, typer.Option("--out", help="Run folder; each model becomes a folder in it.")
    ],
    device: DeviceOption = "auto",
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train many models in one run. Example: mechinterp sweep analyses/sweeps/softmax.json --out runs/softmax"""
    from mechinterp.report.documents import dumps, training_document
    from mechinterp.report.terminal import progress_bar
    from mechinterp.training.sweep import load_sweep, train_models

    models, chosen = load_sweep(file), _device(device)
    with progress_bar() as on_log:
        summary = train_models(models, out, resume=resume, device=chosen, on_log=on_log)
    document = training_document(summary, str(out))
    print(
        dumps(document) if as_json else f"{out}: {len(models)} models, mean loss {summary.loss:.4f}"
    )


@app.command(name="predict-jumps")
def predict_jumps(
    what: Annotated[
        str,
        typer.Argument(metavar="PRESET_OR_CONFIG", help="A preset's name or a config file."),
    ],
    assignments: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new .html file with the predicted loss.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Foretell the jumps of linear attention, without training. Example: mechinterp predict-jumps linear-separate"""
    from mechinterp.analysis.jumps import jump_forecast
    from mechinterp.checkpoints.loading import named_config
    from mechinterp.config import override
    from mechinterp.report.documents import dumps, forecast_document
    from mechinterp.report.terminal import frame_text

    config = override(named_config(what), *(assignments or []))
    forecast = jump_forecast(config)
    if out is not None:
        from mechinterp.report.page import write_figure

        write_figure(out, forecast.plot())
    if as_json:
        print(dumps(forecast_document(config, forecast, out)))
        return
    levels = ", ".join(f"{level:.4f}" for level in forecast.levels)
    print(f"{frame_text(forecast.to_frame())}\nloss levels (y²): {levels}")
    for note in forecast.notes:
        print(f"note: {note}")
    if out is not None:
        print(f"Figure: {_shown(out.resolve())}")


@app.command()
@reads_checkpoints
def classify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of them.")
    ],
    n_prompts: PromptsOption = 512,
    seed: SeedOption = 0,
    context_length: LengthOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A new table, .parquet or .csv: a row for each checkpoint."),
    ] = None,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Say which pattern the heads form. Example: mechinterp classify checkpoints/*"""
    from mechinterp.checkpoints.loading import checkpoint_paths
    from mechinterp.report.documents import dumps
    from mechinterp.report.table import require_writable, write_table

    if out is not None:
        require_writable(out)
    documents: list[dict] = []
    for path in checkpoint_paths(paths):
        try:
            with _about(path):
                checkpoint = _load(path, hints)
                document, table = _classified(
                    checkpoint, context_length=context_length, n_prompts=n_prompts, seed=seed
                )
        except (ValueError, OSError) as error:
            documents.append({"path": str(path), "error": str(error)})
            _complain(str(error))
            continue
        documents.append(document)
        if not as_json:
            print(f"{_shown(path)}: {document['pattern']} ({document['reason']})\n{table}")
    if as_json:
        print(dumps(documents))
    if out is not None:
        write_table(out, documents)
    if any("error" in document for document in documents):
        raise typer.Exit(2)


@app.command()
@reads_checkpoints
def ablate(
    path: PathArgument,
    n_prompts: PromptsOption = 4096,
    seed: SeedOption = 0,
    context_length: LengthOption = None,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Mask every head, and every subset of heads. Example: mechinterp ablate checkpoints/softmax-h2-s0"""
    from mechinterp.analysis.heads import MAX_SUBSET_HEADS, METHODS, ablate_heads, ablate_subsets
    from mechinterp.icl.prompts import generator_for, sample_prompts
    from mechinterp.report.documents import ablation_document, dumps
    from mechinterp.report.terminal import ablation_text

    with _about(path):
        checkpoint = _one_layer(path, hints)
        task, dtype = _task(checkpoint, context_length), checkpoint.weights.W_Q.dtype
        generator = generator_for(seed, "eval", 0)
        prompts = sample_prompts(task, n_prompts, generator=generator, dtype=dtype)
        single = [ablate_heads(checkpoint.model, prompts, method=method) for method in METHODS]
        few = checkpoint.config.model.n_heads <= MAX_SUBSET_HEADS
        subsets = ablate_subsets(checkpoint, prompts) if few else None
    if as_json:
        print(dumps(ablation_document(checkpoint, single, subsets)))
        return
    print(f"{_shown(path)}: {ablation_text(single, subsets)}")


@app.command()
@reads_checkpoints
def fit(
    path: PathArgument,
    n_prompts: PromptsOption = 20_000,
    seed: SeedOption = 0,
    context_length: Annotated[
        list[int] | None,
        typer.Option(
            "--context-length",
            min=1,
            help="Pairs per prompt; may be repeated; 10, 20, ..., 100 if left out.",
        ),
    ] = None,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Fit closed-form learners to the model. Example: mechinterp fit checkpoints/softmax-h2-s0"""
    from mechinterp.analysis.fits import CONTEXT_LENGTHS, fit_learners
    from mechinterp.report.documents import dumps, fits_document
    from mechinterp.report.terminal import fits_text

    lengths = context_length or CONTEXT_LENGTHS
    with _about(path):
        checkpoint = _one_layer(path, hints)
        fits = fit_learners(checkpoint, context_lengths=lengths, n_prompts=n_prompts, seed=seed)
    if as_json:
        print(dumps(fits_document(checkpoint, fits)))
        return
    print(f"{_shown(path)}: {fits_text(fits)}")


@app.command()
@reads_checkpoints
def report(
    path: PathArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its CSV files.")],
    n_prompts: PromptsOption = 4096,
    seed: SeedOption = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a report that is there.")
    ] = False,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Write a report as one HTML page. Example: mechinterp report checkpoints/softmax-h2-s0 --out reports/h2"""
    from mechinterp.report.documents import dumps
    from mechinterp.report.page import write_report

    with _about(path, out):
        checkpoint = _one_layer(path, hints)
        written = write_report(checkpoint, out, n_prompts=n_prompts, seed=seed, overwrite=overwrite)
    if as_json:
        print(dumps({"path": str(path), **written.to_document()}))
        return
    print(f"{written.verdict}\nReport: {written.page.resolve()}")


@app.command()
@reads_checkpoints
def info(
    path: PathArgument,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Show a checkpoint at a glance. Example: mechinterp info checkpoints/softmax-h2-s0"""
    from mechinterp.report.documents import dumps, info_document
    from mechinterp.report.terminal import info_text

    document = info_document(_load(path, hints))
    print(dumps(document) if as_json else info_text(document))


@app.command()
@reads_checkpoints
def convert(
    path: PathArgument,
    target: Annotated[str, typer.Option("--to", help="native, transformer-lens or npz.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder; a new file for npz.")],
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Write a checkpoint in another format. Example: mechinterp convert checkpoints/softmax-h2-s0 --to transformer-lens --out h2"""
    from mechinterp.checkpoints import loading
    from mechinterp.report.documents import conversion_document, dumps

    with _about(path, out):
        checkpoint = _one_layer(path, hints)
        files = loading.convert(checkpoint, target, out)
    document = conversion_document(checkpoint, target, files)
    if as_json:
        print(dumps(document))
        return
    print(
        f"{_shown(out)}: {', '.join(str(f.relative_to(out)) for f in files if f != out) or 'written'}"
    )
    if document["n_ctx"] is not None:
        print(
            f"n_ctx is {document['n_ctx']}; read load.py, then run it with transformer-lens 2 or 3."
        )
    if document["left_out"]:
        print(f"Left out: {', '.join(document['left_out'])}.")


def _load(path: Path, hints: "Hints") -> "Checkpoint | LayeredCheckpoint":
    """The checkpoint; what it does not say and is assumed goes to standard error."""
    from mechinterp.checkpoints.loading import load

    checkpoint = load(path, **hints.given)  # type: ignore[arg-type]
    if checkpoint.assumed:
        shown = dict(checkpoint.assumed)
        divisor = shown.pop("attn_scale", None)
        if isinstance(divisor, float):  # TransformerLens divides by it; --scale is the factor
            shown["scale"] = 1 / divisor
        said = [
            f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
            for name, value in shown.items()
            if value not in (None, (), [])
            and name.startswith(("task.", "model.", "scale"))
            and (name, value) != ("task.covariance.rho", 0)
        ]
        _complain(f"{path}: assumed {', '.join(said)}.")
    return checkpoint


def _one_layer(path: Path, hints: "Hints") -> "Checkpoint":
    from mechinterp.checkpoints.native import Checkpoint

    checkpoint = _load(path, hints)
    if not isinstance(checkpoint, Checkpoint):
        raise ValueError(
            f"{path}: this command takes attention-only models of one layer, got format "
            f"{checkpoint.format}; classify and info take it."
        )
    return checkpoint


def _classified(
    checkpoint: "Checkpoint | LayeredCheckpoint",
    *,
    context_length: int | None,
    n_prompts: int,
    seed: int,
) -> tuple[dict, str]:
    """The document of `classify`, and its table for the terminal."""
    from mechinterp.checkpoints.native import Checkpoint
    from mechinterp.report import documents
    from mechinterp.report.terminal import frame_text

    if isinstance(checkpoint, Checkpoint):
        from mechinterp.analysis.patterns import classify

        task = _task(checkpoint, context_length)
        found = classify(checkpoint, task, n_prompts=n_prompts, seed=seed)
        document = documents.classification_document(checkpoint, found)
        return document, frame_text(found.to_frame())
    from mechinterp.analysis.layered import classify_layers

    if context_length is not None:
        task = replace(checkpoint.task, context_length=context_length)
        checkpoint = replace(checkpoint, task=task)
    layers = classify_layers(checkpoint, n_prompts=n_prompts, seed=seed)
    document = documents.layered_document(checkpoint, layers)
    return document, frame_text(layers.to_frame())


def _task(checkpoint: "Checkpoint", context_length: int | None) -> "TaskConfig":
    task = checkpoint.config.task
    return task if context_length is None else replace(task, context_length=context_length)


@contextmanager
def _about(*paths: Path) -> Iterator[None]:
    """Puts the first path before the message of a ValueError that begins with none of them."""
    try:
        yield
    except ValueError as error:
        named = str(error).startswith(tuple(map(str, paths)))
        raise ValueError(str(error) if named else f"{paths[0]}: {error}") from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ValueError(f"{paths[0]}: needs more memory than there is.") from None


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be one of auto, cpu, cuda, got {name!r}.")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device cuda needs a GPU that PyTorch can use; there is none.")
    # The tensors of a step are small: a second thread gains nothing, and waits where cores are shared.
    torch.set_num_threads(1)
    return "cuda" if name != "cpu" and available else "cpu"


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """The argument parser's message, with what was given for the option it speaks of."""
    names = getattr(getattr(error, "param", None), "opts", [])
    given = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            given.append(value if equals else following)
    return f"{message.rstrip('.')}, got {', '.join(given)}." if given else message


def _shown(path: Path) -> str:
    """A path on one line, whatever its name."""
    from mechinterp.checkpoints.errors import printable

    return printable(str(path))


def _complain(message: str) -> None:
    line = "".join(c if c.isprintable() else " " for c in " ".join(message.split()))
    print(f"mechinterp: {line}", file=sys.stderr)


def _fail(message: str, code: int) -> None:
    _complain(message)
    sys.exit(code)
