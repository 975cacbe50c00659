"""Mutants of cuts: which part of a tensor a rank has, on the way in and on the way out."""

from __future__ import annotations

from .mutant import PackageMutant

WORLD = "world/test_cuts.py::"
MESHES = "checkpoint/test_meshes.py::test_a_mesh_goes_on_where_another_stopped[first0-second0]"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "a rank has one range of packed queries, keys and values",
        "plan/table/tensor_slices.py",
        "return self.spans or (whole[self.dim],)",
        "return (whole[self.dim],)",
        ("unit/test_cuts_plan.py",),
    ),
    PackageMutant(
        "pieces of a part that is longer than a block lie upon each other",
        "plan/table/tensor_slices.py",
        "had[owner] += stop - start",
        "had[owner] = stop - start",
        ("unit/test_cuts_plan.py",),
    ),
    PackageMutant(
        "a size that does not divide is cut all the same",
        "shard/build.py",
        "        _check_cuts(model, specs, shape)\n        device.get",
        "        device.get",
        (f"{WORLD}test_a_size_that_does_not_divide_is_told_on_every_rank",),
    ),
    PackageMutant(
        "each span of a part begins where the part does",
        "shard/parameters/full_parameters.py",
        "flat.put(begin + first, portion.out_of(block, exact))",
        "flat.put(begin, portion.out_of(block, exact))",
        (f"{WORLD}test_each_rank_has_its_part_of_what_rank_0_has_built[zero3]",),
    ),
    PackageMutant(
        "every tensor rank reads the first one's part of a file",
        "shard/parameters/full_parameters.py",
        "block.begin + begin - first, block.begin + end - first",
        "begin - slot.begin, end - slot.begin",
        (f"{WORLD}test_files_give_each_rank_its_part_and_no_more_of_ranges[zero3]",),
    ),
    PackageMutant(
        "of columns a whole tensor has those of one rank",
        "shard/layout/tensor_slices.py",
        "portion.of(index).into(block, values, share)",
        "portion.into(block, values, share)",
        (f"{WORLD}test_each_rank_has_its_part_of_what_rank_0_has_built[zero0]",),
    ),
    PackageMutant(
        "every tensor rank loads the first one's moments",
        "optim/workers/torch_states.py",
        "whole if portion is None else portion.take(whole)",
        "whole if portion is None else portion.of(0).take(whole)",
        (f"{WORLD}test_gradients_and_states_of_optimizers_are_whole",),
    ),
    PackageMutant(
        "tensor ranks save their parts as the first one's",
        "checkpoint/layout/parts.py",
        "replace(self, portion=self.portion.of(shape.index(self.portion.cut.axes, rank)))",
        "replace(self, portion=self.portion.of(0))",
        (MESHES,),
    ),
    PackageMutant(
        "packed columns are saved as those of the first span",
        "checkpoint/layout/parts.py",
        "slice(a - first, b - first)",
        "slice(0, b - a)",
        (MESHES,),
    ),
    PackageMutant(
        "what tensor ranks repeat is written by each of them",
        "checkpoint/layout/parts.py",
        "if not self.of_stage(rank, shape) or shape.index(axes_beyond(summed, plan.alike), rank):",
        "if False:",
        (MESHES,),
    ),
    PackageMutant(
        "tensor ranks count as readers of data of their own",
        "checkpoint/loading.py",
        'saved = facts.get("readers", saved)',
        "pass",
        ("checkpoint/test_meshes.py::test_positions_in_the_data_are_those_of_data_ranks",),
    ),
    PackageMutant(
        "a part that a rank has built for itself is exported as the tensor",
        "checkpoint/weight_files/export.py",
        '        check_portions_known(engine, "npuzero.export")\n',
        "        pass\n",
        ("checkpoint/test_meshes.py::test_different_elements_of_which_nobody_has_said_where_they_belong[export]",),
    ),
)
