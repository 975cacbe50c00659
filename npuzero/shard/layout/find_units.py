"""Divide a model into units, and assign each parameter to one. Reads the structure only, no tensor data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from npuzero.errors import ConfigError
from npuzero.shard.layout.axis_relations import is_tied
from npuzero.shard.layout.tiled_linear import LinearTile

#: A user's choice of units: a module class, several, or a predicate of (qualified name, module).
UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None

ROOT = "root"
# Containers without a forward: hooks on them would never run.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# The child of torch.compile(module). The unit is the outer module, because it is called outside of the compiled code.
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class UnitSpec:
    """Describe a unit before its buffers are allocated: its module, and its parameters by qualified name."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def discover_units(model: nn.Module, rule: UnitRule = None) -> list[UnitSpec]:
    """Divide ``model`` into units; the root unit comes first and owns the remaining parameters.

    Without a rule the units are the children of each outermost repeated list: a ModuleList, Sequential or ModuleDict
    with at least two children of one class that have parameters (the blocks of a transformer). Tiles are always
    separate units.

    A parameter belongs to the innermost unit that contains all modules it is registered in. So a parameter tied across
    blocks belongs to a unit around both, or to the root. A parameter shared by two stages also belongs to the root,
    since its modules differ between stages.

    Raises:
        ConfigError: the rule matches no module, or a module with a forward that is never called (a ModuleList, a part
            of a TorchScript module); ``model`` itself is TorchScript.
    """
    chosen = set(_find_repeated_blocks(model) if rule is None else _match_units(model, rule))
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = [path for path, module in modules.items() if path in chosen or isinstance(module, LinearTile)]
    _check_not_torchscript("npuzero.zero()", model)
    for path in paths:
        for outer in enclosing_paths(path):
            _check_not_torchscript(f"units: {path}, within {outer}", modules[outer])
    owners = _assign_parameters(model, set(paths))
    specs = [UnitSpec(ROOT, model, owners.get("", ()))]
    specs += [UnitSpec(path, modules[path], owners[path]) for path in paths if owners.get(path)]
    return specs


def find_root_callers(model: nn.Module, root: UnitSpec) -> list[nn.Module]:
    """Return the modules below ``model`` that use parameters of the root unit when they are called.

    They usually run inside the root's forward. Called directly (an encoder, before generating) they need the root's
    parameters also.
    """
    owned = {id(parameter) for _, parameter in root.parameters}
    # Use all names of a tied parameter: each module that has it may be called directly.
    registered = model.named_parameters(remove_duplicate=False)
    paths = {path for name, parameter in registered if id(parameter) in owned for path in enclosing_paths(name)}
    return [module for name, module in model.named_modules() if name in paths and name.split(".")[-1] != _COMPILED]


def _find_repeated_blocks(model: nn.Module) -> list[str]:
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        blocks = [(name, child) for name, child in children if any(True for _ in child.parameters())]
        if isinstance(module, (*_LISTS, nn.Sequential)) and _are_repeated(blocks):
            found.extend(name for name, _ in blocks)
            return  # lists within a block (such as experts) are gathered with it: smaller units mean more collectives
        for name, child in children:
            visit(name, child)

    visit("", model)
    return found


def _are_repeated(blocks: list[tuple[str, nn.Module]]) -> bool:
    if any(isinstance(child, _LISTS) for _, child in blocks):
        return False
    counts = Counter(type(_unwrap_compiled(child)) for _, child in blocks)
    return max(counts.values(), default=0) >= 2


def _match_units(model: nn.Module, rule: UnitRule) -> list[str]:
    if isinstance(rule, (type, tuple)):
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in _rule_classes(rule)):
            raise ConfigError(
                "units",
                expected="module classes or a predicate of (name, module)",
                got=repr(rule),
                do="Give e.g. units=Block, units=(Encoder, Decoder) or units=lambda name, module: ...",
            )
        kinds = _rule_classes(rule)
        matches = [(name, m) for name, m in model.named_modules() if name and isinstance(m, kinds)]
    elif callable(rule):
        matches = [(name, m) for name, m in model.named_modules() if name and rule(name, m)]
    else:
        raise ConfigError(
            "units",
            expected="module classes or a predicate of (name, module)",
            got=repr(rule),
            do="Leave it out to let the repeated blocks be found.",
        )
    if not matches:
        raise ConfigError(
            "units",
            expected=f"a rule that names modules of {type(model).__name__}",
            got=f"{rule!r}, which names none",
            do="Check the class or predicate against model.named_modules().",
        )
    for name, module in matches:
        if isinstance(module, _LISTS):
            raise ConfigError(
                f"units: {name}",
                expected="a module whose forward is called",
                got=type(module).__name__,
                do="Name its children instead.",
            )
    # A class matches the module inside torch.compile(), but calls go to the module around it.
    return list(dict.fromkeys(name.removesuffix(f".{_COMPILED}") for name, _ in matches))


def _check_not_torchscript(subject: str, module: nn.Module) -> None:
    """Refuse parts of a TorchScript module: its interpreter calls them without hooks. A unit itself may be one."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            subject,
            expected="an nn.Module whose parts Python calls",
            got=f"the TorchScript module {module.original_name}",
            do="Script or trace the blocks, each by itself, and leave what is around them an nn.Module.",
        )


def _unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)``, else ``module``."""
    return dict(module.named_children()).get(_COMPILED, module)  # TorchScript modules have no _modules dict


def _rule_classes(rule: UnitRule) -> tuple[type[nn.Module], ...]:
    return rule if isinstance(rule, tuple) else (rule,)  # type: ignore[return-value]


def _assign_parameters(model: nn.Module, units: set[str]) -> dict[str, tuple[tuple[str, nn.Parameter], ...]]:
    """Return the parameters of each unit by its path, each parameter once, under its first name."""
    registered: dict[int, tuple[str, nn.Parameter, list[list[str]]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        chain = _unit_chain(name, units)
        registered.setdefault(id(parameter), (name, parameter, []))[2].append(chain)
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter, chains in registered.values():
        common = chains[0]
        for chain in chains[1:]:
            common = [a for a, b in zip(common, chain, strict=False) if a == b]
        common = common[:1] if is_tied(parameter) else common
        owned.setdefault(common[-1], []).append((name, parameter))
    return {path: tuple(parameters) for path, parameters in owned.items()}


def _unit_chain(name: str, units: set[str]) -> list[str]:
    """Return the units around a parameter, outermost (the root, "") first."""
    return ["", *(path for path in enclosing_paths(name) if path in units)]


def enclosing_paths(name: str) -> list[str]:
    """Return the paths of the modules below the root that contain a tensor, outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
