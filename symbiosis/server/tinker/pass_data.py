"""What a pass is given and what it tells, between Tinker's wire and the engine that trains."""

from typing import NamedTuple

import numpy as np
import torch

from symbiosis.errors import SymbiosisError
from symbiosis.server.tinker.tinker_messages import Array, Pass, Passed, PlainDatum, PromiseOutcome, TinkerRefusal
from symbiosis.training import Datum, PassResult
from symbiosis.training.losses import loss_of

AS_IMPORTANCE = "stable_reinforce"  # whose formula is not published


class PassRequest(NamedTuple):
    """A pass as the engine takes it, and what its metrics say beside the loss."""

    data: list[Datum]
    loss: str
    config: dict[str, float]
    metrics: dict[str, float]


def pass_request(asked: Pass) -> PassRequest:
    """Return what the engine is asked for. Raises `TinkerRefusal` for data that are none."""
    data = [_datum(number, each) for number, each in enumerate(asked.data)]
    if asked.loss_fn == AS_IMPORTANCE:
        return PassRequest(data, "importance_sampling", {}, {"computed_as_importance_sampling:max": 1.0})
    return PassRequest(data, asked.loss_fn, asked.config, {})


def outcome_of_pass(found: PassResult, request: PassRequest, forward_only: bool) -> PromiseOutcome:
    """Return what the client is told. The loss of a pass without gradients is computed here."""
    loss = found.loss
    if forward_only:
        each = zip(found.logprobs, request.data, strict=True)
        loss = float(sum(loss_of(request.loss, logprobs, datum, request.config) for logprobs, datum in each))
    flat = torch.cat([each.float().reshape(-1) for each in found.logprobs])
    shapes = [tuple(each.targets.shape) for each in request.data]
    told = {"runs_in_pass:mean": float(found.joined), **request.metrics}
    if (apart := found.mismatch) is not None:
        told |= {"kl_sample_train_v1:mean": apart.kl_v1, "kl_sample_train_v2:mean": apart.kl_v2}
        told["sampling_logp_difference:max"] = apart.largest
    if not forward_only and not any(datum.counts for datum in request.data):
        told["no_token_counts:min"] = 1.0  # the SDK tells it of a batch in parts if each part says so
    return PromiseOutcome(passed=Passed(loss=loss, logprobs=flat.numpy().tobytes(), shapes=shapes, metrics=told))


def _datum(number: int, given: PlainDatum) -> Datum:
    arrays = {name: _tensor(each) for name, each in given.inputs.items()}
    try:
        tokens = torch.from_numpy(np.frombuffer(given.tokens, np.int32).copy())
        return Datum(tokens, targets=arrays.pop("target_tokens"), **arrays)
    except SymbiosisError as error:
        raise TinkerRefusal(f"datum {number}: {error}") from None


def _tensor(array: Array) -> torch.Tensor:
    numbers = np.frombuffer(array.data, np.int64 if array.whole else np.float32)
    return torch.from_numpy(numbers.reshape(array.shape).copy())
