"""Text as it comes, token by token, is the text of all tokens; stop strings cut it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.serving.engine.detokenize import BYTES, Stop, Text, bytes_of, chat_text, decoder, prompt_tokens

DEMO = Path(symbiosis.__file__).parent / "demo_model"


@cache
def bytes_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@cache
def sentence_pieces() -> Any:
    """Llama 2's kind: pieces with a mark for the space before them, and bytes for what has no piece."""
    words = ["▁", "▁the", "▁end", "ing", "é", "▁é", ".", "a"]
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def streamed(tokenizer: Any, tokens: list[int], **options: Any) -> tuple[str, list[str], bool]:
    text = Text(tokenizer, **options)
    parts = [text.add([token]) for token in tokens]
    return "".join(parts) + text.end(), parts, text.stopped


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30))
def test_bytes_become_the_text_that_they_were(said: str) -> None:
    tokenizer = bytes_tokenizer()
    if "�" not in said:
        whole, parts, _ = streamed(tokenizer, list(said.encode()))
        assert whole == said
        assert "�" not in "".join(parts)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(258, 265), max_size=12), st.text(alphabet="é€😀", max_size=3), st.integers(0, 12))
def test_pieces_with_spaces_and_bytes_become_the_same_text(pieces: list[int], strange: str, where: int) -> None:
    tokens = pieces[:where] + [2 + byte for byte in strange.encode()] + pieces[where:]
    whole, parts, _ = streamed(sentence_pieces(), tokens)
    assert whole == sentence_pieces().decode(tokens, clean_up_tokenization_spaces=False)
    assert "�" not in "".join(parts)


def test_each_byte_has_one_character() -> None:
    assert sorted(BYTES.values()) == list(range(256))


def test_what_never_becomes_a_character_is_not_held_back_for_ever() -> None:
    for tokenizer, byte in ((bytes_tokenizer(), 0xFF), (sentence_pieces(), 2 + 0xFF)):
        whole, parts, _ = streamed(tokenizer, [byte] * 20)
        assert len("".join(parts)) >= 16 and len(whole) == 20
        after, _, _ = streamed(tokenizer, [byte] * 5 + ([97] if tokenizer is bytes_tokenizer() else [265]))
        assert after == "�" * 5 + "a"


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("one two three", ("four",), "one two three"),
        ("aaab", ("ab",), "aa"),
        ("abab", ("abc",), "abab"),
        ("x\n\ny", ("\n\n",), "x"),
        ("naïve café", ("é",), "naïve caf"),
        ("stop", ("stop",), ""),
        ("text", ("",), "text"),
    ],
)
def test_text_is_cut_before_the_first_stop_string(said: str, stop: tuple[str, ...], expected: str) -> None:
    whole, parts, stopped = streamed(bytes_tokenizer(), list(said.encode()), stop=stop)
    assert whole == expected
    assert stopped == (expected != said)
    text = Text(bytes_tokenizer(), stop)
    assert text.add(said.encode()) + text.end() == expected  # the same, all at once


@settings(deadline=None, max_examples=60)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_wherever_tokens_end(said: str, stop: list[str]) -> None:
    places = [place for place in (said.find(each) for each in stop) if place >= 0]
    whole, _, stopped = streamed(bytes_tokenizer(), list(said.encode()), stop=stop)
    assert stopped == bool(places)
    if not places:
        assert whole == said
    else:  # the first to be complete wins
        end = min(said.find(each) + len(each) for each in stop if each in said)
        assert whole == said[: min(said[:end].find(each) for each in stop if each in said[:end])]


@settings(deadline=None, max_examples=60)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_a_stop_string_may_be_part_of_the_text(said: str, stop: list[str], size: int) -> None:
    ends = [said.find(each) + len(each) for each in stop if each in said]
    text = Text(bytes_tokenizer(), stop, keeps_stop=True)
    parts = [text.add(said[at : at + size].encode()) for at in range(0, len(said), size)]
    assert "".join(parts) == said[: min(ends, default=None)] and text.end() == "", "nothing is held back"
    assert text.stopped == bool(ends)


def test_an_added_token_has_the_bytes_that_it_is_written_with() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)  # which nobody has asked for added tokens yet
    tokenizer.add_tokens(["n\u00e9"])
    assert bytes_of(tokenizer, tokenizer.convert_tokens_to_ids("n\u00e9")) == "n\u00e9".encode()


def test_silent_tokens_are_no_part_of_the_text() -> None:
    assert streamed(bytes_tokenizer(), list(b"a!b"), silent=b"!")[0] == "ab"


def test_stop_strings_within_the_least_length_do_not_count() -> None:
    assert streamed(bytes_tokenizer(), list(b"ab ab ab"), stop=("ab",), min_tokens=3)[0] == "ab "


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    tokens = [*b"hi", bytes_tokenizer().eos_token_id]
    assert streamed(bytes_tokenizer(), tokens)[0] == "hi"
    assert streamed(bytes_tokenizer(), tokens, special=True)[0] == "hi<|end|>"


def test_prompts() -> None:
    assert prompt_tokens(bytes_tokenizer(), "hi") == (104, 105)
    assert prompt_tokens(None, [1, 2]) == (1, 2)
    with pytest.raises(ConfigError, match="tokenizer"):
        prompt_tokens(None, "hi")


def test_chats_go_by_the_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        chat_text(tokenizer, [{"role": "user", "content": "hi"}])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    assert chat_text(tokenizer, [{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ConfigError, match="no system messages"):
        chat_text(tokenizer, [{"role": "system", "content": "hi"}])


@pytest.mark.parametrize("stop", ["aab", "abab", "aaaa", "abcabd", "b"])
@given(text=st.text("abcd", max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_a_stop_string_is_found_where_it_stands(stop: str, text: str, cuts: list[int]) -> None:
    searched, matched, at = Stop(stop), 0, 0
    for cut in [*cuts, *[1] * len(text)]:
        end, matched = searched.after(text[at : at + cut], matched)
        if end is not None:
            assert at + end - len(stop) == text.find(stop)
            return
        at += cut
        read = text[:at]
        assert matched == next(n for n in range(len(stop) - 1, -1, -1) if read.endswith(stop[:n]))
    assert stop not in text


def test_a_stop_string_that_nearly_comes_takes_no_longer_for_its_length() -> None:
    compared = 0

    class Counted(str):
        def __getitem__(self, place: Any) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(place)

    stop = Stop(Counted("a" * 1000 + "!"))
    matched, compared = 0, 0
    for _ in range(5000):
        _, matched = stop.after("a", matched)
    assert matched == 1000 and compared <= 4 * 5000


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that decodes in its own way."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).upper()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("make", [bytes_tokenizer, sentence_pieces])
def test_the_short_way_to_text_is_that_of_transformers(make: Any, special: bool) -> None:
    tokenizer = make()
    for tokens in ([], [tokenizer.eos_token_id], [5, tokenizer.eos_token_id, 100, 101], [104, 0, 1, 2]):
        wanted = tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        assert decoder(tokenizer)(tokens, not special) == wanted, tokens


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself() -> None:
    tokenizer = Shouting(tokenizer_object=sentence_pieces().backend_tokenizer, eos_token="</s>", unk_token="<unk>")
    text = Text(tokenizer)
    assert text.add([259, 260]) + text.end() == "THE END"


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=20))
def test_the_bytes_of_tokens_are_those_of_the_text(said: str) -> None:
    tokens = bytes_tokenizer()(said).input_ids
    assert b"".join(bytes_of(bytes_tokenizer(), token) for token in tokens) == said.encode()


def test_each_kind_of_token_has_its_own_bytes() -> None:
    assert [bytes_of(bytes_tokenizer(), byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert bytes_of(bytes_tokenizer(), 256) == b"<|end|>" and bytes_of(bytes_tokenizer(), 10**6) == b""
    assert [bytes_of(sentence_pieces(), 2 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert bytes_of(sentence_pieces(), 262) == "é".encode() and bytes_of(sentence_pieces(), 1) == b"</s>"
    told = [bytes_of(sentence_pieces(), token) for token in (258, 259, 261, 263)]  # the first space of a text, too
    assert told == [b" ", b" the", b"ing", " é".encode()]


def test_an_added_token_that_no_bytes_spell_is_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["日"])
    assert bytes_of(tokenizer, tokenizer.convert_tokens_to_ids("日")) == "日".encode()
