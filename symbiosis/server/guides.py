"""What a text must follow, by the names of OpenAI (`response_format`) and vLLM (`structured_outputs`, `guided_...`), and what it means to the
engine."""

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.openai_fields import RAW
from symbiosis.serving.request import Guide

ANY_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: msgspec.Raw = RAW  # its text, which the engine's process reads
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of them."""

    json: msgspec.Raw = RAW  # a schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def of_format(wanted: ResponseFormat) -> Guide | None:
    """Return what OpenAI's `response_format` asks for.

    >>> of_format(ResponseFormat("json_object"))
    Guide(kind='schema', text='{"type":"object"}')
    """
    if wanted.json_schema and wanted.type != "json_schema":
        raise wrong("response_format: a json_schema goes with the type json_schema", "response_format")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Guide("schema", ANY_OBJECT)
    if wanted.type != "json_schema":
        message = f"response_format: its type is text, json_object or json_schema, not {wanted.type[:50]!r}"
        raise wrong(message, "response_format")
    schema = bytes(wanted.json_schema.schema) if wanted.json_schema else b""
    if not schema.startswith(b"{"):
        raise wrong("response_format: json_schema needs a schema, which is an object", "response_format")
    return Guide("schema", _text(schema, "response_format"))


def of_outputs(wanted: StructuredOutputs, field: str) -> Guide:
    """Return what vLLM's `structured_outputs` asks for. `field`: by which it was given."""
    nothing = (None, False, msgspec.Raw(), msgspec.Raw(b"null"))
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) not in nothing]
    if len(given) != 1:
        raise wrong(f"{field} has one of {', '.join(wanted.__struct_fields__)}, and this has {len(given)}", field)
    if wanted.json_object:
        return Guide("schema", ANY_OBJECT)
    if wanted.regex is not None:
        return Guide("regex", wanted.regex)
    if wanted.grammar is not None:
        return Guide("grammar", wanted.grammar)
    if wanted.choice is not None:
        if not wanted.choice or not all(wanted.choice):
            raise wrong(f"{field}: a choice has at least one text, and none that is empty", field)
        return Guide("grammar", "start: " + " | ".join(map(literal, wanted.choice)))
    return Guide("schema", _schema(bytes(wanted.json), field))


def literal(text: str) -> str:
    r"""Return a text as a grammar has it.

    >>> print(literal('say "é"\n'))
    "say \"é\"\n"
    """
    return msgspec.json.encode(text).decode()


def _schema(given: bytes, field: str) -> str:
    """Return the text of a schema, which is an object, or such a text."""
    if given.startswith(b'"'):
        try:
            return msgspec.json.decode(given, type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise wrong(f"{field}: the schema is no text: {error}", field) from None
    if not given.startswith(b"{"):
        raise wrong(f"{field}: a JSON schema is an object, or the text of one", field)
    return _text(given, field)


def _text(schema: bytes, field: str) -> str:
    try:
        return schema.decode()
    except UnicodeDecodeError as error:
        raise wrong(f"{field}: the schema is no text: {error}", field) from None


def guide_of(response_format: ResponseFormat | None, outputs: dict[str, StructuredOutputs]) -> tuple[str, Guide] | None:
    """Return what a text must follow, and the field that says so. There may be one.

    Args:
        outputs: vLLM's, by the name of their field.
    """
    found = [(name, of_outputs(each, name)) for name, each in outputs.items()]
    if response_format is not None and (guide := of_format(response_format)) is not None:
        found.append(("response_format", guide))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise wrong(f"{names}: a text follows one of them, so give one", found[0][0])
    return found[0] if found else None
