"""Training and masking on a GPU against the plain loop on the same device; `make bench-gpu`.

Every row is timed in rounds of both in turn, and the least time of each counts. The first round, in which
kernels are chosen and compiled, is not timed. With CUDA graphs a step is recorded once and replayed, its generator
set to the state of each step before: the same prompts as without.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.hooked.masks import mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from mechinterp.presets import preset
from mechinterp.training.batches import batch_chunks
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer import step as pack_module
from mechinterp.training.one_layer.step import Pack
from mechinterp.training.run import Batch, TrainingRun
from tests.benchmarks import plain
from tests.evidence import stamp
from tests.gpu.machine import described, gpus, state

PUBLISHED = 525.0
"""Steps per second of one model, on an RTX 4090."""
N_LAYERS, N_HEADS, TASK = 4, 8, TaskConfig(d_x=16, context_length=32)


@dataclass(frozen=True)
class Row:
    """A measured speed."""

    what: str
    unit: str
    plain: float
    """Per second, by the plain loop."""
    ours: float
    graphs: float | None
    """Per second, with CUDA graphs; None where there are none."""

    @property
    def ratio(self) -> float:
        return max(self.ours, self.graphs or 0.0) / self.plain


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    replicas: tuple[int, ...] = (1, 64, 1024, 8192)
    widths: tuple[int, ...] = (64, 256)
    steps: int = 100
    prompts: int = 16_384
    rounds: int = 5


QUICK = Sizes(replicas=(1, 4), widths=(16,), steps=3, prompts=16, rounds=1)


def per_second(
    work: float, device: str, rounds: int, *runs: Callable[[], object] | None
) -> list[float | None]:
    """Work per second of each run, by the least time of the rounds; None for one that is None."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, spent in zip(runs, times, strict=True):
            if run is None:
                continue
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            spent.append(time.perf_counter() - start)
    return [work / min(spent[1:]) if spent else None for spent in times]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def tensor_operations() -> Iterator[None]:
    """A context in which packs train by tensor operations, on the processor too, as they do on a GPU."""
    before, pack_module.uses_kernel = pack_module.uses_kernel, lambda weights: False
    try:
        yield
    finally:
        pack_module.uses_kernel = before


def updates(run: TrainingRun, steps: int) -> None:
    for step in range(steps):
        run.update(step)


def packs(sizes: Sizes, device: str) -> Iterator[Row]:
    """Two-head models that train together, in model-steps per second."""
    base = override(preset("softmax-h2"), "train.log_every=1000000", "train.n_eval_prompts=256")
    for n in sizes.replicas:
        pack = Pack({f"s{seed}": replace(base, seed=seed) for seed in range(n)}, device=device)
        with torch.device(device):
            loop = plain.training(2)

        def by_hand(loop: Callable[[int], None] = loop) -> None:
            with torch.device(device):
                loop(sizes.steps)

        ours = partial(updates, pack, sizes.steps)
        graphs = replayed(pack, sizes.steps) if device == "cuda" else None
        speeds = per_second(sizes.steps, device, sizes.rounds, by_hand, ours, graphs)
        by_plain, own, graphed = speeds
        graphed = None if graphed is None else n * graphed
        what = f"{n:,} model{'s' * (n > 1)} of two heads"
        yield Row(what, "model-steps", by_plain or 0.0, n * (own or 0.0), graphed)


def replayed(pack: Pack, steps: int, device: str = "cuda") -> Callable[[], Pack]:
    """Runs the steps of a pack as replays of one recorded step; returns the pack, of the same state, that they train.

    A replay reads and writes the tensors of that pack where they lay when it was recorded, so `run` keeps the pack.
    On the processor, where nothing can be recorded, the step itself runs each time.
    """
    train, generator = pack.config.train, torch.Generator(device=device)

    def prompts(stream: str, step: int, n_prompts: int) -> Iterator[Batch]:
        chunks = [batch_chunks(task, n_prompts, generator=generator) for task in pack.tasks]
        return zip(*chunks, strict=True)

    recorded = Pack(pack.models, device=device)
    recorded._prompts = prompts  # type: ignore[method-assign]
    step = partial(recorded.update, 0)
    replay = recording(step, generator) if device == "cuda" else step
    for mine, start in zip(state_of(recorded), state_of(pack), strict=True):
        mine.copy_(start)

    def run() -> Pack:
        for number in range(steps):
            seed = generator_for(train.data_seed, "train", number).initial_seed()
            generator.manual_seed(seed)
            replay()
        return recorded

    return run


def recording(step: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
    """Runs a step again as it was recorded once."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what PyTorch asks for before it records
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def state_of(pack: Pack) -> tuple[torch.Tensor, ...]:
    return (*pack._adam_rows, pack._n_updates, pack.loss_sum)


def architecture(width: int, score: str = "softmax") -> ModelConfig:
    heads = {"n_layers": N_LAYERS, "n_heads": N_HEADS, "d_head": width // N_HEADS}
    return ModelConfig(**heads, d_model=width, score=score, context_only=True)


def deep_models(sizes: Sizes, device: str) -> Iterator[Row]:
    """Softmax models of several layers, one at a time, in steps per second."""
    for width in sizes.widths:
        train = TrainConfig(steps=10**6, batch_size=256, log_every=10**6, n_eval_prompts=256)
        config = ExperimentConfig(TASK, architecture(width), train)
        run, by_hand = DeepRun({"model": config}, device=device), plain_deep(config, device)

        both = partial(by_hand, sizes.steps), partial(updates, run, sizes.steps)
        first, own = per_second(sizes.steps, device, sizes.rounds, *both)
        what = f"{N_LAYERS} layers of {N_HEADS} heads, softmax, width {width}"
        yield Row(what, "steps", first or 0.0, own or 0.0, None)


def plain_deep(config: ExperimentConfig, device: str) -> Callable[[int], None]:
    """The hooked model, trained by the loop that one writes first."""
    weights = initial_deep_weights(config).to(device)
    model = ICLTransformer.from_weights(weights, task=config.task).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.train.learning_rate)

    def run(steps: int) -> None:
        for step in range(steps):
            generator = generator_for(1, "train", step, device=device)
            prompts = draw_prompts(config.task, config.train.batch_size, generator=generator)
            loss = (model(prompts.tokens)[:, -1] - prompts.y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def masking(sizes: Sizes, device: str) -> Iterator[Row]:
    """Every head of 4 layers of 8 masked alone, in prompts per second."""
    masks = [[(layer, head)] for layer in range(N_LAYERS) for head in range(N_HEADS)]
    for score in ("linear/L", "softmax"):
        config = ExperimentConfig(TASK, architecture(64, score))
        weights = initial_deep_weights(config).to(device)
        model = ICLTransformer.from_weights(weights, task=TASK)
        prompts = draw_prompts(TASK, sizes.prompts).to(device)
        pieces = [prompts[i : i + 4096].tokens for i in range(0, len(prompts), 4096)]

        def by_hooks(model: ICLTransformer = model, pieces: list = pieces) -> None:
            with torch.no_grad():
                for heads in masks:
                    for piece in pieces:
                        model.run_with_hooks(piece, fwd_hooks=mask_heads(heads))

        ours = partial(predictor_of(model).run, prompts, masks)
        first, own = per_second(sizes.prompts, device, sizes.rounds, by_hooks, ours)
        what = f"every head of {N_LAYERS} layers of {N_HEADS} masked, {score} scores"
        yield Row(what, "prompts", first or 0.0, own or 0.0, None)


def table(rows: list[Row], machine: dict[str, str]) -> str:
    lines = [
        "| what | unit, per second | plain loop | ours | with CUDA graphs | best over plain |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        graphs = "" if row.graphs is None else f"{row.graphs:,.0f}"
        lines.append(
            f"| {row.what} | {row.unit} | {row.plain:,.0f} | {row.ours:,.0f} | {graphs} | {row.ratio:.1f} |"
        )
    speeds = (max(row.ours, row.graphs or 0) for row in rows if "1,024 models" in row.what)
    best = max(speeds, default=0)
    times = f"{best / PUBLISHED:.0f} times the published speed of one"
    aim = f"1,024 models: {times}; the aim is 500.\n" if best else ""
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    head = "# Speed on a GPU\n\n`make bench-gpu` writes this page and the same as JSON.\n"
    return "\n".join([head, *lines, "", aim, f"Measured on: {where}.\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="Small counts: does it run at all?")
    parser.add_argument("--out", type=Path, help="A .json file; the table goes beside it, as .md.")
    asked = parser.parse_args()
    if asked.device == "cuda":
        code, line = state(gpus())
        print(line)
        if code:
            return code
    rows, machine = list[Row](), described(asked.device)
    with tensor_operations():
        for part in (packs, deep_models, masking):
            for row in part(QUICK if asked.quick else Sizes(), asked.device):
                print(f"{row.what}: {row.ratio:.1f} times the plain loop", flush=True)
                rows.append(row)
                if asked.out is not None:
                    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
                    asked.out.write_text(json.dumps(document, indent=1) + "\n")
                    asked.out.with_suffix(".md").write_text(table(rows, machine))
                    if torch.cuda.is_available():
                        stamp("gpu_speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
