"""Text out of token pieces: characters and stop texts over every possible cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.chat.stream import ReplyText, StopMatcher
from kvmem.server.sse import encode


def shown(pieces: list[bytes], stops: tuple[str, ...] = ()) -> list[str]:
    reply = ReplyText(stops)
    return [*(reply.feed(piece) for piece in pieces), reply.finish()]


@pytest.mark.parametrize("text", ["äöü", "日本語", "a🙂b🚀c👩‍🚀d🎉"])
def test_characters_are_whole_at_every_cut(text: str) -> None:
    data = text.encode()
    for width in (1, 2, 3, 5):
        pieces = [data[i : i + width] for i in range(0, len(data), width)]
        parts = shown(pieces)
        assert "".join(parts) == text
        assert all("\ufffd" not in part for part in parts)


def test_bytes_that_are_no_character_become_the_replacement() -> None:
    assert "".join(shown([b"a", b"\xff", b"b", b"\xe2", b"c"])) == "a\ufffdb\ufffdc"


def test_a_character_that_is_cut_at_the_end_is_left_out() -> None:
    assert shown(["a🙂".encode()[:-1]]) == ["a", ""]
    assert shown([b"one ST", b"\xe2\x82"], ("STOP",)) == ["one ", "", "ST"]


def test_a_stop_text_cuts_and_is_not_shown() -> None:
    reply = ReplyText(["STOP"])
    assert reply.feed(b"one ST") == "one "
    assert not reply.is_stopped
    assert reply.feed(b"OP two") == ""
    assert reply.is_stopped
    assert reply.feed(b"three") + reply.finish() == ""


def test_what_only_looked_like_a_stop_text_is_shown_in_the_end() -> None:
    assert shown([b"one ST"], ("STOP",)) == ["one ", "ST"]
    assert shown([b"one ST", b"AR"], ("STOP",)) == ["one ", "STAR", ""]


def test_the_first_of_several_stop_texts_counts() -> None:
    assert "".join(shown([b"ab", b"cd"], ("cd", "bc"))) == "a"


TEXTS = st.text(alphabet="ab\U0001f642", max_size=12)


@given(TEXTS, st.lists(st.text(alphabet="ab\U0001f642", min_size=1, max_size=3), max_size=3),
       st.lists(st.integers(0, 48), max_size=6))  # fmt: skip
def test_cuts_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    """Any split shows what one piece shows: the text up to the stop that is complete first."""
    data = text.encode()
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(borders)]
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    end = min(found)[1] if found else len(text)
    assert "".join(shown(pieces, tuple(stops))) == text[:end]


def test_the_stop_text_that_is_complete_first_counts() -> None:
    for pieces in ([b"baa"], [b"ba", b"a"], [b"b", b"a", b"a"]):
        assert "".join(shown(pieces, ("a", "baa"))) == "b"


@given(st.lists(TEXTS, max_size=6), st.text(alphabet="ab", min_size=1, max_size=4))
def test_shown_text_only_grows_and_never_holds_the_stop(pieces: list[str], stop: str) -> None:
    matcher = StopMatcher([stop])
    total = ""
    for piece in pieces:
        total += matcher.feed(piece)
        assert stop not in total
        assert "".join(pieces).startswith(total)
    assert stop not in total + matcher.finish()


def test_an_event_is_one_line_to_any_client() -> None:
    body = {"content": "a\u0085b\u2028c\u2029d\u00e9\x1e\x0b"}
    event = encode(body).decode()
    assert event.endswith("\n\n") and len(event[:-2].splitlines()) == 1
    assert json.loads(event.removeprefix("data: ")) == body
