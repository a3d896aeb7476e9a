"""Tinker's API by the bytes of its wire: training, sampling, order, tenants, and what is wrong with a request."""

import importlib.util
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.cluster import Front, Running
from tests.secret_files import write_secret
from tests.serving_api import Api, eventually, http_process, web

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker, for its descriptor", allow_module_level=True)

from symbiosis.server.tinker import tinker_service, tinker_sessions, wire

KEYS = {"anna": "tml-key-of-anna", "bob": "tml-key-of-bob", "daily": "tml-key-of-daily"}
LIMITS = {"daily": "tokens_per_day=1"}
TEXT = list(b"Once upon a time there was a base model.")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served(tmp_path_factory.mktemp("tinker")) as api:
        yield api


@contextmanager
def served(folder: Path, order_wait: float = 60.0, bitwise: bool = False) -> Iterator[Api]:
    write_secret(folder / "keys", "".join(f"{name} {key} {LIMITS.get(name, '')}\n" for name, key in KEYS.items()))
    with (
        symbiosis.Executor("demo", batch_invariant=bitwise) as executor,
        Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25, name="demo", bitwise=bitwise) as engine,
        symbiosis.training.Engine(
            executor.endpoint,
            state=tinker_service.runs_folder(folder / "checkpoints"),
            order_wait=order_wait,
            bitwise=bitwise,
        ) as trainer,
    ):
        training = tinker_service.TrainingService(engine, trainer, folder / "checkpoints", "demo", str(DEMO_MODEL))
        try:
            with http_process(engine, training, api_keys=str(folder / "keys")) as api:
                yield api
        finally:
            training.close()


class Client:
    """One key's, with a session."""

    def __init__(self, api: Api | Front | Running, who: str = "anna") -> None:
        self.url, self.headers = f"{api.url}/api/v1", {"X-API-Key": KEYS[who]}
        words = {"tags": [], "user_metadata": None, "sdk_version": wire.SDKS[-1]}
        while (
            answer := self.post("create_session", **words)
        ).status_code == 503:  # a cluster's, until a server is ready
            time.sleep(0.05)
        assert answer.status_code == 200, answer.text
        self.session = answer.json()["session_id"]
        self.runs = 0

    def post(self, verb: str, **body: Any) -> httpx.Response:
        return web.post(f"{self.url}/{verb}", json=body, headers=self.headers, timeout=60)

    def told(self, verb: str, **body: Any) -> Any:
        answer = self.post(verb, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, method: str = "GET", **body: Any) -> httpx.Response:
        return web.request(method, f"{self.url}/{path}", headers=self.headers, json=body or None, timeout=60)

    def wait(self, promise: dict[str, Any]) -> Any:
        """The outcome: bytes of protobuf, or an object."""
        while True:
            answer = self.post("retrieve_future", request_id=promise["request_id"])
            assert answer.status_code == 200, answer.text
            if "protobuf" in answer.headers["content-type"]:
                return answer.content
            if (told := answer.json()).get("type") != "try_again":
                return told

    def run(self, rank: int = 4, **lora: Any) -> str:
        number, self.runs = self.runs, self.runs + 1
        fields = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": "demo",
            "lora_config": {"rank": rank, "seed": 0, **lora},
        }
        made = self.wait(self.told("create_model", **fields))
        assert made["model_id"] == f"{self.session}:train:{number}"
        return str(made["model_id"])

    def send_pass(
        self, run: str, number: int, *data: Any, change: Callable[[Any], None] = lambda told: None, **fields: Any
    ) -> httpx.Response:
        told = wire.messages().ForwardBackwardRequest(model_id=run, seq_id=number, loss_fn="cross_entropy", **fields)
        told.data.extend(data or [datum()])
        change(told)
        return self.send_bytes(told.SerializeToString())

    def send_bytes(self, body: bytes) -> httpx.Response:
        headers = {**self.headers, "Content-Type": "application/x-protobuf"}
        return web.post(f"{self.url}/forward_backward", content=body, headers=headers, timeout=60)

    def trained(self, run: str, number: int, *data: Any, **fields: Any) -> Any:
        return wire.messages().ForwardBackwardOutput.FromString(
            self.wait(self.send_pass(run, number, *data, **fields).json())
        )

    def step(self, run: str, number: int, lr: float = 1e-2) -> Any:
        return self.wait(self.told("optim_step", model_id=run, seq_id=number, adam_params={"learning_rate": lr}))

    def sample(self, sampler: str, number: int = 0, **fields: Any) -> Any:
        params = {"max_tokens": 6, "temperature": 0.0, **fields.pop("params", {})}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TEXT[:9]}]}
        promise = self.told(
            "asample", sampling_session_id=sampler, seq_id=number, prompt=prompt, sampling_params=params, **fields
        )
        assert len(promise["sample_sequence_ids"]) == fields.get("num_samples", 1)
        return wire.messages().SampleResponse.FromString(self.wait(promise))


def tensor(values: Any, kind: Any = np.float32) -> Any:
    array = np.asarray(values, kind)
    return wire.messages().Tensor(
        dense=array.tobytes(), dtype=wire.FLOAT32 if kind is np.float32 else wire.INT64, shape=array.shape
    )


def datum(tokens: list[int] = TEXT, **inputs: Any) -> Any:
    made = wire.messages().Datum()
    made.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
    given = {"target_tokens": tensor(tokens[1:], np.int64), "weights": tensor([1.0] * (len(tokens) - 1)), **inputs}
    for name, value in given.items():
        made.loss_fn_inputs[name].CopyFrom(value)
    return made


def floats(data: bytes) -> Any:
    return np.frombuffer(data, np.float32)


def error_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def test_samples_do_not_wait_for_another_day(api: Api) -> None:
    """What a key has had of this one is told: it waits only for what passes sooner."""
    client = Client(api, "daily")
    asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "demo"}
    sampler = client.told("create_sampling_session", **asked)["sampling_session_id"]
    assert len(client.sample(sampler).sequences[0].tokens) == 4 * 6
    prompt, params = {"chunks": [{"type": "encoded_text", "tokens": TEXT[:9]}]}, {"max_tokens": 6}
    asked = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": params}
    told = client.wait(client.told("asample", **asked))
    assert told["category"] == "user" and "1 tokens a day, and has had 15 since midnight" in told["error"]


def test_it_trains_and_samples_what_it_has_trained(api: Api) -> None:
    client = Client(api)
    run = client.run()
    losses = []
    for number in range(1, 7, 2):
        losses.append(client.trained(run, number).metrics["loss:sum"])
        assert client.step(run, number + 1)["metrics"]["grad_norm:mean"] > 0
    assert losses[0] > losses[1] > losses[2]
    saved = client.wait(client.told("save_weights_for_sampler", model_id=run, seq_id=7, sampling_session_seq_id=0))
    sampler = saved["sampling_session_id"]
    assert client.get(f"samplers/{sampler}").json() == {"sampler_id": sampler, "base_model": "demo", "model_path": None}
    found = client.sample(sampler, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    assert len(found.sequences) == 2 and found.sequences[0].stop_reason == 1
    tokens = np.frombuffer(found.sequences[0].tokens, np.int32).tolist()
    prompt = floats(found.prompt_logprobs)
    assert np.isnan(prompt[0]) and (prompt[1:] < 0).all() and len(prompt) == 9
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (2, 9)
    assert floats(found.topk_prompt_logprobs.logprobs)[:2].tolist() == [-99999.0, -99999.0]
    assert (found.sequences[0].topk_sampled_logprobs.k, found.sequences[0].topk_sampled_logprobs.length) == (3, 6)
    out = client.trained(run, 8, datum(TEXT[:9] + tokens), forward_only=True)
    [record] = out.loss_fn_outputs
    logprobs = floats(record.fields["logprobs"].data)
    assert np.abs(logprobs[8:] - floats(found.sequences[0].logprobs)).max() < 1e-5
    assert np.abs(logprobs[:8] - prompt[1:]).max() < 1e-5
    assert out.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-5)


def test_what_is_sampled_is_what_is_trained_to_the_bit(tmp_path: Path) -> None:
    """With `bitwise`: by a snapshot of the sampler, and by a checkpoint that is read from its folder."""
    with served(tmp_path, bitwise=True) as api:
        client = Client(api)
        run = client.run()
        client.trained(run, 1)
        client.step(run, 2)
        saved = client.wait(client.told("save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=0))
        path = client.wait(client.told("save_weights_for_sampler", model_id=run, seq_id=4, path="mine"))["path"]
        of_path = client.told(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=1, model_path=path
        )
        numbers = iter((5, 6))
        for sampler in (saved["sampling_session_id"], of_path["sampling_session_id"]):
            made = client.sample(sampler, num_samples=3, params={"max_tokens": 9, "temperature": 1.0, "seed": 1})
            data = []
            for each in made.sequences:
                tokens = np.frombuffer(each.tokens, np.int32).tolist()
                blank, count = [0.0] * 8, len(tokens)
                given = {
                    "logprobs": tensor([*blank, *floats(each.logprobs)]),
                    "advantages": tensor([*blank, *[1.0] * count]),
                }
                data.append(datum(TEXT[:9] + tokens, **given))
            out = client.trained(
                run, next(numbers), *data, change=lambda told: setattr(told, "loss_fn", "importance_sampling")
            )
            assert out.metrics["kl_sample_train_v1:mean"] == out.metrics["kl_sample_train_v2:mean"] == 0.0
            assert out.metrics["sampling_logp_difference:max"] == 0.0


def test_commands_are_done_in_their_order_and_once(api: Api) -> None:
    client, other = Client(api), Client(api)
    run, same = client.run(), other.run()
    late = [client.send_pass(run, number).json() for number in (3, 2)]
    again = client.told("optim_step", model_id=run, seq_id=4, adam_params={"learning_rate": 1e-2})
    first = client.send_pass(run, 1).json()
    assert client.send_pass(run, 1).json() == first  # it comes twice, and is done once
    for promise in [*late, first, again]:
        assert client.wait(promise) == client.wait(promise)
    for number in (1, 2, 3):
        other.send_pass(same, number)
    here, there = other.step(same, 4)["metrics"], client.wait(again)["metrics"]
    assert here == pytest.approx(there, rel=1e-5)  # passes that came together round together
    refused = client.send_pass(run, 1, datum(TEXT[:5]))
    assert refused.status_code == 400 and "another request" in error_of(refused)
    refused = client.post("retrieve_future", request_id=f"{run}/9")
    assert refused.status_code == 410
    refused = client.send_pass(run, 0)
    assert refused.status_code == 400 and "begins with 1" in error_of(refused)


def test_what_others_have_cannot_be_seen(api: Api) -> None:
    anna, bob = Client(api), Client(api, "bob")
    run = anna.run()
    path = anna.wait(anna.told("save_weights_for_sampler", model_id=run, seq_id=1, path="one"))["path"]
    sampler = anna.wait(anna.told("save_weights_for_sampler", model_id=run, seq_id=2, sampling_session_seq_id=0))[
        "sampling_session_id"
    ]
    for answer in (
        bob.send_pass(run, 3),
        bob.post("get_info", model_id=run),
        bob.post("weights_info", tinker_path=path),
        bob.post("load_weights", path=path, optimizer=False, session_id=bob.session, model_seq_id=5),
        bob.post("create_sampling_session", session_id=bob.session, sampling_session_seq_id=1, model_path=path),
        bob.post("asample", sampling_session_id=sampler, seq_id=0, prompt={"chunks": [{"tokens": [1]}]}, sampling_params={"max_tokens": 1}),
        bob.get(f"samplers/{sampler}"), bob.get(f"training_runs/{run}"), bob.get(f"training_runs/{run}/checkpoints"),
        bob.get(f"training_runs/{run}/checkpoints/sampler_weights/one", "DELETE"),
        bob.get(f"sessions/{anna.session}"),
    ):  # fmt: skip
        assert answer.status_code == 404, answer.text
    for answer in (
        bob.post("session_heartbeat", session_id=anna.session),
        bob.post("retrieve_future", request_id=f"{run}/1"),
    ):
        assert answer.status_code == 410, answer.text
    assert bob.get("training_runs").json()["training_runs"] == [] == bob.get("checkpoints").json()["checkpoints"]
    listed = web.get(f"{api.url}/v1/models", headers={"authorization": f"Bearer {KEYS['bob']}"}).json()["data"]
    assert [each["id"] for each in listed] == ["demo"]
    assert anna.get(f"training_runs/{run}/checkpoints/sampler_weights/one/publish", "POST").status_code == 204
    assert bob.told("weights_info", tinker_path=path)["lora_rank"] == 4
    assert bob.get(f"training_runs/{run}/checkpoints/sampler_weights/one", "DELETE").status_code == 404
    assert anna.get(f"training_runs/{run}/checkpoints/sampler_weights/one/publish", "DELETE").status_code == 204
    assert bob.post("weights_info", tinker_path=path).status_code == 404
    assert httpx.post(f"{api.url}/api/v1/get_info", json={"model_id": run}).status_code == 401


def test_a_run_and_its_checkpoints_are_models_for_openai_s_clients(api: Api) -> None:
    anna = Client(api)
    run = anna.run()
    for number in range(1, 9, 2):
        anna.send_pass(run, number)
        anna.step(run, number + 1, lr=3e-2)
    path = anna.wait(anna.told("save_weights_for_sampler", model_id=run, seq_id=9, path="now"))["path"]

    def text(model: str, who: str = "anna") -> Any:
        body = {"model": model, "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
        answer = web.post(
            f"{api.url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS[who]}"}, timeout=60
        )
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code

    assert text(path) == text(run) != text("demo")
    anna.send_pass(run, 10)
    anna.step(run, 11, lr=0.5)
    assert text(run) != text(path)  # as it is now
    assert text(path, "bob") == text(run, "bob") == text("tinker/0123") == 404


def test_a_checkpoint_goes_on_and_outlives_its_session(api: Api) -> None:
    client = Client(api)
    run = client.run()
    client.send_pass(run, 1)
    client.step(run, 2)
    path = client.wait(client.told("save_weights", model_id=run, seq_id=3, path="first", ttl_seconds=3600))["path"]
    taken = client.wait(client.told("save_weights", model_id=run, seq_id=4, path="first"))
    assert taken["category"] == "user" and "already" in taken["error"]
    assert (
        client.wait(
            client.told("save_weights", model_id=run, seq_id=5, path="first", overwrite=True, ttl_seconds=7200)
        )["path"]
        == path
    )
    expected = client.trained(run, 6).metrics["loss:sum"]
    assert client.post(f"sessions/{client.session}/finish").status_code == 200
    gone = client.send_pass(run, 7)
    assert gone.status_code == 410 and "checkpoint" in error_of(gone)
    later = Client(api)
    fields = {"path": path, "session_id": later.session, "model_seq_id": 0}
    loaded = later.wait(later.told("load_weights", optimizer=True, **fields))["model_id"]
    assert later.trained(loaded, 1).metrics["loss:sum"] == expected
    [run_told] = [each for each in later.get("training_runs").json()["training_runs"] if each["training_run_id"] == run]
    checkpoint = run_told["last_checkpoint"]
    assert (
        checkpoint["tinker_path"] == path
        and checkpoint["expires_at"] > checkpoint["time"]
        and checkpoint["size_bytes"] > 1000
    )
    assert later.get(f"training_runs/{run}/checkpoints/weights/first/ttl", "PUT", ttl_seconds=None).status_code == 204
    assert "expires_at" not in later.get(f"training_runs/{run}").json()["last_checkpoint"]
    assert later.get(f"training_runs/{run}/checkpoints/weights/first", "DELETE").status_code == 204
    assert later.get(f"training_runs/{run}/checkpoints").json()["checkpoints"] == []


def test_an_adapter_is_downloaded_as_peft_has_it(api: Api, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client = Client(api)
    run = client.run(rank=2, train_mlp=False)
    client.send_pass(run, 1)
    client.step(run, 2)
    client.wait(client.told("save_weights_external", model_id=run, seq_id=3, path="mine"))
    at = f"training_runs/{run}/checkpoints/external_weights/mine"
    urls = client.get(f"{at}/external_weights_urls").json()["urls"]
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, url in urls.items():
        (tmp_path / name).write_bytes(web.get(url).raise_for_status().content)  # without a key
        assert web.get(url[:-1] + ("0" if url[-1] != "0" else "1")).status_code == 403
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 32, "demo")
    assert all("self_attn" in name for name in config["target_modules"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), tmp_path)
    import torch

    ids = torch.tensor([TEXT])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    out = client.trained(run, 4, forward_only=True)
    assert np.abs(logprobs.numpy() - floats(out.loss_fn_outputs[0].fields["logprobs"].data)).max() < 1e-5


def test_losses_for_reinforcement_and_targets_of_two_dimensions(api: Api) -> None:
    client = Client(api)
    run = client.run()
    length = len(TEXT) - 1
    old = floats(client.trained(run, 1, forward_only=True).loss_fn_outputs[0].fields["logprobs"].data)
    given = {"logprobs": tensor(old), "advantages": tensor(np.linspace(-1, 1, length))}

    def of(number: int, loss: str, *data: Any) -> Any:
        return client.trained(run, number, *data, change=lambda told: setattr(told, "loss_fn", loss))

    without_weights = datum(**given)
    del without_weights.loss_fn_inputs["weights"]
    expected = float(-np.linspace(-1, 1, length, dtype=np.float32).sum())
    out = of(
        2, "importance_sampling", datum(**given | {"logprobs": tensor(old + 0.25)}, weights=tensor([1.0] * length))
    )
    shown = web.get(f"{api.url}/figures", headers={"authorization": f"Bearer {KEYS['anna']}"}).json()["runs"]
    [mine] = [each for each in shown if each["id"] == run]
    for name, expected_of_sampler in (("v1:mean", 0.25), ("v2:mean", 0.03125)):
        assert out.metrics[f"kl_sample_train_{name}"] == pytest.approx(expected_of_sampler, abs=1e-4)
    assert out.metrics["sampling_logp_difference:max"] == mine["apart"] == pytest.approx(0.25, abs=1e-4)
    assert mine["kl"] == pytest.approx(0.25, abs=1e-4) and mine["loss"] == pytest.approx(
        out.metrics["loss:sum"] / length
    )
    assert (mine["tokens"], mine["steps"], mine["rank"], mine["waiting"]) == (2 * length, 0, 4, 0)
    for number, loss in enumerate(("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"), 3):
        out = of(number, loss, without_weights)
        if loss in ("importance_sampling", "ppo", "gspo", "stable_reinforce"):
            assert out.metrics["loss:sum"] == pytest.approx(expected, abs=1e-3)
        assert ("computed_as_importance_sampling:max" in out.metrics) == (loss == "stable_reinforce")
    two = np.stack([TEXT[1:], np.roll(TEXT[1:], 1)], 1)
    weights = np.zeros((length, 2), np.float32)
    weights[::3, 1] = 0.5
    dense = of(9, "cross_entropy", datum(target_tokens=tensor(two, np.int64), weights=tensor(weights)))
    field = dense.loss_fn_outputs[0].fields["logprobs"]
    assert list(field.trailing_shape) == [2] and len(floats(field.data)) == 2 * length
    sparse = wire.messages().Tensor(dtype=wire.FLOAT32, shape=[length, 2])
    rows, columns = np.nonzero(weights)
    sparse.sparse_csr.values = weights[rows, columns].tobytes()
    sparse.sparse_csr.col_indices = columns.astype(np.int64).tobytes()
    sparse.sparse_csr.crow_indices = np.searchsorted(rows, np.arange(length + 1)).astype(np.int64).tobytes()
    same = of(10, "cross_entropy", datum(target_tokens=tensor(two, np.int64), weights=sparse))
    assert same.metrics["loss:sum"] == dense.metrics["loss:sum"] > 0
    nothing = datum(weights=tensor([0.0] * length))
    for number, data, is_told in ((11, [nothing, nothing], True), (12, [nothing, datum()], False)):
        told = client.trained(run, number, *data).metrics
        assert (told.get("no_token_counts:min") == 1.0, told["loss:sum"] == 0.0) == (is_told, is_told)


def lies(**parts: Any) -> Any:
    """A sparse tensor that is not what it says."""
    length = len(TEXT) - 1
    made = wire.messages().Tensor(dtype=wire.FLOAT32, shape=parts.pop("shape", [length, 4]))
    ends = np.zeros(length + 1, np.int64)
    ends[1:] = 1
    whole = {"values": np.ones(1, np.float32), "crow_indices": ends, "col_indices": np.zeros(1, np.int64)} | parts
    for name, value in whole.items():
        setattr(made.sparse_csr, name, value.tobytes())
    return made


LENGTH = len(TEXT) - 1
ENDS = np.concatenate([[0], np.full(LENGTH, 2)])
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "cells beyond the row": (lambda: datum(weights=lies(col_indices=np.array([4]))), "col_indices"),
    "cells before the row": (lambda: datum(weights=lies(col_indices=np.array([-1]))), "col_indices"),
    "rows that go back": (lambda: datum(weights=lies(crow_indices=np.arange(LENGTH + 1)[::-1].copy())), "crow_indices"),
    "more values than rows tell": (lambda: datum(weights=lies(values=np.ones(3, np.float32))), "crow_indices"),
    "a huge shape": (lambda: datum(weights=lies(shape=[LENGTH, 1 << 50])), "cells at most"),
    "a cell twice": (
        lambda: datum(weights=lies(values=np.ones(2, np.float32), crow_indices=ENDS, col_indices=np.zeros(2, np.int64))), "twice"),
    "rows for other tokens": (lambda: datum(weights=lies(shape=[7, 4])), "a row for each"),
    "numbers that are cut off": (lambda: datum(weights=wire.messages().Tensor(dense=b"abc", dtype=1)), "cut off"),
    "a shape of other numbers": (lambda: datum(weights=wire.messages().Tensor(dense=b"abcd", dtype=1, shape=[2])), "the shape"),
    "weights for other tokens": (lambda: datum(weights=tensor([1.0])), "is for 1 tokens"),
    "no dtype": (lambda: datum(weights=wire.messages().Tensor(dense=b"abcd")), "dtype"),
    "an input that no loss has": (lambda: datum(clip=tensor([1.0] * LENGTH)), "clip"),
}  # fmt: skip


def test_tensors_that_lie_are_refused_in_their_turn(api: Api) -> None:
    client = Client(api)
    run = client.run()
    for number, (what, (make, named)) in enumerate(WRONG.items(), 1):
        told = client.wait(client.send_pass(run, number, datum(), make()).json())
        assert told["category"] == "user" and "datum 1:" in told["error"] and named in told["error"], (what, told)
    assert client.trained(run, len(WRONG) + 1).metrics["loss:sum"] > 0  # the run goes on


def test_a_small_body_does_not_fill_the_memory(api: Api) -> None:
    """64 data of 100 bytes each, whose sparse tensors would take 8 GB."""
    empty = wire.messages().Tensor(dtype=wire.FLOAT32, shape=[1, 1 << 22])
    empty.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
    answer = Client(api).send_pass("a run", 1, *[datum(TEXT[:2], weights=empty, target_tokens=empty)] * 64)
    assert answer.status_code == 413 and "sparse" in error_of(answer), answer.text


def test_numbers_and_words_that_are_too_large_are_the_client_s_fault(api: Api) -> None:
    client = Client(api)
    run = client.run()
    for number in (1 << 64, -1 << 64, 10**40):
        answer = client.post("optim_step", model_id=run, seq_id=number, adam_params={"learning_rate": 1e-2})
        assert answer.status_code == 400 and "64 bits" in error_of(answer), answer.text
    answer = client.post("create_session", tags=[], user_metadata={"a": "x" * (1 << 20)}, sdk_version=wire.SDKS[-1])
    assert answer.status_code == 413, answer.text
    assert client.post("retrieve_future", request_id=f"{run}/{'9' * 5000}").status_code == 410
    assert client.step(run, 1)["category"] == "user"  # nothing was lost by all that


def test_bodies_that_are_too_large_or_cut_off(api: Api) -> None:
    client = Client(api)
    run = client.run()
    whole = (
        wire.messages()
        .ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy", data=[datum()])
        .SerializeToString()
    )
    assert client.send_bytes(whole[:-7]).status_code == 400
    assert "cut off" in error_of(client.send_bytes(whole[:-7]))
    many = client.send_pass(run, 1, *[datum()] * 1025)
    assert many.status_code == 413 and "1024" in error_of(many)
    large = client.send_pass(run, 1, *[datum([1] * 130_000)] * 3)
    assert large.status_code == 413 and "5000000" in error_of(large)
    empty = client.send_bytes(wire.messages().ForwardBackwardRequest(model_id=run, seq_id=1).SerializeToString())
    assert empty.status_code == 400 and "empty" in error_of(empty)
    wanted = client.post("forward_backward", model_id=run)
    assert wanted.status_code == 400 and "protobuf" in error_of(wanted)
    assert client.trained(run, 1).metrics["loss:sum"] > 0  # nothing was lost by all that


def test_faults_of_a_client_are_its_own(api: Api) -> None:
    client = Client(api)
    run = client.run()
    for number, (told, fault) in enumerate([({"loss_fn": "dpo"}, "dpo"), ({}, "999999")], 1):
        data = datum([*TEXT[:5], 999_999]) if fault == "999999" else datum()
        outcome = client.wait(
            client.send_pass(
                run, number, data, change=lambda m, told=told: [setattr(m, *each) for each in told.items()]
            ).json()
        )  # type: ignore[misc]
        assert outcome["category"] == "user" and fault in outcome["error"]
    assert (
        client.wait(client.told("optim_step", model_id=run, seq_id=3, adam_params={"learning_rate": 1.0}))["category"]
        == "user"
    )
    assert client.trained(run, 4).metrics["loss:sum"] > 0
    for body, fault in (
        ({"base_model": "other"}, "demo"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": None}, "lora_config"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "AdamW"),
    ):
        fields = {
            "session_id": client.session,
            "model_seq_id": 9,
            "base_model": "demo",
            "lora_config": {"rank": 4},
            **body,
        }
        answer = client.post("create_model", **fields)
        assert answer.status_code in (400, 404) and fault in error_of(answer), answer.text
    answer = client.post("create_session", tags=[], user_metadata=None, sdk_version="0.25.0")
    assert answer.status_code == 400 and "0.38.0" in error_of(answer)
    assert client.post("copy_weights").status_code == 404
    assert client.told("telemetry", events=[]) == {"status": "accepted"}


def test_what_is_refused_uses_its_number_up(api: Api) -> None:
    client = Client(api)
    run = client.run()
    nowhere = {"model_id": run, "path": f"tinker://{run}/weights/nowhere", "optimizer": True}
    for number, (verb, body, fault) in enumerate((
        ("load_weights", nowhere, "no checkpoint"),
        ("load_weights", nowhere | {"optimizer_config": {"type": "sgd"}}, "AdamW"),
        ("optim_step", {"model_id": run, "adam_params": {"learning_rate": "fast"}}, "learning_rate"),
        ("optim_step", {"model_id": run, "optimizer_params": {"type": "sgd"}}, "AdamW"),
        ("save_weights", {"model_id": run, "path": "../../away"}, "named"),
        ("save_weights", {"model_id": run}, "path"),
        ("save_weights_for_sampler", {"model_id": run}, "needs a path"),
    ), 1):  # fmt: skip
        told = client.wait(client.told(verb, seq_id=number, **body))
        assert told["category"] == "user" and fault in told["error"], told
    assert client.trained(run, 8).metrics["loss:sum"] > 0
    assert client.post("optim_step", adam_params={"learning_rate": "fast"}).status_code == 400


def test_stops_and_samplers_that_follow(api: Api) -> None:
    client = Client(api)
    run = client.run()
    base = client.told(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model="demo"
    )["sampling_session_id"]
    save = {"model_id": run, "kind": "inflight"}
    follows = client.wait(client.told("save_weights_for_sampler", seq_id=1, sampling_session_seq_id=1, **save))[
        "sampling_session_id"
    ]
    plain = client.sample(base)
    tokens = np.frombuffer(plain.sequences[0].tokens, np.int32).tolist()
    assert client.sample(follows).sequences[0].tokens == plain.sequences[0].tokens
    stopped = client.sample(base, 1, params={"stop": [tokens[2]]}).sequences[0]
    assert (
        np.frombuffer(stopped.tokens, np.int32).tolist() == tokens[: tokens.index(tokens[2]) + 1]
        and stopped.stop_reason == 0
    )
    by_text = client.sample(base, 2, params={"stop": [bytes(tokens[1:3]).decode()]}).sequences[0]
    assert by_text.stop_reason == 0 and len(by_text.tokens) // 4 <= len(tokens)
    for number in range(2, 10, 2):
        client.send_pass(run, number)
        client.step(run, number + 1, lr=5e-2)
    again = client.wait(client.told("save_weights_for_sampler", seq_id=10, sampling_session_seq_id=2, **save))[
        "sampling_session_id"
    ]
    new = client.sample(follows, 9).sequences[0]
    assert new.logprobs == client.sample(again, 9).sequences[0].logprobs != plain.sequences[0].logprobs
    refused = client.post(
        "asample", sampling_session_id=base, seq_id=5, prompt={"chunks": [{"type": "image"}]}, sampling_params={}
    )
    assert refused.status_code == 400 and "image" in error_of(refused)


def test_a_silent_session_ends_and_frees_what_it_had(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(api.engine.adapters())
    client = Client(api)
    run = client.run()
    client.wait(client.told("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=0))
    waits = client.send_pass(run, 3).json()  # for one that never comes
    assert len(api.engine.adapters()) == before + 1
    monkeypatch.setattr(tinker_sessions, "SESSION_S", 0.0)
    eventually(lambda: client.post("session_heartbeat", session_id=client.session).status_code == 410)
    monkeypatch.undo()
    eventually(lambda: len(api.engine.adapters()) <= before)
    assert client.post("retrieve_future", **{"request_id": waits["request_id"]}).status_code == 410


def test_samples_queue_where_a_key_has_its_part(api: Api) -> None:
    client = Client(api)
    base = client.told(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model="demo"
    )["sampling_session_id"]
    found: list[Any] = []

    def ask(number: int) -> None:
        found.append(client.sample(base, number, num_samples=100, params={"max_tokens": 2}))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(found) == 24 and all(len(each.sequences) == 100 for each in found)


def test_a_server_that_is_started_again_goes_on(tmp_path: Path) -> None:
    def tokens(client: Client, sampler: str) -> bytes:
        return bytes(client.sample(sampler, 1, params={"temperature": 1.0, "seed": 5}).sequences[0].tokens)

    with served(tmp_path) as api:
        client, undisturbed = Client(api), Client(api)
        run = client.run()
        for number in (1, 3):
            client.trained(run, number)
            client.step(run, number + 1, lr=3e-2)
        save = {"model_id": run, "sampling_session_seq_id": 0}
        sampler = client.wait(client.told("save_weights_for_sampler", seq_id=5, **save))["sampling_session_id"]
        follows = client.wait(
            client.told(
                "save_weights_for_sampler", seq_id=6, **save | {"sampling_session_seq_id": 1, "kind": "inflight"}
            )
        )["sampling_session_id"]
        path = client.wait(client.told("save_weights", model_id=run, seq_id=7, path="first"))["path"]
        waits = [
            client.send_pass(run, 9).json(),
            client.told("optim_step", model_id=run, seq_id=10, adam_params={"learning_rate": 3e-2}),
        ]
        drawn, of_base = (
            tokens(client, sampler),
            undisturbed.told(
                "create_sampling_session", session_id=undisturbed.session, sampling_session_seq_id=3, base_model="demo"
            )["sampling_session_id"],
        )
        output = wire.messages().ForwardBackwardOutput
        last = output.FromString(client.wait({"request_id": f"{run}/3"}))
    with served(tmp_path) as api:
        client.url = undisturbed.url = f"{api.url}/api/v1"
        assert client.told("session_heartbeat", session_id=client.session)
        assert tokens(client, sampler) == tokens(client, follows) == drawn != tokens(undisturbed, of_base)
        assert output.FromString(client.wait({"request_id": f"{run}/3"})) == last  # what was done is not done again
        taken = client.wait(client.told("save_weights", model_id=run, seq_id=8, path="first"))
        assert "already" in taken["error"]
        norms = [client.wait(each) for each in waits[1:]]
        same = undisturbed.run()
        for number in (1, 3, 5):
            loss = undisturbed.trained(same, number).metrics["loss:sum"]
            norm = undisturbed.step(same, number + 1, lr=3e-2)["metrics"]["grad_norm:mean"]
        told = output.FromString(client.wait(waits[0]))
        assert told.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        assert norms[0]["metrics"]["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)
        loaded = client.wait(
            client.told("load_weights", path=path, optimizer=True, session_id=client.session, model_seq_id=7)
        )["model_id"]
        client.post(f"sessions/{client.session}/finish")
        assert client.post("get_info", model_id=loaded).status_code == 410
        state = tmp_path / "checkpoints" / "state"
        eventually(lambda: [each.name for each in (state / "runs").iterdir() if each.name[0] != "."] == [same])
        assert [each.name for each in (state / "sessions").iterdir()] == [undisturbed.session]
    facts = tmp_path / "checkpoints" / same.replace(":", ".") / "run.json"
    facts.write_text(facts.read_text().replace('"fingerprint":"', '"fingerprint":"other'))
    with served(tmp_path) as api:
        undisturbed.url = f"{api.url}/api/v1"
        assert "began on another base" in undisturbed.wait({"request_id": f"{same}/0"})["error"]


def test_metrics_by_tenant(api: Api) -> None:
    def value(name: str, who: str) -> float:
        found = re.search(
            rf'^symbiosis_serve_tenant_training_{name}{{tenant="{who}"}} (.*)$',
            web.get(f"{api.url}/metrics").text,
            re.M,
        )
        return float(found[1]) if found else 0.0

    bob = Client(api, "bob")
    before, runs = value("tokens_total", "bob"), value("runs", "bob")
    run = bob.run()
    bob.trained(run, 1)
    bob.step(run, 2)
    late = bob.send_pass(run, 4).json()
    assert value("tokens_total", "bob") == before + LENGTH and value("steps_total", "bob") >= 1
    assert value("runs", "bob") == runs + 1 and value("requests_waiting", "bob") == 1
    bob.step(run, 3)
    bob.wait(late)
    assert value("requests_waiting", "bob") == 0


def test_a_client_that_vanishes_loses_nobody_else_anything(api: Api) -> None:
    gone, stays = Client(api), Client(api, "bob")
    run, other = gone.run(), stays.run()
    body = wire.messages().ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy", data=[datum()] * 8)
    whole = body.SerializeToString()
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEYS['anna']}\r\nContent-Type: application/x-protobuf\r\n"
    address = ("127.0.0.1", int(api.url.rpartition(":")[2]))
    for sent in (whole[:9], whole):  # in the midst of a body, and of a pass
        with socket.create_connection(address) as connection:
            connection.sendall(head.encode() + f"Content-Length: {len(whole)}\r\n\r\n".encode() + sent)
    assert stays.trained(other, 1).metrics["loss:sum"] > 0
    again = gone.send_bytes(whole)  # it comes back
    out = wire.messages().ForwardBackwardOutput.FromString(gone.wait(again.json()))
    assert out.metrics["loss:sum"] == pytest.approx(8 * stays.trained(other, 2).metrics["loss:sum"], rel=1e-4)
    norm = gone.step(run, 2)["metrics"]["grad_norm:mean"]
    stays.trained(other, 3)
    assert norm == pytest.approx(8 / 3 * stays.step(other, 4)["metrics"]["grad_norm:mean"], rel=1e-3)  # once


def test_what_a_missing_number_keeps_waiting_is_told_and_may_be_sent_again(tmp_path: Path) -> None:
    with served(tmp_path, order_wait=2.0) as api:
        client = Client(api)
        run = client.run()
        early = client.send_pass(run, 2).json()
        told = client.wait(early)
        assert told["category"] == "user" and "command 1 has not come" in told["error"]
        for number in (2, 1):
            client.send_pass(run, number)
        assert isinstance(client.wait(early), bytes)
