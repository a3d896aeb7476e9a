"""Files of lines and the log itself: rotated, on full disks, and by whom a line was caused."""

import io
import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from symbiosis.base import logs
from symbiosis.base.logs import JsonFormatter, JsonLines, TextFormatter, about_request, unwritten


def told(path: Path) -> list[Any]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines() if line]


def test_a_file_that_is_moved_away_is_begun_anew_by_all_who_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    one, other = JsonLines(path, "test"), JsonLines(path, "test")
    one.write({"n": 1})
    other.write({"n": 2})
    path.rename(tmp_path / "decisions.1")
    other.write({"n": 3})
    one.write({"n": 4})
    assert told(tmp_path / "decisions.1") == [1, 2] and told(path) == [3, 4]
    assert path.stat().st_mode & 0o777 == 0o600
    one.close()
    other.close()


def test_a_disk_that_fills_in_the_middle_of_a_line_spoils_no_line_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, before = JsonLines(tmp_path / "lines", "test"), unwritten["test"]
    lines.write({"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (lines.path.stat().st_size + 4, limits[1]))
    try:
        for _ in range(3):
            lines.write({"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines.write({"n": 3})
    lines.write({"n": 4})
    whole = [line for line in lines.path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["n"] for line in whole] == [1, 3, 4]
    assert unwritten["test"] - before == 3
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write the test log",
        "the test log is written again",
    ]
    assert caplog.records[1].__dict__["fields"]["left_out"] == 3
    lines.close()


def test_what_cannot_be_logged_is_counted_and_ends_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    before, logger = unwritten["stderr"], logging.Logger("alone")
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        logger.addHandler(logs._Lines(full))
        for _ in range(3):
            logger.error("something happened")
    assert unwritten["stderr"] - before == 3 and not capfd.readouterr().err


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_line_says_which_request_it_is_about(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "said", (), None)
    with about_request("req-1"):
        assert "req-1" in formatter.format(record)
    assert "req-1" not in formatter.format(record)
