"""The MTP head beside its leader: one class, its bad input, and the bytes of both caches."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from engines import random_tokens, record
from handset import SCRIPT, write_handset

from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import text_positions
from kvmem.errors import ConfigError, ModelError, StateError, TransferError
from kvmem.kv.budget import HostBudget
from kvmem.kv.working_set import WorkingSet
from kvmem.llama import log
from kvmem.llama.context import Context
from kvmem.llama.draft import DraftContext
from kvmem.llama.memory import LlamaPort
from kvmem.llama.model import Model
from kvmem.llama.state import is_state_valid, roll_back_state

CELLS = np.arange(8, dtype=np.int32)
TOKENS = np.arange(1, 9, dtype=np.int32)


@pytest.fixture
def leader(tiny_qwen35_mtp: Path) -> Iterator[Context]:
    with (
        Model(tiny_qwen35_mtp, load_mtp=True) as model,
        Context(model, n_ctx=256, n_cells=64, block_tokens=16, n_batch=32, n_ubatch=32, n_rs_seq=3)
        as context,
    ):  # fmt: skip
        yield context


@pytest.fixture
def head(leader: Context) -> Iterator[DraftContext]:
    made = DraftContext(leader)
    yield made
    made.close()


def hidden(head: DraftContext) -> np.ndarray:
    return np.zeros(head.n_embd, np.float32)


def test_payloads_end_with_the_rows_of_the_head(leader: Context) -> None:
    before = LlamaPort(leader)
    head = DraftContext(leader, type_k="q8_0", type_v="q4_0")
    after = LlamaPort(leader)
    assert after.layout.layers == before.layout.layers
    assert after.row_bytes == (*before.row_bytes, 68, 36)  # two heads of 32 in Q8_0 and in Q4_0
    assert after.payload_bytes == after.layout.payload_bytes == before.payload_bytes + 16 * 104
    head.close()


def test_an_interrupt_while_it_is_made_frees_it(
    leader: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(log, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DraftContext(leader)
    with pytest.raises(Exception, match="one follower"):  # which has been, and is gone
        DraftContext(leader)


def test_there_is_one_head(head: DraftContext) -> None:
    with pytest.raises(Exception, match="one follower"):
        DraftContext(head.leader)


def test_a_model_without_a_head(tiny_qwen35: Path) -> None:
    with (
        Model(tiny_qwen35) as model,
        Context(model, n_ctx=64, n_cells=64, block_tokens=16) as context,
        pytest.raises(ModelError, match="one MTP block"),
    ):
        DraftContext(context)


def test_bad_input_is_refused(head: DraftContext) -> None:
    with pytest.raises(ConfigError, match="type_v is q9"):
        DraftContext(head.leader, type_v="q9")
    with pytest.raises(StateError, match="no 4 hidden rows"):
        head.follow(CELLS[:4], TOKENS[:4], CELLS[:4], hidden(head))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        head.draft(CELLS, np.array([10**6], np.int32), CELLS, hidden(head), np.empty(2, np.int32))
    with pytest.raises(ValueError, match="do not go together"):
        head.draft(CELLS, TOKENS[:1], CELLS, hidden(head)[1:], np.empty(2, np.int32))
    with pytest.raises(ValueError, match="0 proposals"):
        head.draft(CELLS, TOKENS[:1], CELLS, hidden(head), np.empty(0, np.int32))


def test_proposals_end_before_an_unlikely_one(tmp_path: Path) -> None:
    """Of two that are equally likely each has a half, whatever else there is."""
    path = write_handset(tmp_path / "torn.gguf", torn_drafts=[3])
    with record(path, n_drafts=5) as recorded:
        memory, vocab = recorded.memory, recorded.engine.vocab
        assert memory.drafter is not None
        memory.read(np.array(vocab.tokenize("hello"), np.int32))
        head, hidden = memory.drafter.head, memory.drafter.hidden
        start = memory.n_tokens
        pos = np.arange(start, start + 6, dtype=np.int32)
        token = np.array(vocab.tokenize("[go]"), np.int32)
        script = [vocab.tokenize(text)[0] for text in SCRIPT]
        for p_min, n_found in ((0.0, 5), (0.499, 5), (0.501, 3)):
            out = np.full(5, -1, np.int32)
            cells = memory.working_set.prepare(6, reply=True)
            assert head.draft(cells, token, pos, hidden, out, p_min=p_min) == n_found
            assert out[:3].tolist() == script[:3]
            assert (out[n_found:] == -1).all()
            memory.working_set.rollback()
            memory.check()


def test_either_may_be_closed_first(tiny_qwen35_mtp: Path) -> None:
    for first in (0, 1):
        with Model(tiny_qwen35_mtp, load_mtp=True) as model:
            context = Context(model, n_ctx=64, n_cells=64, block_tokens=16)
            parts: list[Context | DraftContext] = [context, DraftContext(context)]
            parts[first].close()
            parts[first].close()
            parts[1 - first].close()


def test_a_closed_head_raises(head: DraftContext) -> None:
    head.close()
    assert head.is_closed
    with pytest.raises(StateError, match="draft context is closed"):
        head.clear()


def test_without_the_head_no_rows_are_copied(leader: Context, head: DraftContext) -> None:
    port = LlamaPort(leader)
    working_set = WorkingSet(
        port, block_tokens=16, budget_blocks=2, reserve_blocks=2, slack_blocks=0,
        budget=HostBudget(1 << 20),
    )  # fmt: skip
    pos = text_positions(0, 16)
    working_set.prepare(16)
    leader.decode(np.arange(16, dtype=np.int32), np.ascontiguousarray(pos[:, 0]))
    working_set.commit(np.arange(16, dtype=np.int32), pos)
    head.close()
    with pytest.raises(TransferError, match="both contexts are open"):
        working_set.seal()


def test_what_is_cleared_in_one_cache_alone_is_seen(tiny_qwen35_mtp: Path) -> None:
    """The check of the tests can fail."""
    with record(tiny_qwen35_mtp, n_drafts=2) as recorded:
        recorded.session.read(random_tokens(40))
        recorded.memory.check()
        assert recorded.memory.drafter is not None
        recorded.memory.drafter.head.clear()
        with pytest.raises(AssertionError):
            recorded.memory.check()


def test_a_block_comes_back_with_the_rows_of_both(tiny_qwen35_mtp: Path) -> None:
    with record(tiny_qwen35_mtp, n_drafts=2) as recorded:
        recorded.session.read(random_tokens(250))
        working_set = recorded.memory.working_set
        blocks = {block: working_set.read(block) for block in range(7)}
        slots = {block: working_set.slot_of(block) for block in range(7)}
        assert len({data[-4096:] for data in blocks.values()}) == 7
        recorded.session.apply([0, 7])
        recorded.session.apply([2, 3, 7])
        recorded.session.apply([1, 2, 4, 5, 6, 7])
        recorded.session.apply(range(8))
        assert any(working_set.slot_of(block) != slots[block] for block in range(7))
        for block, data in blocks.items():
            assert working_set.is_resident(block)
            assert working_set.read(block) == data
        recorded.memory.check()


def logits_after_rejecting(memory: TieredMemory, batch: list[int], n_rejected: int) -> np.ndarray:
    """Of a token behind 40 others and the first part of a batch."""
    memory.truncate(0)
    memory.read(np.array(random_tokens(40), np.int32))
    tokens = np.array(batch, np.int32)
    pos = text_positions(40, 40 + len(tokens))
    cells = memory.working_set.prepare(len(tokens), reply=True)
    first_pos = np.ascontiguousarray(pos[:, 0])
    memory.context.decode(tokens, first_pos, outputs="all")
    roll_back_state(memory.context, n_rejected)
    n_kept = len(tokens) - n_rejected
    assert memory.drafter is not None
    memory.drafter.follow(cells[:n_kept], tokens[:n_kept], first_pos[:n_kept])
    memory.working_set.commit(tokens[:n_kept], pos[:n_kept])
    assert is_state_valid(memory.context)
    memory.decode(np.array([9], np.int32), reply=True)
    return memory.context.logits()


@pytest.mark.parametrize("kind", ["qwen35_mtp", "qwen3next_mtp"])
def test_rejected_tokens_leave_the_recurrent_state(kind: str, tiny: Callable[..., Path]) -> None:
    with record(tiny(kind), n_drafts=3) as recorded:
        memory = recorded.memory
        for n_rejected in (1, 2, 3):
            kept = [50, 60, 70, 80][: 4 - n_rejected]
            rows = [
                logits_after_rejecting(memory, kept + [rejected] * n_rejected, n_rejected)
                for rejected in (1, 200)
            ]
            np.testing.assert_array_equal(rows[0], rows[1])
            never = logits_after_rejecting(memory, kept, 0)
            np.testing.assert_allclose(rows[0], never, atol=1e-3)
            other = logits_after_rejecting(memory, [*kept, 1], 0)
            assert np.abs(rows[0] - other).max() > 0.05
        with pytest.raises(StateError, match="no snapshot that far back"):
            roll_back_state(memory.context, 4)
        assert not is_state_valid(memory.context)


def test_what_llama_cpp_takes_back_after_a_failed_batch_is_not_trusted(
    tiny_qwen35_mtp: Path,
) -> None:
    """It removes the batch's positions. A graph that broke off has written half of a snapshot."""
    with record(tiny_qwen35_mtp, n_drafts=3) as recorded:
        memory = recorded.memory
        memory.read(np.array(random_tokens(40), np.int32))
        assert not memory.context.seq_rm(0, 38, -1)
        assert not is_state_valid(memory.context)
