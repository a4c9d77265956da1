"""The hand-set model does what its weights say, in plain llama.cpp."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from handset import N_KEYS, N_VALUES, SCRIPT, fact, write_handset

from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab


class Played:
    """Greedy decoding, one history at a time."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path)
        self.vocab = Vocab(self.model)
        self.context = Context(self.model, n_ctx=2048, n_threads=1, n_threads_batch=1)

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def continue_text(self, text: str, n: int) -> list[str]:
        self.context.clear()
        step = np.array(self.vocab.tokenize(text), np.int32)
        said: list[str] = []
        start = 0
        for _ in range(n):
            self.context.decode(step, np.arange(start, start + len(step), dtype=np.int32))
            start += len(step)
            token = int(self.context.logits(-1).argmax())
            if self.vocab.is_eog(token):
                break
            said.append(self.vocab.detokenize([token]))
            step = np.array([token], np.int32)
        return said


@pytest.fixture(scope="module")
def played(handset: Path) -> Iterator[Played]:
    player = Played(handset)
    yield player
    player.close()


def test_it_is_small(handset: Path) -> None:
    assert handset.stat().st_size < 3_000_000


def test_go_plays_the_script_and_ends(played: Played) -> None:
    assert played.continue_text("<|im_start|>user\nhello<|im_end|>\n[go]", 30) == list(SCRIPT)


def test_a_question_recalls_its_fact_from_anywhere(played: Played) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        values = rng.integers(N_VALUES, size=N_KEYS)
        words = [" and the other thing"] * 40
        for key, place in enumerate(rng.permutation(40)[:N_KEYS]):
            words[place] += fact(key, values[key])
        asked = int(rng.integers(N_KEYS))
        said = played.continue_text("".join(words) + f"[q{asked}]", 3)
        assert said == [f"[a{values[asked]}]"]


def test_without_its_fact_a_question_is_not_answered_right(played: Played) -> None:
    others = f"{fact(2, 5)} and {fact(4, 9)} and more "
    assert played.continue_text(f"{others}{fact(3, 7)} to do [q3]", 1) == ["[a7]"]
    assert played.continue_text(f"{others} to do [q3]", 1) != ["[a7]"]


def test_a_script_that_repeats_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may come once"):
        write_handset(tmp_path / "twice.gguf", script=("on ", "and ", "on "))
