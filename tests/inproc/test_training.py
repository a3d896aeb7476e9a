"""The engine that trains: each run as PEFT alone, whatever else is in its passes; and errors for whom they concern."""

import importlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import symbiosis
from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training import Datum, Engine, Run
from tests.conftest import tiny_llama

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": PROJECTIONS, "init_lora_weights": False, **options})


def batch(seed: int, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gradients(run: Run) -> list[torch.Tensor]:
    return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]


def alone(batches: list[dict[str, torch.Tensor]], config: LoraConfig, seed: int) -> list[torch.Tensor]:
    """The gradients that PEFT adds up by itself."""
    model = tiny_llama()
    torch.manual_seed(seed)
    model = get_peft_model(model, config).train()  # type: ignore[arg-type]
    for each in batches:
        model(**each).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def are_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    largest = max(float(each.abs().max()) for each in expected)
    pairs = zip(found, expected, strict=True)
    return bool(expected) and all(float((a - b).abs().max()) <= 1e-5 * largest for a, b in pairs)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny_llama()) as engine:
        yield engine


def held(engine: Engine, holder: Run | None = None) -> tuple[threading.Event, "threading.Thread"]:
    """Have the engine wait, so that what is put meanwhile is there at once."""
    go, begun = threading.Event(), threading.Event()
    holder = engine.create(lora()) if holder is None else holder

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    holder.when_done(wait)
    assert begun.wait(60)
    return go, threading.current_thread()


def test_a_batch_without_a_loss_is_told_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    run, other = engine.create(lora()), engine.create(lora())
    masked = {**batch(1), "labels": torch.full((2, 9), -100)}
    nothing = Datum([3, 4, 5], [4, 5, 6], weights=[0.0, 0.0, 0.0])  # type: ignore[arg-type]
    run.forward_backward([masked, batch(1)])  # of which a part has one
    run.forward_backward(nothing, lambda logprobs, data: logprobs[0].sum())  # which reads no weights
    run.forward(masked).result()
    assert not caplog.records
    before = gradients(run)
    for _ in range(2):
        assert run.forward_backward(masked).result().loss == 0.0
    assert all(map(torch.equal, gradients(run), before))
    other.forward_backward(nothing).result()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and run.name in told[0] and other.name in told[1]
    assert all("no token of a batch has a loss" in each for each in told)


def test_runs_of_one_pass_are_as_alone(engine: Engine) -> None:
    configs = [lora(), lora(r=7, lora_alpha=3, target_modules=["o_proj"]), lora(use_dora=True), lora(lora_dropout=0.3)]
    runs = [engine.create(config, seed=number) for number, config in enumerate(configs)]
    go, _ = held(engine)
    futures = [run.forward_backward(batch(number, length=5 + number)) for number, run in enumerate(runs)]
    go.set()
    assert {future.result(60).joined for future in futures} == {4}
    for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
        assert are_close(gradients(run), alone([batch(number, length=5 + number)], config, number)), config


def test_layers_with_a_forward_of_their_own() -> None:
    """As accelerate gives them, to move what they are called with: adapters act there, too."""
    model = tiny_llama()
    CALLED.clear()
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.forward = partial(_noted, type(module).forward, module)
    with Engine(model) as engine:
        run = engine.create(lora(), seed=2)
        run.forward_backward(batch(2)).result(60)
        assert CALLED and are_close(gradients(run), alone([batch(2)], lora(), 2))


CALLED: list[Any] = []


def _noted(forward: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    CALLED.append(module)
    made: torch.Tensor = forward(module, x)
    return made


def test_gradients_add_up_until_a_step(engine: Engine) -> None:
    run = engine.create(lora(), seed=1)
    for seed in (1, 2):
        run.forward_backward(batch(seed)).result(60)
    assert are_close(gradients(run), alone([batch(1), batch(2)], lora(), 1))
    norm = run.step(1e-3).result(60)
    assert norm > 0 and not gradients(run) and run.steps == 1


@pytest.mark.parametrize("most", [1, 11, 25])
def test_a_pass_has_so_many_tokens_at_most(most: int) -> None:
    with Engine(tiny_llama(), max_tokens=most) as engine:
        run = engine.create(lora(), seed=1)
        result = run.forward_backward([batch(1, 3), Datum([5, 6], [6, 7])]).result(60)
        assert [len(each) for each in result.logprobs] == [9, 9, 9, 2]
        found = gradients(run)
    with Engine(tiny_llama()) as engine:
        run = engine.create(lora(), seed=1)
        whole = run.forward_backward([batch(1, 3), Datum([5, 6], [6, 7])]).result(60)
        assert are_close(found, gradients(run)) and result.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_head_whose_logits_do_not_fit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.training.logit_pieces.LOGITS_BYTES", 8 * 100 * 10)  # ten rows
    run = engine.create(lora(), seed=1)
    run.forward_backward(batch(1, 3)).result(60)
    assert are_close(gradients(run), alone([batch(1, 3)], lora(), 1))


def test_a_loss_of_ones_own_is_the_same_as_ours(engine: Engine) -> None:
    ours, own = (engine.create(lora(), seed=1) for _ in range(2))
    data = [Datum([5, 6, 7], [6, 7, 8]), Datum([9, 8], [8, 7])]
    result = ours.forward_backward(data).result(60)
    mine = own.forward_backward(data, lambda logprobs, _: -sum(each.sum() for each in logprobs)).result(60)
    assert mine.loss == pytest.approx(result.loss, rel=1e-6) and are_close(gradients(own), gradients(ours))


def test_forward_alone_leaves_no_gradients(engine: Engine) -> None:
    run = engine.create(lora(), seed=1)
    found = run.forward(batch(1)).result(60)
    assert not gradients(run)
    again = run.forward_backward(batch(1)).result(60)
    assert all(map(torch.equal, found.logprobs, again.logprobs))


def test_the_users_model_stays_as_it_is() -> None:
    model = tiny_llama()
    before, attention = {n: p.clone() for n, p in model.state_dict().items()}, model.config._attn_implementation
    with Engine(model) as engine:
        run = engine.create(lora())
        run.forward_backward(batch(1)).result(60)
        run.step(1e-2).result(60)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks for module in model.modules())


def test_over_an_executor_with_other_runs(engine: Engine) -> None:
    with symbiosis.Executor(tiny_llama()) as executor, Engine(executor.endpoint) as split:
        for each in (split, engine):
            each.create(lora(), seed=3).forward_backward(batch(3)).result(60)
        [mine], [unsplit] = (each._runs.values() for each in (split, engine))
        assert are_close(gradients(mine), gradients(unsplit))


def test_commands_of_a_run_are_done_in_their_order(engine: Engine) -> None:
    run, other = engine.create(lora(), seed=1), engine.create(lora(), seed=1)
    futures = []
    for seed in range(4):  # nobody waits for a result
        futures.append(run.forward_backward(batch(seed)))
        run.step(1e-2)
    for seed, future in enumerate(futures):
        expected = other.forward_backward(batch(seed)).result(60)
        other.step(1e-2).result(60)
        assert future.result(60).loss == pytest.approx(expected.loss, rel=1e-5)


def test_who_had_least_comes_first() -> None:
    with Engine(tiny_llama(), max_tokens=18) as engine:
        greedy, modest = engine.create(lora()), engine.create(lora())
        go, _ = held(engine)
        order: list[str] = []
        for number in range(4):
            greedy.forward_backward(batch(number)).add_done_callback(lambda _: order.append("greedy"))
        modest.forward_backward(batch(9)).add_done_callback(lambda _: order.append("modest"))
        go.set()
        greedy.step(1e-3).result(60)
        assert order.index("modest") <= 1


def test_gradients_that_are_not_finite_change_nothing(engine: Engine) -> None:
    run = engine.create(lora(), seed=1)
    before = [p.detach().clone() for p in run.model.parameters() if p.requires_grad]
    run.forward_backward(batch(1), lambda logprobs, _: logprobs[0].sum() * float("inf")).result(60)
    with pytest.raises(ConfigError, match="nothing has changed"):
        run.step(1e-2).result(60)
    after = [p for p in run.model.parameters() if p.requires_grad]
    assert all(map(torch.equal, before, after)) and not gradients(run)
    with pytest.raises(ConfigError, match="no gradients"):
        run.step(1e-2).result(60)


def test_one_that_fails_leaves_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = engine.create(lora(), seed=1), engine.create(lora(use_dora=True), seed=2)

    def broken(name: str, x: Any, y: Any) -> Any:
        raise RuntimeError("a layer that breaks")

    good.forward_backward(batch(5)).result(60)  # its gradients are there already
    assert bad.state is not None
    monkeypatch.setattr(bad.state.adapter, "run", broken)
    go, _ = held(engine)
    futures = [good.forward_backward(batch(6)), bad.forward_backward(batch(7))]
    go.set()
    assert futures[0].result(60).loss > 0
    with pytest.raises(RuntimeError, match="breaks"):
        futures[1].result(60)
    assert are_close(gradients(good), alone([batch(5), batch(6)], lora(), 1)) and not gradients(bad)


def test_what_is_put_cannot_be_cancelled(engine: Engine) -> None:
    run = engine.create(lora())
    go, _ = held(engine)
    future = run.forward(batch(1))
    assert not future.cancel()
    go.set()
    assert future.result(60).logprobs and run.forward(batch(1)).result(60).logprobs


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "ADALORA .* its ranks"),
        (lora(target_modules=["lm_head"], lora_dropout=0.1), "dropout at lm_head"),
        (lora(init_lora_weights="pissa"), "changes the base's weights"),
        (lora(target_modules=["nothing"]), "PEFT does not take it"),
        ("lora", "configuration of PEFT"),
    ],
)
def test_adapters_that_cannot_be_trained(engine: Engine, config: Any, said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        engine.create(config)


def test_steps_that_cannot_be(engine: Engine) -> None:
    run = engine.create(lora())
    for words in (
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": 1.0, "betas": (0.9, 1.0)},
        {"lr": 1.0, "max_grad_norm": 0},
        {"lr": 1e308},
        {"lr": 1.0, "weight_decay": 1e30},
        {"lr": 1.0, "eps": 0.0},
        {"lr": 1.0, "eps": 1e-50},
    ):
        with pytest.raises(ConfigError):
            run.step(**words)


def test_gradients_are_clipped_by_run(engine: Engine) -> None:
    run, other = engine.create(lora(), seed=1), engine.create(lora(), seed=1)
    for each, most in ((run, 1e-3), (other, None)):
        each.forward_backward(batch(1)).result(60)
        norm = each.step(1.0, eps=1.0, max_grad_norm=most).result(
            60
        )  # with a large eps a step is as long as the gradient
        assert norm > 0.1
    begun = engine.create(lora(), seed=1)
    moved = [
        sum(float((a - b).square().sum()) for a, b in zip(_trained(each), _trained(begun), strict=True)) ** 0.5
        for each in (run, other)
    ]
    assert moved[0] < 2e-3 < 0.02 < moved[1]


def _trained(run: Run) -> list[torch.Tensor]:
    return [p.detach() for p in run.model.parameters() if p.requires_grad]


def test_lora_plus(engine: Engine) -> None:
    run = engine.create(lora(), seed=1, lora_plus=16.0)
    begun = engine.create(lora(), seed=1)
    run.forward_backward(batch(1)).result(60)
    run.step(1e-3).result(60)
    moved = {True: 0.0, False: 0.0}
    names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    for name, a, b in zip(names, _trained(run), _trained(begun), strict=True):
        moved["lora_B" in name] = max(moved["lora_B" in name], float((a - b).abs().max()))
    assert moved[True] == pytest.approx(16 * moved[False], rel=1e-3)


def test_a_checkpoint_is_peft_s_and_goes_on(engine: Engine, tmp_path: Path) -> None:
    run = engine.create(lora(), seed=1, lora_plus=2.0)
    for seed in range(3):
        run.forward_backward(batch(seed)).result(60)
        run.step(1e-2).result(60)
    saved = run.save(tmp_path / "runs/half")
    loaded = engine.load(saved)
    assert loaded.steps == 3
    for each in (run, loaded):
        each.forward_backward(batch(9)).result(60)
        each.step(1e-2).result(60)
    assert all(map(torch.equal, _trained(run), _trained(loaded)))
    from peft import PeftModel

    peft = PeftModel.from_pretrained(tiny_llama(), str(saved)).eval()
    with torch.no_grad():
        logits = peft(batch(4)["input_ids"]).logits[0]
    found = engine.load(saved).forward(batch(4)).result(60).logprobs[0]
    wanted = batch(4)["input_ids"][0, 1:]
    expected = logits.log_softmax(-1)[:-1].gather(1, wanted[:, None])[:, 0]
    assert torch.allclose(found[:-1], expected, atol=1e-5)


def test_a_checkpoint_is_never_written_again(engine: Engine, tmp_path: Path) -> None:
    run = engine.create(lora())
    run.save(tmp_path / "one")
    before = {file: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    with pytest.raises(ConfigError, match="never written again"):
        run.save(tmp_path / "one")
    assert before == {file: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


def test_what_is_no_checkpoint(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is no adapter"):
        engine.load(tmp_path)
    saved = engine.create(lora()).save(tmp_path / "one")
    tensors = saved / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="cut off"):
        engine.load(saved)


@pytest.mark.parametrize(
    ("config", "factor", "said"),
    [
        ("", 1, "no configuration of PEFT"),
        ("[]", 1, "no configuration of PEFT"),
        ('{"peft_type": "NONE"}', 1, "no configuration of PEFT"),
        ({"lora_alpha": float("nan")}, 1, "lora_alpha is nan"),
        ({"alpha_pattern": {"q_proj": 1e308}}, 1, "alpha_pattern is 1e"),
        ({"r": 3}, 1, "not those of its configuration"),
        ({"trainable_token_indices": [10**9]}, 1, "PEFT does not take it"),
        ({}, float("nan"), "infinite or not numbers"),
    ],
)
def test_adapters_that_lie(engine: Engine, tmp_path: Path, config: Any, factor: float, said: str) -> None:
    """What is no number is not trained on: attention on a CPU makes a finite loss of it."""
    saved = engine.create(lora()).save(tmp_path / "one")
    file, tensors = saved / "adapter_config.json", saved / "adapter_model.safetensors"
    file.write_text(config if isinstance(config, str) else json.dumps({**json.loads(file.read_text()), **config}))
    save_file({name: tensor * factor for name, tensor in load_file(tensors).items()}, tensors, {"format": "pt"})
    with pytest.raises(AdapterError, match=said):
        engine.load(saved)


def test_after_the_end(engine: Engine) -> None:
    run, other = engine.create(lora(), name="mine"), engine.create(lora())
    assert repr(run) == "<run 'mine': 0 steps>"
    run.close()
    with pytest.raises(ConfigError, match="run is closed"):
        run.forward(batch(1))
    last = other.forward(batch(1))
    engine.close()
    assert last.done()
    for call in (lambda: other.forward(batch(1)), lambda: engine.create(lora())):
        with pytest.raises(ConfigError, match="engine is closed"):
            call()


def test_an_engine_may_be_closed_again(tmp_path: Path) -> None:
    with Engine(tiny_llama(), state=tmp_path / "runs") as engine:
        engine.close()
        other = (tmp_path / "other").open("w")  # it has the descriptor that the engine had, and keeps it
    other.write("there")
    other.close()


@pytest.mark.parametrize("wrong", [None, 3, {}])
def test_what_no_engine_takes(wrong: Any) -> None:
    for kind in (Engine, symbiosis.serving.Engine):
        with pytest.raises(
            ConfigError, match="Engine takes a causal language model or the endpoint of an executor, not"
        ):
            kind(wrong)


def test_what_no_batch_is(engine: Engine) -> None:
    run = engine.create(lora())
    for wrong, kind in (
        ("text", "str"),
        (torch.tensor([[1, 2]]), "Tensor"),
        ([1, 2], "int"),
        ([[Datum([1], [2])]], "list"),
        (["a"], "str"),
    ):
        with pytest.raises(ConfigError, match=f"a batch is a Datum, a list of them, .* and this has a {kind}"):
            run.forward(wrong)


def test_a_model_without_a_head() -> None:
    with pytest.raises(ConfigError, match="no causal language model"):
        Engine(tiny_llama().model)  # type: ignore[arg-type]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("train_exact")


@pytest.mark.parametrize("family", ["Gemma2", "gpt-oss", "Mamba"])
def test_families(exact: Any, family: str) -> None:
    packs, gradients_off, losses_off = exact.family(family)
    assert packs == (family != "Mamba") and gradients_off < 1e-5 and losses_off < 1e-5


def test_kinds_of_peft_from_threads(exact: Any) -> None:
    kinds, joined = exact.many_runs(len(exact.KINDS), 2)
    count = 18 + hasattr(peft, "CartridgeConfig")
    assert len(kinds) == len(exact.KINDS) == count and max(max(each) for each in kinds.values()) < 1e-4 and joined > 1


def test_a_run_takes_over_the_values_of_another_in_its_turn(engine: Engine, tmp_path: Path) -> None:
    first, second = engine.create(lora(), seed=1), engine.create(lora(), seed=2)
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}
    for run in (first, second):
        run.forward_backward(batch)
        run.step(lr=1e-2)
    first.save(tmp_path / "saved")
    for optimizer, steps in ((True, 1), (False, 0)):
        second.when_done(lambda with_it=optimizer: second.read(tmp_path / "saved", with_it)).result()
        assert second.steps == steps
        assert second.forward(batch).result().logprobs[0].equal(first.forward(batch).result().logprobs[0])
