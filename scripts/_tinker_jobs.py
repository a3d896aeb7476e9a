"""Jobs of compat_tinker.py that Tinker's cookbook has no command for: they run in the environment of the SDK, where nothing of Symbiosis is.

python _tinker_jobs.py JOB MODEL FOLDER [TEACHER, or what the run begins with]
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook import example_data
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "role_colon"
CONVERSATIONS = Path(next(iter(example_data.__path__))) / "conversations.jsonl"
PROBLEMS, ANSWERS = 64, 16  # of `solved`, and of each of these: what a run gains by chance alone is a fiftieth
QUESTIONS = ("What is a river?", "Name a fruit.", "What is snow?", "Who bakes bread?")


def common(model: str, batch: int = 4) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=256, batch_size=batch
    )


def dpo(model: str, folder: str) -> None:
    """Short answers are preferred to long ones."""
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl

    pairs = Path(folder).with_suffix(".pairs.jsonl")
    with pairs.open("w") as file:
        for number in range(16):
            question = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
            short, long = (
                [{"role": "assistant", "content": text}] for text in ("Yes.", "Well, that is a long story indeed.")
            )
            comparison = {"prompt_conversation": question, "completion_A": short, "completion_B": long}
            file.write(json.dumps({"comparison": comparison, "label": "A"}) + "\n")
    builder = DPODatasetBuilderFromComparisons(
        common_config=common(model), comparison_builder=ComparisonBuilderFromJsonl(train_path=str(pairs))
    )
    train_dpo.main(
        train_dpo.Config(
            log_path=folder,
            model_name=model,
            recipe_name="dpo",
            renderer_name=RENDERER,
            dataset_builder=builder,
            learning_rate=3e-4,
            lr_schedule="constant",
            lora_rank=8,
            save_every=0,
            eval_every=0,
            infrequent_eval_every=0,
            max_steps=4,
            dpo_beta=0.5,
        )  # fmt: skip
    )


def off_policy(model: str, folder: str, teacher: str) -> None:
    from tinker_cookbook.distillation import train_off_policy as off
    from tinker_cookbook.distillation.datasets import TeacherConfig

    dataset = off.DatasetWithTeacher(
        dataset_builder=FromConversationFileBuilder(common_config=common(model), file_path=str(CONVERSATIONS)),
        teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
    )
    config = off.Config(
        learning_rate=1e-3, dataset_configs=[dataset], model_name=model, recipe_name="off_policy", renderer_name=RENDERER, lora_rank=8,
        n_teacher_targets=8, batch_size=4, save_every=0, eval_every=0, max_steps=4, log_path=folder,
    )  # fmt: skip
    asyncio.run(off.main(config))


def on_policy(model: str, folder: str, teacher: str) -> None:
    import chz
    from tinker_cookbook.distillation import train_on_policy as on
    from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig
    from tinker_cookbook.rl.types import RLDatasetBuilder

    @chz.chz
    class Questions(RLDatasetBuilder):
        async def __call__(self) -> Any:
            tokenizer = get_tokenizer(model)
            renderer = get_renderer(RENDERER, tokenizer=tokenizer)
            return PromptOnlyDataset(list(QUESTIONS) * 4, 4, 8, renderer, tokenizer), None

    teacher_config = TeacherConfig(base_model=model, load_checkpoint_path=teacher)
    dataset = DistillationDatasetConfig(dataset_builder=Questions(), teacher_config=teacher_config, groups_per_batch=4)
    config = on.Config(
        learning_rate=1e-3, dataset_configs=[dataset], model_name=model, recipe_name="on_policy", renderer_name=RENDERER, lora_rank=8,
        max_tokens=12, save_every=0, eval_every=0, max_steps=4, log_path=folder,
    )  # fmt: skip
    asyncio.run(on.main(config))


def small_sums(model: str, folder: str, beginner: str) -> None:
    """The cookbook's arithmetic with numbers of one digit, of which so small a model solves many from the start."""
    from functools import partial

    import chz
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset, ArithmeticEnv
    from tinker_cookbook.rl import train
    from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
    from tinker_cookbook.rl.types import RLDatasetBuilder

    class SmallSums(ArithmeticDataset):
        def _make_env_group_builder(self, rng: Any) -> ProblemGroupBuilder:
            prefix = ArithmeticEnv.standard_fewshot_prefix()
            env = partial(ArithmeticEnv, *map(int, rng.randint(0, 10, 2)), convo_prefix=prefix, renderer=self.renderer)
            return ProblemGroupBuilder(env_thunk=env, num_envs=self.group_size)

    @chz.chz
    class Problems(RLDatasetBuilder):
        async def __call__(self) -> Any:
            return SmallSums(4, get_renderer(RENDERER, tokenizer=get_tokenizer(model)), 8), None

    config = train.Config(
        learning_rate=5e-4, dataset_builder=Problems(), model_name=model, recipe_name="small_sums", renderer_name=RENDERER, lora_rank=8,
        max_tokens=8, load_checkpoint_path=beginner, save_every=0, eval_every=0, max_steps=10, log_path=folder,
        loss_fn="importance_sampling",
    )  # fmt: skip
    asyncio.run(train.main(config))


def solved(model: str, folder: str, largest: str, *samplers: str) -> None:
    """Tell which share of the same problems each of these samplers solves, with several answers to each: rewards of a run's steps are those of other problems
    each time."""
    import numpy
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv

    service, chance = tinker.ServiceClient(), numpy.random.RandomState(1234)
    renderer, prefix = get_renderer(RENDERER, tokenizer=get_tokenizer(model)), ArithmeticEnv.standard_fewshot_prefix()
    problems = [
        ArithmeticEnv(*map(int, pair), renderer=renderer, convo_prefix=prefix)
        for pair in chance.randint(0, int(largest) + 1, (PROBLEMS, 2))
    ]

    async def share(client: tinker.SamplingClient) -> float:
        async def right(number: int, problem: ArithmeticEnv) -> int:
            prompt, stop = await problem.initial_observation()
            how = tinker.SamplingParams(max_tokens=8, stop=stop, seed=number)
            made = await client.sample_async(prompt, num_samples=ANSWERS, sampling_params=how)
            steps = [await problem.step(each.tokens) for each in made.sequences]
            return sum(bool(step.metrics["correct"]) for step in steps)

        return sum(await asyncio.gather(*[right(*each) for each in enumerate(problems)])) / (ANSWERS * len(problems))

    Path(folder).mkdir(parents=True, exist_ok=True)
    told = [asyncio.run(share(service.create_sampling_client(model_path=path))) for path in samplers]
    lines = [{"sampler": path, "solved": found} for path, found in zip(samplers, told, strict=True)]
    (Path(folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def custom(model: str, folder: str) -> None:
    """A loss of the program's own, and the same one by name: their gradients move the adapter alike."""
    import torch

    service = tinker.ServiceClient()
    tokenizer = get_tokenizer(model)
    ids = tokenizer.encode("The river runs to the sea, and the sea is wide.")
    weights = torch.linspace(0, 1, len(ids) - 1)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(ids[1:]), "weights": weights},
    )

    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum((weights * each).sum() for each in logprobs), {}  # type: ignore[return-value]

    told = []
    for passes in (
        lambda run: run.forward_backward_custom([datum], loss),
        lambda run: run.forward_backward([datum], "cross_entropy"),
    ):
        run = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
        found = []
        for _ in range(4):
            done = passes(run)
            run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
            found.append(done.result().metrics["loss:sum"])
        told.append(found)
    folder_of = Path(folder)
    folder_of.mkdir(parents=True, exist_ok=True)
    lines = [{"custom": one, "named": other} for one, other in zip(*told, strict=True)]
    (folder_of / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    job, *words = sys.argv[1:]
    jobs = {
        "dpo": dpo, "off_policy": off_policy, "on_policy": on_policy, "small_sums": small_sums, "solved": solved, "custom": custom,
    }  # fmt: skip
    jobs[job](*words)
