"""Bulk tokenization: ends of far too long texts, cached words, and shared prefixes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from nemo_aligner.contract import tokenizer as tokenizers
from nemo_aligner.contract.bulk_encoding import TextBounds, WordMemo, common_prefix_length
from nemo_aligner.contract.contract import OverlongError, ScoringContract
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.utils.errors import DataError
from tests.harness import tiny
from tests.harness.contracts import Contracts
from tests.serving.fake_server import CONTRACT

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [
    "river", "stone", "don't", "I'll", "12345", "e\u0301", "Ω", "日本語", "🙂", "\n", "\n\n\n",
    "\t", "...", "!?", "<|im_end|>", "<|im_start|>", " ", "  ", "\n", "a b", "'s it", "\u0301",
]  # fmt: skip


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tokenizers.Tokenizer]:
    """Tokenizers with every known way to split a text into words."""
    return {
        f"{name} {kind}": make_tokenizer(tmp_path_factory.mktemp(name), split, normalizer)
        for kind, normalizer in (("as it is", None), ("nfc", normalizers.NFC()))
        for name, split in splits().items()
    }


def test_long_text_has_at_its_end_the_ids_of_the_whole(
    made: dict[str, tokenizers.Tokenizer],
) -> None:
    for name, tokenizer in made.items():
        rng, cut = random.Random(3), 0
        for _ in range(150):
            text, wanted = make_text(rng), rng.randint(1, 30)
            whole = tokenizer.encode(text)
            end = tokenizer.bounds.encode_end(tokenizer.encode, text, wanted)
            most = tokenizer.bounds.most_bytes(len(whole))
            assert most is not None, name
            assert len(text.encode()) <= most, name
            if end is not None:
                assert len(end) >= wanted, name
                assert whole[-len(end) :] == end, name
                cut += len(end) < len(whole)
        assert cut > 50, name


def test_long_text_is_cut_to_what_the_whole_is_cut_to(
    made: dict[str, tokenizers.Tokenizer],
) -> None:
    tokenizer = made["smollm as it is"]
    begins = ("", "<|im_start|>", "<|im_start|> x", "<|im_start|>" * 2)
    for add_bos, add_eos, beginning in itertools.product((False, True), (False, True), begins):
        contract = dataclasses.replace(
            CONTRACT,
            add_bos=add_bos,
            add_eos=add_eos,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            seq_length=16,
        )
        rng = random.Random(5)
        for _ in range(25):
            text = beginning + make_text(rng) + rng.choice(["", "<|im_end|>", " river stone"])
            try:
                wanted = contract.fit(contract.tokenize(tokenizer, [text])[0])
            except DataError as error:
                with pytest.raises(DataError, match=str(error)):
                    contract.encode(tokenizer, text)
            else:
                assert contract.encode(tokenizer, text) == wanted, (add_bos, add_eos, beginning)


def test_long_text_that_cannot_fit_is_refused_untokenized(
    made: dict[str, tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = made["gpt2 as it is"]
    contract = dataclasses.replace(CONTRACT, overlong="error", seq_length=16)
    most = tokenizer.bounds.most_bytes(16)
    assert most is not None
    with pytest.raises(OverlongError, match=r"got \d+ tokens, wanted at most 16"):
        contract.encode(tokenizer, "1" * most)

    def encode_batch(texts: Any) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    with pytest.raises(OverlongError, match=rf"{most + 1} bytes, wanted at most 16 tokens.*{most}"):
        contract.encode(tokenizer, "1" * (most + 1))


def test_long_text_is_cut_by_its_end_alone(
    made: dict[str, tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = made["gpt2 as it is"]
    contract = dataclasses.replace(CONTRACT, seq_length=16)
    seen: list[int] = []
    plain = tokenizer.encode

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return plain(text)

    monkeypatch.setattr(tokenizer, "encode", encode)
    assert contract.encode(tokenizer, "river stone " * 100_000).truncated
    assert sum(seen) < 1000


CONTENT: dict[str, Any] = {
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
    "model": {"type": "BPE", "vocab": {"abc": 0}},
    "added_tokens": [{"content": "<s>é"}],
}


def sequence(behavior: str, pattern: dict[str, str]) -> dict[str, Any]:
    """Return a change to tokenizer.json that splits a text before the byte-level step."""
    split = {"type": "Split", "behavior": behavior, "pattern": pattern}
    parts = [split, {"type": "ByteLevel", "use_regex": True}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def test_bounds_say_nothing_of_a_tokenizer_that_may_do_otherwise() -> None:
    unknown = TextBounds(None, False)
    cases: list[tuple[dict[str, Any], TextBounds]] = [
        ({}, TextBounds(5, True)),
        ({"normalizer": {"type": "NFC"}}, TextBounds(15, True)),
        ({"normalizer": {"type": "Lowercase"}}, unknown),
        ({"model": {"type": "WordLevel", "vocab": {}}}, unknown),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "dropout": 0.1}}, TextBounds(5, False)),
        ({"pre_tokenizer": None}, unknown),
        ({"pre_tokenizer": {"type": "Whitespace"}}, unknown),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, TextBounds(5, False)),
        ({"added_tokens": [{"content": "<x>", "rstrip": True}]}, unknown),
        ({"added_tokens": [{"content": "a b"}]}, TextBounds(3, False)),
        ({"added_tokens": [{"content": "ab", "single_word": True}]}, TextBounds(3, False)),
        (sequence("Isolated", {"Regex": "a b"}), TextBounds(5, False)),
        (sequence("Removed", {"String": " "}), unknown),
    ]
    found = {str(change): TextBounds.of({**CONTENT, **change}) for change, _ in cases}
    assert found == {str(change): bounds for change, bounds in cases}


def test_words_that_are_looked_up_have_the_ids_of_the_whole(
    made: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    for name, tokenizer in made.items():
        assert tokenizer.bounds.cuts_at_words, name
        rng = random.Random(4)
        for _ in range(5):
            texts = ["", *(make_text(rng) for _ in range(20))]
            found = [each.ids.tolist() for each in tokenizer.words.encode(texts)]
            assert found == tokenizer.encode_batch(texts), name
    # A tokenizer that does not cut at words gets whole texts.
    tokenizer = make_tokenizer(tmp_path, pre_tokenizers.Metaspace())
    assert not tokenizer.bounds.cuts_at_words
    texts = ["the cat sings", "a dog"]
    found = [each.ids.tolist() for each in tokenizer.words.encode(texts)]
    assert found == tokenizer.encode_batch(texts)


def test_words_are_tokenized_once_and_few_are_kept(
    tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def encode_batch(texts: Any) -> list[list[int]]:
        asked.append(sorted(texts))
        return tokenizer.encode_batch(texts)

    words = WordMemo(encode_batch, cuts_at_words=True)
    long = "dog" * 10
    words.encode([f"the cat sings {long}"])
    words.encode([f"a cat sings {long} bird"])
    assert asked == [
        ["the"], [" cat", f" {long}", " sings"],
        ["a"], [" bird", f" {long}"],
    ]  # fmt: skip
    monkeypatch.setattr("nemo_aligner.contract.bulk_encoding._MAX_WORDS", 1)
    words.encode(["a tree"])
    words.encode(["a tree"])
    assert asked[-3:] == [[" tree"], ["a"], [" tree"]]


def test_records_have_the_ids_and_reply_lengths_of_their_texts(
    made: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    cutting = [made["gpt2 as it is"], made["llama3 as it is"]]
    whole = make_tokenizer(tmp_path, pre_tokenizers.Metaspace())
    templates = ("chatml", "plain", "llama3")
    for tokenizer, template in itertools.product((*cutting, whole), templates):
        contract: ScoringContract = Contracts(tokenizer)(template=template)
        rng = random.Random(6)
        records = [make_record(rng) for _ in range(60)]
        records += [[text] for text in ("the cat", make_text(rng)) for _ in range(2)]
        found = contract.tokenize_records(tokenizer, records)
        assert [[each.token_ids for each in record] for record in found] == [
            contract.tokenize(tokenizer, record) for record in records
        ]
        assert [[each.reply_tokens for each in record] for record in found] == [
            contract.count_reply_tokens(tokenizer, record) for record in records
        ]


def make_record(rng: random.Random) -> list[Any]:
    """Return completions of one prompt, some with a shared prefix, or raw texts."""
    prompt, begins = tiny.sentence(rng), rng.choice(["", "the cat ", tiny.sentence(rng) + " "])
    replies = [begins + tiny.sentence(rng) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        return [f"{prompt}\n{reply}" for reply in replies]
    return [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        for reply in replies
    ]


def test_common_start_of_two_texts() -> None:
    for first, second, wanted in (
        ("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("abc", "abcd", 3),
        ("xbc", "abc", 0), ("ab" * 50 + "x", "ab" * 60, 100),
    ):  # fmt: skip
        assert common_prefix_length(first, second) == common_prefix_length(second, first) == wanted
