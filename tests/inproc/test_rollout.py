"""TRL's trainers sample by a serving engine: what they are given is what the trainer itself would say, by the adapter of its present step."""

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn

import symbiosis
from symbiosis.errors import ConfigError, OutdatedPackage
from symbiosis.serving import Engine
from symbiosis.serving.request import Sampling
from symbiosis.training.rollout import Rollout, sampling_of
from symbiosis.training.rollout_worker import _reading_plain_answers
from tests.inproc.test_publish import change

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl", minversion="1.16")
pytestmark = pytest.mark.filterwarnings("ignore")

DEMO = Path(symbiosis.__file__).parent / "demo_model"
SCRIPTS = Path(__file__).parents[2] / "scripts"
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "DoRA and saved": lambda: LoraConfig(
        r=4, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
}
GREEDY = {"top_k": 1}


def vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(DEMO)
    made.pad_token = made.pad_token or made.eos_token
    return made


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with symbiosis.Executor("demo") as executor:
        yield executor.endpoint


@pytest.fixture
def parts(endpoint: str) -> Iterator[tuple[nn.Module, Engine]]:
    """A wrapped model to train, and an engine, over one executor."""
    with Engine(endpoint, memory=1 << 24) as engine:
        yield symbiosis.from_executor(endpoint), engine


def data(n: int = 8) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"def function_{number}(" for number in range(n)]})


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.01, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "seed": 3,
        "gradient_checkpointing": False, **more,
    }  # fmt: skip


def grpo(model: Any, tokenizer: Any, folder: Path, kind: str = "LoRA", **more: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    own = {name: more.pop(name) for name in ("rollout_func", "tools", "train_dataset") if name in more}
    args = GRPOConfig(**options(folder, num_generations=2, max_completion_length=8, **more))
    words = {"train_dataset": data(), **own}
    return GRPOTrainer(
        model, reward_funcs=vowels, args=args, processing_class=tokenizer, peft_config=KINDS[kind](), **words
    )


def greedy_of(model: Any, prompt: list[int], count: int, ends: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=ends
        )
    return made[0, len(prompt) :].tolist()


def logs_of(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_grpo(kind: str, parts: tuple[nn.Module, Engine], tokenizer: Any, tmp_path: Path) -> None:
    """Each rollout is by the adapter of its step: what the sampler says of a token is what the trainer says of it."""
    if "DoRA" in kind:
        pytest.importorskip("peft", minversion="0.19", reason="DoRA of PEFT 0.18 reads the weights")
    model, engine = parts
    rollout, versions = symbiosis.rollout(engine), list[int]()

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = rollout(prompts, trainer)
        policy = trainer.accelerator.unwrap_model(trainer.model).eval()
        for prompt, completion in zip(made["prompt_ids"], made["completion_ids"], strict=True):
            assert completion == greedy_of(policy, prompt, 8, trainer.eos_token_ids)
        policy.train()
        versions.extend(made["model_version"])
        return made

    trainer = grpo(model, tokenizer, tmp_path, kind, rollout_func=watched, **GREEDY)
    trainer.train()
    assert len(set(versions)) == 2 and versions == sorted(versions)
    for name, most in (
        ("kl_sample_train_v1", 1e-5),
        ("kl_sample_train_v2", 1e-8),
        ("sampling_logp_difference/max", 1e-4),
    ):
        found = logs_of(trainer, f"sampling/{name}")
        assert len(found) == 2 and max(map(abs, found)) < most, name


def test_a_publish_that_is_withheld_is_seen(parts: tuple[nn.Module, Engine], tokenizer: Any, tmp_path: Path) -> None:
    """The logs tell that the sampler has fallen behind."""
    model, engine = parts
    rollout = symbiosis.rollout(engine)
    trainer = grpo(model, tokenizer, tmp_path, rollout_func=rollout, learning_rate=0.1)
    once = engine.publish
    engine.publish = lambda *args: rollout.version or once(*args)  # type: ignore[method-assign]
    trainer.train()
    first, second = logs_of(trainer, "sampling/sampling_logp_difference/mean")
    assert first < 1e-4 < 1e-3 < second


def test_temperature_and_seeds(parts: tuple[nn.Module, Engine], endpoint: str, tokenizer: Any, tmp_path: Path) -> None:
    """What is logged is at the temperature of both, and a run that is repeated draws the same."""
    engine = parts[1]
    rewards = []
    for number in range(2):
        model = symbiosis.from_executor(endpoint)
        trainer = grpo(
            model, tokenizer, tmp_path / str(number), rollout_func=symbiosis.rollout(engine), temperature=0.6
        )
        trainer.train()
        assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
        rewards.append(logs_of(trainer, "reward"))
    assert rewards[0] == rewards[1]


def test_rloo(parts: tuple[nn.Module, Engine], tokenizer: Any, tmp_path: Path) -> None:
    from trl import RLOOConfig, RLOOTrainer

    model, engine = parts
    args = RLOOConfig(**options(tmp_path, num_generations=2, max_completion_length=8))
    trainer = RLOOTrainer(
        model, reward_funcs=vowels, args=args, train_dataset=data(), processing_class=tokenizer, peft_config=KINDS["LoRA"]()
    )  # fmt: skip
    rollout = symbiosis.rollout(engine)
    assert rollout.attach(trainer) is trainer
    trainer.train()
    assert rollout.version and len(logs_of(trainer, "sampling/kl_sample_train_v1")) == 2
    assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_online_dpo(parts: tuple[nn.Module, Engine], tokenizer: Any, tmp_path: Path) -> None:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    model, engine = parts
    args = OnlineDPOConfig(**options(tmp_path, max_new_tokens=8, max_length=64))
    trainer = OnlineDPOTrainer(
        model, reward_funcs=vowels, args=args, train_dataset=data(), processing_class=tokenizer, peft_config=KINDS["LoRA"]()
    )  # fmt: skip
    symbiosis.rollout(engine).attach(trainer).train()
    found = logs_of(trainer, "sampling/sampling_logp_difference/max")
    assert len(found) == 2 and max(found) < 1e-4


def test_tools_go_on_by_the_engine(parts: tuple[nn.Module, Engine], tokenizer: Any, tmp_path: Path) -> None:
    """TRL's own loop asks for each further turn."""
    model, engine = parts
    rollout = symbiosis.rollout(engine)
    trainer = rollout.attach(grpo(model, tokenizer, tmp_path, **GREEDY))
    change(trainer.model)
    prompts = [[100, 101, 102], [70, 71]]
    ids, logprobs = trainer._generate_single_turn(prompts, None, {}, num_generations=1)
    assert ids == [greedy_of(trainer.model.eval(), prompt, 8, trainer.eos_token_ids) for prompt in prompts]
    assert [len(each) for each in logprobs] == [len(each) for each in ids]
    with pytest.raises(ConfigError, match="reads text only"):
        trainer._generate_single_turn(prompts, [["an image"]], {}, num_generations=1)


def test_what_it_cannot_do_is_refused(parts: tuple[nn.Module, Engine], tokenizer: Any) -> None:
    from transformers import GenerationConfig

    with pytest.raises(ConfigError, match="num_beams, which the engine does not do"):
        sampling_of(GenerationConfig(num_beams=4, max_new_tokens=8), [0])
    with pytest.raises(ConfigError, match="rollout takes a symbiosis.serving.Engine of this program, not 'http://"):
        symbiosis.rollout("http://127.0.0.1:8000")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="samples in no way that is known"):
        Rollout(parts[1], "policy").attach(type("Odd", (), {"args": None})())


def test_an_old_trl_is_told(parts: tuple[nn.Module, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.15.2")
    made = symbiosis.rollout(parts[1])
    for ask in (lambda: made([], None), lambda: made.attach(None), lambda: made.worker(None, None, None)):
        with pytest.raises(OutdatedPackage, match=r"rollout needs trl 1\.16 or later, not 1\.15\.2.*'trl>=1\.16'"):
            ask()


def test_a_completion_for_which_nobody_waits_is_given_up(
    parts: tuple[nn.Module, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = parts[1]
    made = Rollout(engine, None)  # type: ignore[arg-type]  # the base itself
    endless = Sampling(max_tokens=500, stop_tokens=())
    given_up, taken = made.ask_one([70, 71], endless), made.ask_one([70, 71], Sampling(max_tokens=4))
    assert len(taken.result(60).tokens) == 4 and given_up.cancel()
    deadline = time.monotonic() + 60
    while engine.figures().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.figures().finished == {"length": 1, "cancelled": 1} and not caplog.records


@pytest.mark.parametrize("answer", ["a word", "two\nlines\n", " ", ""])
def test_an_answer_of_an_unknown_template_is_all_content(tokenizer: Any, answer: str) -> None:
    from trl.chat_template_utils import parse_response

    plain = _reading_plain_answers(tokenizer)
    for end in ("", tokenizer.eos_token)[not answer :]:
        ids = tokenizer(answer + end, add_special_tokens=False).input_ids
        assert parse_response(plain, ids) == {"role": "assistant", "content": answer}


def test_async_grpo(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's attention for it runs on a GPU only: here it is torch's. Everything else is as it is."""
    pytest.importorskip("requests", reason="AsyncGRPOTrainer makes a client of vLLM, whoever samples")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    monkeypatch.syspath_prepend(str(SCRIPTS))
    importlib.import_module("_tree_attention").on_a_cpu(monkeypatch.setattr)
    told = [[{"role": "user", "content": f"def function_{number}("}] for number in range(8)]
    args = AsyncGRPOConfig(
        **options(
            tmp_path, num_generations=2, max_completion_length=8, max_steps=3, model_init_kwargs={"dtype": "float32"},
            max_staleness=1, weight_sync_steps=1,
        )
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": told})
    engine = Engine(AutoModelForCausalLM.from_pretrained(DEMO), memory=1 << 24)
    with engine:
        rollout = symbiosis.rollout(engine)
        worker = rollout.worker(args, dataset, tokenizer, vowels)
        trainer = AsyncGRPOTrainer(
            str(DEMO), reward_funcs=vowels, args=args, train_dataset=dataset, processing_class=tokenizer,
            peft_config=KINDS["LoRA"](), rollout_worker=worker, weight_transfer=rollout,
        )  # fmt: skip
        before = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
        rollout.attach(trainer).train()
        assert trainer.model_version == 4 and rollout.version
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if name in before)
    first = logs_of(trainer, "kl")[0]
    assert abs(first) < 1e-5, "the first samples are of the policy itself"
    assert json.dumps(trainer.state.log_history)
