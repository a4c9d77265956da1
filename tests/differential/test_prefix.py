"""What is reused gives what would have been read: over turns, after a cut, after a cancel."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engines import Call, Recorded, ask, random_tokens, record
from stock import stock_context

from kvmem.llama.context import CancelToken

LONG = random_tokens(900, seed=2)
SPAN = (860, 890)


def assert_same_calls(first: list[Call], second: list[Call]) -> None:
    """Two runs decoded the same tokens under the same blocks, and got the same logits."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.pos, other.pos)
        assert one.visible == other.visible
        np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3_64", "qwen35"])
def test_a_second_turn_reads_what_is_new_and_equals_the_stock_cache(
    kind: str, tiny: Callable[..., Path]
) -> None:
    path = tiny(kind)
    with record(path, budget_tokens=1024, type_k="f16", type_v="f16") as recorded:
        first = ask(recorded.session, LONG[:300], max_tokens=20)
        recorded.calls.clear()
        history = LONG[:300] + first.tokens + LONG[300:350]
        second = ask(recorded.session, history, max_tokens=20)
        assert second.stats.cached_tokens == 319
        assert second.stats.memory.read_tokens == 51
        warm = recorded.calls.copy()
    assert warm[0].start == 319
    # a cold cache that reads the shared part and then makes the same calls
    with stock_context(path, type_k="f16", type_v="f16") as context:
        for start in range(0, 319, 1):
            stop = start + 1
            context.decode(
                np.array(history[start:stop], np.int32), np.arange(start, stop, dtype=np.int32)
            )
        for call in warm:
            context.decode(call.tokens, call.pos, outputs=call.outputs)
            assert call.logits is not None
            np.testing.assert_allclose(context.logits(), call.logits, atol=0.05)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 350, 500, 863, 899])
def test_a_cut_history_is_the_one_that_was_never_longer(cut: int, tiny_llama: Path) -> None:
    """Read, cut in the middle, continue: as if the cut part had never been read.

    Which blocks are resident at the cut differs, so both runs choose them again.
    """
    tail = random_tokens(60, seed=5)

    def finish(recorded: Recorded) -> list[Call]:
        working_set = recorded.memory.working_set
        chosen = sorted({0, max(0, working_set.n_blocks // 2 - 1), working_set.n_blocks - 1})
        recorded.session.apply(chosen)
        recorded.calls.clear()
        recorded.session.read(tail)
        rows = recorded.session.logits(tail[:9], 9)
        recorded.memory.check()
        recorded.calls[-1].logits = rows.reshape(-1)
        return recorded.calls.copy()

    runs = []
    for extra in (LONG[cut:], ()):
        with record(tiny_llama, ordered=True, type_k="f16", type_v="f16") as recorded:
            recorded.session.read(LONG[:cut])
            recorded.session.read(extra)
            recorded.session.truncate(cut)
            runs.append(finish(recorded))
    assert_same_calls(*runs)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_cancelled_prefill_continues_as_if_never_cancelled(
    behind: bool, tiny_llama: Path
) -> None:
    """Cancelled at each decode call in turn, far beyond the pool: the retry makes the calls that
    were missing, from the start of the question at the latest, with the same blocks in sight."""
    settings = {"ordered": True, "type_k": "f16", "type_v": "f16"}
    with record(tiny_llama, **settings) as recorded:
        whole = ask(recorded.session, LONG, span=SPAN, max_tokens=5)
        expected = recorded.calls.copy()
    assert whole.stats.memory.decision == "query_replay"
    n_prefill = len(expected) - 4
    for stop_at in range(1, n_prefill + 1):
        with record(tiny_llama, **settings) as recorded:
            recorded.context.stop_at, recorded.context.stop_behind = stop_at, behind
            broken = ask(recorded.session, LONG, span=SPAN, max_tokens=5)
            assert broken.done.reason == "cancelled"
            recorded.memory.check()
            recorded.calls.clear()
            again = ask(recorded.session, LONG, span=SPAN, max_tokens=5)
            assert again.stats.cached_tokens == min(expected[stop_at - 1].start, SPAN[0])
            assert_same_calls(recorded.calls, expected[-len(recorded.calls) :])
            assert again.tokens == whole.tokens
            assert again.stats.memory.blocks == whole.stats.memory.blocks


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("n_said", [1, 5, 40])
def test_a_cancelled_reply_continues_as_one_that_was_short(
    n_said: int, behind: bool, tiny_llama: Path
) -> None:
    settings = {"ordered": True, "type_k": "f16", "type_v": "f16", "reserve_tokens": 128}
    runs = []
    for is_cancelled in (False, True):
        with record(tiny_llama, **settings) as recorded:
            ask(recorded.session, LONG, span=SPAN, max_tokens=0)
            if is_cancelled:
                # the first call reads the prompt's last token once more
                recorded.context.stop_at = 1 + n_said
                recorded.context.stop_behind = behind
            max_tokens = None if is_cancelled else n_said
            reply = ask(recorded.session, LONG, span=SPAN, max_tokens=max_tokens)
            assert reply.done.reason == ("cancelled" if is_cancelled else "length")
            assert len(reply.tokens) == n_said
            assert recorded.session.n_tokens == len(LONG) + n_said - 1
            recorded.memory.check()
            recorded.calls.clear()
            more = LONG + reply.tokens + random_tokens(50, seed=3)
            ask(recorded.session, more, span=(len(more) - 30, len(more)), max_tokens=5)
            runs.append(recorded.calls.copy())
    assert_same_calls(*runs)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_batch_that_is_aborted_in_its_middle_leaves_no_trace(
    kind: str, tiny: Callable[..., Path]
) -> None:
    """The cancel comes from another thread while a batch runs, wherever that may be."""
    prompt = random_tokens(1500, seed=2)
    sizes = {"budget_tokens": 4096, "batch_tokens": 1024}
    with record(tiny(kind), ordered=True, ubatch_tokens=64, **sizes) as recorded:
        whole = ask(recorded.session, prompt, max_tokens=5)
        for _ in range(3):
            recorded.session.truncate(0)
            cancel, begun = CancelToken(), Event()
            recorded.context.on_decode = begun.set

            def stop(begun: Event = begun, cancel: CancelToken = cancel) -> None:
                begun.wait()
                cancel.set()

            thread = Thread(target=stop)
            thread.start()
            assert ask(recorded.session, prompt, cancel=cancel).done.reason == "cancelled"
            thread.join()
            recorded.context.on_decode = None
            recorded.memory.check()
            assert recorded.session.n_tokens == 0  # the first batch did not come to its end
            assert ask(recorded.session, prompt, max_tokens=5).tokens == whole.tokens


def test_a_hybrid_keeps_what_it_read_before_a_cancel_between_batches(tiny_qwen35: Path) -> None:
    prompt = LONG[:500]
    with record(tiny_qwen35, budget_tokens=1024, ordered=True) as recorded:
        whole = ask(recorded.session, prompt, max_tokens=5)
        recorded.session.truncate(0)
        recorded.context.stop_at = 3
        assert ask(recorded.session, prompt).done.reason == "cancelled"
        assert recorded.session.n_tokens == 256
        again = ask(recorded.session, prompt, max_tokens=5)
        assert again.stats.cached_tokens == 256
        assert again.tokens == whole.tokens


def test_an_interrupt_behind_a_batch_empties_a_hybrid(tiny_qwen35: Path) -> None:
    """Its state has seen tokens that the history does not have: nothing of it may be used."""
    prompt = LONG[:500]
    with record(tiny_qwen35, budget_tokens=1024, ordered=True) as recorded:
        whole = ask(recorded.session, prompt, max_tokens=5)
        recorded.session.truncate(0)
        plain = recorded.context.decode

        def interrupted(*args: Any, **others: Any) -> None:
            plain(*args, **others)
            raise KeyboardInterrupt

        with (
            patch.object(recorded.context, "decode", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            ask(recorded.session, prompt)
        assert recorded.session.n_tokens == 0
        recorded.memory.check()
        assert ask(recorded.session, prompt, max_tokens=5).tokens == whole.tokens
