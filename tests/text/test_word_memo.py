"""Words that are looked up, and beginnings that are tokenized once, change no id."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from nemo_aligner.text import word_memo
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.shared_text import common_start
from nemo_aligner.text.tokenizer import Tokenizer
from nemo_aligner.text.word_memo import WordMemo
from tests import tiny
from tests.contracts import Contracts
from tests.text.test_long_texts import make_text, make_tokenizer, splits


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as_it_is", "nfc"])
@pytest.mark.parametrize("name", list(splits()))
def test_looked_up_words_have_the_ids_of_the_whole(
    tmp_path: Path, name: str, normalizer: Any
) -> None:
    tokenizer = make_tokenizer(tmp_path, splits()[name], normalizer)
    assert tokenizer.bounds.cuts_at_words
    rng, words = random.Random(4), tokenizer.words
    for _ in range(20):
        texts = ["", *(make_text(rng) for _ in range(20))]
        assert [found.ids.tolist() for found in words.encode(texts)] == tokenizer.encode_batch(
            texts
        )


def test_only_new_words_are_tokenized_and_few_are_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(word_memo, "_MOST_WORDS", 1)
    words.encode(["a tree"])
    words.encode(["a tree"])
    assert asked[-3:] == [[" tree"], ["a"], [" tree"]]


def test_a_tokenizer_of_another_kind_is_given_whole_texts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, pre_tokenizers.Metaspace())
    assert not tokenizer.bounds.cuts_at_words
    texts = ["the cat sings", "a dog"]
    assert [
        found.ids.tolist() for found in tokenizer.words.encode(texts)
    ] == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("template", ["chatml", "plain", "llama3"])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "metaspace"])
def test_records_have_the_ids_and_reply_lengths_of_their_texts(
    tmp_path: Path, template: str, name: str
) -> None:
    split = pre_tokenizers.Metaspace() if name == "metaspace" else splits()[name]
    tokenizer = make_tokenizer(tmp_path, split)
    contract: ScoringContract = Contracts(tokenizer)(template=template)
    rng = random.Random(6)
    records = [_record(rng) for _ in range(60)]
    records += [[text] for text in ("the cat", make_text(rng)) for _ in range(2)]
    found = contract.tokenize_records(tokenizer, records)
    assert [[each.token_ids for each in record] for record in found] == [
        contract.tokenize(tokenizer, record) for record in records
    ]
    assert [[each.reply_tokens for each in record] for record in found] == [
        contract.count_reply_tokens(tokenizer, record) for record in records
    ]


def _record(rng: random.Random) -> list[Any]:
    """Completions of one prompt, some of which begin alike; or raw texts."""
    prompt, begins = tiny.sentence(rng), rng.choice(["", "the cat ", tiny.sentence(rng) + " "])
    replies = [begins + tiny.sentence(rng) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        return [f"{prompt}\n{reply}" for reply in replies]
    return [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        for reply in replies
    ]


def test_the_common_start_of_two_texts() -> None:
    for first, second, wanted in (
        ("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("abc", "abcd", 3),
        ("xbc", "abc", 0), ("ab" * 50 + "x", "ab" * 60, 100),
    ):  # fmt: skip
        assert common_start(first, second) == common_start(second, first) == wanted
