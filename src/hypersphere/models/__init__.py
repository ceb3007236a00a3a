"""Backbones by name: modules that map images ``(B, C, H, W)`` to features ``(B, dim)``."""

from hypersphere.models.networks import CifarResNet, DigitsCNN, PlainCNN, create, models

__all__ = ["CifarResNet", "DigitsCNN", "PlainCNN", "create", "models"]
