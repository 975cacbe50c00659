"""Mutants of what is said of traffic between nodes and inside them."""

from __future__ import annotations

from .mutant import PackageMutant

BYTES = "world/test_axes_bytes.py"
CLI = "unit/test_cli_wires.py"
LEVELS = f"{BYTES}::test_a_collective_over_several_axes_goes_level_by_level"
FORETOLD = f"{BYTES}::test_a_rank_sends_along_each_axis_what_was_foretold"

MUTANTS = (
    PackageMutant(
        "each axis is said to carry what a ring over it and all axes outside of it sends",
        "plan/table/mesh_shape.py",
        "            along[axis] = within - outside\n",
        "            along[axis] = within\n",
        (LEVELS,),
    ),
    PackageMutant(
        "an inner axis is said to carry what the whole buffer would make",
        "plan/table/mesh_shape.py",
        "        ranks *= size\n        within = ",
        "        ranks = size\n        within = ",
        (LEVELS,),
    ),
    PackageMutant(
        "what R4 sends is missing along its axes",
        "shard/layout/traffic_meter.py",
        "sent = self._mesh.sent + self._restored\n",
        "sent = self._mesh.sent\n",
        (f"{FORETOLD}[2-2-zero1.5-bf16]",),
    ),
    PackageMutant(
        "a report counts along the axes what the engine says to itself",
        "shard/layout/traffic_meter.py",
        '"control": self.control, ',
        "",
        (f"{FORETOLD}[2-2-zero0-bf16]",),
    ),
    PackageMutant(
        "rows that round what travels are said to be as hpz",
        "planner/search.py",
        "return placements, gathers, levels, own,",
        "return placements, None, (), own,",
        (f"{CLI}::test_what_goes_between_nodes_and_inside_them",),
    ),
    PackageMutant(
        "what goes inside nodes is said to go between them",
        "cli/plan_options/wires.py",
        '{"between nodes": NODE, "inside nodes": LOCAL}',
        '{"between nodes": LOCAL, "inside nodes": NODE}',
        (f"{CLI}::test_what_goes_between_nodes_and_inside_them",),
    ),
    PackageMutant(
        "of an axis named twice the last word counts",
        "cli/plan_options/wires.py",
        "if len(known) < len(pairs) or ",
        "if len(known) < len(found) or ",
        ("unit/test_cli.py::test_a_wrong_option_is_argparses_error",),
    ),
    PackageMutant(
        "of a pipeline's sends a prediction says those along the last of its axes alone",
        "plan/prediction/report.py",
        "sent_along={**self.sent_along, **along}",
        "sent_along=along",
        ("parallel/test_pipeline.py::test_a_rank_holds_and_sends_what_was_foretold",),
    ),
)
