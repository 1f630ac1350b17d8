"""All rewards of a client are by one scoring contract: the expected one, or that of the first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.utils.errors import ConfigError, ServingError

_HASH = re.compile("[0-9a-f]{64}")


class OtherContractError(ServingError):
    """A server scores by another contract than the wanted one; ``text`` leaves out its name."""

    def __init__(self, server: str, text: str) -> None:
        super().__init__(f"{server}: {text}")
        self.text = text


@dataclass(frozen=True)
class _Known:
    """The hash of a contract, None for a server that has none; and whose it is."""

    hash: str | None
    contract: ScoringContract | None
    whose: str = ""


class ContractCheck:
    """Compares what each server scores by; also knows how many columns its rewards have."""

    def __init__(self, expect: ScoringContract | str | None) -> None:
        """Raise ConfigError if ``expect`` is neither a contract nor a hash."""
        if isinstance(expect, str) and not _HASH.fullmatch(expect):
            raise ConfigError(
                f"expect: got {expect!r:.80}, wanted a ScoringContract or its whole hash"
            )
        self.columns: int | None = None
        self._wanted: _Known | None = None
        self._published: dict[str, _Known] = {}
        if isinstance(expect, ScoringContract):
            self._wanted = _Known(expect.hash, expect)
            self.columns = len(expect.attributes)
        elif expect is not None:
            self._wanted = _Known(expect, None)

    @property
    def is_bound(self) -> bool:
        """True once it is known which contract is wanted, or that none is."""
        return self._wanted is not None

    @property
    def wants_contract(self) -> bool:
        """True if a server without a contract is a wrong one."""
        return self._wanted is not None and self._wanted.hash is not None

    def check_published(self, server: str, contract: ScoringContract | None) -> None:
        """Check the contract that a server publishes; None if it publishes none.

        Raises:
            OtherContractError: it is not the wanted one, or not that of another server.
        """
        mine = _Known(contract.hash if contract is not None else None, contract, server)
        self.withdraw(server)
        # Before any reward nobody knows which server is right: each is compared with all others.
        for other in [self._wanted] if self._wanted is not None else self._published.values():
            _compare(server, mine, other)
        self._published[server] = mine
        if contract is not None:
            self.columns = len(contract.attributes)

    def check_reward(self, server: str, contract_hash: str | None, columns: int) -> None:
        """Check the contract of a reward of ``columns`` attributes; the first one binds the others.

        Raises:
            OtherContractError: it is another contract.
        """
        # If the server has published this contract, an error can say in what it differs.
        known = self._published.get(server)
        is_published = known is not None and known.hash == contract_hash
        mine = known if is_published and known else _Known(contract_hash, None, server)
        if self._wanted is None:
            self._wanted = mine
        _compare(server, mine, self._wanted)
        self.columns = columns

    def withdraw(self, server: str) -> None:
        """Drop what this server published, as another may have taken its place."""
        self._published.pop(server, None)


def _compare(server: str, got: _Known, wanted: _Known) -> None:
    if got.hash == wanted.hash:
        return
    text = f"got the scoring contract {got.hash or '(none)'}, "
    text += f"wanted {wanted.hash or '(none)'}"
    if wanted.whose:
        text += f", that of {wanted.whose}: the rewards of one client are by one contract"
    if got.contract is not None and wanted.contract is not None:
        text += f": {describe_differences(wanted.contract.differences(got.contract))}"
    raise OtherContractError(server, text)
