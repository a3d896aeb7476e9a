"""C sources are compiled once for all processes of a user, and never taken from where others may write."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from symbiosis.kernels import compile_c


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "answer.c"
    file.write_text("int answer(void) { return 42; }\n")
    return file


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    run, seen = subprocess.run, list[Any]()

    def counted(command: list[str], **options: Any) -> Any:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return seen


def answer(source: Path, *flags: str) -> tuple[int, Path]:
    with compile_c.compiled(source, *flags) as library:
        return ctypes.CDLL(library).answer(), Path(library)


def test_the_same_is_compiled_once(source: Path, compilations: list[Any]) -> None:
    first, second = answer(source), answer(source)
    assert first == second and first[0] == 42 and len(compilations) == 1
    assert first[1].is_file() and [each.name for each in first[1].parent.iterdir()] == [first[1].name]
    answer(source, "-O2")
    source.write_text("int answer(void) { return 43; }\n")
    assert answer(source)[0] == 43 and len(compilations) == 3


def test_another_compiler_compiles_anew(source: Path, compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answer(source)
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(subprocess.SubprocessError):
        answer(source)
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(OSError):
        answer(source)


@pytest.mark.parametrize("where", ["cache", "cache/symbiosis", "cache/symbiosis/kernels"])
def test_nothing_is_taken_from_a_folder_where_others_may_write(
    where: str, source: Path, compilations: list[Any], tmp_path: Path
) -> None:
    answer(source)
    (tmp_path / where).chmod(0o777)
    (value, library), _ = answer(source), answer(source)
    assert value == 42 and not library.exists() and len(compilations) == 3


def test_without_a_home_it_is_compiled_each_time(
    source: Path, compilations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [answer(source)[0], answer(source)[0], len(compilations)] == [42, 42, 2]


def test_what_cannot_be_loaded_is_removed(source: Path, compilations: list[Any]) -> None:
    with compile_c.compiled(source) as library:  # not loaded: a library that is in use is not cut off
        Path(library).write_bytes(b"cut off")
    with pytest.raises(OSError):
        answer(source)
    assert answer(source)[0] == 42 and len(compilations) == 2


def test_functions_are_declared_as_they_are(source: Path) -> None:
    source.write_text("double half(double of) { return of / 2; }\nlong far(long at) { return at + 1; }\n")
    double, long = ctypes.c_double, ctypes.c_long
    library = compile_c.load(source, "-O2", half=([double], double), far=([long], long))
    assert library is not None
    assert library.half(3.0) == 1.5 and library.far(2**40) == 2**40 + 1  # undeclared, both would be ints of 32 bits
    with pytest.raises(ctypes.ArgumentError):
        library.far(0.5)


def test_without_a_compiler_nothing_is_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert compile_c.load(source) is None
    monkeypatch.setenv("CC", "/bin/false")
    assert compile_c.load(source) is None


def test_what_the_compiler_leaves_for_the_assembler_lies_in_a_folder_of_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where $TMPDIR leads, others may put another file in its place."""
    told = tmp_path / "told"
    (compiler := tmp_path / "cc").write_text(f'#!/bin/sh\necho "$TMPDIR" >> {told}\nexec cc "$@"\n')
    compiler.chmod(0o700)
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    (source := tmp_path / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compile_c.load(source) is not None
    assert told.read_text().startswith(str(tmp_path / "cache"))
