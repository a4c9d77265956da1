"""When drafts are made, when they rest, and what a reply that is dropped leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ENDLESS, Recorded, Reply, ask, make_config, random_tokens, record
from handset import SCRIPT, write_handset
from numpy.typing import NDArray

from kvmem.config import DraftConfig, EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine import decode
from kvmem.engine import draft as draft_module
from kvmem.engine.draft import PLAIN_PERIOD, REST_REQUESTS, WINDOW_REQUESTS, Worth
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, TokenEvent
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import ConfigError, ModelError
from kvmem.llama.context import CancelToken
from kvmem.llama.draft import DraftContext

I32 = NDArray[np.int32]


def request(
    worth: Worth, *, drafted_s: float, plain_s: float, read_s: float = 0, tokens: int = 2
) -> str:
    """A request of 32 steps, one of them plain if drafts are on."""
    worth.count_reading(read_s)
    for _ in range(PLAIN_PERIOD):
        if worth.take_turn():
            worth.count(tokens, 3, drafted_s)
        else:
            worth.count(1, 0, plain_s)
    return worth.end_request()


def test_drafts_that_pay_stay_on() -> None:
    worth = Worth()
    for _ in range(5 * WINDOW_REQUESTS):
        assert request(worth, drafted_s=0.019, plain_s=0.010) == ""
    assert not worth.is_off


def test_drafts_that_lose_over_a_window_rest_and_say_so() -> None:
    worth = Worth()
    for _ in range(WINDOW_REQUESTS - 1):
        assert request(worth, drafted_s=0.022, plain_s=0.010) == ""
    note = request(worth, drafted_s=0.022, plain_s=0.010)
    assert note == (
        "drafts rest for 32 requests: over the last 8 a token took 11.00 ms with them (0.00 for "
        "prompts) and 10.00 ms without, at 2.00 tokens a step"
    )
    for _ in range(REST_REQUESTS):
        assert not worth.take_turn()
        assert worth.end_request() == note
    assert not worth.is_off
    # a new window begins, and it may turn out otherwise
    for _ in range(2 * WINDOW_REQUESTS):
        assert request(worth, drafted_s=0.015, plain_s=0.010) == ""


def test_what_the_head_reads_counts() -> None:
    """Steps that save 155 ms a request, and reading that takes 140 or 170."""
    worth = Worth()
    for _ in range(3 * WINDOW_REQUESTS):
        assert request(worth, drafted_s=0.015, plain_s=0.010, read_s=0.14) == ""
    worth = Worth()
    for _ in range(WINDOW_REQUESTS):
        note = request(worth, drafted_s=0.015, plain_s=0.010, read_s=0.17)
    assert "10.24 ms with them (2.74 for prompts) and 10.00 ms without" in note


def test_reading_without_a_reply_counts_with_the_next_one() -> None:
    worth = Worth()
    for _ in range(WINDOW_REQUESTS):
        worth.count_reading(0.17)
        assert worth.end_request() == ""
        note = request(worth, drafted_s=0.015, plain_s=0.010)
    assert "(2.74 for prompts)" in note


def test_one_bad_request_is_no_window() -> None:
    worth = Worth()
    for i in range(3 * WINDOW_REQUESTS):
        bad = i % WINDOW_REQUESTS == 0
        assert request(worth, drafted_s=0.05 if bad else 0.012, plain_s=0.010) == ""


def test_few_steps_say_nothing() -> None:
    worth = Worth()
    for _ in range(PLAIN_PERIOD - 1):
        worth.take_turn()
        worth.count(1, 3, 1.0)
        worth.count(1, 0, 0.1)
        assert worth.end_request() == ""


def test_a_head_that_is_always_wrong_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes with the rows that are decoded: what a step takes is never by chance."""
    script = [f"word{i} " for i in range(40)]
    path = write_handset(tmp_path / "wrong.gguf", script=script, wrong_drafts=range(41))
    with record(path, n_drafts=5, budget_tokens=2048) as recorded:
        row_s = 1e-3
        monkeypatch.setattr(
            decode, "perf_counter", lambda: row_s * sum(len(c.tokens) for c in recorded.calls)
        )
        prompt = tuple(recorded.engine.vocab.tokenize("hello[go]"))
        replies = [ask(recorded.session, prompt, max_tokens=39) for _ in range(WINDOW_REQUESTS + 3)]
        assert len({reply.tokens for reply in replies}) == 1
        assert all(reply.stats.draft_n > 100 for reply in replies[:WINDOW_REQUESTS])
        assert not any(reply.stats.memory.notes for reply in replies[: WINDOW_REQUESTS - 1])
        for reply in replies[WINDOW_REQUESTS:]:
            assert reply.stats.draft_n == reply.stats.draft_n_accepted == 0
            assert "drafts rest" in " ".join(reply.stats.memory.notes)
        recorded.memory.check()


class CountingHead:
    """A head that knows how many tokens it has taken in."""

    def __init__(self, head: DraftContext) -> None:
        self._head = head
        self.n_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def follow(self, cells: I32, tokens: I32, *others: Any, **named: Any) -> None:
        self.n_rows += len(tokens)
        self._head.follow(cells, tokens, *others, **named)


def test_a_head_that_reads_more_than_its_drafts_save_rests_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock: 1 ms a batch, .2 ms a token that the head reads. All drafts are right."""
    path = write_handset(tmp_path / "right.gguf", script=[f"word{i} " for i in range(40)])
    sizes = {"budget_tokens": 2048}
    with record(path, **sizes) as plain, record(path, n_drafts=3, **sizes) as recorded:
        drafter = recorded.memory.drafter
        assert drafter is not None
        head = CountingHead(drafter.head)
        drafter.head = head  # type: ignore[assignment]
        for module in (decode, draft_module):
            monkeypatch.setattr(
                module, "perf_counter", lambda: 1e-3 * len(recorded.calls) + 2e-4 * head.n_rows
            )

        def both(i: int, n_words: int) -> Reply:
            text = f"[q{i % 16}]" + " and the other thing" * n_words + "[go]"
            prompt = tuple(recorded.engine.vocab.tokenize(text))
            reply = ask(recorded.session, prompt, max_tokens=39)
            assert reply.tokens == ask(plain.session, prompt, max_tokens=39).tokens
            recorded.memory.check()
            return reply

        for i in range(2 * WINDOW_REQUESTS):
            assert both(i, 3).stats.draft_n > 20
        for i in range(WINDOW_REQUESTS):
            reply = both(i, 100)
            if drafter.worth.is_off:
                break
        assert "for prompts" in " ".join(reply.stats.memory.notes)
        n_rows = head.n_rows
        for i in range(REST_REQUESTS):
            assert both(i, 3 if i else 100).stats.draft_n == 0
        assert head.n_rows == n_rows
        rows = recorded.memory.working_set.read(0)[-sum(recorded.memory.port.row_bytes[-2:]) * 32 :]
        assert rows == bytes(len(rows))
        for i in range(WINDOW_REQUESTS):
            reply = both(i, 3)
            assert reply.stats.draft_n == reply.stats.draft_n_accepted > 20


@pytest.mark.parametrize("kind", ["qwen35_mtp", "qwen3next_mtp"])
def test_behind_what_the_head_left_out_it_drafts(kind: str, tiny: Callable[..., Path]) -> None:
    """Blocks with and without its rows leave and come back alike."""
    tokens = random_tokens(500)
    with record(tiny(kind)) as plain, record(tiny(kind), n_drafts=3) as recorded:
        drafter = recorded.memory.drafter
        assert drafter is not None
        drafter.worth._n_rest = 1  # noqa: SLF001
        recorded.session.read(tokens[:400])
        recorded.memory.check()
        drafter.worth._n_rest = 0  # noqa: SLF001
        plain.session.read(tokens[:400])
        replies = [ask(one.session, tokens, max_tokens=20) for one in (plain, recorded)]
        assert replies[0].tokens == replies[1].tokens
        assert replies[1].stats.draft_n > 10
        recorded.memory.check()


def test_a_dropped_reply_leaves_what_was_yielded(handset: Path) -> None:
    """Save the last token, as without drafts: also where more of a batch had been accepted."""
    for n_drafts in (0, 5):
        for n_taken in range(1, len(SCRIPT) + 1):
            with record(handset, n_drafts=n_drafts) as recorded:
                prompt = tuple(recorded.engine.vocab.tokenize("hello[go]"))
                events = recorded.session.generate(Prompt(tokens=prompt), GenerateParams())
                said = []
                for event in events:
                    if isinstance(event, TokenEvent):
                        said.append(event.token)
                        if len(said) == n_taken:
                            break
                events.close()
                assert recorded.session.tokens.tolist() == [*prompt, *said[:-1]]
                recorded.memory.check()
                rest = ask(recorded.session, (*prompt, *said), max_tokens=len(SCRIPT) - n_taken)
                assert [recorded.engine.vocab.detokenize([t]) for t in (*said, *rest.tokens)] == [
                    *SCRIPT
                ]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_reply_has_as_many_tokens_as_it_may(max_tokens: int, tiny_qwen35_mtp: Path) -> None:
    with record(tiny_qwen35_mtp, n_drafts=3) as recorded:
        reply = ask(recorded.session, random_tokens(50), max_tokens=max_tokens)
        assert len(reply.tokens) == max_tokens
        assert reply.done.reason == "length"
        assert recorded.session.n_tokens == 50 + max_tokens - 1


def test_it_ends_where_the_workspace_does(tiny_qwen35_mtp: Path) -> None:
    ends = []
    for n_drafts in (0, 4):
        with record(tiny_qwen35_mtp, n_drafts=n_drafts, workspace_tokens=256) as recorded:
            reply = ask(recorded.session, random_tokens(230), max_tokens=None)
            ends.append((reply.tokens, reply.done.reason, recorded.session.n_tokens))
    assert ends[0] == ends[1]
    assert ends[0][2] == 255


def test_device_memory_counts_the_head_and_stays_flat(tiny_qwen35_mtp: Path) -> None:
    with record(tiny_qwen35_mtp) as recorded:
        plain = recorded.memory.device_bytes
    with record(tiny_qwen35_mtp, n_drafts=3) as recorded:
        ask(recorded.session, random_tokens(300))
        n_bytes = recorded.memory.device_bytes
        row = 2 * 2 * 2 * 32  # K and V, two heads of 32, F16
        assert n_bytes == plain + 10 * 32 * row
        ask(recorded.session, random_tokens(2000, seed=1))
        assert recorded.memory.device_bytes == n_bytes
        assert recorded.engine.facts.draft_bytes_per_token == row


def test_a_model_without_a_head_says_so(tiny_qwen35: Path, tiny_llama: Path) -> None:
    for path in (tiny_qwen35, tiny_llama):
        with pytest.raises(ModelError, match="one MTP block; leave --spec-type out"):
            Engine(make_config(path, n_drafts=3))


@pytest.mark.parametrize("n_max", [0, 6])
def test_a_step_has_one_to_five_drafts(n_max: int) -> None:
    with pytest.raises(ConfigError, match=r"spec_draft_n_max is .*from 1 to 5"):
        DraftConfig(spec_type="draft-mtp", n_max=n_max)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_min": 4}, "spec_draft_n_min is 4, but must be from 0 to spec_draft_n_max=3"),
        ({"n_min": -1}, "spec_draft_n_min is -1"),
        ({"p_min": 1.5}, "spec_draft_p_min is 1.5, but must be from 0 to 1"),
        ({"p_min": float("nan")}, "spec_draft_p_min is nan"),
        ({"type_k": "q8_0"}, "spec_draft_type_v is f16, but must be as spec_draft_type_k=q8_0"),
        ({"type_v": "q9"}, "spec_draft_type_v is q9"),
    ],
)
def test_what_a_draft_may_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DraftConfig(spec_type="draft-mtp", **settings)


@pytest.mark.parametrize(("n_min", "drafted", "accepted"), [(0, 14, 14), (3, 10, 10)])
def test_a_step_ends_its_drafts_where_the_head_is_torn(
    n_min: int, drafted: int, accepted: int, tmp_path: Path
) -> None:
    """What is left out is not tried, and a step whose drafts are too few has none."""
    script = [f"word{i} " for i in range(20)]
    path = write_handset(tmp_path / "torn.gguf", script=script, torn_drafts=[2, 10])
    replies = {}
    for p_min in (0.0, 0.6):
        with record(path, n_drafts=5, p_min=p_min, n_min=n_min) as recorded:
            prompt = tuple(recorded.engine.vocab.tokenize("hello[go]"))
            replies[p_min] = ask(recorded.session, prompt, max_tokens=20)
            recorded.memory.check()
    assert replies[0.0].tokens == replies[0.6].tokens
    stats = replies[0.6].stats
    assert (stats.draft_n, stats.draft_n_accepted) == (drafted, accepted)
    assert replies[0.0].stats.draft_n_accepted < replies[0.0].stats.draft_n


def test_settings_that_do_not_go_with_drafts(tiny_qwen35_mtp: Path) -> None:
    model = ModelConfig(path=tiny_qwen35_mtp)
    draft = DraftConfig(spec_type="draft-mtp", n_max=4)
    with pytest.raises(ConfigError, match="none with --no-kvmem"):
        EngineConfig(model=model, memory=MemoryConfig(enabled=False), draft=draft)
    with pytest.raises(ConfigError, match="flash_attn is off, but must be on or auto with spec_d"):
        EngineConfig(
            model=model,
            memory=MemoryConfig(flash_attn="off", type_k="f16", type_v="f16"),
            draft=DraftConfig(spec_type="draft-mtp", type_k="q8_0", type_v="q8_0"),
        )
    with pytest.raises(ConfigError, match="ubatch_tokens is 4, but must be at least 6"):
        EngineConfig(model=model, memory=MemoryConfig(batch_tokens=4), draft=draft)


def test_the_smallest_batch_that_goes_with_drafts(tiny_qwen35_mtp: Path) -> None:
    """One less, and llama.cpp would end the process."""
    replies = []
    for batch_tokens in (5, 32):
        with record(tiny_qwen35_mtp, n_drafts=3, batch_tokens=batch_tokens) as recorded:
            replies.append(ask(recorded.session, random_tokens(60, 1), span=(10, 50)).tokens)
    assert replies[0] == replies[1]


def test_the_type_of_the_head_is_its_own(tiny_qwen35_mtp: Path) -> None:
    sizes = []
    kinds: tuple[KvType, ...] = ("f16", "q8_0")
    for kind in kinds:
        config = make_config(tiny_qwen35_mtp, n_drafts=2)
        draft = DraftConfig(spec_type="draft-mtp", n_max=2, type_k=kind, type_v=kind)
        with Engine(EngineConfig(model=config.model, memory=config.memory, draft=draft)) as engine:
            sizes.append(engine.facts.draft_bytes_per_token)
            reply = ask(engine.session(), random_tokens(400), max_tokens=20)
            assert reply.stats.draft_n > 0
    assert sizes == [256, 136]


def test_the_sampler_ends_a_reply_inside_a_batch(handset: Path) -> None:
    """A draft that is an end token, or one that a request stops at, ends the batch."""
    with record(handset, n_drafts=5) as recorded:
        vocab = recorded.engine.vocab
        prompt = tuple(vocab.tokenize("hello[go]"))
        stop = vocab.tokenize(SCRIPT[3])[0]
        params = GenerateParams(sampling=ENDLESS, stop_tokens=frozenset({stop}))
        events = list(recorded.session.generate(Prompt(tokens=prompt), params))
        said = [event.token for event in events if isinstance(event, TokenEvent)]
        assert said == [vocab.tokenize(text)[0] for text in SCRIPT[:4]]
        assert recorded.session.n_tokens == len(prompt) + 3
        recorded.memory.check()


@pytest.mark.parametrize("mtp_state", ["snapshots", "replay"])
def test_each_conversation_has_its_own_hidden_row(mtp_state: str, tiny_qwen35_mtp: Path) -> None:
    """It comes back with the conversation, as the state does, and so do the rows of the head."""
    first, second = random_tokens(300, seed=1), random_tokens(200, seed=2)

    def say(recorded: Recorded, tokens: tuple[int, ...], name: str, *, stop: bool = False) -> Reply:
        prompt = Prompt(tokens=tokens, conversation_id=name)
        cancel = CancelToken()
        if stop:
            cancel.set()
        params = GenerateParams(sampling=ENDLESS, max_tokens=12)
        events = list(recorded.session.generate(prompt, params, cancel=cancel))
        done = events[-1]
        assert isinstance(done, Done)
        recorded.memory.check([*conversations.parked])
        return Reply(tuple(e.token for e in events if isinstance(e, TokenEvent)), done)

    replies = []
    for n_drafts in (0, 3):
        with record(
            tiny_qwen35_mtp, n_drafts=n_drafts, mtp_state=mtp_state, conversations=3
        ) as recorded:
            assert recorded.session.conversations is not None
            conversations = recorded.session.conversations
            one = say(recorded, first, "one")
            held = recorded.session.n_tokens
            drafter = recorded.memory.drafter
            hidden = None if drafter is None else drafter.hidden.copy()
            two = say(recorded, second, "two")
            back = say(recorded, (*first, *one.tokens), "one", stop=True)
            assert back.stats.memory.conversation_use == "switched"
            assert recorded.session.n_tokens == held
            if drafter is not None:
                np.testing.assert_array_equal(drafter.hidden, hidden)
            more = say(recorded, (*first, *one.tokens, *random_tokens(40, seed=3)), "one")
            again = say(recorded, (*second, *two.tokens, *random_tokens(9, seed=4)), "two")
            replies.append([one.tokens, two.tokens, more.tokens, again.tokens])
    assert replies[0] == replies[1]


def test_steps_of_the_rest_are_not_judged_behind_it() -> None:
    worth = Worth()
    while not worth.is_off:
        request(worth, drafted_s=9.0, plain_s=1.0)
    while worth.is_off:
        for _ in range(100):
            worth.count(1, 0, 0.001)
        worth.end_request()
    notes = [request(worth, drafted_s=1.0, plain_s=1.0) for _ in range(2 * WINDOW_REQUESTS)]
    assert notes == [""] * len(notes)
