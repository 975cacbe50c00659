"""The words of tensor parallel plans: how each word divides a module over ranks. Pure data.

The words are those of transformers' ``base_model_tp_plan`` (``transformers/distributed/tensor_parallel.py``), and our
own ``vocabulary``. Pairs of words make regions: between Linears cut by columns and a Linear cut by rows, each rank
computes its own heads or hidden elements.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npuzero.errors import ConfigError, did_you_mean


class RuleKind(enum.Enum):
    """Name how a rule treats a module."""

    COLUMNS = "output features cut"
    ROWS = "input features cut"
    VOCABULARY = "rows of an embedding or a head cut"
    SUMMED = "whole, sees a part of the activations on each rank"
    OUTSIDE = "whole, beside the regions"


@dataclass(frozen=True)
class PlanRule:
    """Describe one word.

    Attributes:
        kind: the parameters that are cut.
        packed: the cut dimension holds several tensors one after another, and each is divided separately.
        whole: keep this Linear's activations full where they would be cut: gather its output, or split its input.
        spans: sizes, or the number of equal sizes, of the packed tensors; ``()``: derived from the module's name.
    """

    kind: RuleKind
    packed: bool = False
    whole: bool = False
    spans: int | tuple[int, ...] = ()


_COLUMNS_GATHERED = PlanRule(RuleKind.COLUMNS, whole=True)
_ROWS_SPLIT = PlanRule(RuleKind.ROWS, whole=True)

WORDS: dict[str, PlanRule] = {
    "colwise": PlanRule(RuleKind.COLUMNS),
    "rowwise": PlanRule(RuleKind.ROWS),
    "packed_colwise": PlanRule(RuleKind.COLUMNS, packed=True),
    "colwise_gather_output": _COLUMNS_GATHERED,
    "colwise_rep": _COLUMNS_GATHERED,
    "rowwise_split_input": _ROWS_SPLIT,
    "rowwise_rep": _ROWS_SPLIT,
    "embedding_rowwise": PlanRule(RuleKind.VOCABULARY),
    "vocabulary": PlanRule(RuleKind.VOCABULARY),
    "replicated_with_grad_allreduce": PlanRule(RuleKind.SUMMED),
    "sequence_parallel": PlanRule(RuleKind.OUTSIDE),
    "replicate": PlanRule(RuleKind.OUTSIDE),
}

_EXPERTS = "experts are 3-D parameters behind a router, which tensor ranks do not divide here"
_LOCAL = "it leaves what happens between ranks to the model's own forward"

#: Words of transformers, past or present, and why they are refused.
REFUSED: dict[str, str] = {
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
    "grouped_gemm": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "ep_router": _EXPERTS,
    "packed_rowwise": _EXPERTS,
    "mla_kv_a_proj": "multi-head latent attention compresses keys and values into what all heads share",
    "embedding_colwise": "an embedding is cut along the vocabulary (embedding_rowwise), not along its features",
    "all_reduce": "the sum of a module's outputs stands behind the Linear that is cut by rows",
    "local_params": "it cuts parameters that no Linear has, such as attention sinks",
    "local": _LOCAL,
    "local_colwise": _LOCAL,
    "local_rowwise": _LOCAL,
    "local_packed_rowwise": _LOCAL,
    "gather": _LOCAL,
    "isolated": _LOCAL,
}

#: A plan as users write it: patterns of module names, with ``*`` for one component, to words. A packed word may come
#: with its spans: ("packed_colwise", 3), or ("packed_colwise", (64, 16, 16)).
Words = Mapping[str, "str | tuple[str, int | Sequence[int]]"]


def parse_plan_rule(pattern: str, said: object) -> PlanRule:
    """Return the rule for the word ``said``.

    Raises:
        ConfigError: the word is unknown or refused, or its spans are not sizes.
    """
    name, spans = said if isinstance(said, tuple) and len(said) == 2 else (said, ())
    subject = f"parallel.tensor(): plan[{pattern!r}]"
    if name in REFUSED:
        raise ConfigError(
            subject,
            expected=f"words among {', '.join(WORDS)}",
            got=f"{name!r}: {REFUSED[name]}",
            do="Leave these modules out of the plan, so that each rank has all of them; under mode='mtp'.",
            word=name,
        )
    if not isinstance(name, str) or name not in WORDS:
        do = did_you_mean(name, list(WORDS), "See docs/tensor.md for what each word does.")
        raise ConfigError(subject, expected=f"words among {', '.join(WORDS)}", got=repr(name), do=do, word=name)
    word = WORDS[name]
    # Spans are checked here for form only: their sum is compared with the weight's shape when cuts are assigned.
    if spans == ():
        return word
    sizes = (spans,) if isinstance(spans, int) else tuple(spans) if isinstance(spans, Sequence) else (0,)
    if not word.packed or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            subject,
            expected="spans beside 'packed_colwise' alone: their number, or their sizes",
            got=repr(said),
            do="Say e.g. ('packed_colwise', 3), or ('packed_colwise', (64, 16, 16)).",
        )
    return PlanRule(word.kind, packed=True, spans=spans if isinstance(spans, int) else sizes)
