"""Mutants of sequences that ranks share."""

from __future__ import annotations

from .mutant import PackageMutant

SEQUENCES = "parallel/test_sequence.py"
MODELS = "parallel/test_sequence_models.py"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "heads stay divided and slices of sequences stay slices",
        "parallel/sequence_parallel/slices.py",
        "q, k, v = (all_to_all_dims(x, group, 1, 2) for x in (q, k, v))",
        "q, k, v = (all_to_all_dims(x, group, 2, 1) for x in (q, k, v))",
        (f"{SEQUENCES}::test_fewer_key_heads_than_ranks[4-4-2]",),
    ),
    PackageMutant(
        "a transformers model's heads come back as slices of the sequence",
        "parallel/sequence_parallel/transformers_models.py",
        "return all_to_all_dims(out, self._group, 1, 2), None",
        "return all_to_all_dims(out, self._group, 2, 1), None",
        (f"{MODELS}::test_slices_of_a_llama[plain-sdpa]",),
    ),
    PackageMutant(
        "repeated key heads serve other query heads",
        "parallel/sequence_parallel/slices.py",
        "k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)",
        "k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)",
        (f"{SEQUENCES}::test_fewer_key_heads_than_ranks[12-2-4]",),
    ),
    PackageMutant(
        "repeated key heads are taken for as few as there were",
        "parallel/sequence_parallel/transformers_models.py",
        "_PartialAttention(module, q.shape[1] // k.shape[1])",
        "_PartialAttention(module, query.shape[1] // key.shape[1])",
        (f"{MODELS}::test_slices_of_other_models[build_sequence_qwen3-eager]",),
    ),
    PackageMutant(
        "the loss is a mean of the slices' means",
        "parallel/sequence_parallel/slices.py",
        "losses.sum(dtype=torch.float64)",
        "losses.mean(dtype=torch.float64)",
        (f"{SEQUENCES}::test_the_loss_is_the_mean_over_all_tokens",),
    ),
    PackageMutant(
        "gradients of the loss become fewer with every rank",
        "parallel/sequence_parallel/slices.py",
        "return grad * ctx.ranks, None",
        "return grad, None",
        (f"{SEQUENCES}::test_the_loss_is_the_mean_over_all_tokens",),
    ),
    PackageMutant(
        "losses of tokens without a label count",
        "parallel/sequence_parallel/slices.py",
        "logits.float().masked_fill(~counts, 0.0)",
        "logits.float()",
        (f"{SEQUENCES}::test_the_loss_is_the_mean_over_all_tokens",),
    ),
    PackageMutant(
        "a token's label is the token before it",
        "parallel/sequence_parallel/slices.py",
        'F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)',
        'F.pad(whole["labels"][:, :-1], (1, 0), value=IGNORED)',
        (f"{SEQUENCES}::test_slices",),
    ),
    PackageMutant(
        "the last token has a label",
        "parallel/sequence_parallel/slices.py",
        'F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)',
        'whole["labels"].roll(-1, 1)',
        (f"{SEQUENCES}::test_slices",),
    ),
    PackageMutant(
        "every slice begins at position 0",
        "parallel/sequence_parallel/transformers_models.py",
        "begin = self._group.rank * tokens.shape[1]",
        "begin = 0",
        (f"{MODELS}::test_positions_are_those_of_the_slice_where_none_are_given",),
    ),
    PackageMutant(
        "packed sequences see each other",
        "parallel/sequence_parallel/transformers_models.py",
        "asked.update(mask_function=both, allow_is_causal_skip=False)",
        "asked.update(mask_function=both)",
        (f"{MODELS}::test_slices_of_a_llama[packed-sdpa]",),
    ),
    PackageMutant(
        "a sliding window is one of the slice",
        "parallel/sequence_parallel/transformers_models.py",
        "asked.update(q_length=seq, kv_length=seq)",
        "pass",
        (f"{MODELS}::test_slices_of_other_models[mistral-sdpa]",),
    ),
    PackageMutant(
        "isp keeps states on weight ranks alone",
        "plan/presets.py",
        '"isp": (_L, _L, _L, _HPZ)',
        '"isp": (_L, _L, _L, _L)',
        (f"{SEQUENCES}::test_the_preset",),
    ),
    PackageMutant(
        "isp on ranks that share no sequences is taken",
        "plan/presets.py",
        "shape.local > 1 == shape.sequence",
        "shape.local > 1 == shape.sequence + 1",
        (f"{SEQUENCES}::test_weight_ranks_without_a_sequence_axis_are_refused",),
    ),
)
