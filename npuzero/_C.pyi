# The extension module, as far as npuzero/_native.py uses it; csrc/bindings.cpp is the source.
from typing import Any

class View:
    def __init__(self, data: int, count: int, dtype: int, device: int) -> None: ...

def __getattr__(name: str) -> Any: ...
