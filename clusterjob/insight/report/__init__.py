"""One self-contained HTML page about a job: gather its data, draw it, render the page."""
