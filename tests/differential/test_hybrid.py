"""Hybrid models over conversations as agents have them: little is read, and all of it is right.

Each conversation changes its history in one way. After every turn the logits of all decode calls
equal, bit by bit, those of a run that read the whole history again with the same calls: plain
llama.cpp where the budget covers the history, else an engine that is shown the same blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import bound
from engines import ENDLESS, SIZES, Recorded, Reply, ask, foresee, random_tokens, record
from timeline import differs_from_stock, differs_from_twin, effective

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.draft import Worth
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import CapacityError, DecodeError
from kvmem.llama.state import save_state, state_bytes
from kvmem.llama.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("device")

BLOCK = SIZES["block_tokens"]
EXACT = {"ordered": True, "type_k": "f16", "type_v": "f16"}
OTHERS = ["qwen35_64", "qwen35moe"]
KINDS = ["qwen35", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
DRAFTING = [
    "qwen35_mtp",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3next_mtp", "qwen35_64")),
]
TYPES = [
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    *(pytest.param(pair, marks=pytest.mark.slow) for pair in (("q5_0", "q5_0"), ("q8_0", "q4_0"))),
]
TEXT = "the hill and tower on another river were reached again under rain she then left"

Message = dict[str, Any]


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


def words(n: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(TEXT.split(), n))


def system(n: int = 40) -> Message:
    return {"role": "system", "content": words(n, 0)}


def user(n: int, seed: int) -> Message:
    return {"role": "user", "content": words(n, seed)}


def said(n: int, seed: int, **fields: str) -> Message:
    return {"role": "assistant", "content": words(n, seed), **fields}


def tool(n: int, seed: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call{seed}", "content": words(n, seed)}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request. gap: tokens that it may read beside those that differ from the history before.

    The generation prompt is 14 tokens long, and a reply is never that of these conversations.
    """

    messages: list[Message]
    gap: int = 16


def grow() -> Iterator[Turn]:
    """One question, then ten rounds of tools."""
    history = [system(), user(30, 1)]
    yield Turn(list(history))
    for i in range(10):
        history += [said(8, 10 + i), tool(25, 30 + i)]
        yield Turn(list(history))


def remind() -> Iterator[Turn]:
    """The last message is a reminder that is dropped, or given another role, at the next turn."""
    history = [system(), user(90, 1)]
    for i in range(5):
        yield Turn([*history, {"role": "user", "content": f"Step {i}: {words(12, 50 + i)}"}])
        if i % 2:
            history += [{"role": "assistant", "content": f"Step {i}: {words(12, 50 + i)}"}]
        history += [said(10, 10 + i), user(10, 20 + i)]


def think() -> Iterator[Turn]:
    """Thinking stands in the newest assistant messages alone, as templates have it."""
    history = [system()]
    for i in range(5):
        history = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
        history += [user(15, 20 + i)]
        yield Turn(list(history))
        history += [said(5, 30 + i, reasoning_content=words(10, 40 + i)), tool(15, 60 + i)]
        yield Turn(list(history))
        history += [said(8, 70 + i, reasoning_content=words(10, 80 + i))]


def trim() -> Iterator[Turn]:
    """Every assistant text comes back twice: as it was, then without the spaces around it."""
    history = [system(), user(20, 1)]
    yield Turn(list(history))
    for i in range(4):
        text = words(10, 30 + i)
        yield Turn([*history, {"role": "assistant", "content": f"  {text}\n"}, user(5, 40 + i)])
        history += [{"role": "assistant", "content": text}, user(5, 40 + i)]
        yield Turn(list(history))


def title() -> Iterator[Turn]:
    """A title is asked for below the same system prompt: then the history is read again."""
    history = [system(60), user(30, 1)]
    yield Turn(list(history))
    yield Turn([history[0], user(12, 99)])
    history += [said(8, 2), user(20, 3)]
    yield Turn(list(history))
    yield Turn([history[0], user(14, 98)])


def compact() -> Iterator[Turn]:
    """The whole history with a new end asks for a summary, which takes its place."""
    history = [system(60)]
    for i in range(4):
        history += [user(20, 10 + i)]
        yield Turn(list(history))
        history += [said(10, 20 + i)]
    yield Turn([*history, {"role": "user", "content": "Summarize the work so far."}])
    history = [history[0], {"role": "user", "content": f"So far: {words(25, 90)}"}]
    yield Turn(list(history))
    yield Turn([*history, said(9, 91), user(9, 92)])


CONVERSATIONS = [grow, remind, think, trim, title, compact]


def all_sorts() -> Iterator[Turn]:
    """30 turns of tools, questions, reminders, thinking that is dropped, and trimmed texts.

    Eight points do not stand at all that may change: a turn may go back by one more message.
    """
    gap = 80
    history = [system()]
    for i in range(30):
        if i % 4 == 0:
            history = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
            history += [user(12, 100 + i)]
        else:
            history += [tool(14, 100 + i)]
        last = {"role": "user", "content": f"Step {i}: {words(8, 200 + i)}"}
        yield Turn([*history, last] if i % 5 == 3 else list(history), gap)
        text = words(6, 300 + i)
        if i % 6 == 5:
            spaced = {"role": "assistant", "content": f" {text}\n"}
            yield Turn([*history, spaced, user(4, 400 + i)], gap)
        history += [{"role": "assistant", "content": text, "reasoning_content": words(6, 500 + i)}]


class Client:
    """Sends messages as a server would, and knows what each request had to read."""

    def __init__(self, recorded: Recorded) -> None:
        self.session = recorded.session
        self._recorded = recorded
        self._template = ChatTemplate(recorded.engine.model)
        self._renderer = ChatRenderer(self._template, recorded.engine.vocab)

    def render(self, messages: list[Message]) -> Prompt:
        fields = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
        prompt = self._renderer.render(parse_chat_request(fields)).prompt
        assert prompt.query_span is not None
        return prompt

    def send(self, messages: list[Message], max_tokens: int = 6) -> tuple[Reply, int]:
        """The reply, and how many tokens of the prompt the history held before."""
        prompt = self.render(messages)
        before = self.session.tokens
        n = min(len(before), len(prompt.tokens))
        differs = before[:n] != np.array(prompt.tokens[:n])
        shared = int(differs.argmax()) if differs.any() else n
        params = GenerateParams(sampling=ENDLESS, max_tokens=max_tokens)
        events = list(self.session.generate(prompt, params))
        done = events[-1]
        assert isinstance(done, Done)
        self._recorded.memory.check()
        tokens = tuple(event.token for event in events if isinstance(event, TokenEvent))
        return Reply(tokens, done), min(shared, len(prompt.tokens) - 1)


def live(
    path: Path,
    conversation: Callable[[], Iterator[Turn]],
    foreseen: list[Reply] | None = None,
    tolerance: float = 0,
    **memory: object,
) -> list[Reply]:
    """Play it, and check after each turn what was read.

    foreseen: what drafts propose, turn by turn. tolerance: of a logit.
    """
    replies = []
    settings = {**EXACT, **memory}
    with record(path, **settings) as recorded:
        client = Client(recorded)
        ahead: list[int] = []
        if foreseen is not None:
            assert recorded.memory.drafter is not None
            foresee(recorded.memory.drafter, ahead)
        for i, turn in enumerate(conversation()):
            if foreseen is not None:
                ahead[:] = [*client.render(turn.messages).tokens, *foreseen[i].tokens]
            reply, shared = client.send(turn.messages)
            stats = reply.stats
            if i:
                assert stats.cached_tokens >= shared - turn.gap, f"turn {i}"
            assert stats.memory.read_tokens == stats.prompt_tokens - stats.cached_tokens
            assert stats.memory.notes == []
            if "budget_tokens" in memory:
                assert stats.memory.decision == "all_resident"
                difference = differs_from_stock(path, recorded.calls)
            else:
                difference = differs_from_twin(path, recorded.calls, **settings)
            assert difference <= tolerance, f"turn {i}"
            recorded.calls[:] = effective(recorded.calls)
            replies.append(reply)
    return replies


@pytest.mark.part(kind=["qwen35"], conversation=[grow, trim])
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_little_is_read_and_equals_stock_llama(
    kind: str, conversation: Callable[[], Iterator[Turn]], tiny: Callable[..., Path]
) -> None:
    live(tiny(kind), conversation, budget_tokens=4096)


def assert_below_the_budget(replies: list[Reply]) -> None:
    assert max(len(reply.stats.memory.blocks) for reply in replies) <= 8 + 2
    assert {reply.stats.memory.decision for reply in replies} & {"query_replay", "cached_query"}


@pytest.mark.part(kind=["qwen35"], conversation=[grow, trim], types=[("q8_0", "q8_0")])
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_below_the_budget_it_equals_a_twin_that_reuses_nothing(
    types: tuple[str, str],
    kind: str,
    conversation: Callable[[], Iterator[Turn]],
    tiny: Callable[..., Path],
) -> None:
    replies = live(tiny(kind), conversation, type_k=types[0], type_v=types[1])
    assert_below_the_budget(replies)


@pytest.mark.parametrize("conversation", [remind, all_sorts], ids=lambda c: c.__name__)
def test_with_a_state_on_the_device_it_equals_a_twin_that_reuses_nothing(
    conversation: Callable[[], Iterator[Turn]], tiny_qwen35: Path
) -> None:
    assert_below_the_budget(live(tiny_qwen35, conversation, device_checkpoint=True))


@pytest.mark.parametrize("conversation", [grow, all_sorts], ids=lambda c: c.__name__)
def test_as_it_is_by_default_it_equals_a_twin_up_to_rounding(
    conversation: Callable[[], Iterator[Turn]], tiny_qwen35: Path
) -> None:
    """Blocks lie in the lowest free slots: attention adds up in another order than the twin's."""
    tolerance = bound(cpu=0.01, gpu=0.05)  # a value of K or V one step of Q8_0 apart
    settings: dict[str, Any] = {"ordered": False, "type_k": "q8_0", "type_v": "q8_0"}
    assert_below_the_budget(live(tiny_qwen35, conversation, tolerance=tolerance, **settings))


@pytest.mark.parametrize("conversation", [grow, think, all_sorts], ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", DRAFTING)
def test_below_the_budget_drafts_leave_it_equal_to_a_twin(
    kind: str, conversation: Callable[[], Iterator[Turn]], tiny: Callable[..., Path]
) -> None:
    settings: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0"}
    plain = live(tiny(kind), conversation, **settings)
    replies = live(tiny(kind), conversation, plain, n_drafts=3, **settings)
    assert_below_the_budget(replies)
    assert sum(reply.stats.draft_n_accepted for reply in replies) > len(replies)


def test_a_history_that_only_grows_is_read_once(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35, **EXACT) as recorded:
        history = random_tokens(100)
        for turn in range(12):
            n_held = recorded.session.n_tokens
            reply = ask(recorded.session, history, span=(20, 50), max_tokens=9)
            assert reply.stats.cached_tokens == n_held
            assert reply.stats.memory.read_tokens == len(history) - n_held
            assert reply.stats.memory.replayed_tokens <= 64  # and none of it before
            history += reply.tokens + random_tokens(80, seed=turn)
        assert differs_from_twin(tiny_qwen35, recorded.calls, **EXACT) == 0


def test_a_damaged_checkpoint_is_seen(tiny_qwen35: Path) -> None:
    """The comparison of these tests can fail."""
    history = random_tokens(300)
    with record(tiny_qwen35, budget_tokens=1024, **EXACT) as recorded:
        ask(recorded.session, history)
        for saved in recorded.memory.checkpoints._saved:  # noqa: SLF001
            values = saved.state[len(saved.state) // 2 :][:64].view(np.float32)
            values[:] = values[::-1].copy()
        ask(recorded.session, (*history[:294], *random_tokens(20, seed=1)))
        assert differs_from_stock(tiny_qwen35, recorded.calls) > 1e-4


@pytest.mark.part
def test_eviction_leaves_the_recurrent_state_alone(tiny_qwen35: Path) -> None:
    with record(tiny_qwen35) as recorded:
        recorded.session.read(random_tokens(700))
        memory = recorded.memory
        states = []
        for blocks in ([0, 3, 4, 21], [0, 21], [0, 1, 2, 18, 19, 20, 21], [21]):
            state = np.empty(state_bytes(memory.context), np.uint8)
            save_state(memory.context, state)
            states.append(state)
            recorded.session.apply(blocks)
        for state in states[1:]:
            np.testing.assert_array_equal(state, states[0])
        memory.check()


HISTORY = random_tokens(700, seed=1)
SPAN = (650, 690)


def assert_right_afterwards(recorded: Recorded, path: Path, longer: tuple[int, ...] = ()) -> None:
    """What is left is the beginning of what was asked, and it goes on as if never disturbed."""
    recorded.memory.check()
    tokens = recorded.session.tokens.tolist()
    assert tokens == [*HISTORY, *longer][: len(tokens)]
    recorded.calls[:] = effective(recorded.calls)
    while recorded.calls and recorded.calls[-1].start >= len(tokens):
        recorded.calls.pop()
    assert sum(len(call.tokens) for call in recorded.calls) == len(tokens)
    reply = ask(recorded.session, HISTORY, span=SPAN)
    assert reply.done.reason == "length"
    assert differs_from_twin(path, recorded.calls, **EXACT) == 0


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_after_a_cancel_anywhere_it_is_right(behind: bool, tiny_qwen35: Path) -> None:
    """Behind: a signal handler may raise it when the state has seen what the history has not."""
    with record(tiny_qwen35, **EXACT) as recorded:
        ask(recorded.session, HISTORY, span=SPAN)
        n_calls = len(recorded.calls)
    for stop_at in range(1, n_calls + 1, 2):
        with record(tiny_qwen35, **EXACT) as recorded:
            recorded.context.stop_at, recorded.context.stop_behind = stop_at, behind
            assert ask(recorded.session, HISTORY, span=SPAN).done.reason == "cancelled"
            if recorded.session.n_tokens <= len(HISTORY):
                assert_right_afterwards(recorded, tiny_qwen35)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_after_a_decode_that_failed_it_is_at_a_checkpoint(
    on_device: bool, tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fail_at in (2, 6, 8):
        with record(tiny_qwen35, device_checkpoint=on_device, **EXACT) as recorded:
            plain, n_left = recorded.context.decode, fail_at

            def decode(*args: Any, **others: Any) -> None:
                nonlocal n_left
                n_left -= 1
                plain(*args, **others)  # noqa: B023
                if n_left == 0:
                    raise DecodeError("the state has seen this batch, the history has not")

            monkeypatch.setattr(recorded.context, "decode", decode)
            with pytest.raises(DecodeError):
                ask(recorded.session, HISTORY, span=SPAN)
            monkeypatch.undo()
            recorded.calls.pop()  # the batch that the history has not
            assert recorded.session.n_tokens in (0, *recorded.memory.checkpoints.positions)
            assert_right_afterwards(recorded, tiny_qwen35)


def test_a_state_that_cannot_be_restored_empties_the_session(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvmem.engine import checkpoint

    with record(tiny_qwen35, **EXACT) as recorded:
        ask(recorded.session, HISTORY, span=SPAN)

        def fail(*_: object, **__: object) -> None:
            raise DecodeError("no")

        monkeypatch.setattr(checkpoint, "restore_state", fail)
        with pytest.raises(DecodeError):
            ask(recorded.session, (*HISTORY[:690], 1, 2, 3), span=SPAN)
        monkeypatch.undo()
        assert recorded.session.n_tokens == 0
        recorded.calls.clear()
        assert_right_afterwards(recorded, tiny_qwen35)


@pytest.mark.part
def test_at_the_host_limit_it_is_right(tiny_qwen35: Path) -> None:
    """Checkpoints give way to blocks; beyond that there is an error, and no wrong state."""
    limit = 1 << 20
    with record(tiny_qwen35, host_limit_bytes=limit, **EXACT) as recorded:
        memory = recorded.memory
        recorded.context.on_decode = lambda: within(memory.host.used, limit)
        reply = ask(recorded.session, HISTORY, span=SPAN)
        assert memory.host.used <= limit
        assert differs_from_twin(tiny_qwen35, recorded.calls, **EXACT) == 0
        n_kept = len(reply.stats.memory.checkpoints)
        with pytest.raises(CapacityError, match="host limit"):
            ask(recorded.session, HISTORY + random_tokens(3000), span=SPAN)
        assert len(memory.checkpoints) < n_kept
        assert_right_afterwards(recorded, tiny_qwen35, longer=random_tokens(3000))


def within(used: int, limit: int) -> None:
    assert used <= limit
