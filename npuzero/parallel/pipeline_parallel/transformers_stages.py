"""One stage of a transformers model: its own forward, of which the blocks of other stages are left out.

A section is a copy of the modules around the blocks, which shares all else with the model: blocks, hooks, config. So
masks, positions and rotary embeddings are made on every stage as the model makes them, by code of its own.

Between stages goes what the next stage's first block is called with. So the forward of a later stage begins with a
stand-in of the embeddings' shape, whose values reach nothing: whatever the model does to embeddings ahead of its first
block was done on stage 0. Blocks of earlier stages return what they get, the first of this stage takes what came
instead, and where the first block of the next stage is called, the forward is left.

The invariants:

    * no section holds a block, or a tensor, of another stage;
    * what a section holds of a call it lets go when that ends, whatever way it ends.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.parallel.tensor_parallel.api import sliced_blocks
from npuzero.shard.layout.find_units import enclosing_paths

#: What a stage that is not the first is not given.
_INPUTS = ("input_ids", "inputs_embeds")
#: What nobody can return who has some of the blocks, or needs another forward.
_REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits", "past_key_values", "use_cache")
_PLAIN = (str, int, float, bool, tuple, type(None))


@dataclass(frozen=True)
class PipelinePlan:
    """Hold what a model says of its division.

    Attributes:
        model: the module that says it.
        arguments: names of blocks, in the order in which they are called, and of the argument that each takes.
    """

    model: nn.Module
    arguments: dict[str, str]


def get_pipeline_plan(model: nn.Module) -> PipelinePlan | None:
    """Return what ``model``, or a model of transformers in it, says by its ``base_model_pp_plan``; None: nothing.

    Raises:
        ConfigError: the model is to return what a stage has not all of; it is compiled.
    """
    for path, module in model.named_modules():
        said: Mapping[str, Any] = vars(module).get("_pp_plan") or {}
        prefix = f"{path}." if path else ""
        arguments: dict[str, str] = {}
        # What is called of a model's own comes behind what its base model calls.
        for name, (inputs, _) in sorted(said.items(), key=lambda item: -item[0].count(".")):
            parts = dict(module.named_modules(remove_duplicate=False))
            if name in parts:
                found = parts[name]
                children = [f".{child}" for child in found._modules] if isinstance(found, nn.ModuleList) else [""]
                arguments.update({f"{prefix}{name}{child}": inputs[0] for child in children})
        if arguments:
            _check_stage_model(model, module, arguments)
            return PipelinePlan(module, arguments)
    return None


def _check_stage_model(model: nn.Module, module: Any, arguments: Mapping[str, str]) -> None:
    asked = [name for name in _REFUSED[:3] if getattr(module.config, name, False)]
    if asked:
        raise ConfigError(
            f"pipeline stages: {type(module).__name__}",
            expected="a model that returns what its last stage has",
            got=f"config.{asked[0]}=True, which asks for something of every block",
            do=f"Set config.{asked[0]} to False.",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in ["", *dict.fromkeys(path for name in arguments for path in enclosing_paths(f"{name}."))]:
        outer = modules[path]
        if path not in arguments and ("_orig_mod" in outer._modules or "forward" in vars(outer)):
            raise ConfigError(
                f"pipeline stages: {path or type(outer).__name__}",
                expected="a model with the forward of its class, around blocks that may be compiled",
                got="one that is compiled, or whose forward was replaced",
                do="Compile the blocks, each by itself.",
            )


class StageSection:
    """Compute one stage of a model.

    Args:
        model: all of it; the plan's own model, or one around it.
        begin, end: the stage has the blocks ``[begin, end)`` of the plan.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan, begin: int, end: int) -> None:
        names = list(plan.arguments)
        self._plan = plan.arguments
        self._own = set(names[begin:end])
        self._entered = names[begin] if begin else None
        self._left = names[end] if end < len(names) else None
        self._paths = {path for name in names for path in enclosing_paths(f"{name}.")} - set(names)
        self._takes_cache = "use_cache" in inspect.signature(plan.model.forward).parameters
        self._slices = _count_sequence_slices(model, names, begin)
        self._begin: _StageEntryBlock | None = None
        self._model = self._copied(model, "")

    def train(self, mode: bool) -> None:
        """Set the mode of what is the section's alone, too."""
        self._model.train(mode)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the model's forward; return what it returns, or else what the next stage's first block is called with."""
        refused = [name for name in _REFUSED if options.get(name)]
        if refused:
            raise ConfigError(
                f"pipeline stages: {type(self._model).__name__}.forward",
                expected="what a stage can compute of its own blocks, without keys and values of another forward",
                got=f"{refused[0]}={options[refused[0]]!r:.40}",
                do="Leave it out.",
            )
        if self._takes_cache:
            options["use_cache"] = False
        if self._begin is not None:
            (hidden,) = args
            self._begin.given = hidden
            options = {name: value for name, value in options.items() if name not in _INPUTS}
            options["inputs_embeds"] = _make_placeholder(hidden, self._slices)
            args = ()
        try:
            return self._model(*args, **options)
        except _StageExit as left:
            return left.given
        finally:
            if self._begin is not None:
                self._begin.given = None

    def _copied(self, module: nn.Module, path: str) -> nn.Module:
        """Return a copy of a module around blocks, with what stands for its parts."""
        copied = copy.copy(module)
        copied._modules = {
            name: part if part is None else self._standing(part, f"{path}.{name}".lstrip("."))
            for name, part in module._modules.items()
        }
        return copied

    def _standing(self, part: nn.Module, path: str) -> nn.Module:
        """Return what stands for a part of the model in this section."""
        if path in self._paths:
            return self._copied(part, path)
        if path == self._entered:
            self._begin = _StageEntryBlock(part, self._plan[path])
            return self._begin
        if path == self._left:
            return _StageExitBlock(self._plan[path])
        return part if path in self._own or path not in self._plan else _PassThroughBlock(part, self._plan[path])


def _count_sequence_slices(model: nn.Module, names: list[str], begin: int) -> int:
    """Return of how many slices of a sequence the block ``begin`` gets one, by what tensor parallelism does."""
    for path, module in model.named_modules():
        found = sliced_blocks(module)
        if found is not None:
            first, last = (names.index(f"{path}.{name}".lstrip(".")) for name in found[:2])
            return found[2] if first < begin <= last else 1
    return 1


def _make_placeholder(hidden: Tensor, slices: int) -> Tensor:
    """Return what has the shape of the embeddings of whole sequences, and memory for one element."""
    batch, seq, *features = hidden.shape
    return hidden.detach().new_zeros(()).expand(batch, seq * slices, *features)


def _get_first_argument(args: tuple[Any, ...], options: dict[str, Any], argument: str) -> Any:
    return args[0] if args else options[argument]


class _StageExit(BaseException):
    """Leave the forward where the next stage begins. It is no error, and nobody who catches errors is to have it."""

    def __init__(self, given: Any) -> None:
        self.given = given


class _PassThroughBlock(nn.Module):
    """Stand for a block of another stage, of which the model may read plain attributes."""

    def __init__(self, block: nn.Module, argument: str) -> None:
        super().__init__()
        own = {name: value for name, value in vars(block).items() if isinstance(value, _PLAIN)}
        vars(self).update({name: value for name, value in own.items() if not name.startswith("_")})
        self._argument = argument

    def forward(self, *args: Any, **options: Any) -> Any:
        return _get_first_argument(args, options, self._argument)


class _StageEntryBlock(nn.Module):
    """Stand for the first block of a later stage: it takes what the stage before has sent."""

    def __init__(self, block: nn.Module, argument: str) -> None:
        super().__init__()
        self.block = block
        self._argument = argument
        self.given: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        if args:
            args = self.given, *args[1:]
        else:
            options[self._argument] = self.given
        found = self.block(*args, **options)
        if not isinstance(found, Tensor):
            raise ConfigError(
                f"pipeline stages: {type(self.block).__name__}",
                expected="blocks that hand on one tensor, so that there is nothing else to send",
                got=f"one that returns {type(found).__name__}",
                do="Give blocks= of a model that is called block by block, or train without a pipeline.",
            )
        return found


class _StageExitBlock(nn.Module):
    """Stand for the first block of the next stage."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self._argument = argument

    def forward(self, *args: Any, **options: Any) -> Any:
        raise _StageExit(_get_first_argument(args, options, self._argument))
