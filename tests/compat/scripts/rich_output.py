"""Tables and markup through rich.Console: ashleve/lightning-hydra-template, print_config_tree."""

import os

from rich.console import Console
from rich.table import Table

table = Table(title="config")
table.add_column("key")
table.add_column("value")
table.add_row("rank", os.environ["RANK"])
console = Console(width=60)
console.print(table)
console.print("[bold]done[/bold]")
