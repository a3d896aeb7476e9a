"""Embeddings, classes, scores and ranks of texts over HTTP."""

import base64
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig, TaskType
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.adapters import saved
from tests.serving_api import Api, http_process, web

TEXTS = ["def average(numbers):", "Once upon a time", "a cat"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Classifiers of three classes, and of one."""
    made = {}
    for labels in (3, 1):
        torch.manual_seed(labels)
        model = AutoModelForSequenceClassification.from_pretrained(DEMO_MODEL, num_labels=labels).eval()
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["q_proj"])
        made[labels] = saved(model, config, tmp_path_factory.mktemp("classifier"))
    return {labels: folder for labels, (folder, _) in made.items()}


@pytest.fixture(scope="module")
def api(adapters: dict[int, Path]) -> Iterator[Api]:
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, adapters=DEMO_MODEL / "adapters", memory=1 << 25) as engine,
        http_process(engine) as api,
    ):
        for labels, folder in adapters.items():
            engine.add(f"classes-{labels}", folder)
        yield api


def asked(api: Api, path: str, **fields: Any) -> Any:
    return web.post(api.url + path, json=fields, timeout=60)


def test_embeddings_in_openais_forms(api: Api) -> None:
    expected = [api.engine.embed(text, adapter="python") for text in TEXTS]
    by_client = api.client.embeddings.create(model="python", input=TEXTS)  # base64, which it decodes
    as_floats = api.client.embeddings.create(model="python", input=TEXTS, encoding_format="float")
    for answer in (by_client, as_floats):
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert np.allclose([each.embedding for each in answer.data], expected, atol=1e-6)
        assert answer.model == "python" and answer.usage.prompt_tokens == answer.usage.total_tokens == sum(
            map(len, TEXTS)
        )
    tokens = [list(text.encode()) for text in TEXTS]
    for given, count in ((tokens, 3), (tokens[0], 1), (TEXTS[0], 1)):
        answer = asked(api, "/v1/embeddings", input=given, encoding_format="base64").json()
        vectors = [array("f", base64.b64decode(each["embedding"])) for each in answer["data"]]
        base = [api.engine.embed(text) for text in TEXTS[:count]]
        assert np.allclose(vectors, base, atol=1e-6) and answer["model"] == "demo"
    raw = asked(api, "/v1/embeddings", input=TEXTS[0], use_activation=False).json()["data"][0]["embedding"]
    assert np.allclose(raw, api.engine.embed(TEXTS[0], normalizes=False), atol=1e-5)


def test_prompts_are_cut_where_that_is_asked_for(api: Api) -> None:
    whole = list(TEXTS[0].encode())
    for side, kept in (("right", whole[:5]), ("left", whole[-5:])):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side}
        for given in (TEXTS[0], whole):
            answer = asked(api, "/v1/embeddings", input=given, **fields).json()
            assert answer["usage"]["prompt_tokens"] == 5
            assert np.allclose(answer["data"][0]["embedding"], api.engine.embed(kept), atol=1e-6)
    long = asked(api, "/v1/embeddings", input="x" * 5000, truncate_prompt_tokens=-1)
    assert long.status_code == 200 and long.json()["usage"]["prompt_tokens"] == api.engine.longest


def test_a_chat_has_a_vector(api: Api) -> None:
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " upon"}]
    tokens = asked(api, "/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    answer = asked(api, "/v1/embeddings", messages=messages).json()
    assert np.allclose(answer["data"][0]["embedding"], api.engine.embed(tokens), atol=1e-6)


def test_classes(api: Api) -> None:
    answer = asked(api, "/classify", model="classes-3", input=TEXTS).json()
    expected = [api.engine.classify(text, adapter="classes-3") for text in TEXTS]
    assert np.allclose([each["probs"] for each in answer["data"]], expected, atol=1e-6)
    best = [int(np.argmax(each)) for each in expected]
    assert [each["label"] for each in answer["data"]] == [f"LABEL_{number}" for number in best]
    assert {each["num_classes"] for each in answer["data"]} == {3}


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")]
)
def test_scores_by_vectors(api: Api, names: tuple[str, str]) -> None:
    left, right = names
    vectors = np.array([api.engine.embed(text) for text in TEXTS])
    one = asked(api, "/score", **{left: TEXTS[0], right: TEXTS}).json()
    assert np.allclose([each["score"] for each in one["data"]], vectors @ vectors[0], atol=1e-5)
    pairs = asked(api, "/v1/score", **{left: TEXTS[:2], right: TEXTS[1:]}).json()
    assert np.allclose([each["score"] for each in pairs["data"]], (vectors[:2] * vectors[1:]).sum(axis=1), atol=1e-5)


def test_scores_by_a_classifier_of_one_class(api: Api, adapters: dict[int, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    expected = [api.engine.classify(tokenizer(TEXTS[0], text).input_ids, adapter="classes-1")[0] for text in TEXTS]
    answer = asked(api, "/score", model="classes-1", queries=TEXTS[0], documents=TEXTS).json()
    assert np.allclose([each["score"] for each in answer["data"]], expected, atol=1e-6)
    assert all(0 < each < 1 for each in expected)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(api: Api, path: str) -> None:
    scores = asked(api, "/score", queries="a dog", documents=TEXTS).json()["data"]
    order = sorted(range(3), key=lambda index: -scores[index]["score"])
    answer = asked(api, path, query="a dog", documents=TEXTS).json()
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order]
    short = asked(api, path, query="a dog", documents=TEXTS, top_n=1, return_documents=False).json()["results"]
    best = pytest.approx(answer["results"][0]["relevance_score"], abs=1e-5)
    assert short == [{"index": order[0], "relevance_score": best}]


@pytest.mark.parametrize(
    ("path", "fields", "param", "told"),
    [
        ("/v1/embeddings", {}, "input", "input or messages"),
        ("/v1/embeddings", {"input": []}, "input", "input is empty"),
        ("/v1/embeddings", {"input": "x" * 2000}, "input", "reduce the length"),
        ("/v1/embeddings", {"input": "x" * 600}, "input", "reduce the length"),
        ("/v1/embeddings", {"input": [1, -5]}, "input", "token -5"),
        ("/v1/embeddings", {"input": "x", "dimensions": 64}, "dimensions", "must be 192"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format", "bytes"),
        ("/v1/embeddings", {"input": "x", "task": "embed"}, "task", "unrecognized"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "from -1 to 512"),
        ("/v1/embeddings", {"input": "x", "truncation_side": "left"}, "truncation_side", "goes with"),
        ("/v1/embeddings", {"input": ["x"] * 5000}, "input", "at most 4096"),
        ("/classify", {"input": "x"}, "model", "no classes"),
        ("/classify", {"input": "x", "model": "python"}, "model", "no classes"),
        ("/score", {"queries": "x"}, "queries", "two fields"),
        ("/score", {"queries": ["x", "y"], "documents": ["z"]}, "queries", "give one, or as many"),
        ("/score", {"queries": "x", "documents": []}, "documents", "empty"),
        ("/score", {"queries": "x", "documents": "y", "model": "classes-3"}, "model", "3 classes"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "at least 0"),
        ("/v1/completions", {"prompt": "x", "model": "classes-3"}, "model", "writes none"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_name(
    api: Api, path: str, fields: dict[str, Any], param: str, told: str
) -> None:
    answer = asked(api, path, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"]


def test_a_model_that_is_not_there(api: Api) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "x"}),
        ("/classify", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
    ):
        assert asked(api, path, model="nobody", **fields).status_code == 404
    with pytest.raises(openai.NotFoundError):
        api.client.embeddings.create(model="nobody", input="x")


def test_keys_limit_vectors_and_metrics_count_them(tmp_path: Path, api: Api) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna anna-key-1 requests=2\nbert bert-key-1 tokens_per_s=10\n")
    keys.chmod(0o600)

    def post(key: str, path: str = "/v1/embeddings", **fields: Any) -> Any:
        return web.post(keyed.url + path, json=fields, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    with http_process(api.engine, api_keys=str(keys)) as keyed:
        assert post("nobody", input="x").status_code == 401
        assert post("anna-key-1", input=["x", "y"]).status_code == 200
        too_many = post("anna-key-1", input=["x", "y", "z"])
        assert too_many.status_code == 400 and "2 requests" in too_many.json()["error"]["message"]
        assert post("bert-key-1", input="x" * 100).status_code == 200
        owing = post("bert-key-1", path="/rerank", query="x", documents=["y"])
        assert owing.status_code == 429 and "tokens per second" in owing.json()["error"]["message"]
        metrics = web.get(keyed.url + "/metrics", timeout=60).text
    assert 'http_requests_total{path="/v1/embeddings",status="200"} 2' in metrics.replace("symbiosis_serve_", "")
