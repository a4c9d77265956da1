"""Prompt text to tokens, segment by segment, so that a prompt seen before costs next to nothing.

llama.cpp searches a text for special tokens before all else, and tokenises what stands between two
of them by itself. So a text may be cut at a special token that is found wherever its text stands,
and the tokens of the whole are those of its segments, one behind the other. Segments are looked up
by their text: an edit anywhere costs the segments that it touches.

Source: llama_vocab::impl::tokenizer_st_partition and ::tokenize, for BPE and SPM. Other tokenizers
get the whole text at once.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem.llama.vocab import Vocab

__all__ = ["SegmentTokenizer", "TokenizedText", "find_cuts"]

I32 = NDArray[np.int32]

KINDS: Final = ("gpt2", "gemma4", "llama")
"""Tokenizers whose fragments do not see each other: BPE, BPE with SPM's spaces, and SPM."""

PRINTABLE: Final = range(0x21, 0x7F)
"""Signs that are no space in any locale."""

SEGMENT_BYTES: Final = 600
"""What a remembered segment takes beside text and arrays."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """tokens: int32 [n]. ends: int32 [n], byte of the text where each token ends; what a tokenizer
    puts in front of a segment ends at or below the segment's start. None if the pieces of the
    tokens do not join to the text.
    """

    tokens: I32
    ends: I32 | None


@dataclass(frozen=True, slots=True)
class _Segment:
    """ends: from the start of the segment, of n_bytes."""

    tokens: I32
    ends: I32 | None
    n_bytes: int

    def cost(self, text: str) -> int:
        """Bytes that it takes to remember."""
        n_text = len(text) if text.isascii() else 4 * len(text)
        return n_text + 2 * self.tokens.nbytes + SEGMENT_BYTES


class SegmentTokenizer:
    """Tokenises prompts for one vocabulary. Several threads may use it at a time.

    source: text that names special tokens, such as a chat template: only those are cut at.
    limit_bytes: what is remembered takes at most this; what was not used for longest leaves first.
    """

    def __init__(self, vocab: Vocab, source: str, *, limit_bytes: int = 64 << 20) -> None:
        self._vocab = vocab
        self._limit_bytes = limit_bytes
        self._head = vocab.token_array("", add_special=True)
        self._cuts: dict[str, _Segment] = {}
        if vocab.kind in KINDS and not vocab.adds_eos:
            ends = [vocab.piece(token) for token in (vocab.bos, vocab.eos) if token >= 0]
            for text, token in find_cuts(vocab.specials(), [source.encode(), *ends]).items():
                n_bytes = len(text.encode())
                self._cuts[text] = _Segment(
                    np.array([token], np.int32), np.array([n_bytes], np.int32), n_bytes
                )
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._cuts)) + ")")
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Segment] = OrderedDict()
        self.kept_bytes = 0

    def tokenize(self, text: str) -> TokenizedText:
        """The same tokens as those of the whole text, with what the model wants at its start."""
        if not self._cuts:
            tokens = self._vocab.token_array(text, add_special=True)
            return TokenizedText(tokens, self._vocab.piece_ends(tokens, _encoded(text)))
        parts = self._pattern.split(text)  # text, cut, text, ..., cut, text
        segments = [part for part in parts[::2] if part]
        known = self._look_up(segments)
        missing = list(dict.fromkeys(text for text in segments if text not in known))
        if missing:
            made = dict(zip(missing, self._make(missing), strict=True))
            known |= made
            self._remember(made)
        cuts = self._cuts
        return _joined(
            self._head,
            [cuts[part] if i & 1 else known[part] for i, part in enumerate(parts) if part],
        )

    def _look_up(self, texts: Iterable[str]) -> dict[str, _Segment]:
        found: dict[str, _Segment] = {}
        with self._lock:
            kept = self._kept
            for text in texts:
                segment = kept.get(text)
                if segment is not None:
                    found[text] = segment
                    kept.move_to_end(text)
        return found

    def _make(self, texts: Sequence[str]) -> Iterator[_Segment]:
        """All in one call, a cut between each two: many small ones cost twice as much."""
        between, cut = next(iter(self._cuts.items()))
        tokens = self._vocab.token_array(between.join(texts))
        bounds = np.flatnonzero(tokens == cut.tokens[0])
        for text, part in zip(texts, np.split(tokens, bounds), strict=True):
            data = _encoded(text)
            own = part if text is texts[0] else part[1:]
            ends = self._vocab.piece_ends(own, data)
            yield _Segment(own.copy(), None if ends is None else ends.clip(min=0), len(data))

    def _remember(self, segments: Mapping[str, _Segment]) -> None:
        with self._lock:
            for text, segment in segments.items():
                if text not in self._kept:
                    self._kept[text] = segment
                    self.kept_bytes += segment.cost(text)
            while self.kept_bytes > self._limit_bytes:
                text, segment = self._kept.popitem(last=False)
                self.kept_bytes -= segment.cost(text)


def find_cuts(
    specials: Mapping[int, tuple[bytes, bool]], named_in: Sequence[bytes]
) -> dict[str, int]:
    """Of the special tokens (Vocab.specials) those whose text is that token wherever it stands.

    - It shares no byte with an occurrence of another one, or of itself: neither holds the other,
      and none ends as the other begins. Then nothing can take part of it away, whatever is searched
      first.
    - Spaces beside it stay, and it begins and ends with none, so that none of it vanishes beside a
      token that takes spaces away.

    named_in: only those that stand in one of these texts.
    """
    texts = [text for text, _ in specials.values()]
    beginnings = {text[:n] for text in texts for n in range(1, len(text))}
    endings = {text[-n:] for text in texts for n in range(1, len(text))}
    cuts: dict[str, int] = {}
    for token, (text, strips) in specials.items():
        if strips or not any(text in name for name in named_in):
            continue
        if not (text and text[0] in PRINTABLE and text[-1] in PRINTABLE and _is_utf8(text)):
            continue
        if texts.count(text) > 1 or any(
            other != text and (other in text or text in other) for other in texts
        ):
            continue
        inner = range(1, len(text))
        if any(text[-n:] in beginnings or text[:n] in endings for n in inner):
            continue
        cuts[text.decode()] = token
    return cuts


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _joined(head: I32, segments: list[_Segment]) -> TokenizedText:
    tokens = np.concatenate([head, *(segment.tokens for segment in segments)])
    ends = [segment.ends for segment in segments if segment.ends is not None]
    if len(ends) < len(segments):
        return TokenizedText(tokens, None)
    sizes = np.array([segment.n_bytes for segment in segments], np.int32)
    counts = [len(segment.tokens) for segment in segments]
    starts = np.repeat(np.cumsum(sizes, dtype=np.int32) - sizes, counts)
    return TokenizedText(
        tokens, np.concatenate([np.zeros_like(head), *ends]) + np.pad(starts, (len(head), 0))
    )
