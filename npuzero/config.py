"""Settings as frozen dataclasses. The only reader of configuration files and environment variables.

Three small records. Each validates itself on construction:

    Settings      how the engine works; never affects the computed values
    Environment   the ``NPUZERO_*`` variables
    Launch        the launcher's (torchrun's) description of this process

Invariants:
    * an existing record is valid: types and ranges are checked in ``__post_init__``;
    * an unknown key is an error naming the nearest known key;
    * no silent conversion: ``"8"`` is not 8, ``True`` is not 1 (environment variables are text and are parsed);
    * no setting changes a bit of the result; ``NPUZERO_BACKEND`` and ``NPUZERO_ISA`` may, where an op declares it.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from npuzero import cann
from npuzero.arguments import as_path, parse_json, read_text
from npuzero.arguments import describe_value as describe_value
from npuzero.errors import ConfigError, did_you_mean, find_nearest_name, refuse_unknown_keywords

_Record = TypeVar("_Record", bound="_CheckedRecord")

VARIABLE_PREFIX = "NPUZERO_"
BUILD_VARIABLE_PREFIX = "NPUZERO_BUILD_"  # read by setup.py alone, never at run time


@dataclass(frozen=True)
class SettingRule:
    """Describe the legal values of a setting: a type (or one of some words), a closed range or a list of choices."""

    kind: type
    what: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    or_one_of: tuple[str, ...] = ()

    def check(self, subject: str, value: Any) -> Any:
        """Return `value` if it satisfies the rule. An int is accepted for a float and converted.

        Raises:
            ConfigError: otherwise, with `what` as the explanation.
        """
        if type(value) is str and value in self.or_one_of:
            return value
        typed = type(value) is self.kind or (self.kind is float and type(value) is int)
        if typed and self._holds(value):
            return self.kind(value)
        words = (*self.choices, *self.or_one_of) if isinstance(value, str) else ()
        do = did_you_mean(value, words, f"It means: {self.what}.")
        raise ConfigError(subject, expected=self.expectation(), got=describe_value(value), do=do)

    def _holds(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind is tuple:
            return all(type(item) is str and item for item in value)
        # A comparison with nan is false, so nan never fits a range.
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def expectation(self) -> str:
        """Return the rule in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = "".join(f" or {word!r}" for word in self.or_one_of)
        nouns = {bool: "True or False", int: "an integer", float: "a number", str: "text", tuple: "a tuple of text"}
        noun = nouns[self.kind] + words
        if self.least is not None and self.most is not None:
            return f"{noun} from {self.least:.15g} to {self.most:.15g}"
        return noun if self.least is None else f"{noun} not below {self.least:.15g}"


def setting_field(default: Any, kind: type, what: str, **rule: Any) -> Any:
    """Return a dataclass field that carries a SettingRule."""
    return field(default=default, metadata={"rule": SettingRule(kind, what, **rule)})


@dataclass(frozen=True)
class _CheckedRecord:
    """Check every field of a record on construction. An int given for a float field becomes a float."""

    _name: ClassVar[str] = "settings"

    def __post_init__(self) -> None:
        for item in fields(self):
            value = item.metadata["rule"].check(self.subject(item.name), getattr(self, item.name))
            object.__setattr__(self, item.name, value)

    @classmethod
    def from_dict(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
        """Return the record with `values` replacing its defaults.

        Raises:
            ConfigError: `values` is not a mapping, a key is unknown, or a value has the wrong type or range.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                cls._name,
                expected="a mapping from setting to value",
                got=describe_value(values),
                do=f"Give a dict with keys among: {', '.join(cls.names())}.",
            )
        check_keys(cls._name, values, cls.names())
        return cls(**values)

    @classmethod
    def subject(cls, key: str) -> str:
        """Return the name that error messages use for the field `key`."""
        return f"{cls._name}.{key}"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(item.name for item in fields(cls))

    def replace(self: _Record, **values: Any) -> _Record:
        """Return a copy with some values changed, checked again."""
        check_keys(self._name, values, self.names())
        return replace(self, **values)


@refuse_unknown_keywords()
@dataclass(frozen=True)
class Settings(_CheckedRecord):
    """Describe how the engine works. No setting changes a bit of the result.

    ``strict`` is for programs that are developed on one rank and meant for several. On one rank it refuses the same
    calls that several ranks refuse by nature, with the same errors.

    Example::

        settings = npuzero.Settings(prefetch=2, overlap="gradients")
        model = npuzero.zero(net, stage=3, settings=settings)
    """

    overlap: bool | Literal["gradients", "parameters", "activations"] = setting_field(
        True,
        bool,
        "communicate while computing: gradients beside backward, parameters beside forward and backward, activations "
        "between the stages of a pipeline, or all; False runs every collective to its end at once",
        or_one_of=("gradients", "parameters", "activations"),
    )
    prefetch: int = setting_field(1, int, "units gathered ahead of the one that computes", least=0, most=1024)
    bucket_bytes: int = setting_field(
        25 * 2**20, int, "bytes of a unit that travel together at most", least=1, most=2**40
    )
    chunk_bytes: int = setting_field(
        0,
        int,
        "bytes of masters and moments that are updated at a time; 0: all at once, and of those off the device 32 MiB",
        least=0,
        most=2**40,
    )
    nvme_paths: tuple[str, ...] = setting_field(
        (), tuple, "folders on NVMe for what a plan places there, in turn; none: those of NPUZERO_NVME_PATHS"
    )
    host_bytes: int = setting_field(
        0, int, "bytes that this rank may hold on the host beside the device; 0: as many as there are", least=0
    )
    update_on: str = setting_field(
        "auto",
        str,
        "who updates what rests off the device: the host, or the device, which then reads it there",
        choices=("auto", "host", "device"),
    )
    verify: bool = setting_field(True, bool, "compare checksums of what comes back from NVMe")
    io_threads: int = setting_field(4, int, "threads of a rank that read and write on NVMe", least=1, most=256)
    ignore_unused_parameters: bool = setting_field(
        True, bool, "take a step also where parameters that train took no part in it; False: that is an error"
    )
    strict: bool = setting_field(
        False, bool, "refuse on one rank what the plan refuses on several; nothing is moved for it"
    )

    @property
    def common(self) -> Settings:
        """Return the settings that must agree on all ranks. Folders, host memory and I/O threads may differ."""
        return self.replace(nvme_paths=(), host_bytes=0, io_threads=4)

    @property
    def overlaps_gradients(self) -> bool:
        """Return whether gradient reductions overlap with backward; else each completes before backward continues."""
        return self.overlap in (True, "gradients")

    @property
    def overlaps_parameters(self) -> bool:
        """Return whether parameters are prefetched, and all-gathers after the update overlap with the next forward."""
        return self.overlap in (True, "parameters")

    @property
    def overlaps_activations(self) -> bool:
        """Return whether a pipeline stage receives its next input while it computes the current one."""
        return self.overlap in (True, "activations")


#: The suggestion for a setting's name given as a keyword to a function that takes Settings.
SETTING_KEYWORDS = {name: f"settings=Settings({name}=...)" for name in Settings.names()}


@dataclass(frozen=True)
class Environment(_CheckedRecord):
    """Hold the ``NPUZERO_*`` variables: ``NPUZERO_BACKEND`` is the field ``backend``, and so on."""

    _name: ClassVar[str] = "environment"

    backend: str = setting_field(
        "native", str, "who runs the ops: compiled kernels, or the reference", choices=("native", "reference")
    )
    isa: str = setting_field(
        "auto", str, "instruction set of the CPU kernels", choices=("auto", "baseline", "avx2", "avx512", "neon")
    )
    timeout_s: float = setting_field(
        600.0, float, "seconds before a waiting collective gives up", least=0.001, most=604800.0
    )
    strict: str = setting_field("0", str, "1: Settings(strict=True) for every model", choices=("0", "1"))
    npu_kernels: str = setting_field("", str, "the library of npu kernels, instead of the one that is looked for")
    nvme_paths: str = setting_field("", str, "folders on NVMe with colons between, where settings name none")

    @classmethod
    def subject(cls, key: str) -> str:
        return VARIABLE_PREFIX + key.upper()


@dataclass(frozen=True)
class Launch(_CheckedRecord):
    """Hold torchrun's environment variables. A process started without a launcher is a world of one."""

    _name: ClassVar[str] = "launch"

    rank: int = setting_field(0, int, "global rank (RANK)", least=0, most=2**31 - 1)
    world_size: int = setting_field(1, int, "ranks in all (WORLD_SIZE)", least=1, most=2**31 - 1)
    local_rank: int = setting_field(0, int, "rank within this host (LOCAL_RANK)", least=0, most=2**31 - 1)
    local_world_size: int = setting_field(1, int, "ranks of this host (LOCAL_WORLD_SIZE)", least=1, most=2**31 - 1)

    @classmethod
    def subject(cls, key: str) -> str:
        return key.upper()

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if getattr(self, index) >= getattr(self, size):
                raise ConfigError(
                    self.subject(index),
                    expected=f"less than {size.upper()} = {getattr(self, size)}",
                    got=str(getattr(self, index)),
                    do="Start the processes with torchrun, which sets these together.",
                )


def explain_strict_refusal(ranks: int, strict: bool = True) -> str:
    """Return the sentence to append to a refusal on a single rank that only ``strict`` mode causes; else ``""``."""
    if ranks > 1 or not strict:
        return ""
    return (
        " One rank alone could do it: strict mode refuses it here, as several ranks do; to allow it leave out "
        "NPUZERO_STRICT=1 and Settings(strict=True)."
    )


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the ``NPUZERO_*`` variables (from this process's environment by default).

    Raises:
        ConfigError: an ``NPUZERO_*`` variable is unknown, or its text is not a legal value.
    """
    variables = os.environ if variables is None else variables
    mine = [
        name for name in variables if name.startswith(VARIABLE_PREFIX) and not name.startswith(BUILD_VARIABLE_PREFIX)
    ]
    names = {VARIABLE_PREFIX + key.upper(): key for key in Environment.names()}
    check_keys("environment", mine, names)
    return _parse_record(Environment, {key: variables[name] for name, key in names.items() if name in variables})


def nvme_folders(settings: Settings, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the NVMe folders: those of the settings, else those of NPUZERO_NVME_PATHS. May be empty."""
    return settings.nvme_paths or tuple(filter(None, read_environment(variables).nvme_paths.split(":")))


def has_launcher(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher started this process (or set ``variables``), also as the only rank."""
    variables = os.environ if variables is None else variables
    return not {"RANK", "WORLD_SIZE"}.isdisjoint(variables)


def count_launched_tasks(variables: Mapping[str, str] | None = None) -> int:
    """Return how many processes srun or mpirun started with this one (by ``variables``); 1 without either."""
    variables = os.environ if variables is None else variables
    told = (variables.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return max((int(text) for text in told if text.isdecimal()), default=1)


def read_launch(variables: Mapping[str, str] | None = None, *, group: tuple[int, int] | None = None) -> Launch:
    """Read torchrun's variables (from this process's environment by default).

    Args:
        group: rank and size of torch.distributed's process group, if it is initialized. Some launchers set only that.

    Raises:
        ConfigError: some variables are set and others are missing, or a text is not an integer in range.
    """
    variables = os.environ if variables is None else variables
    found = {key: variables[key.upper()] for key in Launch.names() if key.upper() in variables}
    if group is not None and found:
        found = dict(zip(("rank", "world_size"), map(str, group), strict=True)) | found
    elif has_launcher(variables):
        for key in ("rank", "world_size"):
            if key not in found:
                raise ConfigError(
                    Launch.subject(key),
                    expected="the variable, since others of the launcher are set",
                    got="nothing",
                    do="Start the processes with torchrun, or unset RANK and WORLD_SIZE to run one process.",
                )
    if "local_world_size" not in found and "world_size" in found:
        # Launchers other than torchrun may not set it: assume that all ranks share this host.
        found.setdefault("local_world_size", found["world_size"])
        found.setdefault("local_rank", found.get("rank", "0"))
    return _parse_record(Launch, found)


def find_rendezvous_address(variables: Mapping[str, str] | None = None) -> str:
    """Return the rendezvous address ``host:port`` from the launcher's MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: one of them is missing.
    """
    variables = os.environ if variables is None else variables
    names = ("MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not variables.get(name)]
    if missing:
        raise ConfigError(
            "launch", expected="the launcher's variables", got=f"no {', '.join(missing)}", do="Start with torchrun."
        )
    return ":".join(variables[name] for name in names)


def agent_keeps_store(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun's agent, not rank 0, hosts the ranks' store."""
    variables = os.environ if variables is None else variables
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_local_ranks(variables: Mapping[str, str] | None = None) -> dict[int, int]:
    """Map each rank of this run (or of the run that ``variables`` identify) on this host to its process id.

    ``/proc`` shows the environment that a process was started with, without later changes. If this process does not
    find itself there, it cannot find other ranks either, and the result is empty.
    """
    variables = os.environ if variables is None else variables
    run = {f"{name}={variables.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}
    found: dict[int, int] = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            told = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # owned by another user, or just ended
            continue
        rank = next((text.partition("=")[2] for text in told if text.startswith("RANK=")), "")
        if rank.isdecimal() and run.issubset(told):
            found.setdefault(int(rank), int(folder.name))  # the oldest: its children inherit its environment
    return found if variables.get("RANK", "") in map(str, found) else {}


# Variables, with NPUZERO_*, that affect how devices compute and ranks communicate; a trailing * matches any ending.
_TOLD = (
    "HCCL_*", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES", "INF_NAN_MODE_*", "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_*",
    "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
)  # fmt: skip


def get_reportable_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a report may contain, sorted, with addresses as "(set)": reports are shared."""
    variables = os.environ if variables is None else variables
    patterns = (*_TOLD, VARIABLE_PREFIX + "*")
    told = sorted(name for name in variables if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return {name: "(set)" if name.endswith("_IP") else variables[name] for name in told}


def build_child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment plus ``variables``, for a child process."""
    return {**os.environ, **variables}


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Raises:
        ConfigError: the file does not exist, is not valid JSON, has a duplicate key, or its top level is not an object.
    """
    file = as_path("file", path)
    subject = f"file {file}"
    try:
        value = parse_json(read_text(file))
    except OSError as error:
        raise ConfigError(
            subject, expected="a readable file", got=error.strerror or str(error), do="Check the path."
        ) from error
    except ValueError as error:
        raise ConfigError(subject, expected="JSON in UTF-8", got=str(error), do="Correct the file.") from error
    if not isinstance(value, dict):
        raise ConfigError(
            subject, expected="a JSON object", got=describe_value(value), do="Put the values between braces."
        )
    return value


def list_field_paths() -> tuple[str, ...]:
    """Return all settings as ``Record.field``; a test freezes the list."""
    return tuple(f"{record.__name__}.{key}" for record in (Settings, Environment, Launch) for key in record.names())


def check_keys(subject: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first key of `given` that is not in `known`, naming the nearest known key."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(
                subject,
                expected=f"keys among {', '.join(known)}",
                got=f"{key!r}",
                do=did_you_mean(key, known, "Remove it."),
                key=key,
                nearest=find_nearest_name(key, known),
            )


def public_name(kind: type) -> str:
    """Return the shortest importable name of ``kind``: ``torch.nn.Module``, not the module that defines it."""
    parts = kind.__module__.split(".")
    homes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next(f"{home}.{kind.__name__}" for home in homes if getattr(sys.modules[home], kind.__name__, None) is kind)


def _parse_record(record: type[_Record], texts: Mapping[str, str]) -> _Record:
    """Parse each text by its field's type. Pass on a text that does not parse, so that the check names it."""
    kinds = {item.name: item.metadata["rule"].kind for item in fields(record)}
    values: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            values[key] = kinds[key](text)
        except ValueError:
            values[key] = text
    return record.from_dict(values)


def _find_cuda_version(root: Path) -> str | None:
    path = root / "version.json"
    match = re.search(r'"version"\s*:\s*"([\w.]+)"', path.read_text(encoding="utf-8")) if path.is_file() else None
    return match.group(1) if match else None


# Per toolkit: the variables that its scripts set, its default install folders, and the reader of its version.
TOOLKITS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], str | None]]] = {
    "cuda": (("CUDA_HOME", "CUDA_PATH"), ("/usr/local/cuda",), _find_cuda_version),
    "cann": (("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"), cann.FOLDERS, cann.find_cann_version),
}


@dataclass(frozen=True)
class Toolkit:
    """Describe a device vendor's compiler and libraries: install folder, and version if known."""

    name: str
    root: Path
    version: str | None


def find_toolkit(name: str, variables: Mapping[str, str] | None = None) -> Toolkit | None:
    """Return this machine's ``"cuda"`` or ``"cann"`` toolkit; None if it is not installed."""
    variables = os.environ if variables is None else variables
    names, usual, version = TOOLKITS[name]
    said = next(((variables[key],) for key in names if variables.get(key)), usual)
    root = next((Path(place) for place in said if Path(place).is_dir()), None)
    return None if root is None else Toolkit(name, root, version(root))


def cache_folder() -> Path:
    """Return the folder of npuzero's caches for this user. Does not create it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuzero"
