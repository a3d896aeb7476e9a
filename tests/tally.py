"""What fault tests did to executors and clients, for the last line of `pytest -m fault`; a plugin of pytest.

Tests and their helpers count into `done`. Each test's counts go with its report, so that workers of pytest-xdist are heard, too.
"""

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from symbiosis.base.reporting import Report

done: Counter[str] = Counter()  # by the test that runs now
EXECUTORS, CLIENTS = "executors_killed", "clients_killed"
PARSED, SENT = "frames_fuzzed_on_the_parser", "frames_fuzzed_on_a_live_socket"
CALLS = "calls_right_and_wrong"
RUNG, POISON = "headers_fuzzed_in_shared_memory", "poisoned_calls"
CHECKED, LOST, DUPLICATED, CRASHES = "answers_checked", "lost", "duplicated", "crashes"
WANTED = {  # of a run of all such tests
    "fault": {EXECUTORS: 200, CLIENTS: 200, PARSED: 10**5, SENT: 10**4, CALLS: 1600},
    "soak": {EXECUTORS: 1000, CLIENTS: 1000, PARSED: 10**6, SENT: 10**5, CALLS: 10**6},
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("done", dict(done)))
        done.clear()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """After all that pytest says: figures and bars, if `-m` chose fault tests and no others."""
    result = yield
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        told = [one for some in terminal.stats.values() for one in some if isinstance(one, pytest.TestReport)]
        if session.config.option.markexpr and told and all({"fault", "soak"} & one.keywords.keys() for one in told):
            session.exitstatus = summary(session.config, told).finish(table=False) or session.exitstatus
    return result


def summary(config: pytest.Config, told: list[pytest.TestReport]) -> Report:
    """The counts of all tests. How much must be done is a bar where nothing but `-m` chose among the tests."""
    marks = config.option.markexpr
    counts: Counter[str] = Counter()
    for report in told:
        counts.update(dict(report.user_properties).get("done", {}))
    found = Report(f"pytest -m {marks}")
    found.figure("tests", sum(report.when == "call" for report in told))
    found.figure("failed", sum(report.failed for report in told))
    wanted = WANTED.get(marks, {}) if config.args == config.getini("testpaths") and not config.option.keyword else {}
    for name in (EXECUTORS, CLIENTS, PARSED, SENT, RUNG, CALLS, POISON, CHECKED):
        if name in wanted:
            found.bar(name, counts[name], ">=", wanted[name])
        else:
            found.figure(name, counts[name])
    for name in (LOST, DUPLICATED, CRASHES):
        found.bar(name, counts[name], "<=", 0)
    return found
