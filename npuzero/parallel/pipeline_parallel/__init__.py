"""Pipeline parallelism: divide a model into stages and run micro-batches through them.

In: a model, a mesh with a ``pipe`` axis, a schedule's name, the number of micro-batches. Out: a ``Pipeline``, an
nn.Module of this rank's stages that ``zero`` shards and that trains by ``step(batch, target=...)``.

Read ``schedule.py`` (the table of actions), ``divide.py`` (stages by block names) and ``runner.py`` (the step) first.
``send_recv.py`` moves activations and gradients between stages; ``split_backward.py`` serves the zero-bubble schedule;
``transformers_stages.py`` runs a stage of a transformers model; ``torch_stage.py`` adapts torch's own schedules.
"""
