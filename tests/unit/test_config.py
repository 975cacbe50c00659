"""Settings are checked records; unknown keys, wrong types and impossible values are errors that help."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuzero import cann, config
from npuzero.config import Environment, Launch, Settings
from npuzero.errors import ConfigError


def test_the_settings_there_are_is_a_promise():
    assert config.list_field_paths() == (
        "Settings.overlap",
        "Settings.prefetch",
        "Settings.bucket_bytes",
        "Settings.chunk_bytes",
        "Settings.nvme_paths",
        "Settings.host_bytes",
        "Settings.update_on",
        "Settings.verify",
        "Settings.io_threads",
        "Settings.ignore_unused_parameters",
        "Settings.strict",
        "Environment.backend",
        "Environment.isa",
        "Environment.timeout_s",
        "Environment.strict",
        "Environment.npu_kernels",
        "Environment.nvme_paths",
        "Launch.rank",
        "Launch.world_size",
        "Launch.local_rank",
        "Launch.local_world_size",
    )


def test_defaults():
    assert dataclasses.asdict(Settings()) == {
        "overlap": True,
        "prefetch": 1,
        "bucket_bytes": 25 * 2**20,
        "chunk_bytes": 0,
        "nvme_paths": (),
        "host_bytes": 0,
        "update_on": "auto",
        "verify": True,
        "io_threads": 4,
        "ignore_unused_parameters": True,
        "strict": False,
    }


def test_folders_on_nvme_are_those_of_the_settings_else_of_the_environment():
    variables = {"NPUZERO_NVME_PATHS": "/a:/b:"}
    assert config.nvme_folders(Settings(), variables) == ("/a", "/b")
    assert config.nvme_folders(Settings(nvme_paths=("/c",)), variables) == ("/c",)
    assert config.nvme_folders(Settings(), {}) == ()


def test_what_ranks_must_say_alike_leaves_out_what_a_host_has():
    here = Settings(nvme_paths=("/a",), host_bytes=2**30, io_threads=2, chunk_bytes=4096)
    assert here.common == Settings(chunk_bytes=4096)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().prefetch = 2  # type: ignore[misc]


def test_from_dict_and_replace_change_what_they_name():
    settings = Settings.from_dict({"prefetch": 2, "overlap": False})
    assert settings == Settings(prefetch=2, overlap=False)
    assert settings.replace(prefetch=0) == Settings(prefetch=0, overlap=False)


@pytest.mark.parametrize(
    ("overlap", "gradients", "parameters"),
    [(True, True, True), (False, False, False), ("gradients", True, False), ("parameters", False, True)],
)
def test_gradients_and_parameters_overlap_apart(overlap, gradients, parameters):
    settings = Settings.from_dict({"overlap": overlap})
    assert (settings.overlaps_gradients, settings.overlaps_parameters) == (gradients, parameters)


def test_a_word_that_is_nearly_right_is_named():
    with pytest.raises(ConfigError, match="Did you mean 'gradients'"):
        Settings(overlap="gradient")


@pytest.mark.parametrize("make", [Settings.from_dict, lambda values: Settings().replace(**values)])
def test_an_unknown_key_names_the_nearest_known_one(make):
    with pytest.raises(ConfigError, match=r"got 'prefech'\. Did you mean 'prefetch'\?") as raised:
        make({"prefech": 1})
    assert raised.value.facts == {"key": "prefech", "nearest": "prefetch"}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("overlap", 1, "True or False"),
        ("overlap", "true", "True or False or 'gradients' or 'parameters'"),
        ("prefetch", True, "an integer from 0 to 1024"),
        ("prefetch", "8", "an integer from 0 to 1024"),
        ("prefetch", 1.0, "an integer from 0 to 1024"),
        ("prefetch", -1, "an integer from 0 to 1024"),
        ("prefetch", None, "an integer from 0 to 1024"),
        ("bucket_bytes", 0, "an integer from 1 to "),
        ("bucket_bytes", 2**41, "an integer from 1 to "),
        ("chunk_bytes", -1, "an integer from 0 to "),
        ("nvme_paths", "/mnt/nvme", "a tuple of text"),
        ("nvme_paths", ["/mnt/nvme"], "a tuple of text"),
        ("nvme_paths", ("/mnt/nvme", ""), "a tuple of text"),
        ("nvme_paths", (3,), "a tuple of text"),
        ("host_bytes", -1, "an integer not below 0"),
        ("update_on", "npu", "one of auto, host, device"),
        ("verify", 1, "True or False"),
        ("io_threads", 0, "an integer from 1 to 256"),
    ],
)
def test_a_wrong_value_is_an_error_however_it_comes_in(key, value, expected):
    for make in (lambda: Settings.from_dict({key: value}), lambda: Settings(**{key: value})):
        with pytest.raises(ConfigError, match=re.escape(f"settings.{key}: expected {expected}")) as raised:
            make()
        assert repr(value)[:50] in raised.value.got and type(value).__name__ in raised.value.got


@pytest.mark.parametrize("values", [None, [("prefetch", 1)], "prefetch=1", 3])
def test_from_dict_takes_a_mapping_only(values):
    with pytest.raises(ConfigError, match="a mapping"):
        Settings.from_dict(values)


@given(
    st.dictionaries(st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=3)
)
def test_whatever_comes_in_is_settings_or_a_config_error(values):
    try:
        settings = Settings.from_dict(values)
    except ConfigError:
        return
    assert Settings.from_dict(dataclasses.asdict(settings)) == settings


def test_variables_are_parsed_and_checked():
    variables = {"NPUZERO_BACKEND": "reference", "NPUZERO_ISA": "avx2", "NPUZERO_TIMEOUT_S": "2.5", "HOME": "/"}
    assert config.read_environment(variables) == Environment("reference", "avx2", 2.5)
    assert config.read_environment({}) == Environment("native", "auto", 600.0)


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"NPUZERO_BACKED": "reference"}, "Did you mean 'NPUZERO_BACKEND'"),
        (
            {"NPUZERO_BACKEND": "refrence"},
            "NPUZERO_BACKEND: expected one of native, reference.*Did you mean 'reference'",
        ),
        ({"NPUZERO_ISA": "sse"}, "NPUZERO_ISA: expected one of auto"),
        ({"NPUZERO_TIMEOUT_S": "soon"}, "NPUZERO_TIMEOUT_S: expected a number"),
        ({"NPUZERO_TIMEOUT_S": "-1"}, "NPUZERO_TIMEOUT_S: expected a number"),
        ({"NPUZERO_TIMEOUT_S": "nan"}, "NPUZERO_TIMEOUT_S: expected a number"),
    ],
)
def test_a_wrong_variable_is_an_error(variables, match):
    with pytest.raises(ConfigError, match=match):
        config.read_environment(variables)


def test_variables_of_the_build_are_left_to_the_build():
    assert config.read_environment({"NPUZERO_BUILD_ANYTHING": "1"}) == Environment()


def test_a_variable_sets_the_timeout(monkeypatch):
    monkeypatch.setenv("NPUZERO_TIMEOUT_S", "7")
    assert config.read_environment().timeout_s == 7.0


def test_launch_reads_what_torchrun_sets():
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert config.read_launch(variables) == Launch(5, 8, 1, 4)
    assert config.read_launch({}) == Launch(0, 1, 0, 1)
    assert config.read_launch({"RANK": "1", "WORLD_SIZE": "2"}) == Launch(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: expected the variable"),
        ({"WORLD_SIZE": "2"}, "RANK: expected the variable"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected less than WORLD_SIZE = 2; got 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: expected an integer"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK: expected an integer"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK: expected less"),
    ],
)
def test_a_torn_launch_is_an_error(variables, match):
    with pytest.raises(ConfigError, match=match):
        config.read_launch(variables)


def test_rendezvous():
    assert config.find_rendezvous_address({"MASTER_ADDR": "host", "MASTER_PORT": "29500"}) == "host:29500"
    with pytest.raises(ConfigError, match="no MASTER_PORT"):
        config.find_rendezvous_address({"MASTER_ADDR": "host"})


def test_toolkits_are_found_where_their_variables_say(tmp_path):
    assert config.find_toolkit("cann", {"ASCEND_HOME_PATH": str(tmp_path / "nowhere")}) is None
    (tmp_path / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}')
    found = config.find_toolkit("cuda", {"CUDA_HOME": str(tmp_path)})
    assert found is not None and (found.root, found.version) == (tmp_path, "12.4.1")
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.5.0\n")
    assert config.find_toolkit("cann", {"ASCEND_HOME_PATH": str(tmp_path)}).version == "8.5.0"
    (tmp_path / "version.json").unlink()
    assert config.find_toolkit("cuda", {"CUDA_HOME": str(tmp_path)}).version is None


def test_toolkits_are_found_where_their_installers_put_them(tmp_path, monkeypatch):
    assert cann.FOLDERS == ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
    places = [tmp_path / place.lstrip("/") for place in cann.FOLDERS]
    monkeypatch.setitem(
        config.TOOLKITS, "cann", (("ASCEND_HOME_PATH",), tuple(map(str, places)), cann.find_cann_version)
    )
    assert config.find_toolkit("cann", {}) is None
    for place in reversed(places):
        place.mkdir(parents=True)
        found = config.find_toolkit("cann", {})
        assert found is not None and (found.root, found.version) == (place, None)


def test_read_json(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"hidden_size": 8}')
    assert config.read_json(path) == {"hidden_size": 8}
    for text, match in (("{", "JSON"), ("[1]", "a JSON object"), ("\xff", "JSON")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=match):
            config.read_json(path)
    with pytest.raises(ConfigError, match="No such file"):
        config.read_json(tmp_path / "missing.json")
