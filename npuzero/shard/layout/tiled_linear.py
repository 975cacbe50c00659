"""Memory-centric tiling: divide the rows of Linear layers into tiles, each a separate unit.

A layer is then never fully unsharded: while one tile computes the next is prefetched, and the remaining tiles stay
sharded. So the gathered weight, its gradient and the communication buffers shrink by about the number of tiles. Source:
Rajbhandari et al., ZeRO-Infinity (2021), section 5.1.3.

Tiles divide rows (``out_features``): each tile computes a part of the output, so forward needs no sum. The rows of a
tile are one range of the weight, so files and checkpoints keep the weight in one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from npuzero.config import describe_value
from npuzero.errors import ConfigError, StateError, did_you_mean, refuse_unknown_keywords

#: The type of the model, which a type checker keeps.
Model = TypeVar("Model", bound=nn.Module)

#: Parameters of a Linear; the bias is optional.
_KINDS = ("weight", "bias")


class TiledTensor(Tensor):
    """Represent a weight or bias that is stored in tiles: it has a shape, dtype and device, but no data.

    Attributes:
        tiles: the parameters that hold its rows, in order.
    """

    tiles: list[nn.Parameter]
    _is_param = True  # so that isinstance(tensor, nn.Parameter) is True

    @staticmethod
    def __new__(cls, tiles: list[nn.Parameter]) -> TiledTensor:
        first, rows = tiles[0], sum(tile.shape[0] for tile in tiles)
        made = Tensor._make_wrapper_subclass(
            cls,
            (rows, *first.shape[1:]),
            dtype=first.dtype,
            device=first.device,
            requires_grad=first.requires_grad,
        )
        made.tiles = tiles
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TiledTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.tiles)} tiles)"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise StateError(
            str(function),
            expected="a parameter in one piece",
            got="one of a Linear that npuzero.tiled() has divided, so that nothing ever has all of it",
            do="Call the module; or read module.tiles[i].weight, within npuzero.gathered(model) where a plan shards "
            "it. npuzero.full_state_dict(model) gives the weight in one piece.",
        )

    def by_tile(self, whole: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each tile with its rows of ``whole``, a tensor of this shape."""
        yield from zip(self.tiles, whole.split([tile.shape[0] for tile in self.tiles]), strict=True)


class LinearTile(nn.Linear):
    """Hold some rows of a Linear. In a state dict they are part of the tiled layer's tensors."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Do nothing: the TiledLinear saves its tiles."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Do nothing: the TiledLinear loads its tiles."""


class TiledLinear(nn.Module):
    """Replace a Linear that :func:`tiled` has divided.

    Attributes:
        tiles: Linears of some rows each, in order.
        in_features, out_features: of the original Linear.
    """

    tiles: nn.ModuleList
    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        # torch.cat briefly needs twice the output's memory, as does any next function that allocates an output.
        return torch.cat([tile(x) for tile in self.tiles], -1)

    @property
    def weight(self) -> TiledTensor:
        """Return a tensor with the weight's shape, dtype and device; its values are in ``tiles``."""
        return TiledTensor([tile.weight for tile in self.tiles])  # type: ignore[misc]

    @property
    def bias(self) -> TiledTensor | None:
        return None if self.tiles[0].bias is None else TiledTensor([tile.bias for tile in self.tiles])  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Return the same text as a Linear."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def wholes(self) -> Iterator[tuple[str, TiledTensor]]:
        """Yield (name, tensor) of the layer's tensors in a state dict."""
        for kind in _KINDS:
            if (tensor := getattr(self, kind)) is not None:
                yield kind, tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for kind, tensor in self.wholes():
            destination[prefix + kind] = tensor if keep_vars else torch.cat([tile.detach() for tile in tensor.tiles])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = dict(self.wholes())
        for kind, tensor in known.items():
            value = state_dict.get(prefix + kind)
            if value is None:
                missing_keys.append(prefix + kind)
            elif value.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + kind}: {tuple(value.shape)} in the state, {tuple(tensor.shape)} in "
                    "the model"
                )
            else:
                # Load each tile as torch loads a separate Linear: in place, or by assignment.
                for tile, (_, rows) in zip(self.tiles, tensor.by_tile(value), strict=True):
                    own = {prefix + kind: rows}
                    nn.Module._load_from_state_dict(tile, own, prefix, local_metadata, False, [], [], error_msgs)
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in known]


@dataclass(frozen=True)
class TileRows:
    """Locate a tile's rows in a tensor of the state dict.

    Attributes:
        name, shape: of the tensor.
        first: the first row of the tile.
    """

    name: str
    shape: torch.Size
    first: int

    @property
    def begin(self) -> int:
        """Return the index of the tile's first element in the tensor."""
        return self.first * self.shape[1:].numel()


def find_tile_rows(model: nn.Module) -> dict[str, TileRows]:
    """Return the rows of each tile's parameter in its state dict tensor, by the parameter's name in ``model``."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, TiledLinear):
            prefix = f"{path}." if path else ""
            for kind, tensor in module.wholes():
                ends = itertools.accumulate((tile.shape[0] for tile in tensor.tiles), initial=0)
                for i, (first, _) in enumerate(zip(ends, tensor.tiles, strict=False)):
                    found[f"{prefix}tiles.{i}.{kind}"] = TileRows(prefix + kind, tensor.shape, first)
    return found


@refuse_unknown_keywords()
def tiled(model: Model, tiles: Mapping[str, int]) -> Model:
    """Divide Linear layers of ``model`` into tiles that are separate units, in place, and return ``model``.

    Use it for layers that are too large to unshard at once: the gathered weight, its gradient and the communication
    buffers then have the size of one tile plus the prefetched one. Call it before :func:`zero` and :func:`predict`; the
    model may be on meta.

    The layer computes the same, up to rounding: the gradient of its input is a sum over the tiles. State dicts,
    exported files, ``weights=`` and checkpoints have one weight and one bias under the original names, and fit the
    model with any number of tiles. ``layer.weight`` has a shape, dtype and device; the values are in
    ``layer.tiles[i].weight``. Initialize these, and pass them to optimizers.

    Args:
        model: not sharded yet.
        tiles: number of tiles by layer name; ``*`` and ``?`` match any characters, as in file names. Row counts
            (output features) of tiles differ by one at most.

    Raises:
        ConfigError: no ``nn.Linear`` has the name, the layer cannot have that number of tiles, or its weight is tied.
        StateError: the model is sharded already.

    Example::

        net = npuzero.tiled(net, {"0": 4})  # or {"blocks.*.mlp.up": 4, "lm_head": 8}
        model = npuzero.zero(net.to(world.device), stage=3)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "npuzero.tiled()", expected="an nn.Module", got=describe_value(model), do="Pass the model itself."
        )
    if not isinstance(tiles, Mapping) or not tiles:
        do = 'Give e.g. {"lm_head": 8}.'
        raise ConfigError(
            "npuzero.tiled(): tiles", expected="numbers of tiles by name", got=describe_value(tiles), do=do
        )
    if any("_npuzero_engine" in parameter.__dict__ for parameter in model.parameters()):
        raise StateError(
            "npuzero.tiled()",
            expected="a model that npuzero.zero() has not seen",
            got="one it has sharded already",
            do="Call npuzero.tiled() first.",
        )
    chosen: dict[str, tuple[nn.Linear, int]] = {}
    for pattern, count in tiles.items():  # check all layers before dividing any
        for path, module in _match_linears(model, pattern):
            _check_tiling(model, path, module, count)
            _, other = chosen.setdefault(path, (module, count))
            if other != count:
                do = "Let one pattern name it, or give both the same number."
                got = f"{other} and {count} tiles"
                raise ConfigError(f"npuzero.tiled(): {path}", expected="one number of tiles", got=got, do=do)
    for module, count in chosen.values():
        _divide_linear(module, count)
    return model


def _match_linears(model: nn.Module, pattern: object) -> list[tuple[str, nn.Linear]]:
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    found = [(path, module) for path, module in linears.items() if fnmatchcase(path, str(pattern))]
    if not found:
        others = [type(module).__name__ for path, module in model.named_modules() if fnmatchcase(path, str(pattern))]
        raise ConfigError(
            f"npuzero.tiled(): {pattern!r}",
            expected="the name of an nn.Linear, or a pattern that one has",
            got=f"that of {', '.join(dict.fromkeys(others))}" if others else "no module's name",
            do=did_you_mean(pattern, [*linears], f"Name some of {', '.join([*linears][:5]) or 'none: there is none'}."),
        )
    return found


def _check_tiling(model: nn.Module, path: str, module: nn.Linear, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= module.out_features:
        raise ConfigError(
            f"npuzero.tiled(): {path}",
            expected=f"1 to {module.out_features} tiles: so many rows it has",
            got=repr(count),
            do="Give a number that leaves each tile a row.",
        )
    own = {id(parameter) for parameter in module.parameters()}
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own]
    if len(names) > len(own):
        raise ConfigError(
            f"npuzero.tiled(): {path}",
            expected="parameters that are this module's alone",
            got=f"tied ones: {', '.join(names)}",
            do="Untie them (model.lm_head.weight = nn.Parameter(...)), or leave the layer in one piece.",
        )


def rows_per_tile(rows: int, tiles: int) -> list[int]:
    """Return the number of rows of each tile."""
    least, more = divmod(rows, tiles)
    return [least + (i < more) for i in range(tiles)]


def _divide_linear(module: nn.Linear, count: int) -> None:
    if count == 1:
        return
    tiles, first = nn.ModuleList(), 0
    for size in rows_per_tile(module.out_features, count):
        tile = LinearTile(module.in_features, size, bias=module.bias is not None, device="meta")
        for kind, whole in module.named_parameters(recurse=False):
            rows = nn.Parameter(whole.detach()[first : first + size], requires_grad=whole.requires_grad)
            rows.__dict__.update(whole.__dict__)  # attributes that the program set, such as no_decay
            setattr(tile, kind, rows)
        tiles.append(tile.train(module.training))
        first += size
    # In place, so that hooks on the module and references to it stay valid.
    module._parameters.clear()
    module.__class__ = TiledLinear  # type: ignore[assignment]
    module.tiles = tiles
