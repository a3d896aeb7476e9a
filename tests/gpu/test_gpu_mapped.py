"""Weights that a program on the executor's GPU has mapped: products and captured steps by them or by calls, with the same bits."""

import gc
import os
import pickle
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.direct import mapped as direct
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, CaptureError, Code
from symbiosis.transport.base import Advice
from symbiosis.transport.cuda.driver import shares_time
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral, wide_llama
from tests.gpu import memory
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S, lora, trainer
from tests.processes import until, watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nobody_else"),
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama, "gpt2": tiny_gpt2, "mixtral": tiny_mixtral, "wide": wide_llama,
}  # fmt: skip


def serve(where: str, ready: Any, asked: Any, name: str, options: dict[str, Any]) -> None:
    """An executor that loads no file; it tells how much of the GPU's memory torch holds for it, whenever it is asked."""
    words = {"share_weights": True, "heartbeat_s": 2.0} | options
    with symbiosis.Executor(MODELS[name]().cuda(), listen=[f"local://{where}"], **words) as executor:
        gc.collect()
        torch.cuda.empty_cache()
        ready.put(executor.endpoint)
        while asked.get():
            ready.put(torch.cuda.memory_allocated())


class Served:
    """An executor in a process of its own."""

    def __init__(self, processes: Any, path: Path, name: str = "llama", **options: Any) -> None:
        self._asked = processes.context.Queue()
        self.process, self._told = processes.start(serve, f"{path}/executor.sock", self._asked, name, options)
        self.endpoint: str = self._told.get(timeout=WAIT_S)

    def allocated(self) -> int:
        self._asked.put(True)
        return int(self._told.get(timeout=WAIT_S))

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


@pytest.fixture
def start(processes: Any, tmp_path: Path) -> Callable[..., Served]:
    return lambda name="llama", **options: Served(processes, tmp_path, name, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for the tests that leave it as it was."""
    started = Processes()
    yield Served(started, tmp_path_factory.mktemp("executor"))
    started.end()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()


def session_of(model: nn.Module) -> Any:
    return next(remote_weights(model)).handle.session


@contextmanager
def advised(monkeypatch: pytest.MonkeyPatch, model: nn.Module, advice: Advice) -> Iterator[None]:
    """As if the executor advised that; small weights are worth batching, too."""
    with monkeypatch.context() as patched:
        patched.setattr("symbiosis.client.direct.rule.WORTH_BATCHING", 0)
        patched.setattr(direct.Mapped, "advice", lambda self: advice)
        page = session_of(model).mapped._page
        patched.setattr(type(page), "others", advice.others)
        patched.setattr(type(page), "give_way", advice.give_way)
        patched.setattr(type(page), "is_none", advice.is_none)
        yield


def adapter(model: nn.Module, name: str) -> nn.Module:
    torch.manual_seed(3)
    targets = "all-linear" if name != "mixtral" else ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("way", ["direct", "called"])
def test_a_model_is_the_unsplit_one_either_way(
    llama: Served, start: Callable[..., Served], name: str, way: str, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = llama if name == "llama" else start(name)
    whole, split = MODELS[name]().cuda(), symbiosis.wrap(MODELS[name]().cuda(), served.endpoint)
    before = symbiosis.stats(split).direct
    with advised(monkeypatch, split, Advice(others=int(way == "called"), give_way=way == "called")):
        with torch.no_grad():
            assert torch.equal(split(ids[:, :1]).logits, whole(ids[:, :1]).logits)
        losses = []
        for model in (adapter(whole, name), adapter(split, name)):
            model.train()
            torch.manual_seed(7)  # of dropout
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
        torch.cuda.synchronize()
    (loss, gradients), (other, others) = losses
    assert torch.equal(loss, other) and gradients and all(map(torch.equal, gradients, others))
    figures = symbiosis.stats(split)
    if way == "direct":
        assert figures.calls == 0 and figures.direct > before
    else:
        assert figures.calls > 0 and figures.direct == before


def test_what_the_executor_refuses_for_its_rows_is_multiplied_directly(
    start: Callable[..., Served], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = tiny_llama().cuda(), symbiosis.wrap(tiny_llama().cuda(), start(max_rows=10).endpoint)
    made = []
    with advised(monkeypatch, split, Advice(others=1, give_way=True)):
        for model in (lora(whole).train(), lora(split).train()):
            step = trainer(model)
            made.append([step(ids).clone() for _ in range(3)])
        torch.cuda.synchronize()
    assert all(map(torch.equal, *made)) and symbiosis.stats(split).direct > 0


def test_what_is_void_is_said_also_by_a_call_that_is_not_taken(
    start: Callable[..., Served], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = lora(symbiosis.wrap(tiny_llama().cuda(), start(max_rows=10).endpoint)).train()
    with advised(monkeypatch, split, Advice(others=1, give_way=True)):
        split(input_ids=ids, labels=ids)
        session_of(split).lines[0]._void = CallError(Code.TOO_LARGE, "void")
        with pytest.raises(CallError, match="void"):
            split(input_ids=ids, labels=ids)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_makes_again_is_counted_as_often_as_it_is_made(
    reentrant: bool, llama: Served, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = tiny_llama().cuda(), symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    gradients = []
    for model in (adapter(whole, "llama"), adapter(split, "llama")):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        model.enable_input_require_grads()  # type: ignore[operator]
        with advised(monkeypatch, split, Advice(0, False)):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0 and all(map(torch.equal, *gradients))
    figures = symbiosis.stats(split)
    assert (figures.direct, figures.direct_rows) == (3 * 14, 3 * 14 * ids.numel()), "forward, once more, and gradients"


def test_a_pickled_model_maps_by_itself(llama: Served, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    with torch.no_grad():
        expected = split(ids).logits
        other = pickle.loads(pickle.dumps(split))
        assert torch.equal(other(ids).logits, expected)
    assert session_of(other) is not session_of(split) and session_of(other).mapped is not None
    assert symbiosis.stats(other).calls == 0


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters_by_mapped_weights(dora: bool, llama: Served, ids: Tensor) -> None:
    made = []
    for model in (tiny_llama().cuda(), symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)):
        torch.manual_seed(3)
        options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "use_dora": dora}
        adapted = get_peft_model(model, LoraConfig(**options), adapter_name="one").train()  # type: ignore[arg-type]
        adapted.add_adapter("two", LoraConfig(**options))
        for name in ("two", "one"):
            adapted.set_adapter(name)
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            made.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(made[i], made[i + 2], strict=True))
    assert symbiosis.stats(adapted).calls == 0


def test_weights_lie_once_in_the_memory_of_the_gpu(start: Callable[..., Served], ids: Tensor) -> None:
    """Neither the executor's allocator nor the client's holds a copy."""
    served = start("wide")
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # cuBLAS takes memory of its own
    nbytes = sum(p.nbytes for name, p in wide_llama().named_parameters() if "proj" in name)
    assert served.allocated() < nbytes / 2  # where cuBLAS keeps 32 MiB for each of three streams
    torch.cuda.empty_cache()
    before, left = torch.cuda.memory_allocated(), memory.left()
    split = symbiosis.from_executor(served.endpoint, device="cuda")
    with torch.no_grad():
        assert torch.equal(split(ids).logits, wide_llama().cuda()(ids).logits)
    gc.collect()
    torch.cuda.empty_cache()
    assert symbiosis.stats(split).calls == 0
    assert torch.cuda.memory_allocated() - before < nbytes / 4
    assert left - memory.left() < nbytes + (64 << 20)  # kernels and a segment; wide_llama() is gone


def test_a_captured_step_takes_the_way_that_is_advised(
    llama: Served, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a graph for each, makes neither twice, and gives the same bits."""
    whole, split = tiny_llama().cuda(), symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    trainers = [trainer(lora(model).train()) for model in (whole, split)]
    unsplit, step = symbiosis.capture(lambda ids, way: trainers[0](ids)), symbiosis.capture(trainers[1])
    counts = []
    for give_way in (False, True, False, True):
        with advised(monkeypatch, split, Advice(others=1, give_way=give_way)):
            before = symbiosis.stats(split).direct, symbiosis.stats(split).calls
            for _ in range(5):
                wanted, got = unsplit(ids, give_way).clone(), step(ids).clone()  # both eagerly, or both captured
                assert torch.equal(wanted, got), (give_way, len(step._graphs))
            torch.cuda.synchronize()
            figures = symbiosis.stats(split)
            counts.append((figures.direct - before[0], figures.calls - before[1]))
    assert counts[0] == counts[2] and counts[0][1] == 0 and counts[0][0] > 0, counts
    for made, called in (counts[1], counts[3]):  # fewer calls once groups are known
        assert made == 0 and called > 0, counts
    assert len(step._graphs) == 2


def test_advice_that_makes_no_difference_makes_no_graph(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows without gradients are never called."""
    split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    long = torch.randint(3, 100, (2, 32)).cuda()
    with torch.no_grad():
        run = symbiosis.capture(lambda ids: split(ids).logits)
        for others, give_way in ((0, False), (1, True), (0, True)):
            with advised(monkeypatch, split, Advice(others, give_way)):
                for _ in range(3):
                    run(long)
    assert len(run._graphs) == 1 and symbiosis.stats(split).calls == 0


def write_to_a_weight(endpoint: str, told: Any) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    weight = next(iter(session_of(split).mapped.weights.values()))
    told.put("begins")
    try:
        weight.add_(1.0)
        torch.cuda.synchronize()
    except RuntimeError as error:
        told.put(str(error))
        told.close()
        told.join_thread()
        os._exit(3)
    told.put("written")


def test_a_stray_write_is_an_error_where_it_was_made(llama: Served, processes: Any, ids: Tensor) -> None:
    if not shares_time(torch.device("cuda:0")):
        pytest.skip("under MPS a fault ends all programs of the GPU")
    split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    with torch.no_grad():
        expected = split(ids).logits
        process, told = processes.start(write_to_a_weight, llama.endpoint)
        assert told.get(timeout=WAIT_S) == "begins"
        assert told.get(timeout=WAIT_S) != "written"
        process.join(WAIT_S)
        assert torch.equal(split(ids).logits, expected)


@pytest.mark.fault
def test_a_client_goes_on_without_its_executor_and_maps_anew(
    start: Callable[..., Served], ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    served = start()
    split = symbiosis.wrap(tiny_llama().cuda(), served.endpoint, patience=2.0)
    mapped = session_of(split).mapped
    with torch.no_grad():
        run = symbiosis.capture(lambda ids: split(ids).logits)
        first, eager = [run(ids).clone() for _ in range(4)], split(ids).logits  # a captured step may round otherwise
        old = next(iter(mapped.weights.values())).data_ptr()
        told = symbiosis.stats(split).direct_rows
        with watching(served.endpoint) as look:
            until(lambda: look().direct_rows == told, "the heartbeat's figures")
        served.kill()
        until(lambda: "goes on with the weights" in caplog.text, "the loss of the executor")
        for _ in range(20):
            assert torch.equal(run(ids), first[-1]) and torch.equal(split(ids).logits, eager)
        rest = symbiosis.stats(split).direct_rows - told
        again = start()
        until(lambda: mapped.joins == 2, "the next executor", 30)
        with watching(again.endpoint) as look:
            until(lambda: look().direct_rows == rest, "what was multiplied while none was there")
        for expected in first:  # two runs without a graph, then with a new one
            assert torch.equal(run(ids), expected) and torch.equal(split(ids).logits, eager)
    assert next(iter(mapped.weights.values())).data_ptr() != old
    assert len(run._graphs) == 1 and symbiosis.stats(split).reconnects == 1


def test_a_capture_that_fails_counts_nothing(llama: Served, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    run = symbiosis.capture(lambda ids: split(ids).logits.sum().item())
    with torch.no_grad():
        run(ids), run(ids)
        before = symbiosis.stats(split)
        with pytest.raises(CaptureError, match="item"):
            run(ids)
    assert symbiosis.stats(split).direct_rows == before.direct_rows > 0


def test_garbage_is_not_collected_while_a_step_is_captured(llama: Served, ids: Tensor) -> None:
    """To end a session and to unmap its weights would break the capture."""
    split, gone = (symbiosis.wrap(tiny_llama().cuda(), llama.endpoint) for _ in range(2))
    session, seen = weakref.ref(session_of(gone)), []
    whole = tiny_llama().cuda()
    with torch.no_grad():
        gone(ids)
        unsplit = symbiosis.capture(lambda ids: whole(ids).logits)

        def step(ids: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                kept.clear()
                _ = [[] for _ in range(10_000)]
                seen.append(session() is not None)
            return split(ids).logits

        circle: list[Any] = [gone]  # which only the collector finds
        circle.append(circle)
        kept = [circle]
        del gone, circle
        run = symbiosis.capture(step)
        usual = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            for _ in range(4):
                assert torch.equal(run(ids), unsplit(ids))
        finally:
            gc.set_threshold(*usual)
    gc.collect()
    assert seen == [True] and session() is None and gc.isenabled()


def test_who_says_no_maps_nothing(llama: Served, ids: Tensor) -> None:
    for words in ({"share": False}, {"privacy": symbiosis.Noise()}, {"verify": True}):
        split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint, **words)  # type: ignore[arg-type]
        with torch.no_grad():
            split(ids)
        assert session_of(split).mapped is None and symbiosis.stats(split).calls > 0


def test_a_provider_who_says_no(start: Callable[..., Served], ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), start(share_weights=False).endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, tiny_llama().cuda()(ids).logits)
    assert session_of(split).mapped is None and symbiosis.stats(split).calls > 0 and not session_of(split).may_read


def test_what_is_mapped_can_be_read(llama: Served, ids: Tensor) -> None:
    whole, split = lora(tiny_llama().cuda()), lora(symbiosis.wrap(tiny_llama().cuda(), llama.endpoint))
    with torch.no_grad():
        merged, expected = split.merge_and_unload(), whole.merge_and_unload()  # type: ignore[operator]
        assert torch.equal(merged(ids).logits, expected(ids).logits)
        symbiosis.unwrap(merged)
        assert torch.equal(merged(ids).logits, expected(ids).logits)


def test_direct_rows_are_counted_by_the_executor(llama: Served, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)
    with torch.no_grad():
        split(ids)
    rows = symbiosis.stats(split).direct_rows
    assert rows > 0
    with watching(llama.endpoint) as look:
        mine = max(one.number for one in look().sessions if not one.observer)  # those before it may not have left yet
        until(
            lambda: [one.direct_rows for one in look().sessions if one.number == mine] == [rows],
            "the heartbeat's figures",
        )


def test_weights_are_let_go_when_the_model_is_gone(llama: Served, ids: Tensor) -> None:
    """Neither the threads of its line nor its graphs keep the session."""
    split = lora(symbiosis.wrap(tiny_llama().cuda(), llama.endpoint)).train()
    run = symbiosis.capture(trainer(split))
    for _ in range(4):
        run(ids)
    session, weight = (
        weakref.ref(one) for one in (session_of(split), next(iter(session_of(split).mapped.weights.values())))
    )
    del split, run
    gc.collect()
    assert session() is None
    until(lambda: gc.collect() is not None and weight() is None, "the threads of its line")


def descriptors() -> Counter[str]:
    """What this process has open, by its kind."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return Counter(link.partition(":")[0] for link in links)


def test_joins_leave_nothing(start: Callable[..., Served], ids: Tensor) -> None:
    served = start("wide")

    def join() -> None:
        split = symbiosis.from_executor(served.endpoint, device="cuda")
        with torch.no_grad():
            split(ids)
        del split
        gc.collect()
        torch.cuda.empty_cache()

    for _ in range(3):
        join()
    left, held, allocated = memory.left(), descriptors(), served.allocated()
    for _ in range(20):
        join()
    with suppress(AssertionError):
        until(lambda: descriptors() <= held, "the end of its descriptors", seconds=5)
    assert not descriptors() - held
    assert left - memory.left() < 32 << 20 and served.allocated() == allocated
