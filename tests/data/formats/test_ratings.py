"""Labels of turns and steps, from their formats to the tokens at which they are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import Malformed, Overlong, Precision, RecordKind
from nemo_aligner.config.model import DataPrefixConfig, HeadConfig, ScoredPosition
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.data.packing import pack_records
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import Rating
from nemo_aligner.data.training_data import TrainingData, build_training_data
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.data.files import write
from tests.harness import tiny
from tests.harness.contracts import Contracts

STEPWISE: dict[str, Any] = {
    "prompt": "why",
    "completions": ["the cat", "sings two", "no"],
    "labels": [True, 0.7, None],
}
MARK = "\u043a\u0438"
SHEPHERD = {
    "input": f"why is it? Step 1: the cat {MARK}\nStep 2: sings {MARK}\nStep 3: no {MARK}",
    "label": "why is it? Step 1: the cat +\nStep 2: sings -\nStep 3: no -",
    "task": "GSM8K",
}
USER = {"role": "user", "content": "why"}


def rated(rating: int | None, text: str) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False}


def step(*completions: dict[str, Any], chosen: int | None = None, human: Any = None) -> Any:
    return {"completions": [*completions], "chosen_completion": chosen, "human_completion": human}


PRM800K = {
    "labeler": "x",
    "question": {"problem": "why", "ground_truth_answer": "no"},
    "label": {
        "finish_reason": "found_error",
        "steps": [
            step(rated(1, "the cat"), rated(0, "a dog"), chosen=0),
            step(rated(-1, "sings"), human={"text": "eats", "rating": None}),
            step(rated(None, "one"), rated(-1, "two")),
        ],
    },
}


def read(tmp_path: Path, *rows: Any, names: tuple[str, ...] = ("right",), **how: Any) -> Any:
    path = write(tmp_path / "a.jsonl", *rows)
    return read_records(path, ReaderConfig(RecordKind.rating, attributes=names, **how))


def steps_of(rating: Rating) -> list[tuple[str, Any]]:
    """The steps of the reply, with their labels."""
    content = rating.response[-1]["content"]  # type: ignore[index]
    assert rating.steps is not None
    return [(part["text"], own) for part, own in zip(content, rating.steps, strict=True)]


def build(
    contracts: Contracts,
    path: Path,
    reads: str = "step_ends",
    objective: str | None = None,
    names: tuple[str, ...] = ("right",),
    **data: Any,
) -> TrainingData:
    config = contracts.config([*names], **data)
    config.objective = objective
    config.head = HeadConfig(reads=ScoredPosition(reads))
    config.data.data_prefix = DataPrefixConfig([str(path)])
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    return build_training_data(config, contract, contracts.tokenizer)


def test_stepwise_labels_stay_what_they_are(tmp_path: Path) -> None:
    file = read(tmp_path, STEPWISE, {**STEPWISE, "prompt": [USER], "labels": [0, 1, False]})
    assert file.format == "stepwise"
    assert [steps_of(each) for each in file.records] == [
        [("the cat", (1.0,)), ("sings two", (0.7,)), ("no", (None,))],
        [("the cat", (0.0,)), ("sings two", (1.0,)), ("no", (0.0,))],
    ]
    assert file.records[0].response[0] == file.records[1].response[0] == USER
    named = {**STEPWISE, "labels": [{"help": 1, "depth": None}, [2, 3.5], None]}
    (found,) = read(tmp_path, named, names=("help", "depth")).records
    assert found.steps == ((1.0, None), (2.0, 3.5), (None, None))


def test_math_shepherd_is_read_as_it_is_published(tmp_path: Path) -> None:
    file = read(tmp_path, SHEPHERD)
    (found,) = file.records
    assert (file.format, found.source) == ("math_shepherd", "GSM8K")
    assert found.response[0]["content"] == "why is it?"
    assert steps_of(found) == [
        ("Step 1: the cat", (1.0,)),
        ("Step 2: sings", (0.0,)),
        ("Step 3: no", (0.0,)),
    ]


def test_prm800k_has_a_record_for_each_path_and_counts_a_rating_once(tmp_path: Path) -> None:
    before, eats = ("the cat", (None,)), ("eats", (None,))
    for neutral in (1.0, 0.0, None):
        file = read(tmp_path, PRM800K, neutral=neutral)
        assert (file.format, file.counts["read"]) == ("prm800k", 5)
        assert [steps_of(each) for each in file.records] == [
            *([[("a dog", (neutral,))]] if neutral is not None else []),
            [before, ("sings", (0.0,))],
            # A completion without a rating has no label.
            [before, eats, ("two", (0.0,))],
            [("the cat", (1.0,)), ("eats", (1.0,))],
        ]
        assert {str(each.origin) for each in file.records} == {f"{file.path}:1"}


def test_turns_have_labels_beside_calls_and_results(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "label": {"help": 1, "x": 2}},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": "cat", "label": None},
        USER,
        {"role": "assistant", "content": "dog", "label": [0.5, 3]},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    file = read(tmp_path, {"messages": messages, "tools": tools}, names=("x", "help"))
    (found,) = file.records
    assert found.steps == ((2.0, 1.0), (None, None), (0.5, 3.0))
    assert found.response.tools == tools
    assert all("label" not in message for message in found.response.messages)


def test_records_of_steps_that_are_malformed(tmp_path: Path) -> None:
    bad_mark = {**SHEPHERD, "label": SHEPHERD["label"].replace("+", "x")}
    cases = [
        ({**STEPWISE, "labels": [1, 0]}, "labels: got 2 labels, wanted 3"),
        ({**STEPWISE, "labels": []}, r"labels: got \[\], wanted a list"),
        ({**STEPWISE, "labels": ["+", 0, 1]}, r"labels\[0\]: got '\+', wanted a number"),
        ({**STEPWISE, "labels": [[1, 2], 0, 1]}, r"labels\[0\]: got 2 labels, wanted 1, of right"),
        (
            {**STEPWISE, "labels": [{"x": 1}, 0, 1]},
            r"labels\[0\]: got .*wanted a number for 'right'",
        ),
        (
            {**STEPWISE, "completions": ["a", " ", "b"]},
            r"completions\[1\]: got ' ', wanted a string",
        ),
        (bad_mark, r"label: got 'x\\nStep 2: .*' after step 1, wanted"),
        ({**SHEPHERD, "input": f"why {MARK}", "label": "why +"}, "input: got .*'Step 1:'"),
        ({"messages": [{**USER, "label": 1}]}, r"messages\[0\].label: got 1 of role 'user'"),
        (
            {"question": {"problem": "why"}, "label": {"steps": [{"completions": 1}]}},
            r"label.steps\[0\].completions: got 1, wanted a list",
        ),
    ]
    assert_refused(lambda row: read(tmp_path, row), cases, DataError)


def test_labels_belong_to_the_tokens_that_are_read(tmp_path: Path, contracts: Contracts) -> None:
    rows = [STEPWISE, {"prompt": "who", "completions": ["yes"], "labels": [0]}]
    path = write(tmp_path / "a.jsonl", *rows)
    train = build(contracts, path, objective="binary_cross_entropy").train
    records, labels = train.records, train.records.labels
    assert (len(train), records.num_samples, records.num_rewards) == (2, 2, 4)
    assert records.reward_bounds.tolist() == records.label_bounds.tolist() == [0, 3, 4]
    assert torch.nan_to_num(labels.values, -1).flatten().tolist() == [
        1.0, pytest.approx(0.7), -1.0, 0.0,
    ]  # fmt: skip
    assert train.counts == {"read": 2, "kept": 2, "steps": 4}
    assert [str(origin)[-1] for origin in train.label_origins] == ["1", "1", "1", "2"]
    (ids,), (places,) = train.record(0), train.reads(0)
    tokenizer = contracts.tokenizer
    read_at = [tokenizer.decode(ids[: place + 1].tolist()) for place in places]
    assert [text.rsplit("\n", 1)[1] for text in read_at[:2]] == ["the cat", "sings two"]
    assert places[-1] == len(ids) - 1
    # A pack reads the same tokens, also after other records.
    (pack,) = pack_records(train, [1, 0], 1000)
    assert pack.records.ids.tolist() == [1, 0]
    assert pack.tokens[pack.scored_tokens].tolist() == [
        int(train.record(1)[0][-1]), *ids[places].tolist(),
    ]  # fmt: skip
    turned = train.select([1, 0])
    assert turned.records.labels.values.flatten()[0] == 0.0
    assert turned.records.reward_bounds.tolist() == [0, 1, 4]
    assert turned.reads(1) == [places]


def test_contract_of_cross_entropy_says_that_rewards_are_probabilities(
    tmp_path: Path, contracts: Contracts
) -> None:
    """Whatever label means the model to start from has, unless the settings choose log-odds."""
    path = write(tmp_path / "a.jsonl", STEPWISE)
    config = contracts.config(["right"])
    config.objective = "binary_cross_entropy"
    config.head = HeadConfig(reads=ScoredPosition.step_ends)
    config.data.data_prefix = DataPrefixConfig([str(path)])
    plain = build_contract(config, contracts.tokenizer, Precision.fp32)
    for given, kwargs, scale in (
        (plain, {}, "probability"),
        (plain.with_label_means([0.5]), {}, "probability"),
        (plain, {"scale": "log_odds"}, "log_odds"),
    ):
        config.objective_kwargs = kwargs
        contract = build_training_data(config, given, contracts.tokenizer).contract
        assert (contract.reward_scale, contract.label_means) == (scale, (0.0,)), kwargs
        # A contract without a readout is that of an earlier version.
        assert (contract.hash == plain.hash) == (scale == "log_odds")


def test_label_of_a_whole_text_is_that_of_its_last_step(
    tmp_path: Path, contracts: Contracts
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "why", "response": "a\n\nb", "right": 1})
    train = build(contracts, path, objective="binary_cross_entropy").train
    assert torch.nan_to_num(train.records.labels.values, -1).tolist() == [[-1.0], [1.0]]


@pytest.mark.parametrize("reads", ["step_ends", "step_marks", "step_answers", "turns"])
def test_length_of_a_reward_is_that_of_its_step_or_reply_alone(
    reads: str, tmp_path: Path, contracts: Contracts
) -> None:
    """Prompt, separators and what the chat template writes around turns do not count."""
    steps, other = ["the cat sings", "two", "a red house"], "no\n\nno"
    replies = steps if reads == "turns" else ["\n\n".join(steps)]
    turns = [turn for text in replies for turn in tiny.chat("why", text)]
    labelled = [{**turn, **({"label": 1} if turn != USER else {})} for turn in turns]
    rated = {"prompt": "why", "completions": steps, "labels": [1, 0, 1]}

    def count(*texts: str) -> list[int]:
        return [len(contracts.tokenizer.encode(text)) for text in texts]

    path = write(tmp_path / "a.jsonl", {"messages": labelled} if reads == "turns" else rated)
    train = build(contracts, path, reads).train
    assert train.reply_lengths.tolist() == count(*steps)
    first = train.lengths(0)[0] - train.reads(0)[0][0]
    cut = build(contracts, path, reads, seq_length=first, overlong=Overlong.truncate_left).train
    assert cut.reply_lengths.tolist() == count(*steps)[1:]
    # Labels of, and verdicts on, a whole sample belong to the whole reply.
    path = write(tmp_path / "b.jsonl", {"prompt": "why", "response": turns, "right": 1})
    lengths = build(contracts, path, reads).train.reply_lengths.tolist()
    assert lengths == count(*steps[:-1], replies[-1])
    config = contracts.config()
    config.head = HeadConfig(reads=ScoredPosition(reads))
    texts = [turns, tiny.chat("why", other)]
    path = write(tmp_path / "c.jsonl", dict(zip(("chosen", "rejected"), texts, strict=True)))
    config.data.data_prefix = DataPrefixConfig([str(path)])
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    train = build_training_data(config, contract, contracts.tokenizer).train
    lengths = count(replies[-1], other)
    assert train.reply_lengths[train.records.reward_bounds[1:] - 1].tolist() == lengths
    assert contract.count_reply_tokens(contracts.tokenizer, texts) == lengths
    assert f"tokens of a reply {min(lengths)} to {max(lengths)}," in " ".join(train.table().split())


def test_what_is_cut_off_and_what_does_not_fit_is_counted(
    tmp_path: Path, contracts: Contracts
) -> None:
    whole = {"prompt": "why", "completions": ["the cat sings", "a", "red"], "labels": [1, 0, 1]}
    path = write(tmp_path / "a.jsonl", whole)
    full = build(contracts, path).train
    first = full.lengths(0)[0] - full.reads(0)[0][0]
    cut = build(contracts, path, seq_length=first, overlong=Overlong.truncate_left).train
    assert cut.counts == {"read": 1, "kept": 1, "steps": 2, "truncated": 1, "labels_cut_off": 1}
    assert cut.records.labels.values.tolist() == [[0.0], [1.0]]
    assert "their labels cut off      1" in cut.table()
    # Steps that contain the separator, and labels for another number of steps.
    turns = [USER, {"role": "assistant", "content": "a\n\nb", "label": 1}]
    rows = [whole, {**whole, "completions": ["a\n\nb", "a", "red"]}]
    path = write(tmp_path / "b.jsonl", *rows)
    with pytest.raises(
        DataError, match=r"b.jsonl:2: prompt and response: step 1 of 3: got 'a\\n\\nb', wanted"
    ):
        build(contracts, path)
    path = write(tmp_path / "c.jsonl", {"messages": turns}, {"messages": turns})
    with pytest.raises(DataError, match=r"c.jsonl:1: got labels of 1 turns or steps, and .* 2 in"):
        build(contracts, path)
    left_out = {"malformed": Malformed.drop, "max_malformed": 0.5}
    path = write(tmp_path / "d.jsonl", *rows)
    assert build(contracts, path, **left_out).train.counts["malformed"] == 1


def test_labels_of_steps_need_a_model_that_reads_them(tmp_path: Path, contracts: Contracts) -> None:
    path = write(tmp_path / "a.jsonl", STEPWISE)
    with pytest.raises(DataError, match=r"a.jsonl:1: got labels of 3 turns .*reads=turns"):
        build(contracts, path, "last_token")
    with pytest.raises(ConfigError, match=r"model.head.reads: step_ends .* pairs and ratings"):
        build(contracts, path, objective="ranking_and_regression")
    config = contracts.config()
    config.objective = "plackett_luce"
    config.head = HeadConfig(reads=ScoredPosition.step_ends)
    config.data.data_prefix = DataPrefixConfig([str(path)])
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    with pytest.raises(ConfigError, match=r"for each sample.* model.objective=bradley_terry"):
        build_training_data(config, contract, contracts.tokenizer)
    bad = write(tmp_path / "b.jsonl", {**STEPWISE, "labels": [0, 1.5, 1]})
    with pytest.raises(DataError, match=r"b.jsonl:1: right: .* 1.5 .* 0 to 1\. "):
        build(contracts, bad, objective="binary_cross_entropy")


def test_trajectories_of_a_pair_share_their_beginning(tmp_path: Path, contracts: Contracts) -> None:
    def reply(*steps: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": [{"type": "text", "text": s} for s in steps]}]

    first = "the cat sings and eats two"
    pair = {"prompt": "why", "chosen": reply(first, "yes"), "rejected": reply(first, "no", "no")}
    path = write(tmp_path / "a.jsonl", pair)
    config = contracts.config()
    config.head = HeadConfig(reads=ScoredPosition.step_ends)
    config.data.data_prefix = DataPrefixConfig([str(path)])
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    train = build_training_data(config, contract, contracts.tokenizer).train
    records = train.records
    assert (records.sample_bounds.tolist(), records.ranks.tolist()) == ([0, 2], [0, 1])
    assert (records.reward_bounds.tolist(), records.record_bounds.tolist()) == ([0, 2, 5], [0, 5])
    (pack,) = pack_records(train, [0], 1000)
    # The pack has the first step once, and both samples read it there.
    assert pack.scored_tokens[0] == pack.scored_tokens[2]
    wanted = [
        ids[place]
        for ids, own in zip(train.record(0), train.reads(0), strict=True)
        for place in own
    ]
    assert pack.tokens[pack.scored_tokens].tolist() == wanted


def test_index_on_the_disk_keeps_the_places(tmp_path: Path, contracts: Contracts) -> None:
    path = write(tmp_path / "a.jsonl", STEPWISE, {**STEPWISE, "labels": [0, 0, 0]})
    small = build(contracts, path)
    kept = build(contracts, path, index_dir=str(tmp_path / "index"))
    again = build(contracts, path, index_dir=str(tmp_path / "index"))
    for each in (kept.train, again.train):
        assert each.digest == small.train.digest == each.measure_digest()
        assert torch.equal(each.places, small.train.places)
    # Another rule gives another index, and other labels give another digest.
    other = build(contracts, path, "step_marks", index_dir=str(tmp_path / "index"))
    assert other.train.digest != small.train.digest
    assert len(list((tmp_path / "index").iterdir())) == 2
    files = [path, write(tmp_path / "b.jsonl", {**STEPWISE, "prompt": "who"})]
    config = contracts.config(["right"])
    config.head = HeadConfig(reads=ScoredPosition.step_ends)
    config.data.data_prefix = DataPrefixConfig([str(each) for each in files])
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    both = build_training_data(config, contract, contracts.tokenizer).train
    assert both.records.reward_bounds.tolist() == [0, 3, 6, 9]
    assert both.records.labels.values.shape == (9, 1)
