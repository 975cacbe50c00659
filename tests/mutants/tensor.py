"""Mutants of layers divided over tensor ranks."""

from __future__ import annotations

from .mutant import PackageMutant

TRAINS = "parallel/test_tensor.py::test_every_model_trains_as_in_one_process"
BYTES = "parallel/test_tensor.py::test_bytes_of_a_layer"
FSP = "parallel/test_tensor.py::test_fsp_keeps_slices_of_what_it_gathers"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "derivatives of gradients are those of one tensor rank's part",
        "parallel/tensor_parallel/collectives_around.py",
        "copy_to_ranks(gradients[own], self._group)",
        "gradients[own]",
        ("parallel/test_tensor.py::test_gradients_of_gradients",),
    ),
    PackageMutant(
        "the bias behind a sum over tensor ranks is added once more on each of them",
        "parallel/tensor_parallel/collectives_around.py",
        '        linear.__dict__["bias"] = None  # found before the parameter, which stays registered\n',
        "",
        (f"{TRAINS}[biased-mtp]",),
    ),
    PackageMutant(
        "norms of heads follow the heads of their rank alone, and drift apart",
        "parallel/tensor_parallel/divide.py",
        "return Relation.SUMMED if word.kind is RuleKind.SUMMED else outside",
        "return outside",
        (f"{TRAINS}[qwen3-mtp]",),
    ),
    PackageMutant(
        "norms follow the positions of their rank alone, and drift apart",
        "parallel/tensor_parallel/divide.py",
        "outside = Relation.SUMMED if division.in_stack(name) else Relation.REPEATED",
        "outside = Relation.REPEATED",
        (f"{TRAINS}[llama-msp]",),
    ),
    PackageMutant(
        "packed queries, keys and values are cut as if they were one",
        "parallel/tensor_parallel/divide.py",
        'division.cuts[f"{path}.{name}"] = Cut(TENSOR, 0, spans)',
        'division.cuts[f"{path}.{name}"] = Cut(TENSOR, 0)',
        (f"{TRAINS}[phi3-mtp]",),
    ),
    PackageMutant(
        "a model that asks its config takes all heads for a rank's",
        "parallel/tensor_parallel/attention_heads.py",
        "module.config = RankConfig(config, **counts)",
        "module.config = RankConfig(config)",
        (f"{TRAINS}[phi3-mtp]",),
    ),
    PackageMutant(
        "what is gathered for a layer gets one rank's gradient",
        "parallel/tensor_parallel/collectives_around.py",
        "whole = all_gather_dim(x, self._group, SEQUENCE_DIM)",
        "whole = gather_replicated(x, self._group, SEQUENCE_DIM)",
        (f"{TRAINS}[llama-msp]",),
    ),
    PackageMutant(
        "an embedding that is cut adds other ranks' tokens as its first",
        "parallel/tensor_parallel/collectives_around.py",
        "return all_reduce_sum(output.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)",
        "return all_reduce_sum(output, self._group)",
        (f"{TRAINS}[llama-mtp]",),
    ),
    PackageMutant(
        "queries, keys and values each send what they could share",
        "parallel/tensor_parallel/collectives_around.py",
        "if x is not self._given or version != self._version or linear not in self._waiting:",
        "if True:",
        (BYTES,),
    ),
    PackageMutant(
        "fsp keeps all of what it gathers",
        "parallel/tensor_parallel/collectives_around.py",
        "if saved.untyped_storage().data_ptr() != self._storage:",
        "if True:",
        (FSP, BYTES),
    ),
    PackageMutant(
        "in backward fsp gathers for each Linear again",
        "parallel/tensor_parallel/collectives_around.py",
        "        if not self._left:\n            self._whole = None",
        "        self._whole = None",
        (BYTES,),
    ),
    PackageMutant(
        "ranks that were told different things go on",
        "parallel/tensor_parallel/api.py",
        "if other is not None:",
        "if False:",
        ("parallel/test_tensor.py::test_ranks_that_differ", "parallel/test_tensor.py::test_meshes_that_differ"),
    ),
    PackageMutant(
        "ranks drop different elements of what they hold alike",
        "parallel/tensor_parallel/divide.py",
        "if division.in_stack(path) and path not in whole:",
        "if True:",
        ("parallel/test_tensor.py::test_dropout",),
    ),
)
