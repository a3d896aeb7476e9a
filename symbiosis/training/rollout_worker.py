"""The worker that makes rollouts for TRL's `AsyncGRPOTrainer`: TRL's own loop of rollouts, tools and rewards, whose turns the engine makes."""

import asyncio
import copy
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from symbiosis.serving.request import Sampling


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol`, in a thread of this program.

    Args:
        ask: Gives a future of the completion of a prompt, by an adapter of this `name`.
        ends: Tokens that end a completion, beside the tokenizer's.
    """

    def __init__(
        self,
        ask: Callable[..., Future[Any]],
        name: str,
        ends: Iterable[int],
        args: Any,
        tokenizer: Any,
        words: Mapping[str, Any],
    ) -> None:
        self.rollout_buffer: Any = queue.Queue(maxsize=args.queue_maxsize)
        self.metrics_queue: Any = queue.Queue(maxsize=4096)
        self._version, self._alive_at = SharedNumber(0), SharedNumber(0.0)
        self._failed, self._errors = threading.Event(), SimpleQueue[Any]()
        self._thread: threading.Thread | None = None
        if not words["tools"] and not words["environment_factory"]:
            tokenizer = _reading_plain_answers(tokenizer)
        stops = sorted({*ends, tokenizer.eos_token_id})
        together = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        most = args.max_inflight_tasks if args.max_inflight_tasks > 0 else max(args.max_staleness, 1) * together
        self._loop = _loop_class()(
            model_name=name, processing_class=tokenizer, eos_token_ids=stops, rollout_buffer=self.rollout_buffer,
            model_version_value=self._version, heartbeat_value=self._alive_at, failed_event=self._failed,
            exception_info_queue=self._errors, metrics_queue=self.metrics_queue, num_generations=args.num_generations,
            max_inflight_tasks=most, queue_maxsize=args.queue_maxsize, max_tokens=args.max_completion_length,
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
            repetition_penalty=args.repetition_penalty, chat_template_kwargs=args.chat_template_kwargs,
            max_tool_calling_iterations=args.max_tool_calling_iterations, log_completions=args.log_completions,
            num_completions_to_print=args.num_completions_to_print, fork_threshold_tokens=args.fork_threshold_tokens, **words,
        )  # fmt: skip
        how = Sampling(
            max_tokens=args.max_completion_length, temperature=args.temperature, top_p=args.top_p, top_k=max(0, args.top_k or 0),
            min_p=args.min_p or 0.0, repetition_penalty=args.repetition_penalty, stop_tokens=tuple(stops), logprobs=0,
            scaled_logprobs=True,
        )  # fmt: skip
        self._loop.sample = partial(ask, how=how)

    def start(self) -> None:
        self._alive_at.value = time.time()
        self._thread = threading.Thread(target=self._loop.run, name="symbiosis-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End when the completions under way have ended."""
        if self._thread is not None and self._thread.is_alive():
            self._loop._loop.call_soon_threadsafe(self._loop._stop_event.set)
            self._thread.join()
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the loop has failed, or has said nothing for so long."""
        if self._failed.is_set():
            raise RuntimeError("the rollouts have failed:\n" + "".join(self._errors.get()[2]))
        if (age := time.time() - self._alive_at.value) > stale_after_s:
            raise RuntimeError(f"the rollouts have made nothing for {age:.0f} s")


@dataclass(slots=True)
class SharedNumber:
    """A number that two threads share, in the place of multiprocessing's."""

    value: float


def _loop_class() -> Any:
    """Return TRL's loop of rollouts, whose turns the engine makes."""
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    class EngineRolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]
        sample: Any = None

        async def _run_loops(self, stop_event: Any) -> None:
            await asyncio.gather(self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))

        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            made = await asyncio.wrap_future(self.sample(prompt_ids))
            return made.tokens, made.logprobs

    return EngineRolloutLoop


def _reading_plain_answers(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy of one whose chat template TRL does not know: without tools an answer is all content."""
    from trl.chat_template_utils import add_response_schema

    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return tokenizer
    try:
        return add_response_schema(copy.deepcopy(tokenizer))
    except ValueError:
        plain = copy.deepcopy(tokenizer)
        fields = {"content": {"close_pattern": re.escape(tokenizer.eos_token), "content": "text"}}
        plain.response_template = {"defaults": {"role": "assistant"}, "fields": fields}
        # the same for transformers before 5.13, which read no template
        until_end = rf"^(?P<content>.*?)(?:{re.escape(tokenizer.eos_token)}|\Z)"
        kinds = {"role": {"const": "assistant"}, "content": {"type": "string"}}
        plain.response_schema = {"type": "object", "properties": kinds, "x-regex": until_end}
        return plain
