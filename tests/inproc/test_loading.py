"""What an executor says while it loads."""

import logging
import time

import pytest

from symbiosis.executor import daemon


def test_a_load_is_told_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(daemon, "LOADING_EVERY_S", 0.01)
    with caplog.at_level(logging.INFO), daemon.loading("demo"):
        time.sleep(0.1)
    told = [record for record in caplog.records if "loading" in record.getMessage()]
    assert told
    count = len(told)
    time.sleep(0.05)
    assert len([record for record in caplog.records if "loading" in record.getMessage()]) == count
