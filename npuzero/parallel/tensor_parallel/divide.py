"""Divide a model over tensor ranks, as data: which parameters are cut, how, and how ranks relate on the rest.

``build_tensor_division`` reads a plan and looks only at names, types, shapes and attributes. It needs no communication,
so all ranks get the same result, or the same error.

In a *region* each rank computes a part: it begins where Linears cut by columns take one input, and ends after a Linear
cut by rows. An uncut parameter in it, such as the norm of query heads, sees different heads on each rank. Outside, it
sees the same activations on all ranks, or under ``msp`` and ``fsp``, between the first and last block, different
positions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from torch import nn

from npuzero.errors import ConfigError, did_you_mean
from npuzero.parallel.tensor_parallel.attention_heads import (
    check_attention_heads,
    check_features,
    head_counts,
    is_attention,
)
from npuzero.parallel.tensor_parallel.plan_words import PlanRule, RuleKind, Words, parse_plan_rule
from npuzero.plan import TENSOR, Cut, Relation

#: Linears that transformers' plans gather because they hold several packed tensors.
_PACKED = ("gate_up_proj", "qkv_proj")
_MIXERS = re.compile(r"attention|attn|mamba|conv|ssm|lstm|gru|rnn", re.IGNORECASE)


@dataclass
class TensorDivision:
    """Hold the division of a model over tensor ranks.

    Attributes:
        words: rules of modules, by path.
        cuts: cuts of parameters, by path.
        relations: relations of uncut parameters along the tensor axis; a missing one is ``repeated``.
        regions: Linears cut by columns that may share an input, by the path of the module around them.
        ends: Linears cut by rows, each with the region that it ends.
        stack: paths of the first and last block, between which each rank has a slice of the sequence; None: not sliced.
        gathered: paths of modules in the stack that must get the gathered input themselves: attentions shape by it.
        owners: paths of modules with attributes that must hold this rank's counts.
    """

    words: dict[str, PlanRule]
    cuts: dict[str, Cut] = field(default_factory=dict)
    relations: dict[str, Relation] = field(default_factory=dict)
    regions: dict[str, list[str]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    stack: tuple[str, str] | None = None
    gathered: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)

    def of(self, kind: RuleKind, whole: bool | None = None) -> list[str]:
        """Return the paths of modules with rules of ``kind``; ``whole``: only with, or without, full activations."""
        return [path for path, word in self.words.items() if word.kind is kind and whole in (None, word.whole)]

    def in_stack(self, path: str) -> bool:
        """Return whether ``path`` is in the blocks between which each rank has a slice of the sequence."""
        return self.stack is not None and f".{path}".startswith(f".{parent_path(self.stack[0])}.".replace("..", "."))


def build_tensor_division(model: nn.Module, plan: Words | None, ranks: int, sliced: bool) -> TensorDivision:
    """Return the division of ``model`` over ``ranks`` tensor ranks.

    Args:
        plan: words by patterns; None: the model's own plan.
        sliced: whether sequences are sharded outside the regions.

    Raises:
        ConfigError: the model cannot be divided, or would compute another result than one process.
    """
    division = TensorDivision(_match_plan_rules(model, plan))
    _divide_packed_linears(model, division)
    _check_rule_kinds(model, division)
    _join_regions(division)
    if sliced:
        _find_block_stack(model, division)
    if ranks > 1:
        _check_dropout(model, division)
    _assign_cuts(model, division, ranks)
    _assign_relations(model, division, ranks)
    return division


def parent_path(path: str) -> str:
    """Return the path of the module that holds the module or parameter ``path``."""
    return path.rpartition(".")[0]


def get_linear(model: nn.Module, path: str) -> nn.Linear:
    """Return the Linear at ``path``."""
    return cast(nn.Linear, model.get_submodule(path))


def _leaf_name(path: str) -> str:
    return path.rpartition(".")[2]


def _division_error(what: str, *, expected: str, got: str, do: str) -> ConfigError:
    return ConfigError(f"parallel.tensor(): {what}", expected=expected, got=got, do=do, axis=TENSOR)


# -- words of modules --------------------------------------------------------------------------------------------------


def _match_plan_rules(model: nn.Module, plan: Words | None) -> dict[str, PlanRule]:
    """Return the rule of each module that a pattern of the plan matches."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    prefix = f"(?:{re.escape(base)}\\.)?" if (base := getattr(model, "base_model_prefix", "")) else ""
    found, other = {}, []
    for pattern, said in (_get_model_plan(model) if plan is None else plan).items():
        matches = re.compile(prefix + re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch
        named = [name for name in modules if matches(name)]
        inside = [name for name in parameters if matches(name)]
        if named or inside or plan is not None:  # a model's own plan has patterns for all its variants
            found.update(dict.fromkeys(named, parse_plan_rule(pattern, said)))
            if not named:
                other.append((pattern, inside))
    if not found and not other:
        raise _division_error(
            "plan",
            expected="patterns that match modules of the model",
            got=f"{type(model).__name__}, of which they match none",
            do="Divide the model itself, not what wraps it (adapters of PEFT do not go with tensor ranks), or give a "
            "plan= of the names in named_modules().",
        )
    for pattern, inside in other:  # after all rules, so that a refused word is reported first
        known = {re.sub(r"\.\d+", ".*", name) for name in modules}
        raise _division_error(
            "plan",
            expected="patterns of modules, with * for one component of a path",
            got=f"{pattern!r}, which " + (f"is of parameters ({inside[0]})" if inside else "matches nothing"),
            do=did_you_mean(pattern, known, "Name Linears and embeddings as in named_modules()."),
        )
    return found


def _get_model_plan(model: nn.Module) -> Words:
    said = getattr(model, "tp_plan", None)
    if isinstance(said, Mapping) and said:
        return said
    strange = sorted({type(module).__name__ for module in model.modules() if type(module).__name__ == "Conv1D"})
    raise _division_error(
        "plan",
        expected="a plan, or a model of transformers that has a base_model_tp_plan",
        got=f"{type(model).__name__}, which has none"
        + "".join(f" (its layers are {name}, no Linears)" for name in strange),
        do="Give plan={'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise', ...}; Linears alone can be cut.",
    )


def _divide_packed_linears(model: nn.Module, division: TensorDivision) -> None:
    """Divide packed Linears span by span where a plan gathers their outputs and splits them again.

    transformers' plans of Phi-3 and GLM-4 do so: all ranks would compute all heads.
    """
    # Both sides of a module change together: a split input after an ungathered output would be cut twice.
    for owner in {parent_path(path) for path in division.of(RuleKind.COLUMNS, whole=True)}:
        columns = [path for path in division.of(RuleKind.COLUMNS, whole=True) if parent_path(path) == owner]
        rows = [path for path in division.of(RuleKind.ROWS, whole=True) if parent_path(path) == owner]
        if rows and all(_leaf_name(path) in _PACKED for path in columns):
            for path in (*columns, *rows):
                division.words[path] = replace(division.words[path], whole=False, packed=path in columns)


def _check_rule_kinds(model: nn.Module, division: TensorDivision) -> None:
    """Check that each rule is for a module type that it can divide."""
    for path, word in division.words.items():
        module = model.get_submodule(path)
        # An adapter may wrap the module itself or its parent, so both are looked at. OUTSIDE cuts nothing, so adapters
        # may have it.
        adapter = next((each for each in (path, parent_path(path)) if _is_adapter(model.get_submodule(each))), None)
        if adapter is not None and word.kind is not RuleKind.OUTSIDE:
            raise _division_error(
                adapter,
                expected="a layer without adapters, of which each tensor rank has a part",
                got=f"{type(model.get_submodule(adapter)).__module__}.{type(model.get_submodule(adapter)).__name__}, "
                "whose adapter's matrices would stay whole",
                do="Train adapters (LoRA) on data ranks, with npuzero.mesh() without tensor=; or merge them first.",
            )
        linear = isinstance(module, nn.Linear) and word.kind in (RuleKind.COLUMNS, RuleKind.ROWS, RuleKind.VOCABULARY)
        embedding = isinstance(module, nn.Embedding) and word.kind is RuleKind.VOCABULARY
        if isinstance(module, nn.Embedding) and any((module.max_norm, module.sparse, module.scale_grad_by_freq)):
            raise _division_error(
                path,
                expected="an Embedding without max_norm, scale_grad_by_freq and sparse",
                got=repr(module),
                do="Leave it whole: say nothing of it, or 'replicate'.",
            )
        if not (linear or embedding or word.kind in (RuleKind.SUMMED, RuleKind.OUTSIDE)):
            name = type(module).__name__
            why = f"{name}, whose weight is transposed" if name == "Conv1D" else f"{name}"
            raise _division_error(
                path,
                expected="nn.Linear" + (" or nn.Embedding" if word.kind is RuleKind.VOCABULARY else ""),
                got=why,
                do="Leave it out of the plan, or build the model of Linears (GPT-2 of transformers is of Conv1D).",
            )


def _is_adapter(module: nn.Module) -> bool:
    """Return whether ``module`` wraps a layer that it has replaced, as PEFT's adapters do."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


# -- regions -----------------------------------------------------------------------------------------------------------


def _join_regions(division: TensorDivision) -> None:
    """Group Linears that share an input into regions, and check that each region has columns and rows."""
    columns, rows = division.of(RuleKind.COLUMNS, whole=False), division.of(RuleKind.ROWS, whole=False)
    # A region is the smallest module around both sides, so columns and rows must find each other's.
    begins = {path: _find_enclosing_path(path, rows) for path in columns}
    ends = {path: _find_enclosing_path(path, columns) for path in rows}
    for path, around in begins.items():
        if around is None or around not in ends.values():
            raise _division_error(
                f"{path}: 'colwise' without 'rowwise'",
                expected="a Linear cut by rows behind it, in the same module or one around both",
                got="none" if around is None else f"none in {around or 'the model'}",
                do="Name it in the plan; a head over the vocabulary is 'colwise_gather_output', or 'vocabulary'.",
            )
        division.regions.setdefault(around, []).append(path)
    for path, around in ends.items():
        if around is None or around not in division.regions:
            raise _division_error(
                f"{path}: 'rowwise' without 'colwise'",
                expected="Linears cut by columns before it, in the same module or one around both",
                got="none",
                do="Name them in the plan, or say 'rowwise_split_input' where its input is whole.",
            )
        division.ends[path] = around
    for path in division.of(RuleKind.COLUMNS, whole=True):
        division.regions.setdefault(parent_path(path), []).append(path)


def _find_enclosing_path(path: str, others: list[str]) -> str | None:
    """Return the path of the smallest module around ``path`` that also holds one of ``others``."""
    around = path
    while around:
        around = parent_path(around)
        if any(other.startswith(around + "." if around else "") for other in others):
            return around
    return None


def _find_block_path(path: str) -> str | None:
    """Return the path of the outermost numbered module around ``path``."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return found and found.group()


def _find_block_stack(model: nn.Module, division: TensorDivision) -> None:
    """Find the blocks between which sequences are sharded: one list must hold all cuts except the vocabulary's."""
    cut = [path for kind in (RuleKind.COLUMNS, RuleKind.ROWS) for path in division.of(kind)]
    # A gathered Linear outside all blocks, such as the head, may stay outside: it returns full features.
    places = {path: _find_block_path(path) for path in cut if _find_block_path(path) or not division.words[path].whole}
    lists = {parent_path(block) for block in places.values() if block is not None}
    if len(lists) != 1 or None in places.values():
        astray = sorted(path for path, block in places.items() if block is None)
        raise _division_error(
            "mode 'msp'",
            expected="what is cut to lie in the blocks of one nn.ModuleList or nn.Sequential",
            got=", ".join(map(repr, [*sorted(lists), *astray])) or "nothing that is cut",
            do="Use mode='mtp', which asks nothing of what lies between.",
        )
    path = lists.pop()
    names = [f"{path}.{name}".lstrip(".") for name, _ in model.get_submodule(path).named_children()]
    division.stack = names[0], names[-1]
    _check_no_mixing(model, division)


def _mixes_positions(module: nn.Module) -> bool:
    """Return whether a module is known to mix positions."""
    return is_attention(module) or _MIXERS.search(type(module).__name__) is not None


def _check_no_mixing(model: nn.Module, division: TensorDivision) -> None:
    """Check that no module between the first and last block mixes positions of several ranks."""
    cut = [*division.of(RuleKind.COLUMNS), *division.of(RuleKind.ROWS)]
    # Only a module around cut Linears gets the gathered sequence. A block itself gets a slice, so an attention without
    # a module of its own inside the block cannot be divided.
    owners = {parent_path(path) for path in cut} - {_find_block_path(path) for path in cut}
    for path, module in model.named_modules():
        within = any(f"{path}.".startswith(f"{owner}.") for owner in owners)
        around = any(each.startswith(f"{path}.") for each in cut)
        if division.in_stack(path) and _mixes_positions(module) and not within and not around:
            raise _division_error(
                f"mode 'msp': {path}",
                expected="every module that mixes positions to be cut, since ranks have some of them each",
                got=f"{type(module).__name__}, of which the plan says nothing",
                do="Cut its Linears, or use mode='mtp'.",
            )
    for path in cut:
        owner = model.get_submodule(parent_path(path))
        if _mixes_positions(owner) and parent_path(path) == _find_block_path(path):
            raise _division_error(
                f"mode 'msp': {path}",
                expected="the Linears of an attention in a module of their own, which is given all of a sequence",
                got=f"them in the block {parent_path(path)}",
                do="Make a module of the attention, or use mode='mtp'.",
            )
    division.gathered = sorted(owner for owner in owners if _mixes_positions(model.get_submodule(owner)))
    ends = {parent_path(path) for path in division.of(RuleKind.ROWS, whole=True)}
    for path in division.of(RuleKind.COLUMNS, whole=True):
        if division.in_stack(path) and parent_path(path) not in ends:
            raise _division_error(
                f"mode 'msp': {path}: 'colwise_gather_output'",
                expected="a Linear with 'rowwise_split_input' beside it",
                got="none, so that its whole output would meet slices of the sequence",
                do="Use mode='mtp'.",
            )


def _check_dropout(model: nn.Module, division: TensorDivision) -> None:
    """Check that ranks with the same activations do not apply different dropout."""
    whole = {parent_path(path) for kind in (RuleKind.COLUMNS, RuleKind.ROWS) for path in division.of(kind, whole=True)}
    # Inside the stack each rank drops elements of its own slice, except in modules with gathered activations.
    for path, module in model.named_modules():
        if division.in_stack(path) and path not in whole:
            continue
        rates = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
        for name, rate in rates.items():
            if isinstance(rate, float) and rate > 0 and ("drop" in name or isinstance(module, nn.Dropout)):
                raise _division_error(
                    f"dropout of {path}.{name}",
                    expected="0.0, where tensor ranks hold the same activations, since they would drop different ones",
                    got=f"{rate}",
                    do="Set it to 0.0" + ("." if division.stack else ", or use mode='msp', for dropout within blocks."),
                )


# -- cuts --------------------------------------------------------------------------------------------------------------


def _assign_cuts(model: nn.Module, division: TensorDivision, ranks: int) -> None:
    """Set the cut of each parameter, if ``ranks`` divide it; in attentions, by full heads."""
    # Heads are checked before shapes, because their error names the head counts. The cut of rows leaves the bias uncut:
    # it is added once after the sum.
    columns = division.of(RuleKind.COLUMNS, whole=False)
    regions = {around for around, paths in division.regions.items() if not division.words[paths[0]].whole}
    division.owners = sorted({parent_path(path) for path in columns} | (regions - {""}))
    for path in division.owners:
        check_attention_heads(path, model.get_submodule(path), ranks)
    for path, word in division.words.items():
        module = model.get_submodule(path)
        if word.kind is RuleKind.ROWS:
            division.cuts[f"{path}.weight"] = Cut(TENSOR, 1)
        elif word.kind in (RuleKind.COLUMNS, RuleKind.VOCABULARY):
            spans = _packed_span_sizes(model, path, word)
            if path in columns and _is_only_region(division, path):
                check_features(
                    f"{path}.weight",
                    model.get_submodule(parent_path(path)),
                    spans or (get_linear(model, path).out_features,),
                    ranks,
                )
            for name, _ in module.named_parameters(recurse=False):
                division.cuts[f"{path}.{name}"] = Cut(TENSOR, 0, spans)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, cut in division.cuts.items():
        cut.check(name, shapes[name], ranks)
    _check_tied(model, division)


def _is_only_region(division: TensorDivision, path: str) -> bool:
    """Return whether the module around a Linear has one region, so that its heads are this Linear's."""
    return sum(parent_path(row) == parent_path(path) for row in division.of(RuleKind.ROWS)) == 1


def _packed_span_sizes(model: nn.Module, path: str, word: PlanRule) -> tuple[int, ...]:
    """Return the sizes of the packed tensors in a Linear; ``()``: it is not packed.

    Two equal spans unless the rule sets them; a name with "qkv" gives the sizes of query, key and value heads.
    """
    if not word.packed or (isinstance(word.spans, tuple) and word.spans):
        return word.spans if isinstance(word.spans, tuple) else ()
    size, (queries, keys) = get_linear(model, path).out_features, head_counts(model.get_submodule(parent_path(path)))
    # A "qkv" Linear is never split in two equal spans: if its heads do not explain its size, the plan must give spans.
    unknown = not word.spans and "qkv" in _leaf_name(path)
    if unknown and queries and size % (queries + 2 * keys) == 0:
        head = size // (queries + 2 * keys)
        return queries * head, keys * head, keys * head
    count = word.spans if isinstance(word.spans, int) else 2
    if unknown or size % count:
        raise _division_error(
            f"parameter {path}.weight: 'packed_colwise'",
            expected="the sizes of what is packed in it",
            got=f"{size} features" + ("" if unknown else f" in {count} spans"),
            do="Say ('packed_colwise', (64, 16, 16)), or the number of equal spans.",
        )
    return (size // count,) * count


def _iter_parameter_paths(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Yield each parameter with all paths under which it is registered."""
    places = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places[parameter].append(name)
    yield from places.items()


def _check_tied(model: nn.Module, division: TensorDivision) -> None:
    for _, names in _iter_parameter_paths(model):
        if len({division.cuts.get(name) for name in names}) > 1:
            said = {name: str(division.cuts.get(name, "whole")) for name in names}
            raise _division_error(
                f"parameter {names[0]}: tied to {', '.join(names[1:])}",
                expected="one cut of it in all its places",
                got=", ".join(f"{name}: {cut}" for name, cut in said.items()),
                do="Name both in the plan: 'embedding_rowwise' and 'colwise_gather_output' (or 'vocabulary').",
            )


# -- relations ---------------------------------------------------------------------------------------------------------


def _assign_relations(model: nn.Module, division: TensorDivision, ranks: int) -> None:
    """Mark uncut parameters that see different activations on each rank as summed."""
    for parameter, names in _iter_parameter_paths(model):
        if names[0] in division.cuts or not parameter.numel() or ranks == 1:
            continue
        relations = {_find_uncut_relation(model, division, name) for name in names}
        if len(relations) > 1:
            raise _division_error(
                f"parameter {names[0]}: tied to {', '.join(names[1:])}",
                expected="all its places to see whole activations, or all to see parts of them",
                got="both",
                do="Use mode='mtp', or untie them.",
            )
        division.relations.update({names[0]: Relation.SUMMED} if Relation.SUMMED in relations else {})


def _find_uncut_relation(model: nn.Module, division: TensorDivision, name: str) -> Relation:
    owner = parent_path(name)
    word = division.words.get(owner)
    outside = Relation.SUMMED if division.in_stack(name) else Relation.REPEATED
    if word is not None:
        return Relation.SUMMED if word.kind is RuleKind.SUMMED else outside
    if any(f"{owner}.".startswith(f"{parent_path(path)}.") for path in division.of(RuleKind.ROWS, whole=True)):
        return Relation.REPEATED  # between a gather and a split, all ranks compute the same
    around = max((path for path in division.owners if f"{owner}.".startswith(f"{path}.")), key=len, default=None)
    if around is None:
        return outside
    return _relation_from_width(model, division, name, around) or outside


def _relation_from_width(model: nn.Module, division: TensorDivision, name: str, around: str) -> Relation | None:
    """Return ``summed`` if a parameter next to cut Linears sees different heads on each rank.

    None: it sees the input or output of these Linears. The width decides: a norm of each head is as wide as a head, a
    norm before the Linears is as wide as their input.
    """
    module = model.get_submodule(parent_path(name))
    prefix = f"{around}." if around else ""
    columns = [get_linear(model, path) for path in division.of(RuleKind.COLUMNS) if path.startswith(prefix)]
    rows = [get_linear(model, path) for path in division.of(RuleKind.ROWS) if path.startswith(prefix)]
    outer = {each.in_features for each in columns} | {each.out_features for each in rows}
    weight = getattr(module, "weight", None)
    width = (weight if isinstance(weight, nn.Parameter) else model.get_parameter(name)).shape[-1:]
    if width and width[0] in outer:
        return None
    divides = width and any(each.out_features % width[0] == 0 for each in columns)
    if divides and "norm" in type(module).__name__.lower():
        return Relation.SUMMED
    if not divides and isinstance(module, nn.Linear):  # its input fits no rank's part of an activation
        return None
    raise _division_error(
        f"parameter {name}",
        expected="a word in the plan, for a module beside Linears that are cut",
        got=f"none, and shape {tuple(model.get_parameter(name).shape)}, which does not tell which activations it sees",
        do=(
            f"Say of {parent_path(name)!r} 'replicated_with_grad_allreduce' if they are a rank's heads, else "
            "'replicate'."
        ),
    )
