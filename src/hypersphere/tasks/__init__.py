"""Tasks beyond images of classes: each is a folder with its data, models, evaluation, figures, commands and recipes.

What a folder has is found by the name of the module when it is first looked up, so that a new task is a new folder and
nothing else is edited: ``data``, ``models``, ``evaluation`` and ``figures`` register members, files of ``recipes/`` are
recipes, and commands are listed in ``COMMANDS`` of the folder's ``__init__``. Tasks stand above everything else and do
not import each other.
"""
