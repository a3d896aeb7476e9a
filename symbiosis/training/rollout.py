"""`rollout`: TRL's trainers sample by a serving engine of the same program, over the same base. Before each rollout whose step is new the adapter is
published, which is one copy on the device: nothing is merged, sent or loaded."""

import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from symbiosis.base.requirements import check_release
from symbiosis.errors import ConfigError
from symbiosis.serving.engine.reader import ENDS_WITH_ERROR, GenerationFailed
from symbiosis.serving.request import Finish, Output, Request, Sampling
from symbiosis.training.rollout_worker import RolloutWorker

TRL = "1.16"  # whose methods are replaced below
MOST_COMPLETIONS = 128  # of one request
HONOURED = {  # of transformers' GenerationConfig
    "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id",
}  # fmt: skip
HARMLESS = {  # ... what changes no token here
    "pad_token_id", "bos_token_id", "cache_implementation", "use_cache", "disable_compile", "transformers_version", "max_length",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
}  # fmt: skip
KINDS = "GRPOTrainer, RLOOTrainer, OnlineDPOTrainer or AsyncGRPOTrainer, or a class made of these"


class SamplingEngine(Protocol):
    """An engine that serves what is trained."""

    ends: frozenset[int]
    most_tokens: int

    def publish(self, name: str, model: Any, adapter: str | None = None) -> int: ...
    def submit(self, request: Request, on_output: Any) -> None: ...
    def cancel(self, id: int) -> None: ...
    def next_id(self) -> int: ...


@dataclass(slots=True, frozen=True)
class SampledText:
    """One completion: its tokens, their log probabilities, and the version of the adapter by which they were drawn."""

    tokens: list[int]
    logprobs: list[float]
    model_version: int


class Rollout:
    """Samples for TRL's trainers. Made by `rollout`.

    Attributes:
        version: What the engine calls the version that was published last.
    """

    def __init__(self, engine: SamplingEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self.version = 0
        self._published: tuple[Any, int] = (lambda: None), -1  # a trainer, and its step
        self._rollouts = 0  # of this step
        self._drawn: dict[
            bytes, list[float]
        ] = {}  # of this step: log probabilities by the tokens of prompt and completion

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What `GRPOTrainer(rollout_func=)` calls. Tools and environments go on by TRL's own loop."""
        self.attach(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        _refuse_images(images)
        made = self.sample(trainer, prompt_ids)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.tokens for each in made],
            "logprobs": [each.logprobs for each in made],
            "model_version": [each.model_version for each in made],
        }

    def attach(self, trainer: Any) -> Any:
        """Have a trainer that takes no `rollout_func` sample by the engine; return the trainer."""
        if getattr(trainer, "_symbiosis_rollout", None) is self:
            return trainer
        _check_trl()
        if getattr(trainer.args, "use_vllm", False):
            raise ConfigError("this trainer is to sample by vLLM: leave use_vllm=True out of its configuration")
        if hasattr(trainer, "_sync_weight_merged"):
            self._attach_async(trainer)
        elif hasattr(trainer, "_generate_single_turn"):
            of_grpo = hasattr(trainer, "rollout_func")
            trainer._generate_single_turn = partial(self._turn if of_grpo else self._tokens, trainer)
            self._watch(trainer)
        elif hasattr(trainer, "_generate") and hasattr(trainer, "_forward"):
            trainer._generate = partial(self._pairs, trainer)
        else:
            raise ConfigError(f"{type(trainer).__name__} samples in no way that is known: give {KINDS}")
        trainer._symbiosis_rollout = self
        return trainer

    def sample(self, trainer: Any, prompts: Sequence[Sequence[int]], scaled: bool = True) -> list[SampledText]:
        """Return a completion of each prompt, by the adapter as it is at the trainer's present step.

        Args:
            scaled: Log probabilities are those after the temperature.
        """
        self.publish(trainer)
        how = sampling_of(trainer.generation_config, trainer.eos_token_ids)
        how = _changed(how, scaled_logprobs=scaled)
        self._rollouts += 1
        place = trainer.args.seed, trainer.accelerator.process_index, trainer.state.global_step, self._rollouts
        made = self._ask(prompts, how, random.Random(repr(place)))  # noqa: S311
        for prompt, each in zip(prompts, made, strict=True):
            self._drawn[_key([*prompt, *each.tokens])] = each.logprobs
        return made

    def publish(self, trainer: Any) -> int:
        """Publish a trainer's adapter, if it has made a step since the last time; return the version."""
        model, step = trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step
        if self._published[0]() is not trainer or self._published[1] != step:
            self.version = self.engine.publish(self.name, model)
            self._published = weakref.ref(trainer), step
            self._rollouts = 0
            self._drawn.clear()
        return self.version

    def worker(
        self,
        args: Any,
        train_dataset: Any,
        processing_class: Any,
        reward_funcs: Any = (),
        tools: Any = None,
        environment_factory: Any = None,
    ) -> RolloutWorker:
        """Return what `AsyncGRPOTrainer(rollout_worker=)` takes: TRL's own loop of rollouts, tools and rewards, in a thread of this program."""
        _check_trl()
        rewards = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
        words = {
            "dataset": train_dataset,
            "reward_funcs": rewards,
            "tools": tools,
            "environment_factory": environment_factory,
        }
        return RolloutWorker(self.ask_one, self.name, self.engine.ends, args, processing_class, words)

    def init_weight_transfer(self) -> None:
        """With this and the next four, it is what `AsyncGRPOTrainer(weight_transfer=)` takes: there is nothing to transfer."""

    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def _ask(self, prompts: Sequence[Sequence[int]], how: Sampling, seeds: random.Random) -> list[SampledText]:
        """Have the engine complete all prompts. Those that are repeated one after another are computed once."""
        outputs, numbers = SimpleQueue[Output](), dict[tuple[int, int], int]()
        waiting: set[int] = set()
        try:
            for prompt, places in _repeated(prompts):
                sampling = _changed(how, seed=seeds.getrandbits(62))
                id = self.engine.next_id()
                numbers |= {(id, completion): place for completion, place in enumerate(places)}
                request = Request(
                    id=id, prompt=tuple(prompt), adapter=self.name, completions=len(places), sampling=sampling
                )
                self.engine.submit(request, outputs.put)
                waiting.add(id)
            return _collected(outputs, numbers, waiting)
        finally:
            for id in waiting:
                self.engine.cancel(id)

    def ask_one(self, prompt: Sequence[int], how: Sampling) -> "Future[SampledText]":
        """Have the engine complete one prompt, for a loop that waits for many."""
        future, tokens, logprobs = Future[SampledText](), list[int](), list[float]()

        def take(output: Output) -> None:
            tokens.extend(token.id for token in output.tokens)
            logprobs.extend(float(token.logprob or 0.0) for token in output.tokens)
            if output.finish is None or not future.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            if output.finish in (*ENDS_WITH_ERROR, Finish.CANCELLED):
                future.set_exception(GenerationFailed(output.error or "the request was cancelled"))
            else:
                future.set_result(SampledText(tokens, logprobs, output.model_version))

        request = Request(id=self.engine.next_id(), prompt=tuple(prompt), adapter=self.name, sampling=how)
        self.engine.submit(request, take)
        future.add_done_callback(lambda done: self.engine.cancel(request.id) if done.cancelled() else None)
        return future

    # ------------------------------------------------------------ GRPO and RLOO

    def _turn(
        self,
        trainer: Any,
        prompt_ids: Any,
        images: Any,
        fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """GRPO's `_generate_single_turn`: also for each turn of a tool loop."""
        _refuse_images(images or (True if has_tool_images else None))
        made = self.sample(trainer, prompt_ids)
        return [each.tokens for each in made], [each.logprobs for each in made]

    def _tokens(self, trainer: Any, prompt_ids: Any, images: Any, fields: Any) -> list[list[int]]:
        """RLOO's `_generate_single_turn`."""
        _refuse_images(images)
        return [each.tokens for each in self.sample(trainer, prompt_ids)]

    def _watch(self, trainer: Any) -> None:
        """Compare the trainer's log probabilities with the sampler's, wherever the trainer computes its loss."""
        scores, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
        last: list[Tensor] = []

        def scored(*args: Any, **kwargs: Any) -> Any:
            found = scores(*args, **kwargs)
            last[:] = [found[0].detach()]
            return found

        def computed(model: Any, inputs: Mapping[str, Any]) -> Any:
            last.clear()
            found = loss(model, inputs)
            if last and self._is_current(trainer) and trainer.model.training:
                self._compare(trainer, inputs, last[0], trainer._metrics["train"])
            last.clear()
            return found

        trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, computed

    def _is_current(self, trainer: Any) -> bool:
        return self._published[0]() is trainer and self._published[1] == trainer.state.global_step

    def _compare(self, trainer: Any, inputs: Mapping[str, Any], trained: Tensor, metrics: Any) -> None:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is None:
            sampled, known = self._recalled(inputs)
            mask = mask * known
        log_mismatch(trainer.accelerator, sampled, trained, mask.bool(), metrics)

    def _recalled(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sampler's log probabilities of completions, and for which tokens they are known."""
        sampled = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
        known = torch.zeros_like(inputs["completion_ids"])
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        for row, (prompt, its, completion, there) in enumerate(zip(*(inputs[n].cpu() for n in names), strict=True)):
            logprobs = self._drawn.get(_key([*prompt[its.bool()].tolist(), *completion[there.bool()].tolist()]), [])
            sampled[row, : len(logprobs)] = torch.tensor(logprobs)
            known[row, : len(logprobs)] = 1
        return sampled, known

    # ------------------------------------------------------------ Online DPO

    def _pairs(self, trainer: Any, model: Any, prompts: list[Any], images: Any = None) -> tuple[Any, ...]:
        """Online DPO's `_generate`: two completions of each prompt, padded to a rectangle."""
        from trl.data_utils import maybe_apply_chat_template

        _refuse_images(images)
        texts = [maybe_apply_chat_template({"prompt": each}, trainer.processing_class)["prompt"] for each in prompts]
        words = trainer.processing_class(text=texts, add_special_tokens=False)["input_ids"] * 2
        order = [
            place for first in range(len(prompts)) for place in (first, first + len(prompts))
        ]  # pairs side by side
        made: list[Any] = [None] * len(words)
        for place, each in zip(
            order, self.sample(trainer, [words[place] for place in order], scaled=False), strict=True
        ):
            made[place] = each
        pad = trainer._tokenizer.pad_token_id
        prompt_ids, prompt_mask = _rectangle(words, pad, left=True, device=trainer.accelerator.device)
        ids, mask = _rectangle([each.tokens for each in made], pad, left=False, device=trainer.accelerator.device)
        sampled, _ = _rectangle([each.logprobs for each in made], 0.0, left=False, device=trainer.accelerator.device)
        self._compare_once(trainer, sampled, mask)
        return prompt_ids, prompt_mask, ids, mask, None

    def _compare_once(self, trainer: Any, sampled: Tensor, mask: Tensor) -> None:
        """Compare with what the trainer's next forward pass finds: that of the policy, before it is trained."""
        forward = trainer._forward

        def compared(*args: Any, **kwargs: Any) -> Any:
            trainer._forward = forward
            found = forward(*args, **kwargs)
            log_mismatch(trainer.accelerator, sampled, found.detach(), mask.bool(), trainer.stats)
            return found

        trainer._forward = compared

    # ------------------------------------------------------------ AsyncGRPO

    def _attach_async(self, trainer: Any) -> None:
        if trainer.args.token_budget is None:  # TRL would ask a server
            trainer.args.token_budget = self.engine.most_tokens
        trainer._sync_weight_merged = partial(self._sync, trainer)

    def _sync(self, trainer: Any, began: float) -> tuple[float, float, float]:
        """In the place of a transfer of weights: nothing is merged into the base, which the engine may use at the moment."""
        trainer.accelerator.wait_for_everyone()
        before = time.time()
        self.publish(trainer)
        if trainer.accelerator.is_main_process:
            trainer.model_version += 1
            trainer.rollout_worker.update_model_version(trainer.model_version)
        return began, before, time.time()


def _check_trl() -> None:
    check_release("trl", TRL, "symbiosis.rollout")


def rollout(engine: SamplingEngine, name: str = "policy") -> Rollout:
    """Return what has TRL's trainers sample by `engine`, a `symbiosis.serving.Engine` of this program over the base that they train.

    `GRPOTrainer(..., rollout_func=symbiosis.rollout(engine))` is all that GRPO needs. `symbiosis.rollout(engine).attach(trainer)` does it for an
    `RLOOTrainer` and an `OnlineDPOTrainer`. An `AsyncGRPOTrainer` takes `rollout_worker=r.worker(...)` and `weight_transfer=r`, and is attached, too.

    Args:
        name: What the engine calls the adapter.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor, symbiosis.serving.Engine(executor.endpoint, memory=1 << 24) as engine:
    ...     symbiosis.rollout(engine).name
    'policy'
    """
    if not hasattr(engine, "publish") or not hasattr(engine, "submit"):
        raise ConfigError(f"rollout takes a symbiosis.serving.Engine of this program, not {engine!r:.80}")
    return Rollout(engine, name)


def sampling_of(config: Any, ends: Sequence[int]) -> Sampling:
    """Return how a generation configuration of transformers has tokens chosen.

    >>> from transformers import GenerationConfig
    >>> sampling_of(GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.7), ends=[2]).temperature
    0.7
    """
    told = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    if unknown := sorted(told.keys() - HONOURED - HARMLESS):
        raise ConfigError(f"generation_kwargs has {', '.join(unknown)}, which the engine does not do: leave it out")
    greedy = not told.get("do_sample", False)
    return Sampling(
        max_tokens=told["max_new_tokens"], temperature=0.0 if greedy else told.get("temperature", 1.0), top_p=told.get("top_p", 1.0),
        top_k=max(0, told.get("top_k", 0)), min_p=told.get("min_p", 0.0), repetition_penalty=told.get("repetition_penalty", 1.0),
        stop_tokens=tuple(ends), logprobs=0,
    )  # fmt: skip


def log_mismatch(accelerator: Any, sampled: Tensor, trained: Tensor, mask: Tensor, metrics: Any) -> None:
    """Log how far the sampler's log probabilities are from the trainer's, over all processes: the cookbook's two estimates of their KL divergence
    (means of the difference, and of half of its square), and the mean and the largest difference by TRL's names."""
    width = min(sampled.shape[1], trained.shape[1])
    apart = (sampled[:, :width].to(trained.device).double() - trained[:, :width].double())[
        mask[:, :width].to(trained.device)
    ]
    sums = torch.stack(
        [apart.sum(), 0.5 * apart.square().sum(), apart.abs().sum(), torch.tensor(apart.numel()).to(apart)]
    )
    largest = apart.abs().max() if apart.numel() else apart.new_zeros(())
    sums, largest = accelerator.reduce(sums, "sum"), accelerator.gather(largest).max()
    if not (count := float(sums[3])):
        return
    names = ("kl_sample_train_v1", "kl_sample_train_v2", "sampling_logp_difference/mean")
    for name, total in zip(names, sums.tolist(), strict=False):
        metrics.setdefault(f"sampling/{name}", []).append(total / count)
    metrics.setdefault("sampling/sampling_logp_difference/max", []).append(float(largest))


def _changed(how: Sampling, **fields: Any) -> Sampling:
    return msgspec.structs.replace(how, **fields)


def _repeated(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Return prompts that follow one another and are the same, with their places.

    >>> [places for _, places in _repeated([[1], [1], [2]])]
    [[0, 1], [2]]
    """
    for _, group in groupby(range(len(prompts)), key=lambda place: list(prompts[place])):
        places = list(group)
        for first in range(0, len(places), MOST_COMPLETIONS):
            yield prompts[places[0]], places[first : first + MOST_COMPLETIONS]


def _collected(
    outputs: "SimpleQueue[Output]", numbers: Mapping[tuple[int, int], int], waiting: set[int]
) -> list[SampledText]:
    """Read the outputs of requests until all completions have ended. Those that have ended are taken out of `waiting`."""
    made = [SampledText([], [], 0) for _ in numbers]
    left = {id: sum(of == id for of, _ in numbers) for id in waiting}
    while waiting:
        output = outputs.get()
        place = numbers[output.request, output.completion]
        text = made[place]
        text.tokens.extend(token.id for token in output.tokens)
        text.logprobs.extend(float(token.logprob or 0.0) for token in output.tokens)
        if output.finish in (*ENDS_WITH_ERROR, Finish.CANCELLED):
            raise GenerationFailed(output.error or "a request of this rollout was cancelled")
        if output.finish is not None:
            made[place] = SampledText(text.tokens, text.logprobs, output.model_version)
            left[output.request] -= 1
            waiting -= {output.request} if not left[output.request] else set()
    return made


def _rectangle(rows: Sequence[Sequence[float]], pad: float, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows padded to the longest, and where they have values."""
    longest = max(map(len, rows))
    blank = [[pad] * (longest - len(row)) for row in rows]
    filled = [[*b, *row] if left else [*row, *b] for row, b in zip(rows, blank, strict=True)]
    there = [
        [0] * len(b) + [1] * len(row) if left else [1] * len(row) + [0] * len(b)
        for row, b in zip(rows, blank, strict=True)
    ]
    return torch.tensor(filled, device=device), torch.tensor(there, device=device)


def _key(tokens: Sequence[int]) -> bytes:
    return torch.tensor(tokens, dtype=torch.int64).numpy().tobytes()


def _refuse_images(images: Any) -> None:
    if images is not None and any(images if isinstance(images, list) else [images]):
        raise ConfigError("the engine reads text only: sample these prompts, which have images, by the trainer itself")
