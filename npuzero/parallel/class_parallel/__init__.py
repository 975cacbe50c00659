"""Class parallelism: embedding, cross entropy and softmax over classes that are sharded over ranks.

In: features or token ids, and a communicator or mesh. Out: a loss with the same bits on all ranks; gradients of this
rank's classes stay on this rank.

Read ``vocabulary.py`` (a vocabulary sharded over tensor ranks, and the softmax loss over ranks) first, then
``class_head.py`` (``ClassHead``: Partial-FC over the data ranks) and ``margins.py`` (ArcFace, CosFace).
"""
