"""API keys: who they let in, how much at a time, and what a wrong file says."""

import os
from pathlib import Path

import pytest
from starlette.requests import Request

from symbiosis.base.key_lines import LONGEST_FILE, KeyLine, read_keys
from symbiosis.errors import ConfigError
from symbiosis.server.api_app import ApiState
from symbiosis.server.api_errors import ApiError
from symbiosis.server.api_keys import DAY_S, Keys, Tenant
from tests.secret_files import write_secret


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(status: int) -> pytest.RaisesExc[ApiError]:
    return pytest.RaisesExc(ApiError, check=lambda error: error.status == status)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write_secret(path, "# name key\nanna  sk-anna-1234 requests=2 tokens_per_s=100\n\nbert sk-bert-1234\n")
    return path


def test_a_key_is_its_tenants(file: Path) -> None:
    keys = Keys(file)
    assert keys.are_needed and keys.tenant("Bearer sk-anna-1234").name == "anna"
    assert keys.tenant("bearer  sk-bert-1234 ").name == "bert"


@pytest.mark.parametrize(
    "given", [None, "", "sk-anna-1234", "Basic sk-anna-1234", "Bearer", "Bearer sk-anna-123", "Bearer é"]
)
def test_others_are_not_let_in(file: Path, given: str | None) -> None:
    with refused(401):
        Keys(file).tenant(given)


def test_without_a_file_everybody_is_one_tenant() -> None:
    keys = Keys(None)
    assert not keys.are_needed and keys.tenant(None) is keys.tenant("Bearer anything")


def sent(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


FOREIGN = (
    {"host": "127.0.0.1:8000", "origin": "https://example.org"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"},
    {"host": "127.0.0.1:8000", "origin": "null"},
    {"host": "127.0.0.1:8000", "sec_fetch_site": "cross-site"},
    {"host": "127.0.0.1:8000", "sec_fetch_site": "same-site"},
)
OWN = (
    {"host": "127.0.0.1:8000"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
    {"host": "127.0.0.1:8000", "origin": "https://llm.example.org", "sec_fetch_site": "same-origin"},
    {"host": "127.0.0.1:8000", "sec_fetch_site": "none"},
)


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_site_does_not_use_a_server_without_keys(headers: dict[str, str]) -> None:
    for ask in (ApiState(None).tenant, ApiState(None).administrator):
        with refused(403):
            ask(sent(**headers))


@pytest.mark.parametrize("headers", OWN)
def test_its_own_page_and_programs_do(headers: dict[str, str]) -> None:
    assert ApiState(None).tenant(sent(**headers)).name == ""


def test_with_a_key_any_page_may_ask(file: Path) -> None:
    assert ApiState(str(file)).tenant(sent(authorization="Bearer sk-anna-1234", **FOREIGN[0])).name == "anna"


def test_a_tenant_has_so_many_requests_under_way() -> None:
    tenant = Tenant(KeyLine("anna", requests=2))
    first, _ = tenant.admit(1, now=0.0), tenant.admit(1, now=0.0)
    with refused(429):
        tenant.admit(1, now=0.0)
    first.end()
    tenant.admit(1, now=0.0)


def test_processes_keep_the_limits_of_a_key_together(file: Path) -> None:
    write_secret(file, "anna sk-anna-1234 requests=4\nbert sk-bert-1234 tokens_per_s=100\n")
    front_ends = [Keys(file, Clock(), processes=2) for _ in range(2)]
    for keys in front_ends:
        anna, bert = keys.tenant("Bearer sk-anna-1234"), keys.tenant("Bearer sk-bert-1234")
        for _ in range(2):
            anna.admit(1, now=0.0)
        bert.admit(1, now=0.0, tokens=50)
        for tenant, now in ((anna, 0.0), (bert, 0.9)):
            with refused(429):
                tenant.admit(1, now)
        bert.admit(1, now=1.1)


def test_what_a_tenant_can_never_have_is_not_to_be_tried_again() -> None:
    with refused(400) as error:
        Tenant(KeyLine("anna", requests=2)).admit(3, now=0.0)
    assert error.value.body["error"]["param"] == "n" and not error.value.retry_s
    with refused(400) as error:
        Tenant(KeyLine("anna", requests=2)).check_most(3, "input")
    assert error.value.body["error"]["param"] == "input"


def test_a_tenant_that_has_spent_its_tokens_waits_until_they_have_grown_again() -> None:
    tenant = Tenant(KeyLine("anna", tokens_per_s=100))
    tenant.admit(1, now=0.0, tokens=250)
    with refused(429) as error:
        tenant.admit(1, now=1.0)
    assert error.value.retry_s == pytest.approx(1.5)
    tenant.admit(1, now=2.5, tokens=150)
    tenant.admit(1, now=1000.0)  # no more than a second's worth is kept
    assert tenant.tokens.owed == -100.0


NOON = 20_000.5 * DAY_S  # of a day, in seconds since 1970


def test_a_tenant_that_has_had_its_tokens_of_the_day_waits_for_the_next(file: Path) -> None:
    write_secret(file, "anna sk-anna-1234 tokens_per_day=100\n")
    today = Clock()
    today.now = NOON
    keys = Keys(file, Clock(), today)
    anna = keys.tenant("Bearer sk-anna-1234")
    anna.admit(1, now=0.0, tokens=500).end(used=99)
    late = anna.admit(1, now=0.0, tokens=50)  # one token is left, and it may reserve more
    with refused(429) as error:
        anna.check(1, now=0.0)
    assert (error.value.reason, error.value.retry_s) == ("daily_tokens_of_key", 1.0)  # what is reserved may come back
    assert "has had 99 since midnight UTC, and 50 are reserved" in str(error.value)
    late.reserve(3)
    today.now = NOON + DAY_S / 4
    late.end(used=2)
    with refused(429) as error:
        keys.tenant("Bearer sk-anna-1234").check(1, now=0.0)
    assert str(error.value) == "this key may have 100 tokens a day, and has had 101 since midnight UTC"
    assert error.value.retry_s == DAY_S / 4
    today.now = NOON + DAY_S / 2
    keys.tenant("Bearer sk-anna-1234").check(1, now=0.0)


def test_what_began_before_midnight_counts_there(file: Path) -> None:
    write_secret(file, "anna sk-anna-1234 tokens_per_day=100\n")
    today = Clock()
    today.now = NOON
    keys = Keys(file, Clock(), today)
    before = keys.tenant("Bearer sk-anna-1234").admit(1, now=0.0, tokens=1000)
    today.now += DAY_S / 2
    anna = keys.tenant("Bearer sk-anna-1234")
    during = anna.admit(1, now=0.0, tokens=30)
    before.end(used=900)
    assert (anna.day.spent, anna.day.reserved) == (0, 30)
    during.end(used=20)
    during.end(used=20)
    assert (anna.day.spent, anna.day.reserved) == (20, 0)


def test_a_limit_a_day_counts_what_was_had_before_it_was_written(file: Path) -> None:
    clock = Clock()
    keys = Keys(file, clock, lambda: NOON, processes=2)
    bert = keys.tenant("Bearer sk-bert-1234")
    bert.admit(1, now=0.0).end(used=60)
    bert.check(1, now=0.0)
    clock.now = 2.0
    write_secret(file, "bert sk-bert-1234 tokens_per_day=101\n")
    assert keys.tenant("Bearer sk-bert-1234") is bert and bert.line.tokens_per_day == 50  # a half of it
    with refused(429):
        bert.check(1, now=0.0)
    assert keys.with_days() == {"bert": bert}


def test_a_changed_file_is_read_again_and_what_is_under_way_is_not_forgotten(file: Path) -> None:
    clock = Clock()
    keys = Keys(file, clock)
    anna = keys.tenant("Bearer sk-anna-1234")
    anna.admit(2, now=0.0)
    write_secret(file, "anna sk-anna-5678 requests=3\n")
    os.utime(file, ns=(1, 1))
    clock.now = 2.0
    assert keys.tenant("Bearer sk-anna-5678") is anna and (anna.under_way, anna.line.requests) == (2, 3)
    for old in ("sk-anna-1234", "sk-bert-1234"):
        with refused(401):
            keys.tenant(f"Bearer {old}")


def test_a_file_that_became_wrong_changes_nothing(file: Path) -> None:
    clock = Clock()
    keys = Keys(file, clock)
    write_secret(file, "anna short\n")
    clock.now = 2.0
    assert keys.tenant("Bearer sk-anna-1234").name == "anna"
    file.unlink()
    clock.now = 4.0
    assert keys.tenant("Bearer sk-bert-1234").name == "bert"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no API keys"),
        ("anna", "line 1"),
        ("anna secret7", "at least 8"),
        ("anna secret-of-anna speed=7", "NAME KEY"),
        ("anna secret-of-anna requests=-1", "NAME KEY"),
        ("anna secret-of-anna\nanna another-secret", "line 2"),
        ("anna secret-of-anna\nbert secret-of-anna", "line 2"),
        ("anna secret-of-änna", "of ASCII"),
        ("anna secret-of-anna old_key=secret7", "at least 8"),
        ("anna secret-of-anna old_key=secret-of-änna", "of ASCII"),
        ("anna secret-of-anna old_key=secret-of-anna", "line 1"),
        ("anna secret-of-anna\nbert secret-of-bert old_key=secret-of-anna", "line 2"),
        ("anna secret-of-anna old_key=secret-of-bert\nbert secret-of-bert", "line 2"),
        ("anna secret-of-anna old_key=secret-old old_key_expires=soon", "line 1: 'soon' is not a date"),
        ("anna secret-of-anna old_key_expires=2027-01-31", "goes with old_key"),
        ("an\0na secret-of-anna", "printable"),
        ("anna secret-of-anna\u2028mallory secret-of-mallory admin", "line 1"),
        ("anna secret-of-anna\x0bmallory secret-of-mallory admin", "line 1"),
    ],
)
def test_what_is_wrong_is_said_by_line_and_without_a_key(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    write_secret(file, text)
    with pytest.raises(ConfigError, match=told) as error:
        read_keys(file)
    assert "secret" not in str(error.value)


def test_an_old_key_lets_in_beside_the_new_one_until_it_expires(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, today = Clock(), Clock()
    keys = Keys(file, clock, today)
    anna = keys.tenant("Bearer sk-anna-1234")
    anna.admit(1, now=0.0)
    caplog.set_level("INFO", "symbiosis")
    for line, works, ends in (
        ("anna sk-anna-5678 requests=2 admin old_key=sk-anna-1234", ("sk-anna-1234", "sk-anna-5678"), ()),
        (
            "anna sk-anna-5678 requests=2 old_key=sk-anna-1234 old_key_expires=1970-01-03",
            ("sk-anna-1234", "sk-anna-5678"),
            (),
        ),
        (None, ("sk-anna-5678",), ("sk-anna-1234",)),  # two days later
        (
            "anna sk-anna-9abc old_key=sk-anna-5678 old_key_expires=1970-02-01T00:00Z",
            ("sk-anna-9abc", "sk-anna-5678"),
            ("sk-anna-1234",),
        ),
        ("anna sk-anna-9abc", ("sk-anna-9abc",), ("sk-anna-1234", "sk-anna-5678")),
    ):
        clock.now += 2.0
        if line is None:
            today.now += 2 * 86_400
        else:
            file.write_text(line + "\n")
            os.utime(file, ns=(1, int(clock.now)))
        for key in works:
            assert keys.tenant(f"Bearer {key}") is anna and anna.under_way == 1
        for key in ends:
            with refused(401):
                keys.tenant(f"Bearer {key}")
    assert caplog.text.count("anna still uses its old API key") == 2 and "sk-" not in caplog.text


def test_only_administrators_change_adapters(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write_secret(file, "alice secret-of-alice admin\nbob secret-of-bob requests=4\n")
    state = ApiState(str(file))
    state.administrator(sent(authorization="Bearer secret-of-alice"))
    with pytest.raises(ApiError, match="may not change adapters") as refused:
        state.administrator(sent(authorization="Bearer secret-of-bob"))
    assert refused.value.status == 403
    ApiState(None).administrator(sent())


NO_FILES = {
    "a pipe": (lambda path: os.mkfifo(path), "it is not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a file"),
    "too long": (lambda path: write_secret(path, "#" * (LONGEST_FILE + 1)), "more than"),
    "a number that Python does not read": (
        lambda path: write_secret(path, f"a 12345678 requests={'9' * 5000}"),
        "line 1",
    ),
    "what everybody may write": (lambda path: write_secret(path, "a 12345678").chmod(0o666), "chmod 600"),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_of_keys_keeps_the_ones_that_there_are(file: Path, tmp_path: Path, what: str) -> None:
    """Nobody waits for it, and a request that comes at that moment is answered."""
    make, told = NO_FILES[what]
    keys = Keys(file, clock := Clock())
    make(tmp_path / "other")
    with pytest.raises(ConfigError, match=told):
        read_keys(tmp_path / "other")
    (tmp_path / "other").replace(file)
    clock.now += 10.0
    assert keys.tenant("Bearer sk-anna-1234").name == "anna"


def test_a_mark_of_its_encoding_is_no_part_of_a_name(file: Path) -> None:
    write_secret(file, "\ufeffanna sk-anna-1234")
    assert list(read_keys(file)) == ["anna"]


def test_who_has_no_limit_owes_nothing(file: Path) -> None:
    clock = Clock()
    keys = Keys(file, clock)
    anna = keys.tenant("Bearer sk-anna-1234")
    long = anna.admit(1, clock.now, tokens=100_000)
    for line in ("anna sk-anna-1234", "anna sk-anna-1234 tokens_per_s=100"):
        clock.now += 5.0
        write_secret(file, f"{line}\n")
        assert keys.tenant("Bearer sk-anna-1234") is anna
        if not anna.tokens.per_s:
            long.end(used=10)
    anna.admit(1, clock.now, tokens=10).end()
    assert anna.tokens.per_s == 100


def test_a_key_whose_line_comes_back_goes_on_from_where_it_was(file: Path) -> None:
    """Such as one of a file that is written in two pieces."""
    clock, today = Clock(), Clock()
    write_secret(file, "anna sk-anna-1234 requests=2 tokens_per_day=50\nbert sk-bert-1234\n")
    keys = Keys(file, clock, today)
    anna = keys.tenant("Bearer sk-anna-1234")
    anna.admit(1, clock(), 60).end(used=60)
    for text in ("bert sk-bert-1234\n", "bert sk-bert-1234\nanna sk-anna-5678 requests=2 tokens_per_day=50\n"):
        write_secret(file, text)
        clock.now += 2.0
        if "anna" not in text:
            with refused(401):
                keys.tenant("Bearer sk-anna-1234")
    assert keys.tenant("Bearer sk-anna-5678") is anna
    with refused(429):
        anna.admit(1, clock())


@pytest.mark.parametrize("wrong", ["requests=0", "tokens_per_s=0", "tokens_per_day=00", "requests=1 requests=5"])
def test_a_limit_that_lets_nothing_in_or_comes_twice_is_refused(file: Path, wrong: str) -> None:
    """An operator who means to lock a key out would open it."""
    write_secret(file, f"anna sk-anna-1234 {wrong}\n")
    with pytest.raises(ConfigError, match="lets nothing in|twice"):
        read_keys(file)
