"""Losses by name, one family a file; the registry imports every file that lies here."""
