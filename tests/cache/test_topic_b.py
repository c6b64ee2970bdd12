"""CASES.md topic B, persistence and sessions: which tests show that each of its faults is absent here.

What a case asks of settings, sockets and models is shown where those are; the tests themselves are the statement, this
is the way to them.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

SHOWN_BY = {
    "PS-01": [  # killed in the middle of a block write
        ("cache/test_ssd_faults.py", "test_a_kill_at_any_point_of_a_write_costs_that_write_at_most"),
        ("e2e/test_restart.py", "test_the_next_daemon_finds_what_this_one_has_computed"),
    ],
    "PS-03": [  # index of one save, payload of another
        ("cache/test_sessions.py", "test_a_kill_in_a_second_save_leaves_the_first_or_the_second_whole"),
        ("e2e/test_cache_on_disk.py", "test_a_kill_between_two_saves_leaves_one_of_them_whole"),
    ],
    "PS-05": [  # disk full during block writes
        ("cache/test_real_disks.py", "test_a_small_disk_that_fills_up_pauses_the_tier_and_one_that_grows_ends_that"),
        ("cache/test_ssd_faults.py", "test_a_full_disk_pauses_the_tier_and_old_blocks_still_hit"),
    ],
    "PS-07": [  # a directory that cannot be written at the start
        ("cache/test_real_disks.py", "test_a_read_only_disk_is_said_and_its_files_answer_nobody"),
        ("e2e/test_cache_on_disk.py", "test_without_its_directory_the_daemon_serves_and_says_so"),
    ],
    "PS-09": [  # weights replaced under the same name
        ("e2e/test_cache_on_disk.py", "test_weights_replaced_under_the_same_name_size_and_time_find_nothing"),
    ],
    "PS-11": [  # files of an older format
        ("cache/test_ssd_faults.py", "test_files_of_another_schema_are_inside_the_cap_and_go_first"),
    ],
    "PS-13": [  # keys that differ in the next process
        ("e2e/test_cache_on_disk.py", "test_keys_are_the_same_whatever_the_processs_hash_seed"),
    ],
    "PS-15": [  # a cap that is ignored after a model switch
        ("cache/test_ssd_faults.py", "test_one_cap_holds_for_all_models_and_what_was_used_last_stays"),
    ],
    "PS-17": [  # very many files
        ("cache/test_real_disks.py", "test_very_many_files_are_opened_neither_at_a_start_nor_for_another_model"),
        ("cache/test_ssd_faults.py", "test_a_start_opens_no_block_file_and_neither_does_a_second_model"),
    ],
    "PS-19": [  # a stop drops what was most recent
        ("cache/test_ssd_faults.py", "test_a_full_queue_loses_nothing_that_memory_still_has"),
        ("cache/test_ssd_faults.py", "test_a_stop_without_time_says_how_much_it_dropped"),
        ("e2e/test_cache_on_disk.py", "test_a_stop_writes_what_no_write_queue_has_room_for"),
    ],
    "PS-21": [  # restored by name, computed all the same
        ("e2e/test_sessions.py", "test_a_session_outlives_the_daemon_and_goes_on_with_each_answer"),
        ("e2e/test_cache_on_disk.py", "test_after_a_restore_only_the_new_words_are_computed"),
    ],
    "PS-23": [  # a failed restore damages later requests
        ("e2e/test_cache_on_disk.py", "test_a_session_whose_blocks_are_spoilt_spoils_nothing_else"),
        ("e2e/test_sessions.py", "test_an_untrusted_file_is_refused_and_spoils_nothing"),
    ],
    "PS-25": [("e2e/test_sessions.py", "test_a_name_that_could_be_a_path_is_refused")],  # names that are paths
    "PS-27": [  # torn settings become defaults
        ("daemon/test_settings.py", "test_a_torn_file_is_an_error_and_stays_for_its_owner_to_see"),
        ("daemon/test_settings_file.py", "test_a_writer_killed_at_any_moment_leaves_a_whole_file_and_no_lock"),
    ],
    "PS-28": [  # two writers, an empty file, unknown keys
        ("daemon/test_settings_file.py", "test_two_writers_lose_neither_value"),
        ("daemon/test_settings_file.py", "test_an_empty_file_can_be_set"),
        ("daemon/test_settings_file.py", "test_a_key_is_set_and_comments_and_unknown_keys_stay"),
    ],
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", SHOWN_BY)
def test_a_case_of_topic_b_has_its_tests(case: str) -> None:
    for file, name in SHOWN_BY[case]:
        assert name in names_in(file), f"{case} is to be shown by {name} in {file}"
