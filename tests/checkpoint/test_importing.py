"""Imported checkpoints have the source's weights, settings and scores."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.decoder_tensors import attribute_names
from nemo_aligner.checkpoint.importing import import_checkpoint as import_nemo
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription, read_tokenizer
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import Writer, bridge_run, megatron_lm, nemo1, nemo1_tar_gz, nemo2
from tests.checkpoint.hf.exporting import edit
from tests.checkpoint.loading import Tensors, Theirs, check, head_of, load, scores
from tests.checkpoint.refusals import refusals
from tests.harness import tiny
from tests.harness.environments import package
from tests.training import critic_steps

STANDARD = {"enable": True, "mean": 0.5, "std": 2.0}
THREE = {"num_attributes": 3, "merge_attributes": True, "attribute_weights": [0.3, 0.7, -1.0]}
# Reward models from which a critic starts: number of attributes, and settings.
CRITICS: dict[str, tuple[int, dict[str, Any]]] = {
    "even": (3, {"regression": {"num_attributes": 3}}),
    "weighted": (3, {"regression": {**THREE, "merge_attributes": False}}),
    "merged": (3, {"regression": THREE}),
    "merged_evenly": (3, {"regression": {"num_attributes": 3, "merge_attributes": True}}),
    "standardized": (1, {"reward_standardization": STANDARD}),
    "standardized_even": (
        3,
        {"regression": {"num_attributes": 3}, "reward_standardization": STANDARD},
    ),
    "standardized_merged": (3, {"regression": THREE, "reward_standardization": STANDARD}),
}
CLIP = 0.3


@pytest.fixture(scope="module")
def wanted_scores(
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tensor:
    """Score the sequences with the model of NeMo 1."""
    folder = nemo1(tmp_path_factory.mktemp("wanted") / "nemo1", tensors, tokenizer_folder)
    return scores(load(folder, layout).model, layout)


@pytest.mark.parametrize("write", [nemo1, nemo1_tar_gz, nemo2, bridge_run, megatron_lm])
def test_import_keeps_settings_weights_and_scores(
    write: Writer,
    theirs: Theirs,
    base: Path,
    tensors: Tensors,
    wanted_scores: Tensor,
    layout: Any,
    tmp_path: Path,
) -> None:
    """Opened in place and imported, a checkpoint has the converted model's settings and scores."""
    from nemo_aligner.models.shapes.decoder import ModelShape

    source, output = theirs(write), tmp_path / "ours.nemo"
    assert "a base model" in import_nemo(source, output)
    with open_nemo(base, with_weights=False) as expected, open_nemo(source) as actual:
        shape = ModelShape.from_config(expected.config)
        rows = foreign.PADDED if write is megatron_lm else shape.vocab_size
        wanted_shape = dataclasses.replace(shape, vocab_size=rows)
        assert ModelShape.from_config(actual.config) == wanted_shape
    for path in (source, output):
        loaded = load(path, layout)
        check(loaded.model, tensors)
        assert loaded.tokenizer.chat_template == tiny.CHATML
        # The settings define the same model, too, including RoPE scaling.
        assert torch.equal(scores(loaded.model, layout), wanted_scores)
    stored = foreign.tensors_of(output)
    rows = tiny.SHAPE["vocab_size"]
    assert torch.equal(stored["output_layer.weight"][:rows], tensors["output_layer.weight"][:rows])
    assert stored.keys() == tensors.keys()


def test_import_says_whose_vocabulary_it_takes(theirs: Theirs, tmp_path: Path) -> None:
    for name, write, settings, expected in (
        ("a", nemo1, {}, "320, by its tokenizer"),
        ("b", nemo1, {"override_vocab_size": foreign.PADDED}, "384, by override_vocab_size"),
        ("c", megatron_lm, {"vocab_size": None}, "384, by padded_vocab_size"),
        ("d", megatron_lm, {"vocab_size": 320}, "320, by vocab_size"),
    ):
        summary = import_nemo(theirs(write, name, **settings), tmp_path / f"{name}.nemo")
        assert f"vocabulary of {expected}" in summary


def test_added_tokens_without_an_embedding_are_removed(theirs: Theirs, tmp_path: Path) -> None:
    """Llama 2's tokenizers often have a pad token that was added without resizing the model."""
    rows = tiny.SHAPE["vocab_size"]
    source = theirs(nemo1, "padless", override_vocab_size=rows)
    tokenizer = source / f"{foreign.HEX}_tokenizer"
    (tokenizer / "added_tokens.json").write_text(f'{{"<pad>": {rows}}}')
    summary = import_nemo(source, tmp_path / "ours.nemo")
    assert f"removed from the tokenizer: <pad>, because the model has only {rows}" in summary
    for path, removed in ((source, ["<pad>"]), (tmp_path / "ours.nemo", [])):
        description = CheckpointDescription.read(path)
        assert description.tokenizer.vocab_size == rows
        assert description.removed_tokens == removed


def test_import_with_a_tokenizer_of_the_hub(
    hub: Callable[..., Any],
    theirs: Theirs,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    requests, source = hub(tokenizer_folder), theirs()
    shutil.rmtree(source / f"{foreign.HEX}_tokenizer")
    import_nemo(source, tmp_path / "ours.nemo", tokenizer="some-org/Base")
    assert requests["name"] == "some-org/Base"
    assert requests["allow_patterns"] == ["*.json", "*.jinja"]
    check(load(tmp_path / "ours.nemo", layout).model, tensors)
    with pytest.raises(CheckpointError, match=r"theirs: it has no tokenizer\.json"):
        import_nemo(source, tmp_path / "again.nemo", tokenizer=source)


def test_import_gives_tokens_of_the_config_the_ids_of_transformers(
    theirs: Theirs, tmp_path: Path
) -> None:
    """A token that only tokenizer_config.json has is one token wherever the folder is read."""
    source, rows = theirs(), tiny.SHAPE["vocab_size"]
    tokenizer = source / f"{foreign.HEX}_tokenizer"
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {"content": "<step>", **rules, "special": True}
    edit(tokenizer, "tokenizer_config.json", added_tokens_decoder={rows: added})
    text = "the<step>cat<|im_end|>  dog"
    expected = AutoTokenizer.from_pretrained(tokenizer)(text, add_special_tokens=False).input_ids
    assert rows in expected

    import_nemo(source, tmp_path / "own.nemo")
    import_nemo(source, tmp_path / "given.nemo", tokenizer=tokenizer)
    # Training reads a checkpoint of NeMo without an import, too.
    for path in (source, tmp_path / "own.nemo", tmp_path / "given.nemo"):
        with open_nemo(path, with_weights=False) as folder:
            assert folder.config["vocab_size"] == rows + 1
            assert folder.load_tokenizer().encode(text) == expected
    assert read_tokenizer(tokenizer).encode(text) == expected

    # With a contract the files are used unchanged, because it has their fingerprint.
    (source / "scoring_contract.json").write_text("{}")
    (tokenizer / "scoring_contract.json").write_text("{}")
    with open_nemo(source, with_weights=False) as folder:
        for unchanged in (folder.load_tokenizer(), read_tokenizer(tokenizer)):
            assert rows not in unchanged.encode(text)
    (source / "scoring_contract.json").unlink()

    edit(tokenizer, "tokenizer_config.json", added_tokens_decoder=[1])
    with pytest.raises(DataError, match=rf"^{source}: .*/tokenizer_config\.json: added_tokens_dec"):
        import_nemo(source, tmp_path / "again.nemo")


def test_import_of_a_nemo_aligner_reward_model_scores_as_it_did(
    theirs: Theirs, layout: Any, tmp_path: Path
) -> None:
    """Scores equal NeMo-Aligner's formula on the last hidden state of the same decoder."""
    from nemo_aligner.models.step import infer
    from nemo_aligner.serving.engine.scorer import load_scorer

    # An identity as the head gives the hidden states. NeMo-Aligner applies no RoPE scaling.
    identity = {"rm_head.weight": torch.eye(64)}
    plain = theirs(nemo1, "plain", identity, scale_positional_embedding=False)
    decoder = load(plain, layout, attributes=64)
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "yes"}]
    texts = ["the cat sleeps", chat]
    for case, attributes, settings in (
        ("ranking", 1, {}),
        ("regression", 3, {"regression": {"num_attributes": 3}}),
        ("merged_and_standardized", 3, {"regression": THREE, "reward_standardization": STANDARD}),
        ("merged_evenly", 2, {"regression": {"num_attributes": 2, "merge_attributes": True}}),
    ):
        if attributes == 3:
            settings["reward_model_type"] = "regression"
        head = head_of(attributes)
        archive = foreign.pack(
            theirs(nemo1, case, head, **settings), tmp_path / f"{case}.tgz", "w:gz"
        )
        import_nemo(archive, tmp_path / f"{case}.nemo", template="tokenizer")
        scorer = load_scorer(tmp_path / f"{case}.nemo", layout, micro_batch_tokens=256)
        actual = torch.from_numpy(score_all(scorer, texts))
        names = {1: ("reward",), 3: ("attribute_1", "attribute_2", "attribute_3")}
        assert scorer.contract.attributes == names[actual.shape[1]], case

        ids = [scorer.contract.encode(decoder.tokenizer, text).token_ids for text in texts]
        assert ids[0] == decoder.tokenizer.encode("the cat sleeps")  # no BOS, no EOS
        hidden = infer(decoder.model, [PackedBatch.pack(ids)], layout)
        expected = hidden @ head["rm_head.weight"].T + head["rm_head.bias"]
        regression = settings.get("regression", {})
        if regression.get("merge_attributes"):
            weights = regression.get("attribute_weights", [1 / attributes] * attributes)
            expected = (expected @ torch.tensor(weights))[:, None]
        if "reward_standardization" in settings:
            expected = (expected - STANDARD["mean"]) / STANDARD["std"]
        assert (expected[0] - expected[1]).abs().min() > 0.01
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-5, msg=lambda message, case=case: f"{case}: {message}"
        )


def test_import_of_a_nemo_aligner_regression_model_starts_the_same_critic(
    theirs: Theirs, layout: Any, tmp_path: Path
) -> None:
    """Against NeMo-Aligner 0.7's arithmetic on the hidden states of the same decoder.

    ``RewardModelHead.forward`` with ``output_sequence`` (gpt_reward_model.py): the attributes with
    their bias, times ``attribute_weights`` or 1 / A, also where ``merge_attributes`` is false.
    ``loss_func`` of ``MegatronGPTCriticModel`` (megatron_gpt_critic.py), one micro-batch, with
    ``reward_standardization``, which its ``infer`` applies to values, too.
    """
    rollout = critic_steps.make_rollout(3)
    _, returns, previous_values, mask = map(torch.from_numpy, vars(rollout).values())
    hidden = hidden_states(theirs, layout, rollout.tokens)
    off = []
    for case, (attributes, settings) in CRITICS.items():
        head = head_of(attributes)
        weights = settings.get("regression", {}).get("attribute_weights") or [1 / attributes]
        weights = torch.tensor(weights * attributes)[:attributes]
        values = (hidden @ head["rm_head.weight"].T + head["rm_head.bias"]) @ weights
        if "reward_standardization" in settings:
            values = (values - STANDARD["mean"]) / STANDARD["std"]
        now = values[:, :-1]
        clipped = previous_values + (now - previous_values).clamp(-CLIP, CLIP)
        worst = torch.maximum((now - returns) ** 2, (clipped - returns) ** 2)
        loss = 0.5 * worst[mask.bool()].mean()

        actual, got_loss = our_critic(import_critic(theirs, case, tmp_path), rollout, layout)
        if (actual - values).abs().max() > 1e-5 or abs(got_loss / loss.item() - 1) > 1e-5:
            off.append(f"{case}: {actual[0, :3]} for {values[0, :3]}, loss {got_loss} for {loss}")
    assert not off, "\n".join(off)


def hidden_states(theirs: Theirs, layout: Any, tokens: np.ndarray) -> Tensor:
    """Compute the decoder's hidden states ``[N, S, 64]`` like NeMo-Aligner."""
    from nemo_aligner.models.step import infer

    identity = {"rm_head.weight": torch.eye(64)}
    decoder = load(theirs(nemo1, "plain", identity, scale_positional_embedding=False), layout, 64)
    prefixes = [row[: end + 1] for row in tokens for end in range(len(row))]
    return infer(decoder.model, [PackedBatch.pack(prefixes)], layout).view(*tokens.shape, 64)


def import_critic(theirs: Theirs, case: str, folder: Path) -> Path:
    """Import the NeMo-Aligner reward model of a case in ``CRITICS``."""
    attributes, settings = CRITICS[case]
    kind = "regression" if attributes > 1 else "binary_ranking"
    source = theirs(nemo1, case, head_of(attributes), **settings, reward_model_type=kind)
    import_nemo(source, folder / f"{case}.nemo", template="none")
    return folder / f"{case}.nemo"


def our_critic(archive: Path, rollout: Rollout, layout: Any) -> tuple[Tensor, float]:
    """Compute this package's values ``[N, S]``, and the loss of one step on the rollout."""
    sizes = "model.micro_batch_tokens=256", f"model.global_batch_size={len(rollout)}"
    clip = f"model.loss_clip_val={CLIP}"
    folder = archive.with_suffix("")
    learner = critic_steps.open_run(str(archive), folder, layout, *sizes, clip).learner
    values = torch.from_numpy(np.stack(learner.values(rollout.tokens)))
    (step,) = learner.train(rollout)
    return values, step.loss


def test_import_of_a_nemo_aligner_model_has_the_numbers_of_nemo_aligners_own_critic(
    theirs: Theirs, layout: Any, tmp_path: Path
) -> None:
    """Rewards, values and loss equal those of NeMo-Aligner 0.7.0's code."""
    from nemo_aligner.serving.engine.scorer import load_scorer

    rollout = critic_steps.make_rollout(3)
    tokens, lengths = torch.from_numpy(rollout.tokens), (rollout.tokens > 0).sum(1)
    sizes = dict.fromkeys(("micro_batch_size", "global_batch_size"), len(rollout))
    model = {"hidden_size": 64, "output_sequence": True, "pipeline_model_parallel_size": 1}
    learning = {"loss_clip_val": CLIP, "megatron_amp_O2": False, "forward_micro_batch_size": 1}
    inputs = {
        "cfg": {**sizes, **model, **learning},
        "batch": {name: torch.from_numpy(values_) for name, values_ in vars(rollout).items()},
        "lengths": torch.from_numpy(lengths),
        "hidden": hidden_states(theirs, layout, rollout.tokens),
        "cases": {name: (cfg, head_of(width)) for name, (width, cfg) in CRITICS.items()},
    }
    expected = run_nemo_aligner(inputs, tmp_path)
    off = {}
    for case in CRITICS:
        archive = import_critic(theirs, case, tmp_path)
        scorer = load_scorer(archive, layout, micro_batch_tokens=256)
        rows = [row[:length] for row, length in zip(rollout.tokens, lengths, strict=True)]
        values, loss = our_critic(archive, rollout, layout)
        rewards = torch.from_numpy(scorer.score_token_lists(rows))
        assert values.shape == tokens.shape
        results = {"rewards": rewards, "values": values, "loss": torch.tensor(loss)}
        for name, actual in results.items():
            by_them = torch.as_tensor(expected[case][name])
            if actual.shape != by_them.shape or (actual - by_them).abs().max() > 1e-5:
                off[case, name] = (actual, by_them)
    assert not off


def test_import_says_where_a_critic_starts_from_other_values(
    theirs: Theirs, tmp_path: Path
) -> None:
    """NeMo-Aligner standardizes the merged reward, this package each attribute."""
    apart = {**THREE, "merge_attributes": False}
    for case, regression, differs in (
        ("apart", apart, True),
        ("merged", THREE, False),
        ("even", {"num_attributes": 3}, False),
    ):
        settings = {"regression": regression, "reward_standardization": STANDARD}
        source = theirs(nemo1, case, head_of(3), **settings, reward_model_type="regression")
        summary = import_nemo(source, tmp_path / f"{case}.nemo", template="none")
        assert ("attribute_weights sum to 0, not 1" in summary) is differs, case


def run_nemo_aligner(inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run NVIDIA's ``nemo_aligner`` in a process, and return its results."""
    package_folder = package("nemo-aligner==0.7.0")
    script = Path(__file__).with_name("nemo_aligner_critic.py")
    paths = folder / "given.pt", folder / "found.pt"
    torch.save(inputs, paths[0])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(package_folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(paths[1])
    assert Path(results.pop("ran")).is_relative_to(package_folder)
    return dict(results)


def test_import_keeps_scaling_where_it_is_asked_for(theirs: Theirs, tmp_path: Path) -> None:
    source = theirs(nemo1, "theirs", head_of(1))
    for keep in (False, True):
        path = tmp_path / f"{keep}.nemo"
        summary = import_nemo(source, path, template="none", keep_scaling=keep)
        assert ("scale_positional_embedding is switched off" in summary) is not keep
        with open_nemo(path, with_weights=False) as folder:
            assert folder.config["scale_positional_embedding"] is keep
            assert folder.contract is not None
            assert folder.contract["template"] == ""


def test_import_with_a_config_in_place_of_the_archives_own(theirs: Theirs, tmp_path: Path) -> None:
    """A file replaces the archive's settings, such as a wrong rotary_base."""
    settings = {"reward_standardization": STANDARD}
    source = theirs(nemo1, "theirs", head_of(1), rotary_base=500000.0, **settings)
    archive = foreign.pack(source, tmp_path / "theirs.nemo", "w")
    expected = theirs(nemo1, "wanted", head_of(1), rotary_base=10000.0, **settings)
    config = expected / "model_config.yaml"
    import_nemo(archive, tmp_path / "a.nemo", template="tokenizer", config=config)
    import_nemo(expected, tmp_path / "b.nemo", template="tokenizer")
    with (
        open_nemo(tmp_path / "a.nemo", with_weights=False) as actual,
        open_nemo(tmp_path / "b.nemo", with_weights=False) as same,
    ):
        assert actual.config["rotary_base"] == 10000.0
        assert actual.config == same.config
        assert actual.contract == same.contract is not None


def test_weights_that_are_not_finite_are_named_by_an_import_and_by_training(
    theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    """Weights with NaN are named, no model is written, and no record is blamed."""
    fc2 = "decoder.layers.mlp.linear_fc2.weight"
    damaged = tensors[fc2].clone()
    damaged[2, 1, 7] = math.nan
    head = {"rm_head.weight": torch.full((1, 64), math.inf)}
    problem = "that are NaN or infinite in float32, the first at "
    with refusals() as refused:
        for name, replacements, message in (
            ("body", {fc2: damaged}, rf"body: model\.{fc2}: got 1 of \d+ values {problem}"),
            ("head", head, rf"head: model\.rm_head\.weight: got 64 of 64 values {problem}"),
        ):
            source = theirs(nemo1, name, replacements)
            template = "none" if name == "head" else None
            with refused(f"import {name}", message):
                import_nemo(source, tmp_path / "ours.nemo", template=template)
            with refused(f"train {name}", message):
                load(source, layout)
    assert not (tmp_path / "ours.nemo").exists()


def test_import_refuses_a_reward_model_that_would_change(theirs: Theirs, tmp_path: Path) -> None:
    weights = {"merge_attributes": True, "attribute_weights": [1.0, 2.0, 3.0]}
    fc2 = "decoder.layers.mlp.linear_fc2.weight"
    negative = {**STANDARD, "std": -2.0}
    output = tmp_path / "ours.nemo"
    sources = {
        "plain": theirs(nemo1, "plain", head_of(2)),
        "pool": theirs(nemo1, "pool", head_of(2), use_avg_pool=True),
        "critic": theirs(nemo1, "critic", head_of(2), output_sequence=True),
        "weights": theirs(nemo1, "weights", head_of(2), regression=weights),
        "std": theirs(nemo1, "std", head_of(1), reward_standardization=negative),
        "whole": theirs(nemo1, "whole", {fc2: torch.ones(4, 64, 128, dtype=torch.int8)}),
    }
    with refusals() as refused:
        for name, message in (
            ("pool", "use_avg_pool: got true"),
            ("critic", "output_sequence: got true"),
            ("weights", r"attribute_weights: got \[1.0, 2.0, 3.0\], wanted 2 numbers"),
            ("std", r"got mean \[0\.5\] and std \[-2\.0\], wanted a mean, and a std above 0"),
            ("whole", rf"model\.{fc2}: dtype: got torch\.int8, wanted fp32"),
        ):
            with refused(name, message):
                import_nemo(sources[name], output)
    with refusals(ConfigError) as refused:
        for options, message in (
            ({}, "template: it is not set"),
            ({"template": "tokenizer", "attributes": ("a",)}, "attributes: got"),
            ({"template": "tokenizer", "attributes": ("a", "")}, "attributes: got"),
        ):
            with refused(options, message):
                import_nemo(sources["plain"], output, **options)
    assert {path.name for path in tmp_path.iterdir()} == sources.keys()


def test_import_of_a_base_model_takes_no_options_of_a_reward_model(
    theirs: Theirs, tmp_path: Path
) -> None:
    source = theirs()
    with refusals(ConfigError) as refused:
        for name, value in (("template", "tokenizer"), ("attributes", ("a",)),
                            ("keep_scaling", True)):  # fmt: skip
            with refused(name, f"theirs: .*a base model .*{name}"):
                import_nemo(source, tmp_path / "ours.nemo", **{name: value})
    assert not (tmp_path / "ours.nemo").exists()


def test_import_verb_names_attributes(theirs: Theirs, tmp_path: Path) -> None:
    source, output = theirs(nemo1, "theirs", head_of(3)), tmp_path / "ours.nemo"
    options = ["--input", str(source), "--output", str(output), "--template", "none"]
    done = tiny.run_verb("import", *options, "--attributes", "help, style ,length")
    assert "a reward model of help, style, length" in done.stdout


def test_attribute_names_are_as_many_as_outputs_and_differ() -> None:
    assert attribute_names([" help", "style "], 2) == ("help", "style")
    with refusals(ConfigError) as refused:
        for names in (["a"], ["a", "b", "c"], ["a", "a"], ["a", " a "], ["a", ""], ["a", " "]):
            with refused(names, r"attributes: got \['a'.*\], wanted 2 different names"):
                attribute_names(names, 2)


def test_import_gives_a_contract_the_dtype_that_holds_every_matrix(
    theirs: Theirs, tensors: Tensors, tmp_path: Path
) -> None:
    """The contract has the dtype of the matrices; the norms, here fp32, do not count."""
    wide, narrow = torch.float32, torch.bfloat16
    dtypes = {}
    for case in ((narrow, narrow), (narrow, wide), (wide, narrow)):
        name = f"{len(dtypes)}"
        stored = {
            key: tensor.to(case[0] if key.startswith("embedding.") else case[1])
            for key, tensor in tensors.items()
            if "norm" not in key
        }
        import_nemo(theirs(nemo1, name, {**stored, **head_of(1)}), tmp_path / f"{name}.nemo",
                    template="none")  # fmt: skip
        with open_nemo(tmp_path / f"{name}.nemo", with_weights=False) as folder:
            assert folder.contract is not None
            dtypes[case] = folder.contract["dtype"]
    assert dtypes == {(narrow, narrow): "bf16", (narrow, wide): "fp32", (wide, narrow): "fp32"}
