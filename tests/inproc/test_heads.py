"""Heads of tasks stay with the client: by default, under PEFT's tasks, and whatever the executor's model is called."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import Tensor, nn

import symbiosis
from symbiosis.base.layer_selection import HEADS, head_names, is_in
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import ConfigError, WrapError
from symbiosis.executor.model.store import Store
from symbiosis.protocol import Op
from tests.conftest import products, tiny_llama

LLAMA = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, num_labels=3,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
BERT = transformers.BertConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, num_labels=3
)
T5 = transformers.T5Config(
    d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=100, num_labels=3, decoder_start_token_id=0
)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
WAV2VEC2 = transformers.Wav2Vec2Config(
    **SMALL, num_feat_extract_layers=1, conv_dim=(16,), conv_kernel=(4,), conv_stride=(4,), num_conv_pos_embeddings=8
)
WHISPER = transformers.WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VIT = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4)
CLIP = transformers.CLIPConfig(
    text_config={**SMALL, "vocab_size": 100}, vision_config={**SMALL, "image_size": 8, "patch_size": 4}
)
GPT2 = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=100)


def built(name: str, config: transformers.PreTrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(copy.deepcopy(config)).eval()


HEADS_OF: dict[str, tuple[transformers.PreTrainedConfig, set[str]]] = {
    "LlamaForCausalLM": (LLAMA, {"lm_head"}),
    "LlamaForSequenceClassification": (LLAMA, {"score"}),
    "LlamaForTokenClassification": (LLAMA, {"score"}),
    "LlamaForQuestionAnswering": (LLAMA, {"qa_outputs"}),
    "LlamaModel": (LLAMA, set()),
    "GPT2DoubleHeadsModel": (GPT2, {"lm_head", "multiple_choice_head.summary"}),
    "BertForPreTraining": (
        BERT,
        {
            "bert.pooler.dense",
            "cls.predictions.decoder",
            "cls.predictions.transform.dense",
            "cls.seq_relationship",
        },
    ),
    "BertForQuestionAnswering": (BERT, {"qa_outputs"}),
    "BertModel": (BERT, {"pooler.dense"}),
    "T5ForConditionalGeneration": (T5, {"lm_head"}),
    "T5ForQuestionAnswering": (T5, {"qa_outputs"}),
    "T5ForSequenceClassification": (T5, {"classification_head.dense", "classification_head.out_proj"}),
    "T5ForTokenClassification": (T5, {"classifier"}),
    "T5Model": (T5, set()),
    "Wav2Vec2ForCTC": (WAV2VEC2, {"lm_head"}),
    "Wav2Vec2ForSequenceClassification": (WAV2VEC2, {"projector", "classifier"}),
    "WhisperForAudioClassification": (WHISPER, {"projector", "classifier"}),
    "WhisperForConditionalGeneration": (WHISPER, {"proj_out"}),
    "ViTForImageClassification": (VIT, {"classifier"}),
    "CLIPForImageClassification": (CLIP, {"classifier"}),
    "CLIPModel": (CLIP, set()),
}


@pytest.mark.parametrize("name", HEADS_OF)
def test_no_head_is_served_by_default(name: str) -> None:
    config, expected = HEADS_OF[name]
    model = built(name, config)
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {path for path in linear if is_in(path, head_names(model))} == expected
    served = {layer.name for layer in Store(model).served()}
    assert served and not served & expected and served >= {path for path in linear - expected if "proj" in path}


def test_the_names_are_pefts() -> None:
    assert set(SEQ_CLS_HEAD_NAMES) <= HEADS


TASKS: dict[str, tuple[str, str, dict[str, Tensor]]] = {
    "SEQ_CLS": ("LlamaForSequenceClassification", "score", {"labels": torch.tensor([0, 2])}),
    "TOKEN_CLS": ("LlamaForTokenClassification", "score", {"labels": torch.ones(2, 9, dtype=torch.long)}),
    "QUESTION_ANS": (
        "LlamaForQuestionAnswering",
        "qa_outputs",
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
}


def trained(model: nn.Module, ids: Tensor, **labels: Tensor) -> dict[str, Tensor]:
    """The loss and all gradients of a step."""
    torch.manual_seed(5)
    loss = model.train()(input_ids=ids, **labels).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("order", ["W>P", "P>W"])
@pytest.mark.parametrize("executors", ["the same", "LlamaForCausalLM", "LlamaModel"])
def test_tasks_of_peft(task: str, order: str, executors: str, serve: Callable, ids: Tensor) -> None:
    """The head is trained here, to the bit as in the unsplit model, and the executor hears nothing of it."""
    name, head, labels = TASKS[task]
    unsplit = built(name, LLAMA)
    theirs = unsplit if executors == "the same" else built(executors, LLAMA)
    theirs.base_model.load_state_dict(unsplit.base_model.state_dict())
    executor = serve(theirs)

    def adapted(model: nn.Module, split: bool) -> nn.Module:
        if split and order == "W>P":
            symbiosis.wrap(model, executor.endpoint)
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(task_type=task, target_modules=["q_proj"], init_lora_weights=False))
        return symbiosis.wrap(model, executor.endpoint) if split and order == "P>W" else model

    split = adapted(copy.deepcopy(unsplit), True)
    expected, got = trained(adapted(unsplit, False), ids, **labels), trained(split, ids, **labels)
    assert got.keys() == expected.keys() and any(head in name for name in got)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert len(symbiosis.report(split).wrapped) == 14
    figures = symbiosis.stats(split)
    assert figures.by_op.get(Op.DGRAD.name, 0) + figures.direct > 0


@pytest.mark.parametrize(("mine", "theirs"), [
    ("BertForSequenceClassification", "BertModel"),
    ("BertModel", "BertForMaskedLM"),
    ("T5ForTokenClassification", "T5ForConditionalGeneration"),
    ("T5ForSequenceClassification", "T5ForConditionalGeneration"),
])  # fmt: skip
def test_names_differ_by_the_base(mine: str, theirs: str, serve: Callable, ids: Tensor) -> None:
    config = BERT if "Bert" in mine else T5
    model, other = built(mine, config), built(theirs, config)
    own, prefix = model.state_dict(), model.base_model_prefix
    values = {name.removeprefix(f"{prefix}."): value for name, value in own.items()}
    other.load_state_dict(
        {name: values.get(name.removeprefix(f"{prefix}."), v) for name, v in other.state_dict().items()}
    )
    split = symbiosis.wrap(copy.deepcopy(model), serve(other).endpoint)
    remote = {name for name, p in split.named_parameters() if isinstance(p, RemoteWeight)}
    ids[:, -1] = T5.eos_token_id
    assert len(remote) >= 12 and not any("classifier" in name or "pooler" in name for name in remote)
    with torch.no_grad():
        assert torch.equal(split(ids)[0], model(ids)[0])
    assert products(split) > 0
    plain = symbiosis.unwrap(split, own)
    assert all(torch.equal(value, own[name]) for name, value in plain.state_dict().items())


def test_another_models_weights_are_no_match(serve: Callable) -> None:
    with pytest.raises(WrapError, match=r"encoder\.layer\.0.*the weights differ"):
        torch.manual_seed(1)
        symbiosis.wrap(transformers.BertForSequenceClassification(BERT), serve(built("BertModel", BERT)).endpoint)


def test_exclusions(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama, serve=["*", "!*.o_proj", "!model.embed_tokens"])
    assert len(executor.server.store.served()) == 13
    split = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint, layers=["!lm_head", "!*.layers.1.*"])
    assert len(symbiosis.report(split).wrapped) == 6 and symbiosis.report(split).kept["lm_head"] == "not chosen"
    assert (
        len(symbiosis.report(symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint, layers="!lm_head")).wrapped)
        == 14
    )
    assert len(Store(copy.deepcopy(llama), serve=["!*.mlp.*"]).served()) == 8


def test_patterns_that_match_nothing_are_errors(llama: nn.Module, serve: Callable) -> None:
    endpoint = serve(llama).endpoint
    for pattern, why in {
        "!score": "excludes nothing: this model has no such layer; names look like: model.layers.0",
        "*.qproj": "no served layer: there is no such layer; names look like",
        "lm_head": "no served layer: the executor was not told to serve it",
    }.items():
        with pytest.raises(WrapError, match=why):
            symbiosis.wrap(copy.deepcopy(llama), endpoint, layers=["*.o_proj", pattern])
    with pytest.raises(ConfigError, match=r"--serve '!score' matches no layer"):
        Store(tiny_llama(), serve=["!score"])


def test_heads_that_the_operator_serves_are_told(
    llama: nn.Module, serve: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = serve(llama, serve=["*"]).endpoint
    symbiosis.wrap(copy.deepcopy(llama), endpoint)
    assert (
        "serves heads (lm_head), whose gradients reveal the labels" in caplog.text
        and "layers='!lm_head'" in caplog.text
    )
    caplog.clear()
    symbiosis.wrap(copy.deepcopy(llama), endpoint, layers="*")
    symbiosis.wrap(copy.deepcopy(llama), endpoint, layers="!lm_head")
    assert "heads" not in caplog.text
