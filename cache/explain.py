"""Why a prompt was not reused further: the answer to a miss, as a value.

Pure, for any thread. It speaks of token ids only; the engine turns them into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omlxd.cache.keys import MediaSpan

Reason = Literal["complete", "nothing_stored", "diverges", "ends", "no_checkpoint", "inside_media", "window_gone"]
AROUND = 16  # tokens shown on each side


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt is reusable and what ends it.

    `usable_tokens` would be reused by a lookup now; `stored_tokens` agree with the longest stored prefix. `before` are
    the last of these, `asked` what the prompt goes on with and `stored` what the stored sequence does (empty where it
    ends): their first tokens are the first that differ. Reasons: "complete" (all but the one token that is always
    computed), "nothing_stored", "diverges" (a token or picture differs), "ends" (the stored sequence is shorter), and
    for tokens that are stored and not usable: "no_checkpoint" (recurrent state cannot be cut there), "inside_media",
    "window_gone" (the sliding-window rows before it were already overwritten).
    """

    prompt_tokens: int
    usable_tokens: int
    stored_tokens: int
    reason: Reason
    before: tuple[int, ...]
    asked: tuple[int, ...]
    stored: tuple[int, ...]


def explanation(
    tokens: Sequence[int],
    media: Sequence[MediaSpan],
    *,
    usable: int,
    reach: int,
    stored: Sequence[int],
    recurrent: bool,
) -> Explanation:
    """`stored` are the stored tokens from position `reach` on."""
    return Explanation(
        prompt_tokens=len(tokens),
        usable_tokens=usable,
        stored_tokens=reach,
        reason=_reason(tokens, media, usable=usable, reach=reach, stored=stored, recurrent=recurrent),
        before=tuple(tokens[max(0, reach - AROUND) : reach]),
        asked=tuple(tokens[reach : reach + AROUND]),
        stored=tuple(stored[:AROUND]),
    )


def _reason(
    tokens: Sequence[int],
    media: Sequence[MediaSpan],
    *,
    usable: int,
    reach: int,
    stored: Sequence[int],
    recurrent: bool,
) -> Reason:
    if usable >= len(tokens) - 1:
        return "complete"
    if reach == 0:
        return "nothing_stored"
    if usable == reach:
        return "diverges" if stored else "ends"
    if recurrent:
        return "no_checkpoint"
    if any(span.start < min(reach, len(tokens) - 1) < span.stop for span in media):
        return "inside_media"
    return "window_gone"
