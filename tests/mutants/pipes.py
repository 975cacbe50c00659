"""Mutants of checkpoints and state dicts of pipelines."""

from __future__ import annotations

from .mutant import PackageMutant

MESHES = "checkpoint/test_pipes.py::test_any_mesh_loads_what_stages_saved_and_back"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "what both ends of a pipeline have is written by both",
        "checkpoint/layout/parts.py",
        "return not self.flat.plan.tied or shape.index((ENDS,), rank) == 0",
        "return True",
        (MESHES,),
    ),
    PackageMutant(
        "a checkpoint has the optimizer's groups of the first stage alone",
        "checkpoint/layout/across_stages.py",
        "for share in some for name in",
        "for share in some[:1] for name in",
        (MESHES,),
    ),
    PackageMutant(
        "a buffer that every stage has is written by each",
        "checkpoint/saving.py",
        "if entry.key not in before]",
        "]",
        (MESHES,),
    ),
    PackageMutant(
        "blocks that ranks have in turn come in the order of ranks",
        "shard/parameters/across_stages.py",
        "next(numbers) if part.isdecimal() else part",
        "part",
        (MESHES,),
    ),
    PackageMutant(
        "each stage loads a state dict of its own",
        "shard/state_dict.py",
        "state = {**state, **_receive_from_rank0(line, stages, state, said[0][1])}",
        "_receive_from_rank0(line, stages, state, said[0][1])",
        ("checkpoint/test_pipes.py::test_a_whole_state_dict_goes_into_stages",),
    ),
    PackageMutant(
        "files may have what no stage has",
        "shard/build.py",
        "        origin.check_stages(ranks)\n",
        "",
        ("checkpoint/test_pipes.py::test_stages_export_one_file_and_begin_with_it",),
    ),
)
