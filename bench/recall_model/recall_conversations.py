"""Agent transcripts with facts in them, and questions about the facts, from a seed.

A fact gives an attribute of a place a value. It may be told again with another value, and a place
may get an alias. Places share words on purpose. Every text is made of pieces, whose kind says what
training should make of it, and whose mark says what it tells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

from recall_language import ATTRIBUTES, Speaker, is_held_out

QuestionKind = Literal["fact", "update", "hop", "none"]

CHARS_PER_TOKEN: Final = 3.75
FRAME_CHARS: Final = 24
"""Of a message without its content."""
MAX_VALUES: Final = 4
"""Values that one attribute of a place gets in turn."""
FINAL_KINDS: Final[tuple[QuestionKind, ...]] = ("fact", "update", "hop", "fact", "none")


class Kind(IntEnum):
    """What a piece of text is."""

    PLAIN = 0
    ANSWER = 1
    NO_RECORD = 2
    VALUE = 3
    """In an answer, of a fact that was told once."""
    NEWEST = 4
    """In an answer, of a fact that was updated."""
    PLACE = 5
    """In an answer, behind an alias."""
    HOP_VALUE = 6
    """In an answer, of a place behind an alias."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a piece tells: the n-th value of an attribute of a place, or the place of an alias."""

    subject: str
    attribute: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    kind: Kind = Kind.PLAIN
    mark: Mark | None = None


Pieces = tuple[Piece, ...]


def join(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    pieces: Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """gold: what must be seen to answer, the value first. stale: values that were replaced."""

    text: str
    answer: Pieces
    kind: QuestionKind
    value: str = ""
    gold: tuple[Mark, ...] = ()
    stale: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a transcript is like.

    tokens: its length, about. held_out: use only the places that are kept out of training.
    question_rate: how likely a turn is a question; the more so, the later. fact_tokens: history
    between two new facts, about. final_questions: asked of the whole, not part of it.
    """

    tokens: int
    held_out: bool = False
    question_rate: float = 0.5
    fact_tokens: float = 70.0
    final_questions: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A history, and questions of which each is asked on its own behind it."""

    messages: tuple[Message, ...]
    questions: tuple[Question, ...]

    def pieces(self) -> Iterator[Piece]:
        """The history as the chat template renders it, without a generation prompt."""
        for message in self.messages:
            yield Piece(f"<|im_start|>{message.role}\n")
            yield from message.pieces
            ends = message.role == "assistant"
            yield Piece("<|im_end|>", message.pieces[-1].kind if ends else Kind.PLAIN)
            yield Piece("\n")


def write_conversation(seed: int, style: Style) -> Conversation:
    """The same seed and style write the same."""
    author = _Author(seed, style)
    author.write()
    questions = author.ask_at_the_end()
    return Conversation(tuple(author.messages), questions)


class _Author:
    """Keeps the books of what was told while a transcript grows."""

    def __init__(self, seed: int, style: Style) -> None:
        self.messages: list[Message] = []
        self._style = style
        self._speaker = Speaker(seed)
        self._say = self._speaker.say
        self._n_chars = 0
        self._values: dict[tuple[str, str], list[str]] = {}  # by attribute and place
        self._places: list[str] = []
        self._aliases: dict[str, str] = {}
        self._asked: set[tuple[str, str]] = set()
        apart = style.fact_tokens * self._speaker.between(0.6, 1.8)
        self._max_facts = max(4, int(style.tokens / apart))
        self._max_aliases = max(1, self._max_facts // 4)

    def write(self) -> None:
        chance = self._speaker.chance
        if chance(0.6):
            self._add("system", self._say("system"))
        limit = self._style.tokens * CHARS_PER_TOKEN
        while self._n_chars < limit:
            done = self._n_chars / limit
            if chance(self._style.question_rate * (0.4 + done)) and self._question_turn():
                continue
            allowed = self._max_facts * min(1.0, 1.3 * done + 0.15)
            turn = self._speaker.between(0.0, 1.0)
            if turn < 0.45 and len(self._values) < allowed:
                self._telling_turn()
            elif turn < 0.72:
                self._tool_turn()
            else:
                self._small_talk()

    def ask_at_the_end(self) -> tuple[Question, ...]:
        """As many as the style wants, their kinds in turn; fewer if too little was told."""
        questions: list[Question] = []
        for attempt in range(8 * self._style.final_questions):
            if len(questions) == self._style.final_questions:
                break
            question = self._ask(FINAL_KINDS[attempt % len(FINAL_KINDS)])
            if question is not None:
                questions.append(question)
        return tuple(questions)

    def _add(
        self, role: Literal["system", "user", "assistant"], content: str | Sequence[Piece]
    ) -> None:
        pieces = (Piece(content),) if isinstance(content, str) else tuple(content)
        self.messages.append(Message(role, pieces))
        self._n_chars += sum(len(piece.text) for piece in pieces) + FRAME_CHARS

    # turns

    def _telling_turn(self) -> None:
        n_facts = 1 + self._speaker.below(3)
        self._add("user", self._mix(self._speaker.below(7), n_facts, in_log=False))
        self._add("assistant", self._say("noted"))

    def _small_talk(self) -> None:
        self._add("user", self._mix(2 + self._speaker.below(14), 0, in_log=False))
        self._add("assistant", self._say("heard"))

    def _tool_turn(self) -> None:
        path = self._say("log path")
        self._add("user", self._say("look", path=path))
        self._add("assistant", self._say("call", path=path))
        log = self._mix(3 + self._speaker.below(12), self._speaker.below(4), in_log=True)
        self._add("user", [Piece("<tool_response>\n"), *log, Piece("\n</tool_response>")])
        self._add("assistant", self._say("looked", path=path))

    def _question_turn(self) -> bool:
        chance = self._speaker.chance
        question = self._ask("none" if chance(0.1) else "hop" if chance(0.44) else None)
        if question is None:
            return False
        self._add("user", question.text)
        self._add("assistant", question.answer)
        return True

    # facts

    def _mix(self, n_fillers: int, n_facts: int, *, in_log: bool) -> list[Piece]:
        """Sentences or lines with facts among them, in the order in which they were told."""
        filler = "log" if in_log else "filler"
        items = [[Piece(self._say(filler))] for _ in range(n_fillers)]
        told = [fact for _ in range(n_facts) if (fact := self._tell(in_log=in_log))]
        slots = sorted(self._speaker.below(n_fillers + 1) for _ in told)
        for n_before, (slot, fact) in enumerate(zip(slots, told, strict=True)):
            items.insert(slot + n_before, fact)
        if not items:
            items = [[Piece(self._say(filler))]]
        mixed = items[0]
        for item in items[1:]:
            mixed += [Piece("\n" if in_log else " "), *item]
        return mixed

    def _tell(self, *, in_log: bool) -> list[Piece]:
        """A new fact, a new value or an alias; empty if there is enough of it."""
        chance, pick = self._speaker.chance, self._speaker.pick
        news = self._speaker.between(0.0, 1.0)
        if news < 0.26 and self._places and len(self._aliases) < self._max_aliases:
            return self._tell_alias()
        if news < 0.43 and self._values:
            attribute, place = pick(list(self._values))
            if len(self._values[attribute, place]) == MAX_VALUES:
                return []
        else:
            known = pick(self._places) if self._places and chance(0.55) else None
            place = known or self._new_place()
            attribute = pick(tuple(ATTRIBUTES))
            if len(self._values) >= self._max_facts or not place:
                return []
            if place not in self._places:
                self._places.append(place)
        values = self._values.setdefault((attribute, place), [])
        form = "changed" if values else "told in a log" if in_log else "told"
        mark = Mark(place, attribute, len(values))
        values.append(self._say(ATTRIBUTES[attribute]))
        head = self._say("registry") if in_log else ""
        return [
            Piece(head + self._say(form, attribute=attribute, place=place)),
            Piece(f" {values[-1]}", mark=mark),
            *([] if in_log else [Piece(".")]),
        ]

    def _tell_alias(self) -> list[Piece]:
        alias = self._say("alias")
        if alias in self._aliases:
            return []
        place = self._aliases[alias] = self._speaker.pick(self._places)
        return [Piece(self._say("alias told", alias=alias, place=place), mark=Mark(alias))]

    def _new_place(self) -> str:
        """A place of the right kind that was not named yet; often it shares a word with another."""
        for _ in range(50):
            adjective, noun = self._say("adjective"), self._say("noun")
            if self._places and self._speaker.chance(0.4):
                known = self._speaker.pick(self._places).split()
                if self._speaker.chance(0.5):
                    adjective = known[0]
                else:
                    noun = known[1]
            place = f"{adjective} {noun}"
            if is_held_out(place) == self._style.held_out and place not in self._places:
                return place
        return ""

    # questions

    def _ask(self, kind: QuestionKind | None) -> Question | None:
        """A question that was not asked yet, or None. kind None: fact or update."""
        if kind == "none":
            return self._ask_in_vain()
        open_keys = [key for key in self._values if key not in self._asked]
        if kind == "hop":
            open_keys = [key for key in open_keys if key[1] in self._aliases.values()]
        elif kind is not None:
            n_wanted = range(2, MAX_VALUES + 1) if kind == "update" else (1,)
            open_keys = [key for key in open_keys if len(self._values[key]) in n_wanted]
        if not open_keys:
            return None
        attribute, place = self._speaker.pick(open_keys)
        self._asked.add((attribute, place))
        values = self._values[attribute, place]
        kind = kind or ("update" if len(values) > 1 else "fact")
        marks = [Mark(place, attribute, version) for version in range(len(values))]
        gold, name, head = [marks[-1]], place, []
        if kind == "hop":
            name = self._speaker.pick([a for a, p in self._aliases.items() if p == place])
            gold.append(Mark(name))
            head = [
                Piece(f"{name} is", Kind.ANSWER),
                Piece(f" {place}", Kind.PLACE),
                Piece(". ", Kind.ANSWER),
            ]
        value_kind = {"fact": Kind.VALUE, "update": Kind.NEWEST, "hop": Kind.HOP_VALUE}[kind]
        return Question(
            text=self._say("question", attribute=attribute, place=name),
            answer=(
                *head,
                Piece(self._say("answer", attribute=attribute, place=place), Kind.ANSWER),
                Piece(f" {values[-1]}", value_kind),
                Piece(".", Kind.ANSWER),
            ),
            kind=kind,
            value=values[-1],
            gold=tuple(gold),
            stale=tuple(marks[:-1]),
        )

    def _ask_in_vain(self) -> Question | None:
        """About a known place without that attribute, or a place that was never named."""
        known = self._speaker.pick(self._places) if self._places else ""
        place = known if self._speaker.chance(0.5) else self._new_place()
        attribute = self._speaker.pick(tuple(ATTRIBUTES))
        key = (attribute, place)
        if not place or not self._values or key in self._values or key in self._asked:
            return None
        self._asked.add(key)
        reply = self._say("no record", attribute=attribute, place=place)
        return Question(
            text=self._say("question", attribute=attribute, place=place),
            answer=(Piece(reply, Kind.NO_RECORD),),
            kind="none",
        )
