"""Texts that are far too long: what is said of them unseen holds for the whole."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from nemo_aligner.errors import DataError
from nemo_aligner.text import tokenizer as tokenizers
from nemo_aligner.text.contract import OverlongError
from nemo_aligner.text.long_texts import TextBounds
from nemo_aligner.text.tokenizer import load_tokenizer
from tests import tiny
from tests.serving.fake_server import CONTRACT

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [
    "river",
    "stone",
    "don't",
    "I'll",
    "12345",
    "e\u0301",
    "Ω",
    "日本語",
    "🙂",
    "\n",
    "\n\n\n",
    "\t",
    "...",
    "!?",
    "<|im_end|>",
    "<|im_start|>",
    " ",
    "  ",
    "\n",
    "a b",
    "'s it",
    "\u0301",
]


def splits() -> dict[str, Any]:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt2": plain,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain]),
        "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), raw]),
        "spaced": pre_tokenizers.ByteLevel(add_prefix_space=True),
    }


def make_tokenizer(folder: Path, split: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([tiny.TEXT, " ".join(PIECES)] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def make_text(rng: random.Random) -> str:
    separators = ["", " ", " ", " "]
    words = tiny.WORDS + PIECES
    return "".join(rng.choice(separators) + rng.choice(words) for _ in range(rng.randint(1, 600)))


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as_it_is", "nfc"])
@pytest.mark.parametrize("name", list(splits()))
def test_an_end_has_the_ids_that_it_has_in_the_whole(tmp_path, name, normalizer):
    tokenizer = make_tokenizer(tmp_path, splits()[name], normalizer)
    rng, cut = random.Random(3), 0
    for _ in range(300):
        text, wanted = make_text(rng), rng.randint(1, 30)
        whole = tokenizer.encode(text)
        end = tokenizer.bounds.encode_end(tokenizer.encode, text, wanted)
        most = tokenizer.bounds.most_bytes(len(whole))
        assert most is not None
        assert len(text.encode()) <= most
        if end is not None:
            assert len(end) >= wanted
            assert whole[-len(end) :] == end
            cut += len(end) < len(whole)
    assert cut > 100


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("beginning", ["", "<|im_start|>", "<|im_start|> x", "<|im_start|>" * 2])
def test_a_cut_text_is_what_the_whole_is_cut_to(tmp_path, add_bos, add_eos, beginning):
    tokenizer = make_tokenizer(tmp_path, splits()["smollm"])
    contract = dataclasses.replace(
        CONTRACT,
        add_bos=add_bos,
        add_eos=add_eos,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        seq_length=16,
    )
    rng = random.Random(5)
    for _ in range(50):
        text = beginning + make_text(rng) + rng.choice(["", "<|im_end|>", " river stone"])
        try:
            wanted = contract.fit(contract.tokenize(tokenizer, [text])[0])
        except DataError as error:
            with pytest.raises(DataError, match=str(error)):
                contract.encode(tokenizer, text)
        else:
            assert contract.encode(tokenizer, text) == wanted


def test_a_text_that_cannot_fit_is_refused_untokenized(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(tmp_path, splits()["gpt2"])
    contract = dataclasses.replace(CONTRACT, overlong="error", seq_length=16)
    most = tokenizer.bounds.most_bytes(16)
    assert most is not None
    with pytest.raises(OverlongError, match=r"got \d+ tokens, wanted at most 16"):
        contract.encode(tokenizer, "1" * most)

    def encode_batch(texts):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    with pytest.raises(OverlongError, match=rf"{most + 1} bytes, wanted at most 16 tokens.*{most}"):
        contract.encode(tokenizer, "1" * (most + 1))


def test_a_long_text_is_cut_by_its_end_alone(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(tmp_path, splits()["gpt2"])
    contract = dataclasses.replace(CONTRACT, seq_length=16)
    seen = []
    plain = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: seen.append(len(text)) or plain(text))
    assert contract.encode(tokenizer, "river stone " * 100_000).truncated
    assert sum(seen) < 1000


CONTENT: dict[str, Any] = {
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
    "model": {"type": "BPE", "vocab": {"abc": 0}},
    "added_tokens": [{"content": "<s>é"}],
}


@pytest.mark.parametrize(
    ("change", "bounds"),
    [
        ({}, TextBounds(5, True)),
        ({"normalizer": {"type": "NFC"}}, TextBounds(15, True)),
        ({"normalizer": {"type": "Lowercase"}}, TextBounds(None, False)),
        ({"model": {"type": "WordLevel", "vocab": {}}}, TextBounds(None, False)),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "dropout": 0.1}}, TextBounds(5, False)),
        ({"pre_tokenizer": None}, TextBounds(None, False)),
        ({"pre_tokenizer": {"type": "Whitespace"}}, TextBounds(None, False)),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, TextBounds(5, False)),
        ({"added_tokens": [{"content": "<x>", "rstrip": True}]}, TextBounds(None, False)),
        ({"added_tokens": [{"content": "a b"}]}, TextBounds(3, False)),
        ({"added_tokens": [{"content": "ab", "single_word": True}]}, TextBounds(3, False)),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "a b"}},
                        {"type": "ByteLevel", "use_regex": True},
                    ],
                }
            },
            TextBounds(5, False),
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "behavior": "Removed", "pattern": {"String": " "}},
                        {"type": "ByteLevel"},
                    ],
                }
            },
            TextBounds(None, False),
        ),
    ],
)
def test_nothing_is_said_of_a_tokenizer_that_may_do_otherwise(change, bounds):
    assert TextBounds.of({**CONTENT, **change}) == bounds
