"""A head that reads the mean of the reply: which tokens, their mean, and the same bits anywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import Group, PackedBatch, ReplyRows
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    save_reward_model,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.turns import make_reply_marker, reply_start
from nemo_aligner.models.readout import mean_of_replies
from nemo_aligner.models.step import find_reply_rows, infer_values
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.errors import CheckpointError
from tests.harness import tiny
from tests.harness.once import Once

QUESTION = "where is the warm stone house by the river and why is the tree so green " * 2
CHATS: list[Text] = [
    [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": reply}]
    for reply in ("the cat sings", "no", "the cat sleeps " * 12, "yes please thank you", "no")
]
TEXTS: list[Text] = [*CHATS, "a text without a reply that is one", *CHATS[:2]]


# Before there is a layout: it is made in one of its own.
@pytest.fixture(scope="module", autouse=True)
def archive(once: Once) -> Path:
    """A reward model of two attributes that reads the mean of the reply."""

    def build(folder: Path) -> None:
        from nemo_aligner.distributed.launch import launch
        from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

        tiny.write_reward_nemo(folder / "last.nemo")
        with launch():
            loaded = load_reward_model(folder / "last.nemo", initialize_layout())
            contract = dataclasses.replace(
                loaded.contract,
                scored_position="reply_mean",
                reply_marker=make_reply_marker(
                    loaded.contract.chat_template(loaded.tokenizer), loaded.tokenizer
                ),
            )
            path = folder / "rm.nemo"
            save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
            destroy_layout()

    return once("reply_mean", build) / "rm.nemo"


def test_reply_rows_of_a_shared_beginning_are_of_each_sequence() -> None:
    # Behind the marker 7 8 the replies begin alike.
    beginning = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sequences = [[*beginning, 10], [*beginning, 11, 12], [1, 2, 3], [5, 7, 8]]
    groups = [Group(2, 9), Group(1, 0), Group(1, 0)]
    batch = PackedBatch.pack(sequences, groups=groups)
    rows = find_reply_rows(batch, (7, 8))
    assert rows.lengths == (2, 3, 3, 1)
    assert batch.tokens[rows.index].tolist() == [9, 10, 9, 11, 12, 1, 2, 3, 8]
    moved = dataclasses.replace(batch, replies=rows).to("cpu").replies
    assert moved is not None
    assert moved.index.tolist() == rows.index.tolist()


def test_mean_of_replies_is_of_their_own_rows() -> None:
    hidden = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = mean_of_replies(hidden, ReplyRows(torch.arange(6), (1, 2, 3)))
    assert found.dtype == torch.float32
    wanted = [hidden[:1], hidden[1:3], hidden[3:]]
    torch.testing.assert_close(found, torch.stack([each.float().mean(0) for each in wanted]))


def test_mean_of_the_reply_is_what_the_head_gives_for_its_tokens(
    archive: Path, layout: Any
) -> None:
    scorer = load_scorer(archive, layout)
    critic = load_pretrained(
        archive.with_name("last.nemo"),
        layout,
        num_attributes=len(scorer.contract.attributes),
        precision=Precision.fp32,
        reads_every_token=True,
    )
    marker = scorer.contract.reply_marker
    assert marker is not None
    for text, rewards in zip(TEXTS, score_all(scorer, TEXTS), strict=True):
        ids = scorer.encode(text).token_ids
        (values,) = infer_values(critic.model, [PackedBatch.pack([ids])], layout) or ()
        wanted = values[reply_start(ids, marker) :].mean(0).numpy()
        wanted = wanted + np.array(scorer.contract.label_means, np.float32)
        np.testing.assert_allclose(rewards, wanted, atol=2e-6)


def test_mean_of_the_reply_has_the_same_bits_in_any_company_and_from_a_cache(
    archive: Path, layout: Any
) -> None:
    scorer = load_scorer(archive, layout)
    alone = np.concatenate([score_all(scorer, [text]) for text in TEXTS])
    assert score_all(scorer, TEXTS).tobytes() == alone.tobytes()
    order = np.random.RandomState(1).permutation(len(TEXTS))
    shuffled = score_all(scorer, [TEXTS[index] for index in order])
    assert shuffled[np.argsort(order)].tobytes() == alone.tobytes()
    cached = load_scorer(archive, layout, prefix_cache_tokens=4096)
    for _ in range(2):
        assert score_all(cached, TEXTS).tobytes() == alone.tobytes()
    # The question is kept, and no more: of the text without a reply nothing.
    ids = cached.encode(CHATS[0]).token_ids
    assert cached.counts.cached > 0
    assert cached.counts.cached % 16 == 0
    before = cached.counts.cached
    score_all(cached, [TEXTS[5]])
    assert cached.counts.cached == before
    score_all(cached, [CHATS[0]])
    kept = cached.counts.cached - before
    assert 0 < kept <= len(ids) - len(cached.encode("the cat sings").token_ids)


def test_mean_of_the_reply_is_refused_by_what_reads_the_last_token(
    archive: Path, layout: Any
) -> None:
    message = r"the mean of the reply .*model\.head\.reads"
    with pytest.raises(CheckpointError, match=message):
        check_plain_reading(load_reward_model(archive, layout).contract, "critic.nemo", "a critic")


def test_mean_of_the_reply_is_the_same_in_packs_of_any_size(archive: Path, layout: Any) -> None:
    loaded = load_reward_model(archive, layout)
    found = [
        score_all(
            RewardScorer(loaded.model, loaded.contract, loaded.tokenizer, layout, budget), CHATS
        )
        for budget in (loaded.contract.seq_length, 8192)
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
