"""A pytest plugin for llama.cpp's server tests: no downloads; outcomes are recorded.

The tests look for headers in a dict, as llama-server spells them; HTTP does not care for case.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from requests.structures import CaseInsensitiveDict

_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import utils  # of the tests: their conftest has put it on the path

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    send = utils.ServerProcess.make_request

    def make_request(server: Any, *arguments: Any, **options: Any) -> Any:
        result = send(server, *arguments, **options)
        result.headers = CaseInsensitiveDict(result.headers)
        return result

    utils.ServerProcess.make_request = make_request
    chosen = os.environ.get("CONFORMANCE_WANTED")
    if chosen:
        wanted = {f"unit/{name}" for name in json.loads(Path(chosen).read_text())}
        items[:] = [item for item in items if item.nodeid in wanted]
    _outcomes.update((item.nodeid, "collected") for item in items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of set-up, call and tear-down counts."""
    if report.outcome != "passed" or _outcomes[report.nodeid] == "collected":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    path = Path(os.environ["CONFORMANCE_OUTCOMES"])
    path.write_text(json.dumps(_outcomes, indent=1) + "\n")
