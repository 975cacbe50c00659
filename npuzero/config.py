"""Settings: frozen dataclasses, and the only reader of files and of the environment.

Three small records, each checked when it is made, whoever makes it:

    Settings      how the engine works; never what it computes
    Environment   the ``NPUZERO_*`` variables
    Launch        what the launcher (torchrun) says about this process

Invariants:
    * a record that exists is valid: types and ranges are checked in ``__post_init__``;
    * an unknown key is an error that names the nearest known one;
    * nothing is converted in silence: ``"8"`` is not 8, ``True`` is not 1 (variables are text, and are parsed);
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
    """Say what a value must be: its type (or one of some words beside it), a closed range or a list of choices."""

    kind: type
    what: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    or_one_of: tuple[str, ...] = ()

    def check(self, subject: str, value: Any) -> Any:
        """Return `value` if it keeps the rule; an int is a legal float and becomes one.

        Raises:
            ConfigError: otherwise, with `what` as the reader's explanation.
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
    """Return a dataclass field that carries its Rule."""
    return field(default=default, metadata={"rule": SettingRule(kind, what, **rule)})


@dataclass(frozen=True)
class _CheckedRecord:
    """Check every field of a record when it is made; an int given for a float field becomes a float."""

    _name: ClassVar[str] = "settings"

    def __post_init__(self) -> None:
        for item in fields(self):
            value = item.metadata["rule"].check(self.subject(item.name), getattr(self, item.name))
            object.__setattr__(self, item.name, value)

    @classmethod
    def from_dict(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
        """Return the record with `values` in place of its defaults.

        Raises:
            ConfigError: `values` is no mapping, a key is unknown, or a value has the wrong type or range.
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
        """Return the name under which an error speaks of the field `key`."""
        return f"{cls._name}.{key}"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(item.name for item in fields(cls))

    def replace(self: _Record, **values: Any) -> _Record:
        """Return a copy with some values changed, checked like any other."""
        check_keys(self._name, values, self.names())
        return replace(self, **values)


@refuse_unknown_keywords()
@dataclass(frozen=True)
class Settings(_CheckedRecord):
    """Describe how the engine works. None of these changes a bit of the result.

    ``strict`` is for programs that are written on one rank and meant for several: it refuses on one what several ranks
    refuse by nature, with the same errors.

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
        """Return what all ranks must say alike: folders, and what a host has room for, are each rank's own."""
        return self.replace(nvme_paths=(), host_bytes=0, io_threads=4)

    @property
    def overlaps_gradients(self) -> bool:
        """Tell whether reductions run beside backward; else each ends before backward goes on."""
        return self.overlap in (True, "gradients")

    @property
    def overlaps_parameters(self) -> bool:
        """Tell whether units are gathered ahead, and the gathers after the update run beside the next forward."""
        return self.overlap in (True, "parameters")

    @property
    def overlaps_activations(self) -> bool:
        """Tell whether a stage of a pipeline receives what it will compute next beside what it computes now."""
        return self.overlap in (True, "activations")


#: What to write instead of a setting's name as a keyword of a function that takes Settings.
SETTING_KEYWORDS = {name: f"settings=Settings({name}=...)" for name in Settings.names()}


@dataclass(frozen=True)
class Environment(_CheckedRecord):
    """Hold the ``NPUZERO_*`` variables: ``NPUZERO_BACKEND`` is field ``backend``, and so on."""

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
    """Hold what torchrun tells a process through its environment; a process started by hand is a world of one."""

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
    """Return what a refusal that several ranks meet says beside on one, if only ``strict`` mode refuses it."""
    if ranks > 1 or not strict:
        return ""
    return (
        " One rank alone could do it: strict mode refuses it here, as several ranks do; to allow it leave out "
        "NPUZERO_STRICT=1 and Settings(strict=True)."
    )


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the ``NPUZERO_*`` variables (of this process unless given).

    Raises:
        ConfigError: an unknown ``NPUZERO_*`` variable, or a text that is no such value.
    """
    variables = os.environ if variables is None else variables
    mine = [
        name for name in variables if name.startswith(VARIABLE_PREFIX) and not name.startswith(BUILD_VARIABLE_PREFIX)
    ]
    names = {VARIABLE_PREFIX + key.upper(): key for key in Environment.names()}
    check_keys("environment", mine, names)
    return _parse_record(Environment, {key: variables[name] for name, key in names.items() if name in variables})


def nvme_folders(settings: Settings, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the folders for what a plan places on NVMe: of the settings, else of NPUZERO_NVME_PATHS; maybe none."""
    return settings.nvme_paths or tuple(filter(None, read_environment(variables).nvme_paths.split(":")))


def has_launcher(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher started this process (or set ``variables``), be it as the only rank."""
    variables = os.environ if variables is None else variables
    return not {"RANK", "WORLD_SIZE"}.isdisjoint(variables)


def count_launched_tasks(variables: Mapping[str, str] | None = None) -> int:
    """Return how many processes srun or mpirun started as this one (or says in ``variables``); 1 where neither did."""
    variables = os.environ if variables is None else variables
    told = (variables.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return max((int(text) for text in told if text.isdecimal()), default=1)


def read_launch(variables: Mapping[str, str] | None = None, *, group: tuple[int, int] | None = None) -> Launch:
    """Read torchrun's variables (of this process unless given).

    Args:
        group: rank and size of torch.distributed's group, where it runs: a launcher may have told that alone.

    Raises:
        ConfigError: some are set and others are missing, or a text is no integer in range.
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
        # Launchers other than torchrun may not say it: then all ranks are taken to share this host.
        found.setdefault("local_world_size", found["world_size"])
        found.setdefault("local_rank", found.get("rank", "0"))
    return _parse_record(Launch, found)


def find_rendezvous_address(variables: Mapping[str, str] | None = None) -> str:
    """Return ``host:port`` where the ranks meet, from the launcher's MASTER_ADDR and MASTER_PORT.

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
    """Tell whether torchrun's agent keeps the ranks' store, not rank 0."""
    variables = os.environ if variables is None else variables
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_local_ranks(variables: Mapping[str, str] | None = None) -> dict[int, int]:
    """Return by rank the process on this host that was started as it, in the run of this one (or of ``variables``).

    A process shows what it was started with, and not what it has set since: where this one does not see itself, others
    cannot be told either, and there is nothing.
    """
    variables = os.environ if variables is None else variables
    run = {f"{name}={variables.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}
    found: dict[int, int] = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            told = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # somebody else's, or it has just ended
            continue
        rank = next((text.partition("=")[2] for text in told if text.startswith("RANK=")), "")
        if rank.isdecimal() and run.issubset(told):
            found.setdefault(int(rank), int(folder.name))  # the oldest: its children inherit what it was told
    return found if variables.get("RANK", "") in map(str, found) else {}


# What decides how devices compute and ranks talk, beside NPUZERO_*; a trailing * is any ending.
_TOLD = (
    "HCCL_*", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES", "INF_NAN_MODE_*", "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_*",
    "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
)  # fmt: skip


def get_reportable_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a report may tell, sorted; no others, since it is sent around.
    An address is "(set)".
    """
    variables = os.environ if variables is None else variables
    patterns = (*_TOLD, VARIABLE_PREFIX + "*")
    told = sorted(name for name in variables if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return {name: "(set)" if name.endswith("_IP") else variables[name] for name in told}


def build_child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with further variables, for a process that it starts."""
    return {**os.environ, **variables}


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Raises:
        ConfigError: no such file, no valid JSON, a key that is there twice, or its top level is no object.
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
    """Return every setting there is, as ``Record.field``; a test freezes the list."""
    return tuple(f"{record.__name__}.{key}" for record in (Settings, Environment, Launch) for key in record.names())


def check_keys(subject: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first key of `given` that is not among `known`, naming the nearest known one."""
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
    """Return the shortest name by which a program can import ``kind``: ``torch.nn.Module``, not where it is written."""
    parts = kind.__module__.split(".")
    homes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next(f"{home}.{kind.__name__}" for home in homes if getattr(sys.modules[home], kind.__name__, None) is kind)


def _parse_record(record: type[_Record], texts: Mapping[str, str]) -> _Record:
    """Parse each text by its field's kind; hand on a text that does not parse, so that the check names it."""
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


# Where each toolkit's own scripts say it lies, where its installer puts it, and who reads its version there.
TOOLKITS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], str | None]]] = {
    "cuda": (("CUDA_HOME", "CUDA_PATH"), ("/usr/local/cuda",), _find_cuda_version),
    "cann": (("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"), cann.FOLDERS, cann.find_cann_version),
}


@dataclass(frozen=True)
class Toolkit:
    """Describe a device vendor's compiler and libraries: where they lie, and their version if it tells."""

    name: str
    root: Path
    version: str | None


def find_toolkit(name: str, variables: Mapping[str, str] | None = None) -> Toolkit | None:
    """Return the toolkit ``"cuda"`` or ``"cann"`` of this machine; None where there is none."""
    variables = os.environ if variables is None else variables
    names, usual, version = TOOLKITS[name]
    said = next(((variables[key],) for key in names if variables.get(key)), usual)
    root = next((Path(place) for place in said if Path(place).is_dir()), None)
    return None if root is None else Toolkit(name, root, version(root))


def cache_folder() -> Path:
    """Return where this user's caches of npuzero lie; not made here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuzero"
