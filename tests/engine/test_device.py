"""The device holds the same bytes at any length of the history, and only differences move."""

from pathlib import Path

import numpy as np
import pytest
from engines import Recorded, ask, random_tokens, record


def device_sizes(recorded: Recorded) -> tuple[tuple[int, int], int]:
    """Bytes of cache and state as llama.cpp counts them, and what a report says."""
    port = recorded.memory.port
    return port.device_bytes(), recorded.memory.device_bytes


def check_flat(path: Path, lengths: tuple[int, ...]) -> None:
    tokens = random_tokens(lengths[-1])
    with record(
        path, workspace_tokens=lengths[-1] + 1024, block_tokens=128, budget_tokens=1024,
        reserve_tokens=256, batch_tokens=512, host_limit_bytes=1 << 30,
    ) as recorded:  # fmt: skip
        empty = device_sizes(recorded)
        host = []
        for n_tokens in lengths:
            recorded.session.read(tokens[recorded.session.n_tokens : n_tokens])
            reply = ask(recorded.session, tokens[:n_tokens], span=(n_tokens - 20, n_tokens))
            assert device_sizes(recorded) == empty
            assert reply.stats.memory.device_bytes == empty[1]
            assert reply.stats.memory.n_blocks == -(-n_tokens // 128)
            assert len(reply.stats.memory.blocks) <= 8
            host.append(recorded.memory.working_set.n_sealed)
        assert host == [n_tokens // 128 for n_tokens in lengths]  # the host has all of it


def test_device_bytes_do_not_grow(tiny_llama: Path) -> None:
    check_flat(tiny_llama, (2048, 8192))


@pytest.mark.slow
def test_device_bytes_are_the_same_at_2k_and_64k(tiny_llama: Path) -> None:
    check_flat(tiny_llama, (2048, 65536))


def test_only_differences_move(tiny_llama: Path) -> None:
    rng = np.random.default_rng(5)
    with record(tiny_llama) as recorded:
        session, working_set = recorded.session, recorded.memory.working_set
        session.read(random_tokens(1000))
        payload = working_set.payload_bytes
        for _ in range(40):
            before = set(working_set.resident().tolist())
            wanted = {*rng.choice(31, int(rng.integers(0, 8)), replace=False).tolist(), 31}
            counters = working_set.counters
            report = session.apply(sorted(wanted))
            after = working_set.counters
            assert set(working_set.resident().tolist()) == wanted
            assert report.blocks_in == len(wanted - before)
            assert report.blocks_out == len(before - wanted)
            assert report.blocks_kept == len(wanted & before)
            assert (report.bytes_in, report.bytes_out) == (report.blocks_in * payload, 0)
            assert after.blocks_in - counters.blocks_in == report.blocks_in
            assert after.bytes_out == counters.bytes_out
            recorded.memory.check()


def test_a_block_is_copied_out_once(tiny_llama: Path) -> None:
    with record(tiny_llama) as recorded:
        history: tuple[int, ...] = ()
        for turn in range(4):
            history += random_tokens(300, seed=turn)
            reply = ask(recorded.session, history, span=(len(history) - 20, len(history)))
            history += reply.tokens
        counters = recorded.memory.working_set.counters
        # a replayed question may end a block twice, no more: history is never copied again
        n_complete = recorded.session.n_tokens // 32
        assert n_complete <= counters.blocks_sealed <= n_complete + 4
        assert (
            counters.bytes_out == counters.blocks_sealed * recorded.memory.working_set.payload_bytes
        )
