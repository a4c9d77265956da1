"""Tokens of a reply to thinking, content and calls: UTF-8, stop texts, ids, counts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from handset import SCRIPT
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.chat.render import ChatRenderer
from kvmem.chat.reply import (
    Delta,
    Parser,
    PlainParser,
    ReplyMessage,
    ReplyReader,
    ThinkingTags,
)
from kvmem.chat.request import parse_chat_request
from kvmem.engine.events import StopReason, TokenEvent

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": [LOOK]}
EMOJI = "🙂🚀😀🌍"
TAGS = ThinkingTags(start="<think>", ends=("</think>",))
OPEN = ThinkingTags(start="<think>", ends=("</think>",), is_open=True)


def reader_of(renderer: ChatRenderer, **fields: Any) -> ReplyReader:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [LOOK], **fields}
    return renderer.render(parse_chat_request(body)).reader()


def events_of(pieces: Sequence[bytes]) -> list[TokenEvent]:
    return [TokenEvent(1000, piece) for piece in pieces]


def read(
    reader: ReplyReader, groups: Sequence[Sequence[bytes]], reason: StopReason = "stop"
) -> ReplyMessage:
    """Each group is what one decode step accepted."""
    message = ReplyMessage()
    for group in groups:
        message.add(reader.feed(events_of(group)))
    message.add(reader.finish(reason))
    return message


def text_of(message: ReplyMessage) -> tuple[str, str, list[tuple[str | None, str]]]:
    return (
        message.reasoning,
        message.content,
        [(call.name, call.arguments) for call in message.calls],
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 6), min_size=1))
def test_drafts_accepted_in_any_groups(renderer: ChatRenderer, sizes: list[int]) -> None:
    pieces = [text.encode() for text in SCRIPT[1:]]
    groups: list[list[bytes]] = []
    while pieces:
        n = sizes[len(groups) % len(sizes)]
        groups.append(pieces[:n])
        pieces = pieces[n:]
    reader = reader_of(renderer)
    message = read(reader, groups)
    assert text_of(message) == (
        "I should look it up.",
        "Of course. One moment.\n",
        [("look", '{"place":"Oslo"}')],
    )
    assert reader.finish_reason("stop") == "tool_calls"
    assert reader.reasoning_tokens == SCRIPT.index("</think>")  # the first was in the prompt


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowParser(PlainParser):
    """Reads from the beginning each time: 75 ns a byte, as llama.cpp's here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._n_bytes = 0
        self.spent_s = 0.0

    def feed(self, text: str) -> dict[str, Any]:
        self._n_bytes += len(text)
        self._clock.now += self._n_bytes * 75e-9
        self.spent_s += self._n_bytes * 75e-9
        return super().feed(text)


@pytest.mark.parametrize("token_s", [0.001, 0.02, 0.5])
def test_a_long_reply_takes_little_to_read_and_stays_live(token_s: float) -> None:
    clock = Clock()
    parser = SlowParser(clock)
    reader = ReplyReader(parser, clock=clock, work=clock)
    said = ""
    late_s = 0.0
    shown_at: list[tuple[float, int]] = []
    for n in range(32_000):
        delta = reader.feed(events_of([b"word"]))
        said += delta.content
        assert n or delta.content, "the first token comes at once"
        shown_at.append((clock.now, len(said)))
        clock.now += token_s
        waits_s = reader.waits_s
        if waits_s is not None:
            late_s = max(late_s, waits_s)
            if waits_s == 0:
                said += reader.feed([]).content
    assert parser.spent_s < 0.06 * clock.now
    assert late_s < 0.2
    assert said + reader.finish("stop").content == "word" * 32_000


def test_others_on_the_machine_change_no_rest() -> None:
    """A reading that waits for the processor works no longer."""
    wall, work = Clock(), Clock()

    class Held(PlainParser):
        def feed(self, text: str) -> dict[str, Any]:
            wall.now += 2.0
            work.now += 0.001
            return super().feed(text)

    reader = ReplyReader(Held(), clock=wall, work=work)
    assert reader.feed(events_of([b"a"])).content == "a"
    assert reader.feed(events_of([b"b"])).content == ""
    assert reader.waits_s == pytest.approx(0.019)
    wall.now += 0.02
    assert reader.feed([]).content == "b"


class TimedParser:
    """The real one, which takes a second each time."""

    def __init__(self, parser: Parser, clock: Clock) -> None:
        self._parser = parser
        self._clock = clock
        self.n_readings = 0

    def feed(self, text: str) -> dict[str, Any]:
        self._clock.now += 1
        self.n_readings += 1
        return self._parser.feed(text)

    def finish(self, *, is_cut: bool = False) -> dict[str, Any]:
        return self._parser.finish(is_cut=is_cut)


def test_what_nobody_looks_at_is_read_once(renderer: ChatRenderer) -> None:
    parser = TimedParser(renderer.render(parse_chat_request(ASKED)).parser, Clock())
    reader = ReplyReader(parser)
    for piece in SCRIPT[1:]:
        assert not reader.feed(events_of([piece.encode()]), shows=False)
    message = ReplyMessage()
    message.add(reader.finish("stop"))
    assert message.reasoning == "I should look it up." and len(message.calls) == 1
    assert parser.n_readings == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(pauses=st.lists(st.sampled_from([0, 7, 100]), min_size=1))
def test_rests_change_nothing(renderer: ChatRenderer, pauses: list[int]) -> None:
    """What waits while the parser rests comes with what follows, or at the end."""
    clock = Clock()
    parser = TimedParser(renderer.render(parse_chat_request(ASKED)).parser, clock)
    reader = ReplyReader(parser, clock=clock, work=clock)
    message = ReplyMessage()
    for n, piece in enumerate(SCRIPT[1:]):
        message.add(reader.feed(events_of([piece.encode()])))
        clock.now += pauses[n % len(pauses)]
        if reader.waits_s == 0:
            message.add(reader.feed([]))
    message.add(reader.finish("stop"))
    assert text_of(message) == (
        "I should look it up.",
        "Of course. One moment.\n",
        [("look", '{"place":"Oslo"}')],
    )
    assert reader.waits_s is None
    assert parser.n_readings <= len(SCRIPT) and (any(pauses) or parser.n_readings == 2)


REPLY = (
    f"so {EMOJI}\n</think>\n\nyes {EMOJI}\n<tool_call>\n<function=look>\n<parameter=place>\n{EMOJI}"
    "\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_cut_anywhere(renderer: ChatRenderer, size: int) -> None:
    """Case R22: in thinking, content and arguments."""
    data = REPLY.encode()
    whole = read(reader_of(renderer), [[data]])
    for offset in range(size):
        places = [0, *range(offset, len(data), size), len(data)]
        reader = reader_of(renderer)
        message = ReplyMessage()
        for a, b in pairwise(places):
            delta = reader.feed(events_of([data[a:b]]))
            assert "\ufffd" not in repr(delta)
            message.add(delta)
        message.add(reader.finish("stop"))
        assert text_of(message) == text_of(whole)
    assert text_of(whole) == (
        f"so {EMOJI}", f"yes {EMOJI}\n", [("look", f'{{"place":"{EMOJI}"}}')]
    )  # fmt: skip


def test_bytes_that_are_no_character(renderer: ChatRenderer) -> None:
    pieces = [b"a</think>b", b"\xe2", b"c", b"\xff", b"d\xf0\x9f"]
    message = read(reader_of(renderer), [[piece] for piece in pieces], "length")
    assert (message.reasoning, message.content) == ("a", "b\ufffdc\ufffdd")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sets(st.integers(0, len(REPLY.encode()))))
def test_any_bytes_in_any_cut(renderer: ChatRenderer, cuts: set[int]) -> None:
    data = REPLY.encode()
    places = [0, *sorted(cuts), len(data)]
    message = read(reader_of(renderer), [[data[a:b]] for a, b in pairwise(places)])
    assert text_of(message) == text_of(read(reader_of(renderer), [[data]]))


def test_an_end_of_the_template_cuts_nothing_off() -> None:
    """Also behind calls; a client's stop text does, even if it is the same."""

    class Calls:
        is_cut: bool | None = None

        def feed(self, text: str) -> dict[str, Any]:
            return {"calls": [{"index": 0, "id": "", "name": "look", "arguments": "{}"}]}

        def finish(self, *, is_cut: bool = False) -> dict[str, Any]:
            self.is_cut = is_cut
            return {}

    for stops, word in (((), "tool_calls"), (("<end>",), "stop")):
        parser = Calls()
        reader = ReplyReader(parser, stops=stops, ends=("<end>",))
        read(reader, [[b"call<e"], [b"nd>"]], "cancelled")
        assert (reader.finish_reason("cancelled"), parser.is_cut) == (word, bool(stops))


def test_a_stop_text_over_several_tokens(renderer: ChatRenderer) -> None:
    reader = reader_of(renderer, stop=["STOP"])
    message = read(reader, [[b"x</think>one S"], [b"TO", b"P"], [b" more"]], "cancelled")
    assert (message.reasoning, message.content) == ("x", "one ")
    assert reader.is_stopped
    assert reader.finish_reason("cancelled") == "stop"
    held = reader_of(renderer, stop=["STOP"])
    assert read(held, [[b"</think>one STO"]]).content == "one STO"


def test_ids_are_new_in_the_conversation(renderer: ChatRenderer) -> None:
    """Case R10: no id of an earlier turn, none twice."""
    call = REPLY[REPLY.index("<tool_call>") :]
    seen: set[str] = set()
    for _ in range(20):
        reader = reader_of(renderer)
        message = read(reader, [[b"</think>" + f"{call}\n{call}".encode()]])
        ids = {call.id for call in message.calls if call.id}
        assert len(ids) == 2 and all(len(i) == 9 and i.isalnum() for i in ids)
        assert not ids & seen
        seen |= ids


class Given:
    """A parser that gives one call with an id of the model's own."""

    def feed(self, text: str) -> dict[str, Any]:
        return {"calls": [{"index": 0, "id": "functions.f:0", "name": "f", "arguments": "{}"}]}

    def finish(self, *, is_cut: bool = False) -> dict[str, Any]:
        return {}


def test_an_id_that_the_model_gives_is_kept_if_it_is_new() -> None:
    kept = read(ReplyReader(Given()), [[b"x"]])
    assert kept.calls[0].id == "functions.f:0"
    changed = read(ReplyReader(Given(), used_ids=["functions.f:0"]), [[b"x"]])
    assert changed.calls[0].id != "functions.f:0"


def test_control_tokens_of_the_format_have_a_text() -> None:
    reader = ReplyReader(PlainParser(), preserved={7: b"<tool_call>"})
    message = ReplyMessage()
    for event in (TokenEvent(1, b"a\xe2"), TokenEvent(7, b""), TokenEvent(8, b"")):
        message.add(reader.feed([event]))
    message.add(reader.finish("stop"))
    assert message.content == "a\ufffd<tool_call>"


@pytest.mark.parametrize(
    ("tags", "pieces", "n"),
    [
        (ThinkingTags(), ["a", "b"], 0),
        (TAGS, ["a", "<think>", "b"], 0),
        (TAGS, ["<think>", "a", "b", "</think>", "c"], 4),
        (TAGS, ["\n", "<th", "ink>", "a</th", "ink>", "c"], 5),
        (OPEN, ["a", "b", "</think>", "c"], 3),
        (OPEN, ["a", "b"], 2),
        (OPEN, ["</think>", "c"], 1),
    ],
)
def test_tokens_of_thinking(tags: ThinkingTags, pieces: list[str], n: int) -> None:
    reader = ReplyReader(PlainParser(), thinking=tags)
    read(reader, [[piece.encode()] for piece in pieces])
    assert reader.reasoning_tokens == n


def test_reasons(renderer: ChatRenderer) -> None:
    reader = reader_of(renderer)
    read(reader, [[b"hm"]], "length")
    assert [reader.finish_reason(reason) for reason in ("stop", "length")] == ["stop", "length"]
    assert reader.finish("length") == Delta()
    assert not Delta()


def test_a_reply_that_comes_back_is_the_text_that_was_generated(renderer: ChatRenderer) -> None:
    """So the next turn's prompt begins with what the memory holds."""
    said = "so it is\n</think>\n\nI look.\n<tool_call>\n<function=look>\n<parameter=place>\nOslo"
    said += "\n</parameter>\n</function>\n</tool_call>"
    user = {"role": "user", "content": "hi"}
    first = renderer.render(parse_chat_request({"messages": [user], "tools": [LOOK]}))
    message = read(first.reader(), [[said.encode()]])
    [call] = message.calls
    assistant = {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning,
        "tool_calls": [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        ],
    }
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    body = {"messages": [user, assistant, answer], "tools": [LOOK]}
    assert renderer.render(parse_chat_request(body)).text.startswith(first.text + said)
