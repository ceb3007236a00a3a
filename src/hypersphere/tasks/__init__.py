"""Tasks beyond images of classes: each is a folder with its data, models, evaluation, figures and commands.

The registries of data sets, models, evaluations and figures find the members of every folder here by the name of the
module (``data``, ``models``, ``evaluation``, ``figures``) when they are first looked up, so that a new task is a new
folder.
"""
