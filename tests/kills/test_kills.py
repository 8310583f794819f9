"""A few kills and odd surroundings; `make kills` and `make surroundings` try many, of every command."""

from pathlib import Path

import kills
import pytest
import surroundings

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("name", ["report"])
def test_a_command_killed_at_random_moments_loses_and_changes_nothing(name: str, tmp_path: Path) -> None:
    killed = kills.Kills(kills.COMMANDS[name], tmp_path / "kills", seed=1)
    killed.kill(2)
    assert killed.said == []


def test_a_disk_full_while_a_checkpoint_is_converted_leaves_nothing_half_written(tmp_path: Path) -> None:
    visited = surroundings.Surroundings(kills.COMMANDS["convert"], tmp_path / "convert", seed=0)
    visited.visit_one("full in the middle", f"{visited.writes // 2}:full", {})
    assert visited.said == []
