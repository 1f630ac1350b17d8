"""Texts as a policy leaves them, completed to what the reward model's chat template writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from nemo_aligner.serving.wire.types import ScoreRequest
from nemo_aligner.text.turn_end import TurnEnd


class TurnCompletion:
    """Asks the backends once how their template ends a turn; for one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[TurnEnd | None]]) -> None:
        self._ask = ask
        self._has_asked = False
        self._turn_end: TurnEnd | None = None

    async def complete(self, request: ScoreRequest) -> tuple[ScoreRequest, int]:
        """The request, and how many of its raw texts or token rows were completed.

        Raises:
            ServingError: no backend says what its template writes.
        """
        if not self._has_asked:
            self._turn_end = await self._ask()
            self._has_asked = True
            self._say()
        turn = self._turn_end
        if turn is None:
            return request, 0
        texts, token_lists = request.texts, request.token_lists
        if texts is not None:
            texts = [turn.complete(each) if isinstance(each, str) else each for each in texts]
        if token_lists is not None:
            token_lists = [turn.complete_ids(each) for each in token_lists]
        before = [*(request.texts or ()), *(request.token_lists or ())]
        after = [*(texts or ()), *(token_lists or ())]
        changed = sum(len(new) != len(old) for old, new in zip(before, after, strict=True))
        return replace(request, texts=texts, token_lists=token_lists), changed

    def _say(self) -> None:
        turn = self._turn_end
        if turn is not None:
            whole = turn.end + turn.rest
            print(
                f"Raw texts that end with {turn.end!r} are completed to {whole!r}, as the chat "
                "template has it (gateway.complete_turns)",
                flush=True,
            )
