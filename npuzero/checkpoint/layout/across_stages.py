"""Exchange names between the stages of a pipeline for one checkpoint: each stage knows only its part of the model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npuzero.errors import CheckpointError

#: Names of an optimizer's parameters, group by group.
GroupNames = list[list[str]]


@dataclass(frozen=True)
class StageShare:
    """List the names that a stage has of the model.

    Attributes:
        names: in its state dict.
        entries: keys of unsharded values, such as buffers.
        aliases: for parameters tied to an earlier stage: further names here, each with the name that both stages know.
        groups: names in each of the optimizer's groups; None: this stage has no optimizer.
        options: a digest of the options of each group.
    """

    names: list[str]
    entries: list[str]
    aliases: dict[str, str]
    groups: GroupNames | None
    options: list[str]


def digest_options(group: Mapping[str, Any]) -> str:
    """Return a digest of a group's options."""
    options = sorted((key, repr(value)) for key, value in group.items() if key != "params")
    return f"{zlib.crc32(repr(options).encode()):08x}"


def merge_group_names(shares: Sequence[StageShare], subject: str) -> GroupNames:
    """Return the names in each group over all stages, each once.

    Raises:
        CheckpointError: the stages have other groups, or other options of one.
    """
    # A stage without an optimizer is left out. A tied parameter is in a group of several stages, and stays once.
    some = [share for share in shares if share.groups is not None]
    if any(share.options != some[0].options for share in some):
        raise CheckpointError(
            subject,
            expected="the same groups of the optimizer in every stage of the pipeline, with the same options",
            got=f"{[len(share.options) for share in some]} groups by stage, of which some differ",
            do="Make the groups alike in all stages; one may be empty in some.",
        )
    found: GroupNames = []
    for i in range(len(some[0].options) if some else 0):
        found.append([*dict.fromkeys(name for share in some for name in (share.groups or [])[i])])
    return found
