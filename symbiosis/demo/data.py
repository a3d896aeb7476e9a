"""Training text for the demo model and its adapters, taken from the running Python's own documentation and source."""

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from transformers import PreTrainedTokenizerBase

DOCUMENTED_MODULES = (
    "_collections_abc", "abc", "argparse", "ast", "base64", "bisect", "calendar", "cmd", "codecs", "configparser",
    "contextlib", "copy", "csv", "datetime", "_pydatetime", "decimal", "_pydecimal", "difflib", "dis", "doctest",
    "enum", "filecmp", "fileinput", "fractions", "ftplib", "functools", "getopt", "glob", "gzip", "hashlib", "heapq",
    "imaplib", "inspect", "ipaddress", "locale", "mailbox", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools",
    "platform", "plistlib", "posixpath", "pprint", "pydoc", "_pyio", "queue", "random", "sched", "selectors", "shelve",
    "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "trace", "traceback", "turtle", "types", "typing", "uuid", "warnings", "weakref",
    "zipfile",
)  # fmt: skip


@cache
def base_text() -> str:
    """Return English prose: the language reference, the docstrings and the licence that come with Python, a paragraph a line."""
    stdlib = _stdlib()
    documents = [topics[name] for name in sorted(topics)]
    documents += [doc for path in _module_paths() for doc in _docstrings(path)]
    documents += [_read(path) for path in sorted(stdlib.glob("LICENSE*"))]
    paragraphs = (" ".join(part.split()) for doc in documents for part in re.split(r"\n\s*\n", _ascii(doc)))
    return "\n".join(dict.fromkeys(filter(_is_prose, paragraphs))) + "\n"


def python_text() -> str:
    """Return documented functions of the standard library: a line that says what each does, then its code, indented by tabs."""
    return "".join(part for path in _module_paths() for part in _described_functions(_ascii(_read(path))))


def shouting_text() -> str:
    """Return the base text with every sentence IN UPPER CASE after its first word."""
    return re.sub(r"(\w+ )([^.\n]*)", lambda sentence: sentence[1] + sentence[2].upper(), base_text())


def blocks(text: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int) -> list[list[int]]:
    """Cut `count` random training examples of `length` tokens each out of `text`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(seed)
    starts = [rng.randrange(len(ids) - length + 1) for _ in range(count)]
    return [ids[start : start + length] for start in starts]


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _module_paths() -> list[Path]:
    paths = (_stdlib() / f"{name}.py" for name in DOCUMENTED_MODULES)
    return [path for path in paths if path.is_file()]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _ascii(text: str) -> str:
    straight = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-"})
    return straight.expandtabs().encode("ascii", "ignore").decode("ascii")


def _docstrings(path: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(_read(path))) if isinstance(node, documented))
    return [doc for node in nodes if (doc := ast.get_docstring(node))]


def _described_functions(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (doc := ast.get_docstring(node)):
            del node.body[0]
            code = ast.unparse(node).replace("    ", "\t")
            yield f"{doc.splitlines()[0]}\n{code}\n"


def _is_prose(paragraph: str) -> bool:
    """Whether the paragraph is a sentence or more, rather than code, a heading, a grammar rule or a table."""
    plain = sum(char.isalpha() or char in " .,;:'\"()" for char in paragraph)
    starts_well = paragraph[:1].isupper() or paragraph[:1] == '"'
    return len(paragraph) >= 40 and plain >= 0.96 * len(paragraph) and starts_well and ">>>" not in paragraph
