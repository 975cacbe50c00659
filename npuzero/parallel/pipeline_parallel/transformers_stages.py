"""Run one stage of a transformers model: the model's own forward, without the blocks of other stages.

A section copies the modules around the blocks and shares everything else with the model: blocks, hooks, config. So
every stage makes masks, positions and rotary embeddings by the model's own code.

A stage sends the input of the next stage's first block. The forward of a later stage starts from a placeholder of the
embeddings' shape. Its values reach no block of the stage: stage 0 has already done everything that precedes the first
block. Blocks of earlier stages return their input, the first block of this stage takes the received tensor, and the
call of the next stage's first block ends the forward.

Invariants:

    * no section holds a block, or a tensor, of another stage;
    * a section drops all references to a call's tensors when the call ends, with or without an error.
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

#: Arguments that only the first stage gets.
_INPUTS = ("input_ids", "inputs_embeds")
#: Outputs that need all blocks, or state of another forward.
_REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits", "past_key_values", "use_cache")
_PLAIN = (str, int, float, bool, tuple, type(None))


@dataclass(frozen=True)
class PipelinePlan:
    """Describe how a model divides into blocks.

    Attributes:
        model: the module that has the ``base_model_pp_plan``.
        arguments: names of blocks, in call order, each with the name of the argument that it takes.
    """

    model: nn.Module
    arguments: dict[str, str]


def get_pipeline_plan(model: nn.Module) -> PipelinePlan | None:
    """Return the ``base_model_pp_plan`` of ``model``, or of a transformers model in it; None if there is none.

    Raises:
        ConfigError: the model's config asks for outputs of every block; the model is compiled.
    """
    for path, module in model.named_modules():
        said: Mapping[str, Any] = vars(module).get("_pp_plan") or {}
        prefix = f"{path}." if path else ""
        arguments: dict[str, str] = {}
        # The base model's blocks (deeper names) come before the blocks of the model around it, such as the head.
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
        # A compiled or replaced forward around blocks would run the original modules, not the copies of a section.
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
        model: the full model; the plan's own, or one around it.
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
        """Set the training mode of the section's own modules."""
        self._model.train(mode)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the model's forward; return its output, or else the input of the next stage's first block."""
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
        """Return a copy of a module around blocks, with stand-ins for its parts."""
        copied = copy.copy(module)
        copied._modules = {
            name: part if part is None else self._standing(part, f"{path}.{name}".lstrip("."))
            for name, part in module._modules.items()
        }
        return copied

    def _standing(self, part: nn.Module, path: str) -> nn.Module:
        """Return the module that replaces ``part`` in this section."""
        if path in self._paths:
            return self._copied(part, path)
        if path == self._entered:
            self._begin = _StageEntryBlock(part, self._plan[path])
            return self._begin
        if path == self._left:
            return _StageExitBlock(self._plan[path])
        return part if path in self._own or path not in self._plan else _PassThroughBlock(part, self._plan[path])


def _count_sequence_slices(model: nn.Module, names: list[str], begin: int) -> int:
    """Return the number of sequence slices at block ``begin``, if tensor parallelism slices sequences there; else 1."""
    for path, module in model.named_modules():
        found = sliced_blocks(module)
        if found is not None:
            first, last = (names.index(f"{path}.{name}".lstrip(".")) for name in found[:2])
            return found[2] if first < begin <= last else 1
    return 1


def _make_placeholder(hidden: Tensor, slices: int) -> Tensor:
    """Return a tensor with the embeddings' shape for unsliced sequences and memory for one element."""
    batch, seq, *features = hidden.shape
    return hidden.detach().new_zeros(()).expand(batch, seq * slices, *features)


def _get_first_argument(args: tuple[Any, ...], options: dict[str, Any], argument: str) -> Any:
    return args[0] if args else options[argument]


class _StageExit(BaseException):
    """End the forward where the next stage begins.

    It is not an error: as a BaseException it passes handlers that catch Exception.
    """

    def __init__(self, given: Any) -> None:
        self.given = given


class _PassThroughBlock(nn.Module):
    """Replace a block of another stage, keeping the plain attributes that the model may read."""

    def __init__(self, block: nn.Module, argument: str) -> None:
        super().__init__()
        own = {name: value for name, value in vars(block).items() if isinstance(value, _PLAIN)}
        vars(self).update({name: value for name, value in own.items() if not name.startswith("_")})
        self._argument = argument

    def forward(self, *args: Any, **options: Any) -> Any:
        return _get_first_argument(args, options, self._argument)


class _StageEntryBlock(nn.Module):
    """Wrap the first block of a later stage: its input is the tensor that the previous stage sent."""

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
    """Replace the first block of the next stage: end the forward there."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self._argument = argument

    def forward(self, *args: Any, **options: Any) -> Any:
        raise _StageExit(_get_first_argument(args, options, self._argument))
