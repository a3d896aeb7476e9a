"""What can be said of a server, and what is found wrong with it before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.server.http_process import tokenizer_of
from symbiosis.server.ipc.engine_ipc import FrontOptions
from symbiosis.server.launch.preflight import chat_template, check_adapters, check_devices, folder_of, named
from symbiosis.server.launch.serve_processes import executor_words, model_name, pooling_of
from symbiosis.serving.engine.detokenize import chat_text
from symbiosis.serving.runner.model_runner import bytes_of
from symbiosis.serving.serve_options import ServeOptions


def test_a_name_for_clients() -> None:
    assert model_name(ServeOptions(model="/models/base")) == "/models/base"
    assert model_name(ServeOptions(model="/models/base", served_model_name="base")) == "base"


def test_a_share_of_the_batch_is_for_keys() -> None:
    assert ServeOptions().of_tenant is None
    assert ServeOptions(api_keys="keys", max_batch=9).of_tenant == 4
    assert ServeOptions(api_keys="keys", max_batch=1).of_tenant == 1
    assert ServeOptions(api_keys="keys", max_tenant_batch=60).of_tenant == 60
    with pytest.raises(ConfigError, match="max-tenant-batch is for each API key: give --api-keys"):
        ServeOptions(max_tenant_batch=3)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ranks": 2}, "ranks .* goes with --devices cpu"),
        ({"devices": "0-1", "ranks": 2}, "ranks .* goes with --devices cpu"),
        ({"devices": "cpu"}, "divided over two or more"),
        ({"devices": "0"}, "divided over two or more"),
        ({"devices": "1,1"}, "name each GPU once"),
        ({"devices": "0-1", "train": True}, "train goes with one device"),
    ],
    ids=str,
)
def test_devices_that_cannot_divide_a_model_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServeOptions(model="demo", **given)


def test_ranks_need_devices_and_an_executor_that_they_reach() -> None:
    assert ServeOptions(devices="0,3").places == ("cuda:0", "cuda:3")
    with pytest.raises(ConfigError, match="at local://"):
        check_devices(ServeOptions(devices="cpu", ranks=2, executor="tcp://127.0.0.1:7000"))
    check_devices(ServeOptions(devices="cpu", ranks=2, executor="local:///tmp/executor.sock"))


def test_a_chat_template_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    options = ServeOptions(model="demo", chat_template=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_template(options)
    file.write_text("{% for message in messages %}<{{ message.content }}>")
    with pytest.raises(ConfigError, match="line 1: Unexpected end of template"):
        chat_template(options)
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    tokenizer = tokenizer_of(FrontOptions(model="demo", folder=str(DEMO_MODEL), chat_template=chat_template(options)))
    assert chat_text(tokenizer, [{"role": "user", "content": "x"}]) == "<x>"
    own = tokenizer_of(FrontOptions(model="demo", folder=str(DEMO_MODEL)))
    assert chat_text(own, [{"role": "user", "content": "x"}]) == "x"


def test_a_folder_of_adapters_may_have_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    folder, one = tmp_path / "lr=1e-4", DEMO_MODEL / "adapters" / "python"
    folder.mkdir()
    options = ServeOptions(model="demo", adapters=(str(folder), f"loud={one}"))
    check_adapters(options)
    assert folder_of(options) == folder and list(named(options)) == [("loud", one.resolve())]
    with pytest.raises(ConfigError, match="there is no adapter_config.json in that folder"):
        check_adapters(ServeOptions(model="demo", adapters=(str(tmp_path / "lr=2e-4"),)))


def test_adapters_may_be_given_as_vllm_takes_them() -> None:
    one = DEMO_MODEL / "adapters" / "python"
    told = json.dumps({"name": "b", "path": str(one), "base_model_name": "demo"})
    options = ServeOptions(model="demo", lora_modules=(f"a={one}", told, f"[{told}]"))
    check_adapters(options)
    assert list(named(options)) == [(name, one.resolve()) for name in ("a", "b", "b")]
    for wrong in ("python", "=x", '{"name": "a"}', '{"name": "a", "path": "x", "rank": 8}'):
        with pytest.raises(ConfigError, match="lora-modules"):
            ServeOptions(lora_modules=(wrong,))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"allowed_origins": ("example.org",)}, "no origin"),
        ({"allowed_origins": ('["*"',)}, "no JSON list"),
        ({"allowed_methods": ("GET",)}, "go with allowed-origins"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "any page"),
        ({"root_path": "llm"}, "begins with /"),
        ({"root_path": "/llm/"}, "begins with /"),
    ],
)
def test_what_is_told_of_pages_and_proxies_is_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServeOptions(**options)


def test_a_checkpoint_says_what_its_vectors_are_made_of(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for text, kind in (
        ('{"pooling_mode_mean_tokens": true}', "mean"),
        ('{"pooling_mode_lasttoken": true}', "last"),
        ("[", "last"),
    ):
        file.write_text(text)
        assert pooling_of(tmp_path) == kind


@pytest.mark.parametrize(
    ("given", "size"),
    [("2GiB", 2 << 30), ("1.5 mib", 3 << 19), (4096, 4096), ("4096", 4096), (0.5, 0.5), (".25", 0.25), ("1", 1)],
)
def test_memory_is_a_size_or_a_share(given: Any, size: float) -> None:
    options = ServeOptions(memory=given, adapter_memory=given)
    assert options.memory_size == options.adapter_memory_size == size


@pytest.mark.parametrize("given", ["", "-1", "0", "much", "2GB", "1e9", float("nan"), "9" * 30])
def test_memory_that_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="memory is a size such as 8GiB"):
        ServeOptions(memory=given)


def test_a_share_is_of_what_is_free() -> None:
    cpu = torch.device("cpu")
    assert bytes_of(1 << 20, cpu) == 1 << 20
    assert 0.5 < bytes_of(0.5, cpu) / (2 * bytes_of(None, cpu)) < 2


def test_bitwise_reaches_the_executor_and_goes_without_what_adds_up_otherwise() -> None:
    assert "--batch-invariant" in executor_words(ServeOptions(model="demo", bitwise=True), "local:///x")
    assert "--batch-invariant" not in executor_words(ServeOptions(model="demo"), "local:///x")
    for options, word in (({"compile": True}, "compile"), ({"devices": "cpu", "ranks": 2}, "devices")):
        with pytest.raises(ConfigError, match=f"bitwise goes without {word}"):
            ServeOptions(model="demo", bitwise=True, **options)
