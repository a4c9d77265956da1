"""Chains of tool calls behind a question, with what it asks for in one of them or before them all.

Made from a held-out conversation and its questions (recall_tokens.held_out_item), from a seed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from recall_language import ATTRIBUTES, Speaker, is_held_out

Where = Literal["before", "between", "last", "alias"]
"""before: in the history. between: in a result before the last. last: in the last result.
alias: the value in the history, of a place that the question does not name; a result names it."""

WHERE: Final = get_args(Where)

_TOLD = re.compile(r"The (.+?) for (\w+ \w+) is (.+)\.$")
_NOT_TOLD = re.compile(r"I have no record of the (.+?) for (\w+ \w+)\.$")


@dataclass(frozen=True, slots=True)
class Step:
    """One call and what the tool said."""

    call: str
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A question and what stands behind it.

    opening: how the reply begins, up to the value, as it is given to the model: behind a tool's
    result it was trained to say that it looked. rest: what must follow. told: where the results
    hold the value, else `spans` of the history.
    """

    where: Where
    kind: str
    number: int
    question: str
    steps: tuple[Step, ...]
    opening: str
    rest: str
    told: str = ""
    spans: tuple[tuple[int, int], ...] = ()


def write_chains(item: dict[str, Any], n_lines: int, seed: int = 0) -> Iterator[Chain]:
    """Those of each question of a conversation, in every place that fits its kind.

    n_lines: of a tool's result, beside facts. There are two to four results.
    """
    text = "\n".join(message["content"] for message in item["messages"])
    for number, question in enumerate(item["questions"]):
        for place, where in enumerate(WHERE):
            is_in_history = where in ("before", "alias")
            if question["kind"] == "none" and is_in_history:
                continue
            if question["kind"] in ("update", "hop") and where in ("between", "last"):
                continue  # told once, or never: told anew in a result
            if question["kind"] == "hop" and where == "alias":
                continue
            own = int(item["id"][1:]) * 100 + number * 10 + place
            yield _write(Speaker(seed * 10**6 + own), text, question, where, number, n_lines)


def split_answer(question: dict[str, Any]) -> tuple[str, str]:
    """An answer up to its value, and the rest of it."""
    rest = f" {question['value']}."
    return question["answer"].removesuffix(rest), rest


def _write(
    speaker: Speaker, text: str, question: dict[str, Any], where: Where, number: int, n_lines: int
) -> Chain:
    found = _TOLD.search(question["answer"]) or _NOT_TOLD.search(question["answer"])
    assert found
    attribute, place = found[1], found[2]
    kind, asked, value = question["kind"], question["text"], question["value"]
    line = ""
    if where in ("between", "last"):
        value = speaker.say(ATTRIBUTES[attribute])
        form = "told in a log" if kind == "none" else "changed"
        told = speaker.say(form, attribute=attribute, place=place)
        line = f"{speaker.say('registry')}{told} {value}"
        kind = "fact" if kind == "none" else "update"
    elif where == "alias":
        alias = _new(speaker, "alias", text)
        line = speaker.say("alias told", alias=alias, place=place)
        asked = speaker.say("question", attribute=attribute, place=alias)
        kind = "hop"
    n_steps = 2 + speaker.below(3)
    at = n_steps - 1 if where == "last" else speaker.below(n_steps - (where == "between"))
    steps = []
    for index in range(n_steps):
        lines = [speaker.say("log") for _ in range(n_lines)]
        other = _new(speaker, "place", text)
        lines.append(
            speaker.say("registry")
            + speaker.say("told in a log", attribute=attribute, place=other)
            + f" {speaker.say(ATTRIBUTES[attribute])}"
        )
        if line and index == at:
            lines.append(line)
        lines.sort(key=lambda _: speaker.between(0.0, 1.0))
        steps.append(Step(speaker.say("call", path=speaker.say("log path")), "\n".join(lines)))
    return Chain(
        where=where,
        kind=kind,
        number=number,
        question=asked,
        steps=tuple(steps),
        opening=f"The {attribute} for {place} is",
        rest=f" {value}.",
        told=value if where in ("between", "last") else "",
        spans=() if where in ("between", "last") else (tuple(question["spans"][0]),),
    )


def _new(speaker: Speaker, what: Literal["alias", "place"], text: str) -> str:
    """A name that the conversation does not use; places are those that were not trained on."""
    while True:
        name = speaker.say("alias") if what == "alias" else speaker.say("adjective") + " " + (
            speaker.say("noun")
        )  # fmt: skip
        if name not in text and (what == "alias" or is_held_out(name)):
            return name
