"""An answer: one request's tokens become text, channel by channel, until a stop string or the end.

`Form` is what has to be known of the model and the request for that; `Answer` is the answer as it grows. It is the one
way from token ids to what a client sees, streamed or whole: the result is the deltas' concatenation. Lives with its
request, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omlxd.engine.api import Channel, Json, MalformedCall
from omlxd.engine.channels import Dialect, Piece, Separator, State
from omlxd.engine.text import Decoder, Detokenizer, StopFinder
from omlxd.engine.tools import Calls, ToolFormat, Tools

Part = tuple[Channel, str]


@dataclass(frozen=True, slots=True)
class Form:
    """How one request's answer is to be read.

    `control_ids` are tokens whose text is never shown. `tool_format` is None where no tools were offered. `stop` are
    the strings that end the content, and with `stop_in_reasoning` the reasoning too; a tool call they never end.
    """

    dialect: Dialect = field(default_factory=Dialect)
    state: State = State.CONTENT
    control_ids: frozenset[int] = frozenset()
    tool_format: ToolFormat | None = None
    tools: Tools = ()
    stop_in_reasoning: bool = False
    begun: bool = False  # the prompt's end is the answer's beginning


PLAIN = Form()
_CHANNELS: dict[State, Channel] = {
    State.CONTENT: "content",
    State.REASONING: "reasoning",
    State.TOOL: "tool_call",
}


class Answer:
    """One answer. `add` for each token, then `finish` once; `text`, `reasoning` and `calls` at any time."""

    def __init__(self, form: Form, stop: Sequence[str], decoder: Decoder) -> None:
        self._form = form
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        format = form.tool_format
        quoted = None if format is None else format.quoted
        self._separator = Separator(form.dialect, form.state, quoted, begun=form.begun)
        self._calls = None if format is None else Calls(format, form.tools)
        self._stops = {State.CONTENT: StopFinder(stop)} if stop else {}
        if stop and form.stop_in_reasoning:
            self._stops[State.REASONING] = StopFinder(stop)
        self._texts: dict[Channel, list[str]] = {"content": [], "reasoning": [], "tool_call": []}
        self._control_texts: set[str] = set()
        self.reasoning_tokens = 0
        self.stopped = False  # by a stop string

    @property
    def state(self) -> State:
        return self._separator.state

    @property
    def channel(self) -> Channel:
        """The channel that is being written."""
        return _CHANNELS.get(self.state, "content")

    @property
    def text(self) -> str:
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str | None:
        return "".join(self._texts["reasoning"]) or None

    @property
    def calls(self) -> Sequence[Mapping[str, Json]]:
        return self._calls.parsed if self._calls is not None else ()

    @property
    def malformed(self) -> Sequence[MalformedCall]:
        return self._calls.malformed if self._calls is not None else ()

    def add(self, token_id: int) -> list[Part]:
        """The text that became final with this token. Sets `stopped` when a stop string ended the answer."""
        reasoned = self._separator.state is State.REASONING
        if token_id in self._form.control_ids:
            # What is unfinished before a control token stays so: its bytes must not be joined with the token's text.
            pieces = self._separator.add(self._detokenizer.finish())
            text = self._detokenizer.add(token_id)
            self._control_texts.add(text)
            pieces += self._separator.add(text, control=True)
        else:
            pieces = self._separator.add(self._detokenizer.add(token_id))
        if reasoned or self._separator.state is State.REASONING:
            self.reasoning_tokens += 1
        return self._parts(pieces)

    def finish(self, end_id: int | None = None) -> list[Part]:
        """What was held back, at the end of the answer; `end_id` is the stop id that ended it, if one did."""
        parts = self._parts(self._separator.add(self._detokenizer.finish()))
        parts += self._parts(self._separator.finish())
        if not self.stopped:
            parts += self._release(self._separator.state)
        if self._separator.state is State.TOOL and self._calls is not None and not self.stopped:
            parts += self._returned(self._calls.end(whole=self._ends_call(end_id)))
        return parts

    def _ends_call(self, end_id: int | None) -> bool:
        if end_id is None or self._form.tool_format is None:
            return False
        end = self._form.tool_format.end
        return not end or self._decoder.decode([end_id], skip_special_tokens=False) == end

    def _parts(self, pieces: Sequence[Piece]) -> list[Part]:
        if len(pieces) == 1 and pieces[0].marker is None and not self.stopped:
            return self._of_text(pieces[0])  # nearly every token
        parts: list[Part] = []
        for piece in pieces:
            if self.stopped:
                break
            parts += self._of_text(piece)
            if piece.marker is not None and not self.stopped:
                parts += self._of_marker(piece, piece.marker)
        return parts

    def _of_text(self, piece: Piece) -> list[Part]:
        if self._calls is not None and piece.state is State.TOOL:
            self._calls.add(piece.raw)
        finder = self._stops.get(piece.state)
        if finder is None or not piece.text:
            return self._kept(piece.state, piece.text)
        text, self.stopped = finder.add(piece.text)
        return self._kept(piece.state, text)

    def _of_marker(self, piece: Piece, marker: str) -> list[Part]:
        """One state has ended with a marker and another begins."""
        parts = self._release(piece.state)
        if self._calls is not None:
            if piece.state is State.TOOL:
                parts += self._returned(self._calls.close(marker))
            if piece.target is State.TOOL:
                self._calls.open(marker)
        return parts

    def _release(self, state: State) -> list[Part]:
        """What might have become a stop string and did not: none reaches over the end of its channel."""
        finder = self._stops.get(state)
        return [] if finder is None else self._kept(state, finder.finish())

    def _returned(self, malformed: MalformedCall | None) -> list[Part]:
        """A call that cannot be read comes back as content, without the control tokens in it."""
        if malformed is None:
            return []
        text = malformed.text
        for control in self._control_texts:
            text = text.replace(control, "")
        return self._kept(State.CONTENT, text)

    def _kept(self, state: State, text: str) -> list[Part]:
        if not text:
            return []
        channel = _CHANNELS[state]
        self._texts[channel].append(text)
        return [(channel, text)]
