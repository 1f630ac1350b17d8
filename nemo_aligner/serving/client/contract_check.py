"""``ContractCheck``: check that all rewards of a client have the same scoring contract.

This is the expected contract or, if none is expected, the contract that was fetched first or that
of the first reward, whichever came earlier.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.serving.client.fingerprint import FingerprintCheck
from nemo_aligner.utils.errors import ConfigError, ServingError

_HASH = re.compile("[0-9a-f]{64}")


class OtherContractError(ServingError):
    """A server has another scoring contract than expected; ``text`` omits the server's name."""

    def __init__(self, server: str, text: str) -> None:
        super().__init__(f"{server}: {text}")
        self.text = text


class OtherModelError(OtherContractError):
    """A server has the expected scoring contract, but other weights."""


@dataclass(frozen=True)
class _ServerContract:
    """The contract of a server, or only its hash if the contract was not published.

    Attributes:
        hash: the hash of the contract; None if the server has none.
        contract: the contract itself, if it was published.
        server: name of the server; empty for the contract that the user expects.
        may_be_gateway: whether a server that publishes no contract may be a gateway; None if it was
            not asked.
    """

    hash: str | None
    contract: ScoringContract | None
    server: str = ""
    may_be_gateway: bool | None = None

    @property
    def scores_jointly(self) -> bool | None:
        """The same as ``ContractCheck.scores_jointly``, for this server alone."""
        if self.contract is None:
            return self.may_be_gateway
        try:
            return "combine" in json.loads(self.contract.shaping or "{}")
        except (ValueError, TypeError, RecursionError):  # rules of another program
            return True


class ContractCheck:
    """Accepts only servers with the same scoring contract, and with the expected model.

    Attributes:
        fingerprints: compares the servers' models.
        columns: number of columns of a reward, A; None until it is known.
    """

    def __init__(
        self, expect: ScoringContract | str | None, expect_fingerprint: str | None = None
    ) -> None:
        """Store what is expected; ConfigError if that is not a contract, hash or fingerprint."""
        if isinstance(expect, str) and not _HASH.fullmatch(expect):
            raise ConfigError(
                f"expect: got {expect!r:.80}, wanted the 64 hexadecimal characters that the server "
                "prints"
            )
        self.fingerprints = FingerprintCheck(expect_fingerprint)
        self.columns: int | None = None
        self._expected: _ServerContract | None = None
        self._published: dict[str, _ServerContract] = {}
        if isinstance(expect, ScoringContract):
            self._expected = _ServerContract(expect.hash, expect)
            self.columns = len(expect.attributes)
        elif expect is not None:
            self._expected = _ServerContract(expect, None)

    @property
    def is_bound(self) -> bool:
        """True if ``expect``, a fetched contract or a reward has decided which one is right."""
        return self._expected is not None

    @property
    def scores_jointly(self) -> bool | None:
        """Whether a reward may depend on the other samples of its request; None if unknown.

        It may if the servers are gateways that combine rewards: a judge compares replies to the
        same prompt, a gate compares their rewards, and functions get all samples of a request. A
        gateway without a reward model publishes no contract, but answers that there is none.
        """
        entries = [entry for entry in (self._expected, *self._published.values()) if entry]
        answers = {entry.scores_jointly for entry in entries} - {None}
        return any(answers) if answers else None

    @property
    def missing(self) -> str | None:
        """Return why a server that publishes no contract is rejected; None if it is accepted."""
        if self._expected is not None and self._expected.hash is not None:
            return "got the scoring contract (none), wanted one"
        expected = self.fingerprints.expected
        return expected and f"got the model fingerprint (none), wanted {expected}"

    def check_fingerprint(self, server: str, fingerprint: str | None) -> None:
        """Raise OtherModelError if a server's model does not have the expected fingerprint."""
        fault = self.fingerprints.find_fault(fingerprint)
        if fault is not None:
            raise OtherModelError(server, fault)

    def check_published(
        self,
        server: str,
        contract: ScoringContract | None,
        fingerprint: str | None = None,
        may_be_gateway: bool | None = None,
    ) -> None:
        """Check the contract and model fingerprint that a server publishes; None stands for none.

        ``may_be_gateway`` tells whether a server without a contract may be a gateway.

        Raises:
            OtherContractError: the contract or the model is not the expected one, or the contract
                differs from that of another server.
        """
        contract_hash = None if contract is None else contract.hash
        published = _ServerContract(contract_hash, contract, server, may_be_gateway)
        self.withdraw(server)
        # A server with a wrong model is rejected here, before its contract is compared with those
        # of other servers.
        self.check_fingerprint(server, fingerprint)
        # Before the first reward it is unknown which server is right: compare with all others.
        expected = self._published.values() if self._expected is None else [self._expected]
        for expected_contract in expected:
            _check_same_contract(server, published, expected_contract)
        self.fingerprints.accept(server, fingerprint)
        self._published[server] = published
        if contract is not None:
            self.columns = len(contract.attributes)

    def bind(self, server: str, contract: ScoringContract, fingerprint: str | None = None) -> None:
        """Check a contract that the caller fetched; all later rewards must have this contract.

        Raises:
            OtherContractError: the contract or the model is not the expected one.
        """
        if self._expected is None:
            self.check_fingerprint(server, fingerprint)
            self._expected = _ServerContract(contract.hash, contract, server)
        self.check_published(server, contract, fingerprint)

    def check_reward(
        self, server: str, contract_hash: str | None, columns: int, fingerprint: str | None = None
    ) -> None:
        """Check the contract and model of a reward; later rewards must have the same contract.

        ``columns`` is the number of attributes of the reward.

        Raises:
            OtherContractError: the contract or the model is not the expected one.
        """
        self.check_fingerprint(server, fingerprint)
        # If the server has published this contract, an error can list the differences.
        published = self._published.get(server)
        is_published = published is not None and published.hash == contract_hash
        actual = (
            published
            if is_published and published
            else _ServerContract(contract_hash, None, server)
        )
        if self._expected is None:
            self._expected = actual
        _check_same_contract(server, actual, self._expected)
        self.fingerprints.accept(server, fingerprint)
        self.columns = columns

    def withdraw(self, server: str) -> None:
        """Forget what this server published, as another server may run at its URL by now."""
        self._published.pop(server, None)


def _check_same_contract(server: str, actual: _ServerContract, expected: _ServerContract) -> None:
    if actual.hash == expected.hash:
        return
    text = f"got the scoring contract {actual.hash or '(none)'}, "
    text += f"wanted {expected.hash or '(none)'}"
    if expected.server == server:
        text += ", which this server had before: all rewards of a client must have one contract"
    elif expected.server:
        text += f", the one of {expected.server}: all rewards of a client must have one contract"
    if actual.contract is not None and expected.contract is not None:
        text += f": {describe_differences(expected.contract.differences(actual.contract))}"
    if not expected.server:
        text += ". Serve the model that has it, or expect another contract"
    raise OtherContractError(server, text)
