"""Models whose attention cannot be replaced. Each sequence has a cache of transformers' own, and sequences are computed one by one."""

import inspect
import logging
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.offload.logit_check import agree, logits_alone, place_of, probe_tokens, text_config
from symbiosis.serving.kv_cache.paged_memory import KvShape
from symbiosis.serving.runner.attention import forward_pass
from symbiosis.serving.runner.model_runner import ModelRunner, ask
from symbiosis.serving.runner.paged_runner import CannotBatch, PagedRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence

logger = logging.getLogger("symbiosis")

ROW = KvShape(heads=1, key=1024, value=1024)  # pages are for adapters only, and blocks for counting


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for each in model.modules() if isinstance(each, nn.ModuleList) for layer in each]


class DenseRunner(ModelRunner):
    """Computes the segments of a step one after another. No prefix of a prompt is found again. If a model keeps no cache, or computes
    something else with it than from the whole text, the whole text is computed for each token."""

    batches, whole_prompts = False, True

    def __init__(self, model: nn.Module, memory: int | float | None = None) -> None:
        super().__init__(model, (ROW,), memory)
        self._caches: WeakKeyDictionary[Sequence, dict[str, Any]] = WeakKeyDictionary()
        right = next((way for way in _ways(model) if _cache_is_right(model, way)), None)
        self.uses_cache, self._tells_positions = right is not None, bool(right)

        for layer in _layers(model):
            layer.register_forward_pre_hook(ask)

    @torch.inference_mode()
    def logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        """Compute the segments. Only a prompt alone is given up: the caches of what decodes would be a token longer."""
        is_prompt = len(step.segments) == 1 and not step.segments[0].position
        with forward_pass(gives_way=partial(self.gives_way, step) if is_prompt else None):
            return self._logits(step, rows)

    def _logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        wanted = set(rows.tolist())
        found = []
        for segment in step.segments:
            of_segment = self._run(segment)
            found += [of_segment[row] for row in range(segment.rows) if segment.first + row in wanted]
        return torch.stack(found).float() if found else torch.empty(0, self.vocabulary)

    def _run(self, segment: ScheduledRequest) -> Tensor:
        """Return the logits of the segment's rows."""
        if not self.uses_cache:
            whole = replace(segment, first=0, position=0, rows=segment.end)
            logits: Tensor = self.model(**self._words(whole), use_cache=False).logits[0]
            return logits[segment.position :]
        if not segment.position:
            self._caches.pop(segment.sequence, None)
        words = self._words(replace(segment, first=0)) | self._caches.get(segment.sequence, {})
        made = self.model(**words, use_cache=True)
        self._caches[segment.sequence] = _cache(made)
        return made.logits[0]  # type: ignore[no-any-return]

    def _words(self, segment: ScheduledRequest) -> dict[str, Any]:
        alone = SchedulerOutput((segment,))
        for tell in self.before:
            tell(alone, torch.arange(segment.rows))
        words = self.inputs(alone)
        if not self._tells_positions:
            del words["position_ids"]  # the model finds them itself
        return words

    def release(self, sequence: Sequence) -> None:
        self._caches.pop(sequence, None)
        super().release(sequence)


def _cache(made: Any) -> dict[str, Any]:
    """Return what a model remembers, under the name by which it takes it back; nothing if it keeps no cache."""
    names = ("past_key_values", "cache_params", "state")
    return {name: getattr(made, name) for name in names if getattr(made, name, None) is not None}


def _ways(model: nn.Module) -> list[bool]:
    """Return whether the model may be told positions, as transformers' generate() tells them, and whether it may find them itself. Some do
    not: Bamba takes them from a layer whose cache counts no tokens."""
    return [True, False] if "position_ids" in inspect.signature(model.forward).parameters else [False]


@torch.inference_mode()
def _cache_is_right(model: nn.Module, tells_positions: bool) -> bool:
    """Whether tokens that come one by one have the logits that they have in the whole text."""
    tokens = probe_tokens(model)[0]
    whole, (device, dtype) = logits_alone(model, tokens), place_of(model)
    cache, ends = dict[str, Any](), range(len(tokens) - 2, len(tokens) + 1)
    try:
        for start, end in zip([0, *ends], ends, strict=False):
            places = {"position_ids": torch.arange(start, end, device=device).unsqueeze(0)} if tells_positions else {}
            made = model(input_ids=torch.tensor([tokens[start:end]], device=device), use_cache=True, **places, **cache)
            cache = _cache(made)
            if not cache or not agree(made.logits[0, -1].float(), whole[end - 1], dtype):
                return False
    except SymbiosisError:
        raise
    except Exception:
        return False
    return True


def make_ready(model: nn.Module, memory: int | float | None = None, bitwise: bool = False) -> ModelRunner:
    """Make a model ready to be served: in batches if possible, else one by one, which is logged."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(text_config(model), "vocab_size"):
        raise ConfigError(
            f"{type(model).__name__} writes no text: serve a causal language model, such as LlamaForCausalLM"
        )
    place_of(model)
    try:
        return PagedRunner(model.eval(), memory, bitwise=bitwise)
    except CannotBatch as why:
        if bitwise:
            raise ConfigError(
                f"bitwise needs sequences side by side, and {type(model).__name__} computes them one by one: {why}"
            ) from None
        logger.warning("%s is served one request at a time: %s", type(model).__name__, why)
        served = DenseRunner(model, memory)
        if not served.uses_cache:
            logger.warning("%s computes the whole text for each token: its cache cannot be used", type(model).__name__)
        return served
