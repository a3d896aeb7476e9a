"""What a user passes wrongly is refused by name: which argument, what it was, and what to write."""

import importlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli import main
from symbiosis.client import arguments
from symbiosis.client.connection import reconnect
from symbiosis.errors import ExecutorUnavailable, SymbiosisError
from tests.conftest import tiny_llama

ENDPOINT = "inproc://nobody"

TIMES = [
    ({"timeout": value}, rf"timeout must be positive, not {re.escape(repr(value)[:40])}")
    for value in (0, -1.0, "5", None, True, float("nan"), 10**310)
] + [
    ({name: value}, rf"{name} must not be negative, and is {re.escape(repr(value)[:40])}")
    for name in ("patience", "wait")
    for value in (-1, "5", None, True, float("nan"), 10**310)
    if (name, value) != ("wait", None)
]
ENDPOINTS: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": 5}, "5 is not an endpoint: write its URL"),
    ({"endpoint": b"local:///x"}, "b'local:///x' is not an endpoint"),
    ({"endpoint": Path("/x")}, r"PosixPath\('/x'\) is not an endpoint"),
    ({"endpoint": {}}, "{} is not an endpoint"),
    ({"endpoint": []}, r"\[\] is an empty list of endpoints"),
    ({"endpoint": ""}, "'' is not an endpoint: write inproc://NAME"),
    ({"endpoint": ["local:///x", None]}, "None is not an endpoint"),
    ({"endpoint": "local:///x, nonsense://y"}, "'nonsense://y' is not an endpoint"),
    ({"endpoint": "tcp://host:99999"}, "a port from 0 to 65535"),
    (
        {"endpoint": "http://127.0.0.1:9100/metrics"},
        "is a web page, such as an executor's metrics, not an endpoint",
    ),
]
SHARED = [
    *TIMES,
    *ENDPOINTS,
    *(({"exact": value}, f"exact={re.escape(repr(value))}: write True or False") for value in ("no", 1, None)),
    *(
        ({"layers": value}, rf"layers={re.escape(repr(value))}: write a pattern of layer names")
        for value in (3, True, [3], [None], "", {"a": 1}, b"x")
    ),
    ({"layers": []}, r"layers=\[\] is empty"),
    *(({"priority": v}, f"priority is decode, prefill or train, not {v!r}") for v in (3, "high", "", b"train")),
]
WRAP = [
    *SHARED,
    *(({"verify": value}, f"verify={value!r}: write True or False") for value in ("yes", 1, None)),
    ({"privacy": 3}, r"privacy=3: write symbiosis.Split\(ENDPOINT\)"),
    ({"privacy": "split"}, "privacy='split': write symbiosis.Split"),
    ({"privacy": symbiosis.Split}, r"privacy=Split is the class: write Split\("),
    ({"privacy": symbiosis.Noise(scale="x")}, "Noise: scale is a positive number, not 'x'"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Noise(scale=True)}, "Noise: scale is a positive number, not True"),
    ({"privacy": symbiosis.Noise(scale=-1)}, "Noise: scale is a positive number, not -1"),
    ({"privacy": symbiosis.Noise(pool=0)}, "Noise: pool is a whole number of at least 1, not 0"),
    ({"privacy": symbiosis.Noise(every="x")}, "Noise: every is a whole number of at least 0, not 'x'"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Noise(effects=3)}, "Noise: effects is an endpoint or 'same', not 3"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Noise(effects="same", allow_known_noise="no")}, "allow_known_noise='no': write True or False"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Split(5)}, r"Split\(5\): write the endpoint of the second executor"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Split("tcp://x:1", bits="8")}, "quantised to 8 or 16 bits, not to '8'"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Split("tcp://x:1", bits=9)}, "quantised to 8 or 16 bits, not to 9"),
    ({"privacy": symbiosis.Pads(None)}, r"Pads\(None\): write the path of a file"),  # type: ignore[arg-type]
    ({"privacy": symbiosis.Pads("/no/pads")}, "/no/pads cannot be opened for reading and writing"),
]  # fmt: skip
BUILD = [
    *SHARED,
    *(
        ({"dtype": value}, rf"dtype={re.escape(repr(value))}: write torch.bfloat16, ")
        for value in ("fp16", "foo", "", 16, "__name__", "int8", torch.int8)
    ),
    *(
        ({"device": value}, rf"device={re.escape(repr(value))}: write \"cpu\"")
        for value in ("gpu", "", None, "cuda:x", 1.5)
    ),
    ({"privacy": "noise"}, "from_executor knows no privacy.*wrap a model from a checkpoint"),
]


@pytest.mark.parametrize(("words", "message"), WRAP, ids=repr)
def test_wrap_refuses_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(SymbiosisError, match=message):
        symbiosis.wrap(tiny_llama(), **{"endpoint": ENDPOINT, **words})


@pytest.mark.parametrize(("words", "message"), BUILD, ids=repr)
def test_from_executor_refuses_by_name(words: dict[str, Any], message: str, serve: Callable) -> None:
    executor = serve(tiny_llama()) if "privacy" in words else None
    with pytest.raises(SymbiosisError, match=message):
        symbiosis.from_executor(**{"endpoint": executor.endpoint if executor else ENDPOINT, **words})


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, it is taken")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(SymbiosisError, match="device='cuda:7': this process sees 0 GPUs"):
        symbiosis.from_executor(ENDPOINT, device="cuda:7")


@pytest.mark.parametrize("value", ["soon", "nan", "-1"])
def test_seconds_in_the_environment_are_checked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_PATIENCE_S", value)
    with pytest.raises(SymbiosisError, match=rf"\$SYMBIOSIS_PATIENCE_S is '{value}': write a number of seconds"):
        importlib.reload(reconnect)
    monkeypatch.setenv("SYMBIOSIS_PATIENCE_S", " 7 ")
    assert arguments.seconds_in("SYMBIOSIS_PATIENCE_S", 60.0) == 7.0


@pytest.mark.parametrize("value", [" , ", " "])
def test_an_environment_that_names_no_executor_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and is not taken for the default one."""
    monkeypatch.setenv("SYMBIOSIS_ENDPOINT", value)
    with pytest.raises(SymbiosisError, match=r"\$SYMBIOSIS_ENDPOINT is .* which names no executor"):
        symbiosis.wrap(tiny_llama())


NO_MODELS = [None, 3, "demo", nn.Linear, torch.zeros(1)]


@pytest.mark.parametrize("function", ["wrap", "unwrap", "stats", "report"])
@pytest.mark.parametrize("value", NO_MODELS, ids=repr)
def test_what_is_no_model_is_refused(function: str, value: object) -> None:
    with pytest.raises(SymbiosisError, match=f"{function} takes a model"):
        getattr(symbiosis, function)(value)


@pytest.mark.parametrize("function", ["stats", "report"])
def test_a_model_that_is_not_wrapped_is_told_so(function: str) -> None:
    with pytest.raises(SymbiosisError, match=r"not wrapped: symbiosis.wrap\(model\) first"):
        getattr(symbiosis, function)(tiny_llama())


@pytest.mark.parametrize(
    ("arguments", "words", "message"),
    [
        ((None,), {}, "capture takes a function, not None"),
        ((torch.zeros(1),), {}, "capture takes a function, not tensor"),
        ((len,), {"max_graphs": 0}, "max_graphs=0: write a whole number of at least 1"),
        ((len,), {"max_graphs": "8"}, "max_graphs='8': write a whole number"),
        ((len,), {"max_graphs": True}, "max_graphs=True: write a whole number"),
    ],
)
def test_capture_refuses_by_name(arguments: tuple[Any, ...], words: dict[str, Any], message: str) -> None:
    with pytest.raises(SymbiosisError, match=message):
        symbiosis.capture(*arguments, **words)


def test_the_callback_takes_nothing_and_needs_a_wrapped_model() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        symbiosis.SymbiosisCallback(tiny_llama())  # type: ignore[call-arg]
    with pytest.raises(SymbiosisError, match="not wrapped"):
        symbiosis.SymbiosisCallback()._mark(tiny_llama(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("/typo", r"unwrap\(model, '/typo'\): it is not a directory"),
        (Path("/typo"), r"unwrap\(model, '/typo'\): it is not a directory"),
        ("/dev", r"unwrap\(model, '/dev'\): it has no \*.safetensors in it"),
        (3, r"unwrap\(model, 3\): weights is a checkpoint's directory, or a state dict"),
    ],
)
def test_unwrap_names_the_path(weights: Any, message: str, serve: Callable) -> None:
    model = symbiosis.from_executor(serve(tiny_llama()).endpoint)
    with pytest.raises(SymbiosisError, match=message):
        symbiosis.unwrap(model, weights)
    assert str(symbiosis.report(model)).startswith("wrapped 14/15")


# ---------------------------------------------------------------- an executor in the program


EXECUTOR: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "Executor takes a model, not None: a model, its directory, a hub id, or 'demo'"),
    (3, {}, "Executor takes a model, not 3"),
    (nn.Linear, {}, "Executor takes a model, not <class"),
    ("demo", {"device": "gpu"}, "'gpu': a device is cpu, cuda or cuda:NUMBER"),
    ("demo", {"device": 3}, "wrong option: device is a text, not 3"),
    ("demo", {"dtype": "fp16"}, "'fp16' is not a floating-point type"),
    ("demo", {"dtype": torch.int8}, "'int8' is not a floating-point type"),
    ("demo", {"policy": None}, "None is not a valid policy"),
    ("demo", {"listen": 5}, "wrong option: listen is a text, or a list of such, not"),
    ("demo", {"serve": [3]}, "wrong option: serve is a text, or a list of such, not"),
    ("demo", {"max_sessions": "many"}, "wrong option: max-sessions is a whole number, not 'many'"),
    ("demo", {"allow_read": "no"}, "wrong option: allow-read is true or false, not 'no'"),
    ("demo", {"polcy": "lockstep"}, "unknown option polcy. Known: allow_read, "),
    (Path("/typo"), {}, "cannot load '/typo': no such directory"),
]


@pytest.mark.parametrize(("model", "options", "message"), EXECUTOR, ids=repr)
def test_executor_refuses_by_name(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SymbiosisError, match=message):
        symbiosis.Executor(model, **options)


def test_executor_refuses_a_model_whose_weights_are_elsewhere(serve: Callable) -> None:
    wrapped = symbiosis.from_executor(serve(tiny_llama()).endpoint)
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    for model in (wrapped, empty):
        with pytest.raises(SymbiosisError, match="does not have them .*it is wrapped, or on the meta device"):
            symbiosis.Executor(model)


def test_executor_refuses_adapters_and_says_what_to_hand_over(ids: Tensor) -> None:
    adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for model in (adapted, adapted.get_base_model()):
        with pytest.raises(SymbiosisError, match=r"has adapters .*model.unload\(\) gives it back"):
            symbiosis.Executor(model)
    with symbiosis.Executor(adapted.unload()) as executor:
        assert symbiosis.from_executor(executor.endpoint)(ids).logits.shape == (2, 9, 100)


def test_executor_serves_an_unwrapped_model(serve: Callable, ids: Tensor) -> None:
    model = symbiosis.unwrap(symbiosis.from_executor(serve(tiny_llama(), allow_read=True).endpoint))
    with symbiosis.Executor(model) as executor, torch.no_grad():
        assert torch.equal(symbiosis.from_executor(executor.endpoint)(ids).logits, tiny_llama()(ids).logits)


def test_executor_takes_torchs_own_words_and_paths() -> None:
    from symbiosis.executor.model.load import DEMO_MODEL

    with symbiosis.Executor(DEMO_MODEL, dtype=torch.bfloat16, device=torch.device("cpu")) as executor:
        assert symbiosis.from_executor(executor.endpoint, dtype="auto").dtype is torch.bfloat16
        assert symbiosis.from_executor(executor.endpoint, dtype="float32").dtype is torch.float32
        assert symbiosis.from_executor(executor.endpoint, device=torch.device("cpu"), dtype=torch.float16).dtype is torch.float16  # fmt: skip


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_options_for_loading_are_not_ignored_for_a_model_that_is_handed_over(options: dict[str, str]) -> None:
    with pytest.raises(SymbiosisError, match=r"is for models that the executor loads, and this one is .*model.to"):
        symbiosis.Executor(tiny_llama(), **options)
    with symbiosis.Executor(tiny_llama(), dtype="float32", device="cpu"):
        pass


@pytest.mark.called
def test_an_executor_that_was_closed_in_this_program_is_not_waited_for(serve: Callable, ids: Tensor) -> None:
    """Nobody can start one by a name that was made for it alone."""
    executor = serve(tiny_llama())
    model = symbiosis.from_executor(executor.endpoint)
    model(ids)
    executor.close()
    begun = time.monotonic()
    with pytest.raises(ExecutorUnavailable, match=executor.endpoint):
        model(ids)
    assert time.monotonic() - begun < 40.0  # and not the 60 s of patience


def test_several_endpoints_in_one_text(serve: Callable, ids: Tensor) -> None:
    """As in $SYMBIOSIS_ENDPOINT."""
    executor = serve(tiny_llama())
    for text in (f"inproc://nobody,{executor.endpoint}", f"inproc://nobody, {executor.endpoint}"):
        model = symbiosis.wrap(tiny_llama(), text)
        assert model.lm_head is not None and symbiosis.stats(model).calls == 0
        assert model.model.layers[0].mlp.up_proj.weight.handle.session.endpoints == ("inproc://nobody", executor.endpoint)  # fmt: skip


# ---------------------------------------------------------------- what needs no word


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "symbiosis"]


def test_what_no_model_computes_by_is_left_out_without_a_word(
    serve: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    for name in ("transformers.js_config", "_attn_implementation_autoset", "_flash_attn_2_enabled"):
        setattr(model.config, name, {"dtype": "x"})
    with caplog.at_level(logging.WARNING, "symbiosis"):
        symbiosis.from_executor(serve(model).endpoint)
    assert warned(caplog) == []
    model.config.my_file = "x"
    with caplog.at_level(logging.WARNING, "symbiosis"):
        symbiosis.from_executor(serve(model).endpoint)
    assert len(warned(caplog)) == 1 and warned(caplog)[0].endswith("sends: my_file")


@pytest.mark.called
def test_loading_an_adapter_is_no_saving(serve: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("peft", minversion="0.19", reason="transformers' load_adapter needs it")
    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    model = symbiosis.wrap(tiny_llama(), serve(tiny_llama()).endpoint)
    with caplog.at_level(logging.WARNING, "symbiosis"):
        model.load_adapter(str(tmp_path))
    assert warned(caplog) == []
    with caplog.at_level(logging.WARNING, "symbiosis"):
        model.state_dict()
    assert len(warned(caplog)) == 1 and "symbiosis.unwrap(model) first" in warned(caplog)[0]


# ---------------------------------------------------------------- the command line


COMMANDS: dict[str, str] = {
    "executor --device gpu demo": "a device is cpu, cuda or cuda:NUMBER",
    "executor --dtype fp16 demo": "'fp16' is not a floating-point type",
    "executor --listen http://x demo": "is a web page, such as an executor's metrics, not an endpoint",
    "executor --listen nonsense demo": "'nonsense' is not an endpoint",
    "executor --policy fast demo": "'fast' is not a valid policy: write immediate or lockstep or opportunistic",
    "executor --log-format xml demo": "'xml' is not a valid log-format: write text or json",
    "executor --non-finite maybe demo": "'maybe' is not a valid non-finite: write refuse or pass",
    "executor --workers 0 demo": "workers must be positive, not 0",
    "executor --train-share 2 demo": "train-share is a fraction of the time, above 0 and at most 1, not 2.0",
    "executor --heartbeat-s nan demo": "heartbeat-s",
    "executor --integers 9 demo": "integers must be 8 or 16, the bits of quantised weights, not (9,)",
    "executor --metrics-port 99999 demo": "metrics-port must be a port from 0 to 65535",
    "executor --metrics-port 1 --metrics-host nowhere.invalid demo": "cannot serve metrics at nowhere.invalid:1",
    "executor --key /typo demo": "key and tenants go together",
    "executor --key /typo --tenants /typo demo": "cannot read the key file /typo",
    "executor --audit-log /typo/x demo": "/typo/x",
    "executor --config /typo demo": "cannot read the configuration file /typo",
    "executor /typo": "cannot load '/typo': no such directory",
    "executor": "no model: symbiosis-executor MODEL",
    **{
        f"executor {option} many demo": f"Invalid value for '{option}'"
        for option in ("--max-wait-us", "--max-rows", "--max-sessions", "--max-call-bytes", "--workers", "--train-share")
    },
    **{
        f"executor {option} 0 demo": f"{option[2:]} must be positive, not 0"
        for option in ("--max-rows", "--max-sessions", "--max-in-flight", "--max-bytes", "--max-batch-tokens")
    },
    "symbiosis top http://127.0.0.1:9100/metrics --once": "is a web page, such as an executor's metrics, not an endpoint",
    "symbiosis top --interval soon": "Invalid value for '--interval'",
    "symbiosis pads demo --tokens many -o x": "Invalid value for '--tokens'",
    "symbiosis pads demo --tokens 5 -o /typo/x": "there is no folder /typo",
    "symbiosis pads demo --tokens 5 --bits 9 -o x": "quantised to 8 or 16 bits, not to 9",
    "symbiosis keygen a --expires soon": "'soon' is not a date: write 2027-01-31",
    "symbiosis keygen a --expires 1999-01-01": "lets nobody in: choose a date in the future",
    "symbiosis audit --level split --bits 9": "quantised to 8 or 16 bits, not to 9",
    "symbiosis audit --level none --tokens -1": "Invalid value for '--tokens'",
    "symbiosis bench nope": "there is no benchmark 'nope': choose one of call, step",
    "symbiosis demo --tokens 0": "Invalid value for '--tokens'",
    "symbiosis nope": "No such command 'nope'",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_by_name(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = command.split()
    done = CliRunner().invoke(main.app if program == "symbiosis" else main.executor_app, words)
    assert done.exit_code == 2, done.output
    assert COMMANDS[command] in done.output and "Traceback" not in done.output
