"""Refusals whose advice is followed: the cure is read from the message, applied, and gives the model of the plain file."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.modules.hooked import hook_module
from mechinterp.config.task import TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import predictor_of
from tests.checkpoints.files import assert_refused, assert_same_circuits, hugging_face, saved
from tests.checkpoints.foreign_files import LAYOUTS, State, random_heads

HEADS = random_heads()
STATE = LAYOUTS["modules {x}_proj"](HEADS)
HINTS = {"n_heads": 2, "score": "softmax", "scale": 0.5, "columns": "x,y", "attend_to_self": False, "sign": "plus", "model": {"positions": "none"}}  # fmt: skip


def refusal(path: Path, **hints: object) -> str:
    """The message with which a path is refused."""
    with pytest.raises(CheckpointError) as error:
        load(path, **(HINTS | hints))
    return str(error.value)


def options_in(message: str) -> dict[str, object]:
    """The options that a message says to type, such as --map NAME=unused or --weights ema."""
    found = re.findall(r"--(map|weights|d-x) ([^\s,;()]+?)[.,;]?(?=\s|$)", message)
    options: dict[str, object] = {}
    for name, value in found:
        if name == "map" and value.endswith("=unused"):
            options["map"] = {value.removesuffix("=unused"): "unused"}
        elif name == "weights":
            options["weights"] = value
    return options


def run_code_in(message: str, file: Path, **names: object) -> Path:
    """Run the torch.save(...) that a message says to write; the new file."""
    (code,) = re.findall(r"(torch\.save\(.*\))", message)
    new = file.with_name("cured.pt")
    code = re.sub(r", (FILE|'weights\.pt')\)$", f", {str(new)!r})", code)
    exec(code.replace("FILE", repr(str(file))), {"torch": torch, **names})
    return new


def assert_plain(path: Path, **hints: object) -> None:
    """The weights are those of the plain file."""
    assert_same_circuits(load(path, **(HINTS | hints)).weights, HEADS)


# Files beside or inside which another tensor lies.


@pytest.mark.parametrize(
    "name", ["scaler.weight", "ema_gate.weight", "optimizer_net.weight", "step", "mask.weight"]
)
def test_an_unread_tensor_is_dropped_as_the_message_says(tmp_path: Path, name: str):
    file = saved(tmp_path, STATE | {name: torch.randn(6, 6)})
    options = options_in(refusal(file))
    assert options == {"map": {name: "unused"}}
    assert_plain(file, **options)
    assert load(file, **(HINTS | options)).assumed["unused"] == [name]


def test_only_what_looks_like_a_mask_is_dropped_as_one(tmp_path: Path):
    squares = {"bool": torch.ones(6, 6, dtype=torch.bool).tril(), "ones": torch.ones(1, 6, 6).tril(), "inf": torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)}  # fmt: skip
    for kind, mask in squares.items():
        checkpoint = load(saved(tmp_path, STATE | {f"attn.{kind}": mask}), **HINTS, map={kind: "mask"})  # fmt: skip
        assert_same_circuits(checkpoint.weights, HEADS)
        assert checkpoint.assumed["unused"] == [f"attn.{kind}"]
    others = {"matrix": torch.randn(6, 6), "vector": torch.ones(6), "flags": torch.ones(6, dtype=torch.bool), "wide": torch.ones(2, 6)}  # fmt: skip
    for kind, tensor in others.items():
        file = saved(tmp_path, STATE | {f"attn.temperature_{kind}": tensor})
        message = refusal(file, map={f"temperature_{kind}": "mask"})
        assert "must be squares" in message
        assert_plain(file, **options_in(message))
    assert "must be squares" in refusal(file, map={"q_proj.weight": "mask"})


def test_no_known_name_is_offered_for_a_vector(tmp_path: Path):
    for name in ("scaler.weight", "attn.temperature"):
        message = refusal(saved(tmp_path, STATE | {name: torch.ones(4)}))
        assert "THEIRS" not in message
        assert_plain(tmp_path / "x.pt", **options_in(message))


def test_averaged_weights_are_chosen_as_the_message_says(tmp_path: Path):
    other = {name: tensor + 1 for name, tensor in STATE.items()}
    file = saved(tmp_path, {"ema": STATE, "raw": other})
    assert_plain(file, **options_in(refusal(file)))


def test_a_matrix_under_an_unknown_name_is_stated_as_the_message_says(tmp_path: Path):
    renamed = {name.replace("q_proj", "seeker"): tensor for name, tensor in STATE.items()}
    file = saved(tmp_path, renamed)
    example = re.search(r"such as --map (\w+)=(\w+)", refusal(file))
    assert example is not None
    assert_plain(file, map={"seeker": example[2]})


# Files that code must write again.


def test_a_file_of_the_old_format_is_written_again(tmp_path: Path):
    file = tmp_path / "old.pt"
    torch.save(STATE, file, _use_new_zipfile_serialization=False)
    assert_plain(run_code_in(refusal(file), file))


def test_narrow_numbers_are_widened(tmp_path: Path):
    narrow = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in STATE.items()}
    file = saved(tmp_path, narrow)
    cured = load(run_code_in(refusal(file), file), **HINTS).weights
    plain = load(saved(tmp_path, {n: t.float() for n, t in narrow.items()}), **HINTS).weights
    assert_same_circuits(cured, plain)


def test_quantized_numbers_are_multiplied_by_their_scale(tmp_path: Path):
    state: State = {}
    for name, tensor in STATE.items():
        scale = tensor.abs().amax() / 127
        state |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale[None]}
    message = refusal(saved(tmp_path, state))
    assert "times their scale" in message
    assert "--map" not in message
    cured = {name: state[name] * state[f"{name}_scale"] for name in STATE}
    weights = load(saved(tmp_path, cured), **HINTS).weights
    torch.testing.assert_close(weights.OV, HEADS.OV, rtol=0.05, atol=0.05)


class Projections(nn.Module):
    """Four projections without heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict(
            {
                n.split(".")[1]: nn.Linear(t.shape[1], t.shape[0], bias=False)
                for n, t in STATE.items()
            }
        )
        self.load_state_dict(STATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn["q_proj"](x) * self.attn["k_proj"](x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_programs_and_whole_modules_are_written_as_state_dicts(tmp_path: Path):
    module, example = Projections(), torch.randn(2, 4)
    torch.jit.trace(module, example, check_trace=False).save(str(tmp_path / "traced.pt"))
    torch.save(module, tmp_path / "whole.pt")
    for name in ("traced.pt", "whole.pt"):
        assert_plain(run_code_in(refusal(tmp_path / name), tmp_path / name, model=module))


@pytest.mark.slow
def test_an_exported_program_is_written_as_a_state_dict(tmp_path: Path):
    program = torch.export.export(Projections(), (torch.randn(2, 4),))
    torch.export.save(program, tmp_path / "x.pt2")
    assert_plain(run_code_in(refusal(tmp_path / "x.pt2"), tmp_path / "x.pt2"))


def test_a_tensor_without_a_name_gets_one(tmp_path: Path):
    W = torch.randn(5, 5)
    file = saved(tmp_path, W)
    message = refusal(file)
    assert "--map" not in message
    cured = run_code_in(message, file)
    sizes = [
        int(n)
        for n in re.findall(
            r"(\d+) \((?:the matrix acts|on x alone)", assert_refused("d_x", load, cured)
        )
    ]
    assert sizes == [4, 5]
    for d_x in sizes:
        torch.testing.assert_close(load(cured, d_x=d_x).weights.QK[0, :d_x, :d_x], W.mT[:d_x, :d_x])


# Folders and files of several files.


def test_a_shard_leads_to_the_index_of_all(tmp_path: Path):
    folder = hugging_face(tmp_path / "model", {}, STATE, shards=2)
    index = folder / "model.safetensors.index.json"
    for i, shard in enumerate(sorted(folder.glob("model-*.safetensors"))):
        new = folder / f"model-0000{i + 1}-of-00002.safetensors"
        index.write_text(index.read_text().replace(shard.name, new.name))
        shard.rename(new)
    (folder / "config.json").unlink()
    message = refusal(folder / "model-00001-of-00002.safetensors")
    named = re.search(r"name (\S+), or", message)
    assert named is not None
    assert_plain(Path(named[1]))
    assert_plain(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_converted_by_the_named_command(tmp_path: Path):
    import torch.distributed.checkpoint as distributed

    folder = tmp_path / "run"
    distributed.save(dict(STATE), checkpoint_id=folder, no_dist=True)
    for path in (folder, folder / "__0_0.distcp", folder / ".metadata"):
        found = re.search(r"python (.*) FOLDER weights\.pt", refusal(path))
        assert found is not None
        new = tmp_path / "weights.pt"
        words = [sys.executable, "-W", "ignore", *shlex.split(found[1]), str(folder), str(new)]
        subprocess.run(words, check=True, capture_output=True)
        assert_plain(new)
        new.unlink()


def test_a_folder_of_deepspeed_leads_to_the_model_states(tmp_path: Path):
    folder, step = tmp_path / "run", tmp_path / "run" / "global_step1"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    named = re.search(r"name the file (\S+) in", refusal(folder))
    assert named is not None
    torch.save({"module": STATE}, step / named[1])
    assert_plain(step / named[1])
    other = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"groups": [torch.ones(3)]}}, other)
    assert "beside it" in refusal(other)
    assert named[1] in refusal(step)


# Models that no file gives, and modules that can be hooked.


class WithPositions(nn.Module):
    """One layer of softmax attention whose scores depend on the distance of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))
        self.rel_pos_bias = nn.Parameter(torch.randn(2, 40))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (
            part(tokens).unflatten(-1, (2, 2)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        place = torch.arange(tokens.shape[1])
        scores = q @ k.mT + self.rel_pos_bias[:, (place[:, None] - place).abs()]
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Grouped(nn.Module):
    """One layer of two heads that share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.k_proj, self.v_proj = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        q = self.q_proj(tokens).unflatten(-1, (2, 2)).transpose(1, 2)
        k, v = (part(tokens)[:, None] for part in (self.k_proj, self.v_proj))
        return self.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("make", [WithPositions, Grouped])
def test_a_module_that_no_file_gives_is_hooked(tmp_path: Path, make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    module = make()
    message = refusal(saved(tmp_path, module.state_dict()))
    assert "--map" not in message
    assert "hook_module" in message
    task = TaskConfig(d_x=3, context_length=10)
    hooked = hook_module(module, task=task, n_heads=2)
    prompts = draw_prompts(task, 8)
    torch.testing.assert_close(
        predictor_of(hooked).predict(prompts), module(prompts.tokens)[:, -1, -1:]
    )


@pytest.mark.parametrize("names", [("fc1", "fc2"), ("0", "2", "4")])
def test_a_perceptron_is_named_as_a_model_without_attention(tmp_path: Path, names: tuple[str, ...]):
    sizes = [(8, 4), (8, 8), (1, 8)]
    state = {f"{n}.weight": torch.randn(*size) for n, size in zip(names, sizes, strict=False)}
    message = refusal(saved(tmp_path, state))
    assert_needs_attention(message)


def test_a_perceptron_with_a_square_matrix_is_one_too(tmp_path: Path):
    mlp = {"mlp.W_in": torch.randn(8, 3), "mlp.W_out": torch.randn(3, 8), "mlp.basis": torch.eye(3)}
    assert_needs_attention(refusal(saved(tmp_path, mlp)))


def assert_needs_attention(message: str) -> None:
    """No advice, since neither names nor a hooked module help."""
    assert "must have attention" in message
    assert "--map" not in message
    assert "hook_module" not in message


def test_positions_as_lists_of_coefficients_are_named(tmp_path: Path):
    """Attention whose relative positions are vectors C and factors a."""
    state = {f"W_{x}": torch.randn(3, 3, 3) for x in "QKV"}
    state |= {"C_list": torch.randn(2, 7), "a_list": torch.randn(2), "W_before": torch.randn(9, 3)}
    message = refusal(saved(tmp_path, state))
    assert "relative positions" in message
    assert "--map" not in message


def test_words_get_no_advice(tmp_path: Path):
    words = {"tok_emb.weight": torch.randn(33, 4), "lm_head.weight": torch.randn(33, 4)}
    message = refusal(saved(tmp_path, STATE | words))
    assert "word tokens" in message
    assert "--map" not in message


def test_a_low_rank_addition_alone_is_merged_as_the_message_says(tmp_path: Path):
    A, B = torch.randn(2, 4), torch.randn(8, 2)
    adapter = {"attn.q_proj.lora_A.weight": A, "attn.q_proj.lora_B.weight": B}
    message = refusal(saved(tmp_path, adapter))
    assert "model.merge_and_unload().state_dict()" in message
    assert "--map" not in message
