"""Tinker's API under a tenant that asks for as much as it can: what it takes is bounded, and others go on."""

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.secret_files import write_secret
from tests.serving_api import Api, http_process

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker, for its descriptor", allow_module_level=True)

from symbiosis.server.tinker import tinker_service
from tests.process.test_tinker import KEYS, Client, error_of

FEW = 64  # completions that may be under way


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("floods")
    write_secret(folder / "keys", "".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25, name="demo") as engine,
        symbiosis.training.Engine(executor.endpoint) as trainer,
    ):
        training = tinker_service.TrainingService(engine, trainer, folder / "checkpoints", "demo", str(DEMO_MODEL))
        try:
            with http_process(engine, training, api_keys=str(folder / "keys"), max_requests=FEW) as api:
                yield api
        finally:
            training.close()


SAMPLE = {"base_model": "demo", "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"num_samples": 10**9}, "num_samples"),
        ({"num_samples": 1 << 70}, "num_samples"),
        ({"prompt": {"chunks": [{"tokens": [1] * 100_000}]}}, "512 tokens"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -5}, "topk_sample_logprobs"),
    ],
    ids=["many samples", "more than a number", "a long prompt", "topk of a prompt", "topk of a sample"],
)
def test_sizes_of_samples_are_checked_before_anything_is_made_of_them(
    api: Api, told: dict[str, object], fault: str
) -> None:
    answer = Client(api).post("asample", **{**SAMPLE, **told})
    assert answer.status_code == 400 and fault in error_of(answer), answer.text


def test_samples_of_one_key_that_wait_are_bounded(api: Api) -> None:
    bob, anna = Client(api, "bob"), Client(api)
    long = {**SAMPLE, "sampling_params": {"max_tokens": 500}, "num_samples": FEW // 2}
    with ThreadPoolExecutor(8) as pool:
        sent = Counter(answer.status_code for answer in pool.map(lambda _: bob.post("asample", **long), range(2 * FEW)))
    assert sent[200] >= FEW and sent[503] > 0 and sent.total() == sent[200] + sent[503], sent
    began = time.monotonic()
    assert anna.wait(anna.told("asample", **SAMPLE)) and time.monotonic() - began < 20
