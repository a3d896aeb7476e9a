"""Tinker's SDK, unmodified, against `symbiosis serve demo --train` with all of its processes, each of which is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cluster import cluster_at
from tests.ranks import free_port
from tests.serving_api import Command, eventually, is_up

pytest.importorskip("tinker")
pytestmark = pytest.mark.long
PROGRAM = """
import sys
import numpy as np
import tinker

service = tinker.ServiceClient()
run = service.create_lora_training_client(base_model="demo", rank=4, seed=1).result()
ids = list(b"Once upon a time there was a base model that was shared.")
weights = np.ones(len(ids) - 1, np.float32)
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": np.array(ids[1:]), "weights": weights})


def step(data=(datum,)):
    done = run.forward_backward(list(data), "cross_entropy")
    run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return done.result().metrics["loss:sum"]


losses = [step() for _ in range(3)]
print("trained", flush=True)
sys.stdin.readline()  # meanwhile a process is killed
losses.append(step())
assert losses == sorted(losses, reverse=True), losses
short = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:2]), loss_fn_inputs={"target_tokens": np.array(ids[1:3]), "weights": weights[:2]})
step([short] * 1025)  # in two chunks
own = run.forward_backward_custom([datum], lambda data, logprobs: (-sum(each.sum() for each in logprobs), {"mine": 1.0})).result()
assert own.metrics["mine"] == 1.0
sampler = run.save_weights_and_get_sampling_client()
sampler = sampler.result() if hasattr(sampler, "result") else sampler
prompt = tinker.ModelInput.from_ints(ids[:9])
found = sampler.sample(prompt, 2, tinker.SamplingParams(max_tokens=8, seed=3), include_prompt_logprobs=True).result()
assert found.prompt_logprobs[0] is None and len(found.sequences) == 2
tokens = ids[:9] + found.sequences[0].tokens
again = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
)
logprobs = run.forward([again], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
assert np.abs(logprobs[8:] - np.array(found.sequences[0].logprobs)).max() < 1e-5
path = run.save_state("first").result().path
other = service.create_training_client_from_state_with_optimizer(path).result()
assert other.forward([datum], "cross_entropy").result().metrics == run.forward([datum], "cross_entropy").result().metrics
try:
    run.forward_backward([tinker.Datum(model_input=prompt, loss_fn_inputs=datum.loss_fn_inputs)], "cross_entropy").result()
    raise SystemExit("what does not fit was taken")
except tinker.RequestFailedError as error:
    assert error.category == "user", error
except tinker.APIStatusError as error:
    assert error.status_code == 400 and "datum 0" in str(error), error
print("done", flush=True)
"""


GOES_ON = """
import sys
import numpy as np
import tinker

service = tinker.ServiceClient()
ids = list(b"Once upon a time there was a base model that was shared.")
weights = np.ones(len(ids) - 1, np.float32)
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": np.array(ids[1:]), "weights": weights})


def sent(run, count):
    return [each for _ in range(count) for each in (run.forward_backward([datum], "cross_entropy"), run.optim_step(tinker.AdamParams(learning_rate=1e-2)))]


def losses(promises):
    return [each.result().metrics["loss:sum"] for each in promises[::2]]


def sampled(sampler):
    [found] = sampler.sample(tinker.ModelInput.from_ints(ids[:9]), 1, tinker.SamplingParams(max_tokens=8, seed=3)).result().sequences
    return found.tokens, np.array(found.logprobs)


def same(one, other):
    assert one[0] == other[0] and np.abs(one[1] - other[1]).max() < 1e-4, (one, other)


run = service.create_lora_training_client(base_model="demo", rank=4, seed=1).result()
before = losses(sent(run, 3))
old = run.save_weights_and_get_sampling_client()
drawn = sampled(old)
promises = sent(run, 20)
promises[0].result()
print("trained", flush=True)
sys.stdin.readline()  # meanwhile the server is killed, and started again
after = losses(promises)
same(sampled(old), drawn)
other = service.create_lora_training_client(base_model="demo", rank=4, seed=1).result()
undisturbed = losses(sent(other, 23))
assert np.abs(np.array(before + after) - undisturbed).max() < 1e-3, (before + after, undisturbed)
same(sampled(run.save_weights_and_get_sampling_client()), sampled(other.save_weights_and_get_sampling_client()))
print("done", flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command("--train", "--checkpoints", str(tmp_path / "checkpoints"), forked=True, forked_http=False)
    try:
        yield command
    finally:
        command.close()


@contextmanager
def client(url: str, program: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has said that it has trained."""
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-demo", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == "trained\n", process.communicate()
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_sdk_trains_samples_and_goes_on_when_http_is_killed(command: Command) -> None:
    with client(command.url, PROGRAM) as program:
        os.kill(command.child("http_process"), signal.SIGKILL)
        eventually(lambda: is_up(command.url))
        told, errors = program.communicate("go on\n", timeout=100)
        assert told == "done\n", errors[-3000:]
    assert command.end() == 0, command.errors


@pytest.mark.full
def test_the_sdk_goes_on_when_the_server_is_killed_and_started_again(tmp_path: Path) -> None:
    port = str(free_port("127.0.0.1"))
    words = ("--train", "--checkpoints", str(tmp_path / "checkpoints"), "--port", port)
    killed = Command(*words)
    with closing(killed), client(killed.url, GOES_ON) as program:
        http = killed.child("http_process")
        os.kill(killed.process.pid, signal.SIGKILL)  # the engine's process, which the others end with
        eventually(lambda: not Path(f"/proc/{http}").exists())
        with closing(Command(*words)) as again:
            told, errors = program.communicate("go on\n", timeout=200)
            assert told == "done\n", errors[-3000:]
            assert again.end() == 0, again.errors


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_sdk_goes_on_when_its_server_of_a_cluster_is_killed(tmp_path: Path) -> None:
    file = f"""
port: 0
checkpoints: {tmp_path}/checkpoints
models: {{demo: {{servers: 2, train: true, server: {{memory: 64MiB}}}}}}
"""
    with cluster_at(tmp_path, file, forked=True) as running, client(running.url, GOES_ON) as program:
        eventually(lambda: any(each.clients for each in running.servers()))
        [server] = [each for each in running.servers() if each.clients]
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: server.pid not in {each.pid for each in running.servers()})
        told, errors = program.communicate("go on\n", timeout=300)
        assert told == "done\n", errors[-3000:]
