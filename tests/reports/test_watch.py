from pathlib import Path

from sbeval.reports import watch


def test_a_report_is_rebuilt_only_when_a_result_file_appears_or_grows(tmp_path: Path) -> None:
    builds: list[int] = []
    sleeps: list[float] = []
    steps = {
        1: lambda: (tmp_path / "results_1.json").write_text("{}"),
        3: lambda: (tmp_path / "results_2.json").write_text("{}"),
        5: lambda: (tmp_path / "results_2.json").write_text("{ }"),
    }

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        steps.get(len(sleeps), lambda: None)()

    def build() -> Path:
        builds.append(len(sleeps))
        return tmp_path / "index.html"

    pages = watch([tmp_path], build, interval_seconds=2.0, sleep=sleep)
    assert [next(pages) for _ in range(3)] == [tmp_path / "index.html"] * 3
    assert builds == [1, 3, 5]
    assert set(sleeps) == {2.0}
