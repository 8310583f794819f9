"""One progress bar over all stages of a command, in place of a bar for each stage."""

import contextlib
import sys
from collections.abc import Iterator, Mapping

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
_shown: list["OneBar"] = []


class OneBar:
    """A progress bar over several stages, each of which takes a known share of the time.

    Args:
        shares: the share of each stage by its name, in any unit.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        # no smoothing: stages differ in speed, so the speed of the last moments would give a wrong estimate
        self._bar = tqdm(total=1.0, bar_format=_FORMAT, smoothing=0.0)
        self._stage_share = 0.0
        self._stage_end = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside this context, `advance` moves the bar within a stage's share; afterwards the stage is complete."""
        self._bar.set_description_str(name)
        self._stage_share = self._shares[name]
        self._stage_end = min(self._bar.n + self._stage_share, 1.0)
        yield
        self._to(self._stage_end)

    def advance(self, share: float) -> None:
        """Moves the bar by a share of the current stage, at most to the end of the stage."""
        self._to(min(self._bar.n + share * self._stage_share, self._stage_end))

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def _to(self, place: float) -> None:
        self._bar.update(place - self._bar.n)


@contextlib.contextmanager
def one_bar(shares: Mapping[str, float]) -> Iterator[OneBar]:
    """Shows one bar until the block ends; the bars of scoring then advance it instead of showing themselves.

    Lines that are printed to stdout inside the block appear above the bar.
    """
    bar = OneBar(shares)
    _shown.append(bar)
    try:
        with contextlib.redirect_stdout(DummyTqdmFile(sys.stdout)):
            yield bar
    finally:
        _shown.pop()
        bar.close()


def shown_bar() -> OneBar | None:
    """Returns the bar of the enclosing `one_bar`, None outside of any."""
    return _shown[-1] if _shown else None
