"""Faces: data sets and lists of pairs, alignment, networks, LFW while a network is trained, and pages of verifications.

What verification and identification measure is in :mod:`hypersphere.metrics`, galleries are in :mod:`hypersphere.runs`.
"""

COMMANDS = {
    "embed": ("commands:embed", "Write the features of images to a file, with their names and people."),
    "verify": (
        "commands:verify",
        "Judge pairs of images, same person or not: accuracy, error rates and a calibrated threshold, with intervals.",
    ),
    "identify": (
        "commands:identify",
        "Look for probes among known people: how often the right one is first, and whether unknown people are refused.",
    ),
    "gallery": ("commands:gallery_app", "Keep a file of people: add and remove them, and ask who is on an image."),
}
"""Where a command is defined, a function or a group, and the line that describes it."""
