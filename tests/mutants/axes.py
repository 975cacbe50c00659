"""Mutants of the mesh's axes and of relations."""

from __future__ import annotations

from .mutant import PackageMutant

TRAINED = "world/test_axes.py::test_tensor_ranks_train_one_model"
DATA_CUT = "world/test_axes.py::test_a_parameter_may_be_cut_over_data_ranks"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "what tensor ranks sum is averaged over them",
        "plan/presets.py",
        "return axes_with(self.relations, Relation.AVERAGED)",
        "return axes_with(self.relations, Relation.AVERAGED, Relation.SUMMED)",
        (f"{TRAINED}[zero3-4-2]",),
    ),
    PackageMutant(
        "what tensor ranks sum stays each rank's own",
        "plan/presets.py",
        "return axes_with(self.relations, Relation.AVERAGED, Relation.SUMMED)",
        "return axes_with(self.relations, Relation.AVERAGED)",
        (f"{TRAINED}[zero3-4-2]",),
    ),
    PackageMutant(
        "the norm has what tensor ranks repeat as often as they are",
        "shard/gradients/norms.py",
        "self._counted = {flat for flat in flats if _is_first_owner(flat.rests.owners, self._owners, mesh)}",
        "self._counted = set(flats)",
        (f"{TRAINED}[zero3-4-2]",),
    ),
    PackageMutant(
        "the norm is that of one tensor rank's part",
        "plan/presets.py",
        "return self.states.axes + axes_with(self.relations, Relation.CUT)",
        "return self.states.axes",
        (f"{TRAINED}[zero3-4-2]",),
    ),
    PackageMutant(
        "all tensor ranks begin with the first one's part",
        "shard/parameters/full_parameters.py",
        "flat.rests.alike.communicator",
        "flat.rests.owners.communicator",
        (f"{DATA_CUT}[zero1]",),
    ),
    PackageMutant(
        "what data ranks cut is sharded over them as well",
        "plan/presets.py",
        "axes=tuple(axis for axis in placement.axes if axis not in cut)",
        "axes=placement.axes",
        (f"{DATA_CUT}[zero3]",),
    ),
    PackageMutant(
        "parameters of different relations share a flat",
        "shard/build.py",
        "parameter.trainable, parameter.relations)",
        "parameter.trainable, ())",
        (f"{TRAINED}[zero3-4-2]",),
    ),
    PackageMutant(
        "tensor ranks are not neighbours",
        "plan/table/mesh_shape.py",
        "for axis in reversed(AXES):",
        "for axis in AXES:",
        ("world/test_axes.py::test_a_mesh_is_rank_arithmetic[sizes1]",),
    ),
    PackageMutant(
        "ranks that share sequences are far apart",
        "comm/mesh.py",
        "return data[begin : begin + share]",
        "return data[begin // share :: len(data) // share]",
        ("world/test_axes.py::test_a_mesh_is_rank_arithmetic[sizes3]",),
    ),
    PackageMutant(
        "pods train models of their own",
        "plan/presets.py",
        "return axes_beyond(self.states.axes, self.reduced)",
        'return axes_beyond(self.states.axes, tuple(axis for axis in self.reduced if axis != "pod"))',
        ("world/test_axes.py::test_pods_hold_what_a_plan_does_not_shard_over_them",),
    ),
)
