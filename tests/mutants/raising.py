"""Mutants of what an exception leaves behind: moves that are not undone, or undone in part."""

from __future__ import annotations

from .mutant import PackageMutant

EVERYWHERE = "faults/test_raising_everywhere.py"
GOES_ON = f"{EVERYWHERE}::test_training_goes_on"
STEP = f"{EVERYWHERE}::test_a_step_is_undone_or_the_model_refused"

MUTANTS = (
    PackageMutant(
        "a unit whose gather has raised computes with memory that was never filled",
        "shard/parameters/all_gather.py",
        "purpose)\n        except BaseException:\n            self._undo(unit, gather)\n",
        "purpose)\n        except BaseException:\n",
        (f"{GOES_ON}[zero3-forward-out of memory]",),
    ),
    PackageMutant(
        "a unit whose updated parameters could not be sent computes with those of before",
        "shard/step/optimizer_update.py",
        "            self._start(first)\n            self._waiting.popleft()",
        "            self._waiting.popleft()\n            self._start(first)",
        (f"{GOES_ON}[offload-forward-out of memory]",),
    ),
    PackageMutant(
        "a unit computes with updated parameters for which the wait has raised",
        "shard/parameters/all_gather_updated.py",
        "        handles = self._handles.get(unit.index)\n",
        "        handles = self._handles.pop(unit.index, None)\n        self._handles[unit.index] = []\n",
        (f"{GOES_ON}[zero1-forward-out of memory]",),
    ),
    PackageMutant(
        "a model of which a step has updated one half trains on",
        "shard/step/optimizer_update.py",
        '            self._restorer.refuse("optimizer.step", error, self.stream.check)\n',
        "            pass\n",
        (f"{STEP}[zero1-later-out of memory]",),
    ),
    PackageMutant(
        "a step that has raised before its update counts",
        "optim/workers/sharded_parameters.py",
        "{flat: list(self._steps_of(flat)) for flat in used}",
        "{flat: self._steps_of(flat) for flat in used}",
        (f"{STEP}[zero1-later-out of memory]", f"{STEP}[offload-later-out of memory]"),
    ),
    PackageMutant(
        "gradients of a backward pass that has raised are taken for all there are",
        "shard/step/forward_backward.py",
        "self._failed = self._boundary.incomplete = True",
        "self._failed = True",
        (f"{EVERYWHERE}::test_gradients_of_a_backward_that_raised_are_refused",),
    ),
    PackageMutant(
        "stages of a pipeline whose neighbour has left a step take those of its next step for them",
        "parallel/pipeline_parallel/runner.py",
        "            self._mesh.world.abort(",
        "            str(",
        ("faults/test_raising_on_one_rank.py::test_stages_stay_in_step_or_the_world_is_broken",),
    ),
)
