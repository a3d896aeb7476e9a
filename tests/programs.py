"""What client processes of tests run: training, generating, calling for ever. All of it is deterministic."""

import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import zmq
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.protocol import Call, Hello, Op, encode_call, encode_control
from tests.conftest import tiny_llama
from tests.processes import Client, Executor, Say, killed_at_the_end


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 100, (2, 12), generator=generator) for _ in range(steps)]


def with_adapter(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """The loss before it."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_model(model: nn.Module, steps: int, say: Say = lambda _: None) -> dict[str, Any]:
    """LoRA for some steps, with dropout; the adapter at the end, and the losses on the way."""
    adapted = with_adapter(model).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step, ids in enumerate(batches(steps)):
        say(step)
        losses.append(one_step(adapted, optimizer, ids))
    adapter = {n: p.detach().numpy() for n, p in adapted.named_parameters() if p.requires_grad}
    return {"losses": losses, "adapter": adapter}


def train(
    say: Say, endpoint: Any, steps: int, turns: Any = None, timeout: float = 60.0, patience: float = 60.0
) -> dict[str, Any]:
    """... each step when it is its turn, if `turns` (a semaphore) says so."""

    def begin(step: int) -> None:
        say(step)
        if turns is not None:
            turns.acquire()

    model = symbiosis.from_executor(endpoint, timeout=timeout)
    next(remote_weights(model)).handle.session.patience = patience
    result = train_model(model, steps, begin)
    stats = symbiosis.stats(model)
    return {**result, "reconnects": stats.reconnects, "retries": stats.retries}


def data_parallel(say: Say, endpoint: str, store: Path, rank: int) -> dict[str, Any]:
    """The gradients of one of two ranks, of a split and of an unsplit model; and of its own rows without the other rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        ids, split = batches(2)[rank], symbiosis.wrap(tiny_llama(), endpoint)
        return {  # no DDP outlives its group: to drop the group with it may wait without end
            "plain": gradients(nn.parallel.DistributedDataParallel(with_adapter(tiny_llama())), ids),
            "split": gradients(nn.parallel.DistributedDataParallel(with_adapter(split)), ids),
            "alone": gradients(with_adapter(tiny_llama()), ids),
            "calls": symbiosis.stats(split).calls,
        }
    finally:
        dist.destroy_process_group()


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Of a step; by the names that they have without DDP."""
    torch.manual_seed(5)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    return {n.removeprefix("module."): p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def undisturbed(model: Path, steps: int) -> dict[str, Any]:
    """What `train` gives when nothing happens to anybody."""
    with killed_at_the_end() as processes:
        processes.append(Executor(model, f"--listen=local://{model}/calm.sock", log=model / "calm.log"))
        processes.append(Client(train, processes[0].endpoint, steps))
        return processes[1].result()


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """What two trainings gave, bit for bit."""
    assert result["losses"] == expected["losses"]
    assert result["adapter"].keys() == expected["adapter"].keys()
    for name, value in expected["adapter"].items():
        assert numpy.array_equal(result["adapter"][name], value), name


def generate_tokens(model: nn.Module, length: int, seed: int) -> list[int]:
    ids = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(seed))
    out = model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)  # type: ignore[operator]
    return out[0].tolist()


def generate(say: Say, endpoint: str, length: int, seed: int) -> list[int]:
    model = symbiosis.from_executor(endpoint)
    say("ready")
    return generate_tokens(model, length, seed)


def generate_until(say: Say, endpoint: Any, length: int, seed: int, enough: Any) -> list[list[int]]:
    """The same tokens again and again, until `enough` (a semaphore) is released; every different answer once."""
    model, answers = symbiosis.from_executor(endpoint), []
    say("ready")
    while True:
        tokens = generate_tokens(model, length, seed)
        if tokens not in answers:
            answers.append(tokens)
        if enough.acquire(block=False):
            return answers


def train_resumably(say: Say, endpoint: str, steps: int, checkpoint: Path) -> dict[str, Any]:
    """What `train` does, with everything that it would need to go on written to a file after each step."""
    adapted = with_adapter(symbiosis.from_executor(endpoint)).train()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses: list[float] = []
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(kept["adapter"][name])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        losses = kept["losses"]
    for step, ids in list(enumerate(batches(steps)))[len(losses) :]:
        say(step)
        losses.append(one_step(adapted, optimizer, ids))
        now = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state(), "losses": losses}
        torch.save(
            {"adapter": {name: p.detach() for name, p in trained.items()}, **now}, checkpoint.with_suffix(".new")
        )
        checkpoint.with_suffix(".new").rename(checkpoint)
    return {"losses": losses, "adapter": {name: p.detach().numpy() for name, p in trained.items()}}


def read_nothing(say: Say, endpoint: str, calls: int, nbytes: int) -> None:
    """A client that asks and never takes an answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(endpoint)
        dealer.send(encode_control(Hello(client="reads nothing")))
        dealer.recv()
        for number in range(calls):
            dealer.send_multipart([encode_call(Call(Op.ECHO, 0, "uint8", (1, nbytes)), number + 1), bytes(nbytes)])
        say("asked")
        time.sleep(3600)  # until it is killed


def call_for_ever(say: Say, endpoint: str, rows: int) -> None:
    """Large calls, one after the other."""
    session = Session(endpoint)
    x = torch.ones(rows, 64)
    session.call(Op.ECHO, 0, x)
    say("calling")
    while True:
        session.call(Op.ECHO, 0, x)


def call_when_told(say: Say, endpoint: str, seconds: float) -> int:
    """One call, a pause, and another call. How often it had to join again."""
    session = Session(endpoint)
    x = torch.arange(64.0).view(1, 64)
    for number in range(2):
        assert torch.equal(session.call(Op.ECHO, 0, x), x)
        if number == 0:
            say(session.welcome.session)
            time.sleep(seconds)
    return session.stats.reconnects
