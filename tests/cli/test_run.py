"""`omlxctl run` and `complete`: which word is what, what is sent, what is shown."""

import json
from dataclasses import replace

import pytest

from omlxd.engine.api import ChatPrompt, Delta, GenerateRequest, Progress, TextPrompt, TokenLogprob, Unsupported
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.fakes import FakeGeneration, answering, entry, refusing, result_of


def asked(daemon: Daemon) -> GenerateRequest:
    [request] = daemon.backend.requests
    return request


def user_text(request: GenerateRequest) -> object:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.messages[-1]["content"]


def two_models(daemon: Daemon) -> None:
    daemon.backend.models["other"] = entry("other")


def test_a_model_and_a_prompt_send_one_user_message_and_print_the_answer(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "tiny", "good morning")
    assert (outcome.code, outcome.text, outcome.err) == (0, "good morning\n", b"")
    assert asked(daemon).model == "tiny"
    assert asked(daemon).prompt == ChatPrompt([{"role": "user", "content": "good morning"}])


def test_one_word_that_names_no_model_is_the_prompt_for_the_only_model(home: Home, daemon: Daemon) -> None:
    assert home.run("run", "good morning").text == "good morning\n"
    assert asked(daemon).model == "tiny"


def test_one_word_that_names_a_model_takes_the_prompt_from_standard_input(home: Home, daemon: Daemon) -> None:
    two_models(daemon)
    assert home.run("run", "other", stdin=b"good\nmorning\n").text == "good\nmorning\n"
    assert asked(daemon).model == "other"


def test_a_dash_reads_the_prompt_from_standard_input_with_and_without_a_model(home: Home, daemon: Daemon) -> None:
    assert home.run("run", "tiny", "-", stdin=b"one").text == "one\n"
    assert home.run("run", "-", stdin=b"two").text == "two\n"


@pytest.mark.parametrize("prompt", ["--help", "--foo", "-x", "-h", "--json", "--socket=x", "--"])
def test_behind_two_dashes_a_prompt_may_look_like_an_option(home: Home, daemon: Daemon, prompt: str) -> None:
    assert home.run("run", "--temperature", "0", "--", "tiny", prompt).text == f"{prompt}\n"
    assert home.run("run", "tiny", "--", prompt).text == f"{prompt}\n"


def test_a_word_too_many_behind_two_dashes_is_named_as_it_was_typed(home: Home, daemon: Daemon) -> None:
    outcome = home.run("ping", "--", "--loud")
    assert (outcome.code, outcome.errors) == (
        2,
        ["error: unrecognized arguments: --loud; `omlxctl ping --help` shows what it takes"],
    )


@pytest.mark.parametrize("command", ["cache", "session", "config"])
def test_a_command_without_its_action_is_told_that_the_action_alone_is_missing(home: Home, command: str) -> None:
    outcome = home.run(command)
    reason = f"the following arguments are required: action; `omlxctl {command} --help` shows what it takes"
    assert (outcome.code, outcome.errors) == (2, [f"error: {reason}"])


def test_two_words_are_a_model_and_a_prompt_even_if_both_name_models(home: Home, daemon: Daemon) -> None:
    two_models(daemon)
    assert home.run("run", "tiny", "other").text == "other\n"
    assert asked(daemon).model == "tiny"


def test_without_a_model_the_setting_decides(home: Home, daemon: Daemon) -> None:
    two_models(daemon)
    assert home.run("run", "hi", env={"OMLXD_MODELS__DEFAULT": "other"}).code == 0
    assert asked(daemon).model == "other"


def test_without_a_setting_a_model_that_cannot_load_is_not_counted(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["broken"] = replace(entry("broken"), state="FAILED", error="no weights")
    home.run("run", "hi")
    assert asked(daemon).model == "tiny"


def test_of_several_usable_models_the_only_one_in_memory_is_meant(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["other"] = replace(entry("other"), state="READY")
    home.run("run", "hi")
    assert asked(daemon).model == "other"


def test_if_nothing_decides_the_error_lists_the_models(home: Home, daemon: Daemon) -> None:
    two_models(daemon)
    outcome = home.run("run", "hi", "--json")
    assert outcome.code == 2
    assert outcome.document["error"]["data"] == {"kind": "usage", "models": ["tiny", "other"]}
    assert daemon.backend.requests == []


def test_without_any_model_the_error_says_how_to_get_one(home: Home, daemon: Daemon) -> None:
    daemon.backend.models.clear()
    outcome = home.run("run", "hi")
    assert outcome.code == 1
    assert "omlxctl pull demo" in outcome.errors[0]


@pytest.mark.parametrize("words", [["tiny", ""], ["tiny", "-"], ["tiny"], [], ["a", "b", "c"]])
def test_a_missing_prompt_or_a_word_too_many_is_a_usage_error(home: Home, daemon: Daemon, words: list[str]) -> None:
    outcome = home.run("run", *words, stdin=b" \n")
    assert (outcome.code, len(outcome.errors), outcome.out) == (2, 1, b"")


def test_a_prompt_that_is_not_utf8_is_a_usage_error_with_the_place(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "-", stdin=b"abc\xff")
    assert (outcome.code, outcome.errors) == (2, ["error: the prompt is not valid UTF-8 at byte 3"])


def test_a_model_directory_is_sent_as_an_absolute_path(home: Home, daemon: Daemon) -> None:
    home.run("run", "./somewhere", "hi")
    model = asked(daemon).model
    assert model.startswith("/")
    assert model.endswith("/somewhere")


def test_every_flag_reaches_the_request_wherever_it_stands(home: Home, daemon: Daemon) -> None:
    flags = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --logprobs 2 --ignore-eos"
    more = "--repetition-penalty 1.1 --presence-penalty -0.5 --frequency-penalty 0.25 --stop END --stop-token-id 7"
    assert (
        home.run("run", "tiny", *flags.split(), "hi", *more.split(), "--stop", "\n\n", "--system", "Be brief.").code
        == 0
    )
    request = asked(daemon)
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, -0.5, 0.25)
    assert (sampling.seed, request.logprobs) == (3, 2)
    assert (stopping.max_tokens, list(stopping.stop), list(stopping.stop_token_ids)) == (5, ["END", "\n\n"], [7])
    assert stopping.ignore_eos
    assert request.prompt == ChatPrompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])


def test_a_value_out_of_range_is_the_daemons_refusal(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "tiny", "hi", "--max-tokens", "0", "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["code"] == -32602
    assert outcome.document["error"]["data"]["field"] == "max_tokens"


def test_an_unknown_model_is_code_1_with_the_daemons_words(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "tini", "hi", "--json")
    assert outcome.code == 1
    error = outcome.document["error"]
    assert (error["code"], error["data"]["did_you_mean"]) == (-32010, ["tiny"])
    assert outcome.errors == [f"error: {error['message']}"]


def without_template(request: GenerateRequest) -> FakeGeneration:
    if isinstance(request.prompt, ChatPrompt):
        return refusing(Unsupported("chat", "the model has no chat template"))
    return answering("continued")


def test_a_model_without_a_chat_template_continues_the_prompt(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = without_template
    assert home.run("run", "once upon").text == "continued\n"
    assert daemon.backend.requests[-1].prompt == TextPrompt("once upon")


def test_with_a_system_message_there_is_no_falling_back(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = without_template
    outcome = home.run("run", "once upon", "--system", "Be brief.")
    assert (outcome.code, len(outcome.errors)) == (1, 1)


def test_another_thing_that_is_unsupported_is_not_retried(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = lambda request: refusing(Unsupported("images", "the model sees none"))
    assert home.run("run", "hi").code == 1
    assert len(daemon.backend.requests) == 1


def test_complete_sends_the_text_as_it_stands_and_the_suffix_beside_it(home: Home, daemon: Daemon) -> None:
    assert home.run("complete", "def f(", "--suffix", "return x").text == "def f(\n"
    assert asked(daemon).prompt == TextPrompt("def f(", "return x")


def test_json_is_one_document_with_the_whole_result(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = lambda request: answering("a b", reasoning="because")
    document = home.run("run", "hi", "--json").document
    assert (document["text"], document["reasoning"], document["usage"]["completion_tokens"]) == ("a b", "because", 2)


def test_the_answer_is_printed_while_it_is_made(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    with home.start("run", "hi") as process:
        answer.push("first")
        assert process.stdout.read(5) == b"first"
        answer.push(" second")
        answer.finish()
        assert process.stdout.read() == b" second\n"
    assert process.returncode == 0


def test_reasoning_goes_to_standard_error_and_the_answer_to_standard_output(home: Home, daemon: Daemon) -> None:
    def thinking(request: GenerateRequest) -> FakeGeneration:
        generation = FakeGeneration()
        generation.push(Delta("let me see", "reasoning"))
        generation.push(Delta("42"))
        generation.finish(result_of("42", reasoning="let me see"))
        return generation

    daemon.backend.script = thinking
    outcome = home.run("run", "hi")
    assert (outcome.out, outcome.err) == (b"42\n", b"let me see\n")
    assert home.run("run", "hi", "--quiet").err == b""


def test_verbose_adds_a_line_of_numbers_on_standard_error(home: Home, daemon: Daemon) -> None:
    outcome = home.run("run", "a b c", "--verbose")
    assert outcome.text == "a b c\n"
    assert outcome.errors == ["3 prompt tokens (0 cached), 3 generated, 100.0 tokens/s, first token after 1 ms"]


def test_logprobs_are_listed_after_the_answer(home: Home, daemon: Daemon) -> None:
    token = TokenLogprob(1, "yes", -0.25, [TokenLogprob(1, "yes", -0.25), TokenLogprob(2, "no", -1.5)])
    daemon.backend.script = lambda request: answering("yes", logprobs=[token])
    outcome = home.run("run", "hi", "--logprobs", "2")
    assert outcome.errors == ["  -0.250  'yes'  ('yes' -0.250, 'no' -1.500)"]


def test_progress_is_not_drawn_into_a_pipe(home: Home, daemon: Daemon) -> None:
    steps = [Progress("load", 1, 2), Progress("prefill", 1, 2)]
    daemon.backend.script = lambda request: answering("done", progress=steps)
    assert home.run("run", "hi").err == b""


def test_a_prompt_and_an_answer_of_200_kb_pass_whole(home: Home, daemon: Daemon) -> None:
    # DM-09: the usual line reader stops at 64 KiB, on either side.
    text = "x" * 200_000
    assert home.run("run", "-", stdin=text.encode()).text == text + "\n"
    assert json.loads(home.run("run", "-", "--json", stdin=text.encode()).out)["text"] == text
