"""What scripts/compat_vllm.py puts in the place of `tests/utils.py` and `tests/conftest.py` of vLLM: their server is `symbiosis serve`, and each
test's answers that were refused are noted. It runs in vLLM's environment, where nothing of Symbiosis is."""

import functools
import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest

PYTHON, MODEL, ADAPTER, RESULTS = (os.environ[f"COMPAT_{name}"] for name in ("PYTHON", "MODEL", "ADAPTER", "RESULTS"))
VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS: list[str] = []
TAKEN = {
    "--root-path": "--root-path",
    "--served-model-name": "--served-model-name",
    "--tool-call-parser": "--tool-parser",
}
PARSERS = {"hermes", "llama3_json", "mistral", "pythonic"}
# whose vectors have as many numbers as those of their own model, by random weights
WIDTHS = {"pooling/embed/test_online.py": 384}
# whose texts end by themselves with their own model: here they would fill all positions
SHORTER = {"chat_completion/test_completion_with_function_calling.py": 2048}
# whose model has a head: here it is an adapter that has one
CLASSIFIERS = ("pooling/classify/test_online.py",)
# whose texts have as many tokens as they may: the model stops sooner than theirs
ENDLESS = ("completion/test_completion.py", "test_return_token_ids.py")
refused: list[tuple[int, Any]] = []  # of the present test
calls: list[str] = []


class RemoteOpenAIServer:
    """A server for the tests of one module, which know it by the name of their model."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        options, length = self._options([str(each) for each in vllm_serve_args])
        env = {**key_of([str(each) for each in vllm_serve_args]), **(env_dict or {})}
        if env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            options += ["--adapters", os.environ["COMPAT_ADAPTERS"]]
        if key := env.get("VLLM_API_KEY"):
            keys = Path(self._folder.name, "keys")
            keys.touch(0o600)
            keys.write_text(f"tests {long_key(key)} admin\n")
            options += ["--api-keys", str(keys)]
        names = [] if "--served-model-name" in options else ["--served-model-name", model]
        if is_in(CLASSIFIERS):
            names = ["--served-model-name", "base", "--lora-modules", f"{model}={classifier().name}"]
        checkpoint = self._checkpoint(length)
        words = [PYTHON, "-P", "-m", "symbiosis", "serve", checkpoint, "--port", "0", "--memory", "768MiB"]
        words += [*names, *options]
        self._log = Path(self._folder.name, "server.log").open("w+")  # noqa: SIM115
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.proc = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._log, text=True, env=kept)
        line = self.proc.stdout.readline() if self.proc.stdout else ""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{words}: {self._log.read()[-2000:]}")
        self.url_root = line.partition(" at ")[2].partition("/v1,")[0]
        self.host, _, self.port = self.url_root.removeprefix("http://").partition(":")

    def _options(self, given: list[str]) -> tuple[list[str], int | None]:
        """Those that mean something here; and the longest text."""
        found, length = ["--chat-template", os.environ["COMPAT_TEMPLATE"]], None
        words = iter(enumerate(given))
        for at, word in words:
            value = given[at + 1] if at + 1 < len(given) else ""
            if word in ("--max-model-len", "--max_model_len"):
                length = int(value)
            elif word == "--lora-modules":
                found += [word, value]
            elif word in TAKEN and (word != "--tool-call-parser" or value in PARSERS):
                found += [TAKEN[word], value]
            elif word.startswith("--root-path="):
                found += word.split("=", 1)
        return found, length

    def _checkpoint(self, length: int | None) -> str:
        """The model, with positions for so long a text: they are rotary, and go on."""
        own = checkpoint_of_test()
        config = json.loads(Path(own, "config.json").read_text())
        ends = not is_in(ENDLESS)
        lengths = [most for file, most in SHORTER.items() if is_in((file,))]
        length = min([length or config["max_position_embeddings"], *lengths])
        if ends and length == config["max_position_embeddings"]:
            return own
        folder = Path(self._folder.name, "model")
        folder.mkdir()
        for file in Path(own).iterdir():
            (folder / file.name).symlink_to(file)
        for name in ("config.json", "generation_config.json"):
            told = json.loads((folder / name).read_text())
            told |= {} if ends else {"eos_token_id": None}
            told |= {"max_position_embeddings": length} if name == "config.json" else {}
            (folder / name).unlink()
            (folder / name).write_text(json.dumps(told))
        return str(folder)

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(60)
        except subprocess.TimeoutExpired:
            self.proc.kill()
        self._folder.cleanup()

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(each.strip("/") for each in parts)

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._how(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._how(options))

    def _how(self, options: dict[str, Any]) -> dict[str, Any]:
        """What a client is made with."""
        usual = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}
        return usual | options


def long_key(key: str) -> str:
    """Return what stands for a key of a test: here one has 8 characters at least."""
    return key if len(key) >= 8 else key.ljust(8, "-")


def key_of(options: list[str]) -> dict[str, str]:
    """Return the key of a server's options as its environment has it."""
    return {"VLLM_API_KEY": options[options.index("--api-key") + 1]} if "--api-key" in options else {}


def with_long_key(headers: Any) -> None:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if key:
        headers["Authorization"] = f"{scheme} {long_key(key)}"


def multi_gpu_only(*_: Any, **__: Any) -> Any:
    return pytest.mark.skip("it needs several GPUs")


def requires_fp8(test: Any) -> Any:
    return pytest.mark.skip("it needs fp8")(test)


# ---------------------------------------------------------------- models and adapters by name


def stand_in() -> None:
    """Have what tests load by a hub's name be the model and the adapter that are here."""
    import huggingface_hub
    import vllm.tokenizers
    from transformers import AutoTokenizer

    def tokenizer(*_: Any, **__: Any) -> Any:
        return AutoTokenizer.from_pretrained(MODEL, chat_template=Path(os.environ["COMPAT_TEMPLATE"]).read_text())

    def snapshot(*_: Any, **__: Any) -> str:  # the hub is asked for adapters alone
        return ADAPTER

    vllm.tokenizers.get_tokenizer = tokenizer
    huggingface_hub.HfApi.snapshot_download = snapshot


@functools.cache
def random_model(width: int) -> tempfile.TemporaryDirectory[str]:
    """Make a checkpoint with the model's tokens, and vectors of so many numbers. Its weights are random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tempfile.TemporaryDirectory()
    folder = Path(made.name)
    for file in Path(MODEL).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128, "head_dim": 64}
    changes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, **heads}
    config = AutoConfig.from_pretrained(MODEL, **changes)
    (folder / "config.json").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return made


@functools.cache
def classifier() -> tempfile.TemporaryDirectory[str]:
    """Make an adapter with a head of two classes. Its weights are random."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    made = tempfile.TemporaryDirectory()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)
    get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])).save_pretrained(
        made.name
    )
    return made


def is_in(files: tuple[str, ...]) -> bool:
    """Whether the test that runs is in one of these files."""
    return any(each in os.environ.get("PYTEST_CURRENT_TEST", "") for each in files)


def checkpoint_of_test() -> str:
    """Return the model for the test that runs."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    widths = [width for file, width in WIDTHS.items() if file in test]
    return random_model(widths[0]).name if widths else MODEL


class HfRunner:
    """What tests compare vectors with: transformers, alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = checkpoint_of_test()
        self._model, self._tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def __enter__(self) -> "HfRunner":
        return self

    def __exit__(self, *_: object) -> None:
        """It is garbage."""

    def encode(self, texts: list[str], *_: Any, **__: Any) -> list[list[float]]:
        import torch

        with torch.no_grad():
            made = [
                self._model(**self._tokenizer(each, return_tensors="pt")).last_hidden_state[0, -1] for each in texts
            ]
        return [torch.nn.functional.normalize(each, dim=0).tolist() for each in made]


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Have tests know the tokens of their text as the model here has them."""
    for module in {item.module for item in items}:
        if hasattr(module, "input_tokens") and hasattr(module, "input_text"):
            from transformers import AutoTokenizer

            module.input_tokens[:] = AutoTokenizer.from_pretrained(MODEL)(module.input_text).input_ids


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return ADAPTER


opt125_lora_files = zephyr_lora_files = qwen3_lora_files


# ---------------------------------------------------------------- what was refused


def noted(status: int, content: bytes) -> None:
    if status >= 400:
        try:
            told = json.loads(content)["error"]
        except (ValueError, LookupError, TypeError):
            told = content[:300].decode(errors="replace")
        refused.append((status, told))


def watch() -> None:
    """Note the answers that clients get."""
    import requests

    for name in ("httpx", "httpx2"):  # openai-python's is the second one
        if importlib.util.find_spec(name) is not None:
            watch_httpx(importlib.import_module(name))
    of_requests = requests.Session.send

    @functools.wraps(of_requests)
    def by_requests(self: Any, request: Any, *given: Any, **named: Any) -> Any:
        with_long_key(request.headers)
        calls.append(str(request.url))  # also where no answer comes
        answer = of_requests(self, request, *given, **named)
        noted(answer.status_code, answer.content if answer.status_code >= 400 else b"")
        return answer

    requests.Session.send = by_requests  # type: ignore[method-assign]


def watch_httpx(httpx: Any) -> None:
    sync, later = httpx.Client.send, httpx.AsyncClient.send

    @functools.wraps(sync)
    def by_httpx(self: Any, request: Any, *given: Any, **named: Any) -> Any:
        with_long_key(request.headers)
        calls.append(str(request.url))
        answer = sync(self, request, *given, **named)
        noted(answer.status_code, answer.read() if answer.status_code >= 400 else b"")
        return answer

    @functools.wraps(later)
    async def by_async(self: Any, request: Any, *given: Any, **named: Any) -> Any:
        with_long_key(request.headers)
        calls.append(str(request.url))
        answer = await later(self, request, *given, **named)
        noted(answer.status_code, await answer.aread() if answer.status_code >= 400 else b"")
        return answer

    httpx.Client.send, httpx.AsyncClient.send = by_httpx, by_async


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "setup":
        refused.clear()
        calls.clear()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        told = {
            "test": item.nodeid, "outcome": report.outcome, "refused": refused[-3:], "calls": len(calls),
            "why": "" if report.outcome == "passed" else report.longreprtext[-1500:],
        }  # fmt: skip
        with Path(RESULTS).open("a") as results:
            results.write(json.dumps(told) + "\n")
