"""Runs of an engine: numbers, tenants, limits, and a folder in which they outlive it."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from symbiosis import training
from symbiosis.errors import AdapterError, Busy, ConfigError
from symbiosis.training import Datum, Engine, Run
from symbiosis.training.run_journal import DatumRecord, Record, _framed
from tests.conftest import tiny_llama
from tests.inproc.test_training import batch, gradients, held, lora


def trained(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters() if p.requires_grad]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return bool(one) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def three_steps(run: Run, seed: int = 0) -> Run:
    for number in range(3):
        run.forward_backward(batch(seed + number)).result(60)
        run.step(1e-2).result(60)
    return run


# ---------------------------------------------------------------- numbers


def test_numbered_commands_are_done_in_order_and_once() -> None:
    with Engine(tiny_llama()) as engine:
        run, other = (engine.create(lora(), seed=1) for _ in range(2))
        futures = {n: run.submit(n, "step", lr=1e-2) for n in (6, 2, 4)}
        futures |= {n: run.submit(n, "forward_backward", batch(n)) for n in (5, 3, 1)}
        assert run.submit(4, "step", lr=1e-2) is futures[4] and futures[6].result(60) > 0
        for n in (1, 3, 5):
            other.forward_backward(batch(n)).result(60)
            other.step(1e-2).result(60)
        assert run.steps == 3 and run.next_number == 7 and are_equal(trained(run), trained(other))


class Batch(list[Datum]):
    """One that can be known not to be kept."""


def test_what_is_kept_of_a_wrong_command_is_its_error_alone(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run, given = engine.create(lora(), seed=1, name="mine"), Batch([Datum([1, 2], [2, 3])])
        kept, ref = run.submit(1, "forward_backward", given, "l" * 1_000_000), weakref.ref(given)
        del given
        assert len(str(kept.exception(60))) < 300
        gc.collect()
        assert ref() is None
        kept = run.submit(2, "call", lambda _: (_ for _ in ()).throw(ConfigError("a" * 1_000_000)))
        kept.exception(60)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.name.startswith("log-")) < 100_000


def test_what_an_adapter_error_says_is_cut() -> None:
    assert len(str(AdapterError("a" * 1_000_000))) < 2000


def test_a_wrong_command_uses_up_its_number(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run = engine.create(lora(), seed=1, name="mine")
        wrong = [
            run.submit(1, "forward_backward", Datum([1], [10**6])),
            run.submit(2, "step", lr=1e-2),
            run.submit(3, "step"),
        ]
        for future, said in zip(wrong, ("one is 1000000", "no gradients", "lr"), strict=True):
            with pytest.raises((ConfigError, TypeError), match=said):
                future.result(60)
        run.submit(4, "forward_backward", batch(1)).result(60)
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run = engine.open("mine")
        assert run.next_number == 5
        with pytest.raises(ConfigError, match="no gradients"):
            run.submit(2, "step", lr=1e-2).result(60)


def test_a_missing_number_is_told() -> None:
    with Engine(tiny_llama(), order_wait=0.2) as engine:
        run = engine.create(lora())
        early = run.submit(2, "step", lr=1e-2)
        with pytest.raises(ConfigError, match="command 1 has not come"):
            early.result(60)
        run.submit(1, "forward_backward", batch(1)).result(60)
        assert run.submit(2, "step", lr=1e-2).result(60) > 0


# ---------------------------------------------------------------- tenants and limits


def test_a_tenant_with_many_runs_leaves_others_their_share() -> None:
    with Engine(tiny_llama(), max_tokens=18) as engine:
        many = [engine.create(lora(), tenant="many") for _ in range(6)]
        one = engine.create(lora(), tenant="one")
        go, _ = held(engine)
        order: list[str] = []
        for number in range(4):
            for run in (*many, one):
                run.forward(batch(number)).add_done_callback(lambda _, tenant=run.tenant: order.append(tenant))  # type: ignore[misc]
        go.set()
        one.forward(batch(9)).result(60)
        assert order[:8].count("one") == 4


def test_a_flood_waits_for_room_and_leaves_some_to_others() -> None:
    with Engine(tiny_llama(), max_waiting=8) as engine:
        flooding, other = engine.create(lora(), tenant="eve"), engine.create(lora(), tenant="bob")
        go, _ = held(engine)
        put: list[Any] = []
        thread = threading.Thread(target=lambda: put.extend(flooding.forward(batch(n)) for n in range(20)))
        thread.start()
        until = time.monotonic() + 20
        while engine.has_room("eve") and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.has_room("bob")
        waiting = other.forward(batch(1))
        go.set()
        thread.join(60)
        assert len([each.result(60) for each in put]) == 20 and waiting.result(60)


def test_whoever_does_not_want_to_wait_is_told() -> None:
    with Engine(tiny_llama(), max_waiting=4, room_wait=0) as engine:
        run = engine.create(lora())
        go, _ = held(engine)
        futures = [run.submit(1, "forward", batch(1)), run.forward(batch(2))]
        with pytest.raises(Busy, match="wait already"):
            run.forward(batch(3))
        assert run.submit(1, "forward", batch(1)) is futures[0]
        go.set()
        assert all(future.result(60) for future in futures)
        assert run.submit(2, "forward", batch(1)).result(60)


def test_what_a_missing_number_waits_for_is_let_in() -> None:
    with Engine(tiny_llama(), max_waiting=4, room_wait=0) as engine:
        run = engine.create(lora())
        late = [run.submit(n, "forward", batch(n)) for n in (3, 2)]
        with pytest.raises(Busy):
            run.submit(4, "forward", batch(4))
        run.submit(1, "forward", batch(1))
        assert all(each.result(60) for each in late)


def test_a_large_pass_lets_others_by() -> None:
    """What is more than a pass takes is computed in parts, and others have their turn between two of them."""
    data = [Datum(list(range(n, n + 8)), list(range(n + 1, n + 9))) for n in range(40)]
    with Engine(tiny_llama(), max_tokens=64) as engine:
        large, small = engine.create(lora(), seed=1, tenant="eve"), engine.create(lora(), tenant="bob")
        compute, order = engine._model.compute, list[str]()

        def computed(works: Any) -> None:
            compute(works)
            order.append("part")
            if len(order) == 1:
                for name, future in (("pass", small.forward_backward(batch(1))), ("step", small.step(1e-2))):
                    future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]

        engine._model.compute = computed  # type: ignore[method-assign]
        large.forward_backward(data).result(60)
        assert order == ["part", "part", "pass", "step", *["part"] * 4]
        alone = engine.create(lora(), seed=1)
        alone.forward_backward(data).result(60)
        for one, other in zip(gradients(large), gradients(alone), strict=True):
            torch.testing.assert_close(one, other)


def test_large_passes_of_two_tenants_are_computed_in_turn() -> None:
    """Nobody waits for all of another's batch, however large the own one is; and sums are those of each alone."""
    data = [Datum(list(range(n, n + 8)), list(range(n + 1, n + 9))) for n in range(80)]
    with Engine(tiny_llama(), max_tokens=64) as engine:
        eve, bob = engine.create(lora(), seed=1, tenant="eve"), engine.create(lora(), seed=2, tenant="bob")
        compute, parts, done = engine._model.compute, list[Any](), dict[str, int]()

        def computed(works: Any) -> None:
            compute(works)
            parts.append(works[0].adapter)
            if len(parts) == 1:
                second = bob.forward_backward(data[:24])
                second.add_done_callback(lambda _: done.update(bob=len(parts)))

        engine._model.compute = computed  # type: ignore[method-assign]
        eve.forward_backward(data).result(60)
        assert len(parts) == 13 and done["bob"] <= 7, (len(parts), done)
        engine._model.compute = compute  # type: ignore[method-assign]
        for seed, run, given in ((1, eve, data), (2, bob, data[:24])):
            alone = engine.create(lora(), seed=seed)
            alone.forward_backward(given).result(60)
            for one, other in zip(gradients(run), gradients(alone), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_last", [True, False])
def test_what_comes_behind_a_close_is_refused_and_others_go_on(is_last: bool) -> None:
    with Engine(tiny_llama()) as engine:
        closed, other = engine.create(lora(), tenant="eve"), engine.create(lora(), tenant="bob" if is_last else "eve")
        go, _ = held(engine)
        closing = threading.Thread(target=closed.close)
        closing.start()
        while not closed.commands:
            time.sleep(0.01)
        late = [closed.forward_backward(batch(1)), closed.step(1e-2)]
        go.set()
        closing.join(60)
        for each in late:
            with pytest.raises(ConfigError, match="this run is closed"):
                each.result(60)
        assert other.forward_backward(batch(1)).result(60).loss > 0


def test_calls_of_one_do_not_keep_others_from_passes() -> None:
    with Engine(tiny_llama()) as engine:
        flooding, other = engine.create(lora(), tenant="eve"), engine.create(lora(), tenant="bob")
        go, _ = held(engine)
        steps = [flooding.step(1e-2) for _ in range(500)]
        passed = other.forward(batch(1))
        go.set()
        passed.result(60)
        assert sum(step.done() for step in steps) < 400


@pytest.mark.parametrize("config", [lora(r=17), lora(rank_pattern={"q_proj": 99}), LoraConfig(r=10**9)])
def test_ranks_have_a_limit(config: Any) -> None:
    with Engine(tiny_llama(), max_rank=16) as engine, pytest.raises(AdapterError, match="16 at most"):
        engine.create(config)


@pytest.mark.parametrize("words", [{"max_waiting": 1}, {"max_rank": 0}, {"in_memory": 5}, {"on_device": 0}])
def test_limits_that_cannot_be(words: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Engine(tiny_llama(), **words)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a folder


KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "dropout": lambda: lora(lora_dropout=0.3),
    "DoRA": lambda: lora(use_dora=True),
    "LoRA+": lora,
}


def test_runs_leave_memory_and_come_back_to_the_bit(tmp_path: Path) -> None:
    engines = [Engine(tiny_llama(), state=tmp_path, in_memory=1), Engine(tiny_llama())]
    with engines[0] as engine, engines[1] as all_here:
        pairs = []
        for seed, (kind, config) in enumerate(KINDS.items()):
            words: dict[str, Any] = {"seed": seed, "lora_plus": 4.0 if kind == "LoRA+" else 1.0}
            pairs.append([each.create(config(), **words) for each in (engine, all_here)])
        for number in range(3):
            for run in (run for pair in pairs for run in pair):
                run.forward_backward(batch(number)).result(60)
            assert sum(run.state is not None for run, _ in pairs) <= 2
            for run in (run for pair in pairs for run in pair):
                run.step(1e-2).result(60)
        assert all(are_equal(trained(run), trained(other)) and run.steps == 3 for run, other in pairs)


def test_another_engine_goes_on(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path / "runs") as engine:
        run = three_steps(engine.create(lora(), seed=1, name="mine", tenant="alice"))
        expected = trained(run)
        run.forward_backward(batch(9)).result(60)
        waiting = gradients(run)
        saved = run.save(tmp_path / "saved")
        loaded = engine.load(saved, name="copy")
        assert loaded.steps == 3
    with Engine(tiny_llama(), state=tmp_path / "runs") as engine:
        assert engine.names == ["copy", "mine"]
        run, copy = engine.open("mine"), engine.open("copy")
        assert (run.tenant, run.steps, copy.steps) == ("alice", 3, 3) and engine.open("mine") is run
        assert are_equal(trained(run), expected) and are_equal(trained(copy), expected)
        assert are_equal(gradients(run), waiting)
        copy.close()
        assert engine.names == ["mine"]
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_loss_of_ones_own_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.training.run_journal.RATIO", float("inf"))
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run = engine.create(lora(), seed=1, name="mine")
        monkeypatch.setattr(engine._residency, "close", lambda: None)  # as if it were killed
        run.forward_backward([Datum([5, 6], [6, 7])], lambda found, _: found[0].square().sum()).result(60)
        run.forward_backward(Datum([5, 6], [[6, 7], [7, 8]])).result(60)
        run.step(1e-2).result(60)
        expected = trained(run)
    with Engine(tiny_llama(), state=tmp_path) as engine:
        assert are_equal(trained(engine.open("mine")), expected)


def test_names(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path) as engine:
        engine.create(lora(), name="a:b")
        for name, said in (("a:b", "already"), ("../x", "letters"), (".x", "letters"), ("", "letters")):
            with pytest.raises(ConfigError, match=said):
                engine.create(lora(), name=name)
        for name in ("other", "..", "../runs"):
            with pytest.raises(ConfigError, match="no run"):
                engine.open(name)
        with pytest.raises(ConfigError, match="another engine has"):
            Engine(tiny_llama(), state=tmp_path)
    Engine(tiny_llama(), state=tmp_path).close()


def test_a_run_whose_folder_is_damaged(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path) as engine:
        for name in ("good", "bad"):
            three_steps(engine.create(lora(), name=name, seed=1))
    [state] = (tmp_path / "bad").glob("state-*")
    state.write_bytes(state.read_bytes()[:-50])
    with Engine(tiny_llama(), state=tmp_path) as engine:
        with pytest.raises(AdapterError, match="cut off or damaged"):
            engine.open("bad").forward(batch(1)).result(60)
        assert engine.open("good").forward(batch(1)).result(60)


def add_to_log(folder: Path, **record: Any) -> None:
    [log] = folder.glob("log-*")
    log.write_bytes(log.read_bytes() + _framed(Record(**record)))


def change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_state(folder: Path, **tensors: torch.Tensor) -> None:
    [state] = folder.glob("state-*")
    save_file({**load_file(state), **{f"0.{name}": tensor for name, tensor in tensors.items()}}, state, {"steps": "3"})


ONE, FAR = (1).to_bytes(8, "little"), (10**9).to_bytes(8, "little")
DAMAGE: dict[str, Callable[[Path], None]] = {
    "a step of other words": lambda folder: add_to_log(folder, verb="step", words={"evil": 1}),
    "tokens that are cut off": lambda folder: add_to_log(folder, verb="forward_backward", kind="cross_entropy", data=[DatumRecord(b"abc", ONE, 0, None, None, None)]),
    "tokens out of the vocabulary": lambda folder: add_to_log(folder, verb="forward_backward", kind="cross_entropy", data=[DatumRecord(FAR, ONE, 0, None, None, None)]),
    "a loss that there is not": lambda folder: add_to_log(folder, verb="forward_backward", kind="none", data=[DatumRecord(ONE, ONE, 0, None, None, None)]),
    "another run.json": lambda folder: (folder / "run.json").write_bytes(b"[]") and None,
    "another configuration": lambda folder: (folder / "adapter_config.json").write_bytes(b"[]") and None,
    "a rank beyond the limit": lambda folder: change_json(folder / "adapter_config.json", r=10**6),
    "a learning rate without end": lambda folder: change_json(folder / "run.json", lora_plus=1e300),
    "a log with no number": lambda folder: (folder / "log-x").touch(),
    "moments of another size": lambda folder: change_state(folder, exp_avg=torch.zeros(2)),
    "gradients of another size": lambda folder: change_state(folder, gradients=torch.zeros(2)),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_others_wrote_into_a_folder_ends_with_its_run(tmp_path: Path, what: str) -> None:
    with Engine(tiny_llama(), state=tmp_path) as engine:
        for name in ("good", "bad"):
            three_steps(engine.create(lora(), name=name, seed=1))
    DAMAGE[what](tmp_path / "bad")
    with Engine(tiny_llama(), state=tmp_path) as engine:
        with pytest.raises(ConfigError):
            engine.open("bad").forward(batch(1)).result(60)
        assert engine.open("good").forward(batch(1)).result(60)


# ---------------------------------------------------------------- checkpoints


def test_checkpoints_have_a_time_to_live(tmp_path: Path) -> None:
    with Engine(tiny_llama()) as engine:
        run = engine.create(lora())
        run.save(tmp_path / "a" / "kept")
        run.save(tmp_path / "a" / "short", ttl_seconds=0.001)
        run.save(tmp_path / "long", ttl_seconds=1000)
        time.sleep(0.01)
        listed = training.checkpoints(tmp_path)
        assert [each.path.name for each in listed] == ["kept", "short", "long"] and all(e.nbytes > 0 for e in listed)
        assert listed[0].expires is None and listed[2].expires == pytest.approx(time.time() + 1000, abs=60)
        with pytest.raises(AdapterError, match="has expired"):
            engine.load(tmp_path / "a" / "short")
        assert training.expire(tmp_path) == [tmp_path / "a" / "short"] and training.expire(tmp_path) == []
        assert len(training.checkpoints(tmp_path)) == 2 and engine.load(tmp_path / "long").steps == 0
        for wrong in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="ttl_seconds"):
                run.save(tmp_path / "wrong", ttl_seconds=wrong)


def test_checkpoints_of_ranks_whose_matrices_are_not_of_a_round_size(tmp_path: Path) -> None:
    with Engine(tiny_llama()) as engine:
        run = three_steps(
            engine.create(
                lora(r=3, target_modules=["q_proj"], rank_pattern={"0.self_attn.q_proj": 1}, modules_to_save=["norm"]),
                seed=1,
            )
        )
        loaded = engine.load(run.save(tmp_path / "one"))
        assert are_equal(trained(three_steps(run, 5)), trained(three_steps(loaded, 5)))


def test_what_a_journal_cannot_hold_is_refused(tmp_path: Path) -> None:
    data = Datum([5, 6], [6, 7], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])  # type: ignore[arg-type]
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run = engine.create(lora(), name="mine")
        for wrong in ("0.1", torch.tensor(0.1), float("nan"), None):
            with pytest.raises(ConfigError, match="beta is a number"):
                run.forward_backward(data, "dro", {"beta": wrong})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="tenant is a name"):
            engine.create(lora(), tenant=5)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="make room|surrogates"):
            run.submit(1, "save", tmp_path.parent / "\udcff").result(60)
        assert run.forward_backward(data, "dro", {"beta": 1}).result(60)
    with Engine(tiny_llama(), state=tmp_path) as engine:
        assert gradients(engine.open("mine"))
