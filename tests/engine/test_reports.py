"""Kinds of faults that users of such systems met, tried on this one in short form.

Longer forms, over HTTP, belong to the server's tests. Two callers, use after close and memory after
close stand in test_turns.py, a held interpreter lock in tests/llama/test_gil.py.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import SIZES, ask, log_records, make_config, random_tokens, record
from stock import replay, stock_context

from kvmem.config import MemoryConfig
from kvmem.engine.engine import Engine
from kvmem.errors import ConfigError


def status_kib(field: str, pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {field}")


@pytest.mark.parametrize("enough", [True, False], ids=["budget-over-history", "small-budget"])
@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_reply_longer_than_the_reserve_goes_on(
    kind: str, enough: bool, tiny: Callable[..., Path]
) -> None:
    """Capacity: a generation that died when its reserved slots were used up."""
    path = tiny(kind)
    budget = 1120 if enough else 512
    with record(path, budget_tokens=budget, reserve_tokens=64, ordered=enough) as recorded:
        prompt = random_tokens(600, seed=1)
        reply = ask(recorded.session, prompt, span=(560, 590), max_tokens=500)
        assert (reply.done.reason, len(reply.tokens)) == ("length", 500)
        other = random_tokens(50, seed=2)
        second = ask(recorded.session, other, max_tokens=20)
        assert second.done.reason == "length"
        calls = recorded.calls.copy()
    second_starts = next(i for i, call in enumerate(calls) if i and call.start == 0)
    with stock_context(path, type_k="q8_0", type_v="q8_0") as context:
        for part in [calls[:second_starts], calls[second_starts:]]:
            if enough or part[0] is calls[second_starts]:
                context.clear()
                for call, row in zip(part, replay(context, part), strict=True):
                    if row is not None:
                        np.testing.assert_array_equal(call.logits, row)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_new_text_wider_than_the_pool_is_read_in_pieces(
    kind: str, tiny: Callable[..., Path]
) -> None:
    """Capacity: an uncached span above the budget failed, and each retry failed the same way."""
    with record(tiny(kind), budget_tokens=512, reserve_tokens=128) as recorded:
        first = random_tokens(300, seed=1)
        reply = ask(recorded.session, first, span=(280, 300))
        wide = first + reply.tokens + random_tokens(2000, seed=2) + random_tokens(20, seed=3)
        span = (len(wide) - 20, len(wide))
        replies = [ask(recorded.session, wide, span=span) for _ in range(3)]
        assert [r.done.reason for r in replies] == ["length"] * 3
        assert replies[0].tokens == replies[1].tokens == replies[2].tokens
        assert replies[0].stats.cached_tokens == len(first) + 7
        if kind == "llama":
            assert replies[2].stats.cached_tokens == len(wide) - 1
        recorded.memory.check()


GROWTH = """
from pathlib import Path
from statistics import linear_regression
from engines import ask, make_config, random_tokens
from kvmem.engine.engine import Engine

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

with Engine(make_config({path!r})) as engine:
    session = engine.session()
    talks = [random_tokens(150 + 10 * i, seed=i) for i in range(20)]

    def turn(i):
        at = i % 20
        talks[at] += ask(session, talks[at] + random_tokens(9, seed=i), max_tokens=64).tokens
        return kib("VmRSS")

    sizes = [turn(0)]
    n_files = len(list(Path("/proc/self/fd").iterdir()))
    sizes += [turn(i) for i in range(1, {n_requests})]
    warm = len(sizes) // 3
    rest = sizes[warm:]
    slope = linear_regression(range(len(rest)), rest).slope
    files = len(list(Path("/proc/self/fd").iterdir()))
    print(slope, kib("VmHWM") - sizes[warm], files - n_files)
"""


@pytest.mark.slow
def test_many_requests_leave_memory_flat(tiny_llama: Path, root: Path) -> None:
    """Memory: a process that grew with each turn. From 16 threads: tests/server/test_reports.py."""
    code = GROWTH.format(path=str(tiny_llama), n_requests=300)
    env = {k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}
    env["PYTHONPATH"] = ":".join([str(root / "tests"), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    slope_kib, peak_kib, more_files = map(float, ran.stdout.split())
    assert slope_kib < 50
    assert peak_kib < 64 * 1024
    assert more_files == 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"sink_tokens": 512, "budget_tokens": 512}, ("sink_tokens is 512", "budget_tokens=512")),
        ({"sink_tokens": 600, "budget_tokens": 512}, ("sink_tokens is 600", "budget_tokens=512")),
        ({"budget_tokens": 100}, ("budget_tokens is 100", "block_tokens=128")),
        ({"reserve_tokens": 0}, ("reserve_tokens is 0", "block_tokens=128")),
        ({"budget_tokens": 512, "recent_tokens": 400}, ("recent_tokens is 400", "512")),
    ],
    ids=str,
)
def test_settings_that_would_fail_each_request_are_refused_at_start(
    settings: dict[str, int], names: tuple[str, ...]
) -> None:
    """Configuration: accepted at start, and every long request failed."""
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(**settings)  # type: ignore[arg-type]
    for name in names:
        assert name in str(caught.value)


def test_an_uneven_budget_is_lowered_with_a_warning(tiny_llama: Path) -> None:
    with log_records("kvmem.config") as records:
        config = make_config(tiny_llama, budget_tokens=300)
    with Engine(config) as engine:
        assert engine.sizes.budget_tokens == 288
        assert len(ask(engine.session(), random_tokens(900)).tokens) == 8
    assert any("budget_tokens=300" in record.getMessage() for record in records)


def test_a_pin_of_nearly_the_whole_budget_still_serves(tiny_llama: Path) -> None:
    """The largest sink that is accepted leaves one block to write in."""
    with record(tiny_llama, sink_tokens=SIZES["budget_tokens"] - 32) as recorded:
        for n_tokens in (200, 900, 300, 1200):
            reply = ask(recorded.session, random_tokens(n_tokens), span=(n_tokens - 20, n_tokens))
            assert len(reply.tokens) == 8
            recorded.memory.check()


def test_a_host_limit_is_no_allocation(tiny_llama: Path) -> None:
    """Memory: a limit that was taken in full at the start."""
    sizes = []
    for limit in (1 << 24, 1 << 28, 1 << 33):
        with Engine(make_config(tiny_llama, host_limit_bytes=limit)) as engine:
            session = engine.session()
            idle = status_kib("VmRSS"), status_kib("VmData")
            ask(session, random_tokens(900))
            sizes.append(idle)
        gc.collect()
    (small, small_data), *others = sizes
    for rss, data in others:
        assert rss < small + 20 * 1024
        assert data < small_data + 128 * 1024


def test_more_host_memory_than_the_machine_has_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_limit_bytes is .* to the machine's"):
        Engine(make_config(tiny_llama, host_limit_bytes=1 << 50))
    with pytest.raises(ConfigError, match="host_limit_bytes is 0"):
        MemoryConfig(host_limit_bytes=0)
