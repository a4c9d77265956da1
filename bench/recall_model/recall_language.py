"""The language of the recall model: its words, its sentences, and how facts are told and asked for.

It is data, not taste: the vocabulary in the GGUF file was made from these words, and the held-out
questions use these forms. A form has slots: `{noun}` is any form of "noun", `{Coin}` one of "coin"
with a capital, `{####}` four digits, `{2-61}` a number of that range. What the caller gives comes
first: `{place}`, for one, is always given.
"""

import re
from collections.abc import Sequence
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES: Final = _words(
    "silver amber cobalt crimson golden hollow rapid silent northern southern eastern western"
    " copper marble velvet frozen hidden ancient bright broken narrow gentle rusty distant lonely"
    " mellow polar royal rugged sacred shiny simple solar lunar stormy sunny sturdy subtle tidy"
    " timber upper lower violet wicked winter summer autumn wooden young yellow granite orange"
    " purple scarlet sandy misty mossy dusty foggy windy iron quiet"
)
NOUNS: Final = _words(
    "harbor depot ferry tower garden bridge canyon castle cellar chapel clinic cottage factory"
    " forest fountain gallery glacier hangar island junction kitchen lagoon library lighthouse"
    " market meadow mill mine museum orchard palace pantry pier plaza prairie quarry ranch ridge"
    " river school shelter stable station studio summit tavern temple terrace theater tunnel"
    " valley village vineyard wharf workshop yard archive bakery barn dock"
)

ATTRIBUTES: Final[dict[str, str]] = {
    "gate code": "code",
    "door code": "code",
    "vault code": "code",
    "locker code": "code",
    "access phrase": "phrase",
    "safe phrase": "phrase",
    "radio phrase": "phrase",
    "shift lead": "person",
    "contact person": "person",
    "site owner": "person",
    "night guard": "person",
    "backup host": "host",
    "mirror host": "host",
    "invoice number": "number",
    "account number": "number",
    "permit number": "number",
    "config path": "path",
    "report path": "path",
    "flag color": "shade",
    "seal color": "shade",
    "review date": "date",
    "launch date": "date",
    "firmware version": "version",
    "driver version": "version",
    "storage room": "room",
    "meeting place": "room",
}
"""What a place can have, and the form of its value."""

NOUN_STEP: Final = 7
ADJECTIVE_STEP: Final = 31
HELD_OUT_EVERY: Final = 10


def is_held_out(place: str) -> bool:
    """Whether a place ("silver harbor") is never trained on: one pair of words in ten."""
    adjective, noun = place.split()
    number = ADJECTIVES.index(adjective) * ADJECTIVE_STEP + NOUNS.index(noun) * NOUN_STEP
    return number % HELD_OUT_EVERY == 0


FORMS: Final[dict[str, tuple[str, ...]]] = {
    "adjective": ADJECTIVES,
    "noun": NOUNS,
    "animal": _words(
        "Falcon Otter Badger Heron Lynx Raven Marten Osprey Bison Beaver Condor Cougar Coyote"
        " Dolphin Eagle Ferret Gecko Hornet Ibex Jackal Kestrel Lemur Magpie Marmot Moose Narwhal"
        " Ocelot Panther Pelican Puffin Python Quail Rabbit Salmon Sparrow Stork Tiger Toucan"
        " Turtle Viper Walrus Weasel Wolf Wombat Zebra Cricket Spider Swan"
    ),
    "login": _words(
        "marta pavel ines oskar lena tomas nadia viktor clara hugo selma bruno greta anton elisa"
        " jonas mira felix nora samir yara diego alma emil freya goran hanna ivan julia karim leila"
        " milan olga petra ravi sofia tarek ursula wanda zoran"
    ),
    "syllable": _words(
        "ka lo mi ren tor vek sal din bar qui zen fal gor hal jun kel lum mar nor pel ros tan ul"
        " ven wil yor zar bel cor dra esk fin gra hol ister ju kri lan mon"
    ),
    "coin": ("{syllable}{syllable}",) * 3 + ("{syllable}{syllable}{syllable}",) * 2,
    "color": _words(
        "red blue green white black gray pink brown teal olive maroon indigo beige coral ivory"
    ),
    "tone": _words("dark pale deep light warm cold soft dull"),
    "month": _words(
        "January February March April May June July August September October November December"
    ),
    "level": _words("INFO INFO INFO DEBUG WARN ERROR"),
    "service": _words(
        "scheduler gateway indexer mailer planner router storage monitor cache worker registry"
        " billing"
    ),
    "did": _words(
        "opened closed checked moved cleaned painted repaired measured visited inspected"
        " photographed counted labeled described sketched sorted packed unpacked tested weighed"
    ),
    "thing": _words(
        "box crate ladder lamp map radio rope table window chair drawer engine filter hammer kettle"
        " mirror notebook pump shelf valve wagon wheel cable ticket bottle basket curtain clock"
        " camera blanket"
    ),
    "weather": _words("rain fog snow wind frost hail thunder sunshine drizzle heat"),
    "mood": _words("calm tired curious worried cheerful patient nervous proud hungry sleepy"),
    "hour": tuple(f"{n:02d}" for n in range(24)),
    "sixty": tuple(f"{n:02d}" for n in range(60)),
    "time": ("{hour}:{sixty}",),
    # values of attributes
    "code": ("{adjective}-{####}",),
    "phrase": ("{noun} {adjective} {thing}",),
    "person": ("{Login} {Coin}",),
    "host": ("{coin}-{##}",),
    "number": ("{######}",),
    "path": ("/{noun}/{coin}.cfg",),
    "shade": ("{tone} {color}",),
    "date": ("{1-28} {month} 20{##}",),
    "version": ("v{#}.{##}.{#}",),
    "room": ("{Coin} Hall {##}",),
    # text without facts
    "filler": (
        "{Login} {did} the {adjective} {thing} near the {noun}.",
        "There was {weather} over the {noun} until {time}.",
        "We {did} {2-61} of them before lunch.",
        "{Login} felt {mood} and {did} the {thing} again.",
        "The {thing} in the {noun} looked {adjective} after the {weather}.",
        "Later {Login} and {Login} walked from the {noun} to the {noun}.",
        "Somebody left a {color} {thing} on the {thing}.",
        "It took {2-51} minutes because the {thing} was {adjective}.",
        "On {month} {1-28} the {noun} was {did} by {Login} {Coin}.",
        "I think the {adjective} {thing} belongs to {Login}.",
        "Nobody had {did} the {thing} since {month}.",
        "The road to the {noun} was {adjective}, so {Login} took the {thing}.",
        "{Login} said that the {noun} needs a new {thing}.",
        "In the evening the {noun} was full of {weather} and {color} light.",
        "A {mood} visitor {did} every {thing} in the {noun}.",
        "We should ask {Login} about the {color} {thing}.",
        "The old {thing} was {did} at {time} and it still works.",
        "{Login} wrote to {Login} about {Coin} and the {weather}.",
        "After the {weather} we {did} the {noun} and went home.",
        "This {thing} is {adjective}, that one is {adjective}.",
    ),
    "event": (
        "request {#####} done in {###} ms",
        "node {coin} joined the {noun} pool",
        "retry {1-5} of 5 for {thing} {###}",
        "queue length {##}, oldest {##} s",
        "user {login} logged in from {coin}",
        "wrote {####} bytes to /{noun}/{thing}.log",
        "{thing} sensor reads {##}.{#}",
        "job {adjective}-{thing} finished",
    ),
    "log": ("{time}:{sixty} {level} {service}: {event}",),
    "log path": ("/{noun}/{coin}.log",),
    # facts: the value follows
    "told": (
        "The {attribute} for {place} is",
        "Please remember that the {attribute} for {place} is",
        "Note that the {attribute} of {place} is",
        "By the way, the {attribute} for {place} is",
        "For {place} the {attribute} is",
        "They told me that the {attribute} of {place} is",
    ),
    "told in a log": (
        "the {attribute} for {place} was set to",
        "the {attribute} for {place} is",
    ),
    "changed": (
        "Correction: the {attribute} for {place} is now",
        "Update: the {attribute} for {place} changed to",
        "From today the {attribute} for {place} is",
        "The new {attribute} for {place} is",
    ),
    "registry": ("{time}:{sixty} INFO registry: ",),
    "alias": ("{group} {animal}",),
    "group": ("project", "team", "unit"),
    "alias told": (
        "By the name {alias} we mean {place}.",
        "Here {alias} is our name for {place}.",
        "Remember that {alias} stands for {place}.",
    ),
    # turns
    "system": (
        "You are a careful agent. Answer from the conversation.",
        "You are a careful agent. Answer from the conversation. {filler}",
    ),
    "noted": ("Noted.", "Noted.", "Understood.", "Thanks, I will remember that."),
    "heard": ("I see.", "I see.", "That sounds fine.", "Thanks for telling me."),
    "look": (
        "Please check {path} now.",
        "Open {path} and look for problems.",
        "Read {path} for me.",
    ),
    "tool": ("read_file", "read_file", "tail_log"),
    "call": (
        "<think>\nI need to look at {path} first.\n</think>\n\n<tool_call>\n<function={tool}>\n"
        "<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>",
    ),
    "looked": ("I read {path}. There is nothing unusual.",),
    "question": (
        "What is the {attribute} for {place}?",
        "Can you tell me the {attribute} for {place}?",
        "Remind me of the {attribute} for {place}.",
        "I need the {attribute} for {place}.",
    ),
    "answer": ("The {attribute} for {place} is",),
    "no record": ("I have no record of the {attribute} for {place}.",),
}

_SLOT: Final = re.compile(r"\{([^{}]+)\}")


class Speaker:
    """Says things at random: the same seed says the same."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, share: float) -> bool:
        return self._random() < share

    def below(self, n: int) -> int:
        """One of 0 to n - 1."""
        return int(self._random() * n)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def say(self, name: str, **given: str) -> str:
        """One of FORMS[name], its slots filled: with what is given, else at random."""

        def fill(slot: re.Match[str]) -> str:
            return self._fill(slot[1], given)

        return _SLOT.sub(fill, self.pick(FORMS[name]))

    def _fill(self, slot: str, given: dict[str, str]) -> str:
        if slot in given:
            return given[slot]
        if slot in FORMS:
            return self.say(slot, **given)
        if slot[0] == "#":
            return f"{self.below(10 ** len(slot)):0{len(slot)}d}"
        if slot[0].isdigit():
            low, high = map(int, slot.split("-"))
            return str(low + self.below(high - low + 1))
        return self.say(slot.lower(), **given).capitalize()
