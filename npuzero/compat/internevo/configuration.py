"""Translate an InternEvo configuration to npuzero's mesh, plan, settings, precision, optimizer and scaler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch

from npuzero import comm
from npuzero.api import AdamW, LossScaler
from npuzero.comm import Mesh, World
from npuzero.compat.internevo.settle import ISP, Source, get_overlapped_traffic, translate_file, uses_zero_bubble
from npuzero.compat.rules import Decision
from npuzero.compat.translation import Translation
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.mesh import mesh
from npuzero.plan import LOCAL, Placement, Plan, Precision, divisors, parse_precision
from npuzero.schedules import Beta2Scheduler, FineTuneCosineAnnealingWarmupLR

# ZeRO stage by (data ranks that states are sharded over, whether parameters are sharded): zero1.size and fsdp.
_STAGES = {("none", False): 0, ("all", False): 1, ("groups", False): 1.5, ("none", True): 0, ("all", True): 3}
# The least loss scale where a file has none; smaller float32 numbers are subnormal.
_LEAST_SCALE = 2.0**-126


class MeshSizes(TypedDict):
    """Hold the arguments of :func:`npuzero.mesh`."""

    pipe: int
    pod: int
    sequence: int
    tensor: int
    local_size: int | None


class PipelineArguments(TypedDict):
    """Hold the arguments of :func:`npuzero.pipeline` that split a model into stages."""

    schedule: str
    micro_batches: int
    chunks: int


@dataclass(frozen=True)
class Configuration:
    """Hold an InternEvo configuration and its translation, made by :func:`load`.

    Args:
        source: the path of the file.
        values: the assigned values by name, as InternEvo's ``gpc.config`` has them before its defaults.
        translation: the decision for each key.

    Example::

        from npuzero.compat import internevo

        config = internevo.load("7B_sft.py")
        print(config.sizes(64), config.plan(64), config.settings)
    """

    source: str
    values: Mapping[str, Any]
    translation: Translation

    def sizes(self, ranks: int) -> MeshSizes:
        """Return the arguments of :func:`npuzero.mesh` for ``ranks`` ranks.

        Raises:
            ConfigError: a size does not divide the ranks.
        """
        value = self.translation.value
        pipe, tensor = value("parallel.pipeline.size", 1), value("parallel.tensor.size", 1)
        isp = self.mode == ISP
        local = max(1, value("parallel.weight.size", 1)) if isp else 1
        data = _count_groups(ranks, "parallel.pipeline.size", pipe)
        if isp:
            _count_groups(data, "parallel.tensor.size", tensor)
        else:
            data = _count_groups(data, "parallel.tensor.size", tensor)
        alike = _count_groups(data, "parallel.weight.size", local)  # ranks that have the same weights
        zero1 = value("parallel.zero1.size", -1)
        groups = 1 if zero1 <= 0 else _count_groups(alike, "parallel.zero1.size", zero1)
        return MeshSizes(
            pipe=pipe,
            pod=groups if isp else 1,
            sequence=tensor if isp else 1,
            tensor=1 if isp else tensor,
            local_size=local if isp else (zero1 if groups > 1 < zero1 else None),
        )

    def mesh(self, world: World | None = None) -> Mesh:
        """Return the mesh of the ranks of ``world``; None means those of :func:`npuzero.init`. Call it on every rank.

        Raises:
            ConfigError: as for :meth:`sizes`.
        """
        ranks = comm.current_world() if world is None else world
        return mesh(**self.sizes(ranks.size), world=ranks)

    def plan(self, ranks: int) -> Plan:
        """Return the plan for ``ranks`` ranks, with precision and ``local_size``.

        Raises:
            ConfigError: as for :meth:`sizes`.
        """
        sizes = self.sizes(ranks)
        local_size = sizes["local_size"]
        if self.mode == ISP:
            plan = Plan.preset(ISP, precision=self.precision, local_size=local_size)
            # The preset is meant for ranks that share sequences; without them the same placements get another name.
            return plan if sizes["sequence"] > 1 else replace(plan, name="weight")
        whole = bool(self.translation.value("parallel.zero1.fsdp"))
        zero1 = self.translation.value("parallel.zero1.size", -1)
        spread = "groups" if local_size is not None else "none" if self._alone(zero1, ranks, sizes) else "all"
        if self.translation.value("parallel.fsdp.enable"):
            whole, spread = True, "all"
        if (spread, whole) in _STAGES:
            return Plan.preset(_STAGES[spread, whole], precision=self.precision, local_size=local_size)
        local = Placement((LOCAL,))
        return Plan(local, local, local, local, self.precision, local_size, "fsdp in groups")

    @staticmethod
    def _alone(zero1: int, ranks: int, sizes: MeshSizes) -> bool:
        """Return whether each of several data ranks keeps all optimizer states."""
        return zero1 == 1 and ranks > sizes["pipe"] * sizes["tensor"]

    @property
    def mode(self) -> str:
        """Return how tensor ranks divide the work: mtp, msp, fsp or isp."""
        return str(self.translation.value("parallel.tensor.mode") or "mtp")

    @property
    def precision(self) -> Precision:
        """Return the precision for ``model.dtype``."""
        return parse_precision(self.translation.value("model.dtype", "fp16"))

    @property
    def settings(self) -> Settings:
        """Return the settings: overlap, and the bucket size in bytes."""
        said = self.translation.into("Settings")
        names = get_overlapped_traffic(self.translation)
        overlap = names[0] if len(names) == 1 else bool(names)
        return Settings.from_dict({"overlap": overlap, **{key: said[key] for key in ("bucket_bytes",) if key in said}})

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a step, ``data.micro_num``."""
        return int(self.translation.into("pipeline").get("micro_batches", 1))

    @property
    def division(self) -> PipelineArguments:
        """Return the arguments of :func:`npuzero.pipeline`."""
        chunks = self.translation.into("pipeline").get("chunks", 1)
        schedule = "zero-bubble" if uses_zero_bubble(self.translation) else "interleaved" if chunks > 1 else "1f1b"
        return PipelineArguments(schedule=schedule, micro_batches=self.micro_batches, chunks=chunks)

    @property
    def checkpointed(self) -> float:
        """Return the fraction of the blocks that is recomputed in backward, from 0 to 1."""
        return float(self.translation.value("model.checkpoint", 0.0))

    @property
    def max_norm(self) -> float:
        """Return the maximum norm that gradients are clipped to; 0 means no clipping."""
        return float(self.translation.value("hybrid_zero_optimizer.clip_grad_norm", 0.0))

    def adamw(self, parameters: Iterable[torch.nn.Parameter]) -> AdamW:
        """Return AdamW over ``parameters`` with the options of the section ``adam``.

        Raises:
            ConfigError: a key of the section is missing that InternEvo requires as well.
        """
        given = self.translation.into("AdamW")
        keys = {"lr": "lr", "beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps"}
        missing = [f"adam.{key}" for name, key in {**keys, "weight_decay": "weight_decay"}.items() if name not in given]
        if missing:
            do = "Add them; InternEvo needs them, too."
            raise ConfigError(self.source, expected=", ".join(missing), got="no such key", do=do)
        betas = (given.pop("beta1"), given.pop("beta2"))
        return AdamW(parameters, betas=betas, **given)

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> FineTuneCosineAnnealingWarmupLR | None:
        """Return the learning rate schedule; None where the file has none."""
        said = self.translation.into("lr_scheduler")
        return FineTuneCosineAnnealingWarmupLR(optimizer, **said) if said else None

    def beta2_scheduler(self, optimizer: torch.optim.Optimizer) -> Beta2Scheduler | None:
        """Return the schedule of Adam's second beta; None where the file has none."""
        said = self.translation.into("beta2_scheduler")
        return Beta2Scheduler(optimizer, **said) if said else None

    def scaler(self) -> LossScaler:
        """Return the loss scaler. In float32 its scale stays 1, and it still skips steps that are not finite."""
        said = self.translation.into("LossScaler")
        if self.translation.value("model.dtype") in ("fp32", "tf32"):
            return LossScaler(init_scale=1.0, floor=1.0, ceiling=1.0)
        said["floor"] = said.get("floor") or _LEAST_SCALE
        said["ceiling"] = said.get("ceiling") or math.inf
        said["hysteresis"] = max(1, said.get("hysteresis", 1))
        return LossScaler(**said)


def explain(source: Source, world: int | None = None, auto: Mapping[str, Any] | None = None) -> Translation:
    """Return the decision for each key of a configuration; a bad key does not raise here.

    Args:
        source: the path of the file, or its content as nested mappings.
        world: the number of ranks, to resolve sizes for; None leaves sizes unresolved.
        auto: must be empty; it is there for other engines, and InternEvo has no "auto" values.

    Raises:
        ConfigError: the file needs to be run to be read; or ``auto`` has values.

    Example::

        from npuzero.compat import internevo

        for key, value, decision, where, words in internevo.explain("7B_sft.py").rows():
            print(key, value, decision, where, words)
    """
    if auto:
        do = "Leave it out."
        raise ConfigError("auto", expected="nothing: no key of InternEvo's is 'auto'", got=", ".join(auto), do=do)
    evaluated, found = translate_file(source)
    if world is not None and not found.decided(Decision.REFUSED):
        _explain_zero1_size(Configuration(evaluated.source, evaluated.values, found), world)
    return found


def _explain_zero1_size(config: Configuration, world: int) -> None:
    """Describe the plan and mesh that zero1.size gives for ``world`` ranks; refuse sizes that do not divide them."""
    try:
        sizes, plan = config.sizes(world), config.plan(world)
    except ConfigError as error:
        config.translation.refuse(error.subject, f"It is to be {error.expected}. {error.do}")
        return
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, None))
    words = f"Of {world} ranks: the plan {plan.name!r}" + (f", and npuzero.mesh({axes})." if axes else ".")
    config.translation.amend("parallel.zero1.size", Decision.TRANSLATED, words)


def load(source: Source) -> Configuration:
    """Evaluate an InternEvo configuration without running it, and translate it.

    Args:
        source: the path of a ``.py`` file, or its content as nested mappings. Bases that the file imports under
            ``read_base()`` are searched around it.

    Raises:
        ConfigError: the file needs to be run to be read (with its line); or keys that npuzero cannot follow, each with
            an alternative.

    Example::

        from npuzero.compat import internevo

        config = internevo.load("7B_sft.py")
        print(config.plan(ranks=8), config.settings)
    """
    evaluated, translation = translate_file(source)
    translation.check()
    return Configuration(evaluated.source, evaluated.values, translation)


def _count_groups(ranks: int, key: str, size: int) -> int:
    """Return how many groups of ``size`` the ranks form."""
    if ranks % size:
        raise ConfigError(
            key,
            expected=f"a divisor of the {ranks} ranks that are left: {', '.join(map(str, divisors(ranks)))}",
            got=str(size),
            do="Choose among these, or start as many ranks as the sizes multiply to.",
            ranks=ranks,
            size=size,
        )
    return ranks // size
