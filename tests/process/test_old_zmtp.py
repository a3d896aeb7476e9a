"""A client that speaks a ZMTP of before 3.0 is refused like any other stranger."""

import logging
import socket
import time

import pytest

import symbiosis

NAMELESS, MESSAGE = b"\x01\0", b"\x02\0a"


def test_a_message_that_does_not_tell_its_connection_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), symbiosis.Executor("demo", listen=["tcp://127.0.0.1:0"]) as executor:
        (endpoint,) = (each for each in executor.endpoints if each.startswith("tcp:"))
        host, _, port = endpoint.removeprefix("tcp://").partition("?")[0].rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(NAMELESS + MESSAGE)
            time.sleep(1)
        assert "a bug in the executor" not in caplog.text
