"""Numbers and tables for people."""

import pytest

from omlxd.cli.tables import size, span, table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_000_000, "98 MB"), (999_600, "1 MB"), (1_500_000_000, "1.5 GB"),
     (123_000_000_000, "123 GB"), (4_200_000_000_000_000, "4200 TB")],
)  # fmt: skip
def test_bytes_stand_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0.4, "0s"), (42, "42s"), (185, "3m 5s"), (7800, "2h 10m"), (349_200, "4d 1h")]
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_columns_are_as_wide_as_their_longest_cell_and_lines_do_not_end_in_spaces() -> None:
    assert table(["NAME", "X"], [["a", ""], ["longer", "1"]]) == "NAME    X\na\nlonger  1"
