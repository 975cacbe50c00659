"""Partial-FC: a softmax over more classes than one device holds; a step may sample them.

The class centres are sharded over the data ranks. Each rank has a range of classes with their gradients, masters and
moments. Features are small and go to all ranks: each rank computes the logits of all ranks' features to its own
classes, and the softmax over ranks is one all_gather of three numbers per row. With ``sample_rate`` r a rank uses the
classes that occur in the batch and random others, up to r of its classes, so that logits take r of the memory and time.

Source: An et al., Killing two birds with one stone: efficient and robust training of face recognition CNNs by partial
FC (2022), sections 3.2 and 3.3.

Sizes:
    b, n   features of a rank; data ranks
    C, f   classes; elements of a feature
    c      classes of this rank: C / n, one more on the first C mod n ranks
    k      classes of this rank that are used in the step

Sent per step by each rank: features and their gradients, 2 * (n - 1) * b * f elements; labels and three floats per
feature.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npuzero.comm import Mesh
from npuzero.comm.mesh import check_mesh
from npuzero.errors import ConfigError, ContractError
from npuzero.parallel import functions
from npuzero.parallel.class_parallel.margins import CosineMargin
from npuzero.parallel.class_parallel.vocabulary import softmax_loss
from npuzero.plan import DATA, TENSOR, Cut
from npuzero.shard.layout.mesh_axes import bind_mesh
from npuzero.shard.layout.tensor_slices import cut_parameter, get_portion

#: Standard deviation of the initial centres.
DEVIATION = 0.01


class ClassHead(nn.Module):
    """Compute the softmax loss of features over many classes, with class centres sharded over the data ranks.

    It is the last module of a model that :func:`npuzero.zero` shards over the same mesh. Until then it has all centres
    (without memory on ``meta``). ``zero`` leaves each rank its own centres, and never gathers or reduces them. State
    dicts and checkpoints have unsharded tensors, for any number of ranks.

    Args:
        features: elements of a feature.
        classes: over all ranks; at least one for each data rank.
        mesh: what :func:`npuzero.mesh` returned.
        sample_rate: in (0, 1]: the fraction of a rank's classes used in a training step; classes that occur in the
            batch are always used.
        margin: ``ArcFace``, ``CosFace`` or another :class:`CosineMargin`: logits are ``margin.s`` times cosines;
            None: inner products.
        device, dtype: of the centres.

    Attributes:
        weight: [C, features]; sharded: [ceil(C / n), features], this rank's rows; a rank with one class fewer has a row
            of padding.
        first, local: the first class of this rank, and its number of classes.
        group: the data ranks.

    Raises:
        ConfigError: an argument is out of range.

    Example::

        mesh = npuzero.mesh()
        head = npuzero.parallel.ClassHead(8, classes=10, mesh=mesh, margin=npuzero.parallel.CosFace(m=0.4))
        loss = head(torch.randn(4, 8, device=mesh.world.device), torch.tensor([1, 0, 9, 3], device=mesh.world.device))
    """

    def __init__(
        self,
        features: int,
        classes: int,
        mesh: Mesh,
        sample_rate: float = 1.0,
        margin: CosineMargin | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_mesh("ClassHead", mesh)
        ranks, index = mesh.size(DATA), mesh.index(DATA)
        _check_head_arguments(features, classes, ranks, sample_rate, margin)
        self.features, self.classes, self.sample_rate, self.margin = features, classes, sample_rate, margin
        share, more = divmod(classes, ranks)
        self.first = index * share + min(index, more)
        self.local = share + (index < more)
        self.group = mesh.communicator(DATA, "classes")
        self._repeated = mesh.communicator((TENSOR,), "classes")
        self.weight = nn.Parameter(torch.empty(classes, features, device=device, dtype=dtype))
        cut_parameter(self.weight, Cut(DATA, 0, uneven=True))
        bind_mesh(self, mesh)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the centres: normal, with deviation 0.01."""
        nn.init.normal_(self.weight, std=DEVIATION)

    def extra_repr(self) -> str:
        """Describe the module, for ``print``."""
        return (
            f"features={self.features}, classes={self.classes}, here={self.first}..{self.first + self.local - 1}, "
            f"sample_rate={self.sample_rate}, margin={self.margin}"
        )

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over all ranks' features, with the same bits on all ranks.

        Backward gives ``features`` the gradient of ``n`` times the loss, as for a mean over the rank's own batch, since
        the layers below average gradients over the ranks.

        Args:
            features: [b, features], float; this rank's, with the same b on all ranks.
            labels: [b], int64: classes, 0 to C - 1, of any rank.

        Returns:
            A float32 scalar.

        Raises:
            ContractError: shapes or dtypes do not fit; on the CPU also a label is out of range, which gives a loss of
                inf on other devices.
        """
        self._check_batch(features, labels)
        every = functions.all_gather_dim(features, self.group, 0)
        if every.requires_grad and self.group.size > 1:
            every.register_hook(lambda grad: grad * self.group.size)
        own = self._own(labels)
        # Before zero() shards it the weight has all centres; afterwards this rank's, maybe with a row of padding.
        weight = self.weight.narrow(0, 0 if get_portion(self.weight) else self.first, self.local)
        if self.training and self.sample_rate < 1.0:
            rows = self.sample(own)
            centres = weight[rows]
            own = torch.where(own >= 0, torch.searchsorted(rows, own.clamp(min=0)), -1)
        else:
            centres = weight
        return softmax_loss(self._logits(every, centres, own), own, self.group, self.classes).mean()

    def sample(self, own: Tensor) -> Tensor:
        """Return the classes of this rank to use: all that occur, and random others up to the quota.

        The quota is ceil(sample_rate * c), or the number of classes that occur if that is more. Draws come from the
        device's default generator, so that a resumed run repeats those of the saved run. Tensor ranks use the first
        tensor rank's draw.

        Args:
            own: [n * b], int64: classes as rows of ``weight``, or -1 if another rank has the class.

        Returns:
            Tensor[k], int64, ascending.
        """
        quota = math.ceil(self.sample_rate * self.local)
        score = torch.rand(self.local + 1, device=own.device)
        score[own] = 2.0  # -1 marks the extra last element, which is no class
        score = score[: self.local]
        # Counted only if they may exceed the quota, since counting synchronizes a device.
        size = quota if len(own) <= quota else max(quota, int((score == 2.0).sum()))
        rows = score.topk(size, sorted=False).indices.sort().values
        if self._repeated.size > 1:
            self._repeated.broadcast(rows, root=0).wait()
        return rows

    def _own(self, labels: Tensor) -> Tensor:
        """Return the row in ``weight`` of each of all ranks' labels, or -1 if another rank has the class."""
        every = labels.new_empty(self.group.size * len(labels))
        self.group.all_gather(every, labels.contiguous()).wait()
        if every.device.type == "cpu":  # on a device this would synchronize
            wrong = every[(every < 0) | (every >= self.classes)]
            if len(wrong):
                _refuse_head_input(
                    "labels", f"classes, 0 to {self.classes - 1}", str(int(wrong[0])), "Number classes from 0."
                )
        own = every - self.first
        return torch.where((own >= 0) & (own < self.local), own, -1)

    def _logits(self, features: Tensor, centres: Tensor, own: Tensor) -> Tensor:
        """Return [n * b, k] logits, allocating no second tensor of that size."""
        if self.margin is None:
            return F.linear(features, centres)
        features, centres, s = F.normalize(features), F.normalize(centres), self.margin.s
        logits = F.linear(features * s, centres)
        # One element of each row is overwritten: its own class, or, if another rank has it, the first with its own
        # value.
        place = own.clamp(min=0)
        cosine = (features * centres[place]).float().sum(1)
        written = torch.where(own >= 0, self.margin(cosine), cosine) * s
        return logits.scatter_(1, place[:, None], written[:, None].to(logits.dtype))

    def _check_batch(self, features: Tensor, labels: Tensor) -> None:
        if features.dim() != 2 or features.shape[1] != self.features:
            do = "Flatten what the model computes to one feature a row."
            _refuse_head_input("features", f"[b, {self.features}]", str(tuple(features.shape)), do)
        if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
            got = f"{tuple(labels.shape)} {str(labels.dtype).removeprefix('torch.')}"
            _refuse_head_input(
                "labels", f"({len(features)},) int64, one a feature", got, "Give the class of each feature."
            )


def _check_head_arguments(features: int, classes: int, ranks: int, sample_rate: float, margin: object) -> None:
    """Check the arguments of a head."""
    wrong = (
        (_is_count_below(features, 1), "features", "a positive number", features, "Give the elements of one feature."),
        (
            _is_count_below(classes, ranks),
            "classes",
            f"one or more for each of {ranks} data ranks",
            classes,
            "Use fewer ranks.",
        ),
        (not 0.0 < sample_rate <= 1.0, "sample_rate", "in (0, 1]", sample_rate, "Give 1.0 to take all classes."),
        (
            margin is not None and not (callable(margin) and getattr(margin, "s", 0) > 0),
            "margin",
            "ArcFace, CosFace, or a function of cosines with a positive s",
            margin,
            "Give npuzero.parallel.ArcFace(), or None.",
        ),
    )
    for bad, name, expected, got, do in wrong:
        if bad:
            raise ConfigError(f"ClassHead: {name}", expected=expected, got=repr(got), do=do)


def _is_count_below(count: object, least: int) -> bool:
    return not isinstance(count, int) or isinstance(count, bool) or count < least


def _refuse_head_input(what: str, expected: str, got: str, do: str) -> None:
    raise ContractError(f"ClassHead: {what}", expected=expected, got=got, do=do)
