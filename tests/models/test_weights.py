"""Models built on meta get their values from safetensors files, by ranges, or from what their modules initialise."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import npuzero
from models.test_transformers import every_plan
from models.training import TransformersLoop, make_stirred_model
from models.zoo import ZOO
from npuzero import comm, observe
from npuzero.checkpoint.weight_files.read_weights import Weights, parse_weights
from npuzero.comm import World
from npuzero.errors import CheckpointError, ConfigError
from npuzero.shard.find_engine import engine_of
from world.test_modules import TiedBlocksGPT
from world.test_state import NormalizedModel, bits_of_plain
from world.toy import ToyGPT, build_seeded_model
from world.train import CutSession, State, assert_same_bits, assert_states_close, run_plain


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def save_safetensors(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> Path:
    """The model's tensors in one file, by one name each."""
    named = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    save_file({name: tensor.detach().to(dtype).contiguous() for name, tensor in named.values()}, path)
    return path


@pytest.mark.parametrize("name", ZOO)
@every_plan
def test_transformers_models_from_meta(name: str, plan: str, tmp_path: Path) -> None:
    """transformers writes, each rank reads what rests with it, and training goes as if from a plain model."""
    source = build_seeded_model(make=make_stirred_model(name))
    source.save_pretrained(tmp_path, save_original_format=False)
    loop = TransformersLoop(steps=2)

    def rank(world: World) -> tuple[State, State]:
        model = build_on_meta(ZOO[name])
        initialize = model._init_weights  # for buffers that no file has
        session = CutSession(model, world, plan=plan, weights=tmp_path, initialize=initialize)
        first = session.state() | {key: value.clone() for key, value in model.named_buffers()}
        loop(session)
        return first, session.state()

    expected = bits_of_plain(source) | dict(source.named_buffers())
    for first, last in comm.run_threads(2, rank):
        assert_same_bits(first, expected)
        assert_states_close(last, run_plain(loop, 2, make_stirred_model(name)))


@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("make", [ToyGPT, TiedBlocksGPT, NormalizedModel])
def test_every_plan_reads_the_same_bits(make: Any, plan: str, tmp_path: Path) -> None:
    """Also where the model has data of its own, and in another dtype than the files'."""
    source = build_seeded_model(make=make)
    path = save_safetensors(source, tmp_path / "one.safetensors")

    def rank(world: World) -> list[State]:
        models = [build_seeded_model(seed=5, make=make)]
        if make is not NormalizedModel:  # whose scratch is in no file
            models.append(build_on_meta(make))
        for model in models:
            npuzero.zero(model, plan=plan, local_size=2, world=world, weights=path)
        low = npuzero.zero(
            build_seeded_model(seed=5, make=make), plan=plan, local_size=2, world=world, weights=path, precision="bf16"
        )
        low_state = npuzero.full_state_dict(low, rank0_only=False)
        expected = {name: value.bfloat16() for name, value in source.named_parameters(remove_duplicate=False)}
        assert_same_bits({name: low_state[name] for name in expected}, expected)
        for flat in engine_of(low).flats():
            exact = torch.zeros(flat.layout.numel)
            for slot in flat.layout.slots:
                exact[slot.begin : slot.end] = source.get_parameter(slot.name).detach().reshape(-1)
            assert torch.equal(flat.master, exact[slice(*flat.rests.states.range)])
        return [npuzero.full_state_dict(model, rank0_only=False) for model in models]

    for states in comm.run_threads(4, rank):
        for state in states:
            assert_same_bits(state, bits_of_plain(source))


def test_bfloat16_files_fill_float32_models(tmp_path: Path) -> None:
    path = save_safetensors(build_seeded_model(), tmp_path / "low.safetensors", torch.bfloat16)

    def rank(world: World) -> State:
        return npuzero.full_state_dict(
            npuzero.zero(build_on_meta(ToyGPT), 3, world=world, weights=path), rank0_only=False
        )

    expected = {name: value.bfloat16().float() for name, value in bits_of_plain(build_seeded_model()).items()}
    assert_same_bits(comm.run_threads(2, rank)[1], expected)


def test_each_rank_reads_its_own_bytes(tmp_path: Path) -> None:
    """Under zero3 every byte of a parameter is read once, by the rank it rests with, buffers by all."""
    path = save_safetensors(build_seeded_model(), tmp_path / "model.safetensors")
    seen = observe.Events()

    def rank(world: World) -> int:
        model = npuzero.zero(build_on_meta(ToyGPT), 3, world=world, weights=path)
        resting = 0
        for flat in (flat for unit in engine_of(model).units for flat in unit.flats):
            first, last = flat.rests.parameters.range
            resting += 4 * sum(max(0, min(s.end, last) - max(s.begin, first)) for s in flat.layout.slots)
        return resting + model.seen.nbytes

    with observe.recording(seen):
        resting = comm.run_threads(3, rank)
    read: Counter[int] = Counter()
    for event in seen.events:
        if event.category == "weights":
            read[event.rank] += event.facts["nbytes"]
    assert [read[rank] for rank in range(3)] == resting
    parameters = sum(parameter.nbytes for parameter in build_seeded_model().parameters())
    assert sum(resting) == parameters + 3 * build_seeded_model().seen.nbytes
    assert max(resting) < 0.5 * parameters


# -- what no file has --------------------------------------------------------------------------------------------------


class SelfInitialisingModel(nn.Module):
    """Of torch's own modules alone, which initialise themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
        self.blocks = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def assert_same_spread(found: Tensor, expected: Tensor, name: str) -> None:
    """Of two drawings from one distribution, by the logarithm of their ratio: its own spread is 1 / sqrt(elements)."""
    assert abs(math.log(found.std() / expected.std())) < 0.3 + 5 / math.sqrt(expected.numel()), name


@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_torchs_modules_initialise_themselves(plan: str) -> None:
    """As they would have been made: the same spread, zeros and ones where these belong, buffers too."""

    def rank(world: World) -> State:
        model = npuzero.zero(build_on_meta(SelfInitialisingModel), plan=plan, local_size=2, world=world)
        assert model.head.weight is model.embed.weight
        state = npuzero.full_state_dict(model, rank0_only=False)
        model(torch.arange(10).view(2, 5)).sum().backward()
        return state

    states = comm.run_threads(4, rank)
    for name, value in build_seeded_model(make=SelfInitialisingModel).state_dict().items():
        found = states[0][name]
        assert all(torch.equal(state[name], found) for state in states), name
        assert found.dtype == value.dtype
        if value.unique().numel() == 1:
            assert torch.equal(found, value), name
        else:
            assert_same_spread(found, value, name)


@pytest.mark.parametrize("name", ZOO)
def test_transformers_initialises(name: str) -> None:
    """Its rules reach from outer modules into inner ones: GPT-2's projections, T5's attention."""

    def rank(world: World) -> State:
        model = build_on_meta(ZOO[name])
        npuzero.zero(model, 3, world=world, initialize=model._init_weights)
        return npuzero.full_state_dict(model, rank0_only=False)

    first, second = comm.run_threads(2, rank)
    assert_same_bits(first, second)
    for key, value in build_seeded_model(make=ZOO[name]).state_dict().items():
        if value.unique().numel() == 1:
            assert torch.equal(first[key], value), key
        else:
            assert_same_spread(first[key], value, key)


def test_a_new_head_over_a_trained_body(tmp_path: Path) -> None:
    path = save_safetensors(build_seeded_model(make=SelfInitialisingModel), tmp_path / "body.safetensors")

    def make() -> nn.Module:
        model = SelfInitialisingModel()
        model.head = nn.Linear(16, 3)
        return model

    def rank(world: World) -> State:
        weights = Weights(path, rename=lambda name: None if name.startswith("head") else name, partial=True)
        return npuzero.full_state_dict(
            npuzero.zero(build_on_meta(make), 3, world=world, weights=weights), rank0_only=False
        )

    state = comm.run_threads(2, rank)[1]
    source = bits_of_plain(build_seeded_model(make=SelfInitialisingModel))
    assert state["head.weight"].shape == (3, 16) and 0 < state["head.weight"].abs().max() <= 0.25
    kept = [name for name in state if not name.startswith("head")]
    assert_same_bits({name: state[name] for name in kept}, {name: source[name] for name in kept})


class RotaryBuffer(nn.Module):
    """A buffer that is computed once, saved nowhere, and lost on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.turn = nn.Module()
        self.turn.register_buffer("frequencies", torch.arange(4.0), persistent=False)


@pytest.mark.parametrize(
    ("initialize", "says"),
    [
        (None, "buffer turn.frequencies.*weights=, or a module.*on meta.*initialize="),
        (lambda module: None, "first values of turn.frequencies.*filled by initialize=.*left as it was"),
    ],
)
def test_buffers_that_are_lost_on_meta(initialize: Any, says: str, tmp_path: Path) -> None:
    path = save_safetensors(build_seeded_model(make=RotaryBuffer), tmp_path / "rotary.safetensors")

    def rank(world: World) -> None:
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            npuzero.zero(build_on_meta(RotaryBuffer), 3, world=world, weights=path, initialize=initialize)

        def again(module: nn.Module) -> None:
            if hasattr(module, "frequencies"):
                module.frequencies.copy_(torch.arange(4.0))

        model = npuzero.zero(build_on_meta(RotaryBuffer), 3, world=world, weights=path, initialize=again)
        assert model.turn.frequencies.tolist() == [0, 1, 2, 3]

    comm.run_threads(2, rank)


# -- files that do not fit, or are torn --------------------------------------------------------------------------------


def drop_tensor(name: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key != name}


MISFITS: dict[str, tuple[Callable[[State], State], str]] = {
    "missing": (drop_tensor("norm.weight"), r"tensor norm.weight: expected values of norm.weight, \[16\]; got none"),
    "misspelt": (
        lambda state: {f"norms{name[4:]}" if name == "norm.weight" else name: value for name, value in state.items()},
        r"tensor norm.weight: .* got none; there is 'norms.weight' among \d+ names",
    ),
    "unknown": (lambda state: state | {"more": torch.zeros(2)}, "1 that the model has not, such as more"),
    "shape": (lambda state: state | {"norm.weight": torch.zeros(17)}, r"tensor norm.weight: expected \[16\].*\[17\]"),
    "dtype": (lambda state: state | {"norm.weight": torch.zeros(16, dtype=torch.int32)}, "norm.weight.*int32"),
}


@pytest.mark.parametrize(("change", "says"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_named(change: Callable[[State], State], says: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    state = {name: value for name, value in bits_of_plain(build_seeded_model()).items() if name != "head.weight"}
    save_file(change(state), path)

    def rank(world: World) -> None:
        with pytest.raises(CheckpointError, match=says) as caught:
            npuzero.zero(build_on_meta(ToyGPT), 3, world=world, weights=path)
        assert "other.safetensors" in str(caught.value)

    comm.run_threads(2, rank)


def test_files_on_some_ranks_only(tmp_path: Path) -> None:
    """A rank without them says so to the others, and so does one whose files are other ones."""
    save_safetensors(build_seeded_model(), tmp_path / "rank0.safetensors")
    save_safetensors(build_seeded_model(), tmp_path / "same.safetensors")

    def rank(world: World) -> None:
        kind = CheckpointError if world.rank == 1 else ConfigError
        with pytest.raises(kind, match=r"rank1\.safetensors.*No such file"):
            npuzero.zero(build_seeded_model(), 3, world=world, weights=tmp_path / f"rank{world.rank}.safetensors")
        with pytest.raises(ConfigError, match="weights: expected the same on every rank"):
            name = ("same", "rank0")[world.rank]
            npuzero.zero(build_seeded_model(), 3, world=world, weights=tmp_path / f"{name}.safetensors")
        npuzero.zero(build_seeded_model(), 3, world=world, weights=tmp_path / "same.safetensors")

    comm.run_threads(2, rank)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no weight_map"),
        ('{"weight_map": {"norm.weight": "../model.safetensors"}}', "no file beside it"),
        ('{"weight_map": {"norm.weight": 3}}', "no file beside it"),
        ('{"weight_map": {"norm.weight": "gone.safetensors"}}', r"gone\.safetensors.*No such file"),
        ('{"weight_map": {"more": "model-1.safetensors"}}', r"model-1\.safetensors: tensor more.*no tensor"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_indices_that_lead_nowhere(index: str, says: str, tmp_path: Path) -> None:
    save_safetensors(build_seeded_model(), tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=says):
        npuzero.zero(build_seeded_model(), 3, world=comm.SingleWorld(), weights=tmp_path)


def test_no_files_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*No such file"):
        npuzero.zero(build_seeded_model(), 3, world=comm.SingleWorld(), weights=tmp_path)
    with pytest.raises(ConfigError, match="weights: expected a path"):
        npuzero.zero(build_seeded_model(), 3, world=comm.SingleWorld(), weights=build_seeded_model().state_dict())  # type: ignore[arg-type]


def split_safetensors_header(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_safetensors_header(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def change_tensor_facts(**facts: Any) -> Callable[[bytes], bytes]:
    """The file with other facts about one tensor."""

    def change(raw: bytes) -> bytes:
        header, data = split_safetensors_header(raw)
        header["norm.weight"] |= facts
        return join_safetensors_header(header, data)

    return change


TORN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "seven bytes": lambda raw: raw[:7],
    "no header": lambda raw: raw[:8],
    "half a header": lambda raw: raw[:50],
    "half the data": lambda raw: raw[: -len(split_safetensors_header(raw)[1]) // 2],
    "a byte less": lambda raw: raw[:-1],
    "a byte more": lambda raw: raw + b"x",
    "a huge header": lambda raw: b"\xff" * 8 + raw[8:],
    "a list": lambda raw: join_safetensors_header([1], b""),
    "deep": lambda raw: join_safetensors_header(b"[" * 100_000, b""),
    "no text": lambda raw: join_safetensors_header(b"\xff\xfe", b""),
    "twice": lambda raw: join_safetensors_header(b'{"a": 1, "a": 2}', b""),
    "no facts": lambda raw: join_safetensors_header({"a": None}, b""),
    "unknown dtype": change_tensor_facts(dtype="F128"),
    "dtype of no text": change_tensor_facts(dtype=["F32"]),
    "negative size": change_tensor_facts(shape=[-16]),
    "size of no number": change_tensor_facts(shape=["16"]),
    "true as a size": change_tensor_facts(shape=[True]),
    "huge size": change_tensor_facts(shape=[2**62, 2**62]),
    "offsets the other way": change_tensor_facts(data_offsets=[64, 0]),
    "offsets beyond": change_tensor_facts(data_offsets=[2**40, 2**40 + 64]),
    "three offsets": change_tensor_facts(data_offsets=[0, 64, 64]),
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_torn_files_are_named(tear: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = save_safetensors(build_seeded_model(), tmp_path / "torn.safetensors")
    path.write_bytes(tear(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"torn\.safetensors.*expected a whole safetensors file"):
        npuzero.zero(build_seeded_model(), 3, world=comm.SingleWorld(), weights=path)


def test_random_damage_is_an_error_or_other_values(tmp_path: Path) -> None:
    """A thousand files with bytes changed or cut off: what is read never lies outside of the file."""
    path = save_safetensors(build_seeded_model(), tmp_path / "damaged.safetensors")
    whole, chance = path.read_bytes(), random.Random(0)
    model, refused = build_seeded_model(), 0
    for _ in range(1000):
        raw = bytearray(whole)
        if chance.random() < 0.5:
            raw[chance.randrange(len(raw) if chance.random() < 0.2 else 2000)] ^= 1 << chance.randrange(8)
        else:
            del raw[chance.randrange(len(raw)) :]
        path.write_bytes(raw)
        values = parse_weights(path)
        try:
            values.check(model)
            for name, tensor in model.state_dict().items():
                assert values.read(name, 0, tensor.numel()).numel() == tensor.numel()
        except CheckpointError as error:
            assert "damaged.safetensors" in str(error)
            refused += 1
        finally:
            values.close()
    assert refused > 600


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = save_safetensors(build_seeded_model(), tmp_path / "shrinks.safetensors")
    values = parse_weights(path)
    values.check(build_seeded_model())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"shrinks\.safetensors: tensor .*the file's end"):
        for name, tensor in build_seeded_model().state_dict().items():
            values.read(name, 0, tensor.numel())
    values.close()
