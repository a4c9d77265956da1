"""The recall model in PyTorch: it is what llama.cpp runs, and it can be trained.

Needs the extra "train".
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from recall_heldout import MODEL, load

from kvmem.config import DraftConfig, EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.draft import Drafter
from kvmem.engine.engine import Engine
from kvmem.engine.events import TokenEvent
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.llama.context import Context
from kvmem.llama.model import Model

torch = pytest.importorskip("torch", reason='needs torch: pip install "kvmem[train]"')
pytest.importorskip("tokenizers", reason='needs tokenizers: pip install "kvmem[train]"')

import gguf
import recall_gguf
import recall_train
from recall_qwen35 import RESET, Qwen35, Shape, delta_rule
from recall_score import render, score
from recall_tokens import Vocabulary, training_row

pytestmark = pytest.mark.slow

I32 = NDArray[np.int32]
SHAPE = Shape()
SMALL = Shape(
    n_embd=64, n_layers=2, attention_interval=2, n_ff=128, n_heads=2, n_kv_heads=1, head_dim=32,
    delta_heads=2, delta_dim=32,
)  # fmt: skip
BATCH = 256

# Sums run in another order, in float32: 1.5e-3 was the most on three prompts.
F32_TOLERANCE = 5e-3
# llama.cpp rounds what it multiplies with Q8_0 weights to Q8_0 too: 0.11 was the most, over tokens
# of a probability above 1e-3.
Q8_TOLERANCE = 0.3


@pytest.fixture(scope="module")
def model() -> Iterator[Qwen35]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield recall_gguf.load(MODEL)
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(MODEL)


@pytest.fixture(scope="module")
def prompts(vocabulary: Vocabulary) -> list[list[int]]:
    """Held-out histories with a question and its answer."""
    tokenize = vocabulary.tokenizer()
    texts = []
    for item in load((1024,), limit=3):
        question = item["questions"][0]
        texts.append(
            f"{render(item)}<|im_start|>user\n{question['text']}<|im_end|>\n"
            f"<|im_start|>assistant\n{question['answer']}<|im_end|>\n"
        )
    return [tokenize(text) for text in texts]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def run_torch(model: Qwen35, tokens: list[int]) -> NDArray[np.float64]:
    """Log probabilities after each token, [t, n_vocab]."""
    with torch.no_grad():
        logits = model.head(model(torch.tensor([tokens])))[0]
    return log_softmax(logits.numpy())


def run_llama(path: Path, tokens: list[int], kv: str, flash_attn: str) -> NDArray[np.float64]:
    """The same by llama.cpp, its cache in this type."""
    rows = []
    with (
        Model(path) as loaded,
        Context(
            loaded, n_ctx=2048, n_batch=BATCH, n_ubatch=BATCH, type_k=kv, type_v=kv,
            flash_attn=flash_attn,
        ) as context,
    ):  # fmt: skip
        for start in range(0, len(tokens), BATCH):
            part = np.array(tokens[start : start + BATCH], np.int32)
            pos = np.arange(start, start + len(part), dtype=np.int32)
            context.decode(part, pos, outputs="all")
            rows += [context.logits(i).copy() for i in range(len(part))]
    return log_softmax(np.stack(rows))


def test_it_is_what_llama_cpp_runs(model: Qwen35, prompts: list[list[int]], tmp_path: Path) -> None:
    """The weights of the repository's file, and the same ones exported in F32."""
    exact = tmp_path / "f32.gguf"
    recall_gguf.save(model, exact, MODEL, "F32")
    for tokens in prompts:
        ours = run_torch(model, tokens)
        theirs = run_llama(exact, tokens, "f32", "off")
        assert np.abs(ours - theirs).max() < F32_TOLERANCE
        top = np.sort(ours, -1)
        sure = top[:, -1] - top[:, -2] > 2 * F32_TOLERANCE
        assert sure.mean() > 0.8
        assert np.array_equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure])

        rounded = run_llama(MODEL, tokens, "f16", "on")
        likely = ours > np.log(1e-3)
        assert np.abs(ours - rounded)[likely].max() < Q8_TOLERANCE
        sure = top[:, -1] - top[:, -2] > 2 * Q8_TOLERANCE
        assert sure.mean() > 0.2
        assert np.array_equal(ours.argmax(-1)[sure], rounded.argmax(-1)[sure])


@pytest.mark.parametrize("weights, kv", [("F32", "f32"), ("Q8_0", "f16")])
def test_its_drafts_are_those_of_llama_cpp(
    model: Qwen35,
    vocabulary: Vocabulary,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: recall_gguf.WeightType,
    kv: KvType,
) -> None:
    """What kvmem's MTP head proposes while it answers, three tokens deep."""
    proposed: list[tuple[int, int, list[int]]] = []
    propose = Drafter.propose

    def listen(self: Drafter, cells: I32, token: I32, pos: I32, n: int) -> I32:
        drafts = propose(self, cells, token, pos, n)
        proposed.append((int(pos[0]), int(token[0]), drafts.tolist()))
        return drafts

    monkeypatch.setattr(Drafter, "propose", listen)
    path = tmp_path / "model.gguf"
    recall_gguf.save(model, path, MODEL, weights)
    config = EngineConfig(
        model=ModelConfig(path=path, n_threads=1),
        memory=MemoryConfig(
            workspace_tokens=2048, budget_tokens=2048, reserve_tokens=128, block_tokens=32,
            host_limit_bytes=64 << 20, type_k=kv, type_v=kv,
        ),
        draft=DraftConfig(spec_type="draft-mtp", n_max=3, type_k=kv, type_v=kv),
    )  # fmt: skip
    greedy = GenerateParams(sampling=SamplingParams(temperature=0.0), max_tokens=64)
    begins = vocabulary.tokenizer()("<|im_start|>assistant\n")
    n_compared = 0
    for text in prompts:
        n_asked = max(i for i in range(len(text)) if text[i : i + len(begins)] == begins)
        asked = text[: n_asked + len(begins)]
        proposed.clear()
        with Engine(config) as engine:
            session = engine.session()
            events = list(session.generate(Prompt(tokens=tuple(asked)), greedy))
            session.close()
        decided = asked + [event.token for event in events if isinstance(event, TokenEvent)]
        with torch.no_grad():
            hidden = model(torch.tensor([decided]))
        for at, token, drafts in proposed:
            assert decided[at : at + 1] in ([token], [])
            chain = [*decided[:at], token]
            for depth, draft in enumerate(drafts, 1):
                # rows of tokens that are not decided are not looked at
                rows = torch.zeros(1, len(chain), SHAPE.n_embd)
                rows[:, :at] = hidden[:, :at]
                with torch.no_grad():
                    row = model.drafts(torch.tensor([chain]), rows, depth)[-1][0, -1]
                assert int(model.head(row).argmax()) == draft
                chain.append(draft)
                n_compared += 1
    assert n_compared >= 30


def test_export_gives_the_file_back(
    model: Qwen35, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "again.gguf"
    recall_gguf.save(model, path, MODEL)
    first, second = gguf.GGUFReader(MODEL), gguf.GGUFReader(path)
    weights = {tensor.name: tensor for tensor in second.tensors}
    assert len(weights) == len(first.tensors)
    for tensor in first.tensors:
        assert tensor.tensor_type == weights[tensor.name].tensor_type
        # ssm_a goes through a logarithm
        exact = not tensor.name.endswith("ssm_a")
        np.testing.assert_allclose(
            tensor.data, weights[tensor.name].data, rtol=0 if exact else 1e-6, atol=0
        )
    assert first.fields.keys() == second.fields.keys()
    for key, field in first.fields.items():
        assert field.contents() == second.fields[key].contents(), key
    tokens = prompts[0][:400]
    before, after = (run_llama(p, tokens, "f16", "on") for p in (MODEL, path))
    assert np.abs(before - after).max() < 1e-3


def test_it_answers_as_in_kvmem(model: Qwen35, vocabulary: Vocabulary) -> None:
    """Where kvmem answers all questions (test_recall_hybrid.py), and its drafts are right."""
    found = score(model, load((1024,), limit=2), vocabulary.tokenizer())
    assert found.asked.total() == found.right.total() == 10
    assert all(found.accepted[place] / found.drafted > 0.95 for place in range(3))


def test_a_blind_model_knows_nothing(model: Qwen35, vocabulary: Vocabulary) -> None:
    """The control: attention that reads nothing."""
    blind = recall_gguf.load(MODEL)
    with torch.no_grad():
        for name, weight in blind.named_parameters():
            if name.endswith("attn_v.weight"):
                weight.zero_()
    found = score(blind, load((1024,), limit=1), vocabulary.tokenizer())
    assert sum(found.right[kind] for kind in ("fact", "update", "hop")) == 0


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 200])
def test_the_delta_rule_in_chunks_is_the_recurrence(n_tokens: int) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    q, k, v = torch.randn(3, 2, n_tokens, 3, 8, generator=generator).unbind(0)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = -torch.rand(2, n_tokens, 3, generator=generator)
    log_decay[:, n_tokens // 2] = -RESET
    beta = torch.rand(2, n_tokens, 3, generator=generator)
    state = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    expected = []
    for t in range(n_tokens):
        key, value, query = k[:, t].double(), v[:, t].double(), q[:, t].double()
        state = state * log_decay[:, t, :, None, None].double().exp()
        missing = value - torch.einsum("bhkv,bhk->bhv", state, key)
        state = state + torch.einsum("bhk,bhv->bhkv", key * beta[:, t, :, None].double(), missing)
        expected.append(torch.einsum("bhkv,bhk->bhv", state, query) / 8**0.5)
    ours = delta_rule(q, k, v, log_decay, beta)
    torch.testing.assert_close(ours.double(), torch.stack(expected, 1), rtol=0, atol=1e-5)


def test_a_reset_forgets(vocabulary: Vocabulary) -> None:
    """Behind a reset a DeltaNet layer knows nothing of before, but for its convolution."""
    torch.manual_seed(0)
    block = Qwen35(SMALL).blk[0]
    first, second = torch.randn(2, 1, 100, SMALL.n_embd)
    second[:, 48:] = first[:, 48:]
    resets = torch.zeros(1, 100, dtype=torch.bool)
    resets[:, 52] = True
    with torch.no_grad():
        kept = (block(first, None) - block(second, None))[:, 52:].abs().max()
        lost = (block(first, resets) - block(second, resets))[:, 52:].abs().max()
    assert kept > 1e-4
    assert lost < 1e-6


def test_training_lowers_the_loss(vocabulary: Vocabulary) -> None:
    torch.manual_seed(0)
    trainer = recall_train.Trainer(Qwen35(SMALL))
    tokenize, rng = vocabulary.tokenizer(), np.random.default_rng(0)
    losses = []
    for step in range(24):
        rows = [training_row(4 * step + i, 128, tokenize, vocabulary.lengths) for i in range(4)]
        batch = recall_train.Batch(
            torch.from_numpy(np.stack([row.tokens for row in rows])),
            torch.from_numpy(np.stack([row.kinds for row in rows])),
            torch.from_numpy(np.stack([recall_train.draw_resets(128, rng) for _ in rows])),
        )
        loss = trainer.step(batch, rate=4e-3, draft_depth=3)
        losses.append((float(loss.trunk), float(loss.draft)))
        assert np.isfinite([*losses[-1], float(loss.gradient)]).all()
    # log(1792) is 7.49: it begins with nothing, and learns in 24 steps what is common
    assert losses[0] == pytest.approx((7.49, 7.49), abs=0.3)
    assert max(losses[-1]) < 5.5


def test_a_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of two steps each: files, log and counters go on."""
    phase = recall_train.Phase(until=1.0, rate=1e-3, lengths={128: 1.0}, draft_depth=2)
    monkeypatch.setattr(recall_train, "SCHEDULE", (phase,))
    monkeypatch.setattr(recall_train, "Shape", lambda: SMALL)
    settings = ["--batch-tokens=512", "--workers=0", "--evaluate=0"]
    parse = recall_train.make_parser().parse_args
    recall_train.train(parse([str(tmp_path), "--steps=2", *settings]))
    assert recall_gguf.load(tmp_path / "recall.gguf").shape == SMALL
    recall_train.train(parse([str(tmp_path), "--steps=4", "--resume", *settings]))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (state["n_steps"], state["n_tokens"]) == (4, 4 * 512)
    with Model(tmp_path / "recall.gguf") as loaded:
        assert loaded.n_layer_nextn == 1
