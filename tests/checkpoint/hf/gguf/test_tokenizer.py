"""A GGUF file's tokenizer is the one that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.errors import CheckpointError
from tests import families, tiny
from tests.checkpoint.hf.gguf.writing import (
    TEXTS,
    sentencepiece,
    write_gguf,
)


def carried_tokenizer(source: Path, folder: Path) -> Any:
    from nemo_aligner.checkpoint.hf.source import open_source
    from nemo_aligner.text.tokenizer import load_tokenizer

    open_source(source).save_tokenizer(folder / source.stem)
    return load_tokenizer(folder / source.stem)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "nemotron"])
def test_the_tokenizer_is_the_one_that_was_written(case: str, tmp_path: Path) -> None:
    from nemo_aligner.text.tokenizer import load_tokenizer

    folder = tmp_path / "hf"
    families.write_hf_checkpoint(folder, case)
    wanted = load_tokenizer(folder)
    for name, bos, eos in (("unsaid", None, None), ("bos", True, False), ("eos", False, True)):
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        carried = carried_tokenizer(
            write_gguf(tmp_path / f"{name}.gguf", folder, **flags), tmp_path
        )
        assert (carried.adds_bos, carried.adds_eos) == (bool(bos), bool(eos))
        assert carried.chat_template == tiny.CHATML
        assert (carried.bos_token, carried.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert carried.vocab_size == wanted.vocab_size
        assert carried.encode_batch(TEXTS) == wanted.encode_batch(TEXTS)


def test_an_old_transformers_makes_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    tiny.write_hf_checkpoint(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"got transformers 5\.9\.1.*wanted 5\.23 or newer"):
        carried_tokenizer(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf"), tmp_path)


@pytest.mark.parametrize("has_prefix", [None, False], ids=["prefix", "no_prefix"])
@pytest.mark.parametrize("case", ["llama", "mistral", "nemotron", "gemma", "gemma2"])
def test_a_sentencepiece_vocabulary(case: str, has_prefix: bool | None, tmp_path: Path) -> None:
    from transformers import GemmaTokenizer, LlamaTokenizer

    is_gemma = case.startswith("gemma")
    bos, eos, *others = ("<bos>", "<eos>", "<pad>") if is_gemma else ("<s>", "</s>")
    vocabulary, merges = sentencepiece([*others, eos, bos, "<unk>"])
    kind = GemmaTokenizer if is_gemma else LlamaTokenizer
    rule = {} if is_gemma or has_prefix is None else {"add_prefix_space": has_prefix}
    original = kind(vocab=vocabulary, merges=merges, **rule)

    def write_vocabulary(writer: Any, source: Path, vocab_size: int) -> None:
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        assert len(tokens) <= vocab_size
        types = {"<unk>": 2, **dict.fromkeys([*others, bos, eos], 3)}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types(
            [types.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
        )
        writer.add_bos_token_id(vocabulary[bos])
        writer.add_eos_token_id(vocabulary[eos])
        writer.add_unk_token_id(vocabulary["<unk>"])

    families.write_hf_checkpoint(tmp_path / "hf", case)
    source = write_gguf(
        tmp_path / "spm.gguf",
        tmp_path / "hf",
        write_tokenizer=write_vocabulary,
        **{"tokenizer.ggml.add_space_prefix": has_prefix},
    )
    carried = carried_tokenizer(source, tmp_path)
    # Nothing is said on BOS, which such a vocabulary has.
    assert (carried.adds_bos, carried.adds_eos) == (True, False)
    for text in [*TEXTS, "  two  birds, \u00e9", f"a\nb {eos} the"]:
        assert carried.encode(text) == original.encode(text, add_special_tokens=False), text


def test_rules_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    families.write_hf_checkpoint(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "tokenizer.json"

    def carried(cut: str) -> Any:
        changes = {"tokenizer.ggml.pre": cut}
        return carried_tokenizer(
            write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **changes), tmp_path
        )

    # SmolLM cuts every digit off, also from the space before it, so that two spaces stay one token.
    assert not carried("smollm").adds_bos
    cut = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).pre_tokenizer
    pieces = [piece for piece, _ in cut.pre_tokenize_str("a  12")]
    assert pieces == ["a", "\u0120\u0120", "1", "2"]

    # A word of Llama 3's vocabulary is one token, even where no merges lead to it.
    content = json.loads(file.read_text())
    word = content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    text = "".join(word).replace("\u0120", " ")
    assert len(carried("gpt-2").encode(text)) > 1
    got = carried("llama-bpe")
    assert got.encode(text) == [content["model"]["vocab"]["".join(word)]]
    assert got.adds_bos
