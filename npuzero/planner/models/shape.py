"""Shapes of a model's units, without data, from a number of parameters or the JSON of a transformers model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from npuzero.config import Settings, describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import MeshShape, Plan, Report
from npuzero.planner.models import classes, families, modules
from npuzero.shard.build import ParameterFacts, get_unit_parameters, predict_units
from npuzero.shard.layout.tiled_linear import rows_per_tile

#: Elements of a block over its width squared (attention 4, feed-forward 8); width over depth of large models.
_BLOCK, _ASPECT = 12, 128
#: Least number of blocks, by number of parameters from which it holds.
_DEPTHS = {0: 12, 250_000_000: 24}
#: Below this number of parameters, embeddings are tied to the head; vocabulary sizes if tied, and if not.
_TIED_BELOW = 2 * 10**9
_VOCABULARIES = {True: 50_000, False: 32_000}
#: Least number of elements of a block.
_LEAST_BLOCK = 16


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Hold parameters by unit, the root unit first, with all parameters outside blocks. Equality is identity.

    Attributes:
        spans: nesting of units, as in :class:`npuzero.plan.StepSpec`.
        module: function that returns its modules on meta; None: not available.
        mode: mode of :func:`npuzero.parallel.tensor` if its layers are divided over tensor ranks; "": they are not.
        undivided: the model before this division; None: this one.
    """

    name: str
    units: Sequence[Sequence[ParameterFacts]]
    spans: tuple[int, ...] = ()
    module: Callable[[], nn.Module] | None = field(default=None, repr=False)
    mode: str = ""
    undivided: ModelShape | None = field(default=None, repr=False)

    @property
    def parameters(self) -> int:
        """Return the number of elements, without padding."""
        return sum(parameter.shape.numel() for unit in self.units for parameter in unit)

    @property
    def frozen(self) -> int:
        """Return the number of elements that the model itself freezes."""
        return sum(p.shape.numel() for unit in self.units for p in unit if not p.trainable)

    def predict(self, plan: Plan, world: int | MeshShape, settings: Settings, **facts: Any) -> Report:
        """Return the report of npuzero.predict for a module of these shapes; ``facts`` as there."""
        return predict_units(self.units, plan, plan.mesh_shape(world), settings, spans=self.spans, **facts)

    def tiled(self, tiles: Mapping[str, int]) -> ModelShape:
        """Return the model with Linear layers split into tiles, as by :func:`npuzero.tiled`.

        Args:
            tiles: numbers of tiles by layer name, which may omit the enclosing modules.

        Raises:
            ConfigError: no layer has the name, or it has more tiles than rows.
        """
        root, *blocks = (_split_tiles(unit, tiles) for unit in self.units)
        found = {pattern for _, layers in (root, *blocks) for pattern in layers}
        for pattern in tiles:
            if pattern not in found:
                names = {p.name.removesuffix(".weight") for unit in self.units for p in unit if len(p.shape) == 2}
                raise ConfigError(
                    f"--tiles {pattern}",
                    expected="the name of a Linear layer",
                    got="none",
                    do=did_you_mean(pattern, names, f"Name one of {', '.join(sorted(names)[:8])}."),
                )
        units, spans = [root[0]], [0]
        for rest, layers in blocks:
            inner = [tile for parts in layers.values() for tile in parts]
            spans += [len(units) + len(inner), *range(len(units) + 1, len(units) + 1 + len(inner))]
            units += [rest, *inner]
        own = [tile for parts in root[1].values() for tile in parts]  # a head runs after the blocks
        spans += range(len(units), len(units) + len(own))
        units += own
        spans[0] = len(units) - 1
        return replace(self, units=units, spans=tuple(spans))


#: By pattern, the tiles of all layers that match it.
_Layers = dict[str, list[list[ParameterFacts]]]


def _split_tiles(unit: Sequence[ParameterFacts], tiles: Mapping[str, int]) -> tuple[list[ParameterFacts], _Layers]:
    """Return the remaining parameters of a unit, and the tiles of its layers."""
    matrices = {p.name.removesuffix(".weight"): p.shape[0] for p in unit if len(p.shape) == 2}
    rest: list[ParameterFacts] = []
    layers: dict[str, tuple[str, list[list[ParameterFacts]]]] = {}
    for parameter in unit:
        path, _, kind = parameter.name.rpartition(".")
        # A name may omit enclosing modules, so it is matched as a suffix of the path; the first pattern wins.
        pattern = next((each for each in tiles if fnmatchcase(f".{path}", f"*.{each}")), None)
        if pattern is None or path not in matrices:
            rest.append(parameter)
            continue
        count = tiles[pattern]
        if count > matrices[path]:
            got, do = f"{count} tiles", "Give each tile a row."
            raise ConfigError(f"--tiles {pattern}", expected=f"at most {matrices[path]} tiles", got=got, do=do)
        _, parts = layers.setdefault(path, (pattern, [[] for _ in range(count)]))
        for i, rows in enumerate(rows_per_tile(matrices[path], count)):
            shape = torch.Size([rows, *parameter.shape[1:]])
            parts[i].append(replace(parameter, name=f"{path}.tiles.{i}.{kind}", shape=shape))
    found: _Layers = {}
    for pattern, parts in layers.values():
        found.setdefault(pattern, []).extend(parts)
    return rest, found


def from_size(parameters: int, blocks: int | None = None, vocabulary: int | None = None, ranks: int = 1) -> ModelShape:
    """Return a decoder of the Llama family with exactly this number of parameters.

    Depth: the cube root of parameters / (12 * 128^2), for a width of 128 times the depth; at least 24, and 12 below 250
    million parameters. Vocabulary: 32,000; below two billion parameters 50,000 and tied to the head. Embedding and head
    have at most a third of the parameters. The width follows. Feed-forward layers, and a vector of the root unit, take
    the remainder.

    Args:
        parameters: total number of elements.
        blocks: number of blocks; None: chosen as above.
        vocabulary: size of the vocabulary; None: chosen as above.
        ranks: must divide the width and the chosen sizes; also the number of heads.

    Raises:
        ConfigError: too few parameters for the blocks or the vocabulary.
    """
    least = max(depth for size, depth in _DEPTHS.items() if parameters >= size)
    depth = blocks or max(least, int((parameters / (_BLOCK * _ASPECT**2)) ** (1 / 3)))
    if parameters < _LEAST_BLOCK * depth:
        raise _too_small_error(parameters, f"at least {_LEAST_BLOCK} for each of {depth} blocks")
    tied = parameters < _TIED_BELOW
    copies = 1 if tied else 2
    if vocabulary is None:
        widest = math.sqrt(parameters * 2 / 3 / (_BLOCK * depth))
        vocabulary = _round_down_multiple(min(_VOCABULARIES[tied], int(parameters / 3 / (copies * widest))), ranks)
    # parameters = depth * 12 * width^2 + copies * vocabulary * width
    square, half = _BLOCK * depth, copies * vocabulary / 2
    width = (math.sqrt(half**2 + square * parameters) - half) / square
    unit = math.lcm(128, ranks)
    width = (
        _round_down_multiple(int(width + unit / 2), unit) if width >= 1024 else _round_down_multiple(int(width), ranks)
    )
    ends = (copies * vocabulary + 1) * width
    left = parameters - ends - depth * (4 * width + 2) * width
    inner = left // (3 * width * depth * ranks) * ranks
    rest = left - inner * 3 * width * depth
    if inner < 1:
        raise _too_small_error(parameters, f"enough for {depth} blocks beside a vocabulary of {vocabulary:,}")
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocabulary}
    kind = {"model_type": "llama", "num_attention_heads": ranks, "tie_word_embeddings": tied}
    _, (root, *units) = families.count_parameters(sizes | kind, "--parameters")
    if rest:
        root.append(ParameterFacts("rest", torch.Size([rest])))
    name = f"decoder of {depth} blocks, width {width}, vocabulary {vocabulary:,}"
    return ModelShape(name, (root, *units), module=partial(modules.build_decoder_modules, (root, *units), ranks))


def _round_down_multiple(size: int, of: int) -> int:
    """Return the largest multiple of ``of`` up to ``size``, at least one."""
    return max(of, size - size % of)


def _too_small_error(parameters: int, expected: str) -> ConfigError:
    return ConfigError(
        "--parameters",
        expected=expected,
        got=str(parameters),
        do="Give the number of parameters, such as 7B; --units takes the number of blocks.",
    )


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the model of a transformers ``config.json``, exact to the element, frozen parameters included.

    If transformers is installed and has the model's class, that is built on meta: shapes, no data, no network, and no
    code of a model's repository. Otherwise the sizes are computed here, for the kinds of models in
    :mod:`npuzero.planner.models.families`.

    Raises:
        ConfigError: an unknown kind of model, or sizes that are missing, mistyped or impossible.
    """
    transformers = classes.import_transformers()
    kind = config.get("model_type") or _find_model_type(transformers, config.get("architectures"))
    if not isinstance(kind, str):
        raise ConfigError(
            f"{name}: model_type",
            expected="the kind of model, as transformers writes it",
            got="no such key" if kind is None else describe_value(kind),
            do='Add it, such as "model_type": "llama", or give --parameters instead.',
        )
    config = {**config, "model_type": kind}
    if transformers is not None and kind in transformers.CONFIG_MAPPING:
        model = classes.build_meta_model(transformers, config, name)
        counted = f"{name}, {type(model).__name__} as transformers {transformers.__version__} counts it"
        return ModelShape(counted, get_unit_parameters(model), module=lambda: model)
    if kind not in families.KINDS:
        raise _unknown_kind_error(kind, transformers, name)
    described, units = families.count_parameters(config, name)
    known = kind in modules.DECODERS
    module = partial(modules.build_decoder_modules, units, config["num_attention_heads"]) if known else None
    return ModelShape(f"{name}, {described} as npuzero counts it", units, module=module)


def _find_model_type(transformers: Any, architectures: Any) -> Any:
    """Return the model_type of a file that only names the class."""
    for kind, (architecture, *_) in families.KINDS.items():
        if architectures == [architecture]:
            return kind
    named = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    return getattr(getattr(getattr(transformers, str(named), None), "config_class", None), "model_type", None)


def _unknown_kind_error(kind: str, transformers: Any, name: str) -> ConfigError:
    if transformers is None:
        kinds = list(families.KINDS)
        expected = f"without transformers, one of {', '.join(kinds)}"
        do = "Run: pip install transformers, which knows more; or give --parameters instead."
    else:
        kinds = [*families.KINDS, *transformers.CONFIG_MAPPING]
        expected = f"a kind of model that transformers {transformers.__version__} has"
        do = "Its own code is not run: call npuzero.predict(model, ...) where it is built, or give --parameters."
    meant = did_you_mean(kind, kinds, "")
    return ConfigError(f"{name}: model_type", expected=expected, got=repr(kind), do=f"{meant} {do}".strip())
