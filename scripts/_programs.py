"""The programs that scripts/compat_programs.py runs: what pip installs of each, and commands as a user would write them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OWN = Path(__file__).with_name("programs")  # small ones: plain Trainer, accelerate, Lightning
STEPS = 4
QLORA = "qlora"  # the jobs that pack the model as nf4, as their executor does
BITSANDBYTES = "bitsandbytes==0.50.2"
HALF = STEPS // 2  # where `resume` goes on
TEXT = (
    "the sky is blue because light of short waves is scattered more than of long ones and a cat sat near an old river"
)


@dataclass(frozen=True)
class Place:
    """Where a command runs: it writes to `out`, below its working directory."""

    checkpoint: Path
    data: Path
    out: str = "out"
    seed: int = 1
    steps: int = STEPS
    resume: str = ""  # a checkpoint


Command = Callable[[Place, Path], list[str]]  # the folder takes files that a program is told of


@dataclass(frozen=True)
class Program:
    """One that can be installed.

    Args:
        packages: What pip installs, with versions.
        jobs: Commands by name; the first one is also started a second time, and measured.
        without: Packages that need a GPU, or a service, and that none of the jobs imports.
    """

    packages: tuple[str, ...]
    jobs: Mapping[str, Command]
    without: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- data


def write_data(folder: Path) -> None:
    """Small texts, for each kind of training."""
    pick, words = random.Random(1), TEXT.split()

    def text(count: int) -> str:
        return " ".join(pick.choice(words) for _ in range(count))

    def rows(name: str, made: Callable[[int], dict[str, object]]) -> None:
        file = folder / name / "train.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(made(number)) + "\n" for number in range(32)))

    def told(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(texts)]

    def conversation(**more: object) -> dict[str, object]:
        return {"messages": told(f"{text(8)}?", f"{text(12)}."), **more}

    rows("sft", lambda _: conversation())
    rows("dpo", lambda _: {"prompt": f"{text(8)}?", "chosen": f" {text(10)}", "rejected": f" {text(10)}"})
    rows("kto", lambda n: {"prompt": f"{text(8)}?", "completion": f" {text(10)}", "label": n % 2 == 0})
    rows("grpo", lambda _: {"prompt": f"{text(8)}?"})
    rows("text", lambda _: {"text": f"{text(20)}."})
    rows("choice", lambda n: {"question": text(8), "choices": [text(2), text(3)], "answer": n % 2})
    rows(
        "ranked",
        lambda _: {"messages": told(f"{text(8)}?"), "chosen": told("", text(8))[1], "rejected": told("", text(9))[1]},
    )
    rows("swift_dpo", lambda _: {"messages": told(f"{text(8)}?", text(10)), "rejected_response": text(9)})
    rows("labelled", lambda n: conversation(label=n % 2 == 0))


# ---------------------------------------------------------------- how options are told


def _flags(options: Mapping[str, object]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def _written(folder: Path, program: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """A command whose options are in a file. JSON is YAML, too."""
    (folder / "job.yaml").write_text(json.dumps(options, indent=1))
    return [*program, "job.yaml"]


# ---------------------------------------------------------------- TRL

REWARDS = "def vowels(completions, **_):\n    return [float(sum(letter in 'aeiou' for letter in text)) for text in completions]\n"


def _trl(method: str, *more: str, processes: int = 1) -> Command:
    def command(place: Place, folder: Path) -> list[str]:
        (folder / "rewards.py").write_text(REWARDS)
        data = "dpo" if method == "reward" else method
        options = {
            "model_name_or_path": place.checkpoint, "dataset_name": place.data / data, "output_dir": place.out,
            "max_steps": place.steps, "seed": place.seed, "save_steps": 1 if place.steps > STEPS else HALF,
            "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
            "dtype": "float32", "bf16": False, "gradient_checkpointing": False, "lora_r": 4, "learning_rate": 1e-3,
        }  # fmt: skip
        words = _flags(options)
        if place.resume:
            words += ["--resume_from_checkpoint", place.resume]
        words += ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", *more]
        if processes == 1:
            return ["trl", method, *words]
        module = f"trl.scripts.{method}"
        return ["torchrun", "--standalone", "--nproc-per-node", str(processes), "-m", module, *words, "--use_cpu"]

    return command


TRL = Program(
    packages=("trl==1.16.0", "transformers==5.24.0", "peft==0.21.2", BITSANDBYTES),
    jobs={
        "sft": _trl("sft", "--max_length", "64"),
        QLORA: _trl("sft", "--max_length", "64", "--load_in_4bit", "--use_bnb_nested_quant"),
        "dpo": _trl("dpo", "--max_length", "64"),
        "kto": _trl("kto", "--max_length", "64"),
        "grpo": _trl("grpo", "--reward_funcs", "rewards.vowels", "--num_generations", "2", "--max_completion_length", "8", "--beta", "0.1"),
        "reward": _trl("reward", "--lora_task_type", "SEQ_CLS", "--max_length", "64"),
        "resume": _trl("sft", "--max_length", "64"),
        "two processes": _trl("sft", "--max_length", "64", processes=2),
    },
)  # fmt: skip


# ---------------------------------------------------------------- plain ones


def _own(name: str, *launcher: str) -> Command:
    def command(place: Place, folder: Path) -> list[str]:
        told = [str(place.checkpoint), str(place.data / "text" / "train.jsonl"), place.out, str(place.steps)]
        return [*(launcher or ("python",)), str(OWN / name), *told]

    return command


PLAIN = ("transformers==5.24.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.2.0")
LAUNCH = ("accelerate", "launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
TRAINER = Program(PLAIN, {"sft": _own("trainer.py")})
ACCELERATE = Program(
    PLAIN,
    {
        "sft": _own("accelerate_loop.py", *LAUNCH, "--num_processes", "1"),
        "two processes": _own("accelerate_loop.py", *LAUNCH, "--num_processes", "2"),
    },
)
LIGHTNING = Program((*PLAIN, "lightning==2.6.6"), {"sft": _own("lightning_fit.py")})


# ---------------------------------------------------------------- LLaMA-Factory

SHAREGPT = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def _llamafactory(stage: str, data: str, **more: object) -> Command:
    def command(place: Place, folder: Path) -> list[str]:
        columns: dict[str, str] = {"messages": "messages"}
        if data == "ranked":
            columns |= {"chosen": "chosen", "rejected": "rejected"}
        if data == "labelled":
            columns |= {"kto_tag": "label"}
        told = {"file_name": str(place.data / data / "train.jsonl"), "formatting": "sharegpt", "tags": SHAREGPT}
        told |= {"columns": columns, "ranking": data == "ranked"}
        (folder / "dataset_info.json").write_text(json.dumps({data: told}))
        options = {
            "model_name_or_path": str(place.checkpoint), "stage": stage, "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
            "lora_target": "q_proj,v_proj", "dataset": data, "dataset_dir": ".", "template": "default", "cutoff_len": 64,
            "output_dir": place.out, "overwrite_cache": True, "per_device_train_batch_size": 2, "max_steps": place.steps,
            "logging_steps": 1, "save_steps": HALF, "learning_rate": 1e-3, "seed": place.seed, "report_to": "none",
            "resume_from_checkpoint": place.resume or None, "infer_dtype": "float32", "disable_gradient_checkpointing": True, "preprocessing_num_workers": 1, **more,
        }  # fmt: skip
        return _written(folder, ("llamafactory-cli", "train"), options)

    return command


LLAMAFACTORY = Program(
    packages=("llamafactory==0.9.5", "transformers==5.6.0", "peft==0.18.1", BITSANDBYTES),
    environment={"DISABLE_VERSION_CHECK": "0"},
    jobs={
        "sft": _llamafactory("sft", "sft"),
        QLORA: _llamafactory("sft", "sft", quantization_bit=4, quantization_method="bnb", double_quantization=True),
        "dpo": _llamafactory("dpo", "ranked"),
        "kto": _llamafactory("kto", "labelled"),
        "reward": _llamafactory("rm", "ranked"),
        "resume": _llamafactory("sft", "sft"),
    },
)


# ---------------------------------------------------------------- axolotl


# axolotl draws a new adapter before it sets its seed, so that no two runs of it are alike. A plugin is its own way to change that.
SEEDED = """from axolotl.integrations.base import BasePlugin
from transformers import set_seed


class Seeded(BasePlugin):
    def pre_model_load(self, cfg):
        set_seed(cfg.seed)
"""


def _axolotl(data: str, **more: object) -> Command:
    def command(place: Place, folder: Path) -> list[str]:
        (folder / "seeded.py").write_text(SEEDED)
        files = {"path": str(place.data / data / "train.jsonl"), "ds_type": "json"}
        options = {
            "base_model": str(place.checkpoint), "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"],
            "datasets": [{**files, "type": "chat_template"}], "dataset_prepared_path": "prepared", "output_dir": place.out,
            "sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": place.steps, "num_epochs": 1,
            "optimizer": "adamw_torch", "lr_scheduler": "cosine", "learning_rate": 1e-3, "logging_steps": 1, "save_steps": HALF,
            "bf16": False, "fp16": False, "tf32": False, "seed": place.seed, "flash_attention": False, "val_set_size": 0,
            "dataset_num_proc": 1, "special_tokens": {"pad_token": "<|im_end|>"}, "plugins": ["seeded.Seeded"], **more,
        }  # fmt: skip
        return _written(folder, ("axolotl", "train"), options)

    return command


AXOLOTL = Program(
    packages=("axolotl==0.19.0", "transformers==5.16.1", "peft==0.20.0"),
    jobs={"sft": _axolotl("sft")},
    environment={"AXOLOTL_DO_NOT_TRACK": "1"},
    without=frozenset(
        [
            "xformers",
            "torchao",
            "fla-core",
            "flash-linear-attention",
            "kernels",
            "modal",
            "gradio",
            "trackio",
            "s3fs",
            "gcsfs",
            "adlfs",
            "ocifs",
            "openenv-core",
        ]
    ),
)


# ---------------------------------------------------------------- ms-swift


def _swift(method: Sequence[str], data: str, *more: str) -> Command:
    def command(place: Place, folder: Path) -> list[str]:
        options = {
            "model": place.checkpoint, "model_type": "llama", "template": "chatml", "dataset": place.data / data / "train.jsonl",
            "output_dir": place.out, "add_version": False, "max_steps": place.steps, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1, "logging_steps": 1, "save_steps": HALF, "learning_rate": 1e-3, "lora_rank": 4,
            "target_modules": "q_proj", "torch_dtype": "float32", "bf16": False, "fp16": False, "max_length": 64, "seed": place.seed,
            "report_to": "none", "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0, "gradient_checkpointing": False,
        }  # fmt: skip
        return ["swift", *method, *_flags(options), *more]

    return command


SWIFT = Program(
    packages=("ms-swift==4.6.0", "transformers==5.19.0", "peft==0.20.0"),
    jobs={
        "sft": _swift(["sft"], "sft"),
        "dpo": _swift(["rlhf", "--rlhf_type", "dpo"], "swift_dpo"),
        "kto": _swift(["rlhf", "--rlhf_type", "kto"], "labelled"),
    },
)


# ---------------------------------------------------------------- lm-eval


def _lm_eval(place: Place, folder: Path) -> list[str]:
    task = {
        "task": "choice", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(place.data / "choice" / "train.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (folder / "choice.yaml").write_text(json.dumps(task, indent=1))
    model = f"pretrained={place.checkpoint},dtype=float32"
    return [
        *("lm_eval", "--model", "hf", "--model_args", model, "--tasks", "choice", "--include_path", "."),
        *("--device", "cpu", "--batch_size", "2", "--limit", "8", "--output_path", place.out, "--log_samples"),
    ]


LM_EVAL = Program(
    packages=("lm_eval==0.4.13", "transformers==5.24.0", "peft==0.21.2", "tenacity"),  # the last one: for servers
    jobs={"evaluation": _lm_eval},
)

PROGRAMS: dict[str, Program] = {
    "trl": TRL,
    "trainer": TRAINER,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "llamafactory": LLAMAFACTORY,
    "axolotl": AXOLOTL,
    "swift": SWIFT,
    "lm_eval": LM_EVAL,
}
