"""All rewards of a client are by one scoring contract: the expected one, or the first it met."""

from __future__ import annotations

import re

from nemo_aligner.errors import ConfigError, ServingError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_changes import describe_differences

_HASH = re.compile("[0-9a-f]{64}")


class Agreement:
    """Compares what each server scores by; also knows how many columns its rewards have."""

    def __init__(self, expect: ScoringContract | str | None) -> None:
        """Raises ConfigError: ``expect`` is neither a contract nor a hash."""
        if isinstance(expect, str) and not _HASH.fullmatch(expect):
            raise ConfigError(
                f"expect: got {expect!r:.80}, wanted a ScoringContract or its whole hash"
            )
        self.is_expected = expect is not None
        self._contract: ScoringContract | None = None
        self._hash: str | None = None
        if isinstance(expect, ScoringContract):
            self._contract, self._hash = expect, expect.hash
        else:
            self._hash = expect
        self._from: str | None = None
        self.columns = len(self._contract.attributes) if self._contract is not None else None

    def check_contract(self, server: str, contract: ScoringContract | None) -> None:
        """What a server publishes; None where it publishes none.

        Raises:
            ServingError: it is another contract.
        """
        self.check_hash(server, contract.hash if contract is not None else None, contract)
        if contract is not None:
            self._contract = contract
            self.columns = len(contract.attributes)

    def check_hash(
        self, server: str, got: str | None, contract: ScoringContract | None = None
    ) -> None:
        """What a reward, or a ``contract``, was made by; None where the server does not say.

        Raises:
            ServingError: it is another contract.
        """
        if not self.is_expected and self._from is None:
            self._hash, self._from = got, server
        if got == self._hash:
            return
        differ, wanted = "", self._hash or "(none)"
        if self._contract is not None and contract is not None:
            differ = describe_differences(self._contract.differences(contract))
        if not self.is_expected:
            wanted += f", as {self._from} had it: the rewards of one client are by one contract"
        raise ServingError(
            f"{server}: got the scoring contract {got or '(none)'}, wanted {wanted}"
            + (f": {differ}" if differ else "")
        )
