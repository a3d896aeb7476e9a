"""Tinker's API under a tenant that asks for as much as it can: what it takes is bounded, and others go on."""

import importlib.util
import shutil
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.secret_files import write_secret
from tests.serving_api import Api, eventually, http_process, web

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker, for its descriptor", allow_module_level=True)

from symbiosis.server.tinker import (
    disk_shares,
    gone_servers,
    samplers,
    tenant_runs,
    tinker_service,
    tinker_sessions,
    wire,
)
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import RunFacts, write_facts
from symbiosis.server.tinker.tinker_messages import TinkerRefusal
from tests.process.test_tinker import KEYS, Client, datum, error_of, served, tensor

FEW = 64  # completions that may be under way


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("floods")
    write_secret(folder / "keys", "".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25, name="demo") as engine,
        symbiosis.training.Engine(
            executor.endpoint,
            state=tinker_service.runs_folder(folder / "checkpoints"),
            max_waiting=FEW,
            room_wait=tinker_service.ROOM_WAIT_S,
        ) as trainer,
    ):
        training = tinker_service.TrainingService(engine, trainer, folder / "checkpoints", "demo", str(DEMO_MODEL))
        try:
            with http_process(engine, training, api_keys=str(folder / "keys"), max_requests=FEW) as api:
                yield api
        finally:
            training.close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\x1a\x02\x0a\x00" * 1_000_000, 413),  # data
        (b"\x1a\x80\x80\x80\x01" + b"\x0a\x00" * (1 << 20), 413),  # chunks of one datum
        (b"\x18\x01" * 1_000_000, 413),
        (b"\x0b\x0c" + b"\x1a\x02\x0a\x00" * 1_000_000, 400),  # behind a group
        (b"\x1a\x05\x0a\x00", 400),
        (b"\xff" * 11, 400),
        (b"\x1a", 400),
    ],
)
def test_very_many_messages_are_refused_before_protobuf_makes_them(
    body: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.messages().ForwardBackwardRequest, "FromString", None)
    with pytest.raises(TinkerRefusal) as refused:
        wire.read_pass(body)
    assert refused.value.status == status


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


def test_what_is_kept_of_refusals_is_little(api: Api) -> None:
    """Each is of 4 MB, and says what is wrong with it."""
    bob = Client(api, "bob")
    run, name = bob.run(), "a" * 4_000_000
    for number, fields in enumerate(({"loss_fn": name}, {"loss_fn_config": {name: 1.0}}, {}), 1):
        wrong = datum() if fields else datum(**{name: tensor([1.0])})
        told = wire.messages().ForwardBackwardRequest(
            **{"loss_fn": "cross_entropy", **fields, "model_id": run, "seq_id": number}
        )
        told.data.append(wrong)
        promise = bob.send_bytes(told.SerializeToString()).json()
        refused = bob.wait(promise)
        assert refused["category"] == "user" and 10 < len(refused["error"]) < 2000, refused["error"][:200]
    assert bob.trained(run, 4).metrics["loss:sum"] > 0
    bob.post(f"sessions/{bob.session}/finish")


METADATA = b'{"a":[' + b",".join([b"{}"] * 20_000) + b"]}"


def test_metadata_are_kept_as_they_are_written(api: Api) -> None:
    bob = Client(api, "bob")
    headers = {**bob.headers, "Content-Type": "application/json"}

    def begin() -> str:
        body = b'{"user_metadata":%b,"sdk_version":"%b"}' % (METADATA, wire.SDKS[-1].encode())
        answer = web.post(f"{bob.url}/create_session", content=body, headers=headers, timeout=60)
        return str(answer.json()["session_id"])

    begin()
    tracemalloc.start()
    try:
        sessions = [begin() for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
        lora = msgspec.json.encode({"rank": 4, "seed": 0})
        for session in sessions:
            head = b'{"session_id":"%b","model_seq_id":0,"base_model":"demo"' % session.encode()
            body = b'%b,"lora_config":%b,"user_metadata":%b}' % (head, lora, METADATA)
            bob.wait(web.post(f"{bob.url}/create_model", content=body, headers=headers, timeout=60).json())
        grown = sum(
            each.size
            for each in tracemalloc.take_snapshot().statistics("filename")
            if "msgspec" in each.traceback[0].filename or "symbiosis" in each.traceback[0].filename
        )
        assert grown < 5_000_000
    finally:
        tracemalloc.stop()
    assert METADATA in bob.get(f"sessions/{sessions[0]}").content
    assert METADATA in bob.get(f"training_runs/{sessions[0]}:train:0").content
    assert bob.get("training_runs?limit=3").content.count(METADATA) == 3
    saved = b'{"model_id":"%b:train:0","seq_id":1,"path":"a","user_metadata":%b}' % (sessions[0].encode(), METADATA)
    bob.wait(web.post(f"{bob.url}/save_weights", content=saved, headers=headers, timeout=60).json())
    assert METADATA in bob.get(f"training_runs/{sessions[0]}:train:0/checkpoints").content
    wrong = bob.post("create_session", user_metadata=[], sdk_version=wire.SDKS[-1])
    assert wrong.status_code == 400 and "user_metadata" in error_of(wrong)
    for session in sessions:
        bob.post(f"sessions/{session}/finish")


def test_sessions_are_counted_with_what_is_on_the_disk(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Client(api, "bob")
    monkeypatch.setattr(disk_shares, "COUNT_S", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    answer = bob.post("create_session", user_metadata={"a": "b" * 10_000}, sdk_version=wire.SDKS[-1])
    assert answer.status_code == 507, answer.text


def test_samples_of_one_key_that_wait_are_bounded(api: Api) -> None:
    bob, anna = Client(api, "bob"), Client(api)
    long = {**SAMPLE, "sampling_params": {"max_tokens": 500}, "num_samples": FEW // 2}
    with ThreadPoolExecutor(8) as pool:
        sent = Counter(answer.status_code for answer in pool.map(lambda _: bob.post("asample", **long), range(2 * FEW)))
    assert sent[200] >= FEW and sent[503] > 0 and sent.total() == sent[200] + sent[503], sent
    began = time.monotonic()
    assert anna.wait(anna.told("asample", **SAMPLE)) and time.monotonic() - began < 20


def test_who_has_its_part_of_what_may_wait_is_told_at_once(api: Api) -> None:
    """Number 1 never comes. No thread waits for room, so others, and what else this key asks for, are answered."""
    bob, anna = Client(api, "bob"), Client(api)
    run, other = bob.run(), bob.run()
    sent = Counter(bob.send_pass(run, number).status_code for number in range(2, FEW))
    assert sent[200] == FEW // 2 and sent[429] == FEW // 2 - 2, sent
    late = bob.send_pass(other, 1)
    assert late.status_code == 429 and "wait already" in error_of(late)
    began = time.monotonic()
    bob.told("get_info", model_id=run)
    lora = {"rank": 4, "seed": 0}
    made = bob.told("create_model", session_id=bob.session, model_seq_id=9, base_model="demo", lora_config=lora)
    assert anna.trained(anna.run(), 1).metrics["loss:sum"] > 0
    assert time.monotonic() - began < 20
    for number in range(1, FEW):
        sent = bob.send_pass(run, number)
        while sent.status_code == 429:
            time.sleep(0.05)
            sent = bob.send_pass(run, number)
        assert sent.status_code == 200
    assert bob.trained(other, 1).metrics["loss:sum"] > 0
    assert bob.wait(made)["model_id"] == made["model_id"]  # when there was room


def test_requests_that_wait_in_memory_are_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 1 never comes, and what would come after it takes memory; when it comes, it is let in."""
    monkeypatch.setattr(tenant_runs, "WAITING_BYTES", 8000)
    bob, anna = Client(api, "bob"), Client(api)
    run = bob.run()
    sent = [bob.send_pass(run, number, datum()) for number in range(2, 40)]
    refused = [answer for answer in sent if answer.status_code == 429]
    assert 10 < len(refused) < 36 and "wait" in error_of(refused[0])
    assert anna.trained(anna.run(), 1).metrics["loss:sum"] > 0
    assert bob.trained(run, 1).metrics["loss:sum"] > 0
    bob.post(f"sessions/{bob.session}/finish")


def test_a_tenant_does_not_fill_the_disk(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has as much as it leaves free is asked to wait; others are not."""
    bob, anna = Client(api, "bob"), Client(api)
    run, other = bob.run(), anna.run()
    for number in range(1, 6):
        bob.wait(bob.told("save_weights", model_id=run, seq_id=number, path=f"{number}"))
    saved = bob.get("checkpoints").json()["checkpoints"]
    free = sum(each["size_bytes"] for each in saved)
    monkeypatch.setattr(disk_shares, "COUNT_S", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, free))
    full = bob.send_pass(run, 6)
    assert full.status_code == 507 and "delete checkpoints" in error_of(full)
    assert anna.trained(other, 1).metrics["loss:sum"] > 0
    for each in saved:
        path = each["tinker_path"].removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        assert bob.get(f"training_runs/{path}", "DELETE").status_code == 204
    assert bob.trained(run, 6).metrics["loss:sum"] > 0


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[list[tinker_service.TrainingService]]:
    """The services of two servers of a cluster."""
    with ExitStack() as stack:
        executor = stack.enter_context(symbiosis.Executor("demo"))
        engine = stack.enter_context(Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25, name="demo"))
        services = []
        for name in ("one", "two"):
            runs = tinker_service.runs_folder(tmp_path, name)
            trainer = stack.enter_context(symbiosis.training.Engine(executor.endpoint, state=runs))
            services.append(
                tinker_service.TrainingService(engine, trainer, tmp_path, "demo", str(DEMO_MODEL), server=name)
            )
            stack.callback(services[-1].close)
        yield services


def test_limits_of_a_key_are_those_of_all_servers_together(
    two_servers: list[tinker_service.TrainingService], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in ((tinker_sessions, "SESSIONS"), (tenant_runs, "RUNS"), (samplers, "SAMPLERS")):
        monkeypatch.setattr(module, limit, 3)
    one, two = two_servers

    def sessions(service: tinker_service.TrainingService, tenant: str, count: int) -> list[str]:
        return [service.ask(tenant, m.CreateSession())["session_id"] for _ in range(count)]

    def run(service: tinker_service.TrainingService, session: str, number: int) -> None:
        lora = m.LoraSettings(rank=4, seed=0)
        asked = m.CreateModel(session_id=session, model_seq_id=number, base_model="demo", lora_config=lora)
        promise = service.ask("anna", asked)
        assert not service.ask("anna", m.Retrieve(request_id=promise.request_id)).result(60).error

    def sampler(service: tinker_service.TrainingService, session: str, number: int) -> None:
        asked = m.CreateSampler(session_id=session, sampling_session_seq_id=number, base_model="demo")
        service.ask("anna", asked)

    first, second = sessions(one, "anna", 2), sessions(two, "anna", 1)
    for service in two_servers:
        with pytest.raises(TinkerRefusal, match="3 sessions") as refused:
            sessions(service, "anna", 1)
        assert refused.value.status == 429 and sessions(service, "bob", 1)
    for make, what in ((run, "3 runs"), (sampler, "3 samplers")):
        make(one, first[0], 0), make(one, first[1], 0), make(two, second[0], 0)
        for service, session in ((one, first[0]), (two, second[0])):
            with pytest.raises(TinkerRefusal, match=what) as refused:
                make(service, session, 1)
            assert refused.value.status == 429
    kept = {service: {each.name for each in service._folders_of("anna")} for service in two_servers}
    assert kept[one] == kept[two] >= {*first, *second, f"{second[0]}:train:0"}
    one.ask("anna", m.FinishSession(session_id=first[0]))
    run(two, second[0], 2)


def test_what_a_server_has_left_that_is_gone_counts_for_no_key(
    two_servers: list[tinker_service.TrainingService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _), id = two_servers, "c" * 32
    left = tmp_path / "servers" / "three" / "sessions" / id
    (left / "0.requests").mkdir(parents=True)
    write_facts(left / "session.json", tinker_sessions.SessionFacts(tenant="anna", created=0.0))
    facts = RunFacts(tenant="anna", base_model="demo", lora=m.LoraSettings(rank=4), created=0.0)
    one.checkpoints.begin_run(f"{id}:train:0", facts)
    assert left in one._folders_of("anna")
    mine = [service.ask("anna", m.CreateSession())["session_id"] for service in two_servers]
    monkeypatch.setattr(gone_servers, "BEGINS_S", 0.0)
    monkeypatch.setattr(gone_servers, "GONE_S", -1.0)  # those that are there keep what they have, whatever they say
    eventually(lambda: not left.exists() and one.checkpoints.facts_of(f"{id}:train:0") is None)
    assert {each.name for each in one._folders_of("anna")} == set(mine)


def test_many_runs_of_one_do_not_keep_another_from_its_own(api: Api) -> None:
    bob, anna = Client(api, "bob"), Client(api)
    for number in range(40):
        lora = {"rank": 4, "seed": 0}
        bob.told("create_model", session_id=bob.session, model_seq_id=number, base_model="demo", lora_config=lora)
    anna.run()
    last = bob.post("get_info", model_id=f"{bob.session}:train:39")
    assert last.status_code == 429 and "being made" in error_of(last)
    bob.post(f"sessions/{bob.session}/finish")
    Client(api, "bob").run()  # and does not wait for what nobody wants any more


def test_runs_that_left_nothing_leave_no_folder(api: Api) -> None:
    bob = Client(api, "bob")
    kept, gone = bob.run(), bob.run()
    bob.wait(bob.told("save_weights", model_id=kept, seq_id=1, path="one"))
    bob.post(f"sessions/{bob.session}/finish")
    assert bob.get(f"training_runs/{kept}").status_code == 200
    assert bob.get(f"training_runs/{gone}").status_code == 404


def test_what_is_damaged_among_the_runs_keeps_no_server_from_starting(tmp_path: Path) -> None:
    runs = tinker_service.runs_folder(tmp_path / "checkpoints")
    (runs / "bad").mkdir(parents=True)
    (runs / "bad" / "run.json").write_text("[]")
    (runs / "a file").touch()
    with served(tmp_path) as api:
        client = Client(api)
        assert client.trained(client.run(), 1).metrics["loss:sum"] > 0
