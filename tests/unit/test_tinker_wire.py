"""What Tinker's clients are told of samples, as bytes."""

import asyncio
import importlib.util
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from symbiosis.errors import ConfigError
from symbiosis.server.api_errors import ApiError
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions, ReceivedOutput
from symbiosis.server.ipc.engine_server import _said
from symbiosis.server.serving_state import ServingState
from symbiosis.serving.request import Finish, Request, Token
from tests.unit.test_serving_detokenize import bytes_tokenizer

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker, for its descriptor", allow_module_level=True)

from symbiosis.server.tinker import samples as samples_module
from symbiosis.server.tinker import wire
from symbiosis.server.tinker.kept_samples import ONE_BYTES
from symbiosis.server.tinker.promises import outcome_after, outcome_of_error
from symbiosis.server.tinker.routes import Tinker
from symbiosis.server.tinker.samples import Chunk, Params, SamplePrompt, SampleRequest, Samples
from symbiosis.server.tinker.tinker_messages import PromiseOutcome, RefusedRequest, TinkerRefusal


def tokens(count: int, k: int) -> list[Token]:
    first = [Token(0)]
    rest = [
        Token(number, -float(number), tuple((rank, -number - rank / 32) for rank in range(k)))
        for number in range(1, count)
    ]
    return first + rest


@pytest.mark.parametrize("untold", [1, 700])
def test_long_tables_are_told_whole(untold: int) -> None:
    sample, prompt = tokens(600, 2), tokens(1000, 3)
    data = wire.sample_bytes([("stop", sample)], iter(prompt), 3, 4, untold)
    told = wire.messages().SampleResponse.FromString(data)
    [one] = told.sequences
    assert np.frombuffer(one.tokens, np.int32).tolist() == list(range(600))
    assert np.frombuffer(one.logprobs, np.float32)[1:].tolist() == [-float(number) for number in range(1, 600)]
    table = np.frombuffer(one.topk_sampled_logprobs.logprobs, np.float32).reshape(600, 4)
    assert table[5].tolist() == [-5.0, -5.03125, -99999.0, -99999.0]
    assert (told.topk_prompt_logprobs.k, told.topk_prompt_logprobs.length) == (3, 1000)
    of_prompt = np.frombuffer(told.prompt_logprobs, np.float32)
    assert np.isnan(of_prompt[:untold]).all() and of_prompt[untold:].tolist() == [
        -float(number) for number in range(untold, 1000)
    ]
    ids = np.frombuffer(told.topk_prompt_logprobs.token_ids, np.int32).reshape(1000, 3)
    assert ids[untold - 1].tolist() == [0, 0, 0] and ids[untold].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sparse", [False, True])
def test_shapes_are_looked_at_before_they_are_multiplied(sparse: bool) -> None:
    told = wire.messages().ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn="cross_entropy")
    made = told.data.add()
    made.model_input.add().encoded_text.tokens = bytes(4)
    tensor = made.loss_fn_inputs["weights"]
    tensor.dtype = wire.FLOAT32
    tensor.shape.extend([2**62 + 1] * 50_000)
    if sparse:
        tensor.sparse_csr.values = bytes(4)
    else:
        tensor.dense = bytes(4)
    began = time.process_time()
    refused = wire.read_pass(told.SerializeToString())
    assert (
        isinstance(refused, RefusedRequest)
        and refused.refusal == "datum 0: weights has 50000 dimensions: it has one or two"
    )
    assert time.process_time() - began < 1


NAMES = "a" * 1_000_000


def with_input(told: Any) -> None:
    told.data[0].loss_fn_inputs[NAMES].dtype = wire.FLOAT32


def with_config(told: Any) -> None:
    told.loss_fn_config_v2[NAMES].text = "a"


@pytest.mark.parametrize("change", [with_input, with_config])
def test_a_refusal_is_short_whatever_is_refused(change: Callable[[Any], None]) -> None:
    told = wire.messages().ForwardBackwardRequest(model_id="a", seq_id=1, loss_fn="cross_entropy")
    told.data.add()
    change(told)
    refused = wire.read_pass(told.SerializeToString())
    assert isinstance(refused, RefusedRequest) and len(refused.refusal) < 300


@pytest.mark.parametrize(
    "error", [TinkerRefusal(NAMES), ConfigError(NAMES), ValueError(NAMES), ApiError(400, NAMES, NAMES)]
)
def test_what_is_told_and_kept_of_an_error_is_short(error: Exception) -> None:
    assert len(outcome_of_error(error).error) < 2000
    assert len(str(_said(error)[0])) < 2000
    if isinstance(error, ApiError):
        assert len(bytes(error.response().body)) < 2000


def test_what_makes_an_outcome_is_let_go_with_its_data() -> None:
    class Data:
        pass

    begun, data = Future[float](), Data()
    ref = weakref.ref(data)
    outcome = outcome_after(begun, lambda _, data=data: PromiseOutcome())
    del data
    begun.set_result(0.5)  # which is kept for whoever asks for it again
    assert outcome.result() == PromiseOutcome() and ref() is None


def test_what_is_unknown_is_not_kept() -> None:
    front = front_of([])
    unknown: Any = front.remote

    async def ask_training(*_: Any) -> str:
        raise ApiError(410, "nothing is known of this request")

    async def main() -> None:
        unknown.ask_training = ask_training
        tinker, loop = Tinker(front), asyncio.get_running_loop()
        for number in range(100):
            with pytest.raises(ApiError):
                await tinker._of_engine(front, front.keys.nobody, str(number))
        with pytest.raises(ApiError):
            tinker._of_engine(front, front.keys.nobody, "a" * 257)
        await asyncio.sleep(0)
        assert not tinker._awaited and not loop._scheduled  # type: ignore[attr-defined]

    asyncio.run(main())


def front_of(told: list[Token]) -> ServingState:
    """A front end whose engine tells the log probabilities of any prompt at once."""
    welcome = EngineReady(model="demo", longest=len(told), most_tokens=len(told), vocabulary=258)
    remote: Any = SimpleNamespace(welcome=welcome, requests={}, places=None, ids=count(1), at_pause=[])

    async def ask_training(*_: Any) -> str:
        return ""

    def submit(request: Request, take: Callable[[ReceivedOutput], None]) -> None:
        packed = msgspec.Raw(msgspec.msgpack.encode(told))
        take(ReceivedOutput(request=request.id, finish=Finish.LENGTH, prompt_logprobs=packed))
        remote.at_pause.pop()()

    remote.ask_training, remote.submit = ask_training, submit
    return ServingState(remote, bytes_tokenizer(), FrontOptions(model="demo", folder=""))


def test_others_run_while_a_long_table_is_written() -> None:
    told = tokens(20_000, 20)

    async def sample(front: ServingState) -> tuple[bytes, float, float]:
        samples, tenant = Samples(front), front.keys.nobody
        prompt = SamplePrompt([Chunk(tokens=[token.id % 258 for token in told])])
        ask = SampleRequest(prompt, Params(max_tokens=0), prompt_logprobs=True, topk_prompt_logprobs=20)
        task = samples.task(tenant, (await samples.begin(tenant, ask))["request_id"])
        assert task is not None
        began = last = time.monotonic()
        longest = 0.0
        while not task.done():
            await asyncio.sleep(0)
            last, before = time.monotonic(), last
            longest = max(longest, last - before)
        return task.result(), longest, last - began

    data, longest, whole = asyncio.run(sample(front_of(told)))
    assert wire.messages().SampleResponse.FromString(data).topk_prompt_logprobs.length == len(told)
    assert longest < whole / 2, (longest, whole)


def test_samples_that_are_done_have_so_many_bytes_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tokens(200, 20)

    async def main() -> None:
        front = front_of(told)
        samples, tenant = Samples(front), front.keys.nobody
        prompt = SamplePrompt([Chunk(tokens=[token.id % 258 for token in told])])

        async def sample(number: int, samples: Samples = samples) -> int:
            ask = SampleRequest(
                prompt, Params(max_tokens=0), prompt_logprobs=True, topk_prompt_logprobs=20, sampling_session_id="a", seq_id=number
            )  # fmt: skip
            task = samples.task(tenant, (await samples.begin(tenant, ask))["request_id"])
            assert task is not None
            found = len(await task)
            await asyncio.sleep(0)
            return found

        def there() -> list[int]:
            return [number for number in range(8) if samples.task(tenant, f"a/sample-{number}") is not None]

        nbytes = await sample(0, Samples(front)) + ONE_BYTES
        monkeypatch.setattr(samples_module, "KEPT_BYTES", 3 * nbytes + nbytes // 2)
        for number in range(3):
            await sample(number)
        samples.was_told(tenant, "a/sample-1")
        await sample(3)
        assert there() == [0, 2, 3]  # what has been had goes first
        await sample(4)
        assert there() == [2, 3, 4]  # then the oldest
        await sample(1)
        assert there() == [1, 3, 4]  # it is drawn again, and nothing ends it before its time
        assert len(samples._timers) == 3

    asyncio.run(main())
