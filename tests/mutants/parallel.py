"""Mutants of functions over communicators, of sharded vocabularies and of the head over many classes."""

from __future__ import annotations

from .mutant import Mutant

VALUES = "parallel/test_functions.py::test_values_and_gradients"
LOSS = "parallel/test_vocabulary.py::test_cross_entropy"
HEAD = "parallel/test_class_head.py::test_it_trains_as_one_process"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the gradient before what ranks compute parts of is this rank's part alone",
        "parallel/functions.py",
        "(total(gradient, group) if torch.is_grad_enabled() else _sum(group, gradient),)",
        "gradients",
        (f"{VALUES}[copy-2]",),
    ),
    Mutant(
        "the gradient of a sum over ranks is summed once more",
        "parallel/functions.py",
        "_linear(x, partial(_sum, group), _same)",
        "_linear(x, partial(_sum, group), partial(_sum, group))",
        (f"{VALUES}[total-2]",),
    ),
    Mutant(
        "what all ranks use alike gets the sum of equal gradients",
        "parallel/functions.py",
        '"collect: dim", dim, _gather, _slice)',
        '"collect: dim", dim, _gather, _scatter)',
        (f"{VALUES}[collect0-2]",),
    ),
    Mutant(
        "of what ranks use parts of only this rank's gradient comes back",
        "parallel/functions.py",
        '"gather: dim", dim, _gather, _scatter)',
        '"gather: dim", dim, _gather, _slice)',
        (f"{VALUES}[gather0-2]",),
    ),
    Mutant(
        "the dimensions of the all-to-all are the wrong way round in backward",
        "parallel/functions.py",
        "partial(_swap, group, gathers, splits))",
        "partial(_swap, group, splits, gathers))",
        (f"{VALUES}[swap01-2]",),
    ),
    Mutant(
        "a rank keeps another's slice",
        "parallel/functions.py",
        "x.narrow(dim, group.rank * part, part)",
        "x.narrow(dim, (group.size - 1 - group.rank) * part, part)",
        (f"{VALUES}[split0-2]",),
    ),
    Mutant(
        "sums of exponentials are added up though each rank has taken its own maximum from them",
        "parallel/vocabulary.py",
        "_in_order(sums * (tops - top).exp())",
        "_in_order(sums)",
        (f"{LOSS}[2-8-4-mean-0.0]",),
    ),
    Mutant(
        "padding of a vocabulary has a share in the softmax",
        "parallel/vocabulary.py",
        "logits.reshape(-1, local)[:, :present]",
        "logits.reshape(-1, local)",
        (f"{LOSS}[3-10-4-mean-0.0]",),
    ),
    Mutant(
        "label smoothing is over this rank's classes",
        "parallel/vocabulary.py",
        "ctx.smoothing, ctx.share = smoothing, smoothing / classes",
        "ctx.smoothing, ctx.share = smoothing, smoothing / z.shape[1]",
        (f"{LOSS}[2-8-4-mean-0.1]",),
    ),
    Mutant(
        "rows that do not count are in the mean's divisor",
        "parallel/vocabulary.py",
        "losses.sum() / counts.sum()",
        "losses.mean()",
        (f"{LOSS}[2-8-4-mean-0.0]",),
    ),
    Mutant(
        "the row that stands in for another rank's shows in the embedding",
        "parallel/vocabulary.py",
        "F.embedding(own, weight).masked_fill(elsewhere[..., None], 0.0)",
        "F.embedding(own, weight)",
        ("parallel/test_vocabulary.py::test_embedding[2-8-4]",),
    ),
    Mutant(
        "the network below a head gets a part of its gradient: the mean of what is the loss of all ranks",
        "parallel/class_head.py",
        "every.register_hook(lambda grad: grad * self.group.size)",
        "pass",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
    Mutant(
        "classes that occur in the batch are left out of the sample",
        "parallel/class_head.py",
        "score[own] = 2.0",
        "score[own] = -1.0",
        ("parallel/test_class_head.py::test_positives_come_first_and_negatives_up_to_the_quota",),
    ),
    Mutant(
        "classes that occur beyond the quota are dropped",
        "parallel/class_head.py",
        "max(quota, int((score == 2.0).sum()))",
        "quota",
        ("parallel/test_class_head.py::test_positives_come_first_and_negatives_up_to_the_quota",),
    ),
    Mutant(
        "tensor ranks sample other classes, and drift apart",
        "parallel/class_head.py",
        "if self._repeated.size > 1:",
        "if self._repeated.size > 99:",
        ("parallel/test_class_head.py::test_tensor_ranks_sample_alike",),
    ),
    Mutant(
        "a margin is on another rank's classes, too",
        "parallel/class_head.py",
        "torch.where(own >= 0, self.margin(cosine), cosine)",
        "self.margin(cosine)",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
    Mutant(
        "of classes that do not divide, ranks that have one fewer compute with another's centres",
        "parallel/class_head.py",
        "0 if portion_of(self.weight) else self.first, self.local)",
        "0 if portion_of(self.weight) else self.first, len(self.weight))",
        (f"{HEAD}[3-zero0-cos-sgd-1.0]",),
    ),
)
