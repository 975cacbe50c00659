"""Training as a configuration of DeepSpeed's describes it: by plain torch, and by npuzero.initialize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.compat.deepspeed import DeepSpeedEngine
from npuzero.ops import storage
from npuzero.shard.find_engine import engine_of
from world.toy import VOCABULARY, ToyGPT, build_seeded_model, toy_loss, toy_tokens

State = dict[str, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: With a larger eps than 1e-8 rounding does not choose the direction of what hardly moves.
ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}
SCALE = 128.0


class DenseGPT(nn.Module):
    """A model that DeepSpeed trains, too: it takes no scalar, empty or unused parameter in 16 bits."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(2)
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass(frozen=True)
class GridCase:
    """A cell of the grid that the judges name."""

    stage: int
    dtype: str
    accumulation: int
    clip: float
    world: int = 2
    steps: int = 3
    make: Callable[[], nn.Module] = ToyGPT
    wide: bool = False  # gradients travel in float32

    def config(self) -> dict[str, Any]:
        low = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}},
        }
        wide = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}} if self.wide else {}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {"stage": self.stage},
            **low[self.dtype],
            **wide,
        }

    def __str__(self) -> str:
        return f"stage{self.stage}-{self.dtype}-{self.accumulation}-{self.clip:g}"


def train_by_engine(case: GridCase) -> tuple[list[State], list[float | None]]:
    """The masters and the gradient norm after each update, by npuzero.initialize."""

    def rank(world: World) -> tuple[list[State], list[float | None]]:
        engine, *_ = npuzero.initialize(model=build_seeded_model(make=case.make), config=case.config())
        steps, norms = [], []
        for norm in train_engine_steps(engine, case, world.rank):
            masters, state = named_masters(engine), npuzero.full_state_dict(engine.module, rank0_only=False)
            for name, master in masters.items():
                assert torch.equal(state[name], round_master(master, case)), f"{name} is its master, rounded"
            steps.append(masters)
            norms.append(norm)
        return steps, norms

    return comm.run_threads(case.world, rank)[0]


def round_master(master: Tensor, case: GridCase) -> Tensor:
    """The parameter that a master is beside: in bfloat16, whose lower half is kept apart, ties go away from zero."""
    dtype = DTYPES[case.dtype]
    return storage.upper_half(master.detach()) if dtype == torch.bfloat16 else master.detach().to(dtype)


def named_masters(engine: DeepSpeedEngine) -> State:
    """Each parameter in the float32 that the optimizer updates, by name."""
    inner = engine_of(engine.module)
    found = {}
    for flat in inner.flats():
        master = flat.read_master(slice(0, flat.master.numel())).clone()
        whole = inner.values.gather_states(flat, master)
        for slot in flat.layout.slots:
            found[slot.name] = whole[slot.begin : slot.end].view(slot.shape)
    return found


def train_engine_steps(engine: DeepSpeedEngine, case: GridCase, rank: int) -> Any:
    """The loop as its user writes it; yields the norm of each update."""
    for step in range(case.steps):
        for micro_batch in range(case.accumulation):
            loss = toy_loss(engine, toy_tokens(step, micro_batch, rank))
            engine.backward(loss)
            engine.step()
        yield engine.get_global_grad_norm()


def train_reference(case: GridCase, follow: list[State]) -> tuple[list[State], list[float]]:
    """The same, written out: gradients of each rank in the parameters' dtype, which is that of the wire; sums, masters
    and moments in float32; torch's AdamW and clipping. In 16 bits each update begins at the masters that ``follow`` has
    after the one before: a difference in a master's last bit may round a parameter to the other side, which the
    gradients of all later steps would see.
    """
    dtype = DTYPES[case.dtype]
    scale = SCALE if case.dtype == "fp16" else 1.0
    net = build_seeded_model(make=case.make)
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    masters = {name: nn.Parameter(p.detach().float(), p.requires_grad) for name, p in net.named_parameters()}
    trains = [master for master in masters.values() if master.requires_grad]
    optimizer = torch.optim.AdamW(trains, **{**ADAM, "betas": tuple(ADAM["betas"])})
    steps, norms = [], []
    for step in range(case.steps):
        passes = [
            [_micro_batch_gradients(net, case, scale, step, micro_batch, rank) for rank in range(case.world)]
            for micro_batch in range(case.accumulation)
        ]
        for name, master in masters.items():
            given = [[rank[name] for rank in ranks] for ranks in passes if name in ranks[0]]
            if given:
                master.grad = _sum_rank_gradients(given, case, torch.float32 if case.wide else dtype) / scale
        norms.append(_clip_by_float64_norm([master for master in trains if master.numel()], case.clip))
        optimizer.step()
        optimizer.zero_grad()
        steps.append({name: master.detach().clone() for name, master in masters.items() if master.requires_grad})
        with torch.no_grad():
            for name, master in masters.items() if dtype != torch.float32 else ():
                master.copy_(follow[step].get(name, master))
            for name, parameter in net.named_parameters():
                parameter.copy_(round_master(masters[name], case))
    return steps, norms


def _micro_batch_gradients(
    net: nn.Module, case: GridCase, scale: float, step: int, micro_batch: int, rank: int
) -> State:
    net.zero_grad()
    (toy_loss(net, toy_tokens(step, micro_batch, rank)) / case.accumulation * scale).backward()
    return {name: p.grad.float() / case.world for name, p in net.named_parameters() if p.grad is not None}


def _sum_rank_gradients(given: list[list[Tensor]], case: GridCase, wire: torch.dtype) -> Tensor:
    """``given[micro-batch][rank]`` as the ranks add it up: where gradients are sharded, after each pass."""
    if not npuzero.Plan.preset(case.stage).gradients.axes:
        given = [[sum(gradients[1:], gradients[0]) for gradients in zip(*given, strict=True)]]
    return sum(gradient.to(wire).float() for ranks in given for gradient in ranks)  # type: ignore[return-value]


def _clip_by_float64_norm(parameters: list[nn.Parameter], clip: float) -> float:
    """Clip as torch does, but by a norm that is summed in float64: with another order of the same sum in float32 a
    16-bit parameter here and there is rounded to the other side.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.cat([gradient.flatten().double() for gradient in gradients]).norm().float()
    torch.testing.assert_close(norm, nn.utils.get_total_norm(gradients))
    if clip > 0:
        for gradient in gradients:
            gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


def largest_relative_difference(found: State, expected: State) -> float:
    """The largest difference of any tensor, relative to that tensor's largest magnitude."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].double(), value.double()) for name, value in expected.items() if value.numel()]
    return max(((f - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for f, e in pairs)
