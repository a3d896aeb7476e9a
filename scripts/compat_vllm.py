"""vLLM's own tests of its OpenAI server, unmodified but for their fixtures, against `symbiosis serve` on a CPU.

    python scripts/compat_vllm.py                    # all that apply to a served model: half an hour on two cores
    python scripts/compat_vllm.py --only completion/test_completion.py
    python scripts/compat_vllm.py --sdist vllm-0.33.0.tar.gz

The tests come from vLLM's sdist on PyPI, which is not built: their own imports are of its plain Python. The model is SmolLM2-135M-Instruct, from a
package on PyPI, under the name that each test has for its own, with a chat template that shows tools. scripts/_vllm_fixtures.py stands for their
server. A test that fails is `refused`, where the server has said by the field's name that it has not got something; one that is named in DIFFERENT
fails for the reason given there; all others are wrong, and there may be none.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _processes import progress
from compat_clients import TEMPLATE as WITH_TOOLS
from compat_programs import Environment, adapter, borrow, checkpoints, with_model

from symbiosis.base.procs import python
from symbiosis.base.reporting import Report, print_table

VERSION = "0.33.0"
INDEX = "https://pypi.org/simple/vllm/"
NEEDS = (  # of what vLLM's requirements name, what these tests come to import
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "fastapi", "oss-harmony", "pillow", "py-cpuinfo", "pybase64", "regex", "uvloop",
    "pycountry", "pydantic-extra-types", "tiktoken", "pytest", "pytest-asyncio", "pytest-timeout", "jsonschema", "tblib", "requests", "openai", "httpx",
)  # fmt: skip
ALONE = (
    "xgrammar==0.2.8",
    "apache-tvm-ffi",
    "partial-json-parser",
    "mistral_common",
)  # without torch, which they have from here
FOLDER = "tests/entrypoints"
FILES = (  # that are of a served model of text
    "openai/completion/test_completion.py", "openai/completion/test_prompt_validation.py",
    "openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_completion.py", "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py", "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_logprob_token_ids.py", "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_batched_chat_completions.py", "pooling/classify/test_online.py",
    "serve/instrumentator/test_basic.py",
    "openai/models/test_models.py", "openai/responses/test_simple.py", "openai/test_chunked_prompt.py", "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py", "serve/tokenize/test_tokenization.py", "serve/lora/test_lora_adapters.py",
    "serve/middleware/test_optional_middleware.py", "pooling/embed/test_online.py", "pooling/scoring/test_bi_encoder_online.py", "pooling/basic/test_truncation.py",
)  # fmt: skip
SAYS_SO = re.compile(  # what a refusal says of the field or feature that it names
    r"unrecognized request argument: (?P<field>\S+)|^(?P<value>[\w.]+)(?: '\S*')? is not supported|^\w+ (?P<path>/\S*): no such path"
    r"|chat template (?:reads|shows) no '?(?P<template>\w+)|^model has no (?P<head>classification head)"
    r"|an item is a message, .* and not '(?P<item>\w+)'|this server reads no (?P<media>images or sound)"
    r"|^(?P<dimensions>dimensions) must be \d+: the model was not trained for shorter vectors"
)
DIFFERENT = {
    "openai/completion/test_completion.py::test_completion_stream_options": "continuous_usage_stats without include_usage asks for nothing, and is refused",
    "openai/chat_completion/test_chat_echo.py::test_prompt_logprobs": "-1, the whole vocabulary, is a server's option of vLLM's; here 20 are told at most",
    "openai/chat_completion/test_chat_echo.py::test_top_logprobs": "-1, the whole vocabulary, is a server's option of vLLM's; here 20 are told at most",
    "openai/chat_completion/test_chat.py::test_single_chat_session": "it counts the tokens of its own model's tokenizer",
    "openai/chat_completion/test_chat.py::test_more_than_one_prompt_logprobs_chat": "a token of the prompt is its own model's likeliest one",
    "openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat": "its own model chooses another language when it is asked again",
    "openai/chat_completion/test_chat.py::test_structured_outputs_json_chat": "its own model ends a string within 1,000 tokens",
    "openai/chat_completion/test_chat.py::test_response_format_json_object": "its own model knows what 1 and 1 are, and how that is called",
    "openai/chat_completion/test_chat.py::test_complex_message_content": "its own model answers with a number and nothing else",
    "openai/chat_completion/test_chat.py::test_long_seed": "a number that is too large is told by its bound, and not in pydantic's words",
    "openai/chat_completion/test_chat.py::test_response_format_json_schema": "its own model knows what 1 and 1 are, and ends a number",
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use[plain-True-": "what a model thinks is content here, and no field of its own",
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use[watermarked-True-": "what a model thinks is content here, and no field of its own",
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use[plain-False-auto-": "its own model calls a tool where it may",
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use[watermarked-False-auto-": "its own model calls a tool where it may",
    "openai/chat_completion/test_completion_with_function_calling.py::test_named_tool_use": "its own model ends a string within 1,000 tokens",
    "openai/chat_completion/test_chat_completion.py::test_per_request_metrics": "figures in each answer are a server's option of vLLM's; here /metrics and the log have them",
    "pooling/basic/test_truncation.py::test_bigger_truncation_size": "errors have OpenAI's types, and not vLLM's",
    "pooling/embed/test_online.py::test_params_not_supported": "a value that is not known is told by those that are, and not in pydantic's words",
    "pooling/embed/test_online.py::test_chat_request": "it has a chat template of its own, and counts the tokens of its own model's tokenizer",
    "serve/instrumentator/test_basic.py::test_show_version": "the version is that of this server",
    "pooling/classify/test_online.py::test_basic": "a classifier is an adapter here, and listed behind its base",
    "pooling/classify/test_online.py::test_chat_request": "it has a chat template of its own, and counts the tokens of its own model's tokenizer",
    "pooling/classify/test_online.py::test_completion_request_batched": "an adapter of PEFT's has no names for its classes",
    "pooling/classify/test_online.py::test_score": "what there is no score of is refused by the model's name, 400, and not as a path",
    "pooling/classify/test_online.py::test_rerank": "what there is no score of is refused by the model's name, 400, and not as a path",
    "serve/middleware/test_optional_middleware.py::test_no_request_id_header": "each answer tells the id of its request",
    "openai/models/test_models.py": "no path of the server's is shown as the root of an adapter; here that is its name",
    "serve/lora/test_lora_adapters.py::test_static_lora_lineage": "no path of the server's is shown as the root of an adapter; here that is its name",
    "serve/lora/test_lora_adapters.py::test_dynamic_lora_lineage": "no path of the server's is shown as the root of an adapter; here that is its name",
    "serve/lora/test_lora_adapters.py::test_load_lora_adapter_with_same_name_replaces_inplace": "its adapters have learnt to meow and to woof; ours has random numbers",
    "serve/lora/test_lora_adapters.py::test_dynamic_lora_invalid_files": "what is wrong with an adapter that a client names is the client's error, 400, and not 500",
    "serve/lora/test_lora_adapters.py::test_dynamic_lora_badrequests": "what is wrong with an adapter that a client names is the client's error, 400, and not 500",
    "serve/lora/test_lora_adapters.py::test_loading_invalid_adapters_does_not_break_others": "what is wrong with an adapter that a client names is the client's error, 400, and not 500",
}
TEMPLATE = WITH_TOOLS + (  # and does not think where that is asked for, as Qwen3's
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
NO_SERVER = "'symbiosis', 'serve'"  # in what a fixture says whose server has not started
LIMIT_S = 1200.0  # of a file


def sdist(cache: Path) -> Path:
    """vLLM's, as PyPI has it. pip would build its metadata, for which it needs CUDA."""
    name = f"vllm-{VERSION}.tar.gz"
    if not (file := cache / name).exists():
        progress(f"fetching {name}")
        asked = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            (told,) = [each for each in json.load(answer)["files"] if each["filename"] == name]
        with urllib.request.urlopen(told["url"], timeout=600) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != told["hashes"]["sha256"]:
            raise SystemExit(f"{name} is not what PyPI says that it is")
        file.write_bytes(data)
    return file


def source(file: Path, cache: Path) -> Path:
    """Its tests and its Python, with our fixtures."""
    folder = cache / f"vllm-{VERSION}"
    if not folder.exists():
        with tarfile.open(file) as archive:
            wanted = [each for each in archive if each.name.split("/")[1:2] in (["vllm"], ["tests"], ["requirements"])]
            archive.extractall(cache, members=wanted, filter="data")
    fixtures = Path(__file__).with_name("_vllm_fixtures.py")
    shutil.copy(fixtures, folder / "tests" / "utils.py")
    own = "from tests.utils import *\nfrom tests.utils import pytest_collection_modifyitems, pytest_runtest_makereport, stand_in, watch\n\nstand_in()\nwatch()\n"
    (folder / "tests" / "conftest.py").write_text(own)
    return folder


def environment(cache: Path) -> Environment:
    """What vLLM's Python and its tests import: torch and transformers are those of this environment."""

    def fill(made: Environment) -> None:
        borrow(made)
        made.pip(*NEEDS)
        made.pip("--no-deps", *ALONE)

    listed = hashlib.sha256(" ".join((*NEEDS, *ALONE)).encode()).hexdigest()[:8]
    return Environment.filled(cache / f"vllm-{VERSION}-tests-{listed}", "what vLLM's tests import", fill)


def run(vllm: Environment, folder: Path, files: Sequence[str], **paths: Path) -> list[dict[str, Any]]:
    """Run the tests; what each of them came to."""
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    own = {f"COMPAT_{name.upper()}": str(path) for name, path in {**paths, "results": results}.items()}
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(folder),
        "COMPAT_PYTHON": python()[0],
        "VLLM_TARGET_DEVICE": "cpu",
    }
    words = [vllm.python, "-m", "pytest", "-q", "-rN", "--tb=short", "-p", "no:cacheprovider", "--timeout", "300"]
    words += ["--basetemp", str(paths["adapters"] / "tests")]  # where tests change adapters, and load them
    for file in files:
        progress(file)
        given = [*words, "--asyncio-mode=auto", f"{FOLDER}/{file}"]
        try:
            done = subprocess.run(
                given, cwd=folder, env={**os.environ, **quiet, **own}, text=True, capture_output=True, timeout=LIMIT_S
            )
            why = "" if done.returncode in (0, 1) else done.stdout[-1500:] + done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            why = f"not done within {LIMIT_S:g} s"
        if why:
            print(why, file=sys.stderr)
            failed = {"test": f"{FOLDER}/{file}", "outcome": "failed", "refused": [], "calls": 1, "why": why}
            with results.open("a") as told:
                told.write(json.dumps(failed) + "\n")
    return [json.loads(line) for line in results.read_text().splitlines()]


def named(error: Any) -> str | None:
    """Return the field or feature that an error says there is not; None if it says something else.

    >>> named({"message": "suffix is not supported, but for \\"\\": the model completes at the end only"}), named("at most one only")
    ('suffix', None)
    """
    found = SAYS_SO.search(error.get("message", "") if isinstance(error, dict) else str(error))
    return None if found is None else found[found.lastgroup or 0]


def verdict(told: dict[str, Any]) -> tuple[str, str]:
    """What a test says of the server, and why."""
    name = told["test"].removeprefix(f"{FOLDER}/")
    if told["outcome"] == "passed":
        return ("passed", "") if told["calls"] else ("of vLLM itself", "")
    if told["outcome"] == "skipped" or not (told["calls"] or NO_SERVER in told["why"]):
        return "of vLLM itself", ""
    for part, why in DIFFERENT.items():
        if name.startswith(part):
            return "different", why
    for _, error in reversed(told["refused"]):
        if (what := named(error)) is not None:
            return "refused", what
    return "wrong", told["why"].splitlines()[-1][:160] if told["why"] else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="files below tests/entrypoints, or ends of their names")
    parser.add_argument("--sdist", type=Path, help="vLLM's, where it lies already")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "symbiosis" / "programs")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    files = [each for each in FILES if not options.only or any(each.endswith(end) for end in options.only)]
    folder = source(options.sdist or sdist(options.cache), options.cache)
    vllm, tool = environment(options.cache), with_model(options.cache)
    model, _ = checkpoints(tool, options.cache)
    template = options.cache / "tools.jinja"
    template.write_text(TEMPLATE)
    adapters = options.cache / "vllm-adapters"
    lora = adapter(tool, model, adapters / "made" / "smollm2-lora")  # which is not listed there, and may be loaded
    found = run(vllm, folder, files, model=model, adapter=lora, adapters=adapters, template=template)
    verdicts = [(*verdict(told), told["test"].removeprefix(f"{FOLDER}/")) for told in found]
    print_table(
        ("verdict", "why", "test"), sorted(each for each in verdicts if each[0] not in ("passed", "of vLLM itself"))
    )
    report, counts = Report("compat_vllm"), Counter(each[0] for each in verdicts)
    report.figure("vllm", VERSION)
    for kind in ("passed", "refused", "different", "of vLLM itself"):
        report.figure(kind, counts[kind])
    report.figure("refused by", dict(Counter(why for kind, why, _ in verdicts if kind == "refused")))
    report.bar("wrong", counts["wrong"], "<=", 0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
