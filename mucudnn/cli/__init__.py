"""The command line: parses, calls, prints. What computes is loaded by the command that needs it."""

from mucudnn.cli.compare import compare_command
from mucudnn.cli.forecast import forecast_command
from mucudnn.cli.group import main
from mucudnn.cli.info import info_command
from mucudnn.cli.show import show_command
from mucudnn.cli.tune import tune_command

__all__ = ["compare_command", "forecast_command", "info_command", "main", "show_command", "tune_command"]

for _command in (tune_command, show_command, compare_command, forecast_command, info_command):
    main.add_command(_command)
