"""Stands for the script of CANN before 9.0 that looks objects up by name: as one is called in compile_commands.json."""

import json
import shutil
import sys
from pathlib import Path

commands = json.loads(Path(sys.argv[1]).read_text())
known = {f"{entry['directory']}/{entry['command'].split(' -o ')[1].split()[0]}": entry["file"] for entry in commands}
for name in sys.argv[2:]:
    print(name, "is of", known[name])  # a KeyError, like there
if shutil.which("cann-objdump") is None:
    raise FileNotFoundError("cann-objdump, of CANN's compiler, is not in PATH")
