"""Robustness: accuracy under the attacks of the core, whether it can be believed, and pictures of both."""

COMMANDS = {
    "attack": (
        "commands:attack_run",
        "Attack the model of a run: accuracy under attack, and whether it can be believed.",
    ),
}
"""Where a command is defined, a function or a group, and the line that describes it."""
