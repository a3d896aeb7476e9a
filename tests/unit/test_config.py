"""Options: defaults, file, command line; what is wrong is refused by name. And where endpoints live by default."""

import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from torch import nn
from typer.main import get_command

import symbiosis
from symbiosis.base.folders import Use, user_folder
from symbiosis.cli import main
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError
from symbiosis.executor import options
from symbiosis.executor.options import CHOICES, HINTS, Options, load_options, read_config_file
from symbiosis.executor.preflight import check
from symbiosis.executor.ranks.torchrun import is_launched, launched_options
from symbiosis.protocol import Limits
from symbiosis.protocol.endpoints import default_endpoints

EVERYTHING: dict[str, Any] = {
    "model": "demo", "listen": ["tcp://127.0.0.1:0", "local:///tmp/x.sock"], "device": "cuda:1", "mps": True,
    "devices": "1", "ranks": 2, "shard": "layers", "shares": [3.0, 1.0], "spread-rows": 0, "gather-buffers": 0, "hosts": [], "dtype": "bfloat16", "quantize": "int8",
    "policy": "lockstep", "max-wait-us": 7, "max-batch-tokens": 8, "serve": ["model.layers.*"], "allow-read": True, "metrics-port": 9, "metrics-host": "::1", "audit-log": "a",
    "log-format": "json", "heartbeat-s": 1.5, "non-finite": "pass", "max-call-bytes": 10, "max-rows": 11,
    "max-in-flight": 12, "max-sessions": 13, "max-tenant-sessions": 14, "max-tenant-in-flight": 15,
    "max-tenant-bytes": 16, "max-tenant-rows-per-s": 17, "max-call-multiplications": 18,
    "max-tenant-multiplications-per-s": 19, "max-tenant-bytes-per-s": 20, "max-bytes": 21, "key": "executor.key", "tenants": "tenants",
    "integers": [8, 16], "operator": "north", "workers": 1, "train-share": 0.5, "rounds": False, "batch-invariant": True, "nccl": True,
    "share-weights": False,  # which rates exclude
}  # fmt: skip


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "executor.yaml"
    file.write_text(text)
    return file


def test_the_defaults_are_those_of_the_protocol() -> None:
    assert load_options({}) == Options()
    assert Options().limits == Limits()


def test_a_file_may_say_everything(tmp_path: Path) -> None:
    assert {key.replace("-", "_") for key in EVERYTHING} == set(Options.__struct_fields__)
    options = load_options({}, written(tmp_path, yaml.safe_dump(EVERYTHING)))
    for key, value in EVERYTHING.items():
        got = getattr(options, key.replace("-", "_"))
        assert got == (tuple(value) if isinstance(value, list) else value), key
    assert options.limits == Limits(10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)


def test_ranks_on_several_hosts_answer_at_the_same_ports() -> None:
    options = load_options({"devices": "0-1", "ranks": 4, "hosts": ["a", "b"], "listen": ["tcp://0.0.0.0:70"]})
    assert options.places == ("cuda:0", "cuda:1") * 2 and options.host_of_each == ("a", "a", "b", "b")
    told = [options.of_rank(rank) for rank in range(4)]
    assert [one.listen for one in told] == [("tcp://0.0.0.0:70",), ("tcp://0.0.0.0:71",)] * 2
    assert [one.device for one in told] == ["cuda:0", "cuda:1"] * 2
    assert all(one.host_of_each == options.host_of_each for one in told)


@pytest.mark.parametrize(
    ("given", "ranks", "here", "text"),
    [
        ({"ranks": 3}, 2, 2, "--ranks 3, and torchrun has started 2: leave out --ranks"),
        ({"device": "cuda", "mps": True}, 2, 2, "start nvidia-cuda-mps-control -d before torchrun"),
        ({}, 4, 2, "torchrun has started ranks on 2 hosts: --hosts must name as many"),
        ({"metrics_port": 65535}, 2, 2, "has its pages at that port + K, and there are 2 ranks: choose 65534 or less"),
        ({"hosts": ["a", "b", "c"]}, 4, 2, "torchrun has started ranks on 2 hosts: --hosts must name as many"),
    ],
)
def test_what_contradicts_torchrun_is_refused(
    given: dict[str, Any], ranks: int, here: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", here), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, str(value))
    assert is_launched()
    with pytest.raises(ConfigError, match=re.escape(text)):
        launched_options(load_options(given))


def test_torchrun_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_launched()
    for name, value in (("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, str(value))
    options = launched_options(load_options({"device": "cuda", "hosts": ["a", "b"], "metrics_port": 65534}))
    assert options.places == ("cuda:0", "cuda:1") * 2 and options.host_of_each == ("a", "a", "b", "b")


def test_hosts_without_torchrun_are_refused() -> None:
    with pytest.raises(ConfigError, match="--hosts is for ranks that torchrun starts on several hosts"):
        check(load_options({"model": "demo", "hosts": ["a", "b"], "ranks": 2, "listen": ["tcp://127.0.0.1:7000"]}))


def test_names_may_be_spelt_with_underscores(tmp_path: Path) -> None:
    spelt = {key.replace("-", "_"): value for key, value in EVERYTHING.items()}
    assert read_config_file(written(tmp_path, yaml.safe_dump(spelt))) == spelt


def test_no_shell_has_replaced_the_home_folder_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = load_options({}, written(tmp_path, "key: ~/executor.key\ntenants: ~/tenants\naudit-log: ~/audit\n"))
    assert (options.key, options.tenants) == (f"{tmp_path}/executor.key", f"{tmp_path}/tenants")
    assert options.audit_log == f"{tmp_path}/audit"


BOUNDS = {"heartbeat_s": (0.1, 1e6), "operator": ("n" * 512,), **dict.fromkeys(Limits.__struct_fields__, (1 << 62,))}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_an_executor_may_be_told_is_what_clients_take(name: str, llama: nn.Module, serve: Callable) -> None:
    for value in BOUNDS[name]:
        assert Session(serve(llama, **{name: value}).endpoint).welcome
    for value in {"heartbeat_s": (0.05, 1e7, math.nan), "operator": ("n" * 513, "\x1b")}.get(name, (1 << 63,)):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            load_options({name: value})


@pytest.mark.parametrize(
    ("maps_all", "options"),
    [
        (True, {}), (True, {"device": "cuda"}), (True, {"ranks": 2, "shard": "fsdp"}), (True, {"device": "cuda", "ranks": 2}),
        (False, {"devices": "0,1"}), (False, {"device": "cuda", "ranks": 2, "shard": "fsdp"}), (False, {"share_weights": False}),
    ],
)  # fmt: skip
def test_layers_that_are_divided_among_gpus_are_not_all_mapped(maps_all: bool, options: dict[str, Any]) -> None:
    assert load_options({"listen": ["local:///a"], **options}).shares_all_weights is maps_all


@pytest.mark.parametrize(("devices", "device"), [("2", "cuda:2"), (0, "cuda:0"), ("cpu", "cpu")])
def test_one_of_several_devices_is_the_device(devices: str | int, device: str) -> None:
    """A file has it as a number. What loads a model on one device knows of no others: it served `--devices 0` on the CPU."""
    options = load_options({"devices": devices})
    assert options.device == device and options.places == (device,) and options.on_gpu == (device != "cpu")


def test_ranks_have_devices_and_endpoints_of_their_own() -> None:
    assert Options().places == ("cpu",) and Options(ranks=2).places == ("cpu", "cpu")
    assert Options(device="cuda:1", ranks=2).places == ("cuda:1", "cuda:1")
    assert Options(devices="0-1,4").places == ("cuda:0", "cuda:1", "cuda:4")
    options = load_options(
        {"devices": "0-1", "ranks": 4, "shares": "3,1,1,1", "listen": ["local:///a.sock", "tcp://h:70"]}
    )
    assert options.places == ("cuda:0", "cuda:0", "cuda:1", "cuda:1") and options.on_gpu
    last = options.of_rank(3)
    assert (last.device, last.listen, last.places) == (
        "cuda:1",
        ("local:///a.sock.rank3", "tcp://h:73"),
        ("cuda:1",) * 4,
    )


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "policy: lockstep\nmax-rows: 5\n")
    options = load_options({"policy": "immediate"}, file)
    assert (options.policy, options.max_rows, options.max_sessions) == ("immediate", 5, Options().max_sessions)


@pytest.mark.parametrize("text", ["", "# nothing\n", "listen: tcp://127.0.0.1:0\n"])
def test_one_endpoint_needs_no_list_and_a_file_may_be_empty(tmp_path: Path, text: str) -> None:
    assert load_options({}, written(tmp_path, text)).listen == (("tcp://127.0.0.1:0",) if text.startswith("l") else ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: lockstep", "unknown option polcy. Known: allow-read, "),
        ("max_rows: 5\nmax-rows: 5", "says max-rows twice"),
        ("dtype: float7", "--dtype 'float7' is not a floating-point type"),
        ("1: 2", "unknown option 1"),
        ("- policy", "must hold `option: value` lines, not a list"),
        ("policy: [", "cannot read the configuration file"),
        ("max-rows: many", "wrong option: max-rows is a whole number, not 'many'"),
        ("allow-read: 3", "wrong option: allow-read is true or false, not 3"),
        ("non-finite: maybe", "wrong option: .*maybe"),
        ("policy: nonsense", "'nonsense' is not a valid policy: write immediate or lockstep or opportunistic"),
        ("policy:", "policy is empty: give it a value, or remove the line"),
        ("key:\ntenants:", "key is empty"),
        ("devices: 0,x", "devices '0,x': write the numbers of GPUs, as 0-3 or 0,2, or cpu"),
        ("devices: 3-1", "name each GPU once, the lower number of a range first"),
        ("devices: 0,1,1", "name each GPU once"),
        ("devices: 0-1\nranks: 3", "3 ranks cannot be equally many on each of 2 devices"),
        ("device: cuda:0\ndevices: cpu", "device cuda:0 and devices cpu contradict each other"),
        ('device: cuda:1\ndevices: "0"', "device cuda:1 and devices 0 contradict each other"),
        ("ranks: 65", "a service has at most 64 ranks, not 65"),
        ("ranks: 2\nshares: [1, 2, 3]", "shares must be one positive number for each of 2 ranks, as 3,1, not 1,2,3"),
        ("spread-rows: 4\nranks: 2", "spread-rows needs several ranks with --shard fsdp"),
        ("spread-rows: 4\nshard: fsdp", "spread-rows needs several ranks with --shard fsdp"),
        ("spread-rows: 4\nshard: fsdp\nranks: 2\nbatch-invariant: true", "and no --batch-invariant"),
        ("gather-buffers: 1000\nshard: fsdp\nranks: 2", "gather-buffers is for ranks on GPUs with --shard fsdp"),
        ("gather-buffers: 1000\ndevices: 0-1", "gather-buffers is for ranks on GPUs with --shard fsdp"),
        ("hosts: [a, b]\nranks: 3", "hosts are different ones, with as many of the 3 ranks on each: 2 are named"),
        ("hosts: [a, a]\nranks: 2", "hosts are different ones"),
        ("hosts: ['a/b', c]\nranks: 2", "hosts: 'a/b' is no host's name or address"),
        ("hosts: [a, b]\nranks: 2\nshard: fsdp", "ranks on several hosts hold whole layers"),
        ("hosts: [a, b]\nranks: 2\nlisten: local:///a.sock", "clients reach them at tcp:// only"),
        ("gather-buffers: -1", "gather-buffers must not be negative, and is -1"),
        ("spread-rows: -1", "spread-rows must not be negative, and is -1"),
        ("ranks: 2\nshares: 1,0", "shares must be one positive number for each of 2 ranks, as 3,1, not 1,0"),
        (
            "ranks: 2\nshares: 1.0e+30,1.0e+30",
            "shares must be numbers from 1e-06 to 1e.15, the largest at most 1000 times the smallest, not 1e.30,1e.30",
        ),
        ("ranks: 2\nshares: 1,0.0000001", "the largest at most 1000 times the smallest, not 1,1e-07"),
        ("ranks: 2\nshares: 1001,1", "the largest at most 1000 times the smallest, not 1001,1"),
        ("ranks: 2\nshares: much", "wrong option: shares is a number, or a list of such, not .'much'"),
        ("shard: rows", "'rows' is not a valid shard"),
        ("train-share: half", "wrong option: train-share is a number, not 'half'"),
        ("device: 3", "wrong option: device is a text, not 3"),
        ("serve: {a: b}", "wrong option: serve is a text, or a list of such, not {'a': 'b'}"),
        ("integers: [eight]", "wrong option: integers is a whole number, or a list of such, not \\['eight'\\]"),
        ("log-format: nonsense", "'nonsense' is not a valid log-format: write text or json"),
        ("policy: [lockstep]", "is not a valid policy: write"),
        ("metrics-port: 99999", "metrics-port must be a port from 0 to 65535, not 99999"),
        ("metrics-port: -1", "metrics-port must be a port from 0 to 65535, not -1"),
        ("max-sessions: 0", "max-sessions must be positive, not 0"),
        ("max-tenant-in-flight: 0", "max-tenant-in-flight must be positive, not 0"),
        ("max-tenant-rows-per-s: -2", "max-tenant-rows-per-s must not be negative, and is -2"),
        ("max-tenant-bytes-per-s: -3", "max-tenant-bytes-per-s must not be negative, and is -3"),
        ("max-call-multiplications: 0", "max-call-multiplications must be positive, not 0"),
        ("max-bytes: 0", "max-bytes must be positive, not 0"),
        ("max-wait-us: -1", "max-wait-us must not be negative, and is -1"),
        ("heartbeat-s: -0.5", "heartbeat-s must be positive"),
        ("mps: true", "mps shares a GPU, but device is cpu: add --device cuda"),
        ("device: cuda:1\nworkers: 2", "leave out --workers"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_options({}, written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file /nowhere"):
        read_config_file(Path("/nowhere"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        read_config_file(tmp_path / "binary")


def test_an_embedded_executor_refuses_options_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="polcy"):
        symbiosis.Executor("demo", polcy="lockstep")
    with pytest.raises(ConfigError, match="mps is for symbiosis-executor"):
        symbiosis.Executor("demo", device="cuda", mps=True)


def test_the_endpoint_comes_from_the_environment_else_from_this_users_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SYMBIOSIS_ENDPOINT", "tcp://host:1")
    assert default_endpoints() == ("tcp://host:1",)
    monkeypatch.setenv("SYMBIOSIS_ENDPOINT", "tcp://host:1, local:///a.sock  tcp://host:2")
    assert default_endpoints() == ("tcp://host:1", "local:///a.sock", "tcp://host:2")
    monkeypatch.delenv("SYMBIOSIS_ENDPOINT")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_endpoints() == (f"local://{tmp_path}/symbiosis/executor.sock",)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_folder(Use.RUNTIME).parent == tmp_path


def test_the_default_endpoint_is_this_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SYMBIOSIS_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with symbiosis.Executor("demo", listen=[*default_endpoints()]) as executor:
        assert (executor.endpoint,) == default_endpoints()
        assert stat.S_IMODE((tmp_path / "symbiosis").stat().st_mode) == 0o700
        assert symbiosis.from_executor() is not None


HELP = {param.name: param for param in get_command(main.executor_app).params}
UNITS = {"GiB": 1 << 30}
NUMBERS = [name for name, hint in HINTS.items() if {int, float} & {hint, *get_args(hint)} and hint is not bool]
ONE_NUMBER = [name for name in NUMBERS if Ellipsis not in get_args(HINTS[name])]


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_every_number_has_bounds(name: str) -> None:
    for value in (-1, 1 << 63) if HINTS[name] is not float else (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            load_options({name: value})


@pytest.mark.parametrize("name", [name for name in ONE_NUMBER if getattr(Options(), name)])
def test_help_says_the_default_of_every_number(name: str) -> None:
    said = re.search(r"Default: ([\d.]*\d)(?:\^(\d+)| (GiB))?", HELP[name].help)
    assert said, f"the help of --{name.replace('_', '-')} lacks its default"
    number, power, unit = said.groups()
    assert float(number) ** int(power or 1) * UNITS.get(unit, 1) == getattr(Options(), name)


@pytest.mark.parametrize("name", CHOICES)
def test_help_says_the_default_of_every_choice(name: str) -> None:
    said = HELP[name].help
    assert f"{getattr(Options(), name)} (default)" in said
    assert all(choice in said for choice in CHOICES[name])


@pytest.mark.parametrize("name", [name for name, hint in HINTS.items() if bool in {hint, *get_args(hint)}])
def test_what_a_file_switches_the_command_line_switches_back(name: str) -> None:
    option = name.replace("_", "-")
    assert (HELP[name].opts, HELP[name].secondary_opts) == ([f"--{option}"], [f"--no-{option}"])


@pytest.mark.parametrize("name", sorted(set(Options.__struct_fields__) - set(Limits.__struct_fields__)))
def test_every_option_is_read(name: str) -> None:
    readers = [file for file in Path(symbiosis.__file__).parent.rglob("*.py") if file.name != "main.py"]
    uses = [file.name for file in readers if re.search(rf"options\.{name}\b", file.read_text())]
    by_property = re.search(rf"return .*self\.{name}\b", Path(options.__file__).read_text())
    assert uses or by_property, f"nothing reads the option {name}"
