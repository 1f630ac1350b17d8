"""What the gateway's settings refuse, before anything listens."""

from __future__ import annotations

import pytest

from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.errors import SettingsError


def load(*settings: str) -> GatewayRunConfig:
    return load_config(GatewayRunConfig, settings)


def test_it_listens_on_this_machine_alone_unless_told() -> None:
    config = load()
    assert config.gateway.host == "127.0.0.1"
    assert config.backends == ["http://127.0.0.1:5555"]


def test_backends_are_a_list() -> None:
    assert load("backends=[http://a:1,http://b:2]").backends == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gateway.port=70000", "gateway.port: got 70000, wanted 0"),
        ("gateway.max_request_bytes=0", "gateway.max_request_bytes: got 0, wanted a number above"),
        ("gateway.retry_s=-1", "gateway.retry_s: got -1.0, wanted 0 or more"),
        ("gateway.key_file=k.pem", "gateway.key_file: got 'k.pem', wanted a key_file with a cert"),
        ("backends=[]", r"backends: got \[\], wanted the URL of a server"),
        ("gateway.token=secret", "unknown key gateway.token"),
    ],
)
def test_what_cannot_work_is_refused(setting: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(setting)


def test_a_token_has_one_place() -> None:
    with pytest.raises(SettingsError, match="a token_file or a token_variable, not both"):
        load("gateway.token_file=t", "gateway.token_variable=T")
