"""What is imported is the model that was written, and scores as it did."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch import PackedBatch
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import AlignerError, CheckpointError, ConfigError
from tests import tiny
from tests.checkpoint import foreign
from tests.checkpoint.foreign import (
    Writer,
    bridge,
    bridge_run,
    megatron_lm,
    nemo1,
    nemo1_tar,
    nemo1_tar_gz,
    nemo2,
)
from tests.checkpoint.loading import (
    SEQUENCES,
    Tensors,
    check,
    head_of,
    import_nemo,
    load,
)

WRITERS = [nemo1, nemo1_tar, nemo1_tar_gz, nemo2, bridge, bridge_run, megatron_lm]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_the_model_is_the_one_that_was_written(
    write: Writer, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.models.step import infer

    source = write(tmp_path / "theirs", tensors, tokenizer_folder)
    loaded = load(source, layout)
    check(loaded.model, tensors)
    assert loaded.tokenizer.chat_template == tiny.CHATML
    summary = import_nemo(source, tmp_path / "ours.nemo")
    assert "a base model" in summary
    ours = load(tmp_path / "ours.nemo", layout)
    check(ours.model, tensors)
    stored = foreign.tensors_of(tmp_path / "ours.nemo")
    output_layer = tensors["output_layer.weight"][: tiny.SHAPE["vocab_size"]]
    torch.testing.assert_close(stored["output_layer.weight"][: len(output_layer)], output_layer)
    assert stored.keys() == tensors.keys()
    batch = [PackedBatch.pack(SEQUENCES)]
    # Not the weights alone: the settings make the same model of them, rope scaling included.
    reference = load(nemo1(tmp_path / "reference", tensors, tokenizer_folder), layout)
    wanted = infer(reference.model, batch, layout)
    for model in (loaded.model, ours.model):
        torch.testing.assert_close(infer(model, batch, layout), wanted, rtol=0, atol=0)


def test_the_vocabulary_is_of_whoever_says_it(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    foreign.write_nemo1(tmp_path / "a", tensors, tokenizer_folder)
    foreign.write_nemo1(
        tmp_path / "b", tensors, tokenizer_folder, override_vocab_size=foreign.PADDED
    )
    from_tokenizer = import_nemo(tmp_path / "a", tmp_path / "a.nemo")
    assert "vocabulary of 320, by its tokenizer" in from_tokenizer
    given = import_nemo(tmp_path / "b", tmp_path / "b.nemo")
    assert "vocabulary of 384, by override_vocab_size" in given
    for name, size in (("c", None), ("d", 320)):
        foreign.write_megatron_lm(tmp_path / name, tensors, tokenizer_folder, vocab_size=size)
        said = import_nemo(tmp_path / name, tmp_path / f"{name}.nemo")
        wanted = "384, by padded_vocab_size" if size is None else "320, by vocab_size"
        assert f"vocabulary of {wanted}" in said


def test_a_tokenizer_may_be_one_of_the_hub(
    hub: Callable[..., Any], tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    asked = hub(tokenizer_folder)
    theirs = tmp_path / "theirs"
    foreign.write_nemo1(theirs, tensors, tokenizer_folder)
    shutil.rmtree(theirs / f"{foreign.HEX}_tokenizer")
    import_nemo(theirs, tmp_path / "ours.nemo", tokenizer="some-org/Base")
    assert asked["name"] == "some-org/Base"
    assert asked["allow_patterns"] == ["*.json", "*.jinja"]
    check(load(tmp_path / "ours.nemo", layout).model, tensors)
    with pytest.raises(CheckpointError, match=r"theirs: got no tokenizer\.json"):
        import_nemo(theirs, tmp_path / "again.nemo", tokenizer=theirs)


@pytest.mark.parametrize(
    ("attributes", "settings"),
    [
        (1, {}),
        (3, {"reward_model_type": "regression", "regression": {"num_attributes": 3}}),
        (
            3,
            {
                "reward_model_type": "regression",
                "regression": {
                    "num_attributes": 3,
                    "merge_attributes": True,
                    "attribute_weights": [0.3, 0.7, -1.0],
                },
                "reward_standardization": {"enable": True, "mean": 0.5, "std": 2.0},
            },
        ),
        (2, {"regression": {"num_attributes": 2, "merge_attributes": True}}),
    ],
    ids=["ranking", "regression", "merged_and_standardized", "merged_evenly"],
)
def test_a_nemo_aligner_reward_model_scores_as_it_did(
    attributes: int,
    settings: dict,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    """Against NeMo-Aligner's own formula on the last hidden state of the same decoder."""
    from nemo_aligner.models.step import infer
    from nemo_aligner.scoring.scorer import load_scorer

    head = head_of(attributes)
    folder = tmp_path / "theirs"
    foreign.write_nemo1(folder, {**tensors, **head}, tokenizer_folder, **settings)
    archive = foreign.pack(folder, tmp_path / "theirs.nemo", "w:gz")
    import_nemo(archive, tmp_path / "ours.nemo", template="tokenizer")

    scorer = load_scorer(tmp_path / "ours.nemo", layout, micro_batch_tokens=256)
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "yes"}]
    texts = ["the cat sleeps", chat]
    got = torch.from_numpy(scorer.score(texts))

    # The hidden states: an identity as the head. NeMo-Aligner applies no rope scaling.
    plain = {**tensors, "rm_head.weight": torch.eye(64)}
    foreign.write_nemo1(
        tmp_path / "plain", plain, tokenizer_folder, scale_positional_embedding=False
    )
    decoder = load(tmp_path / "plain", layout, attributes=64)
    ids = [scorer.contract.encode(decoder.tokenizer, text).token_ids for text in texts]
    assert ids[0] == decoder.tokenizer.encode("the cat sleeps")  # no BOS, no EOS
    hidden = infer(decoder.model, [PackedBatch.pack(ids)], layout)
    wanted = hidden @ head["rm_head.weight"].T + head["rm_head.bias"]
    regression = settings.get("regression", {})
    if regression.get("merge_attributes"):
        weights = regression.get("attribute_weights", [1 / attributes] * attributes)
        wanted = (wanted @ torch.tensor(weights))[:, None]
    standard = settings.get("reward_standardization")
    if standard:
        wanted = (wanted - standard["mean"]) / standard["std"]
    assert (wanted[0] - wanted[1]).abs().min() > 0.01
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_scaling_is_kept_where_it_is_asked_for(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    foreign.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(1)}, tokenizer_folder)
    for keep in (False, True):
        path = tmp_path / f"{keep}.nemo"
        said = import_nemo(tmp_path / "theirs", path, template="none", keep_scaling=keep)
        assert ("scale_positional_embedding is switched off" in said) is not keep
        with open_nemo(path, with_weights=False) as folder:
            assert folder.config["scale_positional_embedding"] is keep
            assert folder.contract is not None
            assert folder.contract["template"] == ""


def test_a_config_stands_for_the_archives_own(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    """For reward models that were trained with rotary_base 10000, whatever their settings say."""
    stored = {**tensors, **head_of(1)}
    standard = {"enable": True, "mean": 1.0, "std": 2.0}
    settings = {"rotary_base": 500000.0, "reward_standardization": standard}
    foreign.write_nemo1(tmp_path / "theirs", stored, tokenizer_folder, **settings)
    archive = foreign.pack(tmp_path / "theirs", tmp_path / "theirs.nemo", "w")
    foreign.write_nemo1(
        tmp_path / "wanted", stored, tokenizer_folder, **{**settings, "rotary_base": 10000.0}
    )
    config = tmp_path / "wanted" / "model_config.yaml"
    import_nemo(archive, tmp_path / "a.nemo", template="tokenizer", config=config)
    import_nemo(tmp_path / "wanted", tmp_path / "b.nemo", template="tokenizer")
    with (
        open_nemo(tmp_path / "a.nemo", with_weights=False) as got,
        open_nemo(tmp_path / "b.nemo", with_weights=False) as wanted,
    ):
        assert got.config["rotary_base"] == 10000.0
        assert got.config == wanted.config
        assert got.contract is not None
        assert got.contract == wanted.contract


@pytest.mark.parametrize(
    ("settings", "options", "kind", "message"),
    [
        ({"use_avg_pool": True}, {}, CheckpointError, "use_avg_pool: got true"),
        ({"output_sequence": True}, {}, CheckpointError, "output_sequence: got true"),
        (
            {"regression": {"merge_attributes": True, "attribute_weights": [1.0, 2.0, 3.0]}},
            {},
            CheckpointError,
            r"attribute_weights: got \[1.0, 2.0, 3.0\], wanted 2 numbers",
        ),
        ({}, {}, ConfigError, "template: a reward model"),
        ({}, {"template": "tokenizer", "attributes": ("a",)}, ConfigError, "attributes: got"),
        ({}, {"template": "tokenizer", "attributes": ("a", "")}, ConfigError, "attributes: got"),
    ],
    ids=["pool", "critic", "weights", "no_template", "names", "empty_name"],
)
def test_a_head_that_would_change_is_refused(
    settings: dict,
    options: dict,
    kind: type[AlignerError],
    message: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    foreign.write_nemo1(
        tmp_path / "theirs", {**tensors, **head_of(2)}, tokenizer_folder, **settings
    )
    with pytest.raises(kind, match=message):
        import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    "options",
    [{"template": "tokenizer"}, {"attributes": ("a",)}, {"keep_scaling": True}],
    ids=lambda options: next(iter(options)),
)
def test_a_base_model_takes_no_options_of_a_reward_model(
    options: dict, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    foreign.write_nemo1(tmp_path / "theirs", tensors, tokenizer_folder)
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"theirs: got {name}, .*a base model"):
        import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", **options)
    assert not (tmp_path / "ours.nemo").exists()


@pytest.mark.slow(seconds=4)
def test_the_script_names_attributes(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    foreign.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(3)}, tokenizer_folder)
    verb, options = "import", ["--input", str(tmp_path / "theirs")]
    options += ["--output", str(tmp_path / "ours.nemo"), "--template", "none", "--attributes"]
    failed = tiny.run_verb(verb, *options, "help,,length", check=False)
    assert failed.returncode == 1
    assert "attributes: got ['help', '', 'length'], wanted 3" in failed.stderr
    done = tiny.run_verb(verb, *options, "help, style ,length")
    assert "a reward model of help, style, length" in done.stdout


@pytest.mark.parametrize(
    ("embedding", "layers", "wanted"),
    [
        (torch.bfloat16, torch.bfloat16, "bf16"),
        (torch.bfloat16, torch.float32, "fp32"),
        (torch.float32, torch.bfloat16, "fp32"),
    ],
    ids=["one", "wider_layers", "wider_embedding"],
)
def test_a_contract_has_the_dtype_that_holds_every_matrix(
    embedding: torch.dtype,
    layers: torch.dtype,
    wanted: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    """As a conversion has it; the norms, here fp32, do not count."""
    stored = {
        key: tensor
        if "norm" in key
        else tensor.to(embedding if key.startswith("embedding.") else layers)
        for key, tensor in tensors.items()
    }
    foreign.write_nemo1(tmp_path / "theirs", {**stored, **head_of(1)}, tokenizer_folder)
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", template="none")
    with open_nemo(tmp_path / "ours.nemo", with_weights=False) as folder:
        assert folder.contract is not None
        assert folder.contract["dtype"] == wanted


def test_a_matrix_of_whole_numbers_is_refused(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"
    stored = {**tensors, name: tensors[name].to(torch.int8)}
    foreign.write_nemo1(tmp_path / "theirs", stored, tokenizer_folder)
    with pytest.raises(CheckpointError, match=rf"model\.{name}: got torch\.int8, wanted fp32"):
        import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo")
