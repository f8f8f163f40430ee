"""What the terminal shows while the demo runs, and the table at the end."""

from __future__ import annotations

from rich.table import Table

from unbroken.demo.result import DemoResult
from unbroken.runs.progress import StageProgress


class Display(StageProgress):
    """The demo's stages, and its table."""

    def show(self, result: DemoResult) -> None:
        """Print the table of what was found."""
        table = Table(title="the same rollouts as sampled, and through decode, render, retokenise")
        for column in ("pipeline", "rollouts", "other ids", "off by > 20 %", "k3", "max diff"):
            table.add_column(column, justify="left" if column == "pipeline" else "right", no_wrap=True)
        rows = [("exact (ours)", result.num_compared, result.exact.share_differ, result.exact.mismatch)]
        for style, row in result.retokenized.items():
            rows.append((f"usual, {style} JSON", row.num_rollouts, row.share_differ, row.mismatch))
        for name, count, share, found in rows:
            off, k3, max_abs = f"{found.share_off_20pct:.1%}", f"{found.k3:.1e}", f"{found.max_abs:.1e}"
            table.add_row(name, str(count), f"{share:.1%}", off, k3, max_abs)
        self.console.print(table)
        self.console.print(result.honest_sentence)
        self.console.print(
            f"[bold]success at temperature 1: {result.success_before:.2f} -> {result.success_after:.2f}[/bold] "
            f"in {result.steps} GRPO steps, {result.rollouts:,} rollouts, {result.seconds:.0f} s"
        )
