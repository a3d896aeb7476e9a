"""What is wrong with options is said before torch is loaded: quickly, all at once, and in a line each."""

import importlib.metadata
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import symbiosis
from symbiosis.base import curve_keys
from symbiosis.errors import ConfigError
from symbiosis.executor import preflight
from symbiosis.executor.model import checkpoint
from symbiosis.executor.model.load import load_model
from symbiosis.executor.options import Options
from tests.secret_files import write_secret

COMMAND = "from symbiosis.cli.main import executor_main; executor_main()"
WITHOUT_TORCH = f"import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'peft', 'accelerate', 'numpy')); sys.argv[0] = 'symbiosis-executor'; {COMMAND}"


def problems(**options: object) -> list[str]:
    """The lines of the refusal; by default nothing is listened at."""
    try:
        preflight.check(msgspec.structs.replace(Options(model="demo"), **options))
    except ConfigError as error:
        return str(error).splitlines()
    return []


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_everything_is_said_together_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    write_secret(tmp_path / "wrong.key", "public x\nsecret y\n")
    with taken_port() as port, taken_port() as other:
        wrong = {
            "./mistyped": "cannot load './mistyped': no such directory",
            f"--listen=tcp://127.0.0.1:{port}": f"cannot listen at tcp://127.0.0.1:{port}: Address already in use",
            f"--metrics-port={other}": f"cannot serve metrics at 127.0.0.1:{other}",
            f"--key={tmp_path}/wrong.key": f"{tmp_path}/wrong.key does not hold a pair of keys",
            f"--tenants={tmp_path}": "",
            "--device=cuda:7": "--device 'cuda:7': ",
        }
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *wrong], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 5 and all(line.startswith("error: ") for line in lines), done.stderr
    for message in wrong.values():
        assert any(message in line for line in lines), message


def test_what_is_right_is_free_again_afterwards(tmp_path: Path) -> None:
    with taken_port() as port:
        pass
    options = {"listen": (f"tcp://127.0.0.1:{port}", f"local://{tmp_path}/x.sock")}
    assert problems(**options) == [] == problems(**options)
    assert not (tmp_path / "x.sock").exists()
    with symbiosis.Executor("demo", **options) as executor:
        assert executor.endpoints == list(options["listen"])
        assert len(problems(**options)) == 2


def test_two_options_cannot_have_one_port() -> None:
    with taken_port() as port:
        pass
    url = f"tcp://127.0.0.1:{port}"
    assert f"cannot listen at {url} twice" in problems(listen=(url, url))
    assert f"cannot serve metrics at 127.0.0.1:{port}" in problems(listen=(url,), metrics_port=port)[0]
    assert problems(listen=("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")) == []


ENDPOINTS = {
    "tcp://0.0.0.0:0": "can be reached from other machines: give --key and --tenants",
    "tcp://*:0": "can be reached from other machines",
    "tcp://192.0.2.1:0": "can be reached from other machines",
    "tcp://127.0.0.1:http": "port from 0 to 65535",
    "tcp://127.0.0.1:7?server=x.pub": "cannot listen at tcp://127.0.0.1:7?server=x.pub",
    "local:///proc/x/y.sock": "cannot listen at local:///proc/x/y.sock",
    "local://" + "/x" * 60: "more than 107 bytes",
    f"local://{__file__}": "exists and is not a socket",
    f"local://{__file__}/x.sock": "is not a folder",
    "inproc://x": "symbiosis.Executor(model)",
    "executor.sock": "'executor.sock' is not an endpoint",
}


def torch_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Have torch's package be another build; all others are what they are."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch" else real(name))


@pytest.mark.parametrize("url", ENDPOINTS)
def test_an_endpoint_that_cannot_be(url: str) -> None:
    (line,) = problems(listen=(url,))
    assert ENDPOINTS[url] in line


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (line,) = problems(listen=(f"local://{tmp_path}/open/x.sock",))
    assert line.startswith("cannot listen at local://") and "can be written by others" in line


def test_with_keys_an_address_must_be_of_this_machine(tmp_path: Path) -> None:
    key, _ = curve_keys.generate("executor", tmp_path)
    (tmp_path / "tenants").mkdir(mode=0o700)
    ours = {"key": str(key), "tenants": str(tmp_path / "tenants")}
    assert problems(listen=("tcp://0.0.0.0:0",), **ours) == []
    assert "cannot listen at tcp://192.0.2.1:0" in problems(listen=("tcp://192.0.2.1:0",), **ours)[0]
    key.chmod(0o644)
    assert "chmod 600" in problems(**ours)[0]
    key.chmod(0o600)
    assert "is not a folder" in problems(**ours | {"tenants": str(key)})[0]


# ---------------------------------------------------------------- the model


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    "name", ["./demo", "/nowhere", "~/nowhere", "a/b/c", "models/", "tests/modle", "m.safetensors", ".", "a b"]
)
def test_a_path_that_leads_nowhere_is_not_taken_for_a_hub_id(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    (line,) = problems(model=name)
    assert line.startswith(f"cannot load {name!r}: ")
    with pytest.raises(ConfigError) as error:
        load_model(name)
    assert str(error.value) == line


@pytest.mark.usefixtures("offline")
def test_a_hub_id_without_the_hub_is_one_line() -> None:
    (line,) = problems(model="org/model")
    assert (
        line
        == "cannot load 'org/model': it is neither a directory here nor in the hub's cache, and HF_HUB_OFFLINE is set"
    )


def test_a_hub_that_cannot_be_reached_is_one_line_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as port:
        pass  # where nobody listens
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    begun = time.monotonic()
    (line,) = problems(model="org/model")
    assert line.endswith(f"http://127.0.0.1:{port} cannot be reached")
    assert time.monotonic() - begun < 2 * checkpoint.REACH_S


@pytest.mark.usefixtures("offline")
def test_a_hub_id_in_the_cache_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--model"
    folder = repository / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert checkpoint.located("org/model") == folder
    (line,) = problems(model="org/model")
    assert "only *.safetensors are read" in line, "its weights are not in the cache"


def sparse_checkpoint(folder: Path, gib: int, cut: int = 0, dtype: str = "F32", name: str = "w{}") -> Path:
    """A file that says it holds tensors of one GiB each, and takes none on the disk."""
    nbytes = gib << 30
    held = {
        name.format(number): {
            "dtype": dtype,
            "shape": [(1 << 30) * 8 // int(dtype.lstrip("BF")) // 1024, 1024],
            "data_offsets": [number << 30, (number + 1) << 30],
        }
        for number in range(gib)
    }
    header = json.dumps(held).encode()
    (folder / "config.json").write_text("{}")
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + nbytes - cut)
    return file


def test_weights_that_do_not_fit_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sparse_checkpoint(tmp_path, 64)
    monkeypatch.setattr(preflight, "free_memory", lambda: 40 << 30)
    (line,) = problems(model=str(tmp_path))
    assert "need 64.0 GiB, and this machine has 40.0 GiB free" in line
    assert problems(model=str(tmp_path), dtype="bfloat16") == []
    assert "need 48.0 GiB" in problems(model=str(tmp_path), dtype="bfloat16", integers=(8,))[0]
    os.truncate(file, 1 << 20)
    assert "damaged or cut short" in problems(model=str(tmp_path))[0]
    file.unlink()
    assert "only *.safetensors are read" in problems(model=str(tmp_path))[0]


def test_all_files_of_an_index_count(tmp_path: Path) -> None:
    model = load_model("demo")
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(checkpoint.weight_files(tmp_path)) > 2
    nbytes = sum({w.data_ptr(): w.nbytes for w in model.parameters()}.values())
    assert checkpoint.weights_nbytes(checkpoint.weight_files(tmp_path)) == nbytes
    last = checkpoint.weight_files(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"damaged or cut short.*{last}"):
        load_model(str(tmp_path))
    last.unlink()
    assert f"{last}: No such file" in problems(model=str(tmp_path))[0]


def test_free_memory_is_told() -> None:
    assert 1 << 20 < preflight.free_memory() < 1 << 50


# ---------------------------------------------------------------- the device


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A driver's tool that lists so many GPUs with so many MiB free, and a torch that could use them."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch_is(monkeypatch, "2.13.0+cu130")
    tool = tmp_path / "nvidia-smi"

    def there(count: int, free_mib: int = 10**6) -> None:
        tool.write_text(f"#!/bin/sh\ncase $1 in *memory*) echo {free_mib};; *) seq 0 {count - 1};; esac\n")
        tool.chmod(0o755)

    return there


def test_a_gpu_that_is_not_there(gpus: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    assert problems(device="cuda") == problems(device="cuda:1") == []
    assert problems(device="cuda:2") == ["--device 'cuda:2': this process sees 2 GPUs"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert problems(device="cuda:1") == ["--device 'cuda:1': this process sees 1 GPUs (CUDA_VISIBLE_DEVICES)"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(problems(device="cuda")) == 1


def test_a_gpu_that_is_full(gpus: Callable) -> None:
    gpus(1, free_mib=1)
    assert "and cuda has 0.0 GiB free" in problems(device="cuda")[0]


def test_what_lies_on_the_host_while_gpus_load_has_to_fit(
    gpus: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what is cast or stacked, here of tensors of one GiB, and not the whole model."""
    gpus(2)
    sparse_checkpoint(tmp_path, 40)
    one = {"model": str(tmp_path), "device": "cuda"}
    layers = {"model": str(tmp_path), "devices": "0,1"}
    parts = {**layers, "shard": "fsdp"}

    def needed(options: dict, **more: str) -> str:
        return "; ".join(problems(**options, **more)).partition(" to be loaded")[0].rpartition(" need ")[2]

    monkeypatch.setattr(preflight, "free_memory", lambda: 1 << 20)
    assert not needed(one) and not needed(layers) and not needed(parts)
    assert needed(one, dtype="bfloat16") == "20.0 GiB"
    assert needed(layers, dtype="bfloat16") == "4.0 GiB", "four at a time by each rank"
    assert needed(parts, dtype="bfloat16") == "2.0 GiB", "a GiB at a time by each rank"
    sparse_checkpoint(tmp_path, 8, name="layers.0.experts.{}.w1.weight")  # one stack
    assert needed(one) == "8.0 GiB" and needed(parts) == "16.0 GiB" and not needed(layers)
    monkeypatch.setattr(preflight, "free_memory", lambda: 16 << 30)
    assert problems(**one) == problems(**parts) == problems(**layers) == []


@pytest.mark.parametrize(
    ("stored", "options", "advice"),
    [
        ("F32", {"device": "cuda"}, "or name more --devices, or --dtype bfloat16"),
        ("F32", {"device": "cuda", "dtype": "float32"}, "or name more --devices"),
        ("BF16", {"device": "cuda"}, "or name more --devices"),
        ("BF16", {"devices": "0,1", "shares": (3.0, 1.0)}, "or give it less by --shares"),
        ("BF16", {"devices": "0-3", "shares": (9.0, 1.0, 1.0, 1.0)}, "or give it less by --shares"),
        ("BF16", {"devices": "0,1", "shard": "fsdp", "gather_buffers": 20 << 30}, "or name more --devices"),
    ],
    ids=str,
)
def test_the_advice_for_a_gpu_that_is_full_would_help(
    stored: str, options: dict, advice: str, gpus: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(4, free_mib=24 << 10)
    monkeypatch.setattr(preflight, "free_memory", lambda: 1 << 40)
    sparse_checkpoint(tmp_path, 40, dtype=stored)
    (line,) = problems(model=str(tmp_path), **options)
    assert line.endswith(f"has 24.0 GiB free: end what else runs there, or choose a smaller model, {advice}")


def test_no_fewer_bits_are_advised_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: 4 << 30)
    for stored, helps in (("F32", True), ("BF16", False)):
        sparse_checkpoint(tmp_path, 8, dtype=stored)
        assert problems(model=str(tmp_path))[0].endswith("or --dtype bfloat16") == helps


@pytest.mark.skipif(preflight._has_driver(), reason="needs a machine without an NVIDIA driver")
def test_no_gpu_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    torch_is(monkeypatch, "2.13.0")
    assert problems(device="cuda") == ["--device 'cuda': this process sees 0 GPUs"]
    assert "no CUDA MPS" in problems(device="cuda", mps=True)[1]


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:-1", "cuda:x", "cpu:1", "meta", "xpu"])
def test_what_is_no_device(device: str) -> None:
    assert problems(device=device) == [f"--device {device!r}: a device is cpu, cuda or cuda:NUMBER"]


def test_an_executor_in_a_program_is_told_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.executor.embedded.load_model", lambda *_: pytest.fail("loaded"))
    for options in ({"listen": "tcp://0.0.0.0:0"}, {"device": "gpu"}, {"dtype": "float7"}):
        with pytest.raises(ConfigError):
            symbiosis.Executor("demo", **options)
