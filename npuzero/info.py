"""Facts of this installation: devices, kernels, backends and versions; for missing parts, the reason and a remedy.

Queries each kind of device, so it is the only call here that may load a vendor's library.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.distributed

from npuzero import _native, cann, device
from npuzero.config import find_toolkit
from npuzero.device import kernels as npu_kernels
from npuzero.device import npu

_ADD_KERNELS = {
    "cuda": "docs/adding-a-device.md says how to add kernels.",
    "npu": "`npuzero build-npu` makes them with CANN.",
}
_REFERENCE = "NPUZERO_BACKEND=reference runs the ops there in plain torch, slowly; "


def info() -> dict[str, Any]:
    """Return the facts behind ``npuzero info`` as plain dicts, lists and strings, ready for JSON.

    Keys: ``versions``, ``platform``, ``devices`` (by kind), ``kernels`` (op → kind → bool), ``isa``, ``backend``,
    ``npu_kernels`` (their library), ``openmp`` (runtimes in this process), ``collectives`` (by kind), ``missing`` (each
    with ``what``, ``why``, ``do``).

    Example::

        facts = npuzero.info()
        print(facts["versions"]["torch"], facts["isa"]["chosen"])
    """
    devices = {kind: _describe_device_kind(found) for kind, found in device.KINDS.items()}
    kernels = {op: {kind: kind in kinds for kind in devices} for op, kinds in sorted(_native.kernels().items())}
    collectives = {kind: _find_collective_backends(found) for kind, found in device.KINDS.items()}
    return {
        "versions": _find_versions(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": devices,
        "kernels": kernels,
        "isa": {
            "chosen": _native.isa(),
            "supported": list(_native.supported_isas()),
            "built": list(_native.built_isas()),
        },
        "backend": _native.backend(),
        "npu_kernels": _native.npu_library(),
        "openmp": _native.openmp_libraries(),
        "collectives": collectives,
        "missing": _list_missing(devices, kernels, collectives),
    }


def _find_versions() -> dict[str, str | None]:
    toolkits = {name: find_toolkit(name) for name in ("cuda", "cann")}
    found: dict[str, str | None] = {name: _find_package_version(name) for name in ("npuzero", "torch", "torch_npu")}
    found["python"] = platform.python_version()
    found["torch's cuda"] = torch.version.cuda
    found |= {f"npu {part}": version for part, version in npu.driver_versions().items()}
    for name, toolkit in toolkits.items():
        found[f"{name} toolkit"] = f"{toolkit.version or 'version unknown'} in {toolkit.root}" if toolkit else None
    return found


def _find_package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe_device_kind(kind: type[device.Device]) -> dict[str, Any]:
    found = kind.available()
    names = [kind.kind] if kind.kind == "cpu" else [f"{kind.kind}:{index}" for index in range(kind.count())]
    return {
        "available": found.ok,
        "devices": {name: device.get(name).capability() for name in names} if found.ok else {},
        "reason": found.reason,
        "do": found.do,
    }


def _find_collective_backends(kind: type[device.Device]) -> dict[str, Any]:
    distributed = torch.distributed
    built: dict[str, Callable[[], bool]] = {
        "gloo": distributed.is_gloo_available,
        "nccl": distributed.is_nccl_available,
        "hccl": lambda: kind.available().ok,  # part of torch_npu
    }
    usable = distributed.is_available() and built[kind.backend]()
    own = ["shared memory"] if kind.kind == "cpu" else []
    return {"backends": own + [kind.backend] * usable, "wanted": kind.backend}


def _list_missing(
    devices: dict[str, Any], kernels: dict[str, dict[str, bool]], collectives: dict[str, Any]
) -> list[dict[str, str]]:
    missing = [
        {"what": f"device {kind}", "why": facts["reason"], "do": facts["do"]}
        for kind, facts in devices.items()
        if not facts["available"]
    ]
    runtimes = _native.openmp_libraries()
    if len(runtimes) > 1:
        why = f"{len(runtimes)} are in this process, whose threads compete: {', '.join(runtimes)}"
        missing.append({"what": "a single OpenMP runtime", "why": why, "do": _native.ONE_OPENMP})
    toolkit = find_toolkit("cann")
    if toolkit and (mismatch := cann.find_cann_mismatch(toolkit.version, _find_package_version("torch_npu"))):
        missing.append({"what": "the CANN of this torch_npu", **mismatch})
    for kind, facts in devices.items():
        # Report kernels also for devices that are not available here: this build may run on another machine.
        lacking = [op for op, kinds in kernels.items() if not kinds[kind]]
        if lacking:
            why = f"this build has none for {', '.join(lacking)}"
            failed = npu_kernels.why_no_library() if kind == "npu" else None
            if failed:
                why += f"; building them failed: {failed.splitlines()[0]}"
            missing.append({"what": f"kernels for {kind}", "why": why, "do": _REFERENCE + _ADD_KERNELS.get(kind, "")})
        wanted = collectives[kind]["wanted"]
        if facts["available"] and wanted not in collectives[kind]["backends"]:
            do = f"Install a torch built with {wanted}."
            missing.append({"what": f"collectives {wanted}", "why": "this torch was built without it", "do": do})
    return missing
