"""Mutants of activations that rest off the device."""

from __future__ import annotations

from .mutant import PackageMutant

WORLD = "world/test_activations.py"
BITS = f"{WORLD}::test_bits_and_bytes"
LEAKS = f"{WORLD}::test_nothing_leaks_and_nothing_is_overwritten"
SHARED = "world/test_shared_activations.py"

MUTANTS = (
    PackageMutant(
        "all inputs wait on the device until backward comes",
        "shard/step/activation_offload.py",
        "            self._settle(1)\n",
        "            self._settle(1000)\n",
        (f"{WORLD}::test_the_device_holds_two_inputs_and_the_host_all_of_them",),
    ),
    PackageMutant(
        "an input comes back with other strides",
        "shard/step/activation_offload.py",
        ".as_strided(item.shape, item.stride)",
        ".view(item.shape)",
        (f"{BITS}[zero1-Transposed]",),
    ),
    PackageMutant(
        "what two checkpoints keep moves twice",
        "shard/step/activation_offload.py",
        "        if item is None:\n",
        "        if True:\n",
        (f"{BITS}[zero0-Twice]",),
    ),
    PackageMutant(
        "what a graph that is retained needs again comes back once",
        "shard/step/activation_offload.py",
        "item.here = item.arrival = None",
        "item.here = None",
        (f"{LEAKS}[backward_twice-zero2-Chain]",),
    ),
    PackageMutant(
        "parameters that a checkpoint keeps move, too",
        "shard/step/activation_offload.py",
        " and tensor.untyped_storage()._cdata not in self._resident",
        "",
        (f"{BITS}[zero1-WithWeights]",),
    ),
    PackageMutant(
        "a write into what checkpointing keeps goes unseen",
        "shard/step/activation_offload.py",
        "            self.written = self.near.tensor._version != self.near.version\n",
        "",
        (f"{WORLD}::test_a_write_in_place_is_an_error",),
    ),
    PackageMutant(
        "room on the host is never given back",
        "shard/step/activation_offload.py",
        "        self._home.give(self.runs)",
        "        pass",
        (f"{LEAKS}[raises_midway-zero2-Reentrant]",),
    ),
    PackageMutant(
        "a checkpoint of the whole model keeps what is inside of it",
        "shard/step/activation_offload.py",
        " or hooks._top_saved_tensors_default_hooks(True)",
        "",
        (f"{WORLD}::test_hooks_of_the_program_come_first",),
    ),
    PackageMutant(
        "an error of storing keeps the graph in which it was raised",
        "shard/step/activation_offload.py",
        "stored, self.stored = self.stored, None",
        "stored = self.stored",
        (f"{SHARED}::test_a_disk_that_fails_is_named_and_the_next_step_is_right[write]",),
    ),
    PackageMutant(
        "what could not be stored is computed with",
        "shard/step/activation_offload.py",
        "        self.lost = True\n",
        "",
        (f"{SHARED}::test_what_could_not_be_stored_is_not_computed_with",),
    ),
    PackageMutant(
        "what is fetched is used before it has come",
        "shard/step/activation_offload.py",
        "        arrival.wait()\n",
        "",
        (f"{SHARED}::test_inputs_longer_than_the_buffers",),
        slow=True,
    ),
    PackageMutant(
        "a buffer is filled again while a disk still reads it",
        "shard/offload/activation_storage.py",
        "                        ends.popleft()()\n                    ends.append",
        "                        ends.popleft()\n                    ends.append",
        (f"{SHARED}::test_inputs_longer_than_the_buffers",),
        slow=True,
    ),
    PackageMutant(
        "the thread outlives its model",
        "shard/offload/activation_storage.py",
        "        weakref.finalize(self, _close_storage, self._lane)\n",
        "",
        (f"{WORLD}::test_the_thread_ends_with_the_model",),
    ),
)
