"""Mutants of functions over communicators, of sharded vocabularies and of the head over many classes."""

from __future__ import annotations

from .mutant import PackageMutant

VALUES = "parallel/test_functions.py::test_values_and_gradients"
LOSS = "parallel/test_vocabulary.py::test_cross_entropy"
HEAD = "parallel/test_class_head.py::test_it_trains_as_one_process"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "the gradient before what ranks compute parts of is this rank's part alone",
        "parallel/functions.py",
        "(all_reduce_sum(gradient, group) if torch.is_grad_enabled() else _all_reduce_copy(group, gradient),)",
        "gradients",
        (f"{VALUES}[copy-2]",),
    ),
    PackageMutant(
        "the gradient of a sum over ranks is summed once more",
        "parallel/functions.py",
        "_apply_linear_map(x, partial(_all_reduce_copy, group), _identity_view)",
        "_apply_linear_map(x, partial(_all_reduce_copy, group), partial(_all_reduce_copy, group))",
        (f"{VALUES}[total-2]",),
    ),
    PackageMutant(
        "what all ranks use alike gets the sum of equal gradients",
        "parallel/functions.py",
        '"gather_replicated: dim", dim, _all_gather_along, _copy_rank_slice)',
        '"gather_replicated: dim", dim, _all_gather_along, _reduce_scatter_along)',
        (f"{VALUES}[collect0-2]",),
    ),
    PackageMutant(
        "of what ranks use parts of only this rank's gradient comes back",
        "parallel/functions.py",
        '"all_gather_dim: dim", dim, _all_gather_along, _reduce_scatter_along)',
        '"all_gather_dim: dim", dim, _all_gather_along, _copy_rank_slice)',
        (f"{VALUES}[gather0-2]",),
    ),
    PackageMutant(
        "the dimensions of the all-to-all are the wrong way round in backward",
        "parallel/functions.py",
        "partial(_all_to_all_along, group, gathers, splits)\n",
        "partial(_all_to_all_along, group, splits, gathers)\n",
        (f"{VALUES}[swap01-2]",),
    ),
    PackageMutant(
        "a rank keeps another's slice",
        "parallel/functions.py",
        "x.narrow(dim, group.rank * part, part)",
        "x.narrow(dim, (group.size - 1 - group.rank) * part, part)",
        (f"{VALUES}[split0-2]",),
    ),
    PackageMutant(
        "sums of exponentials are added up though each rank has taken its own maximum from them",
        "parallel/class_parallel/vocabulary.py",
        "_sum_in_rank_order(sums * (tops - top).exp())",
        "_sum_in_rank_order(sums)",
        (f"{LOSS}[2-8-4-mean-0.0]",),
    ),
    PackageMutant(
        "padding of a vocabulary has a share in the softmax",
        "parallel/class_parallel/vocabulary.py",
        "logits.reshape(-1, local)[:, :present]",
        "logits.reshape(-1, local)",
        (f"{LOSS}[3-10-4-mean-0.0]",),
    ),
    PackageMutant(
        "label smoothing is over this rank's classes",
        "parallel/class_parallel/vocabulary.py",
        "ctx.smoothing, ctx.share = smoothing, smoothing / classes",
        "ctx.smoothing, ctx.share = smoothing, smoothing / z.shape[1]",
        (f"{LOSS}[2-8-4-mean-0.1]",),
    ),
    PackageMutant(
        "rows that do not count are in the mean's divisor",
        "parallel/class_parallel/vocabulary.py",
        "losses.sum() / counts.sum()",
        "losses.mean()",
        (f"{LOSS}[2-8-4-mean-0.0]",),
    ),
    PackageMutant(
        "the row that stands in for another rank's shows in the embedding",
        "parallel/class_parallel/vocabulary.py",
        "F.embedding(own, weight).masked_fill(elsewhere[..., None], 0.0)",
        "F.embedding(own, weight)",
        ("parallel/test_vocabulary.py::test_embedding[2-8-4]",),
    ),
    PackageMutant(
        "the network below a head gets a part of its gradient: the mean of what is the loss of all ranks",
        "parallel/class_parallel/class_head.py",
        "every.register_hook(lambda grad: grad * self.group.size)",
        "pass",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
    PackageMutant(
        "classes that occur in the batch are left out of the sample",
        "parallel/class_parallel/class_head.py",
        "score[own] = 2.0",
        "score[own] = -1.0",
        ("parallel/test_class_head.py::test_positives_come_first_and_negatives_up_to_the_quota",),
    ),
    PackageMutant(
        "classes that occur beyond the quota are dropped",
        "parallel/class_parallel/class_head.py",
        "max(quota, int((score == 2.0).sum()))",
        "quota",
        ("parallel/test_class_head.py::test_positives_come_first_and_negatives_up_to_the_quota",),
    ),
    PackageMutant(
        "tensor ranks sample other classes, and drift apart",
        "parallel/class_parallel/class_head.py",
        "if self._repeated.size > 1:",
        "if self._repeated.size > 99:",
        ("parallel/test_class_head.py::test_tensor_ranks_sample_alike",),
    ),
    PackageMutant(
        "a margin is on another rank's classes, too",
        "parallel/class_parallel/class_head.py",
        "torch.where(own >= 0, self.margin(cosine), cosine)",
        "self.margin(cosine)",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
    PackageMutant(
        "of classes that do not divide, ranks that have one fewer compute with another's centres",
        "parallel/class_parallel/class_head.py",
        "0 if get_portion(self.weight) else self.first, self.local)",
        "0 if get_portion(self.weight) else self.first, len(self.weight))",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
)
