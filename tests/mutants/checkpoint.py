"""Mutants of checkpoints: what is written, when it is durable, what is read back."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    # what is written
    Mutant(
        "a save beside training has the parameters of a later step",
        "checkpoint/saving.py",
        "items = iter(self._copied(items, job.parts))",
        "items = iter(list(items))",
        ("checkpoint/test_saving.py::test_what_is_saved_beside_training_is_the_state_at_the_call[zero3]",),
    ),
    Mutant(
        "a save begins to write over the snapshot of the one before",
        "checkpoint/public.py",
        "    saver = saver_of(engine)\n    saver.finish()",
        "    saver = saver_of(engine)",
        ("checkpoint/test_saving.py",),
    ),
    Mutant(
        "a load takes the last checkpoint while a later one is being written",
        "checkpoint/public.py",
        "    saver_of(engine).finish()\n",
        "",
        ("checkpoint/test_saving.py",),
    ),
    Mutant(
        "objects that are alike share the place of the last one written",
        "checkpoint/saving.py",
        "places[raw] if raw in places else places.setdefault(raw, file.add_object(raw))",
        "places[raw] if raw in places else places.setdefault(raw, file.add_object(raw)[::-1])",
        ("checkpoint/test_contents.py::test_buffers_and_extra_states",),
    ),
    # when it is durable
    Mutant(
        "one checkpoint too few is kept",
        "checkpoint/folder.py",
        "for path in complete(folder)[:-count]:",
        "for path in complete(folder)[: -count + 1 or None]:",
        ("checkpoint/test_saving.py::test_old_ones_go_when_the_new_one_is_there",),
    ),
    # what is read
    Mutant(
        "damaged weights are loaded",
        "checkpoint/source.py",
        "if crc != expected:",
        "if False:",
        ("checkpoint/test_damage.py::test_ours_is_checked_before_it_is_used",),
    ),
    Mutant(
        "after a load training goes on with the parameters of before",
        "checkpoint/public.py",
        "    engine.restore_parameters()\n",
        "",
        ("checkpoint/test_resume.py::test_some_pairs[('zero1', 3)]",),
    ),
    Mutant(
        "ranks beyond those that were saved draw the random numbers of each other",
        "checkpoint/rng.py",
        "seeds = torch.randint(2**31, (turn,)).tolist()",
        "seeds = torch.randint(2**31, (1,)).tolist()",
        ("checkpoint/test_contents.py::test_more_ranks_have_random_numbers_of_their_own",),
    ),
    Mutant(
        "Python's random numbers do not go on where they were",
        "checkpoint/rng.py",
        '    random.setstate(state["python"])\n',
        "",
        ("checkpoint/test_contents.py::test_random_numbers_go_on",),
    ),
    Mutant(
        "a part of a tensor that lies inside one row is loaded from the row's beginning",
        "checkpoint/boxes.py",
        "yield from _row(shape, last, begin - last * row, end - last * row)",
        "yield from _row(shape, last, 0, end - begin)",
        ("checkpoint/test_boxes.py",),
    ),
    Mutant(
        "a checkpoint of the next step is overwritten by resuming one step early",
        "checkpoint/public.py",
        "if step % self._every == 0:",
        "if step % self._every == 1:",
        ("checkpoint/test_saving.py::test_checkpointer_resumes_where_it_was",),
    ),
    Mutant(
        "learning rates of before a load stay",
        "checkpoint/loading.py",
        "                group.update(options)\n",
        "                pass\n",
        ("checkpoint/test_resume.py::test_some_pairs[('zero1', 3)]",),
    ),
)
