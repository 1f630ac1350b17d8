"""The client against a real Triton in front of a fake scorer, and what importing it changes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from dataclasses import replace

import numpy as np
import pytest

from nemo_aligner.errors import ServingError
from tests.launching import free_port
from tests.serving.fake_server import CONTRACT, total
from tests.tiny import ROOT

pytest.importorskip("pytriton")


class TestClient:
    def test_texts_and_conversations_in_one_call_keep_their_order(self, client):
        chat = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "Grüße"}]
        rewards = client.score(["ab", chat, "c"])
        assert rewards.dtype == np.float32
        assert rewards[:, 0].tolist() == [195, total("hi Grüße"), 99]
        assert rewards[:, 1].tolist() == (-rewards[:, 0]).tolist()

    def test_the_contract_is_published_and_expected(self, server, client):
        from nemo_aligner.serving.client.reward import RewardClient

        assert client.contract() == CONTRACT
        for expect in (CONTRACT, CONTRACT.hash):
            with RewardClient(server.url, expect=expect) as other:
                assert other.score(["a"])[0, 0] == 97
        wanted = replace(CONTRACT, seq_length=9, add_eos=False)
        with RewardClient(server.url, expect=wanted) as other:
            differ = "model.data.add_eos: False -> True; model.data.seq_length: 9 -> 64"
            with pytest.raises(
                ServingError, match=f"{CONTRACT.hash}, wanted {wanted.hash}: {differ}"
            ):
                other.score(["a"])
        with (
            RewardClient(server.url, expect="0" * 64) as other,
            pytest.raises(ServingError, match=f"got the scoring .*{CONTRACT.hash}, wanted 000"),
        ):
            asyncio.run(other.score_async(["a"]))
        with pytest.raises(ValueError, match="expect: got 'abc', wanted a ScoringContract or"):
            RewardClient(server.url, expect="abc")

    def test_the_contract_needs_no_input(self, server):
        url = f"{server.url}/v2/models/contract/infer"
        with urllib.request.urlopen(url, data=b'{"inputs": []}', timeout=10) as response:
            outputs = {each["name"]: each["data"] for each in json.load(response)["outputs"]}
        found = {name: json.loads(text) for name, (text,) in outputs.items()}
        assert found["contract"] == CONTRACT.to_dict()
        assert found["statistics"]["tokens_per_call"] == 256
        assert found["turn_end"] is None  # its contract has no template

    def test_a_server_says_what_it_has_counted(self, server, client):
        (before,) = asyncio.run(client.statistics_async()).values()
        client.score(["abc", "d"])
        (after,) = asyncio.run(client.statistics_async()).values()
        counted = {name: after[name] - before[name] for name in ("requests", "rows", "tokens")}
        assert counted == {"requests": 1, "rows": 2, "tokens": 4}
        assert after["calls"] > before["calls"]
        assert after["forward_seconds"] > before["forward_seconds"]

    def test_rows_say_what_was_cut_and_by_which_contract(self, client):
        scored = asyncio.run(client.score_rows_async(["a" * 100, "", "b"]))
        assert scored.exceeded.tolist() == [True, False, False]
        assert (scored.contract_hash, [*scored.errors]) == (CONTRACT.hash, [1])
        scored = asyncio.run(client.score_token_rows_async([[1], [-1]]))
        assert scored.rewards[0].tolist() == [1.0, -1.0]
        assert "token id -1" in scored.errors[1]
        with pytest.raises(ServingError, match="row 1: the text is empty"):
            asyncio.run(client.score_rows_async(["a", ""], on_error="raise"))

    def test_each_server_is_asked_whether_it_is_there(self, server):
        from nemo_aligner.serving.client.reward import RewardClient

        gone = f"http://127.0.0.1:{free_port()}"
        with RewardClient([server.url, gone]) as client:
            found = asyncio.run(client.probe_async())
            assert found[server.url] is None
            assert "connection refused" in found[gone]
            counted = asyncio.run(client.statistics_async())
        assert counted[gone] is None
        assert counted[server.url]["calls"] > 0

    def test_more_texts_than_fit_a_request(self, client):
        """The server refuses more than 32."""
        texts = ["x" * (1 + i % 7) for i in range(100)]
        assert client.score(texts)[:, 0].tolist() == [total(text) for text in texts]

    def test_tokens(self, client):
        rows = [[7] * length for length in (5, 1, 60)] * 20
        assert client.score_tokens(rows)[:, 0].tolist() == [sum(row) for row in rows]

    def test_nothing_is_nothing(self, client):
        assert len(client.score([])) == 0

    def test_one_string_is_not_a_list(self, client):
        with pytest.raises(TypeError, match="wanted a list"):
            client.score("oops")

    def test_futures_and_asyncio_give_the_same(self, client):
        texts = ["a", "bc", "d" * 50]
        expected = client.score(texts)

        async def both() -> list[np.ndarray]:
            return await asyncio.gather(client.score_async(texts), client.score_async(texts[:1]))

        future = client.score_future(texts)
        all_three, first = asyncio.run(both())
        np.testing.assert_array_equal(future.result(), expected)
        np.testing.assert_array_equal(all_three, expected)
        np.testing.assert_array_equal(first, expected[:1])

    def test_the_servers_own_words_reach_every_form(self, client):
        wanted = "reward_model: row 1: the text is empty$"
        with pytest.raises(ServingError, match=wanted):
            client.score(["a", ""])
        with pytest.raises(ServingError, match=wanted):
            client.score_future(["a", ""]).result()
        with pytest.raises(ServingError, match=wanted):
            asyncio.run(client.score_async(["a", ""]))

    def test_a_cut_text_is_scored_and_told(self, client, caplog):
        assert client.score(["y" * 100])[0, 0] == 64 * ord("y")
        assert "1 of 1 texts were cut" in caplog.text


IMPORTS = """
import logging, sys, warnings
import aiohttp, numpy
finders, filters = list(sys.meta_path), list(warnings.filters)
import nemo_aligner, nemo_aligner.serving.client, nemo_aligner.text.contract
import nemo_aligner.data.formats
from nemo_aligner.serving.client import RewardClient
assert sys.meta_path == finders, sys.meta_path
assert warnings.filters == filters, warnings.filters
heavy = {"torch", "megatron", "transformers", "jinja2", "omegaconf", "pytriton", "tritonclient"}
heavy &= set(sys.modules)
assert not heavy, heavy
import nemo_aligner.metrics.table
assert sys.meta_path == finders, sys.meta_path
"""
THEN_MEGATRON = """
import importlib.machinery, torch
import megatron.core.tensor_parallel.random
assert type(megatron.core.__spec__.loader) is importlib.machinery.SourceFileLoader
assert torch.cuda.current_device.__module__ == "torch.cuda"
assert megatron.core.tensor_parallel.random._get_cuda_rng_state.__defaults__[0] == "cuda"
"""


@pytest.mark.slow(seconds=4)
def test_importing_the_client_or_the_contract_changes_nothing_for_others() -> None:
    """Neither the finders of modules, nor filters of warnings, nor megatron-core and torch."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + THEN_MEGATRON],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
