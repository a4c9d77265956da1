"""A tokenizer without a model: every word, digit and mark of a text is one token."""

import re

PATTERN = re.compile(r"<\|\w+\|>|\d| ?[A-Za-z]+|\s|[^\w\s]|_")


class Words:
    """Ids in order of first use; `text` turns them back."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        del parse_special
        found = []
        for word in PATTERN.findall(text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join(self._words[token] for token in tokens)
