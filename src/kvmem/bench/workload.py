"""Seeded histories with planted facts, made without downloads and measured in tokens.

A prompt is a chat of a given number of tokens in which some facts are stated once, at known
places. Each question comes with its gold span: the tokens that state the fact.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

from kvmem.bench.generators.base import Fact, Generator, Turn
from kvmem.engine.prompt import Span
from kvmem.errors import ConfigError

CLEAR_HEAD: Final = 0.05
"""Share of the history at its start that holds no fact, so that the sink never holds one."""
CLEAR_TAIL_TOKENS: Final = 768
"""Tokens before the end where the last fact is due. It stands up to a turn later, and still before
the 512 newest tokens, which a budget of that size holds without any choice."""
LEAST_FACT_TOKENS: Final = 48
"""Of the history for each fact, between those."""

LEAST_LAST_TOKENS: Final = 64
"""Of the last user turn and its answer, where the history ends with one."""


class Tokenizer(Protocol):
    """The part of a vocabulary that a workload needs."""

    def tokenize(self, text: str, *, parse_special: bool = True) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to ask after the history.

    text: the question in words; tokens: the whole user turn and the start of the answer's turn;
    content: the part of `tokens` that is the question's own text.
    prefix: tokens of the forced start of the answer; value: tokens of the answer itself.
    gold: the spans of the history that state the answer. sessions: those that they stand in, where
    the history has sessions.
    shares_word: whether the question repeats a rare word of the statement.
    """

    kind: str
    text: str
    value_text: str
    tokens: tuple[int, ...]
    content: Span
    prefix: tuple[int, ...]
    value: tuple[int, ...]
    gold: tuple[Span, ...]
    shares_word: bool
    sessions: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One history and its questions. The history is the same for equal arguments."""

    generator: str
    seed: int
    history: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What to generate: `n_tokens` of history, `n_facts` facts with look-alikes each.

    n_paraphrased: further facts whose questions share no rare word with them.
    plain: only facts of the kinds that a small model answers well, without look-alikes. The
        history ends with prose and an answer then, as such a model goes on with a log.
    """

    n_tokens: int = 3072
    n_facts: int = 6
    n_lookalikes: int = 2
    n_paraphrased: int = 2
    plain: bool = False

    def __post_init__(self) -> None:
        # What the lists of the shortest generator last for.
        if not 1 <= self.n_facts <= 6:
            raise ConfigError("n_facts", self.n_facts, "from 1 to 6")
        if not 0 <= self.n_paraphrased <= 5:
            raise ConfigError("n_paraphrased", self.n_paraphrased, "from 0 to 5")
        if not 0 <= self.n_lookalikes <= 2:
            raise ConfigError("n_lookalikes", self.n_lookalikes, "0, 1 or 2")
        if self.n_tokens < self.least_tokens:
            raise ConfigError(
                "n_tokens",
                self.n_tokens,
                f"at least {self.least_tokens}, for {self.n_all_facts} facts with room between "
                "them and behind them",
            )

    @property
    def n_all_facts(self) -> int:
        return self.n_facts if self.plain else self.n_facts + self.n_paraphrased

    @property
    def least_tokens(self) -> int:
        """The shortest history that such facts are planted in."""
        spread = self.n_all_facts * LEAST_FACT_TOKENS
        return ceil((CLEAR_TAIL_TOKENS + spread) / (1 - CLEAR_HEAD))


@dataclass(frozen=True, slots=True)
class Frame:
    """How a chat is written: what stands before and after a message."""

    opened: str
    closed: str

    def open(self, role: str) -> str:
        return self.opened.format(role=role)


CHATML: Final = Frame("<|im_start|>{role}\n", "<|im_end|>\n")
PLAIN: Final = Frame("### {role}:\n", "\n\n")


def frame_for(tokenizer: Tokenizer) -> Frame:
    """ChatML if the vocabulary has its marks as tokens, headings otherwise."""
    return CHATML if len(tokenizer.tokenize("<|im_start|>", parse_special=True)) == 1 else PLAIN


def make_prompts(
    generator: Generator, tokenizer: Tokenizer, spec: WorkloadSpec, seeds: Sequence[int]
) -> list[Prompt]:
    """One prompt for each seed."""
    return [make_prompt(generator, tokenizer, spec, seed) for seed in seeds]


def make_prompt(
    generator: Generator, tokenizer: Tokenizer, spec: WorkloadSpec, seed: int
) -> Prompt:
    """A history of exactly `spec.n_tokens` tokens and one question for each fact."""
    rng = random.Random(f"{generator.name}/{seed}")
    if spec.plain:
        facts = generator.plain_facts(rng, spec.n_facts)
    else:
        facts = generator.facts(
            rng,
            spec.n_facts,
            n_lookalikes=spec.n_lookalikes,
            n_paraphrased=spec.n_paraphrased,
        )
    writer = _Writer(tokenizer, frame_for(tokenizer), spec.n_tokens)
    plan = _plan(rng, facts, spec.n_tokens)
    spans = writer.write(generator, rng, plan, answered=spec.plain)
    frame = writer.frame
    questions = tuple(
        _question(tokenizer, frame, fact, tuple(spans[index])) for index, fact in enumerate(facts)
    )
    return Prompt(
        generator=generator.name,
        seed=seed,
        history=tuple(writer.tokens[: spec.n_tokens]),
        questions=questions,
    )


@dataclass(frozen=True, slots=True)
class _Planted:
    """A statement and the token index after which it is written.

    fact: -1 for a look-alike. question: what a confirmed fact is asked with; else "".
    """

    at_tokens: int
    statement: str
    fact: int
    question: str = ""


def _plan(rng: random.Random, facts: Sequence[Fact], n_tokens: int) -> list[_Planted]:
    """Spread facts over strata of the history and look-alikes anywhere, in order of place."""
    first = int(n_tokens * CLEAR_HEAD)
    last = n_tokens - CLEAR_TAIL_TOKENS
    width = (last - first) / len(facts)
    order = list(range(len(facts)))
    rng.shuffle(order)
    planted = [
        _Planted(
            int(first + width * (stratum + 0.8 * rng.random())),
            facts[index].statement,
            index,
            facts[index].question if facts[index].confirmed else "",
        )
        for stratum, index in enumerate(order)
    ]
    for fact, place in [(facts[p.fact], p) for p in planted]:
        # What belongs to one answer stands in strata of its own, in the order of its parts.
        for part, statement in enumerate(fact.parts):
            left = last - place.at_tokens
            at = place.at_tokens + left * (part + 0.2 + 0.8 * rng.random()) / len(fact.parts)
            planted.append(_Planted(int(at), statement, place.fact))
        for statement in fact.lookalikes:
            # An old value has to come before its correction.
            stop = place.at_tokens if fact.kind == "updated" else last
            planted.append(_Planted(rng.randrange(first // 2, stop), statement, -1))
    return sorted(planted, key=lambda item: item.at_tokens)


class _Writer:
    """Writes turns until the history is long enough; remembers where facts stand."""

    def __init__(self, tokenizer: Tokenizer, frame: Frame, n_tokens: int) -> None:
        self.frame = frame
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._n_tokens = n_tokens

    def write(
        self, generator: Generator, rng: random.Random, plan: list[_Planted], *, answered: bool
    ) -> dict[int, list[Span]]:
        """Returns the spans of each fact by its index. answered: the assistant has the last word.

        Without it the last turn is cut, whoever's it is.
        """
        spans: dict[int, list[Span]] = {}
        waiting = list(plan)
        self._turn(Turn("system", (generator.opening(),)), waiting=[], spans=spans)
        last = len(self.tokens)
        while len(self.tokens) < self._n_tokens:
            if self._is_due(waiting) and waiting[0].question:
                self._exchange(waiting.pop(0), spans)
            if len(self.tokens) <= self._n_tokens - LEAST_LAST_TOKENS:
                last = len(self.tokens)
            for turn in generator.turns(rng):
                self._turn(turn, waiting=waiting, spans=spans)
        # Cut inside the last filler and close its turn, so that the length is exact.
        answer = self._write_again(generator, rng, last) if answered else ""
        closing = self._ids(answer + self.frame.closed)
        stop = self._n_tokens - len(closing)
        kept = min(last, stop) if answered else stop
        cut = [span for said in spans.values() for span in said if span.stop > kept]
        if n_left := len(waiting) + len(cut):
            rule = f"more: {n_left} statements found no place in the history"
            raise ConfigError("n_tokens", self._n_tokens, rule)
        self.tokens[stop:] = closing
        return spans

    def _is_due(self, waiting: list[_Planted]) -> bool:
        return bool(waiting) and waiting[0].at_tokens <= len(self.tokens)

    def _turn(self, turn: Turn, *, waiting: list[_Planted], spans: dict[int, list[Span]]) -> None:
        self._add(self.frame.open(turn.role))
        for piece in turn.pieces:
            self._add(piece)
            # Only user turns state facts; one statement between two pieces of filler.
            if turn.role == "user" and self._is_due(waiting) and not waiting[0].question:
                planted = waiting.pop(0)
                start = len(self.tokens)
                self._add(planted.statement + "\n")
                if planted.fact >= 0:
                    spans.setdefault(planted.fact, []).append(Span(start, len(self.tokens)))
        self._add(self.frame.closed)

    def _write_again(self, generator: Generator, rng: random.Random, last: int) -> str:
        """From `last` on one long user turn, past the end. Returns what closes and answers it."""
        del self.tokens[last:]
        self._add(self.frame.open("user"))
        while len(self.tokens) < self._n_tokens:
            asked, answer = generator.prose(rng)
            for piece in asked.pieces:
                self._add(piece)
        return self.frame.closed + self.frame.open(answer.role) + "".join(answer.pieces)

    def _exchange(self, planted: _Planted, spans: dict[int, list[Span]]) -> None:
        """The user tells a fact and then asks for it. All of it is gold."""
        frame = self.frame
        self._add(frame.open("user") + "Please remember this.\n")
        start = len(self.tokens)
        self._add(planted.statement + frame.closed)
        self._add(frame.open("assistant") + planted.statement + frame.closed)
        self._add(frame.open("user") + planted.question + frame.closed)
        self._add(frame.open("assistant") + planted.statement)
        spans.setdefault(planted.fact, []).append(Span(start, len(self.tokens)))
        self._add(frame.closed)

    def _add(self, text: str) -> None:
        self.tokens.extend(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.tokenize(text, parse_special=True)]


def _question(tokenizer: Tokenizer, frame: Frame, fact: Fact, gold: tuple[Span, ...]) -> Question:
    text = fact.question
    opening = tokenizer.tokenize(frame.open("user"), parse_special=True)
    asked = tokenizer.tokenize(text, parse_special=False)
    closing = tokenizer.tokenize(frame.closed + frame.open("assistant"), parse_special=True)
    return Question(
        kind=fact.kind,
        text=text,
        value_text=fact.value,
        tokens=(*opening, *asked, *closing),
        content=Span(len(opening), len(opening) + len(asked)),
        prefix=tuple(tokenizer.tokenize(fact.prefix, parse_special=False)),
        value=tuple(tokenizer.tokenize(" " + fact.value, parse_special=False)),
        gold=gold,
        shares_word=fact.shares_word,
    )
