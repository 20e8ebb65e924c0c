"""Commands that train models or predict their training: argument parsing only."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mechinterp.cli.options import (
    DeviceOption,
    JsonOption,
    QuietOption,
    argument,
    device_of,
    option,
)
from mechinterp.cli.printing import answer

if TYPE_CHECKING:
    from mechinterp.training.train import Engine, TrainingSummary


MemoryOption = Annotated[
    str | None, option("--memory", "Most memory that a process may use, such as 2GB.")
]
ResumeOption = Annotated[bool, option("--resume", "Continue a stopped run.")]
SetOption = Annotated[
    list[str] | None, option("--set", "Change a config field; repeatable.", metavar="FIELD=VALUE")
]


def train(
    what: Annotated[
        str | None, argument("PRESET_OR_CONFIG", "A preset's name or a config file (JSON or YAML).")
    ] = None,
    assignments: SetOption = None,
    out: Annotated[Path | None, option("--out", "Checkpoint folder; default: runs/<name>.")] = None,
    start: Annotated[
        str | None,
        option(
            "--start", "Model whose weights the training starts from; its config is the default."
        ),
    ] = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
    resume: ResumeOption = False,
    log: Annotated[
        str | None, option("--log", "wandb, or a .jsonl file: log the progress there, too.")
    ] = None,
    quiet: QuietOption = False,
    list_presets: Annotated[bool, option("--list", "List the presets.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train one model, from random weights or those of a model. Example: mechinterp train softmax-h2 --set seed=1 --out runs/h2-s1"""
    from mechinterp.presets import PRESETS

    if list_presets:
        return answer(list(PRESETS), "\n".join(PRESETS), as_json=as_json)
    from mechinterp.checkpoints.io.files import printable
    from mechinterp.checkpoints.load import load
    from mechinterp.checkpoints.native.document import named_config
    from mechinterp.config import override
    from mechinterp.report.bars import logged, progress_bar
    from mechinterp.training.train import train_one

    from_model = None if start is None else load(start)
    if what is not None:
        file, config = Path(what), named_config(what)
        name = file.parent.resolve().name if file.name == "config.json" else file.stem
    elif from_model is not None:
        name, config = f"{from_model.name}-longer", from_model.config
    else:
        raise ValueError(f"train needs a preset or a config file; presets: {', '.join(PRESETS)}.")
    config = override(config, *(assignments or []))
    folder = Path("runs") / f"{name}-s{config.seed}" if out is None else out
    engine: Any = _engine("local", None, device, memory)
    engine = engine if from_model is None else partial(engine, start=from_model)
    with progress_bar(quiet=quiet) as show, logged(log, config, show) as on_log:
        summary = train_one(config, folder, resume=resume, engine=engine, on_log=on_log)
    document = _document(summary, folder)
    text = f"{printable(str(folder))}: loss {summary.loss:.4f} after {config.train.steps} steps"
    answer(document, f"{text} ({document['steps_per_second']:.0f} steps/s)", as_json=as_json)


def sweep(
    file: Annotated[Path | None, argument("FILE.json", "List or grid of models.")] = None,
    out: Annotated[
        Path | None, option("--out", "Folder of the run; each model becomes a folder in it.")
    ] = None,
    shard: Annotated[
        str | None,
        option(
            "--shard",
            "Train part I of N, from 0, in OUT/shard-I; default in a SLURM array: its task.",
            metavar="I/N",
        ),
    ] = None,
    merge: Annotated[
        Path | None, option("--merge", "Make one run of the shards in OUT.", metavar="OUT")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], option("--engine", "This machine, or a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, option("--address", "Address of a Ray cluster; default: start one here.")
    ] = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train many models in one run. Example: mechinterp sweep analyses/sweeps/softmax.json --out runs/softmax"""
    from mechinterp.analysis.comparison import models_frame
    from mechinterp.checkpoints.io.files import printable
    from mechinterp.checkpoints.native.tables import write_own_table
    from mechinterp.display import counted
    from mechinterp.report.bars import progress_bar
    from mechinterp.training import shards
    from mechinterp.training.run_folder import RESULTS
    from mechinterp.training.sweep_file import load_sweep
    from mechinterp.training.train import require_no_divergence, train_models

    if merge is not None:
        if (given := file or out or shard) is not None:
            raise ValueError(f"--merge stands alone, got {given} too.")
        return _merge(merge, as_json=as_json)
    if file is None or out is None:
        raise ValueError("sweep needs FILE.json and --out, or --merge OUT alone.")
    models, chosen = load_sweep(file), _engine(engine, address, device, memory)
    if (part := shards.shard_named(shard)) is not None:
        out = shards.shard_folder(models, out, part)
        models = shards.shard_of(models, part)
    with progress_bar(quiet=quiet) as on_log:
        summary = train_models(models, out, resume=resume, engine=chosen, on_log=on_log)
    if models:  # a shard may have none
        write_own_table(out / RESULTS, models_frame(models, out, diverged=summary.diverged))
    require_no_divergence(models, out, summary)
    trained = f"{counted(len(models), 'model')}, mean loss {summary.loss:.4f}"
    text = f"{printable(str(out))}: {trained}; results in {RESULTS}"
    answer(_document(summary, out), text, as_json=as_json)


def _merge(folder: Path, *, as_json: bool) -> None:
    """Make one run of the shards in a folder, and print its models."""
    from mechinterp.analysis.comparison import models_frame
    from mechinterp.checkpoints.io.files import printable
    from mechinterp.checkpoints.native.tables import write_own_table
    from mechinterp.display import counted
    from mechinterp.training import shards
    from mechinterp.training.run_folder import RESULTS

    models, diverged = shards.merge_shards(folder)
    write_own_table(folder / RESULTS, models_frame(models, folder, diverged=diverged))
    shards.delete_shards(folder)
    document = {"out": str(folder), "models": list(models), "diverged": dict(diverged)}
    text = f"{printable(str(folder))}: {counted(len(models), 'model')}; results in {RESULTS}"
    answer(document, text, as_json=as_json)


def predict_jumps(
    what: Annotated[
        str, argument("PRESET_OR_CONFIG", "A preset's name or a config file (JSON or YAML).")
    ],
    assignments: SetOption = None,
    out: Annotated[Path | None, option("--out", "New .html file with the predicted loss.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the jumps of linear attention, without training. Example: mechinterp predict-jumps linear-separate"""
    from mechinterp.analysis.result import records
    from mechinterp.analysis.training.jumps import jump_forecast
    from mechinterp.checkpoints.io.files import printable
    from mechinterp.checkpoints.native.document import named_config
    from mechinterp.config import override
    from mechinterp.report.to_json import SCHEMA_VERSION
    from mechinterp.report.to_text import to_text

    config = override(named_config(what), *(assignments or []))
    forecast = jump_forecast(config)
    if out is not None:
        from mechinterp.report.page import write_figure

        write_figure(out, forecast.plot())
    lines = [to_text("jump-forecast", forecast)]
    lines += [] if out is None else [f"Figure: {printable(str(out.resolve()))}"]
    rows = zip(records(forecast.to_frame()), forecast.vector.tolist(), strict=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "id": config.id,
        "steps": config.train.steps,
        "jumps": [row | {"vector": vector} for row, vector in rows],
        "levels": forecast.levels,
        "notes": forecast.notes,
        "figure": None if out is None else str(out),
    }
    answer(document, "\n".join(lines), as_json=as_json)


def _document(summary: "TrainingSummary", out: Path) -> dict[str, object]:
    """Document on a training; steps_per_second excludes start-up."""
    steps, seconds = summary.steps, summary.seconds
    rate = steps / seconds if seconds else 0.0
    trained = {"checkpoint": str(out), "steps": steps, "seconds": seconds}
    return trained | {"steps_per_second": rate, "loss": summary.loss}


def _engine(name: str, address: str | None, device: DeviceOption, memory: str | None) -> "Engine":
    limit = None if memory is None else _bytes(memory)
    if name == "ray":
        from mechinterp.training.ray import train_on_ray

        return partial(train_on_ray, address=address, device=device, memory=limit)
    if address is not None:
        raise ValueError(f"--address is used by --engine ray only, got {address!r}.")
    import torch

    from mechinterp.training.train import train_here

    # The tensors of a step are small: a second thread gains nothing, and waits if cores are shared.
    torch.set_num_threads(1)
    # "auto" is decided for each model, as some train on the processor alone.
    known = device_of(device)
    return partial(train_here, device=device if device == "auto" else known, memory=limit)


def _bytes(text: str) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", text)
    if not size:
        raise ValueError(f"--memory must be a number of MB or GB such as 2GB, got {text!r}.")
    return int(float(size[1]) * {"MB": 1e6, "GB": 1e9}[size[2]])
