"""`offload_cache`: a cache in the host's memory for a model of transformers, and the attention that reads it."""

import os
import sys
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.kernels.paged_attention import How
from symbiosis.offload.copies import AllCopies
from symbiosis.offload.host_layer import HostLayer
from symbiosis.offload.host_memory import HostMemory
from symbiosis.offload.host_rows import HostRows, Touched
from symbiosis.offload.logit_check import AS_GOOD_AS, logits_alone, place_of, probe_tokens, text_config
from symbiosis.offload.masks import Masks

NAMES = {"sdpa": "symbiosis_host", "eager": "symbiosis_host_eager"}  # by the attention of calls without such a cache
STEPS = 0, 10, 20, 25, 26, 27, 28, 29, 30  # where the pieces of the text begin that is tried
TOGETHER = 10  # tokens of the text that are computed in the same one of three ways
MOST_OF_HALF = 0.6  # of tokens in half precision that must agree
KEPT_AS_THEY_ARE = {"DummyLayer", "LinearAttentionLayer"}  # layers of caches without keys and values

_proved: WeakSet[nn.Module] = WeakSet()


class HostCache(DynamicCache):
    """Keys and values of a context in the host's memory, once, and nowhere else."""

    def __init__(self, config: Any, threads: int) -> None:
        common = HostMemory(), Masks(), AllCopies(), threads
        layers = [self._layer(layer, common) for layer in _layers_of(config)]
        Cache.__init__(self, layers=layers)

    @staticmethod
    def _layer(layer: Any, common: tuple[HostMemory, Masks, AllCopies, int]) -> Any:
        if type(layer) is DynamicLayer:
            return HostLayer(*common)
        if type(layer) is DynamicSlidingWindowLayer:
            return HostLayer(*common, layer.sliding_window)
        if type(layer).__name__ in KEPT_AS_THEY_ARE:
            return layer
        raise ConfigError(f"its cache has layers of the type {type(layer).__name__}")


def offload_cache(model: nn.Module, *, threads: int | None = None) -> HostCache:
    """Return an empty cache for `model` that lies in the host's memory: give it to `generate` or to the model, as `past_key_values`.

    Keys and values go there as they are made. For a few new tokens, the CPUs compute attention where these lie. For many, keys and values
    come to the model's device in pieces. Nothing is copied if the model is on a CPU. The model's attention is replaced by one that knows such
    caches, and works as before with all others. Once for each model, a few tokens are tried, to see that the logits stay the same.

    Args:
        model: A causal language model of transformers, wrapped or not, perhaps with an adapter of PEFT's; in `eval` mode.
        threads: How many threads compute attention for few tokens. Default: as many as there are CPUs that this process may use.

    Raises:
        ConfigError: This model's attention cannot be replaced, or its logits would change.

    >>> import symbiosis, torch
    >>> from transformers import AutoModelForCausalLM
    >>> from symbiosis.executor.model.load import DEMO_MODEL
    >>> model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    >>> cache = symbiosis.offload_cache(model)
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> made = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=4, do_sample=False)
    >>> cache.get_seq_length()
    6
    """
    most = len(os.sched_getaffinity(0))
    if threads is None:
        threads = most
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= most:
        raise ConfigError(f"threads={threads!r}: this process may use 1 to {most}")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    try:
        _check(model, base)
        cache = HostCache(text_config(base), threads)
        if base not in _proved or _attention_of(base) not in NAMES.values():
            _put_in(base)
    except ConfigError as why:
        raise ConfigError(
            f"{type(base).__name__} cannot have its keys and values in the host's memory: {why}"
        ) from why.__cause__
    return cache


def _check(model: nn.Module, base: nn.Module) -> None:
    if not hasattr(base, "set_attn_implementation") or not hasattr(base, "get_output_embeddings"):
        raise ConfigError("it is no causal language model of transformers")
    if getattr(base.config, "is_encoder_decoder", False):
        raise ConfigError("it has an encoder and a decoder, whose caches are of another kind")
    if model.training:
        raise ConfigError("it is being trained: call its eval() first")
    kinds = {str(getattr(config, "peft_type", "")) for config in getattr(model, "peft_config", {}).values()}
    if any("PREFIX_TUNING" in kind for kind in kinds):
        raise ConfigError("PEFT's prefix tuning puts a cache of its own in its place")


def _attention_of(base: nn.Module) -> str:
    return str(getattr(text_config(base), "_attn_implementation", None))


def _layers_of(config: Any) -> list[Any]:
    """Return the layers of the cache that transformers would make for this model."""
    layers = DynamicCache(config=config).layers
    return layers or [DynamicLayer() for _ in range(getattr(config, "num_hidden_layers", 0))]


def _put_in(base: Any) -> None:
    before = _attention_of(base)
    if before not in {*NAMES, *NAMES.values()}:
        raise ConfigError(f"its attention is {before!r}: set it to 'sdpa' or 'eager', which work beside such a cache")
    name = NAMES.get(before, before)
    try:
        _prove(base, before, name)
    except BaseException:
        base.set_attn_implementation(before)
        raise
    _proved.add(base)


@torch.no_grad()
def _prove(base: Any, before: str, name: str) -> None:
    """Show that a text in pieces, by many rows and by few, has the logits that it has at once."""
    tokens, (device, dtype) = [token for of in probe_tokens(base) for token in of], place_of(base)
    try:
        expected = logits_alone(base, tokens)
        base.set_attn_implementation(name)
        if _attention_of(base) != name:
            raise ConfigError("it takes no other attention")
        cache, found = HostCache(text_config(base), 1), []
        for first, end in pairwise(STEPS):
            ids = torch.tensor([tokens[first:end]], device=device)
            found.append(base(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].float())
    except SymbiosisError:
        raise
    except Touched as error:
        raise ConfigError("it computes with what it has cached before it attends to it") from error
    except Exception as error:
        raise ConfigError(f"with another attention it raises {type(error).__name__} ({error})") from error
    off = (torch.cat(found) - expected).abs().amax(1) / expected.abs().max()
    if not all(_is_rounding(off[at : at + TOGETHER], dtype) for at in range(0, len(off), TOGETHER)):
        hint = (
            " (set its attention to 'eager' if sdpa leaves out something, such as soft caps)"
            if before == "sdpa"
            else ""
        )
        raise ConfigError(f"its logits are off by {float(off.max()):.1e} of the largest{hint}")


def _is_rounding(off: Tensor, dtype: torch.dtype) -> bool:
    """Whether tokens differ by no more than rounding. In half precision, rounding sends some tokens to other experts, so that only most
    of them must agree."""
    most = 1.0 if dtype.itemsize > 2 else MOST_OF_HALF
    return float((off <= AS_GOOD_AS[dtype]).float().mean()) >= most


@torch.compiler.disable
def _attention(
    before: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **words: Any
) -> tuple[Tensor, Any]:
    if not isinstance(key, HostRows) or not isinstance(value, HostRows):
        return _as_before(before, module)(module, query, key, value, attention_mask, **words)  # type: ignore[no-any-return]
    if words.get("position_bias") is not None:
        raise ConfigError(
            f"{type(module).__name__} adds biases to its scores, which a cache in the host's memory cannot"
        )
    # A mask says what a window hides, as it does for sdpa and eager.
    how = How.told(query, words.get("scaling"), None, words.get("softcap"), words.get("s_aux"))
    return key.layer.attend(query, key.rows, value.rows, attention_mask, how), None


def _as_before(before: str, module: nn.Module) -> Any:
    if before == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[before]


def register() -> None:
    for before, name in NAMES.items():
        AttentionInterface.register(name, partial(_attention, before))
        AttentionMaskInterface.register(name, AttentionMaskInterface()[before])


register()
