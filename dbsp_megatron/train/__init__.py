"""Flow-matching training under sequence parallelism; `dbsp-train` is the command."""
