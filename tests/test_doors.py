"""Every public analysis takes every kind of model: it answers, or refuses in one line.

`python -m tests.test_doors` prints the table: A answers, r refuses, - does neither.
"""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import jaxtyping
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

import mechinterp as mi
from mechinterp.analysis.ablation.pruned import save_pruned
from mechinterp.analysis.ablation.pruning_rules import best_head_later
from mechinterp.analysis.comparison import compare
from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.analysis.training.history import history
from mechinterp.analysis.training.sampler import Chains
from mechinterp.checkpoints.checkpoint import checkpoint_of, save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.report.info import info_document
from mechinterp.report.page import write_report
from mechinterp.report.to_json import dumps
from mechinterp.training.general.trainer import initial_deep_weights
from tests.checkpoints.files import hugging_face, saved
from tests.checkpoints.foreign_files import attention_module, random_heads
from tests.conftest import sampled
from tests.deep_models import random_gpt2
from tests.models.test_layered_models import encoder, garg

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "checkpoints"
PACKAGE = Path(mi.__file__).parent
LONGEST = 200
SHORTEST_CHAINS = Chains(n_chains=2, n_draws=8, n_warmup=8, n_leapfrog=2)
SHORTENED: dict[str, dict[str, object]] = {
    "local-learning-coefficient": {"chains": SHORTEST_CHAINS},
}
"""Settings of analyses by name, where only the form of what they say is asked for."""
SHARE = 0.6
"""Of all pairs, how many answer, at least."""


@dataclass(frozen=True)
class Case:
    """A source, and what its analyses are given with it."""

    source: object
    """A checkpoint, a hooked model or a predictor."""
    heads: tuple[int, int]
    """Number of layers, and of heads in each."""
    task: TaskConfig
    folder: Path
    """Free for what is written."""
    dtype: torch.dtype = torch.float32

    def prompts(self, seed: int = 0) -> Prompts:
        generator = generator_for(seed, "eval", 0)
        return draw_prompts(self.task, 192, generator=generator, context_length=8, dtype=self.dtype)

    @property
    def pool(self) -> torch.Tensor:
        return replace(self.task, n_tasks=3).pool()

    @property
    def all_heads(self) -> np.ndarray:
        return np.ones(self.heads, dtype=bool)


def shipped(name: str, *heads: int) -> Callable[[Path], Case]:
    """A checkpoint of this repository."""

    def build(folder: Path) -> Case:
        checkpoint = mi.load(SHIPPED / name)
        return Case(checkpoint, heads, checkpoint.task, folder)

    return build


def loaded(path: Path, *heads: int, **hints: int) -> Case:
    """The checkpoint that a file is read as."""
    checkpoint = mi.load(path, **hints)
    return Case(checkpoint, heads, checkpoint.task, path.parent)


def deep_softmax(folder: Path) -> Case:
    config = ExperimentConfig(
        task=TaskConfig(d_x=3, context_length=8),
        model=ModelConfig(n_layers=2, n_heads=2, context_only=True),
    )
    save(folder / "model", config, initial_deep_weights(config), step=0)
    return loaded(folder / "model", 2, 2)


def norm_and_mlp(folder: Path) -> Case:
    settings = {"nhead": 2, "norm_first": True}
    state = encoder(4, norm_first=True).state_dict()
    return loaded(hugging_face(folder / "model", settings, state), 2, 2)


def gpt2_file(folder: Path) -> Case:
    return loaded(saved(folder, garg().state_dict()), 3, 4, n_heads=4)


def encoder_file(folder: Path) -> Case:
    return loaded(saved(folder, encoder(4).state_dict()), 2, 2, n_heads=2)


def hugging_face_folder(folder: Path) -> Case:
    module = attention_module(0, width=4, n_heads=2, bias=True)
    return loaded(hugging_face(folder / "model", {"num_heads": 2}, module.state_dict()), 1, 2)


def hooked_transformer(folder: Path) -> Case:
    return loaded(saved(folder, hooked_state(random_heads(d_head=2), n_ctx=50)), 1, 2)


def bridge(folder: Path) -> Case:
    """What TransformerLens 4's own model of our weights gives as its parameters."""
    import transformer_lens.model_bridge.sources  # noqa: F401
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    sizes = {"n_layers": 1, "d_model": 5, "d_head": 5, "n_heads": 2, "n_ctx": 50}
    words = {"d_vocab": 2, "d_vocab_out": 2, "default_prepend_bos": False}
    plain = {"attn_only": True, "normalization_type": None, "device": "cpu"}
    model = TransformerBridge.boot_native(TransformerBridgeConfig(**sizes, **words, **plain))
    state = hooked_state(random_heads(d_y=2), n_ctx=50)
    model.load_state_dict(convert_tl_checkpoint(state, model.cfg), strict=True)
    return loaded(saved(folder, dict(model.tl_parameters())), 1, 2)


def bare_model(folder: Path) -> Case:
    task = TaskConfig(d_x=3, context_length=8)
    return Case(ICLTransformer.from_weights(random_heads(), task=task), (1, 2), task, folder)


def predictor(folder: Path) -> Case:
    task = TaskConfig(d_x=4, context_length=8)
    return Case(random_gpt2(), (3, 2), task, folder, dtype=torch.float64)


SOURCES: dict[str, Callable[[Path], Case]] = {
    "softmax": shipped("softmax-h2-s0", 1, 2),
    "several-responses": shipped("two-tasks-h3-s0", 1, 3),
    "linear-merged": shipped("linear-merged-s0", 1, 8),
    "linear-separate": shipped("linear-separate-s0", 1, 5),
    "recurrent": shipped("gated-delta-h1-drift0.95-s0", 1, 1),
    "deep-linear": shipped("pool-linear-m4-s0", 3, 4),
    "deep-softmax": deep_softmax,
    "norm-and-mlp": norm_and_mlp,
    "gpt2": gpt2_file,
    "encoder": encoder_file,
    "hugging-face": hugging_face_folder,
    "hooked-transformer": hooked_transformer,
    "bridge": bridge,
    "bare-model": bare_model,
    "predictor": predictor,
}


def from_circuits(case: Case) -> object:
    circuits = mi.circuits(case.source)
    return mi.classify_circuits(circuits.QK, circuits.OV, case.task.d_y, n_prompts=64)


def written(case: Case, target: str) -> list[Path]:
    name = "as.npz" if target == "npz" else f"as-{target}"
    return convert(case.source, target, case.folder / name)


def pruned(case: Case) -> list[Path]:
    folder = case.folder / "pruned"
    save_pruned(case.source, case.all_heads, folder, prompts=case.prompts())
    return sorted(folder.iterdir())


def trained_on(case: Case) -> list[Path]:
    few = ["train.steps=2", "train.n_eval_prompts=16", "train.batch_size=16"]
    adam = ("train.optimizer=adam", "train.init_std=null")
    config = mi.override(checkpoint_of(case.source, "start").config, *few, *adam)
    return sorted(mi.train(config, out=case.folder / "longer", start=case.source).path.iterdir())


def page(case: Case, write: Callable[..., object]) -> str:
    return write(case.source, case.folder / write.__name__, n_prompts=64).page.read_text()


# How a user calls each, with the source itself; other arguments only for size.
ANALYSES: dict[str, Callable[[Case], object]] = {
    "circuits": lambda c: mi.circuits(c.source),
    "classify": lambda c: mi.classify(c.source, n_prompts=64),
    "classify_circuits": from_circuits,
    "name_algorithm": lambda c: mi.name_algorithm(c.source, n_prompts=64),
    "compare_learners": lambda c: mi.compare_learners(c.source, c.prompts()),
    "response": lambda c: mi.response(c.source, n_prompts=512),
    "attention_patterns": lambda c: attention_patterns(c.source, c.prompts()[:8]),
    "ablate heads": lambda c: mi.ablate(c.source, c.prompts(), what="heads"),
    "ablate": lambda c: mi.ablate(c.source, c.prompts()),
    "ablate subsets": lambda c: mi.ablate(c.source, c.prompts(), what="subsets"),
    "ablate shapley": lambda c: mi.ablate(c.source, c.prompts(), what="shapley"),
    "ablate pairs": lambda c: mi.ablate(c.source, c.prompts(), what="pairs"),
    "ablate greedy": lambda c: mi.ablate(c.source, c.prompts(), what="greedy"),
    "ablate positions": lambda c: mi.ablate(c.source, c.prompts()[:16], what="positions"),
    "ablate mlps": lambda c: mi.ablate(c.source, c.prompts(), what="mlps"),
    "prune": lambda c: mi.prune(c.source, c.prompts(), rule=best_head_later),
    "save_pruned": pruned,
    "train start": trained_on,
    "probe": lambda c: mi.probe(c.source, c.prompts()),
    "p_probe": lambda c: mi.p_probe({"model": c.source}, c.prompts(), steps=4),
    "patch_activations": lambda c: mi.patch_activations(
        c.source, c.prompts()[:32], c.prompts(seed=1)[:32]
    ),
    "circuit_faithfulness": lambda c: mi.circuit_faithfulness(
        c.source, None, c.prompts()[:8], corrupted=c.prompts(seed=1)[:8], sizes=[1]
    ),
    "attribute_edges": lambda c: mi.attribute_edges(
        c.source, c.prompts()[:8], corrupted=c.prompts(seed=1)[:8], ig_steps=2
    ),
    "compare_priors": lambda c: mi.compare_priors(
        c.source, task=c.task, pool=c.pool, **FEW_PROMPTS
    ),
    "compare": lambda c: compare([c.source, c.source], n_prompts=64),
    "over_steps": lambda c: mi.over_steps(c.source, "ablate", what="heads", n_prompts=64),
    "linear_components": lambda c: mi.linear_components(c.source),
    "local_learning_coefficient": lambda c: mi.local_learning_coefficient(
        c.source, chains=SHORTEST_CHAINS, n_prompts=16
    ),
    "history": lambda c: history(c.source),
    "info_document": lambda c: dumps(info_document(c.source)),
    "convert native": lambda c: written(c, "native"),
    "convert transformer-lens": lambda c: written(c, "transformer-lens"),
    "convert npz": lambda c: written(c, "npz"),
    "write_report": lambda c: page(c, write_report),
}
FEW_PROMPTS = {"context_lengths": [8], "n_prompts": 64}
PAIRS = list(product(ANALYSES, SOURCES))
BASES = ("softmax", "deep-softmax", "predictor")
"""Sources of which `make test` asks every analysis: one layer, several, and layers of other code."""
LONG = {
    "write_report": "hooked-transformer",
    "info_document": "bridge",
    "local_learning_coefficient": "softmax",
}
"""Analyses that take long, and the source of which `make test` asks each."""


@contextmanager
def as_for_users() -> Iterator[None]:
    """Without the checks of types that tests put around functions; a warning is an error."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def outcome(analysis: str, case: Case) -> str:
    """What comes of it: "answer", "refusal", or in words what is wrong."""
    with as_for_users():
        try:
            fault = fault_of_answer(ANALYSES[analysis](case))
            return f"no answer: {fault}" if fault else "answer"
        except Exception as error:  # whatever comes of it
            fault = fault_of_refusal(error, case)
            return f"{fault}: {type(error).__name__}: {error}" if fault else "refusal"


def fault_of_answer(result: object) -> str:
    """Why it does not serve a user; empty if it has rows and, where it plots, a figure.

    What is no such result (text, files, rows) must hold something.
    """
    if not hasattr(result, "to_frame"):
        return "" if len(result) else "nothing in it"
    frame = result.to_frame()
    if not isinstance(frame, pd.DataFrame) or frame.empty:
        return "to_frame gives no rows"
    if not frame.get("passed", pd.Series([True])).any():
        return "no check passes"
    if hasattr(result, "plot") and not isinstance(result.plot(), go.Figure):
        return "plot gives no figure"
    return ""


def fault_of_refusal(error: Exception, case: Case) -> str:
    """Why an error is no refusal; empty if it is one short sentence of this package.

    The folder that a path lies in does not count.
    """
    message = str(error).replace(str(case.folder), "").replace(str(SHIPPED), "")
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if type(error) not in (ValueError, CheckpointError):
        return "not a ValueError"
    if not raised_in.is_relative_to(PACKAGE) or not message.endswith("."):
        return "not a sentence of this package"
    if "\n" in message or len(message) > LONGEST:
        return f"more than one line of {LONGEST} characters"
    if any(shown in message for shown in (repr(case.source), "tensor(", " object at 0x")):
        return "shows a model or a tensor"
    return ""


def listed(file: str) -> set[tuple[str, str]]:
    """Pairs from lines "analysis: source source ..."."""
    lines = [line.partition(":") for line in (HERE / file).read_text().splitlines()]
    return {(analysis, source) for analysis, _, names in lines for source in names.split()}


ANSWERS = listed("doors_answers.txt")
"""These answer, and must go on."""


def asked(analysis: str) -> set[str]:
    """Sources of `make test` for an analysis; each source is among those of at least two analyses.

    Besides `BASES` they are the first source that answers, the first that refuses, and one in turn.
    """
    if analysis in LONG:
        return {LONG[analysis]}
    turn = list(SOURCES)[list(ANALYSES).index(analysis) % len(SOURCES)]
    answers = [source for source in SOURCES if (analysis, source) in ANSWERS]
    refusals = [source for source in SOURCES if (analysis, source) not in ANSWERS]
    return {*BASES, turn, *answers[:1], *refusals[:1]}


ASKED = {analysis: asked(analysis) for analysis in ANALYSES}


def case_builder(folder: Path) -> Callable[[str], Case]:
    """Builds each source once, when it is first asked for."""

    @cache
    def build(name: str) -> Case:
        (folder / name).mkdir()
        return SOURCES[name](folder / name)

    return build


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_builder(tmp_path_factory.mktemp("doors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("analysis", "source"),
    sampled(PAIRS, keep=lambda pair: pair[1] in ASKED[pair[0]]),
)
def test_it_answers_or_refuses_in_one_line(analysis: str, source: str, case):
    listed_as = "answer" if (analysis, source) in ANSWERS else "refusal"
    assert outcome(analysis, case(source)) == listed_as, "doors_answers.txt lists what answers"


def test_most_pairs_answer():
    assert set(PAIRS) >= ANSWERS
    assert len(ANSWERS) >= SHARE * len(PAIRS)


def lines(pairs: list[tuple[str, str]]) -> str:
    """As `listed` reads them."""
    by_analysis = {a: [s for b, s in pairs if b == a] for a in ANALYSES}
    return "\n".join(f"{a}: {' '.join(sources)}" for a, sources in by_analysis.items() if sources)


def main() -> None:
    """Print the reason of every failure, the lines of doors_answers.txt, and the table."""
    with tempfile.TemporaryDirectory() as folder:
        case = case_builder(Path(folder))
        outcomes = {pair: outcome(pair[0], case(pair[1])) for pair in PAIRS}
    letters = {"answer": "A", "refusal": "r"}
    kinds = {pair: letters.get(what, "-") for pair, what in outcomes.items()}
    for pair, what in outcomes.items():
        if kinds[pair] == "-":
            print(f"{' of '.join(pair)}: {what[:160]!r}")
    print(f"\ndoors_answers.txt\n{lines([pair for pair in PAIRS if kinds[pair] == 'A'])}")
    table = pd.Series(kinds).unstack().loc[list(ANALYSES), list(SOURCES)]
    counts = {kind: (table == kind).sum(axis=1) for kind in "Ar-"}
    print(f"\n{table.assign(**counts).to_string()}")
    print({kind: f"{column.sum() / len(PAIRS):.3f}" for kind, column in counts.items()})


if __name__ == "__main__":
    main()
