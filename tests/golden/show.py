"""Prints what the code makes of a family's cases, as the corpus files have it: `python -m tests.golden.show FAMILY`."""

from __future__ import annotations

import json
import sys

from omlxd.engine.answer import Answer
from omlxd.engine.preparing import Preparer
from tests.golden.corpus import Case, cases


def read(case: Case) -> tuple[list[tuple[str, str]], Answer]:
    """The deltas, token by token, and the whole answer, without an engine."""
    model = case.model()
    request = case.request()
    prepared = Preparer(model.tokenizer, model.facts).prepare(request)
    answer = Answer(prepared.form, case.stop, model.tokenizer)
    deltas: list[tuple[str, str]] = []
    for id in case.ids():
        if answer.stopped or id in model.facts.eos_token_ids:
            break
        deltas += answer.add(id)
    if not answer.stopped:
        deltas += answer.finish(case.end_id() if case.end else None)
    return deltas, answer


if __name__ == "__main__":
    for family in sys.argv[1:]:
        for case in cases(family):
            deltas, answer = read(case)
            print(case.id)
            print('  "deltas":', json.dumps(deltas, ensure_ascii=False))
            print("  calls:", [call["function"] for call in answer.calls], "malformed:", answer.malformed)
            print("  reasoning tokens:", answer.reasoning_tokens, "same:", tuple(deltas) == case.deltas)
