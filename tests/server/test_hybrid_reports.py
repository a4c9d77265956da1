"""Public fault reports about hybrid models, tried over HTTP: what is read again, what is kept.

REF is plain llama.cpp given the same decode calls, bit by bit: reading is split at checkpoints, and
kernels round by the number of rows. TWIN is a second, fresh server that gets the same requests.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Answer, Message, Served, letters, said, served, user
from timeline import differs_from_stock, differs_from_twin, effective

from kvmem.engine.conversations import common_prefix
from kvmem.engine.draft import Worth

EXACT = {"ordered": True, "type_k": "f16", "type_v": "f16"}
SIZES: dict[str, Any] = {"workspace_tokens": 8192, "reserve_tokens": 128, **EXACT}
BUDGETS = {"enough": 8192, "little": 512}
GENERATION_TOKENS = 16
"""Read again with every reply: what opens it, as that may be another one next time."""


@pytest.fixture(autouse=True)
def _drafts_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost on a machine that others use too."""
    monkeypatch.setattr(Worth, "end_request", lambda _: "")


Request = Callable[[list[Answer]], list[Message]]
"""What a client sends next, given the replies so far."""


def common(server: Served, messages: list[Message], before: list[Message]) -> int:
    """Tokens that two prompts begin with."""
    one, other = (np.array(server.tokens(*m), np.int32) for m in (messages, before))
    return common_prefix(one, other)


def converse(server: Served, requests: list[Request], gap: int) -> list[Answer]:
    """Play it. Of each prompt all is cached that is in the one before, save gap tokens."""
    answers: list[Answer] = []
    before: list[Message] = []
    for request in requests:
        messages = request(answers)
        answers.append(server.chat(*messages))
        server.memory.check()
        if before:
            shared = common(server, messages, before)
            assert answers[-1].n_cached >= shared - gap, f"request {len(answers)}"
        before = messages
        server.calls[:] = effective(server.calls)
    return answers


def try_it(
    path: Path, requests: list[Request], gap: int, budget: str, n_drafts: int
) -> list[Answer]:
    settings = {**SIZES, "budget_tokens": BUDGETS[budget], "n_drafts": n_drafts}
    sizes = {"n_ctx": SIZES["workspace_tokens"], "type_k": "f16", "type_v": "f16"}
    with served(path, **settings) as server:
        answers = converse(server, requests, gap)
        calls = server.calls
        decisions = {answer.memory["decision"] for answer in answers}
        if budget == "enough":
            assert decisions == {"all_resident"}
            assert differs_from_stock(path, calls, n_drafts=n_drafts, **sizes) == 0
        else:
            assert decisions & {"query_replay", "cached_query", "unchanged_selection"}
            # an engine that reads all of it again and is shown the same blocks
            assert differs_from_twin(path, calls, **settings) == 0
    assert not n_drafts or sum(answer.n_drafted for answer in answers) > 0
    with served(path, **settings) as server:
        twins = converse(server, requests, gap)
    assert [answer.text for answer in twins] == [answer.text for answer in answers]
    return answers


def remind(keep: bool) -> list[Request]:
    """The last message is a reminder. Next turn it is gone, or the assistant's.

    Five turns: a checkpoint for one replaced reminder is not yet one for each.
    """

    def request(turn: int) -> Request:
        def messages(answers: list[Answer]) -> list[Message]:
            history = [user(letters(3000))]
            for i in range(turn):
                if keep:
                    history += [said(f"Step {i}:{letters(30, 50 + i)}")]
                history += [said(answers[i].text), user(letters(20, 20 + i))]
            return [*history, user(f"Step {turn}:{letters(30, 50 + turn)}")]

        return messages

    return [request(turn) for turn in range(5)]


TRIED = [("enough", 0), ("enough", 3), ("little", 0), ("little", 3)]


@pytest.mark.parametrize(("budget", "n_drafts"), TRIED)
@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "re-roled"])
def test_a_reminder_that_is_replaced_each_turn(
    keep: bool, budget: str, n_drafts: int, tiny_qwen35_mtp: Path
) -> None:
    """Case R03: at most a block of what two prompts have in common is read again."""
    try_it(tiny_qwen35_mtp, remind(keep), 32, budget, n_drafts)


def grow() -> list[Request]:
    """Ten turns of 150 tokens. One text comes back first as it was, then without its spaces."""
    spaced = 5

    def request(turn: int) -> Request:
        def messages(answers: list[Answer]) -> list[Message]:
            history = [user(letters(150))]
            for i in range(turn):
                text = answers[i].text
                if i == spaced:
                    text = f"  {letters(10, 40)} \n"
                    text = text.strip() if turn > spaced + 1 else text
                history += [said(text), user(letters(150, 1 + i))]
            return history

        return messages

    return [request(turn) for turn in range(10)]


@pytest.mark.parametrize(("budget", "n_drafts"), TRIED)
def test_a_conversation_that_grows_and_is_trimmed_once(
    budget: str, n_drafts: int, tiny_qwen35_mtp: Path
) -> None:
    """Case R04: what is read is what is new, and what opens a reply."""
    answers = try_it(tiny_qwen35_mtp, grow(), GENERATION_TOKENS, budget, n_drafts)
    read = [answer.read for answer in answers]
    assert max(read[1:7] + read[8:]) < 150 + 60, read
    assert 2 * 150 < read[7] < 2 * 150 + 100, read  # a turn back, to the text that has changed


@pytest.mark.parametrize("n_drafts", [0, 3])
def test_a_reply_that_a_stop_text_ended_comes_back(n_drafts: int, tiny_qwen35_mtp: Path) -> None:
    """The history holds a part of the stop text, of which the client knows nothing. Nothing before
    the reply is read again.
    """
    settings = {**SIZES, "budget_tokens": 8192, "n_drafts": n_drafts}
    with served(tiny_qwen35_mtp, **settings) as server:
        question, other = user(letters(300)), user(letters(40, 1))
        whole = server.chat(question, max_tokens=60).text
        stop = whole[len(whole) // 2 :][:3]
        reply = server.chat(question, max_tokens=60, stop=[stop])
        assert reply.end == "stop" and 5 < len(reply.text) < len(whole)
        before = common(server, [question, said(reply.text)], [question, said("")])
        again = server.chat(question, said(reply.text), other)
        assert again.n_cached >= before - GENERATION_TOKENS
        server.memory.check()
        server.calls[:] = effective(server.calls)
        assert differs_from_stock(
            tiny_qwen35_mtp, server.calls, n_ctx=SIZES["workspace_tokens"],
            type_k="f16", type_v="f16", n_drafts=n_drafts
        ) == 0  # fmt: skip


LIMIT = 16 << 20
LARGE: dict[str, Any] = {
    "reserve_tokens": 128, "batch_tokens": 512,
    "conversations": 8, "host_limit_bytes": LIMIT, "type_k": "f32", "type_v": "f32",
}  # fmt: skip


def rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize(
    ("n_drafts", "n_large"), [(3, 11000), pytest.param(0, 17000, marks=pytest.mark.slow)]
)
def test_a_host_limit_holds_over_40_prompts_and_one_beyond_it(
    n_drafts: int, n_large: int, tiny: Callable[..., Path]
) -> None:
    """Case R25: sampled at every decode call; what is too large alone is answered, not kept."""
    path = tiny("qwen35_64")
    workspace = n_large + 1288
    settings = {**LARGE, "workspace_tokens": workspace, "budget_tokens": workspace}
    after = [[user(letters(300, 90))], [user(letters(1500, 39))], [user(letters(700, 91))]]
    with served(path, n_drafts=n_drafts, **settings) as server:
        used: list[tuple[int, int]] = []
        n_decoded = 0

        def sample() -> None:
            nonlocal n_decoded
            n_decoded += 1
            used.append((server.memory.host.used, rss()))

        server.context.on_decode = sample
        for i in range(40):
            answer = server.chat(user(f"{i}:{letters(1700, i)}"), max_tokens=2)
            assert answer.n_prompt > 1500 and answer.n_cached < 64
            server.calls.clear()
        large = [user(letters(n_large, 77))]
        answer = server.chat(*large, max_tokens=2)
        assert server.memory.n_tokens * server.memory.working_set.payload_bytes // 32 > LIMIT
        assert answer.end == "length"
        assert answer.memory["notes"]
        # by now the least that a process needs is there, and plain llama.cpp is not yet beside it;
        # its mask, two bytes for each row of a batch and cell, is touched to its end only here
        mask = 2 * LARGE["batch_tokens"] * workspace
        assert used[-1][1] - used[n_decoded // 10][1] < LIMIT + mask + (4 << 20)
        server.calls.clear()
        for messages in after:
            server.chat(*messages)
            own = effective(server.calls)
            assert own[0].start == 0, "nothing of it was kept"
            assert differs_from_stock(
                path, own, n_ctx=workspace, n_batch=512, n_ubatch=512,
                type_k="f32", type_v="f32", n_drafts=n_drafts
            ) == 0  # fmt: skip
            server.calls.clear()
        assert n_decoded > 40 * 3
        assert max(host for host, _ in used) <= LIMIT
        assert max(host for host, _ in used) > LIMIT / 2, "the limit was never near"
