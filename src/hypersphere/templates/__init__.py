"""Example files, one for each family that a recipe can name: ``hypersphere new FAMILY NAME`` copies them.

Each works as it is: loaded as a plugin it registers ``my-name``, and the commands in its first lines use it.
"""
