"""Who came, was refused, was struck off and left is told: in the audit log, in the log, and in figures by tenant."""

import json
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from symbiosis.base.curve_keys import generate
from symbiosis.base.logs import JsonFormatter, TextFormatter
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.join_log import MOST_TOLD_APART, JoinLog
from symbiosis.executor.observe.log import AuditLog
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.protocol import Hello, Op, Refusal, decode_from_executor, encode_control
from tests.conftest import tiny_llama
from tests.processes import until
from tests.realm import Raw, Realm, echoes
from tests.zmtp import GREETING

ESCAPES = "\x1b]0;owned\x07\x1b[2Jbob\r\n\x9b31m\u202egnp\u200b\x00"


@pytest.fixture
def realm(tmp_path: Path) -> Iterator[Realm]:
    realm = Realm(tmp_path, audit_log=str(tmp_path / "audit.jsonl"), max_tenant_sessions=2)
    yield realm
    realm.executor.close()


def events(realm: Realm, *names: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (realm.folder / "audit.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in names]


def metrics(realm: Realm) -> str:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(realm.executor.server.snapshot))
    return generate_latest(registry).decode()


def test_the_audit_log_tells_who_joined_and_left_and_what_it_used(realm: Realm) -> None:
    session = Session(realm.endpoint("alice"))
    assert echoes(session) and echoes(session)
    number = session.welcome.session
    session.close()
    until(lambda: events(realm, "left"), "the end of a session")
    joined, left = events(realm, "joined", "left")
    assert (joined["session"], joined["tenant"], joined["transport"]) == (number, "alice", "tcp")
    assert joined["client"] == f"pid {os.getpid()}" and re.fullmatch(r"127\.0\.0\.1:\d+", joined["address"])
    assert (left["session"], left["tenant"], left["address"]) == (number, "alice", joined["address"])
    assert (left["why"], left["calls"], left["rows"], left["bytes"]) == ("left", 2, 20, 2 * 640 * 4)
    assert left["multiplications"] > 0
    assert joined["time"] <= left["time"] and joined["time"].endswith("+00:00")
    realm.executor.close()
    assert [line["event"] for line in events(realm, "started", "stopped")] == ["started", "stopped"]
    assert stat.S_IMODE((realm.folder / "audit.jsonl").stat().st_mode) == 0o600


def test_refusals_are_told_by_tenant_and_by_reason(realm: Realm) -> None:
    raws = [Raw.joined(realm.endpoint("alice")) for _ in range(2)]
    for _ in range(5):
        third = Raw(realm.endpoint("alice"))
        assert isinstance(third.join(), Refusal)
        third.close()
    generate("eve", realm.folder)
    with pytest.raises(SymbiosisError):
        Session(realm.endpoint("eve")).call(Op.ECHO, 0, torch.ones(1, 1))
    assert [(e["code"], e["tenant"], e["times"]) for e in events(realm, "refused")] == [
        ("LIMIT", "alice", times) for times in (1, 2, 4)
    ]
    assert [(e["code"], e["address"], e["times"]) for e in events(realm, "kept out")] == [
        ("UNKNOWN_KEY", "127.0.0.1", 1)
    ]
    figures = metrics(realm)
    assert 'symbiosis_refused_joins_total{code="LIMIT",tenant="alice"} 5.0' in figures
    assert 'symbiosis_refused_handshakes_total{reason="UNKNOWN_KEY"} 1.0' in figures
    assert 'symbiosis_tenant_sessions{tenant="alice"} 2.0' in figures
    for raw in raws:
        raw.close()


def test_who_is_struck_off_and_why_is_told(realm: Realm) -> None:
    session = Session(realm.endpoint("alice"))
    assert echoes(session)
    realm.let_in("bob")
    until(lambda: events(realm, "let in"), "a word of bob")
    (realm.tenants / "alice.pub").unlink()
    with pytest.raises(SymbiosisError):
        echoes(session)
    until(lambda: len(events(realm, "struck off")) == 1, "a word of alice")
    (realm.tenants / "bob.pub").write_text((realm.tenants / "bob.pub").read_text() + "expires 2020-01-01\n")
    until(lambda: len(events(realm, "struck off")) == 2, "a word of bob")
    assert [(e["tenant"], e["why"]) for e in events(realm, "struck off")] == [("alice", "removed"), ("bob", "expired")]
    assert [(e["tenant"], e["why"]) for e in events(realm, "left")] == [("alice", "struck off")]
    session.close()


def test_what_the_executor_itself_ends_is_told_as_such(tmp_path: Path) -> None:
    realm = Realm(tmp_path, audit_log=str(tmp_path / "audit.jsonl"), heartbeat_s=0.5)
    silent = Raw.joined(realm.endpoint("alice"))
    until(lambda: events(realm, "left"), "the end of a silent session")
    stays = Raw.joined(realm.endpoint("alice"))
    realm.executor.close()
    assert [event["why"] for event in events(realm, "left")] == ["silent", "executor stopped"]
    silent.close()
    stays.close()


def test_a_file_that_was_moved_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.tell("one")
    path.rename(tmp_path / "audit.1")
    log.tell("two", client='"\n')
    path.unlink()
    log.tell("three")
    other = AuditLog(path)  # as another executor may
    other.tell("four")
    log.tell("five")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["three", "four", "five"]
    assert json.loads((tmp_path / "audit.1").read_text())["event"] == "one"
    log.close()
    other.close()
    with pytest.raises(ConfigError, match="cannot write the audit log"):
        AuditLog(tmp_path / "nowhere" / "audit.jsonl")


def test_a_full_disk_ends_nobody(realm: Realm, caplog: pytest.LogCaptureFixture) -> None:
    realm.executor.server.register._audit.path = Path("/dev/full")
    session = Session(realm.endpoint("alice"))
    assert echoes(session)
    session.close()
    assert caplog.text.count("cannot write the audit log") == 1


def test_handshakes_that_fail_are_told_with_reason_and_address(realm: Realm) -> None:
    """Those that ZeroMQ refuses before a key is proved, too; nothing of who came in."""
    good = Session(realm.endpoint("alice"))
    assert echoes(good)
    for name in ("stranger", "other"):
        generate(name, realm.folder)
    for endpoint in (realm.endpoint("alice", server="other"), realm.endpoint("stranger")):
        with pytest.raises(SymbiosisError):
            _ = Session(endpoint, timeout=5.0, patience=0.0).welcome
    connections = realm.executor.server.listeners[0]._monitor._open
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", GREETING, b""):
        until(lambda: all(spoke for _, spoke in list(connections.values())), "the end of the connections before")
        with socket.create_connection(("127.0.0.1", realm.port)) as sock:
            until(lambda: not all(spoke for _, spoke in list(connections.values())), "a connection")
            sock.sendall(said)
            with suppress(ConnectionError):
                while sock.recv(1024):
                    pass
    codes = {"WRONG_EXECUTOR_KEY", "UNKNOWN_KEY", "NOTHING_SAID", "WITHOUT_KEY", "UNFINISHED"}
    until(lambda: codes == {line["code"] for line in events(realm, "kept out")}, "a line of each")
    good.close()
    until(lambda: events(realm, "left"), "the end of a session")
    told = {(line["code"], line["address"]) for line in events(realm, "kept out")}
    assert {(code, "127.0.0.1") for code in ("NOTHING_SAID", "WITHOUT_KEY", "UNKNOWN_KEY")} <= told
    assert 'symbiosis_refused_handshakes_total{reason="WITHOUT_KEY"}' in metrics(realm)


def test_failed_handshakes_do_not_fill_the_disk(realm: Realm) -> None:
    kept_out = realm.executor.server.ledger.kept_out
    for _ in range(100):
        socket.create_connection(("127.0.0.1", realm.port)).close()
    until(lambda: kept_out.total() >= 100, "a hundred of them")
    most = 2 * 7 * len(kept_out)  # of known addresses, and of those that were gone too soon
    assert 7 <= len(events(realm, "kept out")) <= most


def test_nobody_fills_a_disk(tmp_path: Path) -> None:
    store = Store(tiny_llama())
    register = JoinLog(Ledger(store, lambda *_: None), AuditLog(tmp_path / "audit.jsonl"), None)
    for number in range(2 * MOST_TOLD_APART):
        register.kept_out("UNKNOWN_KEY", f"2001:db8::{number:x}", "")
    assert 100 < len((tmp_path / "audit.jsonl").read_text().splitlines()) < 1000
    assert len(register._times) <= MOST_TOLD_APART


def test_what_a_client_calls_itself_is_shown_without_control_characters(
    realm: Realm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    accepted, refused = Raw(realm.endpoint("alice")), Raw(realm.endpoint("alice"))
    accepted.socket.send(encode_control(Hello(client=ESCAPES)))
    decode_from_executor(accepted.socket.recv())
    refused.socket.send(encode_control(Hello(client=ESCAPES, version=0)))
    decode_from_executor(refused.socket.recv())
    named = {session.client for session in realm.executor.server.sessions.values()}
    told = {event["client"] for event in events(realm, "joined", "refused")}
    assert named == told == {"?]0;owned??[2Jbob???31m?gnp??"}
    lines = [formatter.format(record) for record in caplog.records for formatter in (TextFormatter(), JsonFormatter())]
    assert not any(re.search(r"[\x00-\x1f\x7f-\x9f]|\\u00[01]", line) for line in lines)
    for raw in (accepted, refused):
        raw.close()


def test_what_other_messages_hold_is_shown_so_too(tmp_path: Path) -> None:
    """A file of a tenant may have any name."""
    record = logging.LogRecord(
        "symbiosis", logging.WARNING, "", 0, "cannot read %s", (f"{tmp_path}/\x1b[2J.pub\n",), None
    )
    assert TextFormatter().format(record).endswith("/?[2J.pub?")


def test_a_name_that_no_tenant_can_have_lets_nobody_in(realm: Realm) -> None:
    generate("bob", realm.folder)
    (realm.tenants / "\x1b[2Jbob.pub").write_text((realm.folder / "bob.pub").read_text())
    with suppress(SymbiosisError):
        assert not echoes(Session(realm.endpoint("bob")))
    until(lambda: realm.executor.server.dispatch.keyring.tenants.problems, "a problem")
    problems = realm.executor.server.dispatch.keyring.tenants.problems
    assert "names no tenant" in problems[0] and "\x1b" not in problems[0]
