"""Keep the store in which torchrun's agents meet, apart from them all: then any node may end, the first as well.

python examples/elastic/store.py --port 29400
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore

parser = argparse.ArgumentParser(description="Keep the store in which torchrun's agents meet.")
parser.add_argument("--port", type=int, default=29400, help="0: any that is free")
options = parser.parse_args()
store = TCPStore("0.0.0.0", options.port, is_master=True, wait_for_workers=False)
print(f"agents meet at port: {store.port}", flush=True)
signal.pause()
