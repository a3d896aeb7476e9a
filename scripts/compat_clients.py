"""Clients of OpenAI's API, unmodified, against `symbiosis serve` on a CPU: all that each of them can ask for.

    python scripts/compat_clients.py                     # all: a quarter of an hour on two cores, after gigabytes of packages
    python scripts/compat_clients.py --only openai litellm

pip installs each client into an environment of its own below `--cache`, with nothing of Symbiosis in it. The model is SmolLM2-135M-Instruct, from a
package on PyPI, as float32, with a chat template that shows tools. What is asked for is in scripts/_clients.py. lm-eval scores a task of its own and
makes texts, with the model and with an adapter of it, by this server and by transformers and PEFT: both must agree. schemathesis asks for what /openapi.json says.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _processes import progress, server
from _programs import LM_EVAL, Place, write_data
from compat_programs import Environment, adapter, checkpoints, installed, with_model

from symbiosis.base.reporting import Report, print_table

ROOT = Path(__file__).resolve().parent.parent
NAME, LORA = "smollm2", "lora"
LIMIT_S = 900.0
PACKAGES = {
    "openai": ("openai==3.57.0",),
    "litellm": ("litellm",),
    "langchain": ("langchain-openai",),
    "instructor": ("instructor",),
    "agents": ("openai-agents",),
    "schemathesis": ("schemathesis",),
}
CLOSE = 1e-3  # log probabilities, relative
TEMPLATE = (  # ChatML with tools, as hermes and Qwen write them
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "You may call functions within <tools></tools>:\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    '{% endfor %}\n</tools>\nFor a call write <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def environment(name: str, cache: Path) -> Environment:
    """That of a client, which is made once for each list of packages."""
    packages = PACKAGES[name]
    folder = cache / f"client-{'-'.join(packages).replace('==', '-')}"
    return Environment.filled(folder, " ".join(packages), lambda made: made.pip(*packages))


def served(model: Path | str, folder: Path, *more: str) -> AbstractContextManager[str]:
    """`symbiosis serve MODEL` with more options, which calls tools; the URL of its API."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = [
        "--served-model-name",
        NAME,
        "--chat-template",
        str(folder / "chat.jinja"),
        "--tool-parser",
        "hermes",
        *more,
    ]
    return server(folder, str(model), *options)


def asked(client: Environment, name: str, url: str) -> dict[str, str]:
    """What each check of a client said; nothing if it holds."""
    words = [client.python, str(ROOT / "scripts" / "_clients.py"), name, url, NAME]
    done = subprocess.run(words, env=quiet(), text=True, capture_output=True, timeout=LIMIT_S)
    if done.returncode:
        return {"started": done.stderr[-2000:]}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if any(found.values()):
        print(done.stderr[-8000:], file=sys.stderr)
    return found


def quiet() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SYMBIOSIS", "PYTHON", "OPENAI"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def described(client: Environment, folder: Path) -> dict[str, str]:
    """Whether the server does as its /openapi.json says, to some thousand requests that are made of it. That requests which it allows may be refused for
    what they mean is no error: no schema says which models there are."""
    with served("demo", folder) as url:
        words = [str(client.folder / "bin" / "schemathesis"), "run", f"{url.removesuffix('/v1')}/openapi.json"]
        words += ["--no-color", "--continue-on-failure", "--max-examples", "5", "--phases", "coverage,fuzzing"]
        words += [
            "--exclude-checks",
            "positive_data_acceptance",
            "--exclude-path",
            "/metrics",
            "--request-timeout",
            "60",
        ]
        done = subprocess.run(words, cwd=folder, env=quiet(), text=True, capture_output=True, timeout=LIMIT_S)
    return {"as described": done.stdout[-600:] + done.stderr[-300:] if done.returncode else ""}


# ---------------------------------------------------------------- lm-eval


@dataclass
class Evaluation:
    """lm-eval, by transformers and by a server."""

    tool: Environment
    model: Path
    folder: Path

    def by(self, kind: str, name: str, arguments: str) -> dict[str, Any]:
        """Its answers to both tasks, by the question, and its scores, by the task."""
        write_data(self.folder / "data")
        out = self.folder / f"{kind}-{name}"
        place = Place(self.model, self.folder / "data", out=str(out))
        words = LM_EVAL.jobs["evaluation"](place, self.folder)
        text = {
            "task": "text", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(place.data / "choice" / "train.jsonl")}},
            "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}, "metric_list": [{"metric": "exact_match"}],
        }  # fmt: skip
        (self.folder / "text.yaml").write_text(json.dumps(text))
        words[words.index("choice")] = "choice,text"
        words[words.index("--model") + 1], words[words.index("--model_args") + 1] = kind, arguments
        program = str(self.tool.folder / "bin" / words[0])
        done = subprocess.run(
            [program, *words[1:]], cwd=self.folder, env=quiet(), text=True, capture_output=True, timeout=LIMIT_S
        )
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-5000:])
        told = {}
        for file in sorted(out.rglob("samples_*.jsonl")):
            for line in file.read_text().splitlines():
                sample = json.loads(line)
                told[f"{file.name.split('_')[1]} {sample['doc_id']}"] = sample["resps"]
        (file,) = out.rglob("results_*.json")
        told["scores"] = json.loads(file.read_text())["results"]
        return told


def numbers(answers: Any) -> list[float]:
    if isinstance(answers, list | tuple):
        return [number for each in answers for number in numbers(each)]
    try:
        return [float(answers)]
    except (TypeError, ValueError):
        return []


def evaluated(tool: Environment, model: Path, lora: Path, folder: Path, url: str) -> dict[str, str]:
    """Compare lm-eval's log probabilities, texts and scores, with the model and with an adapter."""
    job, told, found = Evaluation(tool, model, folder), dict[str, str](), dict[str, Any]()
    for name, more in ((NAME, ""), (LORA, f",peft={lora}")):
        alone = found[name] = job.by("hf", name, f"pretrained={model},dtype=float32{more}")
        served_as = (
            f"model={name},base_url={url}/completions,tokenizer={model},num_concurrent=8,tokenized_requests=True"
        )
        ours = job.by("local-completions", name, served_as)
        told[f"{name}: questions"] = "" if alone.keys() == ours.keys() else f"{len(alone)} and {len(ours)}"
        for kind in ("choice", "text", "scores"):
            told[f"{name}: {kind}"] = _differences(alone, ours, kind)
    told["the adapter says something else"] = "" if _differences(found[NAME], found[LORA], "choice") else "it does not"
    return told


def _differences(alone: dict[str, Any], ours: dict[str, Any], kind: str) -> str:
    by_text = kind != "choice"
    names = [name for name in alone if name.startswith(kind)]
    wrong = [name for name in names if not _agree(alone[name], ours.get(name), by_text)]
    return f"{len(wrong)} differ: {alone[wrong[0]]} and {ours.get(wrong[0])}"[:500] if wrong else ""


def _agree(one: Any, other: Any, by_text: bool) -> bool:
    if by_text:
        return bool(one == other)
    pairs = zip(numbers(one), numbers(other), strict=False)
    return len(numbers(one)) == len(numbers(other)) and all(abs(a - b) <= CLOSE * max(1.0, abs(a)) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PACKAGES, "lm_eval"], default=[*PACKAGES, "lm_eval"])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "symbiosis" / "programs")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    report, rows = Report("compat_clients"), []
    tool = with_model(options.cache)
    model, _ = checkpoints(tool, options.cache)
    lora = adapter(tool, model, options.cache / "client-adapter")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(model, Path(folder), "--lora-modules", f"{LORA}={lora}") as url,
    ):
        for name in options.only:
            progress(name)
            if name == "lm_eval":
                found = evaluated(installed("lm_eval", LM_EVAL, options.cache), model, lora, Path(folder), url)
            elif name == "schemathesis":
                found = described(environment(name, options.cache), Path(folder))
            else:
                found = asked(environment(name, options.cache), name, url)
            rows += [(name, check, why or "ok") for check, why in found.items()]
            report.bar(f"{name}: checks that fail, of {len(found)}", sum(map(bool, found.values())), "<=", 0)
    print_table(("client", "check", "result"), rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
