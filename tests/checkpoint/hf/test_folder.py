"""The files of an export: its tokenizer, template and pad token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.checkpoint.hf.conversion import (
    convert,
)
from tests.checkpoint.hf.exporting import (
    config_of,
    export,
    save_again,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("layout")


def test_tokenizer_files_are_carried_over_byte_for_byte(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    export(three, tmp_path / "out", layout)
    for name in ("tokenizer.json", "chat_template.jinja"):
        original = (three.parent / "hf" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == original


def test_the_tokenizer_is_of_a_class_that_transformers_4_has_too(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    """tests/readers/test_rewardbench.py has transformers 4 read it."""
    name = "tokenizer_config.json"
    original = json.loads((three.parent / "hf" / name).read_text())
    assert original["tokenizer_class"] == "TokenizersBackend"
    export(three, tmp_path / "out", layout)
    assert json.loads((tmp_path / "out" / name).read_text()) == {
        **original,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }


def test_a_tokenizer_of_another_class_is_left_as_it_is(tokenizer: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.folder import write_tokenizer
    from nemo_aligner.text.tokenizer import load_tokenizer
    from tests.contracts import Contracts

    (tmp_path / "llama").mkdir()
    tokenizer.save(tmp_path / "llama")
    path = tmp_path / "llama" / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizer"})
    )
    llama = load_tokenizer(tmp_path / "llama")
    contract = Contracts(llama)()
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", llama, contract, llama.pad_token)
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_template_is_the_contract_s(three: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.text.templates import BUILT_IN_TEMPLATES

    for name, template in (("plain", BUILT_IN_TEMPLATES["plain"]), ("none", "")):
        save_again(three, tmp_path / f"{name}.nemo", layout, template=template)
        summary = export(tmp_path / f"{name}.nemo", tmp_path / name, layout)
        path = tmp_path / name / "chat_template.jinja"
        assert (path.read_text() if template else path.exists()) == (template or False)
        assert summary.texts == (7 if template else 3)
    assert "no chat template" in (tmp_path / "none/README.md").read_text()


def without_a_pad_token(folder: Path, specials: tuple[str, ...]) -> None:
    """Pad with EOS, as many tokenizers do, and let only ``specials`` be special."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|im_end|>"}))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in specials
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("specials", "rows", "pad", "pad_id", "vocab_size"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), 320, "<|endoftext|>", 0, 320),
        # No token to be had: the row behind the words, or one more, is a new one's.
        (("<|im_start|>", "<|im_end|>"), None, "<|pad|>", None, None),
        (("<|im_start|>", "<|im_end|>"), 340, "<|pad|>", None, 340),
    ],
)
def test_the_pad_token_is_never_eos(
    specials: tuple[str, ...],
    rows: int | None,
    pad: str,
    pad_id: int | None,
    vocab_size: int | None,
    layout: Any,
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    from nemo_aligner.text.tokenizer import load_tokenizer

    tiny.write_tokenizer(tmp_path / "words")
    words = load_tokenizer(tmp_path / "words").vocab_size
    tiny.write_hf_reward_model(tmp_path / "hf", vocab_size=rows or words)
    without_a_pad_token(tmp_path / "hf", specials)
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    summary = export(tmp_path / "rm.nemo", tmp_path / "out", layout)
    wanted_id = words if pad_id is None else pad_id
    config = config_of(tmp_path / "out")
    assert summary.pad_token == pad
    assert config["pad_token_id"] == wanted_id != config["eos_token_id"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (pad, wanted_id)
    assert config["vocab_size"] == (vocab_size or words + 1)
    embeddings = tensors_of(tmp_path / "out")["model.embed_tokens.weight"]
    assert embeddings.shape[0] == config["vocab_size"]
    original = (tmp_path / "hf/tokenizer.json").read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == original
    again = convert(tmp_path / "out", tmp_path / "again.nemo")
    assert again.contract == summary.contract
