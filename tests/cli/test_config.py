"""`omlxctl config`: the settings as the daemon would read them, without a daemon."""

from tests.cli.running import Home


def test_path_names_the_file(home: Home) -> None:
    assert home.run("config", "path").text == f"{home.path}/config.toml\n"
    assert home.run("config", "path", "--json").document == {"path": f"{home.path}/config.toml"}


def test_a_key_that_is_set_is_got_and_its_source_shown(home: Home) -> None:
    assert home.run("config", "get", "engine.max_batch").text == "32\n"
    assert home.run("config", "set", "engine.max_batch", "8").code == 0
    assert home.run("config", "get", "engine.max_batch", "--json").document == 8
    shown = home.run("config", "show", "--json").document
    assert shown["engine.max_batch"] == {"value": 8, "source": "file"}
    assert shown["engine.max_queue"] == {"value": 256, "source": "default"}
    assert "engine.max_batch            8            file" in home.run("config", "show").text


def test_the_environment_wins_and_set_says_so(home: Home) -> None:
    env = {"OMLXD_ENGINE__MAX_BATCH": "4"}
    outcome = home.run("config", "set", "engine.max_batch", "8", env=env)
    assert "the environment sets engine.max_batch to 4" in outcome.errors[0]
    assert home.run("config", "show", "--json", env=env).document["engine.max_batch"] == {"value": 4, "source": "env"}


def test_a_wrong_key_or_value_is_a_usage_error_and_changes_nothing(home: Home) -> None:
    for arguments in (["engine.max_bach", "8"], ["engine.max_batch", "0"]):
        outcome = home.run("config", "set", *arguments, "--json")
        assert outcome.code == 2
        assert outcome.document["error"]["data"]["kind"] == "config"
    assert not (home.path / "config.toml").exists()


def test_a_file_that_cannot_be_used_is_code_1_and_named(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    (home.path / "config.toml").write_text("[engine]\nmax_bach = 8\n")
    for arguments in (["show"], ["get", "engine.max_batch"]):
        outcome = home.run("config", *arguments)
        assert (outcome.code, outcome.out) == (1, b"")
        assert "max_bach" in outcome.errors[0]
        assert "engine.max_batch" in outcome.errors[0]
