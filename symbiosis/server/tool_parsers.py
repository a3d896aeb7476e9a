"""Reads calls of tools out of an answer's text as it comes, by the format in which a model writes them. What is no call is content."""

import ast
import re
from typing import Any, NamedTuple

import msgspec

SPACES = " \n\t\r"
ARGUMENTS = ("arguments", "parameters")


class CallPart(NamedTuple):
    """What a call has gained. Its first part has the name."""

    call: int  # by number
    name: str = ""
    arguments: str = ""


class JsonCall:
    """One call as a JSON object, `{"name": ..., "arguments": {...}}`, read as it comes.

    Args:
        name: Of a call of which only the arguments are written.

    >>> call = JsonCall()
    >>> call.add('{"name": "f", "argum'), call.new
    (20, None)
    >>> call.add('ents": {"a": 1'), call.new
    (14, ('f', '{"a": 1'))
    """

    def __init__(self, name: str | None = None) -> None:
        self.name, self.is_over, self.is_told = name, False, False
        self.raw = ""  # all of it, until its name is told
        self.arguments: str | None = None  # those that were not told yet
        self.new: tuple[str, str] | None = None
        self._last = 0 if name is None else 1  # the depth at which it ends
        self._depth, self._key, self._value = self._last, None if name is None else "arguments", ""
        self._is_text = self._is_escaped = False

    @property
    def is_broken(self) -> bool:
        """Whether it has begun as no object does."""
        return self._depth == self._last and not self.is_over and bool(self.raw.strip(SPACES))

    def add(self, text: str) -> int:
        """Read text. Return how much of it is the call's."""
        taken = 0
        for character in text:
            self._take(character)
            taken += 1
            if self.is_over or (self._depth == self._last and character not in SPACES):
                break
        self.raw += text[:taken]
        self._tell()
        return taken

    def _take(self, character: str) -> None:
        if self._is_text:
            self._value += character
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_text = False
        elif character in "{[":
            self._depth += 1
            if self._depth > 1:
                self._value += character
        elif character in "}]":
            self._depth -= 1
            if self._depth:
                self._value += character
            if self._depth <= self._last:
                self._end_value()
                self.is_over = True
        elif self._depth == 1 and character == ":":
            self._key, self._value = _text(self._value), ""
        elif self._depth == 1 and character == ",":
            self._end_value()
        elif self._depth > 1 or (self._depth == 1 and character not in SPACES):
            self._value += character
            self._is_text = character == '"'

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _text(self._value)
        elif self._key in ARGUMENTS:
            told = self._value if self.arguments is not None else _text(self._value) or self._value
            self.arguments = (self.arguments or "") + told
        self._key, self._value = None, ""

    def _tell(self) -> None:
        """Tell what is known: nothing before the name is, and the arguments begin."""
        if self._key in ARGUMENTS and self._value and not (self.arguments is None and self._value.startswith('"')):
            self.arguments, self._value = (self.arguments or "") + self._value, ""
        if self.name and self.arguments is not None and (self.arguments or not self.is_told):
            before = self.new or ("", "")
            name = "" if self.is_told else self.name
            self.new, self.arguments, self.is_told = (before[0] or name, before[1] + self.arguments), "", True


def _text(json: str) -> str | None:
    """Return the text that JSON stands for, if it does."""
    try:
        return msgspec.json.decode(json, type=str)
    except msgspec.MsgspecError:
        return None


class ToolParser:
    """Reads one answer.

    Args:
        most: Calls that are told; further ones are left out.
    """

    needs_special = False  # whether special tokens are part of the format

    def __init__(self, most: int | None = None) -> None:
        self._held, self._spaces, self._most = "", "", most
        self._call: JsonCall | None = None
        self._content, self._parts, self.calls = "", list[CallPart](), 0

    def add(self, text: str) -> tuple[str, list[CallPart]]:
        """Return what the answer gains by this text: content, and parts of calls."""
        self._held += text
        while self._read():
            pass
        return self._gained()

    def end(self) -> tuple[str, list[CallPart]]:
        """Return what was held back, because no more text comes."""
        if self._call is not None:
            self._give_up(self._call)
        self._say(self._held)
        self._held = ""
        if not self.calls:
            self._content, self._spaces = self._content + self._spaces, ""
        return self._gained()

    def _read(self) -> bool:
        """Read a piece of what is held. Return whether there may be more to read."""
        raise NotImplementedError

    def _gained(self) -> tuple[str, list[CallPart]]:
        content, parts = self._content, self._parts
        self._content, self._parts = "", []
        return content, parts

    def _say(self, text: str) -> None:
        """Have this text as content. Spaces beside calls are none."""
        text = self._spaces + text
        told = text.rstrip(SPACES)
        if self.calls and not told.strip(SPACES):
            self._spaces = ""
            return
        self._content, self._spaces = self._content + told, text[len(told) :]

    def _tell(self, name: str, arguments: str) -> None:
        self._spaces = ""
        if name:
            self.calls += 1
        if self._most is None or self.calls <= self._most:
            self._parts.append(CallPart(self.calls - 1, name, arguments))

    def _read_call(self) -> bool:
        """Go on with the call that has begun. Return whether it is over."""
        call = self._call
        assert call is not None
        self._held = self._held[call.add(self._held) :]
        if call.new is not None:
            self._tell(*call.new)
            call.new = None
        if call.is_broken:
            self._give_up(call)
            return True
        if call.is_over:
            self._call = None
            if not call.is_told:
                self._untold(call)
        return call.is_over

    def _untold(self, call: JsonCall) -> None:
        """An object is over that has no arguments."""
        self._say(call.raw)

    def _give_up(self, call: JsonCall) -> None:
        self._call = None
        if not call.is_told:
            self._say(call.raw)

    def _until(self, mark: str) -> bool:
        """Say what stands before a mark. Return whether it is there."""
        before, found, after = self._held.partition(mark)
        if found:
            self._say(before)
            self._held = after
            return True
        keep = next(size for size in range(min(len(mark) - 1, len(before)), -1, -1) if before.endswith(mark[:size]))
        self._say(before[: len(before) - keep])
        self._held = before[len(before) - keep :]
        return False


class Hermes(ToolParser):
    r"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen and many others.

    >>> parser = Hermes()
    >>> parser.add('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    ('I look.', [CallPart(call=0, name='f', arguments='{"a": 1}')])
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._is_closing = False

    def _read(self) -> bool:
        if self._call is not None:
            if not self._read_call():
                return False
            self._is_closing = True
        if self._is_closing:
            held = self._held.lstrip(SPACES)
            if len(held) < len(self.END) and self.END.startswith(held):
                return False
            self._held, self._is_closing = held.removeprefix(self.END), False
        if self._until(self.BEGIN):
            self._call = JsonCall()
            return True
        return False

    def _untold(self, call: JsonCall) -> None:
        if call.name:
            self._tell(call.name, "{}")
        else:
            self._say(self.BEGIN + call.raw)

    def _give_up(self, call: JsonCall) -> None:
        self._call = None
        if not call.is_told:
            self._say(self.BEGIN + call.raw)


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}` from the first character on, several with semicolons between them, of Llama 3.

    >>> Llama3Json().add('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}')[1][1]
    CallPart(call=1, name='g', arguments='{}')
    """

    needs_special = True
    TAG = "<|python_tag|>"

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._is_text = False

    def _read(self) -> bool:
        if self._is_text:
            self._say(self._held)
            self._held = ""
            return False
        if self._call is not None:
            return self._read_call()
        held = self._held.lstrip(SPACES + (";," if self.calls else ""))
        if not held or (len(held) < len(self.TAG) and self.TAG.startswith(held)):
            return False
        if not (rest := held.removeprefix(self.TAG).lstrip(SPACES)):
            return False
        if rest.startswith("{"):
            self._held, self._call = rest, JsonCall()
        else:
            self._is_text = True
        return True

    def _untold(self, call: JsonCall) -> None:
        self._is_text = True
        super()._untold(call)

    def _give_up(self, call: JsonCall) -> None:
        self._is_text = True
        super()._give_up(call)


class JsonList(ToolParser):
    """A JSON list of calls, which a grammar has made.

    >>> JsonList().add('[{"name": "f", "parameters": {"a": 1}}]')
    ('', [CallPart(call=0, name='f', arguments='{"a": 1}')])
    """

    def _read(self) -> bool:
        if self._call is not None:
            return self._read_call()
        held = self._held.lstrip(SPACES + "[,")
        if held.startswith("{"):
            self._held, self._call = held, JsonCall()
            return True
        self._held = held.removeprefix("]")
        return False


class Mistral(JsonList):
    """`[TOOL_CALLS]`, and behind it a JSON list of calls or, of later models, a name and an object of arguments.

    >>> Mistral().add('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}')[1][1]
    CallPart(call=1, name='g', arguments='{}')
    """

    needs_special = True
    MARK, BEFORE = "[TOOL_CALLS]", "[ARGS]"
    NAME = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)")

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._where = "text"  # or behind the mark, or in a list

    def _read(self) -> bool:
        if self._call is not None:
            return self._read_call()
        if self._where == "text":
            if self._until(self.MARK):
                self._where = "mark"
                return True
            return False
        if self._where == "mark":
            held = self._held.lstrip(SPACES)
            if held.startswith("["):
                self._where = "list"
            elif found := self.NAME.match(held):
                self._held, self._call, self._where = held[found.end() :], JsonCall(found[1]), "text"
                return True
            elif "{" in held or len(held) > 256:
                self._say(self.MARK)
                self._where = "text"
                return True
            else:
                return False
        held = self._held.lstrip(SPACES + "[,")
        if held.startswith("]"):
            self._held, self._where = held[1:], "text"
            return True
        if held.startswith("{"):
            self._held, self._call = held, JsonCall()
        return held.startswith("{")


class Pythonic(ToolParser):
    """`[f(a=1), g(b="x")]` from the first character on, of Llama 3.2 and 4. Calls are told when the list ends.

    >>> Pythonic().add("[f(a=1), g()]")[1]
    [CallPart(call=0, name='f', arguments='{"a":1}'), CallPart(call=1, name='g', arguments='{}')]
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)
        self._is_text, self._depth, self._quote, self._place = False, 0, "", 0

    def _read(self) -> bool:
        held = self._held
        if not self._is_text and not held.lstrip(SPACES):
            return False
        if self._is_text or not held.lstrip(SPACES).startswith("["):
            self._is_text = True
            self._say(held)
            self._held = ""
            return False
        while self._place < len(held):
            character, self._place = held[self._place], self._place + 1
            if self._quote:
                if character == "\\":
                    self._place += 1
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "[({":
                self._depth += 1
            elif character in "])}":
                self._depth -= 1
                if not self._depth:
                    self._end_list(held[: self._place])
                    self._held, self._is_text = held[self._place :], True
                    return True
        return False

    def _end_list(self, text: str) -> None:
        try:
            calls = _python_calls(text)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, msgspec.MsgspecError):
            self._say(text)
            return
        for name, arguments in calls:
            self._tell(name, msgspec.json.encode(arguments).decode())


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of a list of calls. Raises `ValueError` if it is none. Nothing is run."""
    tree = ast.parse(text.strip(SPACES), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
            raise ValueError("no call")
        arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        msgspec.json.encode(arguments)
        calls.append((ast.unparse(call.func), arguments))
    return calls


PARSERS: dict[str | None, type[ToolParser]] = {
    "hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral, "pythonic": Pythonic, None: JsonList,
}  # fmt: skip
