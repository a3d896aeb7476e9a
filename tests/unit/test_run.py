"""What `symbiosis run` puts into an environment and into modules, and what it says."""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from symbiosis.client.layers.layer_plan import WrapReport
from symbiosis.errors import ConfigError, NotShared
from symbiosis.run import hook, outcome, patch
from symbiosis.run.command import SITE, deaf, environment_of, flags_of, program_of
from symbiosis.run.settings import Settings, from_environment


def test_an_environment_is_kept_and_told_how_to_share() -> None:
    given = {"PYTHONPATH": "/a:/b", "HOME": "/root", "SYMBIOSIS_ENDPOINT": "local:///a.sock"}
    told = environment_of(given)
    assert told == {**given, "SYMBIOSIS_RUN": "1", "PYTHONPATH": f"{SITE}:/a:/b"}
    assert environment_of({})["PYTHONPATH"] == SITE  # and no empty entry, which would be the working directory
    told = environment_of(given, "local:///b.sock, tcp://host:7000", require=True)
    assert told["SYMBIOSIS_ENDPOINT"] == "local:///b.sock, tcp://host:7000" and told["SYMBIOSIS_RUN_REQUIRE"] == "1"
    assert environment_of({}, "symbiosis://lab/qwen")["SYMBIOSIS_ENDPOINT"] == "symbiosis://lab/qwen"


@pytest.mark.parametrize("endpoint", ["", " , ", "qwen", "https://host", "tcp://host:99999"])
def test_an_endpoint_that_is_none_is_refused_before_the_program_starts(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="names no executor|is not an endpoint|is a web page"):
        environment_of({}, endpoint)


def test_a_command_is_found_on_the_path_or_beside_this_python(tmp_path: Path) -> None:
    own = tmp_path / "python"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o700)
    assert program_of(["python"], {"PATH": str(tmp_path)}) == str(own)
    assert program_of(["symbiosis"], {"PATH": str(tmp_path)}) == str(Path(sys.executable).with_name("symbiosis"))
    with pytest.raises(ConfigError, match="there is no command 'nosuch'"):
        program_of(["nosuch"], {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("command", "flags", "is_deaf"),
    [
        ("python train.py -I", [], False),
        ("/usr/bin/python3.12 -u -m trl -I", ["-u"], False),
        ("python -X importtime -W ignore -Es train.py", ["-X", "importtime", "-W", "ignore", "-Es"], True),
        ("python -IS -c pass", ["-IS"], True),
        ("torchrun -I train.py", [], False),
    ],
)
def test_flags_of_a_python_are_not_those_of_its_program(command: str, flags: list[str], is_deaf: bool) -> None:
    assert flags_of(command.split()) == flags
    assert deaf(flags) == is_deaf


def test_a_module_is_changed_once_it_has_run_and_is_otherwise_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watched_one.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hook, "WATCHED", ("watched_one",))
    monkeypatch.setattr(sys, "meta_path", [hook._Watcher(), *sys.meta_path])
    changed: list[tuple[ModuleType, int]] = []
    monkeypatch.setattr(patch, "change", lambda module: changed.append((module, module.value)))
    import watched_one  # type: ignore[import-not-found]

    assert changed == [(watched_one, 1)]
    assert type(watched_one.__spec__.loader) is type(watched_one.__loader__) is SourceFileLoader


def test_the_hook_is_installed_once_and_only_under_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for switch, installed in (("", 0), ("0", 0), ("1", 1), ("1", 1)):
        monkeypatch.setenv("SYMBIOSIS_RUN", switch)
        hook.install()
        assert sum(isinstance(finder, hook._Watcher) for finder in sys.meta_path) == installed


class Base:
    """As much of `PreTrainedModel` as is replaced."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        return cls, pretrained_model_name_or_path, args, kwargs


def test_parts_of_a_model_and_what_an_executor_loads_are_loaded_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(cls: type, original: Any, name: Any, args: Any, kwargs: Any) -> Any:
        asked.append((cls, name, args, kwargs))
        return Model.from_pretrained("part"), original(name, *args, **kwargs)

    class Model(type("Copy", (Base,), {"from_pretrained": Base.__dict__["from_pretrained"]})):  # type: ignore[misc]
        pass

    monkeypatch.setattr(patch, "_load", load)
    monkeypatch.setenv("SYMBIOSIS_RUN", "1")
    patch.change(SimpleNamespace(__name__="transformers.modeling_utils", PreTrainedModel=Model))  # type: ignore[arg-type]
    whole = (Model, "whole", (), {"dtype": "auto"})
    for _ in range(2):  # the first leaves nothing behind
        got = Model.from_pretrained(pretrained_model_name_or_path="whole", dtype="auto")
        assert got == ((Model, "part", (), {}), whole) and asked.pop() == whole and not asked
    ours = {"__name__": "symbiosis.executor.model.load", "Model": Model}
    assert eval("Model.from_pretrained('base')", ours) == (Model, "base", (), {}) and not asked
    monkeypatch.setenv("SYMBIOSIS_RUN", "0")
    assert Model.from_pretrained("base") == (Model, "base", (), {}) and not asked


def test_what_became_of_a_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = SimpleNamespace(_symbiosis_report=WrapReport(["a"] * 252, {"lm_head": "it is a head"}))
    outcome.shared("Qwen/Qwen3-8B", model, "local:///e.sock", 16_320_875_724, 0.71)
    outcome.left_alone("/srv/reward/", "it is\n another model", Settings())
    assert capsys.readouterr().err.splitlines() == [
        "symbiosis: Qwen3-8B: 252 of 253 layers from local:///e.sock (15.2 GiB not loaded, 0.7 s)",
        "symbiosis: reward is not shared: it is another model",
    ]
    with pytest.raises(NotShared, match=r"^reward is not shared: it is another model \(--require forbids that\)$"):
        outcome.left_alone("/srv/reward", "it is another model", Settings(require=True))


def test_names_of_folders_and_words_of_executors_obey_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    outcome.left_alone("/srv/\x1b[2Jmodel", "it has none of the layers of the \x1b]0;Evil\x07", Settings())
    assert capsys.readouterr().err == "symbiosis: ?[2Jmodel is not shared: it has none of the layers of the ?]0;Evil?\n"


def test_a_process_is_told_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_RUN_REQUIRE", "1")
    monkeypatch.setenv("SYMBIOSIS_ENDPOINT", "local:///a.sock tcp://host:7000")
    assert from_environment() == Settings(require=True)
    assert from_environment().endpoint == ("local:///a.sock", "tcp://host:7000")
