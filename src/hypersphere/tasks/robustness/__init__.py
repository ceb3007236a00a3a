"""Robustness: accuracy under the attacks of the core, whether it can be believed, and pictures of both."""
