"""Divide a model into the stages of a pipeline, by the names of its blocks.

``divide_into_stages`` assigns blocks to stages and moves nothing. ``StageDivision.take`` builds one rank's model: its
stages' blocks under their names in the full model, so that checkpoints, norms and exports see one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from torch import nn

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.parallel.pipeline_parallel.choose_splits import BlockCost, Split, split_blocks
from npuzero.parallel.pipeline_parallel.transformers_stages import PipelinePlan, StageSection, get_pipeline_plan
from npuzero.plan import PIPE, Relation
from npuzero.shard.build import check_not_lazy
from npuzero.shard.layout.axis_relations import relate_parameter
from npuzero.shard.layout.find_units import enclosing_paths

_Kind = TypeVar("_Kind", bound="PipelineStages")


@dataclass(frozen=True)
class ParameterLocation:
    """Locate a parameter: all its names in the full model, the first one first, and the blocks that hold it."""

    names: tuple[str, ...]
    blocks: frozenset[str]


@dataclass(frozen=True)
class StageDivision:
    """Hold the blocks of each stage; stage s is on pipeline rank ``s % ranks``.

    Attributes:
        model: the full model.
        ranks: of the pipeline.
        blocks: the names of each stage's blocks, in call order.
        plan: the model's own plan, with which its forward runs; None: blocks are called one after another.
        homes: location of every parameter, by its first name.
        tied: names of parameters that both the first and the last rank hold.
    """

    model: nn.Module = field(repr=False)
    ranks: int
    blocks: tuple[tuple[str, ...], ...]
    plan: PipelinePlan | None = field(repr=False)
    homes: dict[str, ParameterLocation] = field(repr=False)
    tied: tuple[str, ...]

    def take(self, stages: Sequence[int], kind: type[_Kind] | None = None) -> _Kind:
        """Build the module that computes ``stages``, without the blocks of other stages.

        Args:
            stages: numbers of stages, in any order.
            kind: a subclass of :class:`PipelineStages`, called with this division and the numbers.

        Raises:
            ConfigError: there is no such stage; a part of the model has the name of an attribute of the class.
        """
        numbers = tuple(sorted(set(stages)))
        if not numbers or numbers[0] < 0 or numbers[-1] >= len(self.blocks):
            raise ConfigError(
                "pipeline stages",
                expected=f"numbers of stages from 0 to {len(self.blocks) - 1}",
                got=f"{list(stages)}",
                do="A rank has stages of its own number and further ones by the number of ranks.",
            )
        return (kind or PipelineStages)(self, numbers)  # type: ignore[return-value]


def divide_into_stages(
    model: nn.Module,
    ranks: int,
    chunks: int = 1,
    split: Split | None = None,
    blocks: Sequence[nn.Module | str] | None = None,
) -> StageDivision:
    """Divide ``model`` into ``ranks * chunks`` stages, identically on every rank, before :func:`npuzero.zero`.

    No tensor moves, and the model may be on the meta device. Hooks stay on blocks. If blocks are called one after
    another, ``model.forward`` and the hooks of modules around blocks are not called.

    Args:
        ranks: of the pipeline.
        chunks: stages on each rank.
        split: the number of blocks of each stage, or the name of each stage's first block. None: minimize the largest
            cost of a stage, then its parameters (see
            :class:`npuzero.parallel.pipeline_parallel.choose_splits.BlockCost`).
        blocks: modules, or their names, to call one after another, each on the previous output; an nn.ModuleList or
            nn.Sequential stands for its children. None: the children of an nn.Sequential, or the ``base_model_pp_plan``
            of a transformers model, which runs its own forward on every stage.

    Raises:
        ConfigError: there are more stages than blocks; a stage has no parameters; ``split`` or ``blocks`` does not
            match this model, or has a block twice; a parameter is in no block, or tied over ranks other than the first
            and last; the blocks are not given and cannot be found.

    Example::

        from npuzero.parallel.pipeline_parallel.divide import divide_into_stages

        layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
        division = divide_into_stages(layers, ranks=2)
        print(division.blocks)  # (('0', '1'), ('2', '3', '4'))
        second = division.take((1,))
        print([name for name, _ in second.named_parameters()][0])  # 2.weight
    """
    for what, count in (("ranks", ranks), ("chunks", chunks)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"pipeline {what}", expected="a positive number", got=repr(count), do="Give one or more.")
    check_not_lazy(model)
    plan = get_pipeline_plan(model) if blocks is None and not _is_sequential(model) else None
    names = list(plan.arguments) if plan else _list_block_names(model, blocks)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_blocks_disjoint(names, modules)
    homes = _locate_parameters(model, names)
    parts = split_blocks([_measure_block(name, modules[name]) for name in names], ranks * chunks, split)
    return StageDivision(model, ranks, parts, plan, homes, _find_tied_parameters(homes, parts, ranks))


class PipelineStages(nn.Module):
    """Compute the stages of a rank, from a model that :func:`divide_into_stages` has divided.

    Parameters and buffers keep their names and order in the full model.

    Attributes:
        numbers: the stages on this rank, ascending.
        count: the number of all stages.
        blocks_of: the names of each stage's blocks.
        tied: names of parameters here that the ranks at both ends of the pipeline hold; their gradients are summed.
    """

    def __init__(self, division: StageDivision, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = tuple(numbers)
        self.blocks_of = division.blocks
        self.count = len(self.blocks_of)
        tree = _StageModuleTree(division, self.numbers)
        self.tied = tree.tied
        self._units = tree.present
        self._runs = {number: _make_stage_forward(division, number) for number in self.numbers}
        root = tree.grown(division.model, "")
        self.training = division.model.training
        self._buffers = root._buffers
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        for name, part in root._modules.items():
            if hasattr(self, name):
                raise ConfigError(
                    f"pipeline stages: {name}",
                    expected=f"parts of the model by other names than {type(self).__name__} has for itself",
                    got=repr(name),
                    do="Rename this part of the model.",
                )
            self.add_module(name, part)
        for name, parameter in root._parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, stage: int, *args: Any, **options: Any) -> Any:
        """Compute one stage.

        Args:
            stage: its number, one of ``numbers``.
            args: stage 0: the model's own arguments; a later stage: the previous stage's output alone.
            options: the model's keyword arguments, the same on every stage; a chain passes them to the model's first
                block.

        Returns:
            The last stage: the model's output. Other stages: the input of the next stage.

        Raises:
            ConfigError: the stage is not here; the arguments ask for an output that needs all blocks.
        """
        if not isinstance(stage, int):
            raise ConfigError(
                "pipeline(stage, *args)",
                expected=f"the stage's number first, one of {', '.join(map(str, self.numbers))}",
                got=describe_value(stage),
                do="Train and evaluate by pipe.step(batch, target=...); pipe(stage, x) runs one stage.",
            )
        if stage not in self._runs:
            raise ConfigError(
                f"pipeline stage {stage}",
                expected=f"one of the stages {', '.join(map(str, self.numbers))}, which are here",
                got=repr(stage),
                do="Call it where it is.",
            )
        return self._runs[stage](*args, **options)

    def train(self, mode: bool = True) -> PipelineStages:
        """Set training or evaluation mode of all modules here."""
        super().train(mode)
        for run in self._runs.values():
            run.train(mode)
        return self

    def unit_rule(self, name: str, _module: nn.Module) -> bool:
        """Return whether the module ``name`` is a unit, for ``zero(units=)``: every block is its own unit."""
        return name in self._units


class _BlockChain:
    """Call the blocks of a stage one after another."""

    def __init__(self, blocks: Sequence[nn.Module], first: bool) -> None:
        self._blocks = list(blocks)
        self._first = first

    def train(self, mode: bool) -> None:
        """Do nothing: all modules of a chain are in the tree."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        begin, *rest = self._blocks
        x = begin(*args, **options) if self._first else begin(*args)
        for block in rest:
            x = block(x)
        return x


def _make_stage_forward(division: StageDivision, number: int) -> _BlockChain | StageSection:
    if division.plan is None:
        return _BlockChain([division.model.get_submodule(name) for name in division.blocks[number]], number == 0)
    end = [*accumulate(map(len, division.blocks))][number]
    return StageSection(division.model, division.plan, end - len(division.blocks[number]), end)


class _StageModuleTree:
    """Build bare modules that lead to the blocks of some stages, by their names in the full model.

    Modules without parameters, such as rotary embeddings, are on every stage. A parameter keeps its first name in the
    full model, even if it names a block on another stage. A tied parameter keeps all its names: at both ends of
    the pipeline it is in two units, and belongs to the unit around them.
    """

    def __init__(self, division: StageDivision, numbers: Sequence[int]) -> None:
        self._listed = {name for part in division.blocks for name in part}
        self._paths = {path for name in self._listed for path in enclosing_paths(f"{name}.")}
        self.present = {name for number in numbers for name in division.blocks[number]}
        here = {name: home for name, home in division.homes.items() if home.blocks & self.present}
        # Tied means on both ends of the pipeline: a parameter with all its blocks on this rank is stored under one
        # name.
        self.tied = tuple(name for name in here if name in division.tied and not here[name].blocks <= self.present)
        self._names = {said for name, home in here.items() for said in (home.names if name in self.tied else [name])}
        for name in self.tied:
            relate_parameter(division.model.get_parameter(name), PIPE, Relation.SUMMED)

    def grown(self, module: nn.Module, path: str, absent: bool = False) -> nn.Module:
        """Return a bare copy of ``module`` with its parts here; ``absent``: it is in a block of another stage."""
        branch = nn.Module()
        branch.training = module.training
        if not absent:  # share the table, so that replacing a buffer replaces it in both
            branch._buffers = module._buffers
            branch._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name, parameter in module._parameters.items():
            if f"{path}.{name}".lstrip(".") in self._names:
                branch.register_parameter(name, parameter)
        for name, part in module._modules.items():
            place = f"{path}.{name}".lstrip(".")
            if part is None:
                continue
            if place in self.present or not (absent or place in self._paths or _has_parameters(part)):
                found = part
            else:
                found = self.grown(part, place, absent or place in self._listed)
            if place in self.present or _has_parameters(found) or any(True for _ in found.buffers()):
                branch.add_module(name, found)
        return branch


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


# -- blocks ------------------------------------------------------------------------------------------------------------


def _is_sequential(module: nn.Module) -> bool:
    """Return whether a module only calls its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _list_block_names(model: nn.Module, blocks: Sequence[nn.Module | str] | None) -> list[str]:
    """Return the names of the blocks in call order."""
    if blocks is None and not _is_sequential(model):
        raise ConfigError(
            "pipeline blocks",
            expected="an nn.Sequential, a model of transformers that has a base_model_pp_plan, or blocks=",
            got=type(model).__name__,
            do="Give blocks=[model.embedding, model.layers, model.norm, model.head]: what is called one after another.",
        )
    if blocks is None:
        return list(model._modules)
    # A string is a sequence of characters, and a single module may not be iterable: both are refused below.
    try:
        listed = [] if isinstance(blocks, str) else list(blocks)
    except TypeError:
        listed = []
    if not listed:
        raise ConfigError(
            "pipeline blocks",
            expected="a list of modules of the model, or of their names",
            got=repr(blocks),
            do="Give blocks=[model.embedding, model.layers, model.norm, model.head]: what is called one after another.",
        )
    names: list[str] = []
    for block in listed:
        name, module = _find_block(model, block)
        if isinstance(module, nn.ModuleList) or _is_sequential(module):
            names += [f"{name}.{child}".lstrip(".") for child in module._modules]
        else:
            names.append(name)
    return names


def _find_block(model: nn.Module, block: nn.Module | str) -> tuple[str, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(block, str):
        if block in modules:
            return block, modules[block]
        got, do = repr(block), did_you_mean(block, list(modules), "Name modules as in model.named_modules().")
    else:
        for name, module in modules.items():
            if module is block:
                return name, module
        got, do = type(block).__name__, "Give modules of the model that is divided, or their names."
    raise ConfigError("pipeline blocks", expected=f"parts of {type(model).__name__}", got=got, do=do)


def _check_blocks_disjoint(names: Sequence[str], modules: dict[str, nn.Module]) -> None:
    """Check that no block is listed twice or nested in another."""
    places: dict[nn.Module, str] = {}
    for name in names:
        other = places.setdefault(modules[name], name) if modules[name] in places else None
        other = next((path for path in enclosing_paths(name) if path in names), other)
        if other is not None or not name:
            raise ConfigError(
                f"pipeline block {name!r}",
                expected="blocks that are each called once, and lie apart",
                got="the model itself" if not name else f"it in two places, also {other!r}",
                do="Name each block once; one that is called again and again cannot be divided.",
            )
        places[modules[name]] = name


def _measure_block(name: str, module: nn.Module) -> BlockCost:
    lookups = nn.Embedding, nn.EmbeddingBag
    multiplied = {
        p for part in module.modules() if not isinstance(part, lookups) for p in part.parameters(recurse=False)
    }
    return BlockCost(name, sum(p.numel() for p in multiplied), sum(p.numel() for p in module.parameters()))


# -- parameters --------------------------------------------------------------------------------------------------------


def _locate_parameters(model: nn.Module, blocks: Sequence[str]) -> dict[str, ParameterLocation]:
    """Return the location of each parameter, by its first name."""
    listed, names = set(blocks), dict[nn.Parameter, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    homes = {}
    for said in names.values():
        found = frozenset(path for name in said for path in enclosing_paths(name) if path in listed)
        if not found:
            raise ConfigError(
                f"pipeline stages: parameter {said[0]}",
                expected="every parameter in one of the blocks",
                got=f"it in none of {len(blocks)}, {blocks[0]!r} to {blocks[-1]!r}",
                do="Name its module among the blocks, or make a module of it and what computes with it.",
                parameter=said[0],
            )
        homes[said[0]] = ParameterLocation(tuple(said), found)
    return homes


def _find_tied_parameters(
    homes: dict[str, ParameterLocation], parts: Sequence[Sequence[str]], ranks: int
) -> tuple[str, ...]:
    """Return the names of parameters that both ends of the pipeline hold."""
    stage_of = {name: stage for stage, part in enumerate(parts) for name in part}
    tied = []
    for name, home in homes.items():
        stages = sorted({stage_of[block] for block in home.blocks})
        where = sorted({stage % ranks for stage in stages})
        if len(where) > 1 and where != [0, ranks - 1]:
            raise ConfigError(
                f"pipeline stages: parameter {name}, tied to {', '.join(home.names[1:])}",
                expected="parameters on one rank, or on the first and the last",
                got=f"it in stages {', '.join(map(str, stages))} on ranks {', '.join(map(str, where))} of {ranks}",
                do="Give a split= that has its blocks in one stage, or untie it.",
                parameter=name,
            )
        tied += [name] * (len(where) > 1)
    return tuple(tied)
