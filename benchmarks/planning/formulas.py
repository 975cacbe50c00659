"""Published arithmetic of training: bytes, FLOPs and traffic, each with its source.

The planner counts its own models exactly, on meta. These formulas are those printed in papers, under their own names,
so that readers can reproduce the papers' figures. Letters: parameters P or Psi, layers L, hidden h, heads a, sequence
s, batch b, vocabulary V, ranks N.
"""

from __future__ import annotations

from typing import NamedTuple

from npuzero.errors import ConfigError

#: K, bytes of optimizer states per parameter, with Adam in float32: master, momentum, variance (ZeRO, section 3.1).
ADAM_K = 12
#: K if float32 gradients count as optimizer state, 20 bytes per parameter in total (ZeRO-Infinity, section 3).
ADAM_K_WITH_FP32_GRADIENTS = 16


class _ZeroStage(NamedTuple):
    """Describe a stage of ZeRO: the divided parts, and elements per parameter that a rank sends in an iteration."""

    divided: tuple[str, ...]
    traffic: int


#: ZeRO, sections 5 and 7, by its stages.
_STAGES = (
    _ZeroStage((), 2),
    _ZeroStage(("states",), 2),
    _ZeroStage(("states", "gradients"), 2),
    _ZeroStage(("states", "gradients", "parameters"), 3),
)


def _get_zero_stage(number: int) -> _ZeroStage:
    if number not in range(len(_STAGES)):
        raise ConfigError("a stage of ZeRO", expected="0, 1, 2 or 3", got=repr(number), do="Choose one.")
    return _STAGES[number]


# -- states: ZeRO (arXiv:1910.02054) -----------------------------------------------------------------------------------


def model_state_bytes(
    parameters: float, ranks: int = 1, stage: int = 0, *, k: float = ADAM_K, gradient_bytes: float = 2
) -> float:
    """Return the bytes of parameters, gradients and optimizer states that a rank holds under a stage of ZeRO.

    Source: ZeRO, section 5 and table 1: (2 + 2 + K) P; first K, then 2, then 2 more are divided by N.

    Args:
        parameters: of the model; they have 2 bytes each.
        ranks: N, the degree of data parallelism.
        stage: 0: nothing divided; 1: optimizer states (P_os); 2: also gradients (P_os+g); 3: also parameters
            (P_os+g+p).
        k: bytes of optimizer states per parameter.
        gradient_bytes: of a gradient: 2 in the paper; 4 in npuzero, which sums in float32.

    Raises:
        ConfigError: no such stage.

    Example::

        from benchmarks.planning.formulas import model_state_bytes

        print(model_state_bytes(7.5e9, 64, 1) / 1e9)  # 31.4
    """
    parts = {"parameters": 2, "gradients": gradient_bytes, "states": k}
    divided = _get_zero_stage(stage).divided
    return parameters * sum(nbytes / (ranks if part in divided else 1) for part, nbytes in parts.items())


def largest_model(
    memory_bytes: float,
    ranks: int,
    stage: int,
    *,
    model_parallel: int = 1,
    k: float = ADAM_K,
    gradient_bytes: float = 2,
) -> float:
    """Return the parameters of the largest model that fits into the memory of its ranks, states included.

    Source: ZeRO, table 2.

    Args:
        ranks, stage, k, gradient_bytes: as for :func:`model_state_bytes`.
        model_parallel: ranks that divide the model itself.
    """
    per_parameter = model_state_bytes(1, ranks, stage, k=k, gradient_bytes=gradient_bytes)
    return model_parallel * memory_bytes / per_parameter


# -- activations: ZeRO-Infinity (arXiv:2104.07857, section 3), Korthikanti et al. (arXiv:2205.05198) -------------------


def activation_checkpoint_bytes(batch: int, sequence: int, hidden: int, layers: int, interval: int = 1) -> float:
    """Return the bytes of the inputs that recomputation keeps, one per ``interval`` blocks: 2 b s h L / interval.

    Source: ZeRO-Infinity, section 3.
    """
    return 2 * batch * sequence * hidden * layers / interval


def activation_working_bytes(batch: int, sequence: int, hidden: int, heads: int, interval: int = 1) -> int:
    """Return the bytes between two checkpoints, AWM: b s interval (16 h + 2 a s).

    Source: ZeRO-Infinity, section 3.
    """
    return batch * sequence * interval * (16 * hidden + 2 * heads * sequence)


def state_working_bytes(hidden: int) -> int:
    """Return the bytes of the largest operator's parameters and gradients, MSWM: 4 h * 4 h.

    Source: ZeRO-Infinity, section 3. The planner uses the largest unit under the plan instead.
    """
    return 4 * hidden * 4 * hidden


def layer_activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    selective: bool = False,
) -> float:
    """Return the 16-bit bytes that one layer saves for backward: s b h (34 + 5 a s / h) on one rank.

    Source: Korthikanti et al., section 4 and table 2.

    Args:
        tensor: t, ranks that divide the layer: s b h (10 + 24 / t + 5 a s / (h t)).
        sequence_parallel: divide also the operations between its products: everything over t.
        selective: recompute attention's core: without the term of a s / h.
    """
    scores = 0.0 if selective else 5 * heads * sequence / hidden
    whole, divided = (0.0, 34.0) if sequence_parallel else (10.0, 24.0)
    return sequence * batch * hidden * (whole + (divided + scores) / tensor)


def first_stage_factor(pipe: int, chunks: int = 1) -> float:
    """Return the activations of the first stage relative to L layers': 1, or interleaved 1 + (p - 1) / (p v).

    Source: Korthikanti et al., section 4.2.3.
    """
    return 1 + (pipe - 1) / (pipe * chunks) if chunks > 1 else 1.0


# -- parameters, FLOPs and time: Narayanan et al. (arXiv:2104.04473) ---------------------------------------------------


def block_parameters(layers: int, hidden: int) -> int:
    """Return the parameters of a transformer's blocks, matrices only: 12 L h^2.

    Source: ZeRO-Infinity, section 3.
    """
    return 12 * layers * hidden**2


def transformer_parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """Return the parameters of a GPT: 12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)).

    Source: Narayanan et al., equation 2.
    """
    return block_parameters(layers, hidden) * (
        1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden)
    )


def iteration_flops(
    batch: int, sequence: int, layers: int, hidden: int, vocabulary: int, *, recompute: bool = True
) -> float:
    """Return the FLOPs of one iteration: 96 B s L h^2 (1 + s / (6 h) + V / (16 L h)).

    Source: Narayanan et al., equation 3. Without recomputation three quarters of the blocks' FLOPs, and all of the
    logits': 72 B s L h^2 (1 + s / (6 h) + V / (12 L h)), Korthikanti et al., appendix A.
    """
    passes, logits = (96, 16) if recompute else (72, 12)
    factor = 1 + sequence / (6 * hidden) + vocabulary / (logits * layers * hidden)
    return passes * batch * sequence * layers * hidden**2 * factor


def selective_flops(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the FLOPs of an iteration that recomputes attention's core: s / (3 h) instead of s / (6 h).

    Source: Korthikanti et al., appendix A.
    """
    factor = 1 + sequence / (3 * hidden) + vocabulary / (12 * layers * hidden)
    return 72 * batch * sequence * layers * hidden**2 * factor


def training_s(tokens: float, parameters: float, devices: int, flops_per_s: float) -> float:
    """Return the seconds of a full training with recomputation: 8 T P / (n X).

    Source: Narayanan et al., equation 4.

    Args:
        tokens: T, number of training tokens.
        flops_per_s: X, reached by one device.
    """
    return 8 * tokens * parameters / (devices * flops_per_s)


def bubble(pipe: int, micro_batches: int, chunks: int = 1) -> float:
    """Return a pipeline's idle time relative to its ideal time: (p - 1) / (v m).

    Source: Narayanan et al., sections 2.2.1 and 2.2.2.
    """
    return (pipe - 1) / (chunks * micro_batches)


# -- traffic -----------------------------------------------------------------------------------------------------------


def ring_factor(ranks: int) -> float:
    """Return the bytes a rank sends in a ring all_reduce, relative to the buffer: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


def zero_traffic(stage: int) -> int:
    """Return the elements per parameter that a rank sends in an iteration under a stage of ZeRO: 2, and 3 in stage 3.

    Source: ZeRO, section 7.2.

    Raises:
        ConfigError: no such stage.
    """
    return _get_zero_stage(stage).traffic


def zeropp_traffic(*, weights: bool = False, secondary: bool = False, gradients: bool = False) -> float:
    """Return the 16-bit elements per parameter sent between nodes in a stage 3 iteration: 3; 0.75 with all three.

    Source: ZeRO++, arXiv:2306.10209, table 1.

    Args:
        weights: gather in 8 bits (qwZ).
        secondary: a node keeps the parameters for backward (hpZ).
        gradients: send gradients in 4 bits (qgZ).
    """
    gather = 0.5 if weights else 1.0
    return gather + (0 if secondary else gather) + (0.25 if gradients else 1.0)


def partitioned_activations_traffic() -> float:
    """Return the additional traffic of tensor-parallel ranks that divide activation checkpoints: 1 / 12.

    Source: ZeRO, section 8: a block's six all_reduces send 12 s h elements, and one all_gather s h more.
    """
    return 1 / 12


# -- classification: Partial-FC (arXiv:2010.05222, section 3) ----------------------------------------------------------


def class_weight_bytes(features: int, classes: int, ranks: int = 1) -> float:
    """Return the bytes of a rank's class centres in float32: 4 d C / k."""
    return 4 * features * classes / ranks


def class_logit_bytes(batch: int, classes: int, ranks: int = 1, sampled: float = 1.0) -> float:
    """Return the bytes of a rank's logits in float32: 4 N C / k, times the sampled part.

    Args:
        batch: N, of all ranks together.
        sampled: r, the part of the classes used in a step.
    """
    return 4 * batch * classes * sampled / ranks
