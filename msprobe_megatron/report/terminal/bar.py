"""Progress bar of commands that take minutes: shown on a terminal only, removed when the command ends."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """Current part of the work, its progress and the remaining time."""

    def __init__(self) -> None:
        # Benches redirect sys.stderr while they train; the bar stays on the terminal it was opened on.
        self._console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            # No refresh thread: its time would count in what is measured.
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._part = ""
        self._task = self._bar.add_task("", total=None)

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show progress; a new part of the work, named before the colon, starts a new bar."""
        part = text.partition(":")[0]
        if part != self._part:
            self._part = part
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=None if share is None else 1.0)
        self._bar.update(self._task, description=text, completed=share or 0.0, refresh=True)

    def __enter__(self) -> Bar:
        """Start the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._bar.stop()
