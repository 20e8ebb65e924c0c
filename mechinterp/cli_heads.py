"""Commands that mask, prune and probe: argument parsing only."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mechinterp.cli_options import (
    LengthOption,
    PathArgument,
    PromptsOption,
    SeedOption,
    about_paths,
    attention_only,
    reads_checkpoints,
    shown_path,
    task_of,
)
from mechinterp.cli_training import JsonOption

if TYPE_CHECKING:
    from mechinterp.checkpoints.deep import DeepCheckpoint
    from mechinterp.checkpoints.hints import Hints
    from mechinterp.checkpoints.native import Checkpoint
    from mechinterp.icl.prompts import Prompts


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
    """Mask every head; with one layer, every subset of heads. Example: mechinterp ablate checkpoints/softmax-h2-s0"""
    from mechinterp.analysis.heads import MAX_SUBSET_HEADS, METHODS, ablate_heads, ablate_subsets
    from mechinterp.checkpoints.deep import DeepCheckpoint
    from mechinterp.report.documents import ablation_document, dumps
    from mechinterp.report.head_documents import layers_document
    from mechinterp.report.terminal import ablation_text, frame_text

    with about_paths(path):
        checkpoint = attention_only(path, hints)
        prompts = _prompts(checkpoint, n_prompts, seed, context_length)
        single = [ablate_heads(checkpoint.model, prompts, method=method) for method in METHODS]
        if isinstance(checkpoint, DeepCheckpoint):
            layers = [frame_text(one.layer_frame()) for one in single]
            shown = "\n".join([frame_text(one.to_frame()) for one in single] + layers)
            risk = f"excess risk {single[0].full_risk:.4f} ± {single[0].full_risk_sem:.4f} y²"
            document, text = layers_document(checkpoint, single), f"{risk}\n{shown}"
        else:
            few = checkpoint.config.model.n_heads <= MAX_SUBSET_HEADS
            subsets = ablate_subsets(checkpoint, prompts) if few else None
            document = ablation_document(checkpoint, single, subsets)
            text = ablation_text(single, subsets)
    print(dumps(document) if as_json else f"{shown_path(path)}: {text}")


@reads_checkpoints
def prune(
    path: PathArgument,
    rule: Annotated[
        str, typer.Option("--rule", help="best-later, least-later or best-first.")
    ] = "best-later",
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Layer after layer, scored anew each time.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder for the pruned model.")
    ] = None,
    n_prompts: PromptsOption = 4096,
    seed: SeedOption = 0,
    context_length: LengthOption = None,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Keep all heads of the first layer and the best of each later one. Example: mechinterp prune MODEL --out pruned"""
    from mechinterp.analysis import pruning
    from mechinterp.checkpoints.deep import DeepCheckpoint
    from mechinterp.report.documents import dumps
    from mechinterp.report.head_documents import pruning_document
    from mechinterp.report.terminal import frame_text

    if rule not in pruning.RULES:
        raise ValueError(f"--rule must be one of {', '.join(pruning.RULES)}, got {rule!r}.")
    paths = (path,) if out is None else (path, out)
    with about_paths(*paths):
        checkpoint = attention_only(path, hints)
        if not isinstance(checkpoint, DeepCheckpoint):
            raise ValueError(f"{path}: prune takes context-only models of several layers, got one.")
        prompts = _prompts(checkpoint, n_prompts, seed, context_length)
        chosen = pruning.RULES[rule]
        found = pruning.prune(checkpoint.model, prompts, rule=chosen, sequential=sequential)
        if out is not None:
            pruning.save_pruned(checkpoint, found.kept, out, prompts=prompts)
    if as_json:
        print(dumps(pruning_document(checkpoint, found, out)))
        return
    print(f"{shown_path(path)}: {found!r}\n{frame_text(found.to_frame())}")
    if out is not None:
        print(f"Pruned model: {shown_path(out)}")


@reads_checkpoints
def probe(
    path: PathArgument,
    n_prompts: PromptsOption = 1024,
    seed: SeedOption = 0,
    context_length: LengthOption = None,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Say what each layer has computed: linear probes, descent on features. Example: mechinterp probe MODEL"""
    from mechinterp.analysis.p_probing import p_probe
    from mechinterp.analysis.probes import probe_layers, reweighted
    from mechinterp.report.documents import dumps
    from mechinterp.report.head_documents import probes_document
    from mechinterp.report.terminal import frame_text

    with about_paths(path):
        checkpoint = attention_only(path, hints)
        prompts = _prompts(checkpoint, n_prompts, seed, context_length)
        response = probe_layers(checkpoint.model, prompts)
        structure = probe_layers(checkpoint.model, prompts, target=reweighted)
        descent = p_probe({"after layer 0": checkpoint.model}, prompts)
    if as_json:
        print(dumps(probes_document(checkpoint, response, structure, descent)))
        return
    tables = {
        f"{shown_path(path)}: the response, read from the stream at the query": response.to_frame(),
        "\nThe covariates times the context's correlations": structure.to_frame(),
        "\nGradient descent on the features after layer 0, and on x": descent.area_frame(),
    }
    print("\n".join(f"{title}\n{frame_text(frame)}" for title, frame in tables.items()))


def _prompts(
    checkpoint: "Checkpoint | DeepCheckpoint", n_prompts: int, seed: int, context_length: int | None
) -> "Prompts":
    """Evaluation prompts in the dtype of the weights."""
    from mechinterp.icl.prompts import generator_for, sample_prompts

    dtype, generator = checkpoint.weights.W_Q.dtype, generator_for(seed, "eval", 0)
    task = task_of(checkpoint, context_length)
    return sample_prompts(task, n_prompts, generator=generator, dtype=dtype)
