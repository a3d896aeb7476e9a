"""Text by a JSON schema: it follows the schema whatever the model would say, beside others that are free."""

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.serving import Engine
from symbiosis.serving.engine.limits import Unfit
from symbiosis.serving.engine.reader import GenerationFailed
from symbiosis.serving.request import Finish, Guide, Output, Request, Sampling
from symbiosis.serving.sampling import grammar, guided_decoding
from symbiosis.serving.sampling.grammar import Grammar, Grammars
from symbiosis.serving.sampling.schema_cost import check_schema

pytestmark = pytest.mark.long

DEMO = Path(symbiosis.__file__).parent / "demo_model"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["red", "green"]},
        "many": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "ok", "kind", "many"],
    "additionalProperties": False,
}


def engine(tokenizer: bool = True, **options: Any) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(DEMO).eval()
    return Engine(model, AutoTokenizer.from_pretrained(DEMO) if tokenizer else None, memory=1 << 24, **options)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.5])
def test_text_follows_the_schema(temperature: float) -> None:
    pytest.importorskip("llguidance")
    with engine() as one:
        free = one.generate("Once upon a time", max_tokens=30, temperature=0.0)
        for seed in range(4):
            how: dict[str, Any] = {"schema": json.dumps(SCHEMA), "temperature": temperature, "seed": seed}
            answer = one.generate("Once upon a time", max_tokens=200, **how)
            said = json.loads(answer.text)
            assert answer.finish == "stop" and list(said) == ["name", "ok", "kind", "many"]
            assert isinstance(said["ok"], bool) and said["kind"] in ("red", "green") and len(said["name"]) <= 12
            assert 2 <= len(said["many"]) <= 4 and set(said["many"]) <= {1, 2}
            assert one.generate("Once upon a time", max_tokens=200, **how).tokens == answer.tokens
        assert one.generate("Once upon a time", max_tokens=30, temperature=0.0).tokens == free.tokens


@pytest.mark.parametrize("schema", ["{", '{"type": "nothing"}', '{"type": "string", "pattern": "("}'])
def test_a_wrong_schema_is_refused(schema: str) -> None:
    pytest.importorskip("llguidance")
    with engine() as one, pytest.raises(ConfigError, match="schema"):
        one.generate("x", schema=schema)


COSTLY: dict[str, dict[str, Any]] = {
    "a large divisor": {"type": "integer", "multipleOf": 999_953},
    "a long divisor": {"type": "number", "multipleOf": 0.99991},
    "divisors together": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]},
    "one of many divisors": {"anyOf": [{"type": "integer", "multipleOf": 9000 + n} for n in range(20)]},
    "a divisor within": {"type": "object", "additionalProperties": {"type": "integer", "multipleOf": 99_991}},
    "a long repetition": {"type": "string", "pattern": "^a{1000000}$"},
    "repetitions of repetitions": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "many repetitions": {
        "type": "array",
        "prefixItems": [{"type": "string", "pattern": f"{n}{{30000}}"} for n in "ab"],
    },
    "names": {"type": "object", "patternProperties": {"^a{100000}": {}}},
}


@pytest.mark.parametrize("what", COSTLY)
def test_a_schema_that_is_costly_to_prepare_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took seconds and hundreds of megabytes, of which others had to wait for a part."""
    monkeypatch.setattr(Grammars, "_matcher", lambda self, schema: pytest.fail("it is prepared"))
    with engine() as one, pytest.raises(ConfigError, match="schema may have"):
        one.generate("x", schema=json.dumps(COSTLY[what]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01, "minimum": -1e9, "maximum": 1e9},
        {"allOf": [{"type": "integer", "multipleOf": 86_400}, {"multipleOf": 7}]},
        {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        {"type": "string", "maxLength": 1_000_000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
        {"type": "object", "properties": {"pattern": {"type": "string"}, "multipleOf": {"type": "string"}}},
    ],
    ids=json.dumps,
)
def test_a_schema_of_large_numbers_that_cost_nothing_is_taken(schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    with engine() as one:
        assert one.generate("x", schema=json.dumps(schema), max_tokens=4).tokens


def test_to_look_at_a_pattern_takes_time_in_proportion_to_its_length() -> None:
    """Brackets that are never closed took the square of it, a minute and a half for this one, in which others waited."""
    began = time.process_time()
    check_schema(json.dumps({"type": "string", "pattern": "[" * 60_000}))
    check_schema(json.dumps({"type": "string", "pattern": r"[\a" * 20_000}))
    assert time.process_time() - began < 1


def test_without_a_tokenizer_there_is_no_schema() -> None:
    pytest.importorskip("llguidance")
    with engine(tokenizer=False) as one, pytest.raises(ConfigError, match="tokenizer"):
        one.generate([1], schema="{}")


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with engine() as one, pytest.raises(ConfigError, match=r"pip install 'symbiosis-llm\[structured\]'"):
        one.generate("x", schema="{}")


def test_a_schema_is_prepared_once_for_all_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    prepared: list[str] = []
    prepare = Grammars._matcher

    def counted(self: Grammars, schema: str) -> Any:
        prepared.append(schema)
        return prepare(self, schema)

    monkeypatch.setattr(Grammars, "_matcher", counted)
    sampling = Sampling(schema=json.dumps(SCHEMA), max_tokens=200, seed=1)
    outputs: SimpleQueue[Output] = SimpleQueue()
    with engine() as one:
        for id in (1, 2):
            one.submit(Request(id=id, prompt=(97,), sampling=sampling, completions=16), outputs.put)
        texts: dict[tuple[int, int], list[int]] = {}
        left = 32
        while left:
            output = outputs.get(timeout=60)
            texts.setdefault((output.request, output.completion), []).extend(token.id for token in output.tokens)
            left -= output.finish is not None
    assert prepared == [sampling.guide]
    said = [json.loads(bytes(token for token in text if token < 256)) for text in texts.values()]
    assert len(said) == 32 and all(list(each) == ["name", "ok", "kind", "many"] for each in said)


def test_a_schema_of_many_characters_is_refused_unread() -> None:
    with engine() as one, pytest.raises(ConfigError, match="schema may have 65536 characters"):
        one.generate("x", schema=json.dumps({"enum": [f"k{number}" for number in range(100_000)]}))


def test_what_takes_long_is_found_once_for_texts_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many completions begin with the same large choice, the engine's thread does not look for its first tokens in each."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "SLOW_S", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    choice = json.dumps({"anyOf": [{"type": "object", "properties": {f"a{n}": {"const": n}}} for n in range(100)]})
    texts = Grammars(tokenizer, len(tokenizer), frozenset()).begin(Guide("schema", choice), 3)
    alone = Grammars(tokenizer, len(tokenizer), frozenset()).begin(Guide("schema", choice))[0]
    first, second, _ = texts
    (token,) = tokenizer.encode("{")
    expected = [alone.allowed(), (alone.take(token), alone.allowed())[1]]
    assert expected[0][token] and not torch.equal(*expected)
    for text in texts:
        text._matcher = NoMasks(text._matcher)
    assert all(torch.equal(text.allowed(), expected[0]) for text in texts)
    for text in texts:
        text.take(token)
    first._matcher = first._matcher.of
    assert all(torch.equal(text.allowed(), expected[1]) for text in texts)
    second.take(tokenizer.encode("}")[0])
    with pytest.raises(AssertionError):
        second.allowed()


class NoMasks:
    """A matcher of which no mask may be asked."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        assert name != "compute_bitmask"
        return getattr(self.of, name)


def test_what_goes_on_elsewhere_behind_ends_of_text_that_are_ignored_is_the_same() -> None:
    pytest.importorskip("llguidance")
    with engine() as one:
        (end,) = one.ends

        def tokens(id: int, chosen: tuple[int, ...] = ()) -> list[int]:
            outputs: SimpleQueue[Output] = SimpleQueue()
            how: dict[str, Any] = {
                "schema": '{"type":"integer"}',
                "ignore_eos": True,
                "logit_bias": {end: 100},
                "seed": 1,
            }
            sampling = Sampling(max_tokens=8, **how)
            asked = Request(id=id, prompt=(120, 61), sampling=sampling, chosen=(chosen,) if chosen else ())
            one.submit(asked, outputs.put)
            found: list[int] = []
            while (output := outputs.get(timeout=60)).finish is None:
                found += [token.id for token in output.tokens]
            return [*found, *(token.id for token in output.tokens)]

        whole = tokens(1)
        assert end in whole[:4] and len(whole) == 8
        assert [tokens(1 + at, tuple(whole[:at])) for at in (1, 2, 4)] == [whole[at:] for at in (1, 2, 4)]


def test_a_text_whose_next_tokens_are_not_found_in_time_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not begun again at once, nor is another one of its tenant."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(guided_decoding, "LATE_S", 0.5)
    find, let_go = Grammar._mask, threading.Event()

    def mask(self: Grammar) -> bytes:
        if len(self._taken) == 2:
            let_go.wait(60)
        return find(self)

    monkeypatch.setattr(Grammar, "_mask", mask)
    schemas = [
        json.dumps({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}) for name in "ab"
    ]
    with engine() as one:
        outputs = SimpleQueue[Output]()
        one.submit(Request(id=1, prompt=(80, 81), sampling=Sampling(max_tokens=40, temperature=0.0)), outputs.put)
        with pytest.raises(GenerationFailed, match="takes longer than 0.5 s to find"):
            one.generate("x", schema=schemas[0], max_tokens=20, tenant="eve")
        for tenant, schema, says in (
            ("bob", schemas[0], "by this schema"),
            ("eve", schemas[1], "another schema of this key"),
        ):
            with pytest.raises(Unfit, match=f"has to wait a minute: .*{says}"):
                one.generate("x", schema=schema, max_tokens=20, tenant=tenant)
        told = [outputs.get(timeout=60) for _ in range(40)]
        assert told[-1].finish == "length"
        let_go.set()
        assert one.generate("x", schema=schemas[1], max_tokens=20, tenant="bob").text.startswith('{"b"')


@pytest.mark.parametrize("tenants", [pytest.param(("", ""), marks=pytest.mark.full), ("eve", "bob")])
def test_many_texts_whose_next_tokens_take_long_hold_up_nobody(
    tenants: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes less than a text may; together they kept each step waiting for several seconds. They become the texts that they were."""
    pytest.importorskip("llguidance")
    how = Sampling(schema=json.dumps(SCHEMA), max_tokens=6, seed=1)

    def texts(one: Engine) -> Iterator[list[Output]]:
        outputs = SimpleQueue[Output]()
        one.submit(Request(id=7, prompt=(97,) * 40, sampling=how, completions=16, tenant=tenants[0]), outputs.put)
        yield []
        left, told = 16, []
        while left:
            told.append(outputs.get(timeout=60))
            left -= told[-1].finish is not None
        yield told

    def by_completion(told: list[Output]) -> list[list[int]]:
        return [[t.id for each in told if each.completion == n for t in each.tokens] for n in range(16)]

    with engine() as one:
        *_, told = texts(one)
        calm = by_completion(told)
    find = Grammar._mask

    def slow(self: Grammar) -> bytes:
        time.sleep(0.1)
        return find(self)

    monkeypatch.setattr(Grammar, "_mask", slow)
    with engine() as one:
        guided = texts(one)
        next(guided)
        came = SimpleQueue[float]()
        free = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
        one.submit(Request(id=8, prompt=(80,), sampling=free, tenant=tenants[1]), lambda _: came.put(time.monotonic()))
        times = [came.get(timeout=60) for _ in range(40)]
        assert max(later - sooner for sooner, later in itertools.pairwise(times)) < 1.0
        assert by_completion(next(guided)) == calm


def test_a_text_that_its_grammar_gives_up_is_an_error_and_no_end(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    wide = {
        "type": "object",
        "properties": {"t": {"enum": ["x", "y"]}, "k": {"type": "object", "properties": properties}},
    }
    schema = json.dumps({**wide, "required": ["t", "k"], "additionalProperties": False})
    with engine() as one, pytest.raises(GenerationFailed, match="cannot be followed.*items"):
        one.generate("x", schema=schema, max_tokens=60, temperature=0.0)
    with engine() as one:
        told = SimpleQueue[Output]()
        guided = Sampling(max_tokens=60, temperature=0.0, schema=schema)
        one.submit(Request(id=7, prompt=(80,), sampling=guided), told.put)
        while (last := told.get(timeout=60)).finish is None:
            pass
        assert last.finish is Finish.UNFIT and one.figures().finished == {"unfit": 1}
    assert "Parser Error" not in capfd.readouterr().err  # of the library, past the log


def test_keys_share_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a schema takes does not tell whether another key has asked for it."""
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prepared: list[str] = []
    monkeypatch.setattr(grammar, "check_guide", prepared.append)
    grammars, schema = Grammars(tokenizer, len(tokenizer), frozenset()), json.dumps({"enum": ["a", "b"]})
    for tenant in ("anna", "anna", "bob", ""):
        grammars.begin(Guide("schema", schema), tenant=tenant)
    assert len(prepared) == 3


def test_no_schema_is_prepared_for_a_request_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(grammar, "check_guide", prepared.append)
    with engine() as one:
        monkeypatch.setattr(one._loop, "_most", 0)
        with pytest.raises(ConfigError, match="has 0 requests already"):
            one.generate("x", schema='{"enum": ["a"]}')
    assert not prepared
