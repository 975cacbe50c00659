"""Puts every Python process with this folder on its PYTHONPATH on the fake device, its operators on the host."""

import contextlib
import sys

from npu.fake import compute, libraries

libraries.load_fake_cann()
with contextlib.redirect_stdout(sys.stderr):  # torch_npu warns there that there is no CANN; stdout may be a channel
    import torch_npu  # noqa: F401  finds its libraries loaded

from npuzero.device import npu  # noqa: E402

compute.compute_on_host()
npu.DRIVER = libraries.HERE  # any path that is there
